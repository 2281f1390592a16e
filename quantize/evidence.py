"""Which tensors must not be uint8: each one is quantized alone, and the model's outputs tell."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from ..calibration.samples import Sample
from ..transforms.qparams import QParams
from .accuracy import decibels
from .switch_graph import Switch
from .switchboard import noises, tensor_switches

# A tensor ruins a model when it alone leaves less than RUIN_DB at an output and stands out from the others: the
# tensors of a network that is merely hard to quantize are all alike, and none of them is worth a float unit.
RUIN_DB = 20.0
STANDS_OUT_DB = 10.0


def ruinous(sqnr_db: Mapping[str, float], least: float = RUIN_DB) -> dict[str, str]:
    """Return the tensors that must stay float, with the reason, from the SQNR that each alone leaves.

    Args:
        sqnr_db: By tensor, in dB.
        least: With so much or more no tensor ruins anything, in dB.
    """

    def limit(name: str) -> float:
        others = [value for other, value in sqnr_db.items() if other != name]
        return min(least, statistics.median(others) - STANDS_OUT_DB) if others else least

    return {
        name: f"in uint8 {name!r} alone leaves {value:.1f} dB at an output"
        for name, value in sqnr_db.items()
        if value < limit(name)
    }


def alone(
    model: ir.Model,
    qparams: Mapping[str, QParams],
    samples: Sequence[Sample],
    *,
    optimize: bool = True,
    seconds: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Return the least SQNR, in dB, of the float outputs when one tensor at a time goes through uint8.

    One session serves all tensors.

    Args:
        model: A float model.
        qparams: uint8 scale and zero point of each tensor to try.
        samples: A few samples; tensors times samples inferences are made.
        optimize: Whether the runtime may rewrite the graph, see `tensor_switches`.
        seconds: About how long it may take: of the samples, fewer are tried. Where one alone takes longer, nothing is.
        progress: Called with how many tensors are done, and how many there are.

    Returns:
        In dB, by tensor; empty where `seconds` are too few.

    Raises:
        RequantError: The model fails on a sample.
    """
    board = tensor_switches(model, qparams, optimize=optimize)
    if not board.outputs:
        return dict.fromkeys(qparams, math.inf)
    if qparams and seconds < math.inf:
        board.run(samples[0].feed)  # the first run plans the memory
        start = time.perf_counter()
        board.run(samples[0].feed)
        each = len(qparams) * (time.perf_counter() - start)
        if each > seconds:
            return {}
        samples = samples[: max(1, int(min(seconds / each, len(samples))))] if each > 0 else samples
    found = {}
    trials = ({Switch("", name)} for name in qparams)
    for name, outputs in zip(qparams, noises(board, trials, samples), strict=True):
        found[name] = min(decibels(*sums) for sums in outputs.values())
        if progress is not None:
            progress(len(found), len(qparams))
    return found

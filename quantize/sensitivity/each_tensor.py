"""Find the error of each tensor in uint8 and of the weights of each unit in int8: each is rounded alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir

from ...calibration.data.samples import Sample
from ...transforms.graphs.queries import nodes_by_name
from ..accuracy.probabilities import probability_outputs
from ..accuracy.sqnr import decibels
from .segments import Segment, segments
from .switch_graph import Rounding, Switch
from .switch_model import Constants, Switchboard, constant_switches, noises, tensor_switches

# A tensor ruins a model if it alone leaves less than RUIN_DB at an output, and STANDS_OUT_DB less than the median of
# the others. In a network that is hard to quantize all tensors are alike, and none of them is worth a float unit.
RUIN_DB = 20.0
STANDS_OUT_DB = 10.0

TOGETHER = 2**26  # bytes of weights whose integers are tried in one session
COPIES = 4  # of these weights: three in the session, and the constants that are put into it
Opened: TypeAlias = tuple[Switchboard, Mapping[str, Switch]]
"""A model with switches, and the switch of each tensor."""


@dataclass(frozen=True, slots=True)
class Integers:
    """The weights in integers that `sqnr_by_weight` tries.

    Attributes:
        made: Computes the dequantized constants of some nodes, by name and index of the input.
        together: The most bytes of float weights that are tried in one session; a larger one is alone.
    """

    made: Callable[[Collection[str]], Constants]
    together: int = TOGETHER

    @classmethod
    def within(cls, made: Callable[[Collection[str]], Constants], limit: int | None) -> Integers:
        """Return weights of which so many are tried in one session as a limit of memory allows, in bytes."""
        return cls(made, TOGETHER if limit is None else min(TOGETHER, limit // COPIES))


def ruinous(sqnr_db: Mapping[str, float], least: float = RUIN_DB) -> dict[str, str]:
    """Return the tensors that must stay float, with the reason, from the SQNR that each alone leaves.

    Args:
        sqnr_db: By tensor, in dB.
        least: A tensor that leaves at least this SQNR, in dB, may be uint8.
    """
    medians = _medians_of_others(sqnr_db)
    return {
        name: f"in uint8 {name!r} alone leaves {value:.1f} dB at an output"
        for name, value in sqnr_db.items()
        if value < min(least, medians.get(name, math.inf) - STANDS_OUT_DB)
    }


def _medians_of_others(values: Mapping[str, float]) -> dict[str, float]:
    """Return the median of the other values for each value; empty for fewer than two values."""
    names, count = sorted(values, key=values.__getitem__), len(values)
    ordered = [values[name] for name in names]

    def other(gone: int, place: int) -> float:
        return ordered[place if place < gone else place + 1]

    places = ((count - 2) // 2, (count - 1) // 2)  # the middle of the others: one place, or two
    return {name: sum(other(gone, each) for each in places) / 2 for gone, name in enumerate(names) if count > 1}


def sqnr_by_tensor(
    model: ir.Model,
    qparams: Mapping[str, Rounding],
    samples: Sequence[Sample],
    *,
    readers: Collection[str] | None = None,
    optimize: bool = True,
    runs: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Return the SQNR, in dB, of the worst float output with one tensor at a time in uint8.

    One session serves all tensors of a segment of the model (`segments`).

    Args:
        model: A float model.
        qparams: How each tensor to try is rounded.
        samples: A few samples; the number of inferences is tensors times samples.
        readers: The names of the nodes that read the rounded tensors; None for all.
        optimize: Whether the runtime may rewrite the graph, see `tensor_switches`.
        runs: The limit of inferences. It reduces the samples; if one sample takes more, no tensor is tried.
        progress: Called with the number of finished tensors, and the number of tensors.

    Returns:
        In dB, by tensor; empty if `runs` is too small.

    Raises:
        RequantError: The model fails on a sample.
    """

    def opened(segment: Segment) -> Iterator[Opened]:
        chosen = {name: qparams[name] for name in segment.tensors}
        switches = {name: Switch("", name) for name in segment.tensors}
        yield tensor_switches(segment.model, chosen, readers=readers, optimize=optimize), switches

    return _each(model, tuple(qparams), samples, opened, runs, progress)


def sqnr_by_weight(
    model: ir.Model,
    sizes: Mapping[str, int],
    samples: Sequence[Sample],
    integers: Integers,
    *,
    optimize: bool = True,
    runs: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Return the SQNR, in dB, of the worst float output with the weights of one node at a time in integers.

    A session has its weights several times: one serves nodes with at most `integers.together` bytes, or a single node.

    Args:
        model: A float model.
        sizes: The bytes of the float weights of each node to try, by its name.
        samples: As for `sqnr_by_tensor`.
        integers: Their weights in integers.
        optimize: As for `sqnr_by_tensor`.
        runs: As for `sqnr_by_tensor`.
        progress: As for `sqnr_by_tensor`, with nodes in place of tensors.

    Returns:
        In dB, by node; empty if `runs` is too small.

    Raises:
        RequantError: The model fails on a sample.
    """
    nodes = nodes_by_name(model)
    node_of = {next(str(each.name) for each in nodes[name].outputs if each.name): name for name in sizes}

    def opened(segment: Segment) -> Iterator[Opened]:
        for tensors in _within(segment.tensors, lambda tensor: sizes[node_of[tensor]], integers.together):
            switches = {tensor: Switch(node_of[tensor], "") for tensor in tensors}
            constants = integers.made([node_of[tensor] for tensor in tensors])
            yield constant_switches(segment.model, constants, optimize=optimize), switches

    found = _each(model, tuple(node_of), samples, opened, runs, progress)
    return {node_of[tensor]: value for tensor, value in found.items()}


def _within(names: Iterable[str], size: Callable[[str], int], most: int) -> Iterator[list[str]]:
    """Yield names in order, in groups whose sizes add up to at most `most`; a larger one is alone."""
    group: list[str] = []
    total = 0
    for name in names:
        if group and total + size(name) > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size(name)
    if group:
        yield group


def _each(
    model: ir.Model,
    tensors: Collection[str],
    samples: Sequence[Sample],
    opened: Callable[[Segment], Iterator[Opened]],
    runs: float,
    progress: Callable[[int, int], None] | None,
) -> dict[str, float]:
    """Return the SQNR, in dB by tensor, with one switch at a time on.

    Args:
        model: A float model.
        tensors: The tensors.
        samples: As for `sqnr_by_tensor`.
        opened: Opens the sessions of a segment, one after the other.
        runs: As for `sqnr_by_tensor`.
        progress: As for `sqnr_by_tensor`.
    """
    if len(tensors) > runs:
        return {}
    if tensors and runs < len(tensors) * len(samples):
        samples = samples[: int(runs // len(tensors))]
    found: dict[str, float] = {}
    probable = probability_outputs(model)  # a segment may begin behind what writes them
    for segment in segments(model, tensors, samples):
        for board, switches in opened(segment):
            if not board.outputs:
                found |= dict.fromkeys(switches, math.inf)
                continue
            trials = ({switch} for switch in switches.values())
            results = noises(board, trials, segment.samples, probabilities=probable)
            for name, outputs in zip(switches, results, strict=True):
                found[name] = min(decibels(*sums) for sums in outputs.values())
                if progress is not None:
                    progress(len(found), len(tensors))
            del board  # before the next session opens
    return {name: found[name] for name in tensors}

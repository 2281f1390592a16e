"""The efforts for accuracy, and the corrections of each effort."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ... import UnknownNameError


@dataclass(frozen=True, slots=True)
class Effort:
    """An amount of work for accuracy.

    Attributes:
        summary: Its work, in a line.
        rule: The default range rule.
        seconds: The estimated time limit for trials of single tensors, by built-in costs; 0: trials only if the INT8
            model has ruined outputs.
        retry: The estimated time limit for such trials, by built-in costs, where the outputs are ruined or the promise
            of accuracy is missed, and nothing is known of single tensors; longer trials are left out.
        operations: The estimated limit of multiplications for learned rounding; weights beyond it are rounded to
            nearest. It is not in seconds, so that every machine makes the same model.
        least_db: An outlier among the tensors stays float if it alone leaves less SQNR than this, in dB.
        exchange: The noise of a plan costs this many times its relative error, as a share of the run time of the float
            model. The relative error is the amplitude of the noise over the amplitude of the signal.
    """

    summary: str
    rule: str
    seconds: float
    retry: float
    operations: float
    least_db: float
    exchange: float


EFFORTS: Mapping[str, Effort] = {
    "low": Effort(
        "minmax ranges; bias correction; single tensors tried only if the outputs are ruined", "minmax", 0, 20, 0, 20, 0
    ),
    "medium": Effort(
        "best rule per tensor; single tensors tried; weights and biases layer by layer", "auto", 20, 300, 2e12, 26, 1
    ),
    "high": Effort("as medium, for more of the model, and noise counts more", "auto", 120, 300, 1e14, 32, 10),
}
"""By name."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A step that makes an INT8 model more accurate.

    Attributes:
        summary: Its work, in a line.
        efforts: The efforts that include it.
    """

    summary: str
    efforts: tuple[str, ...]


CORRECTIONS: Mapping[str, Correction] = {
    "results": Correction(
        "ranges of inputs of activation functions, by the error of the function's output", ("medium", "high")
    ),
    "norms": Correction("channels scaled in front of instance norms, so that each has all steps", tuple(EFFORTS)),
    "parts": Correction("channels scaled in front of Concats of unequal parts, so that all have steps", tuple(EFFORTS)),
    "equalize": Correction("channels scaled between layers, so that ranges lose few steps", ("high",)),
    "means": Correction("biases corrected for the error of rounded weights on mean inputs", tuple(EFFORTS)),
    "bias": Correction("biases corrected layer by layer, on outputs of the integer layers", ("medium", "high")),
    "rounding": Correction("weights rounded up or down for the least error of the layer", ("medium", "high")),
}
"""By name, in the order of execution."""


ADJUSTING = frozenset({"bias", "rounding"})
"""The corrections that go through the model layer by layer."""


def chosen(effort: str, named: tuple[str, ...] | None) -> frozenset[str]:
    """Return the named corrections, or the corrections of an effort.

    Raises:
        UnknownNameError: A correction does not exist.
    """
    if named is None:
        return frozenset(name for name, row in CORRECTIONS.items() if effort in row.efforts)
    for name in named:
        if name not in CORRECTIONS:
            raise UnknownNameError("correction", name, CORRECTIONS)
    return frozenset(named)

"""What makes an INT8 model more accurate after it is decided what is int8, and which effort takes which of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ... import UnknownNameError


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is done for accuracy.

    Attributes:
        summary: What it does, in a line.
        rule: The range rule, where none is asked for.
        seconds: About how long it may be looked what each tensor alone does to the outputs, by built-in costs; 0 for
            only where a model comes out ruined.
        operations: About how many multiplications learned rounding may make; what is over is rounded plainly. Not
            seconds, so that the same model comes out everywhere.
        least_db: A tensor that alone leaves less, and stands out, stays float, in dB.
        exchange: The share of the float model's run time that all noise together is worth.
    """

    summary: str
    rule: str
    seconds: float
    operations: float
    least_db: float
    exchange: float


EFFORTS: Mapping[str, Effort] = {
    "low": Effort(
        "minmax ranges, biases by mean inputs; tensors alone where the model comes out ruined", "minmax", 0, 0, 20, 0
    ),
    "medium": Effort(
        "the best rule per tensor; each tensor alone; weights and biases layer by layer", "auto", 20, 2e12, 26, 0.02
    ),
    "high": Effort("as medium, on more of the model, and noise counts more against speed", "auto", 120, 1e14, 32, 0.2),
}
"""By name."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A way to make an INT8 model more accurate.

    Attributes:
        summary: What it does, in a line.
        efforts: The efforts that it is a part of.
    """

    summary: str
    efforts: tuple[str, ...]


CORRECTIONS: Mapping[str, Correction] = {
    "results": Correction(
        "ranges of what only an activation function reads, by the error of its result", ("medium", "high")
    ),
    "equalize": Correction("channels scaled between layers, so that all channels use the steps of a range", ("high",)),
    "means": Correction("biases by what rounded weights take from the mean input of each channel", tuple(EFFORTS)),
    "bias": Correction("biases layer by layer, on what the integer layers before give", ("medium", "high")),
    "rounding": Correction("weights rounded up or down by what is best for the layer's result", ("medium", "high")),
}
"""By name, in the order in which they are done."""


ADJUSTING = frozenset({"bias", "rounding"})
"""Those that go through the model layer by layer."""


def chosen(effort: str, named: tuple[str, ...] | None) -> frozenset[str]:
    """Return the corrections of an effort, or those that are named.

    Raises:
        UnknownNameError: There is no such correction.
    """
    if named is None:
        return frozenset(name for name, row in CORRECTIONS.items() if effort in row.efforts)
    for name in named:
        if name not in CORRECTIONS:
            raise UnknownNameError("correction", name, CORRECTIONS)
    return frozenset(named)

"""Outputs of a Sigmoid: which of their values are above 0.5 in both models.

A program that finds notes, events or several labels takes the values above a threshold. An SQNR says little of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ...calibration.model.session import Array
from .probabilities import KEEPS, comes_from

HALF = 0.5


@dataclass(frozen=True, slots=True)
class AboveHalf:
    """Counts of the values of an output above `HALF`.

    Attributes:
        both: Values that are above it in both models.
        lost: Values that are above it in the float model alone.
        new: Values that are above it in the INT8 model alone.
    """

    both: int = 0
    lost: int = 0
    new: int = 0

    def with_sample(self, exact: Array, other: Array) -> AboveHalf:
        """Return the counts with one more sample added; INT8 values of another shape do not count."""
        above = exact > HALF
        count = int(above.sum())
        if exact.shape != other.shape:
            return AboveHalf(self.both, self.lost + count, self.new)
        after = other > HALF
        both = int((above & after).sum())
        return AboveHalf(self.both + both, self.lost + count - both, self.new + int(after.sum()) - both)

    @property
    def f1(self) -> float | None:
        """The F1 of the INT8 model's values above 0.5 against those of the float model, 0..1; None without any."""
        total = 2 * self.both + self.lost + self.new
        return 2 * self.both / total if total else None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"both": self.both, "lost": self.lost, "new": self.new, "f1": self.f1}


def sigmoid_outputs(model: ir.Model) -> frozenset[str]:
    """Return the outputs whose values a Sigmoid writes, also behind operators that move, join or convert them."""
    return frozenset(str(output.name) for output in model.graph.outputs if comes_from(output, _is_sigmoid, KEEPS))


def _is_sigmoid(value: ir.Value) -> bool:
    """Return whether a Sigmoid writes a tensor."""
    node = value.producer()
    return node is not None and node.op_type == "Sigmoid"

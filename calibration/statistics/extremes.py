"""The smallest and the largest value of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...system.given import check_kind
from ..model.session import Array


@dataclass(frozen=True, slots=True)
class MinMax:
    """The smallest and the largest value of a set of values. ``of(a) | of(b) == of(concatenate(a, b))``, bit for bit.

    Attributes:
        lo: The smallest value.
        hi: The largest value.
        count: The number of values, at least 1.
    """

    lo: float
    hi: float
    count: int

    def __post_init__(self) -> None:
        """Check the invariants.

        Raises:
            ValueError: A value is not finite, `lo` is above `hi`, or `count` is below 1.
        """
        check_extremes(self.lo, self.hi)
        if self.count < 1:
            raise ValueError("nothing was counted")

    @classmethod
    def of(cls, values: Array) -> MinMax:
        """Return the extremes of a float array of any shape.

        Raises:
            ValueError: The array is empty, or a value is not finite.
        """
        lo, hi = extremes_of(values)
        return cls(lo, hi, values.size)

    def __or__(self, other: MinMax) -> MinMax:
        """Return the extremes of both sets of values."""
        if not isinstance(other, MinMax):
            return NotImplemented
        return MinMax(min(self.lo, other.lo), max(self.hi, other.hi), self.count + other.count)


def check_array(values: object) -> None:
    """Refuse what is no array, such as a list.

    Raises:
        RequantError: It is none.
    """
    check_kind(values, (np.ndarray, np.generic), "values must be a NumPy array")


def extremes_of(values: Array) -> tuple[float, float]:
    """Return the smallest and the largest value of a float array.

    Raises:
        ValueError: The array is empty, or a value is not finite.
        RequantError: It is no array.
    """
    check_array(values)
    if values.size == 0:
        raise ValueError("has no values")
    # + 0.0 turns -0.0 into 0.0: `min` returns one or the other, depending on the order of the data.
    lo, hi = float(values.min()) + 0.0, float(values.max()) + 0.0
    check_extremes(lo, hi)
    return lo, hi


def check_extremes(lo: float, hi: float) -> None:
    """Check the extremes of finite values.

    Raises:
        ValueError: An extreme is not finite, or `lo` is above `hi`.
    """
    if not (math.isfinite(lo) and math.isfinite(hi)):
        raise ValueError("holds NaN or infinity")
    if lo > hi:
        raise ValueError("the smallest value is above the largest")

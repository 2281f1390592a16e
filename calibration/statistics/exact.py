"""Sums of floats without rounding, so that order and grouping do not change a sum.

A sum is stored in fixed point over the whole range of float64, as digits of base 2**32. Addition of integers is
associative. This is the long accumulator of Kulisch and Miranker (Computer Arithmetic in Theory and Practice, 1981),
stored sparsely, for a whole array at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..model.session import Array
from .extremes import check_array

BITS = 32
HALF = 1 << (BITS - 1)
MANTISSA = 53
LOW = 27
"""Bits of the lower part of a mantissa. Both parts stay below 2**59 after a shift by less than one digit."""


@dataclass(frozen=True, slots=True, eq=False)
class ExactSum:
    """The sum of float64 arrays of one shape.

    Attributes:
        shape: The shape of the arrays.
        digits: Arrays of int64, one per power k: the sum is ``sum(digits[k] * 2**(32 * k))``. Digits are in
            ``[-2**31, 2**31)``, and no array is all zero, so that equal sums have equal digits.
    """

    shape: tuple[int, ...]
    digits: Mapping[int, Array]

    @classmethod
    def of(cls, values: Array) -> ExactSum:
        """Sum float64 values of shape (N, ...) over their first axis.

        Raises:
            ValueError: A value is not finite, or N is 2**29 or more.
        """
        check_array(values)
        if not np.isfinite(values).all():
            raise ValueError("holds NaN or infinity")
        if len(values) >= 1 << 29:
            raise ValueError("too many values for one step")
        fraction, exponent = np.frexp(values.astype(np.float64, copy=False))
        mantissa = np.ldexp(fraction, MANTISSA).astype(np.int64)
        place = exponent.astype(np.int64) - MANTISSA
        digits: dict[int, Array] = {}
        high = mantissa >> LOW
        for part, at in ((mantissa - (high << LOW), place), (high, place + LOW)):
            power = at // BITS
            moved = part << (at - power * BITS)
            above = moved >> BITS
            for k in np.unique(power).tolist():
                here = power == k
                for digit, value in ((k, moved - (above << BITS)), (k + 1, above)):
                    total = np.where(here, value, 0).sum(axis=0, dtype=np.int64)
                    digits[digit] = digits[digit] + total if digit in digits else total
        return cls(values.shape[1:], _carried(digits))

    def parts(self) -> list[ExactSum]:
        """Return a sum for each entry of the first axis. One large sum is faster than many small ones."""
        return [
            ExactSum(self.shape[1:], {k: digit[index] for k, digit in self.digits.items() if digit[index].any()})
            for index in range(self.shape[0])
        ]

    def __or__(self, other: ExactSum) -> ExactSum:
        """Add two sums.

        Raises:
            ValueError: The shapes differ.
        """
        if not isinstance(other, ExactSum):
            return NotImplemented
        if self.shape != other.shape:
            raise ValueError(f"has shape {other.shape}, but had {self.shape}")
        digits = dict(self.digits)
        for k, digit in other.digits.items():
            digits[k] = digits[k] + digit if k in digits else digit
        return ExactSum(self.shape, _carried(digits))

    def __eq__(self, other: object) -> bool:
        """Whether both sums are equal."""
        if not isinstance(other, ExactSum):
            return NotImplemented
        same = self.shape == other.shape and self.digits.keys() == other.digits.keys()
        return same and all(np.array_equal(digit, other.digits[k]) for k, digit in self.digits.items())

    def __hash__(self) -> int:
        """Return a hash that agrees with ``==``."""
        return hash((self.shape, tuple((k, self.digits[k].tobytes()) for k in sorted(self.digits))))

    @property
    def value(self) -> Array:
        """The sum as float64, accurate to two units in the last place; infinite if it overflows float64."""
        total = np.zeros(self.shape)
        with np.errstate(over="ignore"):
            for k in sorted(self.digits):  # smallest first, for accuracy
                total = total + np.ldexp(self.digits[k].astype(np.float64), BITS * k)
        return np.asarray(total)


def _carried(digits: Mapping[int, Array]) -> dict[int, Array]:
    """Carry digits into ``[-2**31, 2**31)``; such balanced digits are unique for sums of either sign."""
    carried: dict[int, Array] = {}
    due = dict(digits)
    while due:
        k = min(due)
        digit = due.pop(k)
        carry = (digit + HALF) >> BITS
        rest = np.asarray(digit - (carry << BITS))
        if rest.any():
            carried[k] = rest
        if carry.any():
            due[k + 1] = due[k + 1] + carry if k + 1 in due else carry
    return carried

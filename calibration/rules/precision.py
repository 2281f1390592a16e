"""The integer type of a quantized tensor, and the scale and zero point of a range."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import RequantError
from ...system.given import normalise_fields
from ...system.numbers import FLOAT_MAX
from ..model.session import Array

"""The largest float32."""
TINY = np.finfo(np.float32).tiny
"""The smallest normal float32: the smallest scale that float32 can divide by. Below it, the scale is 1."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The integer type of a quantized tensor.

    Attributes:
        bits: The width of the integers, 2 to 16.
        symmetric: Whether the zero point is the middle of the type for ranges that contain negative values.
    """

    bits: int = 8
    symmetric: bool = False

    def __post_init__(self) -> None:
        """Check the width.

        Raises:
            RequantError: A value is of another type, or the width is not between 2 and 16.
        """
        normalise_fields(self)
        if not 2 <= self.bits <= 16:
            raise RequantError(f"{self.bits} bits; a quantized tensor has 2 to 16 bits")

    @property
    def top(self) -> int:
        """The largest unsigned integer; the smallest is 0."""
        return (1 << self.bits) - 1

    def params(self, lo: float, hi: float) -> tuple[float, int]:
        """Return the scale and the unsigned zero point of a range.

        >>> Precision().params(0.0, 6.0)[1], Precision(symmetric=True).params(-1.0, 254.0)
        (0, (2.0, 128))
        """
        scale, zero = self.grids(np.array([lo]), np.array([hi]))
        return float(scale[0]), int(zero[0])

    def grids(self, lo: Array, hi: Array) -> tuple[Array, Array]:
        """Return the scales, (n,) float32, and the unsigned zero points, (n,) int64, of n ranges.

        Every range is extended to contain zero, so that zero is exact. The arithmetic is float32 and has the same
        operations as the quantizer. Ends beyond float32 are clipped.

        Args:
            lo: Lower ends, (n,) float64.
            hi: Upper ends, (n,) float64.
        """
        low = np.maximum(np.minimum(lo, 0.0), -FLOAT_MAX).astype(np.float32)
        high = np.minimum(np.maximum(hi, 0.0), FLOAT_MAX).astype(np.float32)
        top, middle = np.float32(self.top), 2 ** (self.bits - 1)
        scale = _at_least_tiny(high / top - low / top)
        zero = np.minimum(np.rint(-low / scale), self.top).astype(np.int64)
        if self.symmetric:
            centred = lo < 0
            even = _at_least_tiny(np.maximum(-low, high) / np.float32(middle - 1))
            scale, zero = np.where(centred, even, scale), np.where(centred, middle, zero)
        return scale, zero


def _at_least_tiny(step: Array) -> Array:
    """Return the steps, with 1 in place of steps that float32 cannot divide by."""
    return np.where(step < TINY, np.float32(1), step)

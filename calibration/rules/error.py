"""The expected mean squared error of quantization with a range, computed from a histogram."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...system.given import check_kind
from ..model.session import Array
from ..statistics.histogram import Histogram
from .precision import Precision

WORK = 1 << 14
"""The number of elements of a temporary array. 128 KiB fit in the cache."""
LARGEST = 400
"""Values are scaled up by at most 2**400, and steps are at least 2**-400 in that unit, so that no square overflows."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of a histogram without exact zeros, spread evenly over adjacent pieces.

    Attributes:
        edges: The edges of the pieces in units of ``2**exponent``, (pieces + 1,) float64, between -1 and 1.
        counts: Values per piece, (pieces,) float64; zero for the gap between two bins.
        exponent: The binary logarithm of the unit.
        total: The number of values, zeros included.
    """

    edges: Array
    counts: Array
    exponent: int
    total: int

    @classmethod
    def of(cls, histogram: Histogram) -> Spread:
        """Return the values of a histogram."""
        counts = smooth_counts(histogram)
        exponent = max(math.frexp(max(-histogram.lo, histogram.hi))[1], -LARGEST)
        filled = np.concatenate([[False], counts > 0, [False]])
        kept = filled[1:] | filled[:-1]  # drop edges between two empty bins
        edges = np.ldexp(histogram.edges[kept], -exponent)
        return cls(edges, counts[np.flatnonzero(kept)[:-1]], exponent, histogram.count)


def smooth_counts(histogram: Histogram) -> Array:
    """Return the counts, (bins,) float64, without the estimated number of exact zeros in the bin ``[0, width)``.

    Half of the outputs of a Relu are exactly zero, and the quantization of zero has no error. The estimate assumes a
    smooth density: the bin holds at least as many other values as the next bin on either side, and at least as many as
    two bins on one side extrapolate to as a geometric sequence (as in an exponential tail). The rest of the bin counts
    as zeros.
    """
    counts = histogram.counts.astype(np.float64)
    at = -histogram.first
    if not histogram.lo <= 0.0 <= histogram.hi or counts.size == 1:
        return counts
    expected = 1.0
    for nearest, next_ in ((at + 1, at + 2), (at - 1, at - 2)):
        near, far = (float(counts[i]) if 0 <= i < counts.size else 0.0 for i in (nearest, next_))
        expected = max(expected, near, near * near / max(far, 1.0))
    counts[at] = min(counts[at], expected)
    return counts


def check_given(histogram: object, precision: object) -> None:
    """Refuse arguments of a range rule that are of another type.

    Raises:
        RequantError: There is one.
    """
    check_kind(histogram, Histogram, "a range rule takes a Histogram, as Histogram.of returns it")
    check_kind(precision, Precision, "precision must be a Precision")


def expected_error(histogram: Histogram, lo: float, hi: float, precision: Precision) -> float:
    """Return the expected mean squared error of the values if they are quantized with the range ``[lo, hi]``.

    The result is exact for values that are spread evenly inside each bin, apart from the estimated exact zeros. It is
    infinite if it exceeds float64.

    Args:
        histogram: The values.
        lo: The lower end of the range. The quantization grid always contains zero.
        hi: The upper end of the range.
        precision: The integers.

    Raises:
        RequantError: An argument is of another type.
    """
    check_given(histogram, precision)
    for name, end in (("lo", lo), ("hi", hi)):
        check_kind(end, (int, float, np.number), f"{name} must be a number")
    spread = Spread.of(histogram)
    error = errors(spread, np.array([lo]), np.array([hi]), precision)[0]
    with np.errstate(over="ignore", under="ignore"):
        return float(np.ldexp(error, 2 * spread.exponent))


def least_error(
    histogram: Histogram, ranges: Sequence[tuple[float, float]], precision: Precision
) -> tuple[float, float]:
    """Return the range with the least `expected_error`; the first of equal ranges.

    Args:
        histogram: The values.
        ranges: At least one range.
        precision: The integers.
    """
    lo, hi = np.array(ranges).T
    return ranges[int(np.argmin(errors(Spread.of(histogram), lo, hi, precision)))]


def errors(spread: Spread, lo: Array, hi: Array, precision: Precision) -> Array:
    """Return the mean squared error of each of n ranges in units of ``4**spread.exponent``, (n,) float64.

    In steps of the scale, let n(u) be the integer to which u is rounded or clipped, and r = u - n(u). The integral of
    r**2 from 0 to u is ``n / 12 + r**3 / 3``: a whole step contributes 1/12, and beyond the last integer r grows
    without bound. The mean over a piece from a to b is then ``Q / 3 + (n_b - n_a) / (b - a) * (1 / 12 - Q / 3)``, with
    ``Q = r_a**2 + r_a * r_b + r_b**2``. This form loses no digits if the piece is narrow.

    Args:
        spread: The values.
        lo: The lower ends of the ranges, (n,) float64.
        hi: The upper ends, (n,) float64.
        precision: The integers.
    """
    scales, zeros = precision.grids(lo, hi)
    step = np.maximum(np.ldexp(scales.astype(np.float64), -spread.exponent), 2.0**-LARGEST)[:, None]
    least, most = -zeros[:, None].astype(np.float64), (precision.top - zeros)[:, None].astype(np.float64)
    widths = np.diff(spread.edges)
    density = np.divide(spread.counts, widths, out=np.zeros_like(widths), where=widths > 0)
    result = np.empty(len(step))
    rows = max(1, WORK // spread.edges.size)
    for start in range(0, len(step), rows):
        part = slice(start, start + rows)
        u = spread.edges / step[part]
        whole = np.rint(u)
        np.clip(whole, least[part], most[part], out=whole)
        rest = np.subtract(u, whole, out=u)
        a, b = rest[:, :-1], rest[:, 1:]
        inside = a + b  # (a + b)**2 - a * b is Q
        inside *= inside
        inside -= a * b
        inside *= 1 / 3
        crossed = np.diff(whole, axis=1)
        crossed *= 1 / 12 - inside
        result[part] = inside @ spread.counts + (crossed @ density) * step[part, 0]
    return np.asarray(result * step[:, 0] ** 2 / spread.total)

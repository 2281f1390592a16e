"""The mean squared error that quantization with a range is to be expected to make, from a histogram alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .histogram import Histogram
from .precision import Precision
from .session import Array

WORK = 1 << 14
"""Elements of a step's temporaries, which stay in the cache (128 KiB each)."""
LARGEST = 400
"""Values are scaled up by at most 2**400, and steps are at least 2**-400 of them, so that no square overflows."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of a histogram, spread evenly over pieces that follow one another; exact zeros stand apart.

    Attributes:
        edges: Edges of the pieces in units of ``2**exponent``, (pieces + 1,) float64, between -1 and 1.
        counts: Values per piece, (pieces,) float64; zero for the gap between two bins that are not neighbours.
        exponent: The binary logarithm of the unit.
        total: How many values there are, the zeros among them.
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
        kept = filled[1:] | filled[:-1]  # an edge between two empty bins tells nothing
        edges = np.ldexp(histogram.edges[kept], -exponent)
        return cls(edges, counts[np.flatnonzero(kept)[:-1]], exponent, histogram.count)


def smooth_counts(histogram: Histogram) -> Array:
    """Return the counts, (bins,) float64, without what is taken for exact zeros in the bin ``[0, width)``.

    Half of what a Relu gives is exactly zero, and zero is quantized without error. A smooth density fills that bin as
    its neighbours lead to expect: no less than the next bin on either side, and no less than two bins continue to in a
    geometric sequence (an exponential tail is one). What is there beyond that counts as zeros.
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


def expected_error(histogram: Histogram, lo: float, hi: float, precision: Precision) -> float:
    """Return the mean squared error of the values when they are quantized with the range ``[lo, hi]``.

    Exact for values that are spread evenly inside each bin, save those that are taken for exact zeros. Infinite
    where it is beyond float64.

    Args:
        histogram: The values.
        lo: Lower end of the range; the grid holds zero all the same.
        hi: Upper end of the range.
        precision: The integers.
    """
    spread = Spread.of(histogram)
    error = errors(spread, np.array([lo]), np.array([hi]), precision)[0]
    with np.errstate(over="ignore", under="ignore"):
        return float(np.ldexp(error, 2 * spread.exponent))


def least_error(
    histogram: Histogram, ranges: Sequence[tuple[float, float]], precision: Precision
) -> tuple[float, float]:
    """Return the range whose `expected_error` is least, of equal ones the first.

    Args:
        histogram: The values.
        ranges: At least one range.
        precision: The integers.
    """
    lo, hi = np.array(ranges).T
    return ranges[int(np.argmin(errors(Spread.of(histogram), lo, hi, precision)))]


def errors(spread: Spread, lo: Array, hi: Array, precision: Precision) -> Array:
    """Return the mean squared error of each of n ranges in units of ``4**spread.exponent``, (n,) float64.

    In steps of the scale, with n(u) the integer that u is rounded or clipped to and r = u - n(u), the integral of
    r**2 from 0 to u is ``n / 12 + r**3 / 3``: a whole step holds 1/12, and beyond the last integer r just grows. The
    mean over a piece from a to b is then ``Q / 3 + (n_b - n_a) / (b - a) * (1 / 12 - Q / 3)``, with
    ``Q = r_a**2 + r_a * r_b + r_b**2``; that form loses no digits when the piece is narrow.

    Args:
        spread: The values.
        lo: Lower ends of the ranges, (n,) float64.
        hi: Upper ends, (n,) float64.
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

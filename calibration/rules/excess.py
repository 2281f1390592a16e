"""The expected error of many ranges at once, in time that grows with the levels instead of the bins.

Let n be the lowest level and s the step. The squared distance of a value x from the nearest level is
``(x - n)**2 - 2 s * sum(max(x - b, 0))`` over the borders b between the levels: each border below x replaces the
parabola of one level by that of the next level. The mean of ``max(x - b, 0)``, the excess over b, is one function of b
for all ranges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..model.session import Array
from ..statistics.histogram import MAX_BINS, Histogram
from .error import WORK, Spread, errors, smooth_counts
from .precision import Precision
from .search import Objective

SPREAD_EVENLY = 7
"""From this number of bits, a step is narrow enough to assume that its values are roughly spread evenly."""


@dataclass(frozen=True, slots=True)
class Excess:
    """The values of a histogram, spread evenly inside each bin, and their excess over a threshold.

    Positions are in bins, from the left edge of the first bin.

    Attributes:
        lo: The smallest value.
        hi: The largest value.
        starts: The start of each bin; the first starts at `lo`, (bins,) float64.
        over: The sum of the excess of all values over the start of each bin, (bins,).
        over_squared: The sum of the squared excess, (bins,).
        above: The number of values above the start of each bin, (bins,).
        density: Half of the values per width of each bin, (bins,). The excess over a threshold at distance t from the
            start of its bin is ``over - above * t + density * t**2``.
        moments: The sums of the powers 0, 1 and 2 of the values.
    """

    lo: float
    hi: float
    starts: Array
    over: Array
    over_squared: Array
    above: Array
    density: Array
    moments: tuple[float, float, float]

    @classmethod
    def of(cls, histogram: Histogram) -> Excess:
        """Return the excess of a histogram's values, without the estimated exact zeros."""
        counts = smooth_counts(histogram)
        lo, hi = (math.ldexp(end, -histogram.exponent) - histogram.first for end in (histogram.lo, histogram.hi))
        edges = np.arange(counts.size + 1.0)
        edges[0], edges[-1] = lo, hi
        starts, ends = edges[:-1], edges[1:]
        widths = ends - starts
        above = counts[::-1].cumsum()[::-1]
        over = ((above - counts / 2) * widths)[::-1].cumsum()[::-1]
        half = (over - (above / 2 - counts / 6) * widths) * widths
        over_squared = 2 * half[::-1].cumsum()[::-1]
        density = np.divide(counts, 2 * widths, out=np.zeros_like(widths), where=widths > 0)
        squares = counts @ (starts * starts + starts * ends + ends * ends) / 3
        moments = float(above[0]), float(counts @ (starts + ends) / 2), float(squares)
        return cls(lo, hi, starts, over, over_squared, above, density, moments)

    def beyond(self, first: Array, step: Array, number: int) -> Array:
        """Return the sums of the excess over equally spaced thresholds, (n,) float64.

        Args:
            first: The lowest threshold, (n,).
            step: The distance between thresholds, (n,).
            number: The number of thresholds.
        """
        below = np.clip(np.ceil((self.lo - first) / step), 0, number)  # thresholds below all values
        result = self.moments[0] * below * (self.lo - first - step * (below - 1) / 2)
        rows, numbers = max(1, WORK // number), np.arange(number, dtype=np.float64)
        for start in range(0, len(step), rows):
            part = slice(start, start + rows)
            t = numbers * step[part, None]
            t += first[part, None]
            np.clip(t, self.lo, self.hi, out=t)
            bin_ = t.astype(np.intp)
            t -= self.starts.take(bin_, mode="clip")
            sums = self.density.take(bin_, mode="clip")
            sums *= t
            sums -= self.above.take(bin_, mode="clip")
            sums *= t
            sums += self.over.take(bin_, mode="clip")
            result[part] += sums.sum(axis=1)
        return np.asarray(result)

    def squares(self, thresholds: Array) -> tuple[Array, Array]:
        """Return the sum of the squared excess and the number of values above each threshold, (n,) float64 each.

        Args:
            thresholds: Any values, (n,).
        """
        t = np.minimum(np.maximum(thresholds, self.lo), self.hi)
        bin_ = t.astype(np.intp)
        t -= self.starts.take(bin_, mode="clip")
        over, above, density = (part.take(bin_, mode="clip") for part in (self.over, self.above, self.density))
        squared = self.over_squared.take(bin_, mode="clip") - t * (2 * over - t * (above - t * density * 2 / 3))
        below = np.maximum(self.lo - thresholds, 0.0)  # the extra distance of all values
        squared += below * (2 * (over - t * (above - t * density)) + below * self.moments[0])
        return squared, above - 2 * t * density


def error_of_ranges(histogram: Histogram, precision: Precision) -> tuple[Objective, Objective]:
    """Return an exact and a rough function, each proportional to `expected_error`, that compare many ranges.

    The first function is exact apart from the rounding of large sums, about 1e-9 of the error of the whole range. Its
    result should be checked with `expected_error`. For more levels than a histogram may have bins, it is `errors`.

    The second function assumes that rounding costs a twelfth of the squared step, as for values that are spread evenly
    over many steps. It is very fast. With few levels it is the first function.

    Args:
        histogram: The values.
        precision: The integers.
    """
    excess = Excess.of(histogram)
    total, mean, square = excess.moments

    def grid(lo: Array, hi: Array) -> tuple[Array, Array]:
        scales, zeros = precision.grids(lo, hi)
        step = np.ldexp(scales.astype(np.float64), -histogram.exponent)
        return -zeros * step - histogram.first, step

    def exact(lo: Array, hi: Array) -> Array:
        lowest, step = grid(lo, hi)
        beyond = excess.beyond(lowest + step / 2, step, precision.top)
        return np.asarray(square + lowest * (lowest * total - 2 * mean) - 2 * step * beyond)

    def rough(lo: Array, hi: Array) -> Array:
        lowest, step = grid(lo, hi)
        (above, low), (beyond, high) = map(excess.squares, (lowest, lowest + step * precision.top))
        below = square + lowest * (lowest * total - 2 * mean) - above
        return np.asarray(below + (low - high) * step**2 / 12 + beyond)

    if precision.top > MAX_BINS:
        return partial(errors, Spread.of(histogram), precision=precision), rough
    return exact, exact if precision.bits < SPREAD_EVENLY else rough

"""The range with the least Kullback-Leibler divergence.

S. Migacz, 8-bit Inference with TensorRT, GPU Technology Conference 2017. As in MXNet (``_get_optimal_threshold`` of
contrib/quantization.py), only bins with values share the count of a level.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..model.session import Array
from ..statistics.histogram import MAX_BINS, Histogram
from .error import WORK, check_given, least_error, smooth_counts
from .excess import error_of_ranges
from .precision import Precision
from .search import Objective, Places, least

COARSE, FINE = 256, 0.01
"""The coarse search has many places and the refinement is short, because the divergence jumps where the border of a
level crosses a bin.
"""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over the bins before each edge, (bins + 1,) float64 each.

    Attributes:
        count: The number of values.
        filled: The number of bins with values.
        log: The sum of ``c * log(c)``, where c is the count of a bin.
    """

    count: Array
    filled: Array
    log: Array

    @classmethod
    def of(cls, counts: Array) -> _Sums:
        """Return the sums over bins."""
        return cls(*(np.concatenate([[0.0], np.cumsum(part)]) for part in (counts, counts > 0, _x_log_x(counts))))


def entropy(histogram: Histogram, precision: Precision) -> tuple[float, float]:
    """Return the range whose integers preserve most information: the least Kullback-Leibler divergence.

    P is the distribution in which values outside the range count in its outermost bins. Q is the distribution after
    quantization: the values of one level are spread evenly over the bins of the level that contain values, and clipped
    values are lost. The outermost bins of the range contain values, so that Q is nowhere zero where P is positive. Two
    kinds of ranges would seem to lose nothing and are excluded: ranges whose levels are narrower than the bins, and
    ranges with fewer than half as many bins as integers. Exact zeros are left out, because their quantization loses
    nothing.

    The divergence does not depend on how far away a clipped value is. With 8 bits it would clip the few distant values
    that hold much of the energy of a heavy-tailed tensor. Therefore only ranges count whose `expected_error` is at most
    as large as the error of the extremes. The extremes are one of these ranges.

    Args:
        histogram: The values.
        precision: The integers.

    Raises:
        RequantError: An argument is of another type.
    """
    check_given(histogram, precision)
    # A level is at least as wide as a bin: log2(bins / levels) octaves. One more, because each end has its own factor.
    octaves = max(MAX_BINS.bit_length() - precision.bits, 1)
    exact, rough = (_objective(histogram, precision, errors) for errors in error_of_ranges(histogram, precision))
    best = least(histogram, precision, exact, rough, Places(octaves, COARSE, FINE))
    return least_error(histogram, [best, (histogram.lo, histogram.hi)], precision)


def divergence(histogram: Histogram, lo: float, hi: float, precision: Precision) -> float:
    """Return the Kullback-Leibler divergence, in nats, of the range ``[lo, hi]``; infinite for excluded ranges.

    Args:
        histogram: The values.
        lo: The lower end of the range.
        hi: The upper end.
        precision: The integers.
    """
    return float(_objective(histogram, precision)(np.array([lo]), np.array([hi]))[0])


def _objective(histogram: Histogram, precision: Precision, errors: Objective | None = None) -> Objective:
    """Return a function that computes the divergences of ranges.

    With `errors`, the divergence is infinite for a range with a larger error than the extremes.
    """
    bound = None if errors is None else errors(np.array([histogram.lo]), np.array([histogram.hi]))
    counts, edges = smooth_counts(histogram), histogram.edges
    filled = np.flatnonzero(counts)
    middles = edges[filled] / 2 + edges[filled + 1] / 2
    sums = _Sums.of(counts)

    def divergences(lo: Array, hi: Array) -> Array:
        low = np.minimum(np.searchsorted(middles, lo), filled.size - 1)
        high = np.maximum(np.searchsorted(middles, hi, side="right") - 1, low)
        scales, zeros = precision.grids(lo, hi)
        width = np.ldexp(scales.astype(np.float64), -histogram.exponent)  # width of a level in bins
        valid = np.flatnonzero((width >= 1.0) & (filled[high] - filled[low] >= precision.top // 2))
        if errors is not None:
            valid = valid[errors(lo[valid], hi[valid]) <= bound]
        result, rows = np.full(len(lo), np.inf), max(1, WORK // precision.top)
        for part in (valid[start : start + rows] for start in range(0, valid.size, rows)):
            bounds = _bounds(width[part], zeros[part], precision.top) - histogram.first
            result[part] = _divergences(sums, filled[low[part]], filled[high[part]] + 1, bounds)
        return result

    return divergences


def _divergences(sums: _Sums, low: Array, high: Array, bounds: Array) -> Array:
    """Return the divergence of n ranges, (n,) float64.

    With c values in a bin, N in all, I inside the range, and the share q of a bin in its level, each bin except the
    outermost contributes ``c / N * log((c / N) / (q / I))``. `_Sums` provides the sums over bins, so that this function
    loops over levels only.

    Args:
        sums: Sums over the bins.
        low: The first bin of each range, (n,) intp. It contains values.
        high: The edge after the last bin, which also contains values.
        bounds: The first bin of each level except the lowest, (n, levels - 1).
    """
    cuts = np.empty((len(low), bounds.shape[1] + 2), np.intp)
    cuts[:, 0], cuts[:, -1] = low, high
    cuts[:, 1:-1] = np.minimum(np.maximum(bounds, low[:, None]), high[:, None])
    count, filled = sums.count.take(cuts), sums.filled.take(cuts)
    level, filled = count[:, 1:] - count[:, :-1], filled[:, 1:] - filled[:, :-1]
    occupied = filled > 0
    log_q = np.maximum(level, 1.0)  # log of q; a filled bin has at least one value
    log_q /= np.maximum(filled, 1.0, out=filled)
    np.log(log_q, out=log_q)
    first, last = occupied.argmax(axis=1), bounds.shape[1] - occupied[:, ::-1].argmax(axis=1)
    total, inside = sums.count[-1], sums.count[high] - sums.count[low]
    rows = np.arange(len(low))
    level *= log_q
    divergence = (sums.log[high] - sums.log[low] - level.sum(axis=1)) / total + np.log(inside / total)
    for bin_, beyond, log_end in (
        (low, sums.count[low], log_q[rows, first]),
        (high - 1, total - sums.count[high], log_q[rows, last]),
    ):
        own = sums.count[bin_ + 1] - sums.count[bin_]
        divergence += (_x_log_x(own + beyond) - _x_log_x(own) - beyond * log_end) / total
    return np.asarray(divergence)


def _bounds(width: Array, zeros: Array, top: int) -> Array:
    """Return the first bin of each level except the lowest, counted from zero, (n, top) float64.

    A bin belongs to the level to which its middle is rounded.
    """
    levels = np.arange(1, top + 1) - zeros[:, None]
    return np.asarray(np.ceil((levels - 0.5) * width[:, None] - 0.5))


def _x_log_x(x: Array) -> Array:
    """Return ``x * log(x)``, which is 0 at 0."""
    return np.asarray(x * np.log(np.maximum(x, 1.0)))  # x is a count, so never between 0 and 1

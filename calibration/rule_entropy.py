"""The range that keeps most of the distribution in the sense of Kullback and Leibler.

S. Migacz, 8-bit Inference with TensorRT, GPU Technology Conference 2017; as in MXNet (``_get_optimal_threshold`` of
contrib/quantization.py): only bins that hold values share what a level holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .histogram import MAX_BINS, Histogram
from .precision import Precision
from .rule_error import WORK, least_error, smooth_counts
from .rule_excess import error_of_ranges
from .rule_search import Objective, Places, least
from .session import Array

ALONE, FINE = 256, 0.01
"""Many places in the coarse round, and little refinement: the divergence jumps where a level's border passes a bin."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over the bins before each edge, (bins + 1,) float64 each.

    Attributes:
        count: Values.
        filled: Bins that hold any.
        log: ``c * log(c)`` of the values c of each bin.
    """

    count: Array
    filled: Array
    log: Array

    @classmethod
    def of(cls, counts: Array) -> _Sums:
        """Add up bins."""
        return cls(*(np.concatenate([[0.0], np.cumsum(part)]) for part in (counts, counts > 0, _x_log_x(counts))))


def entropy(histogram: Histogram, precision: Precision) -> tuple[float, float]:
    """Return the range whose integers tell most about the values: the least Kullback-Leibler divergence.

    Of the distribution P, values beyond the range being counted in the outermost bins, quantization leaves Q: what
    falls into one level is spread evenly over the bins there that hold values, and what was clipped is lost. The
    outermost bins are those that hold values, so that Q is nowhere zero where P is not. A range whose levels are
    narrower than the bins, or that has less than half as many bins as there are integers, would look as if nothing was
    lost, and is not considered; neither are exact zeros, which are quantized without loss.

    A divergence knows nothing of how far away a clipped value was. With 8 bits it would give up the few values far out
    that hold much of a heavy-tailed tensor's energy. Only ranges are considered whose `expected_error` with these
    integers is not above that of the extremes, which are one of them.

    Args:
        histogram: The values.
        precision: The integers.
    """
    # A level is no narrower than a bin, which leaves log2(bins / levels) octaves; one more, as each end has its own.
    octaves = max(MAX_BINS.bit_length() - precision.bits, 1)
    exact, rough = (_objective(histogram, precision, errors) for errors in error_of_ranges(histogram, precision))
    found = least(histogram, precision, exact, rough, Places(octaves, ALONE, FINE))
    return least_error(histogram, [found, (histogram.lo, histogram.hi)], precision)


def divergence(histogram: Histogram, lo: float, hi: float, precision: Precision) -> float:
    """Return the Kullback-Leibler divergence, in nats, of the range ``[lo, hi]``; infinite where it tells nothing.

    Args:
        histogram: The values.
        lo: Lower end of the range.
        hi: Upper end.
        precision: The integers.
    """
    return float(_objective(histogram, precision)(np.array([lo]), np.array([hi]))[0])


def _objective(histogram: Histogram, precision: Precision, errors: Objective | None = None) -> Objective:
    """Return what gives the divergences of ranges; infinite where the range has more than the error of the extremes."""
    bound = None if errors is None else errors(np.array([histogram.lo]), np.array([histogram.hi]))
    counts, edges = smooth_counts(histogram), histogram.edges
    filled = np.flatnonzero(counts)
    middles = edges[filled] / 2 + edges[filled + 1] / 2
    sums = _Sums.of(counts)

    def divergences(lo: Array, hi: Array) -> Array:
        low = np.minimum(np.searchsorted(middles, lo), filled.size - 1)
        high = np.maximum(np.searchsorted(middles, hi, side="right") - 1, low)
        scales, zeros = precision.grids(lo, hi)
        width = np.ldexp(scales.astype(np.float64), -histogram.exponent)  # of a level, in bins
        telling = np.flatnonzero((width >= 1.0) & (filled[high] - filled[low] >= precision.top // 2))
        if errors is not None:
            telling = telling[errors(lo[telling], hi[telling]) <= bound]
        result, rows = np.full(len(lo), np.inf), max(1, WORK // precision.top)
        for part in (telling[start : start + rows] for start in range(0, telling.size, rows)):
            bounds = _bounds(width[part], zeros[part], precision.top) - histogram.first
            result[part] = _divergences(sums, filled[low[part]], filled[high[part]] + 1, bounds)
        return result

    return divergences


def _divergences(sums: _Sums, low: Array, high: Array, bounds: Array) -> Array:
    """Return the divergence of n ranges, (n,) float64.

    With c values in a bin, N in all, I inside the range and q the share of a bin in its level, all but the outermost
    bins give ``c / N * log((c / N) / (q / I))``: sums over bins come from `_Sums`, and only levels are looped over.

    Args:
        sums: Sums over the bins.
        low: The first bin of each range, (n,) intp, which holds values.
        high: The edge after the last bin, which does too.
        bounds: The first bin of each level but the lowest, (n, levels - 1).
    """
    cuts = np.empty((len(low), bounds.shape[1] + 2), np.intp)
    cuts[:, 0], cuts[:, -1] = low, high
    cuts[:, 1:-1] = np.minimum(np.maximum(bounds, low[:, None]), high[:, None])
    count, filled = sums.count.take(cuts), sums.filled.take(cuts)
    level, filled = count[:, 1:] - count[:, :-1], filled[:, 1:] - filled[:, :-1]
    held = filled > 0
    log_q = np.maximum(level, 1.0)  # of each bin in a level; no bin that is filled has less
    log_q /= np.maximum(filled, 1.0, out=filled)
    np.log(log_q, out=log_q)
    first, last = held.argmax(axis=1), bounds.shape[1] - held[:, ::-1].argmax(axis=1)
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
    """Return the first bin of each level but the lowest, counted from zero, (n, top) float64.

    A bin belongs to the level that its middle is rounded to.
    """
    levels = np.arange(1, top + 1) - zeros[:, None]
    return np.asarray(np.ceil((levels - 0.5) * width[:, None] - 0.5))


def _x_log_x(x: Array) -> Array:
    """Return ``x * log(x)``, which is 0 at 0."""
    return np.asarray(x * np.log(np.maximum(x, 1.0)))  # x is a count: nothing lies between 0 and 1

"""Conspicuous properties of a tensor's values that make its integers coarse, as numbers and as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...calibration.rules.error import expected_error
from ...calibration.rules.precision import Precision
from ...calibration.rules.ranges import Range, percentile
from ...calibration.statistics.histogram import Histogram, Statistic
from ...calibration.statistics.observations import Observations
from ...calibration.statistics.sums import Runs

# All verdicts come from the values; names of nodes and tensors are not used.
WIDE = 8.0  # ratio of a wide channel to the median one: the other channels lose three of the eight bits
PEERS = 4.0  # a channel with at least 1 / PEERS of the widest range is wide too
FEW_SHARE = 16  # at most one channel in so many may be wide, else wide channels are normal for the tensor
MIXED = 8.0  # ratio of the widest to the narrowest tensor that a Concat joins
# (p, share): the values outside the middle p % are outliers if the middle p % lie within this share of the range. For
# 10**6 values of a Laplace distribution the shares are a half and a third.
INSIDE = ((99.9, 0.25), (99.0, 0.2))
LOST_STEPS, STEPS = 4, 255  # a channel that spans fewer steps of the grid is nearly lost
LOST_SHARE = 8  # report lost channels if at least one channel in so many is lost
CLIPPED = 0.001  # report clipping above this share of the values
STEPS = 255  # of a range: values that are cut off by less than a step are rounded, and not clipped
GROWN = 0.1  # report growth above this share of the width, in the last doubling of the samples
ENOUGH = 16  # samples; with fewer, growth is not reported


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of the values of a tensor.

    Attributes:
        seen: The least and the greatest observed value.
        rounding: Mean square of the error of its integers over the mean square of its values, expected from the
            histogram; infinite without one.
        clipped: Share of the values outside the range by more than a step, 0..1.
        growth: Share of its width that the range gained in the last doubling of the samples.
        verdict: The conspicuous properties; empty without any.
    """

    seen: Range
    rounding: float
    clipped: float
    growth: float
    verdict: str


def traits(name: str, span: Range, seen: Observations, joined: Sequence[str], precision: Precision) -> Traits:
    """Return the properties of the values of a tensor.

    Args:
        name: The tensor.
        span: The range of its integers.
        seen: The observations, with histograms, and per channel where tensors have channels.
        joined: The inputs of the Concat that produces it; empty for other tensors.
        precision: The number of integer steps.
    """
    statistic = seen.ranges[name]
    clipped, growth = _clipped(statistic, span), _growth(seen.runs.get(name))
    words = [
        _wide_channels(seen, name),
        _lost(seen, name, span),
        _mixed([seen.ranges[each] for each in joined if each in seen.ranges]),
        _outliers(statistic),
        f"the range cuts off {clipped:.1%} of the values, by up to {_cut(statistic, span):.3g}"
        if clipped > CLIPPED
        else "",
        f"+{growth:.0%} range in the last doubling of the samples" if growth > GROWN and seen.samples >= ENOUGH else "",
    ]
    rounding = _rounding(statistic, span, precision)
    return Traits((statistic.lo, statistic.hi), rounding, clipped, growth, "; ".join(filter(None, words)))


def _wide_channels(seen: Observations, name: str) -> str:
    """Return which channels set the range of a tensor, as text; empty if many do."""
    if name not in seen.channels:
        return ""
    channels = seen.channels[name]
    widths = np.maximum(np.abs(channels.lo), np.abs(channels.hi))
    middle, widest = float(np.median(widths)), float(widths.max(initial=0.0))
    wide = np.flatnonzero(widths * PEERS > widest)
    if widths.size < 2 or not 0 < middle * WIDE <= widest or len(wide) > max(1, widths.size // FEW_SHARE):
        return ""
    if len(wide) == 1:
        return f"one channel sets the range: channel {wide[0]} spans {widest / middle:.0f}x the median channel"
    return f"{len(wide)} of {widths.size} channels set the range: they span up to {widest / middle:.0f}x the median"


def _lost(seen: Observations, name: str, span: Range) -> str:
    """Return how many channels span only a few steps of the tensor's range, as text; empty if few do."""
    if name not in seen.channels:
        return ""
    channels = seen.channels[name]
    widths = np.maximum(channels.hi, 0.0) - np.minimum(channels.lo, 0.0)
    step = (max(span[1], 0.0) - min(span[0], 0.0)) / STEPS
    lost = int(((widths > 0) & (widths < LOST_STEPS * step)).sum())
    return (
        f"{lost} of {widths.size} channels span less than {LOST_STEPS} of the {STEPS} steps"
        if 0 < widths.size <= LOST_SHARE * lost
        else ""
    )


def _mixed(parts: Sequence[Statistic]) -> str:
    """Return the different ranges that a Concat joins, as text; empty if they are similar."""
    spans = sorted((max(part.hi, 0.0) - min(part.lo, 0.0), part.lo, part.hi) for part in parts)
    spans = [span for span in spans if span[0] > 0]
    if len(spans) < 2 or spans[-1][0] < MIXED * spans[0][0]:
        return ""
    (narrow, *low), (wide, *high) = spans[0], spans[-1]
    texts = (f"{pair[0]:.3g}..{pair[1]:.3g}" for pair in (low, high))
    return f"mixed ranges joined by Concat: {' and '.join(texts)}, {wide / narrow:.0f}-fold"


def _outliers(statistic: Statistic) -> str:
    """Return in what share of the range nearly all values lie, as text; empty if it is large."""
    width = max(statistic.hi, 0.0) - min(statistic.lo, 0.0)
    if not isinstance(statistic, Histogram) or not width > 0:
        return ""
    for inside, close in INSIDE:
        lo, hi = percentile(statistic, 50 + inside / 2)
        share = (max(hi, 0.0) - min(lo, 0.0)) / width
        if share < close:
            return f"outliers: {inside:g} % of the values lie within {share:.0%} of the range"
    return ""


def _clipped(statistic: Statistic, span: Range) -> float:
    """Return the share of values outside a range by more than a step; values are assumed uniform within a bin."""
    lo, hi = min(span[0], 0.0), max(span[1], 0.0)
    step = (hi - lo) / STEPS
    if not isinstance(statistic, Histogram) or (lo - step <= statistic.lo and statistic.hi <= hi + step):
        return 0.0
    edges, counts = statistic.edges, statistic.counts
    reached = np.concatenate([[0], np.cumsum(counts)])
    below, upto = np.interp([lo - step, hi + step], edges, reached)
    return float(max(below + reached[-1] - upto, 0.0) / reached[-1])


def _cut(statistic: Statistic, span: Range) -> float:
    """Return how far the farthest value lies outside a range."""
    return max(min(span[0], 0.0) - statistic.lo, statistic.hi - max(span[1], 0.0), 0.0)


def _growth(runs: Runs | None) -> float:
    """Return the share of its width that a range gained in the last doubling of the samples."""
    if runs is None:
        return 0.0
    widths = [max(hi, 0.0) - min(lo, 0.0) for lo, hi in runs.growth.values()]
    pairs = list(pairwise(widths))
    return 1 - pairs[-1][0] / pairs[-1][1] if pairs and pairs[-1][1] > 0 else 0.0


def _rounding(statistic: Statistic, span: Range, precision: Precision) -> float:
    """Return the expected mean square of the rounding error over the mean square of the values."""
    if not isinstance(statistic, Histogram):
        return math.inf
    edges = statistic.edges
    left, right = edges[:-1], edges[1:]
    square = float(((left * left + left * right + right * right) / 3 * statistic.counts).sum()) / statistic.count
    return expected_error(statistic, *span, precision) / square if square > 0 else 0.0


def unit_verdict(noise: float, weights: float | None, inputs: Mapping[str, tuple[float, str]]) -> str:
    """Return the cause of a unit's noise, as text; empty if it is unknown.

    Args:
        noise: Noise with only this unit in integers.
        weights: Noise with only its weights in integers; None without weights.
        inputs: By input tensor, noise with only this tensor in uint8 (0 if not tried), and its verdict.
    """
    if noise == 0:
        return ""
    if weights is not None and 2 * weights > noise:
        return "most of its noise comes from its weights"
    worst = max(inputs, key=lambda name: inputs[name][0], default="")
    return f"reads {worst}: {inputs[worst][1]}" if worst and inputs[worst][1] else ""

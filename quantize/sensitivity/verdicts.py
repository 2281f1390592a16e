"""What the values of a tensor say about its integers, in numbers and in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...calibration.histogram import Histogram, Statistic
from ...calibration.observations import Observations
from ...calibration.precision import Precision
from ...calibration.ranges import Range, percentile
from ...calibration.rule_error import expected_error
from ...calibration.sums import Runs

# All of it is read off the values: no name of a node or a tensor says anything here.
RULES = 8.0  # so many times the median channel: the other channels lose three of the eight bits
PEERS = 4.0  # a channel within this of the widest one rules with it
FEW_SHARE = 16  # at most one channel of so many is an outlier; more of them are what the tensor is like
MIXED = 8.0  # between the widest and the narrowest tensor that a Concat joins
# % of the values, and the share of the range within which they are so close together that the rest are outliers; of a
# Laplace distribution, that of 10**6 values, it would be half and a third
INSIDE = ((99.9, 0.25), (99.0, 0.2))
LOST_STEPS, STEPS = 4, 255  # a channel within so few steps of the grid is all but lost
LOST_SHARE = 8  # one channel of so many is worth a word
CLIPPED = 0.001  # share of the values beyond the range that is worth a word
GROWN = 0.1  # share of its width that a range has gained in the last doubling of the samples
ENOUGH = 16  # samples, before which growth tells nothing


@dataclass(frozen=True, slots=True)
class Traits:
    """What was seen of a tensor.

    Attributes:
        seen: The least and the greatest value.
        rounding: Mean square of the error of its integers over the mean square of its values, expected from the
            histogram; infinite where there is none.
        clipped: Share of the values beyond the range, 0..1.
        growth: Share of its width that the range has gained in the last doubling of the samples.
        verdict: What stands out; empty where nothing does.
    """

    seen: Range
    rounding: float
    clipped: float
    growth: float
    verdict: str


def traits(name: str, span: Range, seen: Observations, joined: Sequence[str], precision: Precision) -> Traits:
    """Return what was seen of a tensor.

    Args:
        name: The tensor.
        span: The range that its integers have.
        seen: What a run over data saw, with histograms, and channels where there are any.
        joined: The tensors of which it is the concatenation; none for others.
        precision: The integers.
    """
    statistic = seen.ranges[name]
    clipped, growth = _clipped(statistic, span), _growth(seen.runs.get(name))
    words = [
        _ruled(seen, name),
        _lost(seen, name, span),
        _mixed([seen.ranges[each] for each in joined if each in seen.ranges]),
        _outliers(statistic),
        f"the range cuts off {clipped:.1%} of the values" if clipped > CLIPPED else "",
        f"+{growth:.0%} range in the last doubling of the samples" if growth > GROWN and seen.samples >= ENOUGH else "",
    ]
    rounding = _rounding(statistic, span, precision)
    return Traits((statistic.lo, statistic.hi), rounding, clipped, growth, "; ".join(filter(None, words)))


def _ruled(seen: Observations, name: str) -> str:
    """Say which channels rule the range of a tensor."""
    if name not in seen.channels:
        return ""
    channels = seen.channels[name]
    widths = np.maximum(np.abs(channels.lo), np.abs(channels.hi))
    middle, widest = float(np.median(widths)), float(widths.max(initial=0.0))
    rulers = np.flatnonzero(widths * PEERS > widest)
    if widths.size < 2 or not 0 < middle * RULES <= widest or len(rulers) > max(1, widths.size // FEW_SHARE):
        return ""
    if len(rulers) == 1:
        return f"one channel rules the range: channel {rulers[0]} spans {widest / middle:.0f}x the median channel"
    return f"{len(rulers)} of {widths.size} channels rule the range: they span up to {widest / middle:.0f}x the median"


def _lost(seen: Observations, name: str, span: Range) -> str:
    """Say how many channels are all but lost in the range of the whole tensor."""
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
    """Say that tensors of different ranges are joined."""
    spans = sorted((max(part.hi, 0.0) - min(part.lo, 0.0), part.lo, part.hi) for part in parts)
    spans = [span for span in spans if span[0] > 0]
    if len(spans) < 2 or spans[-1][0] < MIXED * spans[0][0]:
        return ""
    (narrow, *low), (wide, *high) = spans[0], spans[-1]
    texts = (f"{pair[0]:.3g}..{pair[1]:.3g}" for pair in (low, high))
    return f"mixed ranges joined by Concat: {' and '.join(texts)}, {wide / narrow:.0f}-fold"


def _outliers(statistic: Statistic) -> str:
    """Say that nearly all values lie in a small part of the range."""
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
    """Return the share of values beyond a range; those of a bin are taken to be spread evenly."""
    lo, hi = min(span[0], 0.0), max(span[1], 0.0)
    if not isinstance(statistic, Histogram) or (lo <= statistic.lo and statistic.hi <= hi):
        return 0.0
    edges, counts = statistic.edges, statistic.counts
    reached = np.concatenate([[0], np.cumsum(counts)])
    below, upto = np.interp([lo, hi], edges, reached)
    return float(max(below + reached[-1] - upto, 0.0) / reached[-1])


def _growth(runs: Runs | None) -> float:
    """Return what share of its width a range has gained in the last doubling of the samples."""
    if runs is None:
        return 0.0
    widths = [max(hi, 0.0) - min(lo, 0.0) for lo, hi in runs.growth.values()]
    pairs = list(pairwise(widths))
    return 1 - pairs[-1][0] / pairs[-1][1] if pairs and pairs[-1][1] > 0 else 0.0


def _rounding(statistic: Statistic, span: Range, precision: Precision) -> float:
    """Return the mean squared error of integers of a range over the mean square."""
    if not isinstance(statistic, Histogram):
        return math.inf
    edges = statistic.edges
    left, right = edges[:-1], edges[1:]
    square = float(((left * left + left * right + right * right) / 3 * statistic.counts).sum()) / statistic.count
    return expected_error(statistic, *span, precision) / square if square > 0 else 0.0


def unit_verdict(noise: float, weights: float | None, inputs: Mapping[str, tuple[float, str]]) -> str:
    """Say where the noise of a unit comes from.

    Args:
        noise: What it adds alone.
        weights: What its weights alone add; None where it has none.
        inputs: What each tensor that it reads adds alone, 0 where that was not tried, and what stands out of it.
    """
    if noise == 0:
        return ""
    if weights is not None and 2 * weights > noise:
        return "most of it from its weights"
    worst = max(inputs, key=lambda name: inputs[name][0], default="")
    return f"reads {worst}: {inputs[worst][1]}" if worst and inputs[worst][1] else ""

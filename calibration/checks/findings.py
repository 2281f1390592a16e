"""Findings: problems of the data or the model that a run over the data shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median
from typing import Any, Literal, TypeAlias

import numpy as np

from ...system.printable import number_of
from ..data.sources import Source
from ..model.identity import SHOWN, listed
from ..model.session import ModelSource
from ..runs.broken import breakers, first_broken
from ..statistics.histogram import CHUNK
from ..statistics.observations import Observations, Place
from .denormals import slow_here
from .normalisation import BiasRatio, Deviation, Layout, Probe, probe

__all__ = ["Finding", "Probe", "explain_broken", "findings", "first_broken", "growth", "growth_curve", "probe"]

Severity: TypeAlias = Literal["note", "warning"]

ENOUGH = 16
"""The fewest samples for a finding about growth. Fewer give only three doublings, and the last one is mostly chance."""
GROWN = 0.1
"""There are too few samples if each of the last two doublings widens the ranges by more than this share of their width.

One sample of many that differs from the others widens all tensors in one doubling: more samples would not help then.

The largest of n independent values of an exponential distribution is ``ln n`` on average, so a doubling adds
``ln 2 / ln n``: 5 % for 10**6 values. For a normal distribution it adds half of that. Power-law tails exceed 10 %, and
so do samples that differ from the earlier ones.
"""
DISTANCE = 0.35
"""The largest deviation of correct data from a BatchNormalization, in nats, in addition to `CHANCE` / samples.

It is the deviation for a standard deviation that is wrong by a factor of 2, with a correct mean.
"""
CHANCE = 1.0
"""The largest deviation of a single correct sample by chance, in nats; for n samples it is divided by n."""
OUT_OF_SCALE = 30.0
"""The ratio between the first layer's output and its bias, or its inverse, that suggests another scale of the data."""
PIXELS, OVERSHOOT, UNITS = 200.0, 16.0, 4.0
"""The least maximum of data in 0..255, the overshoot of resampling, and the largest magnitude of normalised data."""
SATURATED = 0.9
"""The share of a gate's values at its bounds from which the gate carries no information."""
SMOOTH, MIXED = 0.5, 0.6
"""The largest difference of adjacent rows of pictures, relative to the variance, and relative to distant rows."""
ROUNDING = CHUNK * float(np.finfo(np.float64).eps)
"""The largest variance of equal values by rounding, relative to their square."""
DENORMAL = 1e-3
"""The share of denormal values from which float kernels are much slower.

Where an instruction with a denormal operand takes 150 cycles instead of half a cycle and works on 8 values, this share
makes a product 3 times as slow.
"""
MANY_COPIES = 0.1
"""The share of copies among the samples above which the finding is a warning."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A likely problem of the data or the model.

    Attributes:
        kind: ``"constant"``, ``"broken"``, ``"normalisation"``, ``"layout"``, ``"growing"``, ``"few"``,
            ``"duplicates"`` or ``"denormal"``.
        name: The tensor, input or node; empty if the finding is about all of them.
        message: One line with the problem, its place and what to do.
        severity: ``"warning"`` if the problem is likely to ruin a quantization, else ``"note"``.
        curve: For ``"growing"``: the numbers of samples, each with its share of the final width of the ranges.
    """

    kind: str
    name: str
    message: str
    severity: Severity
    curve: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values, without an empty curve."""
        row: dict[str, Any] = {
            "kind": self.kind,
            "name": self.name,
            "severity": self.severity,
            "message": self.message,
        }
        return row | ({"curve": [list(point) for point in self.curve]} if self.curve else {})


def findings(
    seen: Observations,
    *,
    probed: Probe | None = None,
    inputs: Iterable[str] = (),
    causes: Mapping[str, str] | None = None,
    denormal: Mapping[str, float] | None = None,
) -> tuple[Finding, ...]:
    """Return all findings of a run, warnings first.

    Args:
        seen: The statistics of a whole run. For a shard the growth of ranges is only approximate.
        probed: The result of `probe` for the first layers; None skips these checks.
        inputs: The names of the model's inputs.
        causes: The cause of NaN or infinity by tensor, from `explain_broken`.
        denormal: The share of denormal values by tensor, from `denormal_shares`.
    """
    rows = [
        *_broken(seen, causes or {}),
        *(_normalisation(probed) if probed is not None else ()),
        *_constant(seen, frozenset(inputs)),
        *_dead_channels(seen),
        *growth(seen),
        *_duplicates(seen),
        *_denormal(denormal or {}),
    ]
    return tuple(sorted(rows, key=lambda finding: finding.severity != "warning"))


def explain_broken(model: ModelSource, source: Source, seen: Observations) -> dict[str, str]:
    """Return the causes of NaN and infinity. The first samples with such values are read again.

    Args:
        model: The model.
        source: The data of the run.
        seen: The statistics of the run.

    Returns:
        A clause by tensor, for `findings`: up to `SHOWN` tensors of up to `SHOWN` samples, without unknown causes.

    Raises:
        DataError: A sample cannot be read again.
    """
    order = sorted(seen.broken.items(), key=lambda item: (item[1], item[0]))
    causes: dict[str, str] = {}
    for place, group in list(_by_place(order))[:SHOWN]:
        for sample in source.read([place.position]):
            causes |= breakers(model, sample, group[:SHOWN])
    return causes


def growth_curve(seen: Observations) -> tuple[tuple[int, float], ...]:
    """Return numbers of samples, each with its share of the ranges' final width, as the mean over tensors.

    The numbers are 1, 3, 7, ..., one less than powers of two, and the number of all samples.
    """
    shares: dict[int, list[float]] = {}
    for curve in _curves(seen):
        for samples, share in curve.items():
            shares.setdefault(samples, []).append(share)
    return tuple((samples, fmean(values)) for samples, values in sorted(shares.items()))


def _by_place(order: Sequence[tuple[str, Place]]) -> Iterable[tuple[Place, list[str]]]:
    """Group tensors by their sample."""
    for place, group in groupby(order, key=lambda item: item[1]):
        yield place, [name for name, _ in group]


def _broken(seen: Observations, causes: Mapping[str, str]) -> list[Finding]:
    """Report inner tensors with NaN or infinity, one finding per sample and cause."""
    groups: dict[tuple[Place, str], list[str]] = {}
    for name, place in sorted(seen.broken.items(), key=lambda item: (item[1], item[0] not in causes, item[0])):
        groups.setdefault((place, causes.get(name, "")), []).append(name)
    rows = []
    for (place, cause), names in list(groups.items())[:SHOWN]:
        holds, effect = ("holds", "it has no range") if len(names) == 1 else ("hold", "they have no ranges")
        because = f", {cause}" if cause else ""
        message = f"{listed(names)} {holds} NaN or infinity at {place.where}{because}; {effect}"
        rows.append(Finding("broken", names[0], message, "note"))
    if rest := [name for names in list(groups.values())[SHOWN:] for name in names]:
        message = f"{listed(rest)} hold NaN or infinity at other samples"
        rows.append(Finding("broken", rest[0], message, "note"))
    return rows


def _constant(seen: Observations, inputs: frozenset[str]) -> list[Finding]:
    """Report tensors whose values are all equal in all samples: a finding per value of inputs, and of the others."""
    constants = {name: row.lo for name, row in seen.ranges.items() if row.lo == row.hi and row.count > seen.samples}
    for name, row in seen.moments.items():  # an input without an integer kernel has only moments
        if name not in seen.ranges and row.count > seen.samples and row.variance <= ROUNDING * row.mean**2:
            constants[name] = row.mean
    rows = []
    check = ("that is right for a first state only: check how the data are read", "check how the data are read")
    groups: dict[str, list[str]] = {}
    for name in sorted(inputs & constants.keys()):
        groups.setdefault(f"{constants[name]:.6g}", []).append(name)
    for value, names in groups.items():
        who = f"input {names[0]!r} is" if len(names) == 1 else f"inputs {listed(names)} are"
        message = f"{who} {value} in all samples; {check[bool(constants[names[0]])]}"
        rows.append(Finding("constant", names[0], message, "warning"))
    inner = sorted(constants.keys() - inputs)
    for what, names in (
        ("zero", [name for name in inner if not constants[name]]),
        ("constant", [name for name in inner if constants[name]]),
    ):
        if names:
            message = f"{what} in all samples: {listed(names)}; check that the data use this part of the model"
            rows.append(Finding("constant", names[0], message, "note"))
    return rows


def _dead_channels(seen: Observations) -> list[Finding]:
    """Report channels whose values are all equal in all samples, in tensors where other channels vary."""
    dead = {
        name: int(np.sum(row.lo == row.hi))
        for name, row in seen.channels.items()
        if row.count > seen.samples and (row.lo != row.hi).any()
    }
    worst = sorted((name for name in dead if dead[name]), key=lambda name: -dead[name] / seen.channels[name].lo.size)
    if not worst:
        return []
    shown = ", ".join(f"{dead[name]} of {seen.channels[name].lo.size} of {name!r}" for name in worst[:SHOWN])
    rest = len(worst) - SHOWN
    count = sum(dead[name] for name in worst[SHOWN:])
    more = f", and {count} channels of {number_of(rest, 'more tensor')}" if rest > 0 else ""
    return [Finding("constant", worst[0], f"channels that are constant in all samples: {shown}{more}", "note")]


def _normalisation(probed: Probe) -> list[Finding]:
    """Report data that contradict the preprocessing of the training."""
    rows = []
    worst = max(probed.deviations, key=lambda row: row.distance, default=None)
    if worst is not None and worst.distance > DISTANCE + CHANCE / worst.samples:
        rows.append(Finding("normalisation", worst.source or worst.node, _contradiction(worst), "warning"))
    for finding in (_saturated(probed.saturated), _out_of_scale(probed.bias)):
        rows += [finding] if finding is not None and not rows else []
    layouts = (_mixed(name, layout) for name, layout in probed.layouts.items())
    return rows + [finding for finding in layouts if finding is not None]


def _contradiction(row: Deviation) -> str:
    """Return the message for data that contradict a BatchNormalization."""
    check = "check scale, mean and std of the preprocessing"
    if row.source is None or len(row.seen) > 4:
        factor = f"{row.scale:.3g}" if row.scale >= 1 else f"1/{1 / row.scale:.3g}"
        scale = f"have {factor} times the standard deviations" if row.scale != 1 else "do not have the means"
        return (
            f"the channels before BatchNormalization {row.node!r} {scale} that it recorded in training, and "
            f"their means are off by {row.shift:.3g} recorded standard deviations; {check}"
        )
    seen, recorded = (_means(means) for means in (row.seen, row.recorded))
    spread = f" and a standard deviation of {row.deviation / row.scale:.3g}" if row.deviation else ""
    return (
        f"{row.source!r} has {seen} and a standard deviation of {row.deviation:.3g}, but in training it had about "
        f"{recorded}{spread}, as BatchNormalization {row.node!r} recorded; {check}"
    )


def _means(means: Sequence[float]) -> str:
    """Return the means of channels as text: ``"means of 0.4, 0.5, 0.5"``."""
    return ("a mean of " if len(means) == 1 else "means of ") + ", ".join(f"{mean:.3g}" for mean in means)


def _out_of_scale(row: BiasRatio | None) -> Finding | None:
    """Report data that look like pixels where the bias fits normalised data, or the reverse."""
    if row is None:
        return None
    pixels = row.lo >= -OVERSHOOT and PIXELS < row.hi <= 255 + OVERSHOOT
    units = max(-row.lo, row.hi) <= UNITS
    message = f"{row.node!r} reads data in {row.lo:.3g}..{row.hi:.3g}, and the standard deviation after it is "
    if pixels and row.ratio > OUT_OF_SCALE:
        message += f"{row.ratio:.3g} times its bias; check whether the model needs data divided by 255 or normalised"
    elif units and row.ratio < 1 / OUT_OF_SCALE:
        message += f"1/{1 / max(row.ratio, 1e-9):.3g} of its bias; check whether the model needs data in 0..255"
    else:
        return None
    return Finding("normalisation", row.node, message, "note")


def _saturated(shares: Mapping[str, float]) -> Finding | None:
    """Report first gates that are saturated."""
    if not shares or median(shares.values()) < SATURATED:
        return None
    worst = max(shares, key=lambda name: shares[name])
    message = (
        f"gate {worst!r} and most other first gates are saturated ({worst!r} in {shares[worst]:.0%} of its values); "
        "check the scale of the data"
    )
    return Finding("normalisation", worst, message, "warning")


def _mixed(name: str, layout: Layout) -> Finding | None:
    """Report pictures in the other layout."""
    near, far, other = (
        (layout.pixels, layout.planes, "NHWC") if layout.axes == "NCHW" else (layout.planes, layout.pixels, "NCHW")
    )
    if near > SMOOTH or near > MIXED * far:
        return None
    message = (
        f"input {name!r} is {layout.axes}, but its data look like {other} (adjacent rows differ by {near:.2g} of the "
        f"variance as {other}, and by {far:.2g} as {layout.axes}); transpose the axes instead of reshaping"
    )
    return Finding("layout", name, message, "warning")


def growth(seen: Observations, held: int = 0) -> list[Finding]:
    """Return the finding about ranges that more samples would widen, or about too few samples to decide this.

    Args:
        seen: The statistics of the tensors whose ranges count.
        held: The number of samples that were given and gave no ranges.
    """
    if 0 < seen.samples < ENOUGH and seen.ranges:
        message = (
            f"only {number_of(seen.samples, 'sample')}; at least {ENOUGH} are needed to see whether "
            "the ranges still grow, and 100 to 500 are usual"
        )
        return [Finding("few", "", message, "note")]
    grew = [_growth(curve) for curve in _curves(seen)]
    grown = min(map(fmean, zip(*grew, strict=True)), default=0.0)
    if grown <= GROWN:
        return []
    curve = growth_curve(seen)
    points = ", ".join(f"{samples}: {share:.2f}" for samples, share in curve)
    kept = f" ({held} of the given samples judge the model and give no ranges)" if held else ""
    message = (
        f"the ranges still grow: by {grown:.0%} on average with each doubling of the samples ({points} of the "
        f"final width, mean over {number_of(len(grew), 'tensor')}); add samples{kept}, or choose a rule that clips"
    )
    return [Finding("growing", "", message, "warning", curve)]


def _curves(seen: Observations) -> list[dict[int, float]]:
    """Return, for each tensor with a range, the share of the final width by number of samples."""
    curves = []
    for runs in seen.runs.values():
        ends = {min(samples, max(seen.samples, 1)): end for samples, end in runs.growth.items()}
        lo, hi = ends[max(ends)]
        if lo < hi:
            curves.append({samples: (high - low) / (hi - lo) for samples, (low, high) in ends.items()})
    return curves


def _growth(curve: Mapping[int, float]) -> tuple[float, float]:
    """Return the shares of its width that the last two doublings of the samples added to a range, the last one first.

    All samples are compared with at most two thirds of them, because the last block of samples can be short, and these
    with at most half of that.
    """
    final = max(curve)
    late, early = (max((n for n in curve if times * n <= 2 * final), default=0) for times in (3, 6))
    if not early or not curve[late]:
        return 0.0, 0.0
    last = 1 - curve[late] ** (1 / math.log2(final / late))
    return last, 1 - (curve[early] / curve[late]) ** (1 / math.log2(late / early))


def _duplicates(seen: Observations) -> list[Finding]:
    """Report equal samples."""
    compared = sum(times for _, times in seen.repeated.values())
    again = sorted((place, times) for place, times in seen.repeated.values() if times > 1)
    if not again:
        return []
    copies = sum(times - 1 for _, times in again)
    named = " and ".join(f"{place.where} ({times} times)" for place, times in again[:2])
    of = f"of the first {compared} samples" if compared < seen.samples else f"of {number_of(compared, 'sample')}"
    message = f"{copies} {of} are copies of others: {named}; remove them, because they only take time"
    return [Finding("duplicates", "", message, "warning" if copies > MANY_COPIES * compared else "note")]


def _denormal(shares: Mapping[str, float]) -> list[Finding]:
    """Report tensors with so many denormal values that float kernels are slow; a note where this CPU is not."""
    worst = sorted((name for name in shares if shares[name] >= DENORMAL), key=lambda name: -shares[name])
    if not worst:
        return []
    found = f"denormal values (below 1.2e-38) in activations: {listed(worst)}, {shares[worst[0]]:.1%} of {worst[0]!r}"
    if not slow_here():
        message = f"{found}: this CPU computes them as fast as others, many Intel CPUs do not"
        return [Finding("denormal", worst[0], message, "note")]
    message = (
        f"{found}: they make float slow on this CPU, and int8 gains more than it should; run float models with the "
        "session option session.set_denormal_as_zero, or scale inputs that are tiny"
    )
    return [Finding("denormal", worst[0], message, "warning")]

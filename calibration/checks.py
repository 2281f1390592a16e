"""What a run over data tells about the data: findings that save a wasted afternoon."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median
from typing import Any, Literal, TypeAlias

import numpy as np

from .broken import breakers, first_broken
from .histogram import CHUNK
from .normalisation import BiasRatio, Deviation, Layout, Probe, probe
from .observations import Observations, Place
from .session import ModelSource
from .sources import Source

__all__ = ["Finding", "Probe", "explain_broken", "findings", "first_broken", "growth_curve", "probe"]

Severity: TypeAlias = Literal["note", "warning"]

SHOWN = 3
"""Tensors that a finding names; the others are counted."""
ENOUGH = 16
"""With fewer samples nothing can be said of how ranges grow: three doublings, and the last one is all but chance."""
GROWN = 0.1
"""By what share of their final width a doubling of the samples widens ranges on average, where samples are too few.

Of n independent values of an exponential distribution the greatest is ``ln n`` on average, so that a doubling adds
``ln 2 / ln n``: 5 % of 10**6 values; of a normal distribution it adds half of that. The 10 % are reached by tails as
heavy as a power, of which twice as many samples will show more, and by samples that differ from those before.
"""
DISTANCE = 0.35
"""Nats of deviation from a BatchNormalization, beyond `CHANCE` over the samples, from which on data are not right.

It is that of a standard deviation off by a factor of 2, all other things being right.
"""
CHANCE = 1.0
"""Nats that a single right sample may deviate by; of n samples it is a part of n."""
OUT_OF_SCALE = 30.0
"""How far, either way, the first layer's output is from its bias in data of another scale."""
PIXELS, OVERSHOOT, UNITS = 200.0, 16.0, 4.0
"""What data in 0..255 reach; how far a resampling may take them out of it; what normalised data stay within."""
SATURATED = 0.9
"""The share of a gate's values at its bounds, from which on it tells nothing apart."""
SMOOTH, MIXED = 0.5, 0.6
"""Rows of pictures differ by less than this part of the variance, and those next to each other by less than this part
of what those further apart differ by."""
ROUNDING = CHUNK * float(np.finfo(np.float64).eps)
"""What rounding leaves at most of the variance of equal values, in units of their square."""
MANY_COPIES = 0.1
"""The share of copies among the samples from which on they are worth a warning."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about the data or the model that is likely not meant to be so.

    Attributes:
        kind: ``"constant"``, ``"broken"``, ``"normalisation"``, ``"layout"``, ``"growing"``, ``"few"`` or
            ``"duplicates"``.
        name: The tensor, input or node; empty where it is about all of them.
        message: What, where, and what to do; one line.
        severity: ``"warning"`` for what is likely to ruin a quantization, ``"note"`` for the rest.
        curve: How the ranges have grown, if it is about that: for each number of samples the share of the final width.
    """

    kind: str
    name: str
    message: str
    severity: Severity
    curve: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what goes into JSON; the curve only where there is one."""
        made: dict[str, Any] = {
            "kind": self.kind,
            "name": self.name,
            "severity": self.severity,
            "message": self.message,
        }
        return made | ({"curve": [list(point) for point in self.curve]} if self.curve else {})


def findings(
    seen: Observations,
    *,
    probed: Probe | None = None,
    inputs: Iterable[str] = (),
    causes: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    """Return what is worth telling, warnings first.

    Args:
        seen: What a whole run has observed. Of a shard's, how ranges grow can be told only roughly.
        probed: What the first layers show, from `probe`; None leaves that out.
        inputs: The model's inputs.
        causes: What made tensors NaN or infinite, from `explain_broken`.
    """
    found = [
        *_broken(seen, causes or {}),
        *(_normalisation(probed) if probed is not None else ()),
        *_constant(seen, frozenset(inputs)),
        *_dead_channels(seen),
        *_growing(seen),
        *_duplicates(seen),
    ]
    return tuple(sorted(found, key=lambda finding: finding.severity != "warning"))


def explain_broken(model: ModelSource, source: Source, seen: Observations) -> dict[str, str]:
    """Say what made tensors NaN or infinite, by reading again the few samples that did so first.

    Args:
        model: The model that was run.
        source: The data that it was run over.
        seen: What was observed.

    Returns:
        A clause for each of at most `SHOWN` tensors of each of at most `SHOWN` samples, for `findings`; a tensor of
        which nothing is found out has none.

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
    """Return how ranges have grown: for each number of samples the mean over tensors of the share of the final width.

    The numbers are those below a power of two, and the last one that of all samples.
    """
    shares: dict[int, list[float]] = {}
    for curve in _curves(seen):
        for samples, share in curve.items():
            shares.setdefault(samples, []).append(share)
    return tuple((samples, fmean(values)) for samples, values in sorted(shares.items()))


def _by_place(order: Sequence[tuple[str, Place]]) -> Iterable[tuple[Place, list[str]]]:
    """Gather the tensors of each sample."""
    for place, group in groupby(order, key=lambda item: item[1]):
        yield place, [name for name, _ in group]


def _listed(names: Sequence[str]) -> str:
    """Name some tensors and count the others: ``"'a', 'b', 'c' and 4 more"``."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


def _broken(seen: Observations, causes: Mapping[str, str]) -> list[Finding]:
    """Tell of tensors that held NaN or infinity, those of one sample and cause together; the outputs were finite."""
    groups: dict[tuple[Place, str], list[str]] = {}
    for name, place in sorted(seen.broken.items(), key=lambda item: (item[1], item[0] not in causes, item[0])):
        groups.setdefault((place, causes.get(name, "")), []).append(name)
    told = []
    for (place, cause), names in list(groups.items())[:SHOWN]:
        holds, left = ("holds", "it has no range") if len(names) == 1 else ("hold", "they have no ranges")
        made = f", {cause}" if cause else ""
        message = f"{_listed(names)} {holds} NaN or infinity at {place.where}{made}; {left}"
        told.append(Finding("broken", names[0], message, "note"))
    if rest := [name for names in list(groups.values())[SHOWN:] for name in names]:
        message = f"{_listed(rest)} hold NaN or infinity at other samples"
        told.append(Finding("broken", rest[0], message, "note"))
    return told


def _constant(seen: Observations, inputs: frozenset[str]) -> list[Finding]:
    """Tell of tensors of several values that had the same one throughout: inputs one by one, others together."""
    still = {name: row.lo for name, row in seen.ranges.items() if row.lo == row.hi and row.count > seen.samples}
    for name, row in seen.moments.items():  # of inputs that no integer kernel reads there is nothing else
        if name not in seen.ranges and row.count > seen.samples and row.variance <= ROUNDING * row.mean**2:
            still[name] = row.mean
    told = []
    for name in sorted(inputs & still.keys()):
        message = f"input {name!r} is {still[name]:.6g} throughout all samples; check that the data are read as meant"
        told.append(Finding("constant", name, message, "warning"))
    inner = sorted(still.keys() - inputs)
    for what, names in (
        ("all zero", [name for name in inner if not still[name]]),
        ("constant", [name for name in inner if still[name]]),
    ):
        if names:
            message = f"{what} over all samples: {_listed(names)}; check that the data reach that part of the model"
            told.append(Finding("constant", names[0], message, "note"))
    return told


def _dead_channels(seen: Observations) -> list[Finding]:
    """Tell of channels of several values that had the same one throughout, in tensors whose others had not."""
    dead = {
        name: int(np.sum(row.lo == row.hi))
        for name, row in seen.channels.items()
        if row.count > seen.samples and (row.lo != row.hi).any()
    }
    worst = sorted((name for name in dead if dead[name]), key=lambda name: -dead[name] / seen.channels[name].lo.size)
    if not worst:
        return []
    shown = ", ".join(f"{dead[name]} of {seen.channels[name].lo.size} of {name!r}" for name in worst[:SHOWN])
    more = f", and {sum(dead[name] for name in worst[SHOWN:])} of {len(worst) - SHOWN} more" if worst[SHOWN:] else ""
    return [Finding("constant", worst[0], f"channels that never change over all samples: {shown}{more}", "note")]


def _normalisation(probed: Probe) -> list[Finding]:
    """Tell what contradicts the preprocessing that a model was trained with."""
    told = []
    worst = max(probed.deviations, key=lambda row: row.distance, default=None)
    if worst is not None and worst.distance > DISTANCE + CHANCE / worst.samples:
        told.append(Finding("normalisation", worst.source or worst.node, _contradicted(worst), "warning"))
    for finding in (_saturated(probed.saturated), _out_of_scale(probed.bias)):
        told += [finding] if finding is not None and not told else []
    layouts = (_mixed(name, layout) for name, layout in probed.layouts.items())
    return told + [finding for finding in layouts if finding is not None]


def _contradicted(row: Deviation) -> str:
    """Say how data contradict a BatchNormalization."""
    check = "check scale, mean and std of the preprocessing"
    factor = f"{row.scale:.3g}" if row.scale >= 1 else f"1/{1 / row.scale:.3g}"
    scale = f"deviations of {factor} times those that" if row.scale != 1 else "other means than"
    if row.source is None or len(row.seen) > 4:
        return (
            f"the data give the channels before BatchNormalization {row.node!r} {scale} it recorded in training, and "
            f"move their means by {row.shift:.3g} recorded deviations; {check}"
        )
    seen, recorded = (_means(means) for means in (row.seen, row.recorded))
    spread = f" and a deviation of {row.deviation / row.scale:.3g}" if row.deviation else ""
    return (
        f"{row.source!r} has {seen} and a deviation of {row.deviation:.3g}, but what BatchNormalization {row.node!r} "
        f"recorded in training follows from {recorded}{spread}, about; {check}"
    )


def _means(means: Sequence[float]) -> str:
    """Write the means of channels: ``"means of 0.4, 0.5, 0.5"``."""
    return ("a mean of " if len(means) == 1 else "means of ") + ", ".join(f"{mean:.3g}" for mean in means)


def _out_of_scale(row: BiasRatio | None) -> Finding | None:
    """Tell of data that look like pixels, where a bias speaks of normalised data, or the other way round."""
    if row is None:
        return None
    pixels = row.lo >= -OVERSHOOT and PIXELS < row.hi <= 255 + OVERSHOOT
    units = max(-row.lo, row.hi) <= UNITS
    message = f"the data are in {row.lo:.3g}..{row.hi:.3g}, and {row.node!r} makes of them "
    if pixels and row.ratio > OUT_OF_SCALE:
        message += f"values {row.ratio:.3g} times its bias; check that they need not be divided by 255 or normalised"
    elif units and row.ratio < 1 / OUT_OF_SCALE:
        message += (
            f"values that are 1/{1 / max(row.ratio, 1e-9):.3g} of its bias; check that they need not be in 0..255"
        )
    else:
        return None
    return Finding("normalisation", row.node, message, "note")


def _saturated(shares: Mapping[str, float]) -> Finding | None:
    """Tell of first gates that tell nothing apart."""
    if not shares or median(shares.values()) < SATURATED:
        return None
    worst = max(shares, key=lambda name: shares[name])
    message = (
        f"{shares[worst]:.0%} of what gate {worst!r} gives is at its bounds, and so are most of the first gates; check "
        "the scale of the data"
    )
    return Finding("normalisation", worst, message, "warning")


def _mixed(name: str, layout: Layout) -> Finding | None:
    """Tell of a picture in the other layout."""
    near, far, other = (
        (layout.pixels, layout.planes, "NHWC") if layout.axes == "NCHW" else (layout.planes, layout.pixels, "NCHW")
    )
    if near > SMOOTH or near > MIXED * far:
        return None
    message = (
        f"input {name!r} is {layout.axes}, but the rows of its pictures resemble each other as in {other} (they differ "
        f"by {near:.2g} of the variance so, and by {far:.2g} as {layout.axes}); transpose the axes, and do not reshape"
    )
    return Finding("layout", name, message, "warning")


def _growing(seen: Observations) -> list[Finding]:
    """Tell of ranges that more samples would widen, or that there are too few samples to tell."""
    if 0 < seen.samples < ENOUGH and seen.ranges:
        message = (
            f"only {seen.samples} sample{'s' if seen.samples > 1 else ''}; whether the ranges still grow can be told "
            f"from {ENOUGH} on, and 100 to 500 are usual"
        )
        return [Finding("few", "", message, "note")]
    growth = [_growth(curve) for curve in _curves(seen)]
    grown = fmean(growth) if growth else 0.0
    if grown <= GROWN:
        return []
    curve = growth_curve(seen)
    points = ", ".join(f"{samples}: {share:.2f}" for samples, share in curve)
    message = (
        f"the ranges still grow: by {grown:.0%} on average with the last doubling of the samples ({points} of the "
        f"final width, mean over {len(growth)} tensors); add samples, or choose a rule that clips"
    )
    return [Finding("growing", "", message, "warning", curve)]


def _curves(seen: Observations) -> list[dict[int, float]]:
    """Return for each tensor with a range, by numbers of samples, the share of the width that they have shown."""
    curves = []
    for runs in seen.runs.values():
        ends = {min(samples, max(seen.samples, 1)): end for samples, end in runs.growth.items()}
        lo, hi = ends[max(ends)]
        if lo < hi:
            curves.append({samples: (high - low) / (hi - lo) for samples, (low, high) in ends.items()})
    return curves


def _growth(curve: Mapping[int, float]) -> float:
    """Return by what share of the final width a doubling of the samples has widened a range in the end.

    The last block of samples may have just begun; what is compared with all of them is at most two thirds of them.
    """
    final = max(curve)
    before = max((samples for samples in curve if 3 * samples <= 2 * final), default=None)
    if before is None:
        return 0.0
    return float(1 - curve[before] ** (1 / math.log2(final / before)))


def _duplicates(seen: Observations) -> list[Finding]:
    """Tell of samples that are the same."""
    compared = sum(times for _, times in seen.repeated.values())
    again = sorted((place, times) for place, times in seen.repeated.values() if times > 1)
    if not again:
        return []
    copies = sum(times - 1 for _, times in again)
    named = " and ".join(f"{place.where} ({times} times)" for place, times in again[:2])
    of = f"of the first {compared} samples" if compared < seen.samples else f"of {compared} samples"
    message = f"{copies} {of} are copies of others: {named}; they take time and tell nothing new"
    return [Finding("duplicates", "", message, "warning" if copies > MANY_COPIES * compared else "note")]

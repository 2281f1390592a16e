"""Two models' scores on the same items: how much worse the second is, how sure that is, and what may be lost."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import RequantError
from ...calibration.samples import Sample
from ...calibration.sources import Source
from .metrics import Metric, Score, by_row
from .metrics.intervals import area_interval, bootstrap
from .outputs import Array, Interval, binomial_p, finite, paired_interval

FEWEST = 5  # entries of which a bootstrap says something
HASHED = 10_000


@dataclass(frozen=True, slots=True)
class Versus:
    """How much worse one model is than another on the same items.

    Attributes:
        metric: The metric.
        before: The score of the first model.
        after: The score of the second.
        drop: How much worse the second is, in the metric's unit; negative where it is better.
        relative_drop: The drop as a share of the first score; None where that is 0 or infinite.
        interval: The 95 % confidence interval of the drop, for other data of the same kind; None where none is known.
        method: How the interval was found, or why there is none.
        items: How many items there are; None where that is not known.
        broken: How many items the first model gets right and the second wrong; None where items are not right or wrong.
        fixed: How many items the second model gets right and the first wrong.
        p_value: The chance of a split at least as uneven as broken against fixed if both were equally likely (exact,
            two-sided). Where several items are of one entry of the data, which makes them alike, entries with more
            broken than fixed items are counted against those with more fixed ones.
        notes: What should be known of the scores, a sentence each.
    """

    metric: Metric
    before: float
    after: float
    drop: float
    relative_drop: float | None = None
    interval: Interval | None = None
    method: str = ""
    items: int | None = None
    broken: int | None = None
    fixed: int | None = None
    p_value: float | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; what is infinite is null."""
        return {
            "metric": self.metric.name,
            "higher_is_better": self.metric.higher_is_better,
            "unit": self.metric.unit,
            "float": finite(self.before),
            "int8": finite(self.after),
            "drop": finite(self.drop),
            "relative_drop": self.relative_drop if self.relative_drop is None else finite(self.relative_drop),
            "drop_interval": None if self.interval is None else list(self.interval),
            "interval_method": self.method,
            "items": self.items,
            "broken": self.broken,
            "fixed": self.fixed,
            "p_value": self.p_value,
            "notes": list(self.notes),
        }


def versus(before: Score, after: Score) -> Versus:
    """Compare two scores, item by item.

    Raises:
        RequantError: They are of different metrics or data.
    """
    metric = before.metric
    if metric.name != after.metric.name:
        raise RequantError(f"a score in {metric.name} is not compared with one in {after.metric.name}")
    drop = metric.worse(before.value, after.value)
    plain = math.isfinite(before.value) and before.value != 0
    notes = tuple(dict.fromkeys((*before.notes, *after.notes)))
    found = Versus(metric, before.value, after.value, drop, drop / abs(before.value) if plain else None, notes=notes)
    if before.parts is None or after.parts is None:
        return replace(found, method="none: the metric tells no scores of items")
    one, two = _alike(before, after)
    counted = _counted(found, one, two, before.rows) if metric.mean and _is_binary(one) and _is_binary(two) else found
    interval, method = _interval(counted, one, two, before.rows)
    return replace(counted, interval=interval, method=method, items=len(one))


def _alike(before: Score, after: Score) -> tuple[Array, Array]:
    """Return the contributions of the items of both, with equally many columns."""
    one, two = before.parts, after.parts
    assert one is not None
    assert two is not None
    rows = [np.arange(len(parts)) if of.rows is None else of.rows for of, parts in ((before, one), (after, two))]
    if not np.array_equal(rows[0], rows[1]):
        raise RequantError(f"{before.metric.name}: {len(one)} and {len(two)} items, which are not of the same data")
    width = max(one.shape[1], two.shape[1])
    wide = [np.pad(parts, ((0, 0), (0, width - parts.shape[1]))) for parts in (one, two)]
    return wide[0], wide[1]


def _is_binary(parts: Array) -> bool:
    """Tell whether items are right or wrong, and count alike."""
    return bool((parts[:, 1] == 1).all() and ((parts[:, 0] == 0) | (parts[:, 0] == 1)).all())


def _counted(found: Versus, one: Array, two: Array, rows: Array | None) -> Versus:
    """Count what was broken and fixed."""
    lost = (one[:, 0] - two[:, 0]) * (1 if found.metric.higher_is_better else -1)
    broken, fixed = int((lost > 0).sum()), int((lost < 0).sum())
    if rows is None:
        return replace(found, broken=broken, fixed=fixed, p_value=binomial_p(broken, fixed))
    net = by_row(lost[:, None], rows)[0][:, 0]
    return replace(found, broken=broken, fixed=fixed, p_value=binomial_p(int((net > 0).sum()), int((net < 0).sum())))


# ----------------------------------------------------------------------------------------------------- intervals


def _interval(found: Versus, one: Array, two: Array, rows: Array | None) -> tuple[Interval | None, str]:
    """Return the confidence interval of the drop, and how it was found."""
    if not math.isfinite(found.drop):
        return None, "none: the drop is infinite"
    if not found.metric.sums:
        return area_interval(one, two), "DeLong, paired; items count as independent"
    if found.broken is not None and found.fixed is not None and rows is None:
        return paired_interval(found.broken, found.fixed, len(one)), "Agresti and Min, paired"
    if rows is not None:
        one, two = by_row(one, rows)[0], by_row(two, rows)[0]
    if len(one) < FEWEST:
        return None, f"none: of {len(one)} entries of data no interval can be told"
    drawn = bootstrap(found.metric, one, two)
    return drawn, f"bootstrap of {len(one)} entries of data, paired" if drawn else "none: the drop is infinite in parts"


# ------------------------------------------------------------------------------------------------- what may be lost


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much may be lost.

    Attributes:
        amount: The greatest drop: in the metric's unit, or as a share of the float model's score.
        relative: Whether it is a share.
    """

    amount: float
    relative: bool

    def bar(self, metric: Metric, before: float) -> float:
        """Return the score that a model must reach.

        A share of an infinite signal to noise ratio is that of the noise: 1 % of the signal's amplitude is 40 dB.

        Raises:
            RequantError: There is none: the float model's score is infinite, and the drop is a number of decibels.
        """
        sign = -1.0 if metric.higher_is_better else 1.0
        if math.isfinite(before):
            return before + sign * (self.amount * abs(before) if self.relative else self.amount)
        if metric.unit == "dB" and self.relative:
            return math.inf if self.amount == 0 else -20 * math.log10(self.amount)
        raise RequantError(
            f"{metric.name} of the float model is infinite, so that no drop from it is {self.amount:g}"
            + ("; give the noise as a share of the signal: 1% is 40 dB" if metric.unit == "dB" else "")
        )

    def __str__(self) -> str:
        """Return ``"0.5%"`` or ``"0.003"``."""
        return f"{100 * self.amount:g}%" if self.relative else f"{self.amount:g}"


def parse_drop(text: str) -> Allowance:
    """Read how much may be lost: ``0.003`` in the metric's unit, or ``0.5%`` of the float model's score.

    >>> parse_drop("0.5%"), parse_drop("0.003").relative
    (Allowance(amount=0.005, relative=True), False)

    Raises:
        RequantError: It is neither, or negative.
    """
    match = re.fullmatch(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(%?)\s*", text)
    if match is None or not math.isfinite(float(match[1])):
        raise RequantError(
            f"{text!r} is no drop; write 0.003, in the metric's unit, or 0.5%, of the float model's score"
        )
    return Allowance(float(match[1]) / (100 if match[2] else 1), bool(match[2]))


def reaches(metric: Metric, value: float, bar: float) -> bool:
    """Tell whether a score is at least as good as a bar."""
    return value >= bar if metric.higher_is_better else value <= bar


# ------------------------------------------------------------------------------------------------- the same data


def same_data(calibration: Source, evaluation: Source, most: int = HASHED) -> float:
    """Return the share of entries of the evaluation data that are calibration data too, 0..1.

    Entries of batches are told apart where every input has them. Of the calibration data 16 bytes per entry are kept.

    Args:
        calibration: Read once, all of it.
        evaluation: Read once, at most `most` samples of it, picked evenly, or the first where nobody knows how many
            there are.
        most: How many samples.

    Raises:
        DataError: A sample does not fit the model.
    """
    seen = {digest for sample in calibration for digest in _digests(sample)}
    picked = evaluation if evaluation.length is not None and evaluation.length <= most else evaluation.samples(most)
    common = total = 0
    for sample in picked:
        for digest in _digests(sample):
            common += digest in seen
            total += 1
    return common / total if total else 0.0


def _digests(sample: Sample) -> Iterator[bytes]:
    """Yield a digest of the feed of each entry of a sample."""
    lengths = {len(array) if array.ndim else 0 for array in sample.feed.values()}
    entries = lengths.pop() if len(lengths) == 1 else 0
    for index in range(max(entries, 1)):
        digest = hashlib.blake2b(digest_size=16)
        for name, array in sorted(sample.feed.items()):
            part = array[index : index + 1] if entries else array
            digest.update(f"{name} {part.dtype.str} {part.shape} ".encode())
            text = part.dtype.kind not in "biufc"
            digest.update(repr(part.tolist()).encode() if text else np.ascontiguousarray(part).tobytes())
        yield digest.digest()

"""Compare two models' scores on the same items: the drop, its confidence interval, and the allowed drop."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import RequantError
from ...calibration.data.samples import Sample
from ...calibration.data.sources import Source
from ...calibration.model.session import Array
from ...system.given import check_kind
from .classes import Interval
from .metrics import Metric, Score, by_row
from .metrics.intervals import area_interval, bootstrap, jackknife
from .shares import binomial_p, paired_interval
from .sqnr import finite

FEWEST = 5  # entries that a bootstrap needs
HASHED = 10_000
MOST_DB = 200
"""The greatest drop in decibels: the noise of float32 is 150 dB below the signal."""


@dataclass(frozen=True, slots=True)
class Versus:
    """The drop from one model to another on the same items.

    Attributes:
        metric: The metric.
        before: The score of the first model.
        after: The score of the second.
        drop: The loss of the second model, in the metric's unit; negative if it is better.
        relative_drop: The drop as a share of the first score; None if this score is 0 or infinite.
        drop_interval: The 95 % confidence interval of the drop, for other data of the same kind; None if unknown.
        method: The method of the interval, or why there is none.
        items: The number of items; None if unknown.
        broken: Items that only the first model gets right; None if items are not right or wrong.
        fixed: Items that only the second model gets right.
        p_value: The probability of a split at least this uneven if broken and fixed are equally likely (exact,
            two-sided). Items of one entry of the data depend on each other. Then entries with more broken items are
            counted against entries with more fixed items.
        notes: Remarks on the scores, a sentence each.
    """

    metric: Metric
    before: float
    after: float
    drop: float
    relative_drop: float | None = None
    drop_interval: Interval | None = None
    method: str = ""
    items: int | None = None
    broken: int | None = None
    fixed: int | None = None
    p_value: float | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; infinite values are null."""
        return {
            "metric": self.metric.name,
            "higher_is_better": self.metric.higher_is_better,
            "unit": self.metric.unit,
            "float": finite(self.before),
            "int8": finite(self.after),
            "drop": finite(self.drop),
            "relative_drop": self.relative_drop if self.relative_drop is None else finite(self.relative_drop),
            "drop_interval": None if self.drop_interval is None else list(self.drop_interval),
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
        RequantError: The scores are in different metrics or of different data.
    """
    metric = before.metric
    if metric.name != after.metric.name:
        raise RequantError(f"a score in {metric.name} cannot be compared with a score in {after.metric.name}")
    drop = metric.worse(before.value, after.value)
    plain = math.isfinite(before.value) and before.value != 0
    notes = tuple(dict.fromkeys((*before.notes, *after.notes)))
    result = Versus(metric, before.value, after.value, drop, drop / abs(before.value) if plain else None, notes=notes)
    if before.parts is None or after.parts is None:
        return replace(result, method="none: the metric has no score per item")
    if metric.uneven:
        return _of_entries(result, before, after)
    one, two = _alike(before, after)
    counted = _counted(result, one, two, before.rows) if metric.mean and _is_binary(one) and _is_binary(two) else result
    interval, method = _interval(counted, one, two, before.rows)
    return replace(counted, drop_interval=interval, method=method, items=len(one))


def _entries(score: Score) -> Array:
    """Return the entry of each item."""
    assert score.parts is not None
    return np.arange(len(score.parts)) if score.rows is None else score.rows


def _of_entries(result: Versus, before: Score, after: Score) -> Versus:
    """Return a copy with an interval, for models with different numbers of items in an entry.

    Raises:
        RequantError: The scores are of different entries.
    """
    sides = [(each.parts, _entries(each)) for each in (before, after) if each.parts is not None]
    counts = [len(np.unique(rows)) for _, rows in sides]
    if counts[0] != counts[1]:
        raise RequantError(
            f"{before.metric.name}: {counts[0]} and {counts[1]} entries; the scores are of different data"
        )
    if counts[0] < FEWEST:
        return replace(result, items=counts[0], method=_too_few(counts[0]))
    interval = jackknife(result.metric, *sides)
    method = f"jackknife of {counts[0]} entries of data, paired"
    return replace(
        result, items=counts[0], drop_interval=interval, method=method if interval else "none: it is undefined"
    )


def _too_few(count: int) -> str:
    """Return why there is no interval."""
    return f"none: {count} entries of data are too few for an interval"


def _alike(before: Score, after: Score) -> tuple[Array, Array]:
    """Return the contributions of the items to both scores, padded to the same number of columns."""
    one, two = before.parts, after.parts
    assert one is not None
    assert two is not None
    rows = [_entries(each) for each in (before, after)]
    if not np.array_equal(rows[0], rows[1]):
        raise RequantError(f"{before.metric.name}: {len(one)} and {len(two)} items; the scores are of different data")
    width = max(one.shape[1], two.shape[1])
    wide = [np.pad(parts, ((0, 0), (0, width - parts.shape[1]))) for parts in (one, two)]
    return wide[0], wide[1]


def _is_binary(parts: Array) -> bool:
    """Whether every item is right or wrong, with weight 1."""
    return bool((parts[:, 1] == 1).all() and ((parts[:, 0] == 0) | (parts[:, 0] == 1)).all())


def _counted(result: Versus, one: Array, two: Array, rows: Array | None) -> Versus:
    """Return a copy with the counts of broken and fixed items."""
    lost = (one[:, 0] - two[:, 0]) * (1 if result.metric.higher_is_better else -1)
    broken, fixed = int((lost > 0).sum()), int((lost < 0).sum())
    if rows is None:
        return replace(result, broken=broken, fixed=fixed, p_value=binomial_p(broken, fixed))
    net = by_row(lost[:, None], rows)[0][:, 0]
    return replace(result, broken=broken, fixed=fixed, p_value=binomial_p(int((net > 0).sum()), int((net < 0).sum())))


# ----------------------------------------------------------------------------------------------------- intervals


def _interval(result: Versus, one: Array, two: Array, rows: Array | None) -> tuple[Interval | None, str]:
    """Return the confidence interval of the drop, and its method."""
    if not math.isfinite(result.drop):
        return None, "none: the drop is infinite"
    if not result.metric.sums:
        area = area_interval(one, two)
        return area, ("DeLong, paired; items count as independent" if area else "none: a label has one item only")
    if result.broken is not None and result.fixed is not None and rows is None:
        return paired_interval(result.broken, result.fixed, len(one)), "Agresti and Min, paired"
    if rows is not None:
        one, two = by_row(one, rows)[0], by_row(two, rows)[0]
    if len(one) < FEWEST:
        return None, _too_few(len(one))
    drawn = bootstrap(result.metric, one, two)
    return (
        drawn,
        f"bootstrap of {len(one)} entries of data, paired" if drawn else "none: the drop of some draws is infinite",
    )


# ------------------------------------------------------------------------------------------------- what may be lost


@dataclass(frozen=True, slots=True)
class Allowance:
    """The allowed drop.

    Attributes:
        amount: The largest drop: in the metric's unit, or as a share of the float model's score.
        relative: Whether the amount is a share.
    """

    amount: float
    relative: bool

    def bar(self, metric: Metric, before: float) -> float:
        """Return the score that a model must reach.

        If the float model's SQNR is infinite, a share is the noise's share of the signal's amplitude: 1 % is 40 dB.

        Raises:
            RequantError: The float model's score is infinite, and the drop is a number of decibels; or the score is 0,
                and the drop is a share of it.
        """
        self.check(metric)
        if self.relative and before == 0:
            raise RequantError(
                f"{metric.name} of the float model is 0, and every model keeps a share of 0: check the labels, or give "
                "the drop in the metric's unit"
            )
        sign = -1.0 if metric.higher_is_better else 1.0
        if math.isfinite(before):
            return before + sign * (self.amount * abs(before) if self.relative else self.amount)
        if metric.unit == "dB" and self.relative:
            return math.inf if self.amount == 0 else -20 * math.log10(self.amount)
        raise RequantError(
            f"{metric.name} of the float model is infinite: a drop of {self.amount:g} is undefined"
            + ("; give the noise as a share of the signal: 1% is 40 dB" if metric.unit == "dB" else "")
        )

    def check_range(self, metric: Metric) -> None:
        """Check that a score in a metric can drop so far.

        Raises:
            RequantError: It cannot.
        """
        is_share = self.relative or metric.unit == "share"
        most = 1.0 if is_share else MOST_DB if metric.unit == "dB" else math.inf
        if self.amount > most:
            greatest = "100%" if is_share else f"{MOST_DB} dB"
            raise RequantError(f"{self} is out of range; the greatest drop is {greatest}")

    def check(self, metric: Metric) -> None:
        """Check that the drop is no share of 0, the float model's own error against itself.

        Raises:
            RequantError: It is.
        """
        if self.relative and metric.reference and not metric.higher_is_better:
            raise RequantError(
                f"{metric.name} without labels is 0 for the float model, and {self} of 0 is 0; give the drop in the "
                f"metric's unit: {self.amount:g}"
            )

    def __str__(self) -> str:
        """Return ``"0.5%"`` or ``"0.003"``."""
        return f"{100 * self.amount:g}%" if self.relative else f"{self.amount:g}"


def parse_drop(text: str) -> Allowance:
    """Return the allowed drop: ``0.003`` in the metric's unit, or ``0.5%`` of the float model's score.

    >>> parse_drop("0.5%"), parse_drop("0.003").relative
    (Allowance(amount=0.005, relative=True), False)

    Raises:
        RequantError: The text has another form, or is negative.
    """
    check_kind(text, str, "a drop must be a text such as '0.5%'")
    match = re.fullmatch(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(%?)\s*", text)
    if match is None or not math.isfinite(float(match[1])):
        raise RequantError(
            f"{text!r} is not a drop; write 0.003 (in the metric's unit) or 0.5% (of the float model's score)"
        )
    return Allowance(float(match[1]) / (100 if match[2] else 1), bool(match[2]))


def reaches(metric: Metric, value: float, bar: float) -> bool:
    """Whether a score is at least as good as a bar."""
    return value >= bar if metric.higher_is_better else value <= bar


# ------------------------------------------------------------------------------------------------- the same data


def same_data(calibration: Source, evaluation: Source, most: int = HASHED) -> float:
    """Return the share of entries of the evaluation data that are also calibration data, 0..1.

    The entries of a batch are compared one by one if every input has a batch axis. Memory holds 16 bytes per entry of
    the calibration data.

    Args:
        calibration: Read once, completely.
        evaluation: Read once: at most `most` samples, picked evenly, or the first ones if the length is unknown.
        most: The number of samples.

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

"""Float against INT8, item by item: agreement, broken and fixed items, signal to quantization noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ... import RequantError
from ...calibration.samples import Sample

Array = npt.NDArray[Any]
Outputs = Mapping[str, Array]
Run = Callable[[Mapping[str, Array]], Outputs]

Watch = Callable[[Outputs, Outputs, Sample], None]
Interval: TypeAlias = tuple[float, float]

NO_CLASS = -1  # no label that is judged is negative
HUGE = 1e300
Z = NormalDist().inv_cdf(0.975)  # two-sided, 95 %


@dataclass(frozen=True, slots=True)
class Labelled:
    """What is known where the right answers are.

    Attributes:
        items: How many items have a label.
        float_correct: How many the float model gets right.
        int8_correct: How many the INT8 model gets right.
        broken: How many the float model gets right and the INT8 model wrong.
        fixed: How many the INT8 model gets right and the float model wrong.
    """

    items: int
    float_correct: int
    int8_correct: int
    broken: int
    fixed: int

    @property
    def float_accuracy(self) -> float:
        """Share of items that the float model gets right, 0..1."""
        return self.float_correct / self.items

    @property
    def int8_accuracy(self) -> float:
        """Share of items that the INT8 model gets right, 0..1."""
        return self.int8_correct / self.items

    @property
    def p_value(self) -> float:
        """Chance of a split at least this uneven if broken and fixed were equally likely (exact, two-sided)."""
        return binomial_p(self.broken, self.fixed)

    @property
    def drop_interval(self) -> Interval:
        """The 95 % confidence interval of the drop in accuracy, -1..1; items count as independent of each other."""
        return paired_interval(self.broken, self.fixed, self.items)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far an INT8 model is from its float original on the same data.

    Attributes:
        samples: How many samples were run.
        agreement: Share of equal top-1 predictions, 0..1; None when no output is a score per class.
        sqnr_db: Signal to quantization noise of each float output in dB; infinite where the outputs are equal.
        labelled: Counts against the labels, None without labels.
        predicted_drop: What INT8 should lose of the top-1 accuracy if the float model's probabilities are right, -1..1:
            the mean over predictions of the probability of the float model's class less that of the INT8 model's. No
            labels are used. None when no output is a score per class.
        predictions: How many predictions there are of those.
    """

    samples: int
    agreement: float | None
    sqnr_db: Mapping[str, float]
    labelled: Labelled | None = None
    predicted_drop: float | None = None
    predictions: int = 0

    @property
    def agreement_interval(self) -> Interval | None:
        """The 95 % confidence interval of the agreement; predictions count as independent of each other."""
        return None if self.agreement is None else score_interval(self.agreement, self.predictions)

    @property
    def worst_sqnr_db(self) -> float:
        """The least SQNR of any output."""
        return min(self.sqnr_db.values(), default=math.inf)


@dataclass
class _Tally:
    """Sums over the samples."""

    lenient: bool = False  # labels that do not fit the predictions are for somebody else
    samples: int = 0
    predictions: int = 0
    equal: int = 0
    lost: float = 0.0
    signal: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    right: list[tuple[bool, bool]] = field(default_factory=list)

    def add(self, reference: Outputs, candidate: Outputs, label: Array | int | None, where: str) -> None:
        """Take one sample into account."""
        self.samples += 1
        for name, value in reference.items():
            if is_float(value):
                signal, noise = powers(value, candidate[name])
                self.signal[name] = self.signal.get(name, 0.0) + signal
                self.noise[name] = self.noise.get(name, 0.0) + noise
        before, after = predictions(reference), predictions(candidate)
        if before is not None:
            if after is None or after.shape != before.shape:
                after = np.full_like(before, NO_CLASS - 1)  # agrees with nothing
            self.predictions += before.size
            self.equal += int((before == after).sum())
            self.lost += _expected_loss(reference, before, after)
        if label is not None:
            self._judge(before, after, np.asarray(label).reshape(-1), where)

    def _judge(self, before: Array | None, after: Array | None, labels: Array, where: str) -> None:
        if before is None or after is None or before.size != labels.size or (self.lenient and labels.dtype.kind == "f"):
            if self.lenient:
                return
            count = 0 if before is None else before.size
            raise RequantError(
                f"{where}: {labels.size} label(s) for {count} prediction(s); give one class each, or no labels"
            )
        pairs = zip(before.reshape(-1), after.reshape(-1), labels, strict=True)
        self.right += [(bool(a == label), bool(b == label)) for a, b, label in pairs if label >= 0]

    def result(self) -> Accuracy:
        """Return what the sums say."""
        sqnr = {name: decibels(self.signal[name], self.noise[name]) for name in self.signal}
        count = self.predictions
        agreement, lost = (self.equal / count, self.lost / count) if count else (None, None)
        return Accuracy(self.samples, agreement, sqnr, _labelled(self.right), lost, count)


def _expected_loss(outputs: Outputs, before: Array, after: Array) -> float:
    """Return the sum of the probabilities of the float model's classes, less those of others that were predicted.

    Scores that are no probabilities (not negative, of sum 1) are logits.
    """
    scores, differs = class_scores(outputs), (before != after) & (before != NO_CLASS)
    if scores is None or not differs.any():
        return 0.0
    rows = np.clip(scores[differs].astype(np.float64), -HUGE, HUGE)  # of infinities no difference is taken
    slack = rows.shape[1] * float(np.finfo(scores.dtype).eps)  # of a sum of so many rounded quotients
    if (rows < 0).any() or (np.abs(rows.sum(axis=1) - 1) > slack).any():
        rows = np.exp(rows - rows.max(axis=1, keepdims=True))
        rows /= rows.sum(axis=1, keepdims=True)
    index, other = np.arange(len(rows)), after[differs]
    given = np.where(other >= 0, rows[index, other], 0.0)
    return float((rows[index, before[differs]] - given).sum())


def _labelled(right: Sequence[tuple[bool, bool]]) -> Labelled | None:
    """Count (float right, INT8 right) pairs."""
    if not right:
        return None
    before, after = sum(a for a, _ in right), sum(b for _, b in right)
    broken, fixed = sum(a and not b for a, b in right), sum(b and not a for a, b in right)
    return Labelled(len(right), before, after, broken, fixed)


def measure(
    run_float: Run,
    run_int8: Run,
    samples: Iterable[Sample],
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
) -> Accuracy:
    """Run both models over the samples and compare them; see `compare_outputs`.

    Raises:
        RequantError: The labels of a sample do not fit the predictions.
    """
    results = ((run_float(sample.feed), run_int8(sample.feed), sample) for sample in samples)
    return compare_outputs(results, progress, watch)


def compare_outputs(
    results: Iterable[tuple[Outputs, Outputs, Sample]],
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
) -> Accuracy:
    """Compare the outputs of the float and of the INT8 model for each sample.

    A label below 0 is not judged.

    Args:
        results: The outputs of both models with the sample.
        progress: Called with how many samples are done.
        watch: Called with each of the results; labels may then be for it, and need not fit the predictions.

    Raises:
        RequantError: The labels of a sample do not fit the predictions.
    """
    tally = _Tally(lenient=watch is not None)
    for reference, candidate, sample in results:
        tally.add(reference, candidate, sample.label, sample.where)
        if watch is not None:
            watch(reference, candidate, sample)
        if progress is not None:
            progress(tally.samples)
    return tally.result()


def predictions(outputs: Outputs) -> Array | None:
    """Return the top-1 classes in the first output that holds scores per class, None when there is none.

    Where a score is NaN the class is `NO_CLASS`. What holds scores is said at `class_scores`.
    """
    value = class_scores(outputs)
    return None if value is None else np.where(np.isnan(value).any(axis=-1), NO_CLASS, value.argmax(axis=-1))


def class_scores(outputs: Outputs) -> Array | None:
    """Return the first output that holds scores per class, the class axis last; None when there is none.

    The class axis is the last one; of a map (N, ?, ?, ?) it is the shorter of the second and the last. An axis of
    length 1 holds no classes.
    """
    for value in outputs.values():
        if not is_float(value) or value.ndim < 2 or value.size == 0:
            continue
        axis = class_axis(value)
        if value.shape[axis] > 1:
            return np.moveaxis(value, axis, -1)
    return None


def powers(exact: Array, other: Array) -> tuple[float, float]:
    """Return the sums of squares of `exact` and of its difference from `other`.

    Where both are NaN, or the same infinity, nothing differs. Another shape, or a value that is not finite where
    the other one is, makes the second sum infinite or NaN.
    """
    if exact.shape == other.shape:
        wide = exact.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            difference = wide - other
            signal, noise = float(np.vdot(wide, wide)), float(np.vdot(difference, difference))
        if math.isfinite(signal) and math.isfinite(noise):  # the usual case, several times as fast as what follows
            return signal, noise
    finite = exact[np.isfinite(exact)].astype(np.float64)
    signal = float(np.vdot(finite, finite))
    if exact.shape != other.shape:
        return signal, math.inf
    differs = (exact != other) & ~(np.isnan(exact) & np.isnan(other))
    difference = exact[differs].astype(np.float64) - other[differs]
    return signal, float(np.vdot(difference, difference))


def is_float(value: object) -> bool:
    """Whether an output is a tensor of floats; the runtime also gives integers, strings, sequences and maps."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


QUIET = 1e-3
"""A channel counts as no quieter than this share of the loudest one: of what hardly ever speaks, noise tells little."""

ROWS = 32
"""Of fewer values of a channel its power is chance."""


def balance(outputs: Sequence[Array]) -> Array | None:
    """Return weights of the channels of an output with which all of them have the same power, (C,) float64.

    The channels are those of `class_axis`. With the weights the power of the whole output is what it was.

    Args:
        outputs: The output, an array per sample.

    Returns:
        None where an output has no channels, or is not finite, or has less than `ROWS` values of each channel.
    """
    parts = [_by_channel(each) for each in outputs]
    if len({part.shape for part in parts}) != 1 or not parts[0].size:
        return None
    squares = np.sum(parts, axis=0)
    if sum(each.size for each in outputs) < ROWS * len(squares) or not np.isfinite(squares).all() or not squares.any():
        return None
    loud = np.maximum(squares, QUIET * squares.max())
    return np.asarray(squares.sum() / (len(squares) * loud))


def balanced_noise(exact: Array, other: Array, weights: Array | None) -> float:
    """Return the sum of squares of a difference with weights for channels; 0 without weights or for other shapes."""
    if weights is None or exact.shape != other.shape:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.vdot(_by_channel(exact.astype(np.float64) - other), weights))


def class_axis(output: Array) -> int:
    """Return the axis of classes: the last one; of a map (N, ?, ?, ?) the shorter of the second and the last."""
    return 1 if output.ndim == 4 and output.shape[1] < output.shape[-1] else output.ndim - 1


def _by_channel(output: Array) -> Array:
    """Return the sum of squares of each channel, (C,) float64; of a vector there are none."""
    if output.ndim < 2:
        return np.zeros(0)
    axis = class_axis(output)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.square(output, dtype=np.float64)
    return np.asarray(squares.sum(axis=tuple(i for i in range(output.ndim) if i != axis)))


def decibels(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)``; infinite without noise, and NaN noise counts as no signal left."""
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 and math.isfinite(noise) else -math.inf


def binomial_p(broken: int, fixed: int) -> float:
    """Return the two-sided p-value of an exact binomial test of `broken` against `fixed` (McNemar's, exact).

    >>> binomial_p(4, 4), binomial_p(8, 0)
    (1.0, 0.0078125)
    """
    total = broken + fixed
    tail = outcomes = 1  # outcomes = comb(total, k)
    for k in range(min(broken, fixed)):
        outcomes = outcomes * (total - k) // (k + 1)
        tail += outcomes
    return min(1.0, float(2 * tail / 2**total))


def score_interval(share: float, items: int) -> Interval:
    """Return the 95 % confidence interval of a share of items.

    Wilson, "Probable inference, the law of succession, and statistical inference", Journal of the American Statistical
    Association 22 (1927) 209-212: ``(p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)``.

    >>> tuple(round(end, 4) for end in score_interval(1.0, 64))
    (0.9434, 1.0)
    """
    square = Z * Z / items
    reach = math.sqrt(Z * Z * share * (1 - share) / items + square * square / 4)
    middle = share + square / 2
    return max(0.0, (middle - reach) / (1 + square)), min(1.0, (middle + reach) / (1 + square))


def paired_interval(broken: int, fixed: int, items: int) -> Interval:
    """Return the 95 % confidence interval of ``(broken - fixed) / items``.

    Agresti and Min, "Simple improved confidence intervals for comparing matched proportions", Statistics in Medicine
    24 (2005) 729-740: Wald's interval after half an item was added to each of the four counts, with ``b`` and ``c``
    the two that differ and ``n`` all: ``d = (b - c) / n``, ``d +- 1.96 sqrt(b + c - (b - c)^2 / n) / n``.

    >>> tuple(round(end, 4) for end in paired_interval(22, 6, 650))
    (0.0085, 0.0406)
    """
    b, c, n = broken + 0.5, fixed + 0.5, items + 2.0
    reach = Z * math.sqrt(b + c - (b - c) ** 2 / n) / n
    middle = (b - c) / n
    return max(-1.0, middle - reach), min(1.0, middle + reach)


def accuracy_json(accuracy: Accuracy) -> dict[str, Any]:
    """Return agreement, what follows from it, and counts against labels, null where there are none; and SQNR."""
    labelled, agreed = accuracy.labelled, accuracy.agreement_interval
    return {
        "agreement": accuracy.agreement,
        "agreement_interval": agreed and list(agreed),
        "predicted_drop": accuracy.predicted_drop,
        "items": labelled and labelled.items,
        "float_accuracy": labelled and labelled.float_accuracy,
        "int8_accuracy": labelled and labelled.int8_accuracy,
        "broken": labelled and labelled.broken,
        "fixed": labelled and labelled.fixed,
        "p_value": labelled and labelled.p_value,
        "drop_interval": labelled and list(labelled.drop_interval),
        "sqnr_db": finite(accuracy.worst_sqnr_db),
        "sqnr_db_by_output": {name: finite(value) for name, value in accuracy.sqnr_db.items()},
    }


def finite(value: float) -> float | None:
    """Return `value`, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None

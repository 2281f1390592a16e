"""The predicted classes of outputs: which output holds scores per class, how that is known, and what a change costs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from ...calibration.data.samples import Sample
from ...calibration.model.session import Array
from .columns import FIXED, Columns
from .transcripts import text_losses

Outputs = Mapping[str, Array]
Interval: TypeAlias = tuple[float, float]

NO_CLASS = -1
"""The prediction where a score is NaN. It differs from every label that counts."""
UNLIKE = -2
"""The prediction of outputs without a class for this item. It differs from `NO_CLASS` too."""
HUGE = 1e300
SEQUENCE = 3
"""The rank of scores (N, T, C) of a sequence; more axes are a map."""
UNIT = 1e-3
"""Rows whose length differs from 1 by at most this are normalised: directions, not scores."""
FEWEST = 16
"""The least number of items from which a drop is predicted."""
ROWS = 2
"""The rank of scores that are a row for each item."""
ONE_CLASS = 0.98
"""Rows are no scores per class if more than this share of them has the same greatest value, unless they are
probabilities or have labels: a regression of several quantities has one that is always the greatest."""
FLOOR = -0.375
"""The least value of a HardSwish. That of a GELU is -0.17, of a SiLU -0.28, of a Mish -0.31: rows behind one of them
are never below this, and logits are."""
SATURATED = 1e-4
"""Probabilities are saturated if p(class) is less than this below 1, on average: all of them are nearly 0 or 1."""
ENOUGH = 600
"""From this many items, unchanged classes of saturated probabilities say enough: with none changed of n, at most 3 / n
of other items change, with 95 % confidence (the rule of three)."""
ALIKE = 2
"""Heads of logits have at most this many times as many classes as the others."""
Z = NormalDist().inv_cdf(0.975)  # 95 %, two-sided


def is_float(value: object) -> bool:
    """Whether an output is a tensor of floats, not integers, strings, a sequence or a map."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def class_axis(output: Array) -> int:
    """Return the axis of classes: the last one, or for a map (N, ?, ?, ?) the shorter of the second and the last."""
    return 1 if output.ndim == 4 and output.shape[1] < output.shape[-1] else output.ndim - 1


def class_scores(outputs: Outputs) -> Array | None:
    """Return the first output that can hold scores per class, with the class axis last; None if there is none.

    A class axis (`class_axis`) has a length of at least 2. Use this where the user says that the model classifies;
    `evident_scores` asks for evidence.
    """
    return next(iter(candidates(outputs).values()), None)


def candidates(outputs: Outputs) -> dict[str, Array]:
    """Return the outputs that can hold scores per class, by name, with the class axis last."""
    found = {}
    for name, value in outputs.items():
        if is_float(value) and value.ndim >= 2 and value.size and value.shape[class_axis(value)] > 1:
            found[name] = np.moveaxis(value, class_axis(value), -1)
    return found


def evident_scores(outputs: Outputs, sample: Sample) -> tuple[str, Array] | None:
    """Return the output that is known to hold scores per class, with its name; None without evidence.

    It is the first one with probabilities, else the first one: a head of classes may stand behind one of boxes.

    Evidence is one of these: an integer label for each row of scores; rows of probabilities; one row for each item of
    the batch, unless the rows are normalised to length 1, as embeddings are. A detector has many rows per item, and its
    rows are no probabilities.

    Args:
        outputs: The outputs of the float model.
        sample: Its inputs and the label.
    """
    label = None if sample.label is None else np.asarray(sample.label)
    found = candidates(outputs)
    if label is not None and label.dtype.kind in "iub":
        for name, scores in found.items():
            if label.size == math.prod(scores.shape[:-1]):
                return name, scores
    probable = (each for each in found.items() if are_probabilities(_rows(each[1])))
    others = (each for each in found.items() if _has_row_per_item(each[1], sample))
    return next(chain(probable, others), None)


def _are_evident(scores: Array, sample: Sample) -> bool:
    """Whether scores are known to be per class without a label: probabilities, or a row for each item of the batch."""
    return are_probabilities(_rows(scores)) or _has_row_per_item(scores, sample)


def _has_row_per_item(scores: Array, sample: Sample) -> bool:
    """Whether there is a row for each item of the batch, and the rows are no embeddings."""
    rows = _rows(scores)
    return len(rows) == items_of(sample) and not _are_normalised(rows)


def _rows(scores: Array) -> Array:
    """Return scores with the class axis last as rows, (R, C)."""
    return scores.reshape(-1, scores.shape[-1])


def open_rows(outputs: Iterable[ir.Value]) -> frozenset[str]:
    """Return the outputs (N, L) whose length L the model leaves open: each value belongs to a frame, not to a class."""
    found = ((str(each.name), each.shape) for each in outputs)
    return frozenset(
        name for name, shape in found if shape is not None and len(shape) == ROWS and not isinstance(shape[-1], int)
    )


def heads_of(outputs: Outputs, name: str, sample: Sample) -> list[str]:
    """Return the outputs that classify side by side, as one output for each character of a short text does.

    Each has a row of scores for each item. With labels they are heads only if there is a label for each. Without labels
    they have the shape (N, C) of one of them; heads with another number of classes have probabilities as this one, or
    stand beside several of its shape and have at most `ALIKE` times as many classes as they, or as few. An embedding
    or boxes beside a single output of logits are not judged as classes.

    Args:
        outputs: The outputs of the float model.
        name: The output with scores per class, see `evident_scores`.
        sample: The inputs and the label.
    """
    rows = _beside(outputs, name, sample)
    if name not in rows:
        return [name]
    first = rows[name]
    equal = [each for each, scores in rows.items() if scores.shape == first.shape]
    if sample.label is not None:
        count = np.asarray(sample.label).size
        return next((each for each in ([*rows], equal) if len(first) * len(each) == count), [name])
    if are_probabilities(first):
        return [each for each, scores in rows.items() if each in equal or are_probabilities(scores)]
    least, most = first.shape[1] / ALIKE, first.shape[1] * ALIKE
    return [each for each, scores in rows.items() if least <= scores.shape[1] <= most] if len(equal) > 1 else equal


def _beside(outputs: Outputs, name: str, sample: Sample) -> dict[str, Array]:
    """Return the outputs that may classify beside one with scores (N, C): those with such rows, by name."""
    found = candidates(outputs)
    count, rank = len(found[name]), found[name].ndim
    rows = {each: scores for each, scores in found.items() if scores.ndim == rank == ROWS and len(scores) == count}
    return {each: scores for each, scores in rows.items() if _are_evident(scores, sample)}


def items_of(sample: Sample) -> int:
    """Return the number of items of a feed: the common length of the first axes of its inputs, else 1."""
    lengths = {len(array) for array in sample.feed.values() if array.ndim}
    return lengths.pop() if len(lengths) == 1 else 1


def are_probabilities(rows: Array) -> bool:
    """Whether no value of (R, C) is negative, and each row has the sum 1 within the rounding error of the sum."""
    slack = rows.shape[1] * float(np.finfo(rows.dtype).eps)
    with np.errstate(invalid="ignore", over="ignore"):
        sums = rows.sum(axis=1, dtype=np.float64)
        return bool((rows >= 0).all() and (np.abs(sums - 1) <= slack).all())


def _are_normalised(rows: Array) -> bool:
    """Whether each row of (R, C) has length 1."""
    with np.errstate(invalid="ignore", over="ignore"):
        return bool((np.abs(np.linalg.norm(rows.astype(np.float64), axis=1) - 1) <= UNIT).all())


def classes_of(scores: Array) -> Array:
    """Return the top-1 classes of scores with the class axis last; `NO_CLASS` where a score is NaN."""
    return np.where(np.isnan(scores).any(axis=-1), NO_CLASS, scores.argmax(axis=-1))


def predictions(outputs: Outputs) -> Array | None:
    """Return the top-1 classes of `class_scores`; None if there are no scores.

    If a score is NaN, the class is `NO_CLASS`.
    """
    value = class_scores(outputs)
    return None if value is None else classes_of(value)


def predictions_like(expected: Array, outputs: Outputs, name: str | None = None) -> Array:
    """Return the top-1 classes of outputs in the shape of another model's; all `UNLIKE` if the shapes differ.

    Args:
        expected: The classes of the other model.
        outputs: The outputs.
        name: The output with the scores; None for the output that `class_scores` returns.
    """
    scores = class_scores(outputs) if name is None else candidates(outputs).get(name)
    actual = None if scores is None else classes_of(scores)
    return np.full_like(expected, UNLIKE) if actual is None or actual.shape != expected.shape else actual


@dataclass
class Tally:
    """Sums over the predictions of two models.

    Attributes:
        output: The output that holds scores per class; empty before the first sample.
        heads: This output and those that classify beside it, see `heads_of`.
        left_out: The outputs that may hold scores per class too, and are not judged as such.
        evident: Whether all samples so far have evidence for this.
        predictions: The number of predictions.
        equal: The number of equal predictions.
        lost: The sum of the losses: p(class of the float model) - p(class of the INT8 model).
        whole: The losses of whole items: of texts (`text_losses`), else of all predictions (`_whole_losses`).
        sure: The sum of p(class of the float model).
        widths: The number of classes of each head.
        maps: Whether an item has a map of predictions, as in segmentation.
        sound: Whether all samples have labels or rows of probabilities.
        probable: Whether all rows of all samples are probabilities.
        seen: The number of predictions of each class by the float model.
        span: The least and the greatest score of the float model.
        columns: Sums over the rows of each head.
    """

    output: str = ""
    heads: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    evident: bool = True
    predictions: int = 0
    equal: int = 0
    lost: float = 0.0
    whole: list[float] = field(default_factory=list)
    sure: float = 0.0
    widths: tuple[int, ...] = ()
    maps: bool = False
    sound: bool = True
    probable: bool = True
    seen: Counter[int] = field(default_factory=Counter)
    span: tuple[float, float] = (math.inf, -math.inf)
    columns: dict[str, Columns] = field(default_factory=dict)

    def add(self, reference: Outputs, candidate: Outputs, sample: Sample) -> tuple[Array, Array] | None:
        """Add one sample; return the predictions of both models, None without evidence."""
        found = evident_scores(reference, sample)
        if found is None or self.output not in ("", found[0]):
            self.evident = False
            return None
        self.output, scores = found
        heads = heads_of(reference, self.output, sample)
        self.heads.update(heads)
        self.left_out.update(_beside(reference, self.output, sample))
        each = {self.output: scores} if len(heads) == 1 else {head: reference[head] for head in heads}
        self.widths = tuple(head.shape[-1] for head in each.values())
        judged = [self._judge(head, name, candidate, labelled=sample.label is not None) for name, head in each.items()]
        expected, actual, losses = (
            found[0] if len(heads) == 1 else np.stack(found, axis=1) for found in zip(*judged, strict=True)
        )
        self.predictions += expected.size
        self.equal += int((expected == actual).sum())
        self.lost += float(losses.sum())
        texts = None
        if len(heads) == 1:
            texts = text_losses(losses, expected, actual, scores.shape[-1], sample)
        self.whole += _whole_losses(losses, items_of(sample)) if texts is None else texts
        classes, counts = np.unique(expected, return_counts=True)  # of a map with a million pixels
        self.seen.update(dict(zip(classes.tolist(), counts.tolist(), strict=True)))
        self.maps = self.maps or (scores.ndim > SEQUENCE and expected.size != items_of(sample))
        return expected, actual

    def _judge(self, scores: Array, name: str, candidate: Outputs, *, labelled: bool) -> tuple[Array, Array, Array]:
        """Add the scores of one head; return the predictions of both models, and the losses.

        Args:
            scores: The scores of the float model, with the class axis last.
            name: The output that holds them.
            candidate: The outputs of the INT8 model.
            labelled: Whether the sample has labels.
        """
        expected = classes_of(scores)
        actual = predictions_like(expected, candidate, name)
        top, losses = _losses(scores, expected, actual)
        self.sure += top
        low, high = self.span
        self.span = float(scores.min(initial=low)), float(scores.max(initial=high))
        self.probable = self.probable and are_probabilities(_rows(scores))
        self.sound = self.sound and (labelled or self.probable)
        if not self.sound:
            self.columns[name] = self.columns.get(name, Columns()).with_rows(_rows(scores))
        return expected, actual, losses.reshape(expected.shape)

    @property
    def classes(self) -> int:
        """The number of classes, 0 without any; of several heads the harmonic mean, as a guess would have it."""
        return round(statistics.harmonic_mean(self.widths)) if self.widths else 0

    @property
    def known(self) -> bool:
        """Whether there are predictions, and evidence for all of them.

        Without labels and probabilities, numbers that are never negative and exceed 1 are amounts: a regression of
        several quantities, or an embedding behind a Relu; so are many rows that are never below `FLOOR`, an embedding
        behind a GELU. Logits have both signs. Where one class is nearly always the greatest, or the columns of all
        heads differ more than the items (`FIXED`), they are coordinates or measures.
        """
        most, (low, high) = max(self.seen.values(), default=0), self.span
        many = self.predictions >= FEWEST * max(len(self.widths), 1)
        fixed = many and all(each.share > FIXED for each in self.columns.values())
        one = self.predictions >= FEWEST and most > ONE_CLASS * self.predictions
        amounts = low >= (FLOOR if many else 0) and high > 1 + UNIT
        return self.evident and self.predictions > 0 and (self.sound or not (one or amounts or fixed))

    @property
    def saturated(self) -> frozenset[str]:
        """The heads, if their probabilities are so near 0 and 1 that no noise shows, on few items; else none.

        A changed class costs all of its item then, and an unchanged one nothing: the losses predict no drop.
        """
        few = self.predictions > 0 and len(self.whole) < ENOUGH and not self.maps
        flat = few and self.probable and self.known and 1 - self.sure / self.predictions < SATURATED
        return frozenset(self.heads) if flat else frozenset()

    @property
    def drop_interval(self) -> Interval:
        """The 95 % confidence interval of the mean loss of whole items, by its standard error."""
        mean, count = statistics.fmean(self.whole), len(self.whole)
        reach = Z * statistics.pstdev(self.whole, mean) / math.sqrt(max(count - 1, 1))
        return max(mean - reach, -1.0), min(mean + reach, 1.0)


def _whole_losses(losses: Array, items: int) -> list[float]:
    """Return the loss of each item with all its predictions: for losses l, ``1 - prod(1 - l)``.

    Args:
        losses: The losses of the predictions, item by item.
        items: The number of items; if it does not divide the number of predictions, all are one item.
    """
    rows = losses.reshape(items if losses.size % items == 0 else 1, -1)
    return [float(loss) for loss in 1.0 - np.prod(1.0 - rows, axis=1)]


def _losses(scores: Array, expected: Array, actual: Array) -> tuple[float, Array]:
    """Return the sum of p(expected class), and p(expected class) - p(actual class) for each prediction.

    Scores that are no probabilities are logits. A prediction without a class in the other model loses all of p.
    """
    flat, first, other = scores.reshape(-1, scores.shape[-1]), expected.reshape(-1), actual.reshape(-1)
    rows = np.clip(flat.astype(np.float64), -HUGE, HUGE)  # infinities have no difference
    if not are_probabilities(flat):
        with np.errstate(invalid="ignore"):
            rows = np.exp(rows - rows.max(axis=1, keepdims=True))
            rows /= rows.sum(axis=1, keepdims=True)
    valid = first != NO_CLASS
    index = np.arange(len(rows))
    top = np.where(valid, rows[index, np.maximum(first, 0)], 0.0)
    kept = np.where(other >= 0, rows[index, np.maximum(other, 0)], 0.0)
    return float(top.sum()), np.where(valid & (first != other), top - kept, 0.0)

"""The contributions of single items to a metric: functions from the outputs for one sample to rows of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .... import RequantError
from ....calibration.data.samples import DataError, Sample
from ....calibration.model.session import Array
from ..classes import Outputs, class_scores, is_float, predictions, predictions_like
from ..labels import check_classes, class_labels
from ..sqnr import output_powers

CLASSES = 2**16
"""The most classes of a map of classes; each needs 16 bytes per sample."""
IGNORED_CLASS = 255
"""A class of a label map that does not count if the model has no such class, as in PASCAL VOC."""
CHUNK = 256  # rows of scores in float64 at a time
EXACT = 2.0**-24
"""The root of the lowest mean squared error of an image, as a share of the peak: half a unit of float32."""
OTHER_INTEGERS = ("attention_mask", "position_ids", "token_type_ids")
"""Integer inputs of language models that hold no tokens."""


@dataclass(frozen=True, slots=True)
class Items:
    """The contributions of the items of one sample.

    Attributes:
        parts: float64 (k, c), one row per item.
        rows: int64 (k,), the entry of the sample's batch that each item belongs to, ascending.
    """

    parts: Array
    rows: Array


def items_of_entries(parts: Array, entries: int) -> Items:
    """Return items that belong in equal numbers to the entries of a batch."""
    return Items(parts, np.repeat(np.arange(entries), len(parts) // max(entries, 1)))


def equal_items(values: Array, entries: int) -> Items:
    """Return items of weight 1."""
    flat = values.reshape(-1).astype(np.float64)
    return items_of_entries(np.stack([flat, np.ones_like(flat)], axis=1), entries)


# ------------------------------------------------------------------------------------------------ right or wrong


def top(outputs: Outputs, sample: Sample, _: Outputs, *, k: int) -> Items:
    """Return 1 for each label with fewer than `k` higher classes, else 0; of equal scores the first is higher.

    A label below 0 does not count. If a score is NaN, the item is wrong.

    Raises:
        RequantError: The labels do not fit the scores.
    """
    scores = class_scores(outputs)
    if scores is None:
        raise RequantError(f"{sample.where}: no output holds scores per class; top{k} needs one")
    count = scores.shape[-1]
    if count <= k:
        raise RequantError(f"{sample.where}: top{k} of {count} classes is always right; use top1")
    labels = _fitted(sample, scores.shape[:-1])
    check_classes(labels, count, sample.where)
    own = np.take_along_axis(scores, np.maximum(labels, 0)[..., None], -1)
    first = np.arange(count) < labels[..., None]
    above = ((scores > own) | ((scores == own) & first)).sum(axis=-1)
    right = (above < k) & ~np.isnan(scores).any(axis=-1)
    items = equal_items(right, len(right))
    judged = labels.reshape(-1) >= 0
    return Items(items.parts[judged], items.rows[judged])


def agreement(outputs: Outputs, sample: Sample, reference: Outputs) -> Items:
    """Return 1 for each top-1 class that equals the class of another model (`top_classes`), else 0."""
    expected = reference["classes"]
    return equal_items(np.asarray(predictions_like(expected, outputs) == expected), len(expected))


def top_classes(outputs: Outputs, sample: Sample) -> Outputs:
    """Return the part of the reference's outputs that `agreement` needs.

    Raises:
        RequantError: No output holds scores per class.
    """
    classes = predictions(outputs)
    if classes is None:
        raise RequantError(f"{sample.where}: no output holds scores per class; use sqnr")
    return {"classes": classes}


# ------------------------------------------------------------------------------------------------ sums over samples


def noise(
    outputs: Outputs, sample: Sample, reference: Outputs, *, probabilities: frozenset[str] = frozenset()
) -> Items:
    """Return the powers of signal and noise that judge each float output, by turns; see `output_powers`.

    Raises:
        RequantError: An output of the reference is missing, or no output is float.
    """
    names = [name for name, value in reference.items() if is_float(value)]
    missing = [name for name in names if name not in outputs]
    if missing or not names:
        what = f"has no output {missing[0]!r}" if missing else "has no float output"
        raise RequantError(f"{sample.where}: the model {what}; sqnr needs one")
    pairs = [pair for each in output_powers(reference, outputs, probabilities).values() for pair in each]
    return items_of_entries(np.asarray(pairs, np.float64).reshape(1, -1), 1)


def losses(outputs: Outputs, sample: Sample, _: Outputs) -> Items:
    """Return, for each sequence, the negative log-likelihood of its tokens in nats, and their number.

    The scores (N, T, V) at a position predict the label (N, T) at the same position; a label below 0 does not count.
    Without labels, they predict the next token of the only integer input (N, T) of tokens, the last ones of a step the
    first tokens of the next step. Tokens that an input ``attention_mask`` masks do not count.

    Raises:
        RequantError: There are no labels and no tokens, or no output has the shape of scores.
    """
    targets, shift = _targets(sample)
    logits = next((value for value in floats(outputs) if value.shape[:-1] == targets.shape), None)
    if logits is None:
        shapes = ", ".join(str(value.shape) for value in floats(outputs)) or "none"
        raise RequantError(
            f"{sample.where}: no output holds scores {(*targets.shape, 'V')} for labels {targets.shape}; "
            f"the float outputs are {shapes}"
        )
    if shift:
        following = None if sample.step is None else sample.step.following
        if following is None:
            logits, targets = logits[:, :-1], targets[:, 1:]
        else:
            targets = np.concatenate([targets[:, 1:], following], axis=1)
    check_classes(targets, logits.shape[-1], sample.where)
    rows = [_sequence(scores, labels) for scores, labels in zip(logits, targets, strict=True)]
    return items_of_entries(np.asarray(rows, np.float64).reshape(-1, 2), len(rows))


def _targets(sample: Sample) -> tuple[Array, bool]:
    """Return the tokens to predict, and whether the position before a token predicts it."""
    if sample.label is not None:
        labels = class_labels(sample)
        rank = max(2, *(array.ndim for array in sample.feed.values() if array.dtype.kind in "iu"), 0)
        return (labels[None] if labels.ndim < rank else labels), False
    tokens = [
        (name, array)
        for name, array in sample.feed.items()
        if array.dtype.kind in "iu" and array.ndim == 2 and name not in OTHER_INTEGERS
    ]
    if len(tokens) != 1:
        raise DataError(f"{sample.where}: no label, and {len(tokens)} integer inputs (N, T) of tokens, not 1")
    inputs = tokens[0][1].astype(np.int64)
    mask = sample.feed.get("attention_mask")
    return (np.where(mask != 0, inputs, -1) if mask is not None and mask.shape == inputs.shape else inputs), True


def _sequence(scores: Array, labels: Array) -> tuple[float, int]:
    """Return the negative log-likelihood of one sequence, infinite if a score is NaN, and the number of its tokens."""
    scores, labels = scores.reshape(-1, scores.shape[-1]), labels.reshape(-1)
    judged = np.flatnonzero(labels >= 0)
    total = 0.0
    for start in range(0, len(judged), CHUNK):
        chosen = judged[start : start + CHUNK]
        wide = scores[chosen].astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinities
            wide -= wide.max(axis=1, keepdims=True)
            likely = wide[np.arange(len(chosen)), labels[chosen]]
            total += float((np.log(np.exp(wide).sum(axis=1)) - likely).sum())
    return (np.inf if np.isnan(total) else total), len(judged)


def image_noise(outputs: Outputs, sample: Sample, _: Outputs) -> Items:
    """Return the peak signal to noise ratio of each image against its target, in dB.

    The peak is 1 for float targets, 65535 for uint16 targets, and 255 for other integers. An image equal to its target
    gets 144.5 dB, the ratio for an error of half a unit of float32 everywhere.

    Raises:
        RequantError: No output has the shape of the target.
    """
    target = np.asarray(sample.label)
    images = next((value for value in numbers(outputs) if fits(target.shape, value.shape)), None)
    if images is None:
        raise no_fitting_output(sample, outputs, "target")
    peak = 1.0 if target.dtype.kind == "f" else 65535.0 if target.dtype == np.uint16 else 255.0
    difference = (images.astype(np.float64) - target.reshape(images.shape)).reshape(len(images), -1)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.square(difference).mean(axis=1) / peak**2
    error = np.where(np.isnan(error), np.inf, np.maximum(error, EXACT**2))
    return equal_items(-10 * np.log10(error), len(images))


def overlaps(outputs: Outputs, sample: Sample, _: Outputs) -> Items:
    """Return, for each map and class, the pixels in the intersection and in the union, by turns.

    A label below 0 does not count, nor does `IGNORED_CLASS` if the model has no such class.

    Raises:
        RequantError: No output is a map of classes in the shape of the labels.
    """
    labels = class_labels(sample)
    found, count = _class_map(outputs, labels, sample)
    labels = labels.reshape(found.shape)
    judged = (labels >= 0) & ((labels != IGNORED_CLASS) | (count > IGNORED_CLASS))
    check_classes(np.where(judged, labels, 0), count, sample.where)
    rows = []
    for one, right, seen in zip(found, labels, judged, strict=True):
        guess, truth = one[seen], right[seen]
        guess = np.where((guess >= 0) & (guess < count), guess, count)  # a value that is no class
        common = np.bincount(truth[guess == truth], minlength=count)
        either = np.bincount(truth, minlength=count) + np.bincount(guess, minlength=count + 1)[:count] - common
        rows.append(np.stack([common, either], axis=1).reshape(-1))
    return items_of_entries(np.asarray(rows, np.float64), len(rows))


def _class_map(outputs: Outputs, labels: Array, sample: Sample) -> tuple[Array, int]:
    """Return the predicted map of classes, and the number of classes."""
    scores = class_scores(outputs)
    if scores is not None and fits(labels.shape, scores.shape[:-1]):
        found = predictions(outputs)
        assert found is not None  # there are scores
        return found, scores.shape[-1]
    for value in numbers(outputs):
        if value.dtype.kind in "iu" and fits(labels.shape, value.shape):
            known = labels[labels != IGNORED_CLASS]
            count = int(max(value.max(initial=0), known.max(initial=0))) + 1
            if count > CLASSES:
                raise DataError(f"{sample.where}: {count - 1} is no class of a map; at most {CLASSES} are counted")
            return value.astype(np.int64), count
    raise no_fitting_output(sample, outputs, "label")


def ranked(outputs: Outputs, sample: Sample, _: Outputs) -> Items:
    """Return a score and a label, 0 or 1, for each item. The score is the output, or of two classes the difference.

    A label below 0 does not count. NaN is the lowest score.

    Raises:
        RequantError: A label is neither 0 nor 1, or no output has the shape of the labels.
    """
    labels = np.asarray(sample.label)
    if wrong := labels[(labels != 1) & (labels > 0)].reshape(-1)[:1].tolist():
        raise DataError(f"{sample.where}: label {wrong[0]}, but auroc needs labels 0 and 1")
    for value in floats(outputs):
        two = value.shape[-1:] == (2,) and fits(labels.shape, value.shape[:-1])
        if two or fits(labels.shape, value.shape):
            scores = (value[..., 1] - value[..., 0] if two else value).reshape(-1).astype(np.float64)
            entries = np.repeat(np.arange(len(value)), scores.size // len(value))
            judged = labels.reshape(-1) >= 0
            parts = np.stack([np.where(np.isnan(scores), -np.inf, scores), labels.reshape(-1)], axis=1)
            return Items(parts[judged].astype(np.float64), entries[judged])
    raise no_fitting_output(sample, outputs, "label")


# ------------------------------------------------------------------------------------------------ labels and shapes


def _fitted(sample: Sample, shape: tuple[int, ...]) -> Array:
    """Return the classes that a sample has as labels, in a shape."""
    labels = class_labels(sample)
    if not fits(labels.shape, shape):
        hint = "; of one-hot labels give labels.argmax(-1)" if _one_hot(labels, shape) else ""
        raise RequantError(f"{sample.where}: labels of shape {labels.shape} for predictions of shape {shape}{hint}")
    return labels.reshape(shape)


def _one_hot(labels: Array, shape: tuple[int, ...]) -> bool:
    """Whether the last axis of labels holds a single 1 among zeros for each prediction of a shape."""
    ones = labels == 1
    return fits(labels.shape[:-1], shape) and bool((ones | (labels == 0)).all() and (ones.sum(-1) == 1).all())


def fits(have: tuple[int, ...], want: tuple[int, ...]) -> bool:
    """Whether an array can be reshaped so that the last axis with a length above 1 stays the same."""
    ends = [[axis for axis in shape if axis != 1][-1:] for shape in (have, want)]
    same = np.prod(have, dtype=np.int64) == np.prod(want, dtype=np.int64)
    return bool(same) and (ends[0] == ends[1] or len([axis for axis in have if axis != 1]) <= 1)


def floats(outputs: Outputs) -> Iterator[Array]:
    """Yield the float tensors with a batch axis."""
    return (value for value in outputs.values() if is_float(value) and value.ndim > 0 and value.size)


def numbers(outputs: Outputs) -> Iterator[Array]:
    """Yield the tensors of integers or floats with a batch axis."""
    return (
        value
        for value in outputs.values()
        if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and value.ndim > 0 and value.size
    )


def no_fitting_output(sample: Sample, outputs: Outputs, what: str) -> RequantError:
    """Return the error that no output fits the label of a sample."""
    shapes = ", ".join(f"{name} {np.shape(value)}" for name, value in outputs.items()) or "none"
    return RequantError(f"{sample.where}: no output fits a {what} of shape {np.asarray(sample.label).shape}: {shapes}")

"""F1 of decisions: one class per item, or several labels per item."""

from __future__ import annotations

import numpy as np

from ....calibration.data.samples import DataError, Sample
from ....calibration.model.session import Array
from ..classes import Outputs, class_scores, predictions
from ..labels import check_classes, class_labels
from .items import Items, fits, floats, items_of_entries, no_fitting_output


def confusions(outputs: Outputs, sample: Sample, _: Outputs) -> Items:
    """Return, for each entry: whether a score is no probability; then for each class the four counts of `mean_f1`.

    The labels (N, ...) are classes for scores (N, ..., C), or they are 0 and 1 in the shape of the scores. A label
    below 0 does not count.

    Raises:
        RequantError: No output fits the labels, or a label is no class.
    """
    labels, scores = class_labels(sample), class_scores(outputs)
    if scores is not None and fits(labels.shape, scores.shape[:-1]):
        found = predictions(outputs)
        assert found is not None  # there are scores
        return _by_class(found, labels.reshape(found.shape), scores.shape[-1], sample)
    value = next((value for value in floats(outputs) if fits(labels.shape, value.shape)), None)
    if value is None:
        raise no_fitting_output(sample, outputs, "label")
    if labels.size and labels.max() > 1:
        raise DataError(f"{sample.where}: label {int(labels.max())}, but one label per score must be 0 or 1")
    return _by_score(value, labels.reshape(value.shape))


def _by_class(found: Array, labels: Array, count: int, sample: Sample) -> Items:
    """Return the counts where each item has one class. Of two classes, only class 1 is counted."""
    check_classes(labels, count, sample.where)
    rows = []
    for guess, truth in zip(found.reshape(len(found), -1), labels.reshape(len(found), -1), strict=True):
        guess, truth = guess[truth >= 0], truth[truth >= 0]
        common = np.bincount(truth[guess == truth], minlength=count)
        both = np.bincount(truth, minlength=count) + np.bincount(guess[guess >= 0], minlength=count)
        counts = np.stack([common, both, common, both], axis=1)
        rows.append(np.append(0, counts[1:] if count == 2 else counts))
    return items_of_entries(np.asarray(rows, np.float64), len(rows))


def _by_score(scores: Array, labels: Array) -> Items:
    """Return the counts where each score is a decision of its own."""
    wide = scores.reshape(len(scores), -1, scores.shape[-1] if scores.ndim > 1 else 1).astype(np.float64)
    judged, truth = (mask.reshape(wide.shape) for mask in (labels >= 0, labels == 1))
    outside = np.any(judged & ((wide < 0) | (wide > 1)), axis=(1, 2), keepdims=True)[..., 0]
    columns = []
    for threshold in (0.5, 0.0):
        guess = judged & (wide > threshold)  # False for NaN
        columns += [(guess & truth).sum(axis=1), guess.sum(axis=1) + truth.sum(axis=1)]
    counts = np.stack(columns, axis=-1).reshape(len(wide), -1)
    return items_of_entries(np.hstack([outside, counts]).astype(np.float64), len(wide))


def mean_f1(sums: Array) -> Array:
    """Return the mean over classes of ``F1 = 2 tp / (2 tp + fp + fn)``, from sums (..., 1 + 4 C).

    Van Rijsbergen, "Information Retrieval", 2nd edition (1979), chapter 7, with equal weights. Classes that neither
    occur nor are predicted do not count. A decision is positive above 0.5, or above 0 if any score of the data is no
    probability. The four counts of a class are, for each of the two thresholds: true positives, and labels and
    predictions together.
    """
    table = sums[..., 1:].reshape(*sums.shape[:-1], -1, 2, 2)
    chosen = np.where((sums[..., :1] > 0)[..., None], table[..., 1, :], table[..., 0, :])
    shares = 2 * chosen[..., 0] / np.maximum(chosen[..., 1], 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(shares.sum(axis=-1) / (chosen[..., 1] > 0).sum(axis=-1))

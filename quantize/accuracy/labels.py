"""Labels that are classes of a model's predictions, and labels that cannot be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...calibration.data.samples import DataError, Sample
from ...calibration.model.session import Array
from .classes import Outputs, candidates, evident_scores, heads_of


def class_labels(sample: Sample) -> Array:
    """Return the labels of a sample as int64; raise if they are fractions, or too large for it."""
    labels = np.asarray(sample.label)
    if labels.dtype.kind == "f" and not np.array_equal(labels, np.round(labels)):
        raise DataError(f"{sample.where}: labels of {labels.dtype}, but labels must be classes")
    if labels.dtype.kind in "fu" and not (np.abs(labels.astype(np.float64)) < 2.0**63).all():
        raise DataError(f"{sample.where}: a label is beyond the range of int64, but labels must be classes")
    return labels.astype(np.int64)


def check_classes(labels: Array, counts: int | Sequence[int], where: str) -> None:
    """Raise DataError if a label is not below the number of classes.

    Args:
        labels: The labels, integers of any shape.
        counts: The number of classes; for several heads, whose labels are side by side, the number of each head.
        where: The place of the labels.
    """
    flat, most = labels.reshape(-1), np.resize(counts, labels.size)
    if (flat >= most).any():
        at = int((flat - most).argmax())
        raise DataError(f"{where}: label {int(flat[at])}, but the output has {most[at]} classes, counted from 0")


def check_label(outputs: Outputs, sample: Sample) -> str:
    """Return a note if the label of a sample says nothing of its predictions: it may be for a metric. Else return "".

    Args:
        outputs: The outputs of the float model.
        sample: Its inputs and the label.

    Raises:
        DataError: The label has an integer for each prediction, and one is no class of the only output with scores.
    """
    if sample.label is None:
        return ""
    labels, found = np.asarray(sample.label), evident_scores(outputs, sample)
    if found is not None and labels.dtype.kind in "iub":
        name, scores = found
        heads = heads_of(outputs, name, sample)
        if labels.size == math.prod(scores.shape[:-1]) * len(heads):
            widths = [outputs[head].shape[-1] for head in heads] if len(heads) > 1 else scores.shape[-1]
            try:
                check_classes(labels, widths, sample.where)
            except DataError:
                if len(heads) > 1 or len(candidates(outputs)) == 1:
                    raise
                return f"labels beyond the classes of {name!r} belong to another output: they judge nothing here"
            return ""
    return f"labels of {labels.dtype} {list(labels.shape)} are no classes of the predictions: they judge nothing here"

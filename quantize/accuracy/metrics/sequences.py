"""Transcripts: CTC decoding and the error rates of words and characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .... import RequantError
from ....calibration.data.samples import DataError, Sample
from ....calibration.model.session import Array
from ..classes import Outputs, is_float
from ..labels import class_labels
from ..transcripts import batch_first, blank_of, collapsed
from .items import Items, items_of_entries


def errors(outputs: Outputs, sample: Sample, reference: Outputs, *, words: bool) -> Items:
    """Return, for each sequence, the number of edits to its label, and the length of the label.

    Without labels, the float model's transcripts are the labels (`reference`).

    Args:
        outputs: Class scores for CTC, integer tokens, or texts; see `transcripts`.
        sample: The labels (N, L) are tokens; a token below 0 does not count.
        reference: The transcripts of the float model; empty with labels.
        words: Whether texts are split into words; else into characters.

    Raises:
        RequantError: No output holds sequences, or their number is not that of the labels.
    """
    found = transcripts(outputs, sample, words=words)
    expected = list(reference.values()) if reference else _labels(sample)
    if len(found) != len(expected):
        raise RequantError(f"{sample.where}: {len(found)} sequences for {len(expected)} labels (N, L)")
    if any(one.dtype.kind != two.dtype.kind for one, two in zip(found, expected, strict=True)):
        raise DataError(f"{sample.where}: the sequences are texts, but the labels are tokens; decode to tokens")
    rows = [(edits(one, two), len(two)) for one, two in zip(found, expected, strict=True)]
    return items_of_entries(np.asarray(rows, np.float64).reshape(-1, 2), len(rows))


def _labels(sample: Sample) -> list[Array]:
    """Return the tokens of each label."""
    labels = np.atleast_2d(class_labels(sample))
    return [row[row >= 0] for row in labels.reshape(-1, labels.shape[-1])]


def transcripts(outputs: Outputs, sample: Sample, *, words: bool) -> list[Array]:
    """Return the sequences of a model: int64 tokens, or the words or characters of texts.

    The first output of one of these forms, in this order: texts (N,); integers (N, T), without those below 0; float
    scores (T, N, C) or (N, T, C), decoded by `best_path`.

    Raises:
        RequantError: There is no such output.
    """
    arrays = [np.asarray(value) for value in outputs.values()]
    for value in (value for value in arrays if value.dtype.kind == "U"):
        pieces = [str(text).split() for text in value.reshape(-1)]
        return [np.array(each if words else list(" ".join(each)), dtype=np.str_) for each in pieces]
    for value in (value for value in arrays if value.dtype.kind in "iu" and value.ndim == 2):
        return [row[row >= 0].astype(np.int64) for row in value]
    for value in (value for value in arrays if is_float(value) and value.ndim == 3 and value.size):
        return best_path(value if batch_first(value.shape, sample) else np.swapaxes(value, 0, 1))
    raise RequantError(f"{sample.where}: no output holds class scores (T, N, C) or tokens (N, T)")


def best_path(scores: Array) -> list[Array]:
    """Return the tokens of class scores (N, T, C): the best class of each step, without repeats and blanks."""
    best = scores.argmax(axis=-1)
    return collapsed(best, blank_of(best, scores.shape[-1]))


def edits(one: Sequence[object] | Array, two: Sequence[object] | Array) -> int:
    """Return the least number of insertions, deletions and substitutions between two sequences.

    Wagner and Fischer, "The string-to-string correction problem", Journal of the ACM 21 (1974) 168-173, row by row:
    insertions within a row are a running minimum of the costs minus their column.

    >>> edits(list("kitten"), list("sitting"))
    3
    """
    left, right = np.asarray(one), np.asarray(two)
    columns = np.arange(len(right) + 1)
    row = columns
    for index, item in enumerate(left, 1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (right != item))
        row = np.minimum.accumulate(np.append(index, changed) - columns) + columns
    return int(row[-1])


def float_transcripts(outputs: Outputs, sample: Sample, *, words: bool) -> Outputs:
    """Return the transcripts of the float model, by position."""
    return {str(index): row for index, row in enumerate(transcripts(outputs, sample, words=words))}

"""Transcripts of CTC: the text of scores per step, and what a changed text costs.

Decoding is that of Graves, Fernandez, Gomez and Schmidhuber, "Connectionist temporal classification", ICML 2006.
"""

from __future__ import annotations

import numpy as np

from ...calibration.data.samples import Sample
from ...calibration.model.session import Array

BLANK = 1 / 3
"""The share of steps that the blank fills, at least."""
RUN = 3.0
"""The most steps in a row, in the mean, that have one class of a text. A classifier of frames has longer runs."""


def text_losses(losses: Array, expected: Array, actual: Array, classes: int, sample: Sample) -> list[float] | None:
    """Return the loss of each text, 0 for a text that is the same in both models; None if they are no texts.

    A character that begins a step earlier changes the best class of two steps, and not the text. A changed text loses
    what its steps lose, ``1 - prod(1 - l)``. The difference of the two texts' probabilities, over all paths, is less.
    It is not taken: one changed text of 16 says little about other texts. With this difference, a reader kept 0.9083 of
    its lines right in place of 0.9333, and the predicted drop was 0.08 points.

    Args:
        losses: What each prediction loses, 0..1, (N, T) or (T, N).
        expected: The predictions of the float model, in the same order.
        actual: The predictions of the INT8 model, in the same order.
        classes: The number of classes.
        sample: Its inputs tell which axis counts items; a tagger has a class for each of its tokens.
    """
    if expected.ndim != 2:
        return None
    if not batch_first(expected.shape, sample):
        losses, expected, actual = losses.T, expected.T, actual.T
    blank = blank_of(expected, classes)
    tagged = any(array.dtype.kind in "iu" and array.shape == expected.shape for array in sample.feed.values())
    if tagged or not _are_texts(expected, blank):
        return None
    texts = zip(losses, collapsed(expected, blank), collapsed(actual, blank), strict=True)
    return [0.0 if np.array_equal(one, two) else float(1.0 - np.prod(1.0 - row)) for row, one, two in texts]


def _are_texts(best: Array, blank: int) -> bool:
    """Return whether best classes (N, T) look like texts: many blanks, and short runs of other classes."""
    steps = int((best != blank).sum())
    runs = sum(map(len, collapsed(best, blank)))
    return 0 < steps <= RUN * runs and steps < (1 - BLANK) * best.size


def batch_first(shape: tuple[int, ...], sample: Sample) -> bool:
    """Whether the first of two axes is the batch: one of them that has length 1, else the one that inputs have."""
    if (shape[0] == 1) != (shape[1] == 1):
        return shape[0] == 1
    sizes = {len(array) for array in sample.feed.values() if array.ndim}
    return shape[0] in sizes or shape[1] not in sizes


def blank_of(best: Array, classes: int) -> int:
    """Return the blank: class 0; or the last class, if it is the best class of more steps."""
    last = classes - 1
    return last if (best == last).sum() > (best == 0).sum() else 0


def collapsed(best: Array, blank: int) -> list[Array]:
    """Return the best classes of steps (N, T) without repeats and blanks, one array for each item (section 3.2)."""
    fresh = np.ones(best.shape, bool)
    fresh[:, 1:] = best[:, 1:] != best[:, :-1]
    return [row[new & (row != blank)].astype(np.int64) for row, new in zip(best, fresh, strict=True)]

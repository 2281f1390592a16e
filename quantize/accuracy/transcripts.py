"""Transcripts of CTC: the text of scores per step, how likely a text is, and what a changed text costs.

Formulas of Graves, Fernandez, Gomez and Schmidhuber, "Connectionist temporal classification", ICML 2006.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...calibration.samples import Sample

Array = npt.NDArray[Any]

BLANK = 1 / 3
"""The share of steps that the blank fills, at least."""
RUN = 3.0
"""The most steps in a row, in the mean, that have one class of a text. A classifier of frames has longer runs."""


def text_losses(rows: Array, expected: Array, actual: Array, sample: Sample) -> list[float] | None:
    """Return p(text of the float model) - p(text of the INT8 model) for each item; None if they are no texts.

    Both are probabilities by the float model. A character that begins a step earlier changes the best class of two
    steps, and not the text.

    Args:
        rows: Probabilities of the float model, float64 (N, T, C) or (T, N, C).
        expected: The best classes of the float model, in the same order.
        actual: The best classes of the INT8 model, in the same order.
        sample: Its inputs tell which axis counts items; a tagger has a class for each of its tokens.
    """
    if expected.ndim != 2:
        return None
    lengths = {len(array) for array in sample.feed.values() if array.ndim}
    if len(expected) not in lengths and expected.shape[1] in lengths:
        rows, expected, actual = rows.swapaxes(0, 1), expected.T, actual.T
    blank = blank_of(expected, rows.shape[-1])
    tagged = any(array.dtype.kind in "iu" and array.shape == expected.shape for array in sample.feed.values())
    if tagged or not _are_texts(expected, blank):
        return None
    texts = zip(rows, collapsed(expected, blank), collapsed(actual, blank), strict=True)
    return [_loss(row, one, two, blank) for row, one, two in texts]


def _are_texts(best: Array, blank: int) -> bool:
    """Return whether best classes (N, T) look like texts: many blanks, and short runs of other classes."""
    steps = int((best != blank).sum())
    runs = sum(map(len, collapsed(best, blank)))
    return 0 < steps <= RUN * runs and steps < (1 - BLANK) * best.size


def blank_of(best: Array, classes: int) -> int:
    """Return the blank: class 0; or the last class, if it is the best class of more steps."""
    last = classes - 1
    return last if (best == last).sum() > (best == 0).sum() else 0


def collapsed(best: Array, blank: int) -> list[Array]:
    """Return the best classes of steps (N, T) without repeats and blanks, one array for each item (section 3.2)."""
    fresh = np.ones(best.shape, bool)
    fresh[:, 1:] = best[:, 1:] != best[:, :-1]
    return [row[new & (row != blank)].astype(np.int64) for row, new in zip(best, fresh, strict=True)]


def likelihood(rows: Array, text: Array, blank: int) -> float:
    """Return the probability of a text: the sum over all its paths, by the forward algorithm (section 4.1).

    Args:
        rows: The probabilities of the classes at each step, float64 (T, C).
        text: The classes of the text (L,), without blanks.
        blank: The class of the blank.
    """
    path = np.full(2 * len(text) + 1, blank)
    path[1::2] = text
    skips = np.zeros(len(path))  # a blank between two classes may be left out, unless they are the same
    skips[3::2] = text[1:] != text[:-1]
    forward = np.zeros(len(path))
    forward[:2] = rows[0, path[:2]]
    for row in rows[1:]:
        reached = forward.copy()
        reached[1:] += forward[:-1]
        reached[2:] += skips[2:] * forward[:-2]
        forward = reached * row[path]
    return float(forward[-2:].sum())


def _loss(rows: Array, expected: Array, actual: Array, blank: int) -> float:
    """Return what a text costs, see `text_losses`. A step without a class has no text: all of p is lost."""
    if np.array_equal(expected, actual):
        return 0.0
    other = 0.0 if (actual < 0).any() else likelihood(rows, actual, blank)
    return likelihood(rows, expected, blank) - other

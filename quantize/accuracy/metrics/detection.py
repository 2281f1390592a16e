"""Average precision of boxes, as COCO defines it."""

from __future__ import annotations

import numpy as np

from .... import RequantError
from ....calibration.data.samples import DataError, Sample
from ....calibration.model.session import Array
from ..classes import Outputs
from .boxes import Boxes, overlap, read_boxes
from .items import Items

OVERLAPS = np.linspace(0.5, 0.95, 10)
"""The least intersection over union of a hit."""
RECALLS = np.linspace(0.0, 1.0, 101)
MOST_PER_CLASS = 100
"""The most boxes of one class in one image that count."""
SURE = 0.25
"""Without labels, the float model's boxes of at least this score are the truth."""
NOTHING = -1.0
"""The class of a row without box and truth."""
CLASS, SCORE, TRUTH, FOUND, HITS = range(5)
"""Columns: the class, the score, whether it is a true box, whether it is a found box, and the hits by `OVERLAPS`."""


def matches(outputs: Outputs, sample: Sample, reference: Outputs) -> Items:
    """Return rows with the columns `CLASS` to `HITS` for the true and the found boxes of each image.

    Every image has at least one row. In each image and class, the boxes in falling order of score take the free true
    box that they overlap most, for each of `OVERLAPS` alone (pycocotools, ``COCOeval.evaluateImg``).

    Args:
        outputs: Read by `read_boxes`.
        sample: The labels (N, M, 5), or (M, 5) of one image: left, top, right, bottom, class; rows with a class below
            0 do not count.
        reference: The true boxes of each image by position, if there are no labels.

    Raises:
        RequantError: The outputs are of no known detector, or the labels have another shape.
    """
    found = read_boxes(outputs, sample.where)
    truth = list(reference.values()) if reference else _labels(sample)
    if len(found) != len(truth):
        raise RequantError(f"{sample.where}: boxes of {len(found)} images, but labels of {len(truth)}")
    tables = [_matched(one, two) for one, two in zip(found, truth, strict=True)]
    return Items(np.concatenate(tables), np.repeat(np.arange(len(tables)), [len(table) for table in tables]))


def sure_boxes(outputs: Outputs, sample: Sample) -> Outputs:
    """Return the float model's boxes of at least `SURE`, (M, 5) as in labels, by position of the image."""
    found = [each.chosen(each.scores >= SURE) for each in read_boxes(outputs, sample.where)]
    return {str(index): np.hstack([each.corners, each.classes[:, None]]) for index, each in enumerate(found)}


def _labels(sample: Sample) -> list[Array]:
    """Return the true boxes of each image."""
    labels = np.asarray(sample.label, np.float64)
    if labels.ndim not in (2, 3) or labels.shape[-1] != 5:
        raise DataError(
            f"{sample.where}: labels of shape {labels.shape}, but map needs (M, 5) for each image: left, top, right, "
            "bottom, class"
        )
    images = labels[None] if labels.ndim == 2 else labels
    return [rows[rows[:, 4] >= 0] for rows in images]


def _matched(found: Boxes, truth: Array) -> Array:
    """Return the rows of one image."""
    rows = np.zeros((1 + len(truth), HITS + len(OVERLAPS)))
    rows[0, CLASS], rows[1:, CLASS], rows[1:, TRUTH] = NOTHING, truth[:, 4], 1.0
    tables = [rows]
    for name in np.unique(found.classes):
        mine = found.chosen(found.classes == name)
        mine = mine.chosen(np.argsort(-mine.scores, kind="stable")[:MOST_PER_CLASS])
        table = np.zeros((len(mine.scores), HITS + len(OVERLAPS)))
        table[:, CLASS], table[:, SCORE], table[:, FOUND] = name, mine.scores, 1.0
        table[:, HITS:] = _hits(overlap(mine.corners, truth[truth[:, 4] == name, :4]))
        tables.append(table)
    return np.concatenate(tables)


def _hits(overlaps: Array) -> Array:
    """Return which found boxes (M,) hit a true box (K,), by `OVERLAPS`: (M, 10)."""
    hits = np.zeros((len(overlaps), len(OVERLAPS)), bool)
    if overlaps.shape[1] == 0:
        return hits
    free = np.ones((len(OVERLAPS), overlaps.shape[1]), bool)
    index = np.arange(len(OVERLAPS))
    for place, row in enumerate(overlaps):
        open_to = np.where(free & (row >= OVERLAPS[:, None] - 1e-10), row, -1.0)
        best = open_to.argmax(axis=1)
        hits[place] = open_to[index, best] >= 0
        free[index[hits[place]], best[hits[place]]] = False
    return hits


def mean_precision(parts: Array, *, at: slice) -> float:
    """Return the mean of the average precision over the classes with true boxes, and over some of `OVERLAPS`.

    Lin et al., "Microsoft COCO: common objects in context", ECCV 2014, as pycocotools computes it
    (``COCOeval.accumulate``): the precision at a recall is the highest at this or a higher recall, and its mean is over
    the recalls 0, 0.01 ... 1.

    Args:
        parts: As `matches` returns them.
        at: The place of the thresholds in `OVERLAPS`.

    Raises:
        RequantError: There is no true box.
    """
    known, counts = np.unique(parts[parts[:, TRUTH] > 0, CLASS], return_counts=True)
    total = dict(zip(known, counts, strict=True))
    if not total:
        raise RequantError(
            f"map needs a true box: the labels have none; without labels, the float model scores no box {SURE:g}"
        )
    boxes = parts[parts[:, FOUND] > 0]
    boxes = boxes[np.lexsort((-boxes[:, SCORE], boxes[:, CLASS]))]
    names, starts = np.unique(boxes[:, CLASS], return_index=True)
    by_class = dict(zip(names, np.split(boxes[:, HITS:][:, at], starts[1:]), strict=True)) if len(boxes) else {}
    return float(np.mean([_precisions(by_class[n], total[n]) if n in by_class else 0.0 for n in total]))


def _precisions(hits: Array, total: int) -> float:
    """Return the mean over thresholds of the average precision of one class.

    Args:
        hits: 1 for a hit, in falling order of score (M, thresholds).
        total: The number of true boxes.
    """
    count = np.cumsum(hits, axis=0)
    precision = count / np.arange(1, len(hits) + 1)[:, None]
    highest = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    ends = np.concatenate([highest, np.zeros((1, hits.shape[1]))])
    columns = zip((count / total).T, ends.T, strict=True)
    return float(np.mean([end[np.searchsorted(recall, RECALLS)] for recall, end in columns]))


def all_found(parts: Array) -> Array:
    """Return the rows of a model that finds the true boxes and nothing else."""
    best = np.zeros_like(parts)
    true = parts[:, TRUTH] > 0
    best[:, CLASS] = np.where(true, parts[:, CLASS], NOTHING)
    best[true, SCORE:] = 1.0
    return best

"""Boxes from the outputs of detectors: outputs that hold boxes already, and heads of the YOLO family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .... import RequantError
from ....calibration.model.session import Array
from ..classes import Outputs, is_float

LEAST_SCORE = 0.001
"""Candidates with a lower score are dropped, as in the validation of Ultralytics."""
SUPPRESSED = 0.7
"""Of two candidates of one class that overlap by more, the one with the lower score is dropped (Ultralytics too)."""
MOST_CANDIDATES = 30_000
MOST_BOXES = 300
"""The most boxes of an image after suppression."""
NEGATIVE = 0.05
"""The largest share of negative values in the centres, and in the scores, of a decoded head."""
ROUNDED = 0.02
"""The least size of a decoded head, as a share of the largest, below 0."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """The boxes in one image.

    Attributes:
        corners: float64 (M, 4): left, top, right, bottom.
        scores: float64 (M,).
        classes: int64 (M,).
    """

    corners: Array
    scores: Array
    classes: Array

    def chosen(self, which: Array) -> Boxes:
        """Return the boxes at these positions."""
        return Boxes(self.corners[which], self.scores[which], self.classes[which])


def read_boxes(outputs: Outputs, where: str) -> list[Boxes]:
    """Return the boxes of each image of a batch, by the first of `HEADS` that the outputs fit.

    Raises:
        RequantError: No head fits.
    """
    for head in HEADS.values():
        found = head(outputs)
        if found is not None:
            return [each.chosen(each.scores > 0) for each in found]
    shapes = ", ".join(f"{name} {np.shape(value)}" for name, value in outputs.items())
    raise RequantError(
        f"{where}: no known detector has these outputs: {shapes}; map:FILE.py:NAME names a function that decodes them"
    )


def separate(outputs: Outputs) -> list[Boxes] | None:
    """Read boxes (N, M, 4), scores (N, M) and classes (N, M), also without the axis N, as NonMaxSuppression gives them.

    Classes are integers, or whole numbers in an output whose name has no ``score``. The order of x and y is that of
    the model.
    """
    fours = [value for value in outputs.values() if is_float(value) and value.ndim in (2, 3) and value.shape[-1] == 4]
    corners = [value for value in fours if value.ndim == max(each.ndim for each in fours)]  # M may be 4 too
    if len(corners) != 1:
        return None
    others = {name: value for name, value in outputs.items() if np.shape(value) == corners[0].shape[:-1]}
    whole = [name for name, value in others.items() if value.dtype.kind in "iu"]
    real = [name for name, value in others.items() if is_float(value)]
    if not whole:
        whole = [name for name in real if "score" not in name.lower() and _is_whole(others[name])]
        real = [name for name in real if name not in whole]
    if len(whole) != 1 or len(real) != 1:
        return None
    entries = corners[0].ndim == 3
    columns = [corners[0], others[real[0]], others[whole[0]]]
    rows = zip(*(value if entries else value[None] for value in columns), strict=True)
    return [Boxes(box.astype(np.float64), score.astype(np.float64), c.astype(np.int64)) for box, score, c in rows]


def joined(outputs: Outputs) -> list[Boxes] | None:
    """Read the single float output (N, M, 6) or (M, 6): left, top, right, bottom, score, class."""
    value = _single(outputs, (2, 3))
    if value is None or value.shape[-1] != 6:
        return None
    table = value[None] if value.ndim == 2 else value
    shown = table[table[..., 4] > 0]
    if not _is_whole(shown[:, 5]) or (shown[:, 2:4] < shown[:, :2]).any():
        return None
    wide = table.astype(np.float64)
    return [Boxes(rows[:, :4], rows[:, 4], rows[:, 5].astype(np.int64)) for rows in wide]


def anchors_last(outputs: Outputs) -> list[Boxes] | None:
    """Decode the single float output (N, 4 + C, A) of YOLOv8 to YOLO11: centre, size, and the score of each class."""
    value = _single(outputs, (3,))
    if value is None or not 5 <= value.shape[1] < value.shape[2] or not _is_decoded(np.swapaxes(value, 1, 2)):
        return None
    rows = np.swapaxes(value, 1, 2).astype(np.float64)
    return [_suppressed(entry[:, :4], entry[:, 4:]) for entry in rows]


def anchors_first(outputs: Outputs) -> list[Boxes] | None:
    """Decode the single float output (N, A, 5 + C) of YOLOv5 and YOLOv7: centre, size, objectness, class scores."""
    value = _single(outputs, (3,))
    if value is None or not 6 <= value.shape[2] < value.shape[1] or not _is_decoded(value):
        return None
    return [_suppressed(entry[:, :4], entry[:, 4:5] * entry[:, 5:]) for entry in value.astype(np.float64)]


HEADS: Mapping[str, Callable[[Outputs], list[Boxes] | None]] = {
    function.__name__: function for function in (separate, joined, anchors_last, anchors_first)
}
"""The known detectors. The first one that fits counts."""


def _single(outputs: Outputs, ranks: tuple[int, ...]) -> Array | None:
    """Return the only float output with 2 or 3 axes; None if there are several, or if its rank is another."""
    found = [value for value in outputs.values() if is_float(value) and value.ndim in (2, 3) and value.size]
    return found[0] if len(found) == 1 and found[0].ndim in ranks else None


def _is_whole(values: Array) -> bool:
    """Whether all values are whole numbers of at least 0."""
    return bool(((values >= 0) & (values == np.floor(values))).all())


def _is_decoded(rows: Array) -> bool:
    """Whether rows (..., 4 + n) of centre, size and scores are decoded.

    Offsets from a cell are negative where centres are not, and so are logarithms where sizes are not, and logits where
    scores are not. Rounding may leave a size just below 0.
    """
    sizes = rows[..., 2:4]
    short = (sizes < -ROUNDED * np.abs(sizes).max()).any()
    return not short and all(float((part < 0).mean()) < NEGATIVE for part in (rows[..., :2], rows[..., 4:]))


def overlap(one: Array, two: Array) -> Array:
    """Return intersection over union of boxes (M, 4) and (K, 4), as (M, K). Two empty boxes have 0."""
    sides = np.minimum(one[:, None, 2:], two[None, :, 2:]) - np.maximum(one[:, None, :2], two[None, :, :2])
    common = sides.clip(0).prod(axis=-1)
    areas = [(each[:, 2:] - each[:, :2]).clip(0).prod(axis=-1) for each in (one, two)]
    either = areas[0][:, None] + areas[1][None] - common
    return np.asarray(common / np.where(either > 0, either, 1.0))


def _suppressed(centred: Array, scores: Array) -> Boxes:
    """Return the boxes of one image after suppression within each class.

    Args:
        centred: Centre and size of each box (A, 4).
        scores: Scores (A, C).
    """
    place, classes = np.nonzero(scores > LEAST_SCORE)  # False for NaN
    values = scores[place, classes]
    order = np.argsort(-values, kind="stable")[:MOST_CANDIDATES]
    place, classes, values = place[order], classes[order], values[order]
    half = centred[place, 2:] / 2
    found = Boxes(np.hstack([centred[place, :2] - half, centred[place, :2] + half]), values, classes)
    kept: list[int] = []
    rest = np.arange(len(values))
    while len(rest) and len(kept) < MOST_BOXES:
        best, rest = rest[0], rest[1:]
        kept.append(int(best))
        rivals = classes[rest] == classes[best]
        over = np.zeros(len(rest), bool)
        over[rivals] = overlap(found.corners[best : best + 1], found.corners[rest[rivals]])[0] > SUPPRESSED
        rest = rest[~over]
    return found.chosen(np.asarray(kept, np.int64))

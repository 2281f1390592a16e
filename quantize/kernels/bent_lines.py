"""Functions of each channel of a uint8 tensor as two lines that meet at one value: PReLUs, norms of batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import onnx_ir as ir

from ...calibration.model.session import Array
from .chains import Chain, spread, table_of
from .curves import steps_of
from .site import parameters_of

ALIKE = 0.99  # of the steepest rise: smaller rises are where the function is clipped
MARGIN = 1e-4  # steps between a line and where it would be rounded to another integer
FARTHEST = 1024.0  # steps: the float32 of the operator are exact to less than `MARGIN` up to there
NUDGES = [1 + 2**-18 * step for step in (0, 1, -1, 2, -2, 3, -3)]
"""Factors of the slopes that are tried in turn where a value is too near to another integer."""
ALL = 255


@dataclass(frozen=True, eq=False)
class BentLines:
    """y = clip(rint(below * min(x - bend, 0) + above * max(x - bend, 0) + level), least, most), by channel.

    Attributes:
        lines: ``below``, ``above`` and ``level``; float32 (3, C).
        bend: Where the lines meet.
        least: The least result.
        most: The greatest result.
    """

    lines: Array
    bend: int
    least: int
    most: int

    def __call__(self) -> Array:
        """Return the results of all values, uint8 (C, 256)."""
        level = self.lines[2].astype(np.float64)[:, None]
        found: Array = np.clip(np.rint(_away(self.lines, self.bend) + level), self.least, self.most).astype(np.uint8)
        return found


def bent_lines_of(model: ir.Model, chain: Chain) -> BentLines | None:
    """Return the lines that are exactly the table of a function of each channel; None if there are none.

    The lines meet at the zero point, where the slope of a PRelu changes. The slopes are those of the function in float.
    The level is the middle of all levels that give the table.
    """
    bend, table = parameters_of(chain.nodes[0]).zero_point.item(), table_of(model, chain)
    steps = steps_of(model, chain, spread(np.arange(ALL + 1), chain)).reshape(ALL + 1, chain.channels).T
    least, most = int(table.min()), int(table.max())
    slopes = np.stack([_slope(steps[:, : bend + 1]), _slope(steps[:, bend:])])
    lines, waiting = np.full((3, chain.channels), np.nan), np.arange(chain.channels)
    for below, above in product(NUDGES, NUDGES):
        tried = (slopes[:, waiting] * [[below], [above]]).astype(np.float32)
        level, fits = _levels(tried, table[waiting], bend, (least, most))
        lines[:, waiting[fits]] = np.vstack([tried, level])[:, fits]
        waiting = waiting[~fits]
    found = BentLines(lines.astype(np.float32), bend, least, most)
    return found if not waiting.size and (found() == table).all() else None


def _levels(slopes: Array, table: Array, bend: int, bounds: tuple[int, int]) -> tuple[Array, Array]:
    """Return the level of the lines of each channel, float64 (C,), and whether that gives the table.

    Args:
        slopes: Those below and above the bend, (2, C).
        table: The results, (C, 256).
        bend: Where the lines meet.
        bounds: The least and the greatest result of all channels. Where the table has one, a line may be beyond it.
    """
    away, wanted = _away(slopes, bend), table.astype(np.float64)
    low = np.where(table > bounds[0], wanted - 1 / 2 - away, -FARTHEST).max(axis=1)
    high = np.where(table < bounds[1], wanted + 1 / 2 - away, FARTHEST).min(axis=1)
    near = (np.abs(away) < FARTHEST) | (table == bounds[0]) | (table == bounds[1])
    return (low + high) / 2, (high - low > 2 * MARGIN) & near.all(axis=1)


def _away(lines: Array, bend: int) -> Array:
    """Return by how much the results of all values differ from those at the bend; float64 (C, 256)."""
    x = np.arange(ALL + 1) - float(bend)
    below, above = lines[:2].astype(np.float64)
    found: Array = below[:, None] * np.minimum(x, 0) + above[:, None] * np.maximum(x, 0)
    return found


def _slope(steps: Array) -> Array:
    """Return the slopes of functions that are lines where they are not clipped; float64 (C,).

    Args:
        steps: Their values, (C, n).
    """
    rises = np.diff(steps, axis=1)
    if not rises.shape[1]:
        return np.zeros(len(steps))
    steepest = np.take_along_axis(rises, np.abs(rises).argmax(axis=1)[:, None], axis=1)
    same = rises * np.sign(steepest) >= ALIKE * np.abs(steepest)
    found: Array = (rises * same).sum(axis=1) / same.sum(axis=1)
    return found

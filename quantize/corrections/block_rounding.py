"""Weights in blocks from data: scales weighed by the input, and each weight rounded up or down.

The scale of a block has the least error weighed by the second moments of the input's columns. Then each weight is
rounded for the least error of the layer's result, as `rounding` does it for weights with a scale per channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...calibration.model.session import Array
from ...transforms.int8.block_weights import Blocked, in_blocks
from .layer_by_layer import BlockLayer
from .rounding import FOLDS, ROWS, SPARSE, Moments, held_back, losses, round_columns, surely


def block_operations(layer: BlockLayer) -> float:
    """Return the approximate number of multiplications that learned rounding needs for a layer in blocks."""
    results, columns = layer.rows.shape
    return float(columns**2 * (ROWS + 8 * results) + 4 * columns * ROWS / FOLDS * results)


def learn_blocks(layer: BlockLayer, *, rounding: bool) -> Blocked:
    """Return the weights of a layer in blocks with the least error of its result.

    Three quarters of the samples give the second moments of the input, the scales and the integers. The other samples
    compare rounding to nearest with learned rounding, which is used if it is surely better.

    Args:
        layer: The layer.
        rounding: Whether weights may be rounded to another than the nearest integer.
    """
    back = held_back(len(layer.int8_inputs))
    seen = _rows([x for index, x in enumerate(layer.int8_inputs) if index not in back])
    unseen = [x for index, x in enumerate(layer.int8_inputs) if index in back]
    found = in_blocks(layer.rows, layer.form, np.square(seen, dtype=np.float64).mean(axis=0) if len(seen) else None)
    if not rounding or not unseen or SPARSE * len(seen) < seen.shape[1]:
        return found
    form, weights, steps = found.form, layer.rows.T, found.each.T
    moments = Moments(seen.T @ seen / np.float32(len(seen)), np.zeros(weights.shape, np.float32), len(seen))
    nearest = found.steps.T.astype(np.float32)
    bounds = (-form.zero, form.zero - 1)
    learned = Blocked(
        form, round_columns(moments, weights / steps, nearest, steps, bounds).T.astype(np.int8), found.scale
    )
    x = np.concatenate([_rows([each]) for each in unseen])
    before, after = (losses(x @ (each.values().T - weights), centred=False) for each in (found, learned))
    return learned if surely(before - after) else found


def _rows(inputs: Sequence[Array]) -> Array:
    """Return the positions of some samples as float32 (rows, K), at most `ROWS`, evenly spread."""
    rows = np.concatenate([x.reshape(-1, x.shape[-1]) for x in inputs]).astype(np.float32)
    return rows if len(rows) <= ROWS else rows[np.linspace(0, len(rows) - 1, ROWS).astype(np.int64)]

"""Weights in blocks: integers of 4 or 8 bits, with a scale for each block of a row.

The integers are those of ``com.microsoft::MatMulNBits`` and ``com.microsoft::GatherBlockQuantized`` without zero
points: unsigned codes, of which ``2**(bits - 1)`` means 0 (ContribOperators.md of ONNX Runtime).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .qparams import BLOCK, TINY, Array, BlockForm

STRETCHES = {8: (1.0,), 4: (0.7, 0.775, 0.85, 0.925, 1.0, 1.075)}
"""By bits, the scales that are tried: shares of the scale with which the greatest weight has the last code. With 8 bits
clipping never pays."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocked:
    """Rows of weights in blocks.

    Attributes:
        form: The form.
        steps: Integers without offset, int8 (N, K): from ``-2**(bits - 1)`` to ``2**(bits - 1) - 1``.
        scale: float32 (N, blocks); with 4 bits a scale may be negative.
    """

    form: BlockForm
    steps: Array
    scale: Array

    @property
    def each(self) -> Array:
        """The scale of each weight, float32 (N, K)."""
        return np.repeat(self.scale, self.form.size, axis=1)[:, : self.steps.shape[1]]

    def values(self) -> Array:
        """Return the dequantized weights, float32 (N, K)."""
        return np.asarray(self.steps * self.each, np.float32)

    def packed(self, columns: int) -> Array:
        """Return the codes of each row, uint8 (N, columns * bits / 8); 4-bit codes are in pairs, the first one low.

        Args:
            columns: The codes of a row; behind the weights a row is filled with the code of zero.
        """
        zero = self.form.zero
        codes = np.full((len(self.steps), columns), zero, np.uint8)
        codes[:, : self.steps.shape[1]] = self.steps.astype(np.int16) + zero
        return codes if self.form.bits == 8 else codes[:, 0::2] | (codes[:, 1::2] << 4)


def in_blocks(rows: Array, form: BlockForm, importance: Array | None = None) -> Blocked:
    """Return weights in blocks, each with the scale that has the least error.

    For each block, some scales are tried. Each gives integers, and these integers give the scale with the least error,
    ``s = sum(h w q) / sum(h q^2)``, with ``h`` the importance of a column. The scale with the least
    ``sum(h (w - s q)^2)`` is used: the error of the product if the columns are independent.

    Args:
        rows: The weights, float32 (N, K); a block is in one row.
        form: The form; rows that are shorter than a block get smaller blocks.
        importance: The mean square of the input of each column, (K,); None for equal importance.
    """
    count, columns = rows.shape
    form = form.within(columns)
    blocks = form.blocks(columns)
    steps, scale = np.empty((count, columns), np.int8), np.empty((count, blocks), np.float32)
    weight = np.zeros((blocks, form.size), np.float32)
    weight.reshape(-1)[:columns] = 1.0 if importance is None else _relative(importance)
    for part in _parts(count, blocks * form.size):
        padded = np.zeros((part.stop - part.start, blocks * form.size), np.float32)
        padded[:, :columns] = rows[part]
        found, scale[part] = _best(padded.reshape(-1, blocks, form.size), weight, form)
        steps[part] = found.reshape(-1, blocks * form.size)[:, :columns]
    return Blocked(form, steps, scale)


def _relative(importance: Array) -> Array:
    """Return importance over its mean, with at least a thousandth, so that no column is without weight."""
    mean = float(np.mean(importance, dtype=np.float64))
    relative = np.asarray(importance, np.float64) / mean if mean > 0 else np.ones_like(importance, np.float64)
    return np.maximum(relative, 1e-3).astype(np.float32)


def _parts(count: int, width: int) -> Iterator[slice]:
    """Yield slices of rows: the temporaries of each fit into the cache."""
    each = max(1, BLOCK // max(width, 1))
    for start in range(0, count, each):
        yield slice(start, min(start + each, count))


def _best(weights: Array, importance: Array, form: BlockForm) -> tuple[Array, Array]:
    """Return the integers (N, blocks, size) and scales (N, blocks) with the least error.

    Args:
        weights: float32 (N, blocks, size).
        importance: float32 (blocks, size).
        form: The form.
    """
    first = _first_scale(weights, form)
    relative = weights / first[..., None]  # at most 127: sums of squares do not overflow
    best_steps, best_factor = np.zeros(weights.shape, np.float32), np.ones(first.shape, np.float32)
    least = np.full(first.shape, np.inf, np.float32)
    for stretch in STRETCHES[form.bits]:
        steps = np.rint(relative / np.float32(stretch))
        np.clip(steps, -form.zero, form.zero - 1, out=steps)
        weighted = steps * importance
        power = np.einsum("nbk,nbk->nb", weighted, steps)
        product = np.einsum("nbk,nbk->nb", weighted, relative)
        factor = np.divide(product, power, out=np.ones_like(first), where=power > 0)
        error = factor * (factor * power - 2 * product)  # without the power of the weights, which is the same for all
        better = error < least
        least = np.where(better, error, least)
        best_factor = np.where(better, factor, best_factor)
        best_steps = np.where(better[..., None], steps, best_steps)
    scale = first * best_factor
    return best_steps, np.where(np.abs(scale) < TINY, first, scale)


def _first_scale(weights: Array, form: BlockForm) -> Array:
    """Return scales (N, blocks) with which no weight is clipped.

    With 4 bits, a negative scale gives the greatest weight the code -8 or 8, whatever its sign. With 8 bits, codes
    stay within -127 and 127. A block of zeros has the scale 1.
    """
    if form.bits == 8:
        scale = np.abs(weights).max(axis=-1) / np.float32(form.zero - 1)
    else:
        place = np.abs(weights).argmax(axis=-1)[..., None]
        scale = np.take_along_axis(weights, place, axis=-1)[..., 0] / np.float32(-form.zero)
    return np.where(np.abs(scale) < TINY, np.float32(1), scale).astype(np.float32)

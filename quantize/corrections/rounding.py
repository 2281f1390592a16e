"""Learned rounding: each weight is rounded up or down by what is best for the result of its layer.

The objective is that of AdaRound (Nagel et al., Up or Down? Adaptive Rounding for Post-Training Quantization, 2020),
``E |y - W' x'|**2`` with x' what the integer layers before give, solved without a relaxation: it is a quadratic form in
the weights of each output channel, and changing one weight from down to up changes it by a term that is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ...calibration.session import Array
from ...transforms.qparams import QParams
from .layer_by_layer import Step

ROWS = 16384
"""Positions of the result that are looked at, of all samples together."""
FOLDS = 4
"""One of so many samples judges what is found on the others."""
PARTS = 16
"""Into so many parts the positions of the judging samples are split, to tell what is better from what is luck."""
SURE = 2.0
"""By so many standard errors of its mean over the parts a gain must be above none."""
SPARSE = 4
"""A layer of more than so many columns per position is not looked at: its samples tell next to nothing of it."""
SWEEPS = 4
BLOCK = 64


@dataclass(frozen=True, eq=False)
class Moments:
    """What a layer's objective is made of, per group of channels.

    Attributes:
        columns: Second moments of the input's columns, (K, K) float32.
        residual: Second moments of the columns with what the result has too much, (K, M) float32.
        rows: How many positions were seen.
    """

    columns: Array
    residual: Array
    rows: int


def operations(step: Step) -> float:
    """Return about how many multiplications `learn_rounding` makes for a unit."""
    array, groups = step.weights.array, _groups(step.node)
    results = array.shape[0 if step.node.op_type == "Conv" or _transposed(step.node) else -1] / groups
    columns = array.size / groups / results
    judged = 6 * columns * ROWS / FOLDS * results
    return float(groups * (columns**2 * (ROWS + 2 * SWEEPS * results) + judged))


def learn_rounding(step: Step, *, shifted: bool = True) -> Array | None:
    """Return the weights of a unit as integers, rounded for the sake of its result.

    On three quarters of the samples two roundings are found: one for the result on the integer layers' input, and one
    that also makes up for what these have lost. The other samples tell whether each is surely better than plain
    rounding, the first for the result on their input and the second for what the float layer gives, and of two that are
    which gives more of that: a layer of many weights and few positions learns its samples by heart.

    Args:
        step: The unit.
        shifted: Whether its bias, if it has one, will make up for means.

    Returns:
        Integers in the node's layout; None where plain rounding is best, or the layer has a form that is not looked at.
    """
    rows = list(_rows(step))
    params = step.weights.params
    matrix, steps = _matrix(step, step.weights.array), _matrix(step, _scales(step))
    if len(rows) < FOLDS or SPARSE * sum(x.shape[1] for x, _ in rows) < matrix.shape[1]:
        return None
    zero = float(params.zero_point.reshape(-1)[0])
    nearest = _matrix(step, step.nearest.astype(np.float32))
    made = {name: nearest.copy() for name in ("nearest", "for its input", "for the float result")}
    on_input, on_result = ({name: np.zeros(1) for name in made} for _ in range(2))  # squared errors of unseen samples
    centred = step.has_bias and shifted
    for group, weights in enumerate(matrix):
        seen = [(x[group], y[group]) for index, (x, y) in enumerate(rows) if index % FOLDS != FOLDS - 1]
        unseen = [(x[group], y[group]) for x, y in rows[FOLDS - 1 :: FOLDS]]
        moments = moments_of(seen, weights, centred)
        alone = replace(moments, residual=0 * moments.residual)
        exact = weights / steps[group] + zero
        for name, known in (("for its input", alone), ("for the float result", moments)):
            made[name][group] = round_columns(known, exact, nearest[group], steps[group], params)
        for name, each in made.items():
            rounded = steps[group] * (each[group] - zero)
            on_input[name] = on_input[name] + losses([(x, x @ weights) for x, _ in unseen], rounded, centred)
            on_result[name] = on_result[name] + losses(unseen, rounded, centred)
    judged = {"for its input": on_input, "for the float result": on_result}
    better = [name for name, lost in judged.items() if surely(lost["nearest"] - lost[name])]
    if not better:
        return None
    best = min(better, key=lambda name: float(on_result[name].sum()))
    return _unmatrix(step, made[best]).astype(params.zero_point.dtype)


def losses(rows: list[tuple[Array, Array]], weights: Array, centred: bool) -> Array:
    """Return the squared error that weights make at each part of some positions, (`PARTS`,) or less.

    Args:
        rows: As for `moments_of`; or with other results that are to be had.
        weights: Dequantized weights, (K, M).
        centred: Whether the means do not matter.
    """
    errors = np.concatenate([x @ weights - y for x, y in rows])
    if centred:
        errors -= errors.mean(axis=0, dtype=np.float64).astype(np.float32)
    squares = np.square(errors).sum(axis=1, dtype=np.float64)
    return np.asarray([part.sum() for part in np.array_split(squares, min(PARTS, len(squares)))])


def surely(gains: Array) -> bool:
    """Whether the mean of some gains is above none by `SURE` standard errors."""
    return len(gains) > 1 and float(gains.mean()) > SURE * float(gains.std(ddof=1)) / math.sqrt(len(gains))


def moments_of(rows: list[tuple[Array, Array]], weights: Array, centred: bool) -> Moments:
    """Return the moments of one group.

    Args:
        rows: What the INT8 model gives the layer, (rows, K), and what the float layer gives, without its bias,
            (rows, M), of each sample.
        weights: The float weights, (K, M).
        centred: Whether the means do not matter, because a bias makes up for them.
    """
    x, y = (np.concatenate(arrays).astype(np.float32) for arrays in zip(*rows, strict=True))
    if centred:
        x, y = (each - each.mean(axis=0, dtype=np.float64).astype(np.float32) for each in (x, y))
    count = np.float32(len(x))
    return Moments(x.T @ x / count, x.T @ (x @ weights - y) / count, len(x))


def round_columns(moments: Moments, exact: Array, nearest: Array, steps: Array, params: QParams) -> Array:
    """Return integers of which each is the one below or above an exact value, and whose error costs least.

    With errors ``e = s (q - w / s)`` of one output channel the cost is ``e H e + 2 e r``, H the second moments of the
    columns and r their residual. Both are known from few rows only: off the diagonal they are shrunk by
    ``rows / (rows + K)``, towards plain rounding. One weight at a time is changed while that lowers the cost; all
    output channels at once, a block of weights per matrix product.

    Args:
        moments: Of the layer's group.
        exact: Weights in steps, (K, M).
        nearest: The nearest integers, (K, M).
        steps: The step of each weight, (K, M).
        params: Their parameters, which tell the least and the greatest integer.
    """
    info = np.iinfo(params.zero_point.dtype)
    size = len(exact)
    trust = np.float32(moments.rows / (moments.rows + size))
    hessian = trust * moments.columns
    diagonal = moments.columns.diagonal().copy()
    np.fill_diagonal(hessian, diagonal)
    current = nearest.astype(np.float32)
    other = current + np.sign(exact - current)  # of a weight on the grid there is no other
    other = np.where((other < info.min + 1) | (other > info.max), current, other)  # a symmetric grid has no -128
    slope = hessian @ (steps * (current - exact)) + trust * moments.residual
    for _ in range(SWEEPS):
        changed = 0
        for start in range(0, size, BLOCK):
            block = slice(start, min(start + BLOCK, size))
            moved = _sweep(block, hessian, slope, current, other, steps)
            changed += int(np.count_nonzero(moved))
            slope += hessian[:, block] @ moved
        if not changed:
            break
    return current


def _sweep(block: slice, hessian: Array, slope: Array, current: Array, other: Array, steps: Array) -> Array:
    """Change weights of a block in place where that pays; return by how much each changed, (block, M)."""
    local, inner = slope[block].copy(), hessian[block, block]
    moved = np.zeros_like(local)
    for row in range(len(local)):
        index = block.start + row
        change = steps[index] * (other[index] - current[index])
        pays = (2 * change * local[row] + change**2 * inner[row, row] < 0) & (change != 0)
        change = np.where(pays, change, 0.0)
        local += inner[:, row : row + 1] * change
        moved[row] = change
        old = current[index].copy()
        current[index] = np.where(pays, other[index], old)
        other[index] = np.where(pays, old, other[index])
    return moved


def _scales(step: Step) -> Array:
    """Return the step of each weight, in the node's layout."""
    params, array = step.weights.params, step.weights.array
    shape = [1] * array.ndim
    if params.axis is not None:
        shape[params.axis] = -1
    return np.broadcast_to(params.scale.reshape(shape), array.shape)


def _groups(node: ir.Node) -> int:
    """Return the groups of a convolution; 1 of a matrix product."""
    return int(node.attributes.get_int("group", 1)) if node.op_type == "Conv" else 1


def _transposed(node: ir.Node) -> bool:
    """Whether weights are (M, K)."""
    return node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))


def _matrix(step: Step, array: Array) -> Array:
    """Return weights as (groups, K, M)."""
    if step.node.op_type == "Conv":
        groups = _groups(step.node)
        return np.asarray(array.reshape(groups, array.shape[0] // groups, -1).transpose(0, 2, 1))
    return np.asarray(array.T[None] if _transposed(step.node) else array[None])


def _unmatrix(step: Step, matrices: Array) -> Array:
    """Return (groups, K, M) in the node's layout."""
    if step.node.op_type == "Conv":
        return np.asarray(matrices.transpose(0, 2, 1).reshape(step.weights.array.shape))
    return np.asarray(matrices[0].T if _transposed(step.node) else matrices[0])


def _rows(step: Step) -> Iterator[tuple[Array, Array]]:
    """Yield inputs (groups, rows, K) and results without bias (groups, rows, M) of each sample; none where unknown."""
    each = max(1, ROWS // len(step.rough))
    if step.node.op_type == "Conv":
        padded = step.node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
        taken = _patches if padded else None
    else:
        taken = _vectors if step.weights.array.ndim == 2 else None
    if taken is None:
        return
    for x, y in zip(step.rough, step.wanted, strict=True):
        rows, results = taken(step, x, y, each)
        if step.weights.bias is not None:
            results = results - step.weights.bias.reshape(len(rows), 1, -1)
        yield rows, results


def _vectors(step: Step, x: Array, y: Array, most: int) -> tuple[Array, Array]:
    """Return what a matrix product multiplies at some positions, (1, rows, K), and its results, (1, rows, M)."""
    rows, results = x.reshape(1, -1, x.shape[-1]), y.reshape(1, -1, y.shape[-1])
    picked = _evenly(rows.shape[1], most)
    return rows[:, picked], results[:, picked]


def _evenly(total: int, most: int) -> Array:
    """Return at most so many positions, evenly spread."""
    return np.arange(total) if total <= most else np.linspace(0, total - 1, most).astype(np.int64)


def _patches(step: Step, x: Array, y: Array, most: int) -> tuple[Array, Array]:
    """Return what a convolution multiplies at some positions, (groups, rows, K), and its results, (groups, rows, M)."""
    node, weights = step.node, step.weights.array
    axes, groups = weights.ndim - 2, _groups(node)
    strides = node.attributes.get_ints("strides", [1] * axes)
    dilations = node.attributes.get_ints("dilations", [1] * axes)
    pads = node.attributes.get_ints("pads", [0] * 2 * axes)
    padded = np.pad(x, [(0, 0), (0, 0), *((pads[a], pads[axes + a]) for a in range(axes))])
    extents = [(k - 1) * d + 1 for k, d in zip(weights.shape[2:], dilations, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, extents, axis=tuple(range(2, 2 + axes)))
    steps = (slice(None, None, step) for step in (*strides, *dilations))
    cuts = (slice(None), slice(None), *steps)
    windows = windows[cuts]
    batch, spatial = y.shape[0], y.shape[2:]
    picked = _evenly(batch * int(np.prod(spatial)), most)
    first, *others = np.unravel_index(picked, (batch, *spatial))
    places: tuple[Any, ...] = (first, slice(None), *others)
    rows = windows[places].reshape(len(picked), groups, -1)
    results = y[places].reshape(len(picked), groups, -1)
    return rows.transpose(1, 0, 2), results.transpose(1, 0, 2)

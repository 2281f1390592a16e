"""Learned rounding: round each weight up or down, whichever is better for the result of its layer.

The objective is that of AdaRound (Nagel et al., Up or Down? Adaptive Rounding for Post-Training Quantization, 2020),
``E |y - W' x'|**2``; x' is the result of the integer layers before. The objective is a quadratic form in the weights of
each output channel. It is minimized directly, without a relaxation, by changing one weight at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ...calibration.data.places import one_of_each_part
from ...calibration.model.session import Array
from ...transforms.int8.qparams import QParams, along_axis
from ...transforms.int8.saturation import PAIR_LIMIT, pair_partners
from ...transforms.int8.weights import groups_of
from .layer_by_layer import Layer

ROWS = 16384
"""The number of positions of the result that are used, of all samples together."""
FOLDS = 4
"""One of so many samples, at a place that changes, is held back to compare the roundings; see `held_back`."""
PARTS = 16
"""The held-back positions are split into this many parts. The spread over the parts gives the standard error."""
SURE = 2.0
"""A rounding is better if its mean gain over the parts is above this many standard errors."""
SPARSE = 4
"""A layer needs this many positions per column, or its samples say too little about its weights."""
SWEEPS = 4
BLOCK = 64
AT_ONCE = 2**26
"""Groups are computed together, as many as have inputs of this many bytes. Alone, a group of a depthwise layer takes
longer to start than to compute."""

NEAREST, BY_INPUT, BY_RESULT = "nearest", "by the integer input", "by the float result"
CRITERIA = (BY_INPUT, BY_RESULT)
"""The two objectives: the float weights' result on the integer input, and the float model's result."""


@dataclass(frozen=True, eq=False)
class Moments:
    """The coefficients of a layer's objective, for groups of channels; of one group, the first axis may be left out.

    Attributes:
        columns: Second moments of the input's columns, (groups, K, K) float32.
        residual: Second moments of the columns with the error of the float weights' result, (groups, K, M) float32.
        rows: The number of positions.
    """

    columns: Array
    residual: Array
    rows: int


def operations(layer: Layer) -> float:
    """Return the approximate number of multiplications that `learn_rounding` needs for a layer."""
    return multiplications(layer.node, layer.weights.array.shape)


def multiplications(node: ir.Node, shape: tuple[int, ...]) -> float:
    """Return `operations` of a layer from its node and the shape of its weights."""
    groups, columns = groups_of(node), columns_of(node, shape)
    results = channels_of(node, shape) / groups
    judging = 6 * columns * ROWS / FOLDS * results
    return float(groups * (columns**2 * (ROWS + 2 * SWEEPS * results) + judging))


def columns_of(node: ir.Node, shape: tuple[int, ...]) -> float:
    """Return the number of weights of each output channel, from the node and the shape of its weights."""
    return math.prod(shape) / channels_of(node, shape)


def channels_of(node: ir.Node, shape: tuple[int, ...]) -> int:
    """Return the number of output channels of a layer from its node and the shape of its weights."""
    return shape[_channel_axis(node)]


def learn_rounding(layer: Layer, *, shifted: bool = True, exact: bool = True) -> Array | None:
    """Return the weights of a layer as integers, rounded for the least error of its result.

    Three quarters of the samples give two roundings. The first minimizes the error that the layer adds to its integer
    input; the second also compensates for the error of this input. The other samples compare both with rounding to
    nearest: the first by the result of the float weights on the integer input, the second by the float model's result.
    Of the roundings that are surely better, the one closer to the float model's result is used. Without this
    comparison, a layer with many weights and few positions would fit its samples only.

    Args:
        layer: The layer.
        shifted: Whether a later correction of the bias, if there is one, corrects mean errors.
        exact: Whether the target adds products in 32 bits. If not, no sum of two products exceeds 16 bits.

    Returns:
        Integers in the node's layout; None if rounding to nearest is best or the layer's form is not supported.
    """
    rows = list(_rows(layer))
    params = layer.weights.params
    matrix, steps = _matrix(layer, layer.weights.array), _matrix(layer, _scales(layer))
    if len(rows) < FOLDS or SPARSE * sum(x.shape[1] for x, _ in rows) < matrix.shape[1]:
        return None
    zero = float(params.zero_point.reshape(-1)[0])
    nearest = _matrix(layer, layer.nearest.astype(np.float32))
    candidates = {name: nearest.copy() for name in (NEAREST, *CRITERIA)}
    lost = {criterion: dict.fromkeys(candidates, np.zeros(1)) for criterion in CRITERIA}
    centred = layer.has_bias and shifted
    bounds, partners = bounds_of(params), None if exact or params.zero_point.dtype != np.int8 else _partners(layer)
    for groups in _at_once(rows):
        weights, scales = matrix[groups], steps[groups]
        moments = moments_of(_joined(rows, groups, seen=True), weights, centred)
        alone = replace(moments, residual=0 * moments.residual)
        in_steps = weights / scales + zero
        for name, known in ((BY_INPUT, alone), (BY_RESULT, moments)):
            candidates[name][groups] = round_columns(known, in_steps, nearest[groups], scales, bounds, partners)
        x, y = _joined(rows, groups, seen=False)
        targets = {BY_INPUT: x @ weights, BY_RESULT: y}
        for name, integers in candidates.items():
            results = x @ (scales * (integers[groups] - zero))
            for criterion, target in targets.items():
                lost[criterion][name] = lost[criterion][name] + losses(results - target, centred)
    better = [name for name in CRITERIA if surely(lost[name][NEAREST] - lost[name][name])]
    if not better:
        return None
    best = min(better, key=lambda name: float(lost[BY_RESULT][name].sum()))
    return _unmatrix(layer, candidates[best]).astype(params.zero_point.dtype)


def _at_once(rows: list[tuple[Array, Array]]) -> Iterator[slice]:
    """Yield the groups in slices whose inputs have about `AT_ONCE` bytes: a depthwise layer has hundreds of groups."""
    groups = len(rows[0][0])
    each = sum(x.nbytes for x, _ in rows) // groups
    count = max(1, AT_ONCE // max(1, each))
    yield from (slice(start, start + count) for start in range(0, groups, count))


def _joined(rows: list[tuple[Array, Array]], groups: slice, *, seen: bool) -> tuple[Array, Array]:
    """Return the inputs (groups, rows, K) and results (groups, rows, M) of the samples that are seen, or held back."""
    back = held_back(len(rows))
    picked = (each for index, each in enumerate(rows) if (index not in back) == seen)
    x, y = zip(*((x[groups], y[groups]) for x, y in picked), strict=True)
    return np.concatenate(x, axis=1, dtype=np.float32), np.concatenate(y, axis=1, dtype=np.float32)


def held_back(count: int) -> frozenset[int]:
    """Return the positions of the samples that compare the roundings: one of each `FOLDS`, at a place that changes."""
    return frozenset(one_of_each_part(range(count), count // FOLDS))


def losses(errors: Array, centred: bool) -> Array:
    """Return the squared error of the results in each part of the positions, (`PARTS`,) or fewer.

    Args:
        errors: Results minus expected results, (groups, rows, M) or (rows, M).
        centred: Whether to ignore the mean error of each output channel.
    """
    if centred:
        errors = errors - errors.mean(axis=-2, keepdims=True, dtype=np.float64).astype(np.float32)
    others = tuple(axis for axis in range(errors.ndim) if axis != errors.ndim - 2)
    squares = np.square(errors).sum(axis=others, dtype=np.float64)
    return np.asarray([part.sum() for part in np.array_split(squares, min(PARTS, len(squares)))])


def surely(gains: Array) -> bool:
    """Whether the mean gain is above zero by more than `SURE` standard errors."""
    return len(gains) > 1 and float(gains.mean()) > SURE * float(gains.std(ddof=1)) / math.sqrt(len(gains))


def moments_of(samples: tuple[Array, Array], weights: Array, centred: bool) -> Moments:
    """Return the moments of groups, or of one group without the first axis.

    Args:
        samples: The layer's input in the INT8 model, (groups, rows, K), and its result in the float model, without the
            bias, (groups, rows, M); float32.
        weights: The float weights, (groups, K, M).
        centred: Whether to ignore means, because a bias correction follows.
    """
    x, y = samples
    if centred:
        x, y = (each - each.mean(axis=-2, keepdims=True, dtype=np.float64).astype(np.float32) for each in (x, y))
    columns, rows = x.swapaxes(-1, -2), x.shape[-2]
    count = np.float32(rows)
    return Moments(columns @ x / count, columns @ (x @ weights - y) / count, rows)


def round_columns(
    moments: Moments,
    exact: Array,
    nearest: Array,
    steps: Array,
    bounds: tuple[int, int],
    partners: Array | None = None,
) -> Array:
    """Return the integers below or above the exact values with the least cost.

    The errors of one output channel are ``e = s (q - w / s)``, the cost is ``e H e + 2 e r``: H are the second moments
    of the columns, r is their residual. Few rows give uncertain moments, so all but the diagonal of H is multiplied by
    ``rows / (rows + K)``; this moves the result towards rounding to nearest. One weight at a time changes while this
    lowers the cost, for all output channels at once. The slope is updated per block of weights, by a matrix product.

    Args:
        moments: The moments of the groups.
        exact: Weights in steps, (groups, K, M); as in the moments, one group may come without the first axis.
        nearest: The nearest integers, as `exact`.
        steps: The step of each weight, as `exact`.
        bounds: The least and the greatest integer.
        partners: By weight, the index of the other weight of its pair, (K,), -1 without one: their sum stays within
            `PAIR_LIMIT`. None where the target adds products in 32 bits.
    """
    size = exact.shape[-2]
    trust = np.float32(moments.rows / (moments.rows + size))
    hessian = np.where(np.eye(size, dtype=bool), moments.columns, trust * moments.columns)
    current = nearest.astype(np.float32)
    other = current + np.sign(exact - current)  # no other integer for a weight on the grid
    other = np.where((other < bounds[0]) | (other > bounds[1]), current, other)
    slope = hessian @ (steps * (current - exact)) + trust * moments.residual
    for _ in range(SWEEPS):
        changed = 0
        for start in range(0, size, BLOCK):
            block = slice(start, min(start + BLOCK, size))
            moved = _sweep(block, hessian, slope, current, other, steps, partners)
            changed += int(np.count_nonzero(moved))
            slope += hessian[..., block] @ moved
        if not changed:
            break
    return current


def bounds_of(params: QParams) -> tuple[int, int]:
    """Return the least and the greatest integer of symmetric weights: a symmetric grid has no -128."""
    info = np.iinfo(params.zero_point.dtype)
    return int(info.min) + 1, int(info.max)


def _sweep(
    block: slice, hessian: Array, slope: Array, current: Array, other: Array, steps: Array, partners: Array | None
) -> Array:
    """Change the weights of a block in place if the cost decreases.

    Returns:
        The change of each weight, (groups, block, M), as the other arrays with or without the first axis.
    """
    local, inner = slope[..., block, :].copy(), hessian[..., block, block]
    moved = np.zeros_like(local)
    for row in range(local.shape[-2]):
        index = block.start + row
        old, new = current[..., index, :].copy(), other[..., index, :].copy()
        change = steps[..., index, :] * (new - old)
        pays = (2 * change * local[..., row, :] + change**2 * inner[..., row, row, None] < 0) & (change != 0)
        if partners is not None and partners[index] >= 0:
            pays &= np.abs(new + current[..., partners[index], :]) <= PAIR_LIMIT
        change = np.where(pays, change, 0.0)
        local += inner[..., row, None] * change[..., None, :]
        moved[..., row, :] = change
        current[..., index, :] = np.where(pays, new, old)
        other[..., index, :] = np.where(pays, old, new)
    return moved


def _scales(layer: Layer) -> Array:
    """Return the step of each weight, in the node's layout."""
    params, array = layer.weights.params, layer.weights.array
    return np.broadcast_to(along_axis(params.scale, params, array.ndim), array.shape)


def _partners(layer: Layer) -> Array:
    """Return the partner of each column in 16-bit sums, (K,)."""
    return pair_partners(layer.weights.array, _channel_axis(layer.node), group=groups_of(layer.node))


def _channel_axis(node: ir.Node) -> int:
    """Return the axis of the output channels."""
    return 0 if node.op_type == "Conv" or _transposed(node) else -1


def _transposed(node: ir.Node) -> bool:
    """Whether the weights have the shape (M, K)."""
    return node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))


def _matrix(layer: Layer, array: Array) -> Array:
    """Return weights as (groups, K, M)."""
    if layer.node.op_type == "Conv":
        groups = groups_of(layer.node)
        return np.asarray(array.reshape(groups, array.shape[0] // groups, -1).transpose(0, 2, 1))
    return np.asarray(array.T[None] if _transposed(layer.node) else array[None])


def _unmatrix(layer: Layer, matrices: Array) -> Array:
    """Return weights (groups, K, M) in the node's layout."""
    if layer.node.op_type == "Conv":
        return np.asarray(matrices.transpose(0, 2, 1).reshape(layer.weights.array.shape))
    return np.asarray(matrices[0].T if _transposed(layer.node) else matrices[0])


def _rows(layer: Layer) -> Iterator[tuple[Array, Array]]:
    """Yield inputs (groups, rows, K) and results without bias (groups, rows, M) of each sample.

    Nothing is yielded for convolutions with automatic padding and for stacked matrices.
    """
    each = max(1, ROWS // len(layer.int8_inputs))
    if layer.node.op_type == "Conv":
        explicit = layer.node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
        read = _patches if explicit else None
    else:
        read = _vectors if layer.weights.array.ndim == 2 else None
    if read is None:
        return
    for x, y in zip(layer.int8_inputs, layer.float_results, strict=True):
        rows, results = read(layer, x, y, each)
        if layer.weights.bias is not None:
            results = results - layer.weights.bias.reshape(len(rows), 1, -1)
        yield rows, results


def _vectors(layer: Layer, x: Array, y: Array, most: int) -> tuple[Array, Array]:
    """Return inputs (1, rows, K) and results (1, rows, M) of a matrix product at some positions."""
    rows, results = x.reshape(1, -1, x.shape[-1]), y.reshape(1, -1, y.shape[-1])
    picked = _evenly(rows.shape[1], most)
    return rows[:, picked], results[:, picked]


def _evenly(total: int, most: int) -> Array:
    """Return at most `most` of `total` positions, evenly spread."""
    return np.arange(total) if total <= most else np.linspace(0, total - 1, most).astype(np.int64)


def _patches(layer: Layer, x: Array, y: Array, most: int) -> tuple[Array, Array]:
    """Return inputs (groups, rows, K) and results (groups, rows, M) of a convolution at some positions."""
    node, weights = layer.node, layer.weights.array
    axes, groups = weights.ndim - 2, groups_of(node)
    strides = node.attributes.get_ints("strides", [1] * axes)
    dilations = node.attributes.get_ints("dilations", [1] * axes)
    pads = node.attributes.get_ints("pads", [0] * 2 * axes)
    padded = np.pad(x, [(0, 0), (0, 0), *((pads[a], pads[axes + a]) for a in range(axes))])
    extents = [(k - 1) * d + 1 for k, d in zip(weights.shape[2:], dilations, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, extents, axis=tuple(range(2, 2 + axes)))
    steps = (slice(None, None, stride) for stride in (*strides, *dilations))
    cuts = (slice(None), slice(None), *steps)
    windows = windows[cuts]
    batch, spatial = y.shape[0], y.shape[2:]
    picked = _evenly(batch * int(np.prod(spatial)), most)
    first, *others = np.unravel_index(picked, (batch, *spatial))
    places: tuple[Any, ...] = (first, slice(None), *others)
    rows = windows[places].reshape(len(picked), groups, -1)
    results = y[places].reshape(len(picked), groups, -1)
    return rows.transpose(1, 0, 2), results.transpose(1, 0, 2)

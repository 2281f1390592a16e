"""Turn weights that a model computes from integers back into float constants."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir

from .graphs.queries import computing_nodes, constant, graph_of, is_standard
from .graphs.rewriter import derive_initializer, discard, names, remove, replace, unused_name
from .registry import Change, LeftAlone, transform

QUANTIZES = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
AXIS, WHOLE = 1, 0  # the default of the attribute `axis`; and the `block_size` of scales that are not of blocks


@transform("dequantize_weights")
def dequantize_weights(model: ir.Model) -> Change:
    """Replace a DequantizeLinear of constants by its result, in a model whose activations are all float.

    Before:  y = Conv(x, Reshape(DequantizeLinear(W8, s, z, block_size 64), [64, 32, 3, 3]))
    After:   y = Conv(x, Reshape(W, [64, 32, 3, 3])),  W = (W8 - z) * s in float32, with a scale for each block
        The integers make the file small, and each run computes the weights anew: OpenCV's models that end in
        ``int8bq`` are such. `requant quantize` does this where it has data, and makes products in integers of them.
        Weights of more than 1 MiB are computed when they are read.
    Left alone: models that quantize an activation (``quantizes-activations``): their pairs belong to integer operators;
        computed scales or zero points (``dynamic``), numbers that are no integers (``not-integers``), scales of another
        type than float32 (``not-float32``) or of other lengths (``scales``), and a graph output (``graph-output``).
    """
    change, taken = Change(), names(model)
    nodes = computing_nodes(model)
    found = [node for node in nodes if is_standard(node, "DequantizeLinear") and constant(node.inputs[0]) is not None]
    if found and any(node.op_type in QUANTIZES for node in nodes):
        change.skipped["quantizes-activations"] += len(found)
        return change
    for node in found:
        try:
            value = _dequantized(node, taken)
        except LeftAlone as reason:
            change.skip(str(reason))
            continue
        inputs = tuple(node.inputs)
        replace(node.outputs[0], value)
        remove(node)
        discard(*inputs)
        change.applied += 1
    return change


def _dequantized(node: ir.Node, taken: set[str]) -> ir.Value:
    """Return a new initializer with the result of a DequantizeLinear.

    Raises:
        LeftAlone: It must stay; nothing is changed.
    """
    data, scale, zero = (constant(value) for value in (*node.inputs, None)[:3])
    if node.outputs[0].is_graph_output():
        raise LeftAlone("graph-output")
    if data is None or scale is None or (zero is None and len(node.inputs) > 2 and node.inputs[2] is not None):
        raise LeftAlone("dynamic")
    if not data.dtype.is_integer():
        raise LeftAlone("not-integers")
    if scale.dtype is not ir.DataType.FLOAT:
        raise LeftAlone("not-float32")
    shape = tuple(data.shape.numpy())
    axis, block = node.attributes.get_int("axis", AXIS), node.attributes.get_int("block_size", WHOLE)
    zeros = None if zero is None else _spread(zero.numpy(), shape, axis, block)
    compute = partial(_product, scales=_spread(scale.numpy(), shape, axis, block), zeros=zeros)
    name = unused_name(taken, f"{node.outputs[0].name}/float")
    return derive_initializer(graph_of(node), name, data, compute, shape, ir.DataType.FLOAT)


def _spread(numbers: np.ndarray, shape: tuple[int, ...], axis: int, block: int) -> np.ndarray:
    """Return scales or zero points in float32, of a shape that broadcasts to that of the integers.

    Args:
        numbers: One, one per slice of the axis, or one per block of the axis and for each index of the others.
        shape: The shape of the integers.
        axis: The axis.
        block: The length of a block; 0 without blocks.

    Raises:
        LeftAlone: There are more or fewer.
    """
    values, place = numbers.astype(np.float32), axis % max(len(shape), 1)
    if values.size == 1:
        return values.reshape(())
    if block:
        values = np.repeat(values, block, axis=place)[(slice(None),) * place + (slice(shape[place]),)]
        fits = values.shape == shape
    else:
        fits = values.shape == shape[place : place + 1]
        values = values.reshape(-1, *[1] * (len(shape) - place - 1))
    if not fits:
        raise LeftAlone("scales")
    return values


def _product(integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """Return ``(integers - zeros) * scales`` in float32: differences of integers below 2^24 are exact."""
    values = integers.astype(np.float32)
    return np.asarray((values if zeros is None else values - zeros) * scales)

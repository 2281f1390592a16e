"""Nodes that reduce the tensors of a graph to their extremes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ... import RequantError

if TYPE_CHECKING:
    import onnx_ir as ir

AXES_ARE_AN_INPUT = {"ReduceSum": 13, "ReduceMin": 18, "ReduceMax": 18}
"""The opset since which the axes are an input instead of an attribute."""
IMAGES = 4
"""The rank of tensors that the runtime stores in blocks of channels between convolutions."""
NOT_NEGATIVE = ("Relu", "HardSigmoid")
"""Operators whose outputs are at least 0."""
KEEP_SIGNS = ("MaxPool", "Concat")
"""Operators whose outputs contain only values of their inputs."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """The names of the outputs with the min, max, sum and size of a tensor.

    Attributes:
        lo: The output with the smallest value, or with the smallest value of each channel, (C,). None if the tensor
            cannot be negative; 0 replaces it then, which every range includes.
        hi: The output with the largest value, or of each channel. For an image that cannot be negative: the largest
            value of each plane, then the mean of each plane, (2 N, C, 1, 1).
        total: The output that is NaN if a value is NaN: the sum, or the sum of each channel. For a tensor in a body:
            the sum of x - x, which is NaN exactly if x is not finite. For an image that cannot be negative: the same
            output as `hi`.
        size: The output with the number of values, or the number itself; None if it follows from the number of planes.
        area: The number of values of a plane.
        axis: The channel axis; None if the outputs are scalars.
        inside: Whether the tensor is in a body of control flow.
    """

    lo: str | None
    hi: str
    total: str
    size: str | int | None
    axis: int | None = None
    inside: bool = False
    area: int = 1

    @property
    def ends(self) -> tuple[str, ...]:
        """The names of the outputs."""
        ends = (self.lo, self.hi, self.total, self.size)
        return tuple(dict.fromkeys(end for end in ends if isinstance(end, str)))


def reduce(graph: ir.Graph, value: ir.Value, prefix: str, axis: int | None) -> Reduced:
    """Append nodes that compute a tensor's min, max, sum and size, over all axes or over all axes except one.

    The runtime stores images in blocks of channels between convolutions. Most operators make the runtime reorder them
    first; global pooling does not. For a tensor that cannot be negative, global pooling computes all that is needed in
    a third of the time. No pooling operator computes the smallest value.

    Raises:
        RequantError: The tensor has no such axis.
    """
    import onnx_ir as ir

    rank = len(value.shape) if value.shape is not None else 0
    if axis is not None and not -rank <= axis < rank:
        raise RequantError(f"tensor {value.name!r} has no axis {axis}")
    if axis is None and _is_image(value) and _cannot_be_negative(value):
        return _reduce_image(graph, value, prefix)
    axes = None if axis is None else [index for index in range(rank) if index != axis % rank]
    summed = value
    if axis is not None and value.dtype is ir.DataType.FLOAT16:  # float16 sums would overflow
        summed = _append(graph, ir.node("Cast", [value], {"to": ir.DataType.FLOAT}), f"{prefix}_Cast")
    ends = [_out(graph, op, value, axes, prefix) for op in ("ReduceMin", "ReduceMax")]
    lo, hi, total = (*ends, _out(graph, "ReduceSum", summed, axes, prefix))
    return Reduced(lo, hi, total, _size(graph, value, value.shape or [None], prefix), axis)


def _reduce_image(graph: ir.Graph, value: ir.Value, prefix: str) -> Reduced:
    """Append nodes that compute the max and the mean of each plane of an image without negative values.

    Each node costs microseconds, whatever it computes. The planes are therefore reduced outside the graph.
    """
    import onnx_ir as ir

    assert value.shape is not None
    pooled = [_append(graph, ir.node(op, [value]), f"{prefix}_{op}") for op in ("GlobalMaxPool", "GlobalAveragePool")]
    both = _append(graph, ir.node("Concat", pooled, {"axis": 0}), f"{prefix}_Concat")
    graph.outputs.append(both)
    area = math.prod(axis for axis in value.shape[2:] if isinstance(axis, int))
    return Reduced(None, both.name or "", both.name or "", None, area=area)


def _is_image(value: ir.Value) -> bool:
    """Return whether the runtime may store a tensor in blocks of channels."""
    import onnx_ir as ir

    if value.dtype is not ir.DataType.FLOAT or value.shape is None or len(value.shape) != IMAGES:
        return False
    return all(isinstance(axis, int) and axis > 0 for axis in value.shape[1:])


def _cannot_be_negative(value: ir.Value) -> bool:
    """Return whether the operator that computes a tensor has no negative outputs."""
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type == "Clip":
        return _lower_bound(node) >= 0
    if node.op_type in KEEP_SIGNS:
        return all(source is not None and _cannot_be_negative(source) for source in node.inputs)
    return node.op_type in NOT_NEGATIVE


def _lower_bound(node: ir.Node) -> float:
    """Return the lower bound of a Clip; -inf if it is not constant."""
    if "min" in node.attributes:  # before opset 11
        return node.attributes["min"].as_float()
    bound = node.inputs[1] if len(node.inputs) > 1 else None
    if bound is None or bound.const_value is None or bound.is_graph_input():
        return -np.inf
    return float(bound.const_value.numpy().item())


def _size(graph: ir.Graph, value: ir.Value, axes: Iterable[object], prefix: str) -> str | int:
    """Return the number of values of a tensor, or the name of a new output with it."""
    import onnx_ir as ir

    lengths = [axis if isinstance(axis, int) else None for axis in axes]
    if None not in lengths:
        return math.prod(length for length in lengths if length is not None)
    size = _append(graph, ir.node("Size", [value]), f"{prefix}_Size")
    graph.outputs.append(size)
    return size.name or ""


def _out(graph: ir.Graph, op: str, value: ir.Value, axes: list[int] | None, prefix: str) -> str:
    """Append the reduction of a tensor over some axes, or over all (None), in the form of the graph's opset."""
    import onnx_ir as ir

    name = f"{prefix}_{op}"
    if axes is None:
        node = ir.node(op, [value], {"keepdims": 0})
    elif not axes:  # an empty list of axes would mean all axes
        node = ir.node("Identity", [value])
    elif graph.opset_imports[""] < AXES_ARE_AN_INPUT[op]:
        node = ir.node(op, [value], {"keepdims": 0, "axes": axes})
    else:
        constant = ir.node("Constant", [], {"value": ir.tensor(np.array(axes, np.int64))})
        node = ir.node(op, [value, _append(graph, constant, f"{name}_axes")], {"keepdims": 0})
    graph.outputs.append(_append(graph, node, name))
    return name


def _append(graph: ir.Graph, node: ir.Node, name: str) -> ir.Value:
    """Append a node to a graph and return its output."""
    node.name = node.outputs[0].name = name
    graph.append(node)
    return node.outputs[0]

"""Questions about a graph that transforms share: a constant, a producer, a sole reader. None changes the graph."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TypeAlias, TypeGuard

import numpy as np
import onnx_ir as ir

# The attributes of a Constant node that hold numbers instead of a tensor.
CONSTANT_DTYPES: dict[str, type[np.generic]] = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}

Shape: TypeAlias = Sequence[int | str | None]
"""The lengths of a tensor's axes; a name or None where a length is unknown."""

FARTHEST = 2**15
"""The longest stride, dilation or pad of a native operator; ``kFarthest`` in the native sources."""
DEEPEST = (2**31 - 1) // (255 * 128)
"""The most products of a result of a native operator: int32 holds all sums; ``kDeepest`` in the native sources."""

MS = "com.microsoft"
"""The domain of the operators that ONNX Runtime adds to ONNX."""

QDQ = frozenset({"QuantizeLinear", "DequantizeLinear"})
"""The operators that convert between floats and integers by a scale and a zero point that they are given."""


def key(node: ir.Node) -> str:
    """Return the name of a node's operator with its domain, such as ``"Conv"`` or ``"com.microsoft.Attention"``."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def is_float32(value: ir.Value | None) -> bool:
    """Return whether a tensor is known to be float32."""
    return value is not None and value.dtype is ir.DataType.FLOAT


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of a Constant node, or of an initializer that no caller can override; else None.

    The tensor belongs to the model: it stays lazy until ``.numpy()`` and must not be written to.
    """
    if value is None or value.is_graph_input():
        return None
    if value.is_initializer():
        return value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain != "":
        return None
    for name, attribute in node.attributes.items():
        if name in CONSTANT_DTYPES and not attribute.is_ref():
            return ir.Tensor(np.asarray(attribute.value, CONSTANT_DTYPES[name]))
    return node.attributes.get_tensor("value", None)


def producer_of(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes a tensor; None if there is none, or no tensor."""
    return None if value is None else value.producer()


def made_by(value: ir.Value | None, op: str) -> ir.Node | None:
    """Return the node that computes a tensor if it is this operator, of any domain; else None."""
    node = producer_of(value)
    return node if node is not None and node.op_type == op else None


def is_standard(node: ir.Node | None, *ops: str) -> TypeGuard[ir.Node]:
    """Return whether there is a node, and it is one of some operators of the standard domain."""
    return node is not None and node.op_type in ops and not node.domain


def integers_of(value: ir.Value | None) -> list[int] | None:
    """Return the integers of a constant in one list; None for other tensors."""
    tensor = constant(value)
    return None if tensor is None else [int(number) for number in tensor.numpy().reshape(-1)]


def axes_of(node: ir.Node) -> list[int] | None:
    """Return the axes that an attribute of a node or its second input names, empty without any; None if computed."""
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return list(node.attributes.get_ints("axes", ()))
    return integers_of(node.inputs[1])


def one_number(value: ir.Value | None, axes: int | None, dtype: ir.DataType | None = None) -> float | None:
    """Return the value of a constant with one element; None for other tensors and for NaN.

    Args:
        value: Any tensor, or None.
        axes: The most axes that the constant may have; None for any number. An operand with no more axes than the other
            operand changes no shape.
        dtype: The element type that the constant must have; None for any type.
    """
    tensor = constant(value)
    if tensor is None or tensor.size != 1 or (axes is not None and len(tensor.shape) > axes):
        return None
    if dtype is not None and tensor.dtype is not dtype:
        return None
    number = float(tensor.numpy().item())
    return None if isnan(number) else number


def scaled(node: ir.Node | None, axes: int | None, dtype: ir.DataType | None = None) -> tuple[ir.Value, float] | None:
    """Return the tensor that a Mul or Div multiplies by a constant, and the factor; None for other nodes.

    The factor of a Div is the reciprocal of its divisor. A factor may be 0; a divisor of 0 gives None, as do a constant
    that is divided, and two constants.

    Args:
        node: Any node, or None.
        axes: The most axes that the constant may have, which has one element; None for any number. The node returns the
            shape of the tensor if the tensor has as many axes.
        dtype: The element type that the constant must have; None for any type.
    """
    if not is_standard(node, "Mul", "Div"):
        return None
    for index in (1,) if node.op_type == "Div" else (1, 0):
        number, value = one_number(node.inputs[index], axes, dtype), node.inputs[1 - index]
        if number is None or value is None or constant(value) is not None:
            continue
        if node.op_type == "Mul":
            return value, number
        return (value, 1 / number) if number else None
    return None


def release(tensor: ir.TensorProtocol | None) -> None:
    """Release the memory mapping of an external tensor. The pages of the file count as memory once they are read.

    Existing arrays stay valid: the last of them ends the mapping, and the next ``.numpy()`` makes a new one.
    """
    if isinstance(tensor, ir.ExternalTensor):
        try:
            tensor.release()
        except BufferError:  # an array still uses the mapping and keeps it; the tensor drops its reference
            tensor.raw = None


def sole_reader(value: ir.Value) -> ir.Node | None:
    """Return the only node that reads `value`; None for a graph output, several reads, or a reader in a body."""
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    (use,) = uses
    return use.node if use.node.graph is value.graph else None


def known_shape(*values: ir.Value | None) -> ir.Shape | None:
    """Return the shape of the first of some values that has one; the shape of a scalar has no axes, and counts."""
    return next((value.shape for value in values if value is not None and value.shape is not None), None)


def node_name(node: ir.Node) -> str:
    """Return the name of `node`, or of its first output when it has none."""
    return node.name or str(node.outputs[0].name)


CONTROL_FLOW = {"If": 1, "Loop": 1, "Scan": 9}  # the first opset in which the bodies have their present form


def bodies(node: ir.Node, opset: int) -> tuple[ir.Graph, ...]:
    """Return the bodies of an If, Loop or Scan.

    Other operators (``SequenceMap``, a Scan of opset 8, operators of other domains) return no bodies.
    """
    if node.domain or opset < CONTROL_FLOW.get(node.op_type, opset + 1):
        return ()
    graphs = [a.as_graph() for a in node.attributes.values() if a.type is ir.AttributeType.GRAPH and not a.is_ref()]
    return tuple(graphs)


def computing_graphs(model: ir.Model) -> tuple[ir.Graph, ...]:
    """Return the main graph and all `bodies` in it, nested ones too."""
    return _with_bodies(model.graph, model.opset_imports.get("", 1))


def _with_bodies(graph: ir.Graph, opset: int) -> tuple[ir.Graph, ...]:
    """Return a graph and all `bodies` in it, nested ones too."""
    graphs = [graph]
    for each in graphs:  # the loop appends to the list
        graphs.extend(body for node in each for body in bodies(node, opset))
    return tuple(graphs)


def computing_nodes(model: ir.Model, *op_types: str) -> tuple[ir.Node, ...]:
    """Return the nodes of the `computing_graphs`; with `op_types`, only nodes of these standard operators."""
    nodes = (node for graph in computing_graphs(model) for node in graph)
    return tuple(node for node in nodes if not op_types or (node.op_type in op_types and not node.domain))


def code_graphs(model: ir.Model) -> tuple[ir.Graph, ...]:
    """Return the `computing_graphs` of a model and of its functions. Functions have no initializers."""
    functions = [_with_bodies(each.graph, each.opset_imports.get("", 1)) for each in model.functions.values()]
    return (*computing_graphs(model), *(graph for graphs in functions for graph in graphs))


def every_graph(model: ir.Model) -> tuple[ir.Graph, ...]:
    """Return the main graph, the functions and all bodies in them, also bodies of operators of other domains."""
    functions = [graph for each in model.functions.values() for graph in (each.graph, *each.subgraphs())]
    return (*model.graphs(), *functions)


def every_node(model: ir.Model) -> tuple[ir.Node, ...]:
    """Return all nodes, also in bodies and functions."""
    return tuple(node for graph in every_graph(model) for node in graph)


def nodes_by_name(model: ir.Model) -> dict[str, ir.Node]:
    """Return the nodes of the graph and of its bodies by name. Names must be unique (`separate_bodies`)."""
    return {node_name(node): node for graph in computing_graphs(model) for node in graph}


def own_values(graph: ir.Graph) -> list[ir.Value]:
    """Return the inputs, initializers and results of a graph, without the values of its bodies."""
    results = (value for node in graph for value in node.outputs)
    return list(dict.fromkeys([*graph.inputs, *graph.initializers.values(), *results]))


def graph_of(node: ir.Node) -> ir.Graph:
    """Return the graph or body that contains `node`."""
    if not isinstance(node.graph, ir.Graph):
        raise TypeError(f"node {node.name!r} is in no graph")
    return node.graph


def has_plain_window(node: ir.Node) -> bool:
    """Whether a native operator moves the window of a convolution or a pool over an image.

    The padding must be the attribute ``pads``, not computed from the input, and no number above `FARTHEST`.
    """
    numbers = (n for name in ("strides", "dilations", "pads") for n in node.attributes.get_ints(name, ()))
    return node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET" and max(numbers, default=0) <= FARTHEST


def plain_shape(value: ir.Value | None) -> tuple[int | str | None, ...] | None:
    """Return the lengths of a tensor's axes: numbers, names, or None where unknown; None without a shape."""
    if value is None or value.shape is None:
        return None
    return tuple(axis if isinstance(axis, int) else axis.value for axis in value.shape)


def repeats_in(part: Shape, whole: Shape, channel: int) -> bool:
    """Whether a tensor has the shape of another one, or one value for each of its channels.

    Args:
        part: The shape of the tensor.
        whole: The shape of the other one.
        channel: The axis of the channels. The first axis may have its whole length too.
    """
    if len(part) != len(whole) or None in (*part, *whole):
        return False
    if tuple(part) == tuple(whole):
        return True
    axes = enumerate(zip(part, whole, strict=True))
    return len(part) > 1 and all(
        one == other if axis == channel % len(part) else one == 1 or (axis == 0 and one == other)
        for axis, (one, other) in axes
    )


def whole_first(one: Shape, other: Shape, result: Shape, channel: int) -> tuple[int, int] | None:
    """Return the places of two operands, that with the shape of the result first; None if the other does not repeat.

    Args:
        one: The shape of the operand at place 0.
        other: The shape of the operand at place 1.
        result: The shape of the result.
        channel: As for `repeats_in`.
    """
    if tuple(one) == tuple(result) and repeats_in(other, result, channel):
        return 0, 1
    return (1, 0) if tuple(other) == tuple(result) and repeats_in(one, result, channel) else None


def stays_finite(tensor: ir.TensorProtocol, factor: float) -> bool:
    """Whether all elements of a float tensor stay finite when multiplied by `factor`."""
    with np.errstate(over="ignore", invalid="ignore"):
        return abs(factor) <= 1 or bool(np.isfinite(tensor.numpy() * factor).all())


def unread(node: ir.Node, first: int = 0) -> bool:
    """Whether nothing reads the outputs of `node`, from that at place `first` on."""
    return not any(value.uses() or value.is_graph_output() for value in node.outputs[first:])

"""Graph operations that transforms share: read a constant, find a sole reader, replace, add, remove."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan
from typing import Any, TypeAlias, TypeGuard

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

LARGE = 2**20  # bytes; a tensor derived from a larger weight is computed at each read, and not kept in memory


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


def one_number(value: ir.Value | None, axes: int) -> float | None:
    """Return the value of a constant of one element and at most so many axes: an operand that changes no shape.

    None for other tensors and for NaN.
    """
    tensor = constant(value)
    if tensor is None or tensor.size != 1 or len(tensor.shape) > axes:
        return None
    number = float(tensor.numpy().item())
    return None if isnan(number) else number


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


def can_replace(old: ir.Value, new: ir.Value) -> bool:
    """Whether `replace` can keep the name of a graph output: `new` must be able to take that name."""
    if not old.is_graph_output():
        return True
    return new.producer() is not None and not new.is_graph_output() and new.graph is old.graph


def replace(old: ir.Value, new: ir.Value) -> None:
    """Make each reader of `old`, also in bodies, read `new`; a graph output keeps its name, type and shape.

    `can_replace` must hold. The caller removes the node that computed `old`.
    """
    new.type, new.shape = new.type or old.type, known_shape(new, old)
    if old.is_graph_output():
        new.type, new.shape = old.type or new.type, known_shape(old, new)
        new.name, new.doc_string = old.name, old.doc_string
        new.metadata_props.update(old.metadata_props)
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def replace_node(old: ir.Node, new: ir.Node, count: int | None = None) -> None:
    """Remove `old` and insert `new` in its place. The outputs of `new` get the readers, names, types and shapes.

    When `new` has fewer outputs, or only the first `count` are the same, nothing may read the other outputs of `old`.
    """
    graph = graph_of(old)
    graph.insert_after(old, [new])
    pairs = [*zip(old.outputs, new.outputs[:count], strict=False)]
    names = [result.name for result in old.outputs]
    for result, output in pairs:
        output.type, output.shape = result.type, result.shape
        replace(result, output)
    remove(old)
    for name, (_, output) in zip(names, pairs, strict=False):
        output.name = name


def replace_by_earlier(old: ir.Node, result: ir.Value) -> None:
    """Remove `old`; `result`, from an earlier node, gets the readers, name, type and shape of its first output."""
    output = old.outputs[0]
    result.type, result.shape, name = output.type or result.type, known_shape(output, result), output.name
    replace(output, result)
    remove(old)
    result.name = name


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
    opset = model.opset_imports.get("", 1)
    graphs = [model.graph]
    for graph in graphs:  # the loop appends to the list
        graphs.extend(body for node in graph for body in bodies(node, opset))
    return tuple(graphs)


def computing_nodes(model: ir.Model, *op_types: str) -> tuple[ir.Node, ...]:
    """Return the nodes of the `computing_graphs`; with `op_types`, only nodes of these standard operators."""
    nodes = (node for graph in computing_graphs(model) for node in graph)
    return tuple(node for node in nodes if not op_types or (node.op_type in op_types and not node.domain))


def code_graphs(model: ir.Model) -> tuple[ir.Graph, ...]:
    """Return the `computing_graphs` of a model and of its functions. Functions have no initializers."""
    graphs = [*computing_graphs(model)]
    for function in model.functions.values():
        opset = function.opset_imports.get("", 1)
        own = [function.graph]
        for graph in own:  # the loop appends to the list
            own.extend(body for node in graph for body in bodies(node, opset))
        graphs += own
    return tuple(graphs)


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


def separate_bodies(model: ir.Model) -> dict[str, str]:
    """Make the names of nodes and tensors unique in all bodies, in place: a second ``t`` becomes ``t_2``.

    ONNX allows a node ``conv`` in both branches of an If, but a plan identifies nodes by name.

    Returns:
        The old name of each renamed node.
    """
    taken = {name for value in own_values(model.graph) if (name := value.name)}
    node_names = {node.name for node in model.graph if node.name}
    before = {}
    for graph in model.graphs():
        if graph is model.graph:
            continue
        for value in own_values(graph):
            if value.name in taken:
                value.name = unused_name(taken, value.name)
            elif value.name:
                taken.add(value.name)
        for node in graph:
            old = node_name(node)
            node.name = unused_name(node_names, old)
            if node.name != old:
                before[node.name] = old
    return before


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


def remove_if_unread(node: ir.Node | None) -> bool:
    """Remove a node of a graph if nothing reads its outputs; return whether it is removed."""
    if node is None or node.graph is None or not unread(node):
        return False
    remove(node)
    return True


def remove_unread(nodes: Iterable[ir.Node | None]) -> None:
    """Remove the nodes whose outputs nothing reads, then the nodes that only they read, and so on."""
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        sources = [] if node is None else [value.producer() for value in node.inputs if value is not None]
        if remove_if_unread(node):
            waiting += sources


def names(model: ir.Model) -> set[str]:
    """Return the name of each value and node of the graph and of its bodies."""
    used: set[str] = set()
    for graph in model.graphs():
        values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
        used.update(value.name for value in values if value.name)
        used.update(node.name for node in graph if node.name)
    return used


def unused_name(taken: set[str], stem: str) -> str:
    """Return `stem`, or `stem` with the first suffix ``_2``, ``_3``, ... that is not in `taken`; add it to `taken`."""
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    taken.add(name)
    return name


def add_initializer(graph: ir.Graph, name: str, array: np.ndarray, dtype: ir.DataType | None = None) -> ir.Value:
    """Register `array` as a new initializer of `graph`.

    Args:
        graph: The graph.
        name: The name of the initializer; it must be unused (`unused_name`).
        array: The values; copied only if they are not contiguous.
        dtype: The element type, if it is not the type of the array.
    """
    tensor = ir.Tensor(np.asarray(array, order="C"), dtype=dtype, name=name)
    value = ir.Value(name=name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def add_target(reshape: ir.Node, lengths: Sequence[int], taken: set[str]) -> ir.Value:
    """Register the target of a Reshape, int64, as a new initializer that is named after the node."""
    name = unused_name(taken, f"{node_name(reshape)}/target")
    return add_initializer(graph_of(reshape), name, np.array(lengths, np.int64))


def insert_before(
    place: ir.Node,
    taken: set[str],
    op: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    stem: str,
    domain: str = "",
) -> ir.Value:
    """Insert a node with one output before `place`; return the output, which has the same name as the node.

    Args:
        place: The node in front of which the new node is inserted.
        taken: The names in use, from `names`; the new name is added.
        op: The operator type.
        inputs: The inputs.
        attributes: The attributes, as Python values.
        stem: The name of the node, followed by a number if the name is in use.
        domain: The operator domain.
    """
    name = unused_name(taken, stem)
    node = ir.node(op, inputs, attributes, domain=domain, name=name)
    node.outputs[0].name = name
    graph_of(place).insert_before(place, [node])
    return node.outputs[0]


def derive_initializer(
    graph: ir.Graph,
    name: str,
    source: ir.TensorProtocol,
    compute: Callable[[np.ndarray], np.ndarray],
    shape: Sequence[int],
    dtype: ir.DataType | None = None,
) -> ir.Value:
    """Register ``compute(source)`` as a new initializer of `graph`. For a large source it is computed at each read.

    Args:
        graph: The graph.
        name: The name of the initializer; it must be unused.
        source: The tensor to compute from. Above `LARGE` bytes, the result is not kept in memory.
        compute: The function; its result is stored in the type of the initializer.
        shape: The shape of the result.
        dtype: The type of the initializer; None for the type of `source`.
    """
    kind, lengths = dtype or source.dtype, ir.Shape(shape)

    def tensor() -> ir.TensorProtocol:
        array = compute(source.numpy()).astype(kind.numpy(), copy=False)
        release(source)
        return ir.Tensor(np.asarray(array, order="C"), dtype=kind, name=name)

    derived = ir.LazyTensor(tensor, kind, lengths, name=name) if source.nbytes > LARGE else tensor()
    value = ir.Value(name=name, shape=lengths, type=ir.TensorType(kind), const_value=derived)
    graph.register_initializer(value)
    return value


def drop_unused(graph: ir.Graph, values: Iterable[ir.Value | None]) -> None:
    """Remove the initializers and Constant nodes of `graph` that produce `values` and have no readers left."""
    for value in dict.fromkeys(values):
        if value is None or value.uses() or value.is_graph_output() or value.is_graph_input():
            continue
        node = value.producer()
        if value.is_initializer() and value.graph is graph and value.name is not None:
            del graph.initializers[value.name]
        elif node is not None and node.op_type == "Constant" and node.graph is graph:
            graph.remove(node, safe=True)


def discard(*values: ir.Value | None) -> None:
    """Remove the initializers and Constant nodes that produce `values` and have no readers left, from any graph."""
    for value in dict.fromkeys(values):
        if value is not None and isinstance(value.graph, ir.Graph):
            drop_unused(value.graph, (value,))


def remove(node: ir.Node) -> None:
    """Remove a node whose outputs nothing reads, and the constants that only this node read."""
    graph, inputs = node.graph, tuple(node.inputs)
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"node {node.name!r} is in no graph")
    graph.remove(node, safe=True)
    drop_unused(graph, inputs)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the log of onnx-ir, whose passes write a line about each value that they do not change."""
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)

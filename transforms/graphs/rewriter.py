"""Changes of a graph that transforms share: replace, insert and remove nodes, add initializers, give names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir

from .queries import graph_of, known_shape, node_name, own_values, release, unread

LARGE = 2**20  # bytes; a tensor derived from a larger weight is computed at each read, and not kept in memory


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

"""The moves on a graph that transforms share: read a constant, follow a sole reader, replace, add, remove."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

# The attributes of a Constant node that hold numbers instead of a tensor.
CONSTANT_DTYPES: dict[str, type[np.generic]] = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer that no caller can override or of a Constant node, else None.

    The tensor is the model's own, so it stays lazy until ``.numpy()`` and must not be written to.
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


def sole_reader(value: ir.Value) -> ir.Node | None:
    """Return the one node that reads `value`, or None when it is also a graph output, read twice or in a body."""
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    (use,) = uses
    return use.node if use.node.graph is value.graph else None


def can_replace(old: ir.Value, new: ir.Value) -> bool:
    """Whether `replace` can keep the name of a graph output: `new` must be free to take that name."""
    if not old.is_graph_output():
        return True
    return new.producer() is not None and not new.is_graph_output() and new.graph is old.graph


def replace(old: ir.Value, new: ir.Value) -> None:
    """Make every reader of `old`, in bodies too, read `new`; a graph output keeps its name, type and shape.

    `can_replace` must hold. The node that computed `old` is left to the caller.
    """
    new.type = new.type or old.type
    new.shape = new.shape or old.shape
    if old.is_graph_output():
        new.type, new.shape = old.type or new.type, old.shape or new.shape
        new.name, new.doc_string = old.name, old.doc_string
        new.metadata_props.update(old.metadata_props)
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def take_place(old: ir.Node, new: ir.Node) -> None:
    """Remove `old` and put `new` there: its first output gets the readers, name, type and shape of the old one."""
    graph, result, output = old.graph, old.outputs[0], new.outputs[0]
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"node {old.name!r} is in no graph")
    name = result.name
    output.type, output.shape = result.type, result.shape
    graph.insert_after(old, [new])
    replace(result, output)
    remove(old)
    output.name = name


def unread(node: ir.Node) -> bool:
    """Whether nothing reads what `node` gives."""
    return not any(value.uses() or value.is_graph_output() for value in node.outputs)


def names(model: ir.Model) -> set[str]:
    """Return the name of every value and node of the graph and of the bodies inside it."""
    found: set[str] = set()
    for graph in model.graphs():
        values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
        found.update(value.name for value in values if value.name)
        found.update(node.name for node in graph if node.name)
    return found


def fresh_name(model: ir.Model, stem: str) -> str:
    """Return `stem`, or `stem` with the first ``_2``, ``_3``, ... that no value and no node has."""
    return take(names(model), stem)


def take(taken: set[str], stem: str) -> str:
    """Add `stem`, or `stem` with the first ``_2``, ``_3``, ... that is not there, to `taken`, and return it."""
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    taken.add(name)
    return name


def add_initializer(graph: ir.Graph, name: str, array: np.ndarray, dtype: ir.DataType | None = None) -> ir.Value:
    """Register `array` as a new initializer of `graph`; nothing else may be named `name`.

    Args:
        graph: Where it is added.
        name: Its name, for instance from `fresh_name`.
        array: The values; copied only when they are not contiguous.
        dtype: The element type when the array's own does not say it.
    """
    tensor = ir.Tensor(np.asarray(array, order="C"), dtype=dtype, name=name)
    value = ir.Value(name=name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def drop_unused(graph: ir.Graph, values: Iterable[ir.Value | None]) -> None:
    """Remove those initializers and Constant nodes behind `values` that nothing reads any more."""
    for value in dict.fromkeys(values):
        if value is None or value.uses() or value.is_graph_output() or value.is_graph_input():
            continue
        node = value.producer()
        if value.is_initializer() and value.graph is graph and value.name is not None:
            del graph.initializers[value.name]
        elif node is not None and node.op_type == "Constant" and node.graph is graph:
            graph.remove(node, safe=True)


def remove(node: ir.Node) -> None:
    """Remove a node whose outputs nothing reads, and the constants that it alone read."""
    graph, inputs = node.graph, tuple(node.inputs)
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"node {node.name!r} is in no graph")
    graph.remove(node, safe=True)
    drop_unused(graph, inputs)


def inferred(model: ir.Model) -> Mapping[str, ir.Value]:
    """Return stand-ins for the values of the main graph, by name, with every dtype and shape that onnx can infer.

    `model` itself does not change: a transform that rewrites nothing must leave nothing behind. What cannot be
    inferred, behind a node of an unknown domain for instance, stays unknown.
    """
    copy = model.clone()
    with quiet():
        ShapeInferencePass(check_type=False, strict_mode=False)(copy)
    return ir.convenience.create_value_mapping(copy.graph, include_subgraphs=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what onnx-ir logs about every value that one of its passes leaves alone."""
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)

"""The moves on a graph that transforms share: read a constant, follow a sole reader, replace, add, remove."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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

LARGE = 2**20  # bytes; what is computed from a larger weight is computed when it is read, each time, and never kept


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


def release(tensor: ir.TensorProtocol | None) -> None:
    """Let go of the mapping of the file in which a tensor lies, whose pages count as memory once they were read.

    Arrays of it stay valid: the mapping ends with the last of them, and the next ``.numpy()`` makes a new one.
    """
    if isinstance(tensor, ir.ExternalTensor):
        try:
            tensor.release()
        except BufferError:  # an array is in use; it keeps the mapping, this tensor need not
            tensor.raw = None


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
    """Remove `old` and put `new` there: its outputs get the readers, names, types and shapes of the old one's.

    Outputs that `new` has not are read by nothing.
    """
    graph = graph_of(old)
    graph.insert_after(old, [new])
    names = [result.name for result in old.outputs]
    for result, output in zip(old.outputs, new.outputs, strict=False):
        output.type, output.shape = result.type, result.shape
        replace(result, output)
    remove(old)
    for name, output in zip(names, new.outputs, strict=False):
        output.name = name


def take_over(old: ir.Node, result: ir.Value) -> None:
    """Remove `old`: `result`, of a node before it, gets the readers, name, type and shape of its first output."""
    output = old.outputs[0]
    result.type, result.shape, name = output.type or result.type, output.shape or result.shape, output.name
    replace(output, result)
    remove(old)
    result.name = name


def node_name(node: ir.Node) -> str:
    """Return the name of `node`, or of its first output when it has none."""
    return node.name or str(node.outputs[0].name)


CONTROL_FLOW = {"If": 1, "Loop": 1, "Scan": 9}  # by operator, the opset from which its bodies are what they are now


def bodies(node: ir.Node, opset: int) -> tuple[ir.Graph, ...]:
    """Return the bodies of an If, Loop or Scan.

    Bodies of other operators (``SequenceMap``, a Scan of opset 8, those of other domains) are not looked into.
    """
    if node.domain or opset < CONTROL_FLOW.get(node.op_type, opset + 1):
        return ()
    graphs = [a.as_graph() for a in node.attributes.values() if a.type is ir.AttributeType.GRAPH and not a.is_ref()]
    return tuple(graphs)


def computing_graphs(model: ir.Model) -> tuple[ir.Graph, ...]:
    """Return the main graph and all `bodies` in it, nested ones too."""
    opset = model.opset_imports.get("", 1)
    found = [model.graph]
    for graph in found:  # grows while it is read
        found.extend(body for node in graph for body in bodies(node, opset))
    return tuple(found)


def code_graphs(model: ir.Model) -> tuple[ir.Graph, ...]:
    """Return the `computing_graphs` of a model and those of its functions, which hold no initializers."""
    found = [*computing_graphs(model)]
    for function in model.functions.values():
        opset = function.opset_imports.get("", 1)
        own = [function.graph]
        for graph in own:  # grows while it is read
            own.extend(body for node in graph for body in bodies(node, opset))
        found += own
    return tuple(found)


def every_graph(model: ir.Model) -> tuple[ir.Graph, ...]:
    """Return the main graph, the functions and all bodies in them, those of operators of other domains too."""
    functions = [graph for each in model.functions.values() for graph in (each.graph, *each.subgraphs())]
    return (*model.graphs(), *functions)


def every_node(model: ir.Model) -> tuple[ir.Node, ...]:
    """Return all nodes, in bodies and functions too."""
    return tuple(node for graph in every_graph(model) for node in graph)


def nodes_by_name(model: ir.Model) -> dict[str, ir.Node]:
    """Return the nodes of the graph and of the bodies in it by name; names are unique (`separate_bodies`)."""
    return {node_name(node): node for graph in computing_graphs(model) for node in graph}


def separate_bodies(model: ir.Model) -> dict[str, str]:
    """Rename the nodes and tensors of bodies that share a name with others, in place: ``t`` becomes ``t_2``.

    Two branches of an If may both call a node ``conv``, which is no matter to them, but a plan is made by name.

    Returns:
        The old name of each renamed node.
    """
    taken = {name for value in own_values(model.graph) if (name := value.name)}
    called = {node.name for node in model.graph if node.name}
    before = {}
    for graph in model.graphs():
        if graph is model.graph:
            continue
        for value in own_values(graph):
            if value.name in taken:
                value.name = take(taken, value.name)
            elif value.name:
                taken.add(value.name)
        for node in graph:
            old = node_name(node)
            node.name = take(called, old)
            if node.name != old:
                before[node.name] = old
    return before


def own_values(graph: ir.Graph) -> list[ir.Value]:
    """Return the inputs, initializers and results of a graph, without those of bodies inside it."""
    results = (value for node in graph for value in node.outputs)
    return list(dict.fromkeys([*graph.inputs, *graph.initializers.values(), *results]))


def graph_of(node: ir.Node) -> ir.Graph:
    """Return the graph or body that `node` is in."""
    if not isinstance(node.graph, ir.Graph):
        raise TypeError(f"node {node.name!r} is in no graph")
    return node.graph


def stays_finite(tensor: ir.TensorProtocol, factor: float) -> bool:
    """Whether no number of a float tensor overflows when it is multiplied by `factor`."""
    with np.errstate(over="ignore", invalid="ignore"):
        return abs(factor) <= 1 or bool(np.isfinite(tensor.numpy() * factor).all())


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
    """Insert an operator of one output before `place`; return the output, which has the name of the node.

    Args:
        place: The node before which it runs.
        taken: The names in use, from `names`; the new one is added.
        op: Its type.
        inputs: What it reads.
        attributes: Its attributes, as Python values.
        stem: Its name, if that is free.
        domain: Its domain.
    """
    name = take(taken, stem)
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
) -> ir.Value:
    """Register ``compute(source)`` as a new initializer of `graph`; from a large tensor it is computed when it is read.

    Args:
        graph: Where it is added.
        name: Its name, which nothing else may have.
        source: The tensor that it comes from; of more than `LARGE` bytes, there is no second one in memory.
        compute: What to do with the array; the result is stored in the type of `source`.
        shape: The shape of the result.
    """

    def tensor() -> ir.TensorProtocol:
        array = compute(source.numpy()).astype(source.dtype.numpy(), copy=False)
        return ir.Tensor(np.asarray(array, order="C"), dtype=source.dtype, name=name)

    lengths = ir.Shape(shape)
    made = ir.LazyTensor(tensor, source.dtype, lengths, name=name) if source.nbytes > LARGE else tensor()
    value = ir.Value(name=name, shape=lengths, type=ir.TensorType(source.dtype), const_value=made)
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


def discard(*values: ir.Value | None) -> None:
    """Remove those initializers and Constant nodes behind `values` that nothing reads, from whatever graph has them."""
    for value in dict.fromkeys(values):
        if value is not None and isinstance(value.graph, ir.Graph):
            drop_unused(value.graph, (value,))


def remove(node: ir.Node) -> None:
    """Remove a node whose outputs nothing reads, and the constants that it alone read."""
    graph, inputs = node.graph, tuple(node.inputs)
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"node {node.name!r} is in no graph")
    graph.remove(node, safe=True)
    drop_unused(graph, inputs)


def inferred(model: ir.Model, *, bodies: bool = False) -> Mapping[str, ir.Value]:
    """Return stand-ins for the values of the main graph, by name, with every dtype and shape that onnx can infer.

    With `bodies` also those inside the bodies of control flow, whose names must then be unique (`separate_bodies`).

    `model` itself does not change: a transform that rewrites nothing must leave nothing behind. What cannot be
    inferred, behind a node of an unknown domain for instance, stays unknown.
    """
    copy = model.clone()
    with quiet():
        ShapeInferencePass(check_type=False, strict_mode=False)(copy)
    return ir.convenience.create_value_mapping(copy.graph, include_subgraphs=bodies)


def stand_ins(model: ir.Model) -> Mapping[ir.Value, ir.Value]:
    """Return what `inferred` returns, for the values of bodies too, by value instead of by name."""
    copy = model.clone()
    with quiet():
        ShapeInferencePass(check_type=False, strict_mode=False)(copy)
    graphs = zip(model.graphs(), copy.graphs(), strict=True)
    pairs = (zip(own_values(graph), own_values(other), strict=True) for graph, other in graphs)
    return {value: stand_in for pair in pairs for value, stand_in in pair}


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

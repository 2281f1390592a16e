"""Remove nodes and initializers that no output needs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from .. import UnknownNameError
from ..system.numbers import whole_number
from .graphs.inference import inferred
from .graphs.queries import computing_graphs, known_shape, unread
from .graphs.rewriter import names, unused_name
from .registry import Change, TransformError, transform


@transform("strip_unused_nodes", changes_io=True)
def strip_unused_nodes(
    model: ir.Model, *, inputs: tuple[str, ...] = (), outputs: tuple[str, ...] = (), type: str = "", shape: str = ""
) -> Change:
    """Keep only the nodes between inputs and outputs; any tensor may become an input or an output.

    Before:  t = Relu(x); y = Conv(t, W); z = Sin(x)
    After:   y = Conv(t, W), with input t and output y, for (inputs=t, outputs=y)
        Unread weights are removed too, and so are nodes in bodies that the outputs of the body do not need.
    Left alone: the graph's own inputs, read or not, if no inputs are named; the inputs and outputs of bodies;
        functions.

    Options:
        inputs: The new inputs of the graph, in order. An inner tensor becomes an input of its type and shape. Default:
            the graph's own inputs.
        outputs: The new outputs of the graph, in order. Default: the graph's own outputs.
        type: The onnx name of the type of new inputs whose type cannot be inferred: ``float``, ``int64``.
        shape: The shape of these inputs, lengths and names separated by commas: ``"N,299,299,3"``; empty for a scalar.

    Raises:
        UnknownNameError: The graph has no tensor of a given name, or onnx has no such type.
        TransformError: The type of a new input or output is not known, an output cannot be computed from the inputs,
            or a tensor is both an input and an output.
    """
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    for name in (*inputs, *outputs):
        if name not in values:
            raise UnknownNameError("tensor", name, values)
    inputs, outputs = tuple(dict.fromkeys(inputs)), tuple(dict.fromkeys(outputs))
    both = sorted({*inputs} & {*outputs})
    if both:
        raise TransformError(f"tensor {both[0]!r} is named as input and as output; name it only once")
    change = Change()
    current = [value.name for value in model.graph.inputs], [value.name for value in model.graph.outputs]
    requested = list(inputs) or current[0], list(outputs) or current[1]
    if requested != current:
        types = inferred(model)
        change.applied += len({*requested[0]} ^ {*current[0]}) + len({*requested[1]} ^ {*current[1]}) or 1
        if requested[1] != current[1]:
            _set_outputs(model.graph, [values[name] for name in outputs], types)
        if requested[0] != current[0]:
            _set_inputs(model, inputs, {**_declared(values, inputs, type, shape), **_known(types)})
    change.applied += sum(map(_remove_unused, reversed(computing_graphs(model))))
    if inputs:
        _check_reachable(model.graph)
    return change


def _known(types: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
    """Return the stand-ins whose type is known."""
    return {name: value for name, value in types.items() if value.type is not None}


def _declared(values: Mapping[str, ir.Value], inputs: tuple[str, ...], kind: str, shape: str) -> dict[str, ir.Value]:
    """Return stand-ins with the type and shape of the options for new inputs of unknown type."""
    if not kind:
        return {}
    known = {dtype.name.lower(): dtype for dtype in ir.DataType}
    if kind.lower() not in known:
        raise UnknownNameError("type", kind, known)
    parts = [part for part in shape.replace(" ", "").split(",") if part]
    lengths = [part if (length := whole_number(part)) is None else length for part in parts]
    tensor_type, sizes = ir.TensorType(known[kind.lower()]), ir.Shape(lengths)
    return {name: ir.Value(name=name, type=tensor_type, shape=sizes) for name in inputs if values[name].type is None}


def _typed(name: str, value: ir.Value, types: Mapping[str, ir.Value]) -> ir.Value:
    """Return the inferred stand-in of a value that becomes an input or output."""
    known = types.get(name, value)
    if known.type is None:
        raise TransformError(
            f"the type of tensor {name!r} is not known, so it cannot be an input or output of the graph; "
            "add its type to the model's value_info, or name a tensor before any operator of an unknown domain"
        )
    return known


def _set_outputs(graph: ir.Graph, outputs: list[ir.Value], types: Mapping[str, ir.Value]) -> None:
    """Make `outputs` the outputs of the graph, with their types."""
    for value in outputs:
        known = _typed(value.name or "", value, types)
        value.type, value.shape = value.type or known.type, known_shape(value, known)
    graph.outputs.clear()
    graph.outputs.extend(outputs)


def _set_inputs(model: ir.Model, inputs: tuple[str, ...], types: Mapping[str, ir.Value]) -> None:
    """Make tensors of the graph its inputs: readers of a tensor now read the input."""
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    kept = []
    for name in inputs:
        value = values[name]
        if not value.is_graph_input():
            if value.is_graph_output():
                raise TransformError(f"tensor {name!r} is an output of the graph; name other outputs to cut there")
            known = _typed(name, value, types)
            new = ir.Value(name=name, type=known.type, shape=known.shape, doc_string=value.doc_string)
            value.replace_all_uses_with(new)
            if value.is_initializer():
                del graph.initializers[name]
            else:  # its node stays if another of its outputs is read
                value.name = unused_name(names(model), f"{name}_cut")
            value = new
        kept.append(value)
    graph.inputs.clear()
    graph.inputs.extend(kept)


def _remove_unused(graph: ir.Graph) -> int:
    """Remove nodes and initializers that no output needs; return their number.

    onnx-ir's `RemoveUnusedNodesPass` also drops default attributes and optional outputs, and does not count them.
    """
    unused = 0
    for node in reversed(graph):
        if unread(node):
            graph.remove(node, safe=True)
            unused += 1
    for name, value in tuple(graph.initializers.items()):
        if not (value.uses() or value.is_graph_output() or value.is_graph_input()):
            del graph.initializers[name]
            unused += 1
    return unused


def _check_reachable(graph: ir.Graph) -> None:
    """Check that the outputs can be computed from the inputs.

    Raises:
        TransformError: A needed input is missing.
    """
    read = [value for node in ir.traversal.RecursiveGraphIterator(graph) for value in node.inputs]
    for value in [*read, *graph.outputs]:
        if value is None or value.producer() is not None or value.is_graph_input() or value.is_initializer():
            continue
        kept = ", ".join(str(known.name) for known in graph.inputs)
        raise TransformError(f"the outputs also need the input {value.name!r}, which is not one of the inputs {kept}")

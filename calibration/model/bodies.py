"""Reduce tensors inside the bodies of If, Loop and Scan to scalars, and make the scalars outputs of the model.

A tensor is reduced to a row of four scalars in its own graph. Each node around this graph carries the row one graph
further out: an If with more outputs of both branches, a Loop or a Scan with more scan outputs, which are reduced again
in the outer graph. If a branch is not taken or a loop does not run, the row is that of a tensor without values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ... import RequantError, UnknownNameError

if TYPE_CHECKING:
    import onnx_ir as ir

Row: TypeAlias = "tuple[ir.Value, ...]"
"""The min, max, sum of x - x, and size of a tensor x, as float64 scalars; float64 represents all four exactly."""

PARTS = (("ReduceMin", math.inf), ("ReduceMax", -math.inf), ("ReduceSum", 0.0), ("ReduceSum", 0.0))
"""For each part of a row: the operator that merges rows, and its result for no values, as in the runtime."""
CARRIERS = ("If", "Loop", "Scan")
FLOATS = ("FLOAT", "FLOAT16", "DOUBLE")


def tensors_of(graph: ir.Graph) -> dict[str, ir.Value]:
    """Return the tensors of one graph by name, without the tensors in the bodies of its nodes."""
    produced = (value for node in graph for value in node.outputs)
    return {value.name: value for value in (*graph.inputs, *graph.initializers.values(), *produced) if value.name}


def tensors_in_bodies(graph: ir.Graph, names: Iterable[str]) -> dict[str, ir.Value]:
    """Return the named tensors that are in bodies; tensors of the main graph are left out.

    Raises:
        UnknownNameError: Neither the main graph nor a body has a tensor with that name.
        RequantError: Tensors of several graphs have the same name, or a tensor in a body is not float.
    """
    outer = tensors_of(graph)
    homes = {name: [value] for name, value in outer.items()}
    for body in graph.subgraphs():
        for name, value in tensors_of(body).items():
            homes.setdefault(name, []).append(value)
    inner = {}
    for name in dict.fromkeys(names):
        if name not in homes:
            raise UnknownNameError("tensor", name, homes)
        value, *others = homes[name]
        if others:
            raise RequantError(f"{1 + len(others)} graphs of the model have a tensor {name!r}; give each its own name")
        if name in outer:
            continue
        if value.dtype is not None and value.dtype.name not in FLOATS:
            kind = f"tensor({value.dtype.name.lower()})"
            raise RequantError(f"tensor {name!r} is a {kind}; only float, float16 and double can be observed")
        inner[name] = value
    return inner


def free_prefix(graph: ir.Graph, prefix: str) -> str:
    """Append underscores to a prefix until no tensor's name in the main graph or a body begins with it."""
    names = [name for scope in (graph, *graph.subgraphs()) for name in tensors_of(scope)]
    while any(name.startswith(prefix) for name in names):
        prefix += "_"
    return prefix


def carry_out(model: ir.Model, tensors: Mapping[str, ir.Value], prefix: str) -> dict[str, tuple[str, ...]]:
    """Make the rows of tensors in bodies outputs of a model, in place.

    The runtime's min and max ignore NaN. The sum of x - x is 0 if all values are finite, and NaN otherwise; the sum of
    x could overflow.

    Args:
        model: The model.
        tensors: The tensors, from `find`.
        prefix: The prefix of the names of all new values; no existing name begins with it.

    Returns:
        The names of the four outputs of each tensor: min, max, sum of x - x, size.

    Raises:
        RequantError: A tensor is in a body of a node that is not an If, Loop or Scan, or of a Scan with sequence
            lengths.
    """
    rows = _inner_rows(model.graph, tensors, (f"{prefix}{index}" for index in count()))
    model.graph.outputs.extend(part for row in rows.values() for part in row)
    return {name: tuple(part.name or "" for part in row) for name, row in rows.items()}


def _inner_rows(graph: ir.Graph, tensors: Mapping[str, ir.Value], names: Iterator[str]) -> dict[str, Row]:
    """Return the rows of the tensors in the bodies of a graph's nodes, as values of that graph."""
    rows: dict[str, Row] = {}
    for node in tuple(graph):
        inner = []
        for body in bodies_of(node):
            own = {name: value for name, value in tensors_of(body).items() if tensors.get(name) is value}
            deeper = _inner_rows(body, tensors, names)
            inner.append((body, {name: _row(body, value, names) for name, value in own.items()} | deeper))
        if any(carried for _, carried in inner):
            rows |= _lifted(graph, node, inner, names)
    return rows


def bodies_of(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs in a node's attributes."""
    return [body for attribute in node.attributes.values() for body in graphs_in(attribute)]


def graphs_in(attribute: ir.Attr) -> list[ir.Graph]:
    """Return the graphs in an attribute."""
    import onnx_ir as ir

    values = attribute.value if isinstance(attribute.value, (list, tuple)) else [attribute.value]
    return [value for value in values if isinstance(value, ir.Graph)]


def _row(graph: ir.Graph, value: ir.Value, names: Iterator[str]) -> Row:
    """Reduce a tensor in its own graph, with operators that are the same in every opset."""
    import onnx_ir as ir

    if value.dtype is None:  # a Sum of one tensor copies it, and the runtime refuses a tensor that is not float
        value = _append(graph, "Sum", [value], names)
    difference = _append(graph, "Sub", [value, value], names)
    reduced = (("ReduceMin", value), ("ReduceMax", value), ("ReduceSum", difference))
    parts = [_append(graph, op, [of], names, keepdims=0) for op, of in reduced]
    parts.append(_append(graph, "Size", [value], names))
    return tuple(_append(graph, "Cast", [part], names, to=ir.DataType.DOUBLE) for part in parts)


def _lifted(
    graph: ir.Graph, node: ir.Node, inner: Sequence[tuple[ir.Graph, Mapping[str, Row]]], names: Iterator[str]
) -> dict[str, Row]:
    """Carry the rows in the bodies of a node out to the graph of the node."""
    import onnx_ir as ir

    tensors = [name for _, rows in inner for name in rows]
    _check_carrier(node, tensors[0])
    for body, rows in inner:
        for name in tensors:
            body.outputs.extend(rows[name] if name in rows else _row_of_nothing(body, names))
    before, width = len(node.outputs), len(PARTS)
    node.resize_outputs(before + len(tensors) * width)
    added = node.outputs[before:]
    for part in added:
        part.name = next(names)
    carried = {name: tuple(added[index * width : (index + 1) * width]) for index, name in enumerate(tensors)}
    if node.op_type == "If":
        return carried
    for option in ("scan_output_axes", "scan_output_directions"):  # if present, they have an entry per scan output
        if option in node.attributes:
            node.attributes[option] = ir.AttrInt64s(option, [*node.attributes[option].as_ints(), *(0 for _ in added)])
    return {
        name: tuple(_append(graph, op, [part], names, keepdims=0) for (op, _), part in zip(PARTS, row, strict=True))
        for name, row in carried.items()
    }


def _check_carrier(node: ir.Node, tensor: str) -> None:
    """Refuse a node that cannot carry rows out of its bodies."""
    where = f"tensor {tensor!r} is in a body of the {node.op_type} node {node.name or ''!r}"
    if node.domain or node.op_type not in CARRIERS:
        raise RequantError(f"{where}; only bodies of If, Loop and Scan can be observed")
    # Only the Scan of opset 8 has one input more than its body: lengths, after which its outputs are zeros.
    lengths = node.op_type == "Scan" and len(node.inputs) > len(node.attributes.get_graph("body").inputs)
    if lengths and node.inputs[0] is not None:
        raise RequantError(f"{where}, which has sequence lengths; only a Scan without them can be observed")


def _row_of_nothing(graph: ir.Graph, names: Iterator[str]) -> Row:
    """Return the row of a tensor without values."""
    import onnx_ir as ir

    doubles = [ir.tensor(np.array(nothing, np.float64)) for _, nothing in PARTS]
    return tuple(_append(graph, "Constant", [], names, value=double) for double in doubles)


def _append(graph: ir.Graph, op: str, inputs: Sequence[ir.Value], names: Iterator[str], **attributes: Any) -> ir.Value:
    """Append a node to a graph and return its output."""
    import onnx_ir as ir

    name = next(names)
    node = ir.node(op, inputs, attributes, name=name)
    node.outputs[0].name = name
    graph.append(node)
    return node.outputs[0]

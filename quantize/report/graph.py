"""Describe the graph of a model for a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from ...system.printable import number_of
from ...transforms.graphs.inference import inferred
from ...transforms.graphs.queries import constant, node_name
from .record import Graph, Node

LONGEST = 120
"""The greatest number of characters of an attribute in a report."""


def graph_of(model: ir.Model) -> Graph:
    """Describe the graph of a model with its bodies; nodes with a repeated name get a number."""
    shapes = _shapes(model)
    main = model.graph
    nodes = [_node(node, "") for node in main if not _is_constant(node)]
    for owner in main:
        nodes += [_node(inner, node_name(owner)) for inner in _inside(owner) if not _is_constant(inner)]
    nodes = _apart(nodes)
    read = {name for node in nodes for name in (*node.inputs, *node.outputs)}
    inputs = [str(value.name) for value in main.inputs if value.name not in main.initializers]
    outputs = [str(value.name) for value in main.outputs]
    return Graph(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        nodes=tuple(nodes),
        values={name: text for name, text in shapes.items() if name in read or name in inputs},
        facts=_facts(model),
    )


def _facts(model: ir.Model) -> dict[str, str]:
    """Return the properties of the file."""
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in model.opset_imports.items())
    sizes = [held.const_value for graph in model.graphs() for held in graph.initializers.values() if held.const_value]
    facts = {
        "IR version": str(model.ir_version),
        "opset": opsets,
        "producer": f"{model.producer_name or ''} {model.producer_version or ''}".strip(),
        "parameters": f"{sum(each.size for each in sizes):,}",
        "weights": f"{sum(each.nbytes for each in sizes):,} bytes",
    }
    return {name: text for name, text in facts.items() if text}


def _inside(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the nodes of the bodies in a node, at any depth."""
    for body in _bodies(node):
        for inner in body:
            yield inner
            yield from _inside(inner)


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the bodies in a node."""
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.value
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from attribute.value


def _node(node: ir.Node, body: str) -> Node:
    """Describe a node."""
    held = {str(value.name): tensor for value in node.inputs if value is not None and (tensor := constant(value))}
    inner = list(_inside(node))
    made = {value for each in inner for value in each.outputs} | {v for b in _bodies(node) for v in b.inputs}
    captured = [v for each in inner for v in each.inputs if v is not None and v not in made and constant(v) is None]
    # the outputs of the bodies are the outputs of the node
    results = [value for each in _bodies(node) for value in each.outputs]
    read = [value for value in node.inputs if value is not None and value.name not in held]
    return Node(
        name=node_name(node),
        op=node.op_type,
        domain=node.domain,
        inputs=tuple(dict.fromkeys(str(value.name) for value in (*read, *captured, *results) if value.name)),
        outputs=tuple(str(value.name) for value in node.outputs if value.name),
        attributes={name: _text(attribute) for name, attribute in node.attributes.items()},
        constants={name: type_text(tensor.dtype, tensor.shape) for name, tensor in held.items()},
        parameters=sum(tensor.size for tensor in held.values()),
        bytes=sum(tensor.nbytes for tensor in held.values()),
        body=body,
    )


def _is_constant(node: ir.Node) -> bool:
    """Return whether a node is a constant, which is shown as an input of its readers and not as a node."""
    return bool(node.outputs) and constant(node.outputs[0]) is not None


def _apart(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes with unique names."""
    seen: Counter[str] = Counter()
    found = []
    for node in nodes:
        seen[node.name] += 1
        number = seen[node.name]
        found.append(node if number == 1 else replace(node, name=f"{node.name} ({number})"))
    return found


def _text(attribute: ir.Attr) -> str:
    """Return an attribute as text."""
    if attribute.type is ir.AttributeType.GRAPH:
        return f"a body of {number_of(len(list(attribute.value)), 'node')}"
    if attribute.type is ir.AttributeType.GRAPHS:
        return f"{len(attribute.value)} bodies"
    if attribute.type is ir.AttributeType.TENSOR:
        return type_text(attribute.value.dtype, attribute.value.shape)
    value = attribute.value
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _shapes(model: ir.Model) -> dict[str, str]:
    """Return the type and the shape of each tensor that has a known type or shape."""
    known: dict[str, str] = {}
    values: Iterable[ir.Value] = (
        value for graph in model.graphs() for value in (*graph.inputs, *(o for node in graph for o in node.outputs))
    )
    found: Mapping[str, ir.Value] = {}
    # onnx fails on unknown operators and on models above 2 GB: they are shown without inferred shapes
    with suppress(Exception):
        found = inferred(model)
    for value in values:
        name = str(value.name)
        told = value if value.shape is not None and value.dtype is not None else found.get(name, value)
        if told.dtype is not None or told.shape is not None:
            known[name] = type_text(told.dtype, told.shape)
    return known


def type_text(dtype: ir.DataType | None, shape: Any) -> str:
    """Return ``float32 (N, 3, 224, 224)``."""
    name = "?" if dtype is None else {"FLOAT": "float32", "DOUBLE": "float64"}.get(dtype.name, dtype.name.lower())
    if shape is None:
        return name
    axes = [str((axis.value or "?") if isinstance(axis, ir.SymbolicDim) else axis) for axis in shape]
    return f"{name} ({', '.join(axes)}{',' if len(axes) == 1 else ''})"

"""Add the results of some nodes to the outputs of a model, for a log."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir

from ..system.log_records import MARK
from ..system.values import decode_json
from .graphs.queries import node_name
from .graphs.rewriter import add_initializer, names, unused_name
from .registry import Change, TransformError, transform

FIRST_N, SUMMARIZE = "requant.log_first_n", "requant.log_summarize"


@transform("insert_logging", after=("quantize_nodes",), changes_io=True)
def insert_logging(
    model: ir.Model,
    *,
    op: tuple[str, ...] = (),
    prefix: tuple[str, ...] = (),
    show_op: bool = False,
    show_name: bool = False,
    message: str = "",
    first_n: int = -1,
    summarize: int = 1024,
) -> Change:
    """Add the results of some nodes as further graph outputs. The name of each output is the start of its log line.

    Before:  lo, hi = RequantizationRange(acc, ...)
    After:   the same, and a graph output named ``;<node>__print__;__requant_min_max:`` with the values [lo, hi]
    A line of the log is the output's name followed by ``[value]`` for each value. ``requant calibrate`` writes such a
    log; any other program can do the same.
    Left alone: nodes that do not match `op` and `prefix`; nodes whose results have no readers (``unread``); nodes that
    are logged already (``logged``).

    Options:
        op: Operator types to log; empty for all.
        prefix: Prefixes of the names of nodes to log; empty for all.
        show_op: Begin the line with ``;<op>;``.
        show_name: Put ``;<node>__print__;`` into the line.
        message: The text in front of the values.
        first_n: The maximum number of lines for an output; -1 for no limit.
        summarize: The maximum number of values in a line.

    Raises:
        TransformError: Two nodes have the same line, or the metadata are damaged.
    """
    change = Change()
    taken = names(model)
    present = {str(output.name) for output in model.graph.outputs}
    limits = {key: _limits(model, key) for key in (FIRST_N, SUMMARIZE)}
    for node in list(model.graph):
        name = node_name(node)
        if (op and node.op_type not in op) or (prefix and not name.startswith(prefix)) or MARK in name:
            continue
        line = (f";{node.op_type};" if show_op else "") + (f";{name}{MARK};" if show_name else "") + message
        if line in present and _logged(model, line, name):
            change.skip("logged")
        elif not any(value.uses() for value in node.outputs):
            change.skip("unread")
        elif line in present or not line:
            raise TransformError(f"more than one node would write the line {line!r}; set show_name=true")
        else:
            _log(model.graph, node, (name, line), taken)
            present.add(line)
            limits[FIRST_N][line], limits[SUMMARIZE][line] = first_n, summarize
            change.applied += 1
    if change.applied:
        model.metadata_props.update({key: json.dumps(value) for key, value in limits.items()})
    return change


def _limits(model: ir.Model, key: str) -> dict[str, int]:
    """Return the limits in the metadata of a model with logged outputs; none if it has no logged output.

    Raises:
        TransformError: The entry is not what this transform writes.
    """
    try:
        limits = decode_json(model.metadata_props.get(key, "{}"))
    except ValueError as error:
        raise TransformError(f"the model's metadata {key!r} is damaged: {error}") from error
    if not isinstance(limits, dict) or not all(type(limit) is int for limit in limits.values()):
        raise TransformError(f"the model's metadata {key!r} is damaged: an object of whole numbers is expected")
    return limits


def _logged(model: ir.Model, line: str, name: str) -> bool:
    """Whether the output named `line` logs the node named `name`."""
    output = next(value for value in model.graph.outputs if value.name == line)
    producer = output.producer()
    return producer is not None and producer.name == name + MARK


def _log(graph: ir.Graph, node: ir.Node, named: tuple[str, str], taken: set[str]) -> None:
    """Join the outputs of `node` in one float vector and make the vector a graph output.

    Args:
        graph: The graph.
        node: The node.
        named: The name of the node in the log, and the name of the output.
        taken: The names in the model; new ones are added.
    """
    (name, line), key = named, "requant/any_length"
    flat = graph.initializers.get(key)
    if flat is None:
        flat = add_initializer(graph, key, np.array([-1]))
    vectors: list[ir.Value] = []
    nodes: list[ir.Node] = []
    for index, value in enumerate(v for v in node.outputs if v.uses() or v.is_graph_output()):
        cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)}, name=f"{name}{MARK}/cast_{index}")
        reshape = ir.node("Reshape", [cast.outputs[0], flat], name=f"{name}{MARK}/flat_{index}")
        for part in (cast, reshape):
            part.outputs[0].name = unused_name(taken, str(part.name))
        nodes += [cast, reshape]
        vectors.append(reshape.outputs[0])
    collect = ir.node("Concat", vectors, {"axis": 0}, name=name + MARK)
    output = collect.outputs[0]
    output.name, output.type, output.shape = line, ir.TensorType(ir.DataType.FLOAT), ir.Shape([None])
    graph.insert_after(node, [*nodes, collect])
    graph.outputs.append(output)

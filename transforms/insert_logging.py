"""Let a model tell what passes through some of its nodes."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir

from .graph import add_initializer, fresh_name, node_name
from .registry import Change, TransformError, transform

MARK = "__print__"
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
    """Give the results of some nodes to the caller as further outputs, each named as the log line it starts.

    Before:  lo, hi = RequantizationRange(acc, ...)
    After:   the same, and a graph output named ``;<node>__print__;__requant_min_max:`` with the values [lo, hi]
    A line of the log is the output's name followed by ``[value]`` for each value: ``requant calibrate`` writes it, and
    so can any program.
    Left alone: nodes of another operator or whose name starts otherwise (both must hold where both are given), nodes
    whose results nobody reads (``unread``), nodes that are logged already (``logged``).

    Options:
        op: Operator types to log; all where none is given.
        prefix: How the names of the nodes to log start.
        show_op: Begin the line with ``;<op>;``.
        show_name: Put ``;<node>__print__;`` into the line.
        message: What stands in front of the values.
        first_n: How many lines of an output are written at most; -1 for all.
        summarize: How many values a line has at most.

    Raises:
        TransformError: Two nodes would write the same line.
    """
    change = Change()
    present = {str(output.name) for output in model.graph.outputs}
    limits = {key: json.loads(model.metadata_props.get(key, "{}")) for key in (FIRST_N, SUMMARIZE)}
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
            _log(model, node, name, line)
            present.add(line)
            limits[FIRST_N][line], limits[SUMMARIZE][line] = first_n, summarize
            change.applied += 1
    if change.applied:
        model.metadata_props.update({key: json.dumps(value) for key, value in limits.items()})
    return change


def _logged(model: ir.Model, line: str, name: str) -> bool:
    """Whether the output called `line` comes from the Print of the node called `name`."""
    output = next(value for value in model.graph.outputs if value.name == line)
    producer = output.producer()
    return producer is not None and producer.name == name + MARK


def _log(model: ir.Model, node: ir.Node, name: str, line: str) -> None:
    """Collect the outputs of `node` in one float vector and make it a graph output."""
    key = "requant/any_length"
    flat = model.graph.initializers.get(key)
    if flat is None:
        flat = add_initializer(model.graph, key, np.array([-1]))
    vectors: list[ir.Value] = []
    made: list[ir.Node] = []
    for index, value in enumerate(v for v in node.outputs if v.uses() or v.is_graph_output()):
        cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)}, name=f"{name}{MARK}/cast_{index}")
        reshape = ir.node("Reshape", [cast.outputs[0], flat], name=f"{name}{MARK}/flat_{index}")
        for part in (cast, reshape):
            part.outputs[0].name = fresh_name(model, str(part.name))
        made += [cast, reshape]
        vectors.append(reshape.outputs[0])
    collect = ir.node("Concat", vectors, {"axis": 0}, name=name + MARK)
    output = collect.outputs[0]
    output.name, output.type, output.shape = line, ir.TensorType(ir.DataType.FLOAT), ir.Shape([None])
    model.graph.insert_after(node, [*made, collect])
    model.graph.outputs.append(output)

"""Splice nodes of given operator types out of a graph."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from .graph import can_replace, code_graphs, constant, remove, replace, stand_ins
from .registry import Change, transform

# Operators whose output is always their first input, once `is_training` is ruled out.
COPIES = frozenset({"Identity", "Dropout"})


@transform("remove_nodes")
def remove_nodes(model: ir.Model, *, op: tuple[str, ...], max_inputs: int = 1) -> Change:
    """Remove the nodes of the given operator types: readers get their first input.

    Before:  t = Identity(x); y = Relu(t)
    After:   y = Relu(x), for (op=Identity)
    Left alone: a node whose input and output are not known to be of one type and shape (Identity and Dropout always
        are); one with more than `max_inputs` inputs which are no constants, or with another output in use; Dropout
        in training mode; a node between a graph input, an initializer or another graph output, and a graph output,
        because both names must stay, of a body or a function too.

    Options:
        op: The operator types to remove, for instance Identity, Dropout or Cast. Removing an operator that computes
            something is the caller's wish, and changes the outputs.
        max_inputs: How many of a node's inputs may be computed; all but the first are lost.
    """
    change = Change()
    types = stand_ins(model)
    for node in [node for graph in code_graphs(model) for node in graph]:
        if node.op_type not in op:
            continue
        reason = _why_not(model, node, types, max_inputs)
        if reason is not None:
            change.skip(reason)
            continue
        source = node.inputs[0]
        if source is not None:
            replace(node.outputs[0], source)
        remove(node)
        change.applied += 1
    return change


def _why_not(model: ir.Model, node: ir.Node, types: Mapping[ir.Value, ir.Value], max_inputs: int) -> str | None:
    """Return the reason why a node cannot be spliced out, or None when it can."""
    if not node.inputs or node.inputs[0] is None:
        return "no-input"
    if 1 + sum(value is not None and constant(value) is None for value in node.inputs[1:]) > max_inputs:
        return "several-inputs"
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return "other-output-used"
    if node.op_type == "Dropout" and is_training(model, node):
        return "training-mode"
    if not (node.op_type in COPIES and node.domain == "") and not _same_type(node.inputs[0], node.outputs[0], types):
        return "type-or-shape-differs"
    if not can_replace(node.outputs[0], node.inputs[0]):
        return "graph-output"
    return None


def is_training(model: ir.Model, node: ir.Node) -> bool:
    """Whether a Dropout may drop something: by its third input from opset 12 on, by ``is_test`` before opset 7."""
    if model.opset_imports.get("", 0) < 7:
        return node.attributes.get_int("is_test", 0) == 0
    mode = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    return mode is not None and bool(mode.numpy())


def _same_type(source: ir.Value, target: ir.Value, types: Mapping[ir.Value, ir.Value]) -> bool:
    """Whether two values are known to be of one type and shape; a length without a name is not known."""
    before, after = types.get(source, source), types.get(target, target)
    if before.type is None or before.type != after.type or before.shape is None or before.shape != after.shape:
        return False
    return not any(isinstance(length, ir.SymbolicDim) and length.value is None for length in before.shape)

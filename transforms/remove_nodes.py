"""Remove nodes of given operator types."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from .graphs.inference import stand_ins
from .graphs.queries import code_graphs, constant, unread
from .graphs.rewriter import can_replace, remove, replace
from .registry import Change, transform

# Operators whose output equals their first input, outside of training (`is_training`).
COPIES = frozenset({"Identity", "Dropout"})


@transform("remove_nodes")
def remove_nodes(model: ir.Model, *, op: tuple[str, ...], max_inputs: int = 1) -> Change:
    """Remove the nodes of the given operator types: their readers read the first input instead.

    Before:  t = Identity(x); y = Relu(t)
    After:   y = Relu(x), for (op=Identity)
    Left alone: a node, except Identity and Dropout, whose input and output are not known to have the same type and
        shape; a node with more than `max_inputs` computed inputs, or with another output in use; Dropout in training
        mode; a node between an input, an initializer or another output of a graph, body or function and an output of
        it, because both names must stay.

    Options:
        op: The operator types to remove, for example Identity, Dropout or Cast. Removing an operator that computes
            something changes the outputs.
        max_inputs: The largest number of computed inputs of a node; all inputs but the first are dropped.
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
    """Return the skip code if a node cannot be removed, else None."""
    if not node.inputs or node.inputs[0] is None:
        return "no-input"
    if 1 + sum(value is not None and constant(value) is None for value in node.inputs[1:]) > max_inputs:
        return "several-inputs"
    if not unread(node, 1):
        return "other-output-used"
    if node.op_type == "Dropout" and is_training(model, node):
        return "training-mode"
    if not (node.op_type in COPIES and node.domain == "") and not _same_type(node.inputs[0], node.outputs[0], types):
        return "type-or-shape-differs"
    if not can_replace(node.outputs[0], node.inputs[0]):
        return "graph-output"
    return None


def is_training(model: ir.Model, node: ir.Node) -> bool:
    """Whether a Dropout is in training mode: by its third input from opset 12 on, by ``is_test`` before opset 7."""
    if model.opset_imports.get("", 0) < 7:
        return node.attributes.get_int("is_test", 0) == 0
    mode = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    return mode is not None and bool(mode.numpy())


def _same_type(source: ir.Value, target: ir.Value, types: Mapping[ir.Value, ir.Value]) -> bool:
    """Whether two values are known to have the same type and shape; a length without a name is not known."""
    before, after = types.get(source, source), types.get(target, target)
    if before.type is None or before.type != after.type or before.shape is None or before.shape != after.shape:
        return False
    return not any(isinstance(length, ir.SymbolicDim) and length.value is None for length in before.shape)

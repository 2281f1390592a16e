"""Merge reshapes and make their targets constant."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from .graph import (
    add_initializer,
    can_replace,
    computing_nodes,
    constant,
    discard,
    graph_of,
    names,
    node_name,
    remove,
    replace,
    sole_reader,
    take,
    take_place,
)
from .inference import stand_ins
from .registry import Change, transform

RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
SHAPE_IS_INPUT = 5  # the opset from which the target of a Reshape is an input


@transform("simplify_reshapes", after=("fold_constants",))
def simplify_reshapes(model: ir.Model) -> Change:
    """Merge consecutive reshapes, and give a Reshape with one computed length a constant target.

    Before:  y = Reshape(x, Concat(Gather(Shape(x), 0), [8, 64]));  z = Squeeze(Unsqueeze(Reshape(x, s), a), b)
    After:   y = Reshape(x, [-1, 8, 64]);                           z = Reshape(x, [-1, 8]), z (N, 8)
        An Unsqueeze and a Squeeze of the same axes are both removed. Exporters write computed targets if the batch size
        is dynamic; shape inference then fails. `strip_unused_nodes` removes the nodes that computed the target.
    Left alone: a tensor between two reshapes that other nodes read (``read-between``); results with more than one
        unknown length (``shape-unknown``) or with a length of 0 (``empty``); opsets below 5.
    """
    change = Change()
    if model.opset_imports.get("", 0) < SHAPE_IS_INPUT:
        return change
    taken = names(model)
    progress = True
    while progress:
        progress = False
        change.skipped.clear()
        known = stand_ins(model)
        for node in computing_nodes(model, *RESHAPES):
            if node.graph is not None:  # an earlier merge removes nodes
                progress |= _fix_target(node, taken, change)
                progress |= _merge(node, known, taken, change)
    return change


def _fix_target(node: ir.Node, taken: set[str], change: Change) -> bool:
    """Replace a target made of constants and one computed length by a constant; return whether it changed."""
    target = node.inputs[1] if node.op_type == "Reshape" and len(node.inputs) > 1 else None
    concat = target.producer() if target is not None else None
    if concat is None or concat.op_type != "Concat" or concat.domain or node.attributes.get_int("allowzero", 0) != 0:
        return False
    parts = [_part(value) for value in concat.inputs]
    lengths = [length for part in parts for length in ([-1] if part is None else part)]
    if parts.count(None) != 1 or lengths.count(-1) != 1:
        return False
    (unknown,) = (value for value, part in zip(concat.inputs, parts, strict=True) if part is None)
    if not _is_one_length(unknown):
        return False
    if 0 in lengths:
        change.skip("empty")
        return False
    node.replace_input_with(1, _target(node, lengths, taken))
    discard(target)
    change.applied += 1
    return True


def _part(value: ir.Value | None) -> list[int] | None:
    """Return the lengths in a constant part of a target; None for a computed part."""
    tensor = constant(value)
    return None if tensor is None else [int(length) for length in tensor.numpy().reshape(-1)]


def _is_one_length(value: ir.Value | None) -> bool:
    """Whether a computed part of a target is known to have shape (1,)."""
    if value is None:
        return False
    if value.shape is not None and len(value.shape) == 1 and value.shape[0] == 1:
        return True
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type == "Unsqueeze":
        return _is_scalar(node.inputs[0])
    picked = constant(node.inputs[1]) if node.op_type == "Gather" else None
    if picked is not None:
        return tuple(picked.shape.numpy()) == (1,)
    if node.op_type in ("Cast", "Identity"):
        return _is_one_length(node.inputs[0])
    if node.op_type == "Slice" and len(node.inputs) > 2:
        starts, ends = (_part(each) for each in node.inputs[1:3])
        return bool(starts and ends) and len(starts or ()) == 1 and (ends or [0])[0] - (starts or [0])[0] == 1
    return False


def _is_scalar(value: ir.Value | None) -> bool:
    """Whether a computed length is known to have shape ()."""
    if value is None:
        return False
    if value.shape is not None:
        return len(value.shape) == 0
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type == "Gather":
        picked = constant(node.inputs[1])
        return picked is not None and not len(picked.shape)
    if node.op_type in ("Squeeze",):
        return _is_one_length(node.inputs[0])
    return node.op_type in ("Cast", "Identity") and _is_scalar(node.inputs[0])


def _target(node: ir.Node, lengths: list[int], taken: set[str]) -> ir.Value:
    """Add a constant Reshape target, named after `node`."""
    return add_initializer(graph_of(node), take(taken, f"{node_name(node)}/target"), np.array(lengths, np.int64))


def _undoes(second: ir.Node, first: ir.Node) -> bool:
    """Whether one of two nodes inserts the axes that the other one removes."""
    if {first.op_type, second.op_type} != {"Squeeze", "Unsqueeze"}:
        return False
    axes = [
        list(node.attributes.get_ints("axes", ())) if len(node.inputs) == 1 else _part(node.inputs[1])
        for node in (first, second)
    ]
    return bool(axes[0]) and axes[0] == axes[1]


def _merge(node: ir.Node, known: Mapping[ir.Value, ir.Value], taken: set[str], change: Change) -> bool:
    """Merge a reshape with the reshape before it; return whether the graph changed."""
    between = node.inputs[0]
    first = between.producer() if between is not None else None
    if between is None or first is None or first.domain or first.op_type not in RESHAPES:
        return False
    if sole_reader(between) is not node:
        change.skip("read-between")
        return False
    result = node.outputs[0]
    if _undoes(node, first) and first.inputs[0] is not None and can_replace(result, first.inputs[0]):
        others = (*node.inputs[1:], *first.inputs[1:])
        replace(result, first.inputs[0])
        remove(node)
        remove(first)
        discard(*others)
        change.applied += 1
        return True
    shape = known.get(result, result).shape
    lengths = None if shape is None else [length if isinstance(length, int) else -1 for length in shape]
    if lengths is None or lengths.count(-1) > 1:
        change.skip("shape-unknown")
        return False
    if 0 in lengths:
        change.skip("empty")
        return False
    one = ir.node("Reshape", [first.inputs[0], _target(node, lengths, taken)], name=node_name(node))
    others = (*node.inputs[1:], *first.inputs[1:])
    take_place(node, one)
    remove(first)
    discard(*others)
    change.applied += 1
    return True

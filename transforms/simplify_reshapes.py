"""Merge reshapes and make their targets constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

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
    replace_node,
    sole_reader,
    unused_name,
)
from .inference import stand_ins
from .registry import Change, transform
from .reshape_before_transpose import RESHAPES, moved_before

Known: TypeAlias = Mapping[ir.Value, ir.Value]
WIDEST = {"MatMul": 2, "Add": 1, "Mul": 1, "Sub": 1, "Div": 1}
"""Operators that keep all axes of a tensor but the last one, and the most axes of the constant beside it."""
SHAPE_IS_INPUT = 5  # the opset from which the target of a Reshape is an input


@transform("simplify_reshapes", after=("fold_constants",))
def simplify_reshapes(model: ir.Model) -> Change:
    """Merge consecutive reshapes, and give a Reshape with computed lengths a constant target where that is possible.

    Before:  y = Reshape(x, Concat(Gather(Shape(x), 0), [8, 64]));  z = Squeeze(Unsqueeze(Reshape(x, s), a), b)
             t = Reshape(x, Concat(Gather(Shape(x), 0), Gather(Shape(x), 1), [8, 64]))
    After:   y = Reshape(x, [-1, 8, 64]);                           z = Reshape(x, [-1, 8]), z (N, 8)
             t = Reshape(x, [0, 0, 8, 64]): lengths of axes that keep their place are 0
    Before:  y = Expand(Unsqueeze(k, [2]), s), s = Concat(Gather(Shape(k), 0), [2], [3], Gather(Shape(k), 2), [16])
    After:   y = Expand(Unsqueeze(k, [2]), [1, 2, 3, 1, 16]): lengths of axes that keep theirs are 1
        An Unsqueeze and a Squeeze of the same axes are both removed. Exporters write computed targets if the batch size
        is dynamic; shape inference then fails, and the computation of the targets takes longer than the reshapes.
        `strip_unused_nodes` removes the nodes that computed the target.
    Before:  y = Reshape(Transpose(Reshape(x, [10, 7, 16]), perm [0, 2, 1]), [2, 5, 16, 7]), x (2, 5, 7, 16)
    After:   y = Transpose(x, perm [0, 1, 3, 2]): a Reshape that splits or merges axes goes in front of a Transpose, if
             there it meets another one
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
        for node in computing_nodes(model, "Expand"):
            progress |= _fix_expand(node, known, taken, change)
        for node in computing_nodes(model, *RESHAPES):
            if node.graph is not None:  # an earlier merge removes nodes
                progress |= _fix_target(node, known, taken, change)
                progress |= _merge(node, known, taken, change) or _move(node, known, taken, change)
    return change


def _fix_target(node: ir.Node, known: Known, taken: set[str], change: Change) -> bool:
    """Replace a target made of constants and computed lengths by a constant; return whether it changed.

    One computed length may be unknown; the others are those of axes that keep their place.
    """
    target = node.inputs[1] if node.op_type == "Reshape" and len(node.inputs) > 1 else None
    concat = target.producer() if target is not None else None
    if concat is None or concat.op_type != "Concat" or concat.domain or node.attributes.get_int("allowzero", 0) != 0:
        return False
    parts = _parts(concat)
    if parts is None:
        return False
    lengths = [length for part in parts for length in ([-1] if part is None else part)]
    if 0 in lengths:
        change.skip("empty")
        return False
    if lengths.count(-1) > 1:
        lengths = _with_kept(node.inputs[0], concat.inputs, parts, known)
    if lengths.count(-1) > 1:
        return False
    node.replace_input_with(1, _target(node, lengths, taken))
    discard(target)
    change.applied += 1
    return True


def _fix_expand(node: ir.Node, known: Known, taken: set[str], change: Change) -> bool:
    """Replace the target of an Expand by a constant; return whether it changed.

    Each computed length is that of the same axis of the tensor: an Expand to 1 keeps it.
    """
    x, target = node.inputs
    concat = _concat_of(target)
    parts = None if concat is None else _parts(concat)
    shape = None if x is None else known.get(x, x).shape
    if concat is None or parts is None or shape is None or any(part is not None and 0 in part for part in parts):
        return False
    # 0 stands for a length that is kept
    lengths = [length or 1 for length in _with_kept(x, concat.inputs, parts, known)]
    if len(lengths) != len(shape) or min(lengths) < 1:
        return False
    node.replace_input_with(1, _target(node, lengths, taken))
    discard(target)
    change.applied += 1
    return True


def _parts(concat: ir.Node) -> list[list[int] | None] | None:
    """Return the constant parts of a target, and None for a computed length; None if it is not made of these."""
    parts = [_part(value) for value in concat.inputs]
    computed = [value for value, part in zip(concat.inputs, parts, strict=True) if part is None]
    return parts if computed and all(map(_is_one_length, computed)) else None


def _concat_of(target: ir.Value | None) -> ir.Node | None:
    """Return the Concat that computes the target of an Expand; None if something else does.

    Exporters write 1 for lengths of -1, ``Where(Equal(s, -1), 1, s)``, where ``s = Reshape(Concat(...), [-1])``.
    """
    node = _standard(target)
    if node is not None and node.op_type == "Where":
        condition, one, other = node.inputs
        equal = _standard(condition)
        same = equal is not None and equal.op_type == "Equal" and other in equal.inputs
        compared = [value for value in equal.inputs if value is not other] if same and equal is not None else []
        if not compared or {*(_part(compared[0]) or ())} != {-1} or {*(_part(one) or ())} != {1}:
            return None
        node = _standard(other)
    if node is not None and node.op_type == "Reshape" and _part(node.inputs[1]) == [-1]:
        node = _standard(node.inputs[0])
    return node if node is not None and node.op_type == "Concat" else None


def _with_kept(
    x: ir.Value | None, values: Sequence[ir.Value | None], parts: Sequence[Sequence[int] | None], known: Known
) -> list[int]:
    """Return the lengths of a target: 0 for a computed length that is the length of the same axis of x, else -1.

    Args:
        x: The tensor that is reshaped.
        values: The parts of the target; those that are computed have one length.
        parts: The constant parts; None for computed ones.
        known: Stand-ins of values whose shapes are inferred.
    """
    lengths: list[int] = []
    for value, part in zip(values, parts, strict=True):
        if part is not None:
            lengths += part
        else:
            lengths.append(0 if _is_length(value, x, len(lengths), known) else -1)
    return lengths


def _is_length(value: ir.Value | None, x: ir.Value | None, axis: int, known: Known) -> bool:
    """Whether a computed length is the length of an axis of x: of x itself, or of a tensor with an axis like it."""
    while (node := _standard(value)) is not None and node.op_type in ("Unsqueeze", "Squeeze", "Cast", "Identity"):
        value = node.inputs[0]
    shape = _standard(node.inputs[0]) if node is not None and node.op_type == "Gather" else None
    if node is None or shape is None or shape.op_type != "Shape" or {"start", "end"} & {*shape.attributes}:
        return False
    picked = _part(node.inputs[1])
    return picked is not None and len(picked) == 1 and _like(shape.inputs[0], picked[0], known) == _like(x, axis, known)


def _like(x: ir.Value | None, axis: int, known: Known) -> tuple[ir.Value | None, int]:
    """Return the first tensor with an axis that has the length of an axis of x, and this axis.

    Products, biases, further axes (Unsqueeze) and repeated ones (Expand) tell so.
    """
    while (node := _standard(x)) is not None and x is not None:
        if (before := _axis_before(node, axis, known)) is not None:
            x, axis = node.inputs[0], before
            continue
        widest = WIDEST.get(node.op_type, -1)
        computed = [value for value in node.inputs if constant(value) is None]
        constants = [tensor for tensor in map(constant, node.inputs) if tensor is not None]
        plain = len(computed) == len(constants) == 1 and len(constants[0].shape) <= widest
        turned = node.op_type == "MatMul" and computed[:1] != [node.inputs[0]]
        shape = known.get(x, x).shape
        if not plain or turned or shape is None or axis >= len(shape) - 1:
            break
        (x,) = computed
    return x, axis


def _axis_before(node: ir.Node, axis: int, known: Known) -> int | None:
    """Return which axis of its first input an Unsqueeze or Expand keeps as an axis of its result; None if none."""
    x = node.inputs[0]
    given = _part(node.inputs[1]) if node.op_type in ("Unsqueeze", "Expand") and len(node.inputs) > 1 else None
    if x is None or given is None or axis < 0:
        return None
    if node.op_type == "Expand":
        shape = known.get(x, x).shape
        same = shape is not None and len(shape) == len(given) and axis < len(given) and given[axis] == 1
        return axis if same else None
    return None if axis in given or min(given, default=0) < 0 else axis - sum(each < axis for each in given)


def _standard(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes a tensor if it is a standard operator."""
    node = value.producer() if value is not None else None
    return node if node is not None and not node.domain else None


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
    return add_initializer(graph_of(node), unused_name(taken, f"{node_name(node)}/target"), np.array(lengths, np.int64))


def _move(node: ir.Node, known: Known, taken: set[str], change: Change) -> bool:
    """Move a reshape in front of a Transpose behind another reshape; return whether it moved."""
    turned = node.inputs[0].producer() if node.inputs[0] is not None else None
    before = None if turned is None or turned.op_type != "Transpose" or turned.domain else turned.inputs[0]
    result = node.outputs[0]
    shapes = [None if value is None else known.get(value, value).shape for value in (before, result)]
    one, other = ([length if isinstance(length, int) else None for length in shape or ()] for shape in shapes)
    moved = None not in shapes and moved_before(node, one, other, taken)
    change.applied += moved
    return moved


def _undoes(second: ir.Node, first: ir.Node) -> bool:
    """Whether one of two nodes inserts the axes that the other one removes."""
    if {first.op_type, second.op_type} != {"Squeeze", "Unsqueeze"}:
        return False
    axes = [
        list(node.attributes.get_ints("axes", ())) if len(node.inputs) == 1 else _part(node.inputs[1])
        for node in (first, second)
    ]
    return bool(axes[0]) and axes[0] == axes[1]


def _have_same_shape(before: ir.Value | None, after: ir.Value, known: Known) -> bool:
    """Whether two tensors are known to have the same shape."""
    shapes = [None if value is None else known.get(value, value).shape for value in (before, after)]
    lengths = [None if shape is None else [*shape] for shape in shapes]
    return lengths[0] is not None and lengths[0] == lengths[1] and all(isinstance(each, int) for each in lengths[0])


def _merge(node: ir.Node, known: Known, taken: set[str], change: Change) -> bool:
    """Merge a reshape with the reshape before it; return whether the graph changed."""
    between = node.inputs[0]
    first = between.producer() if between is not None else None
    if between is None or first is None or first.domain or first.op_type not in RESHAPES:
        return False
    if sole_reader(between) is not node:
        change.skip("read-between")
        return False
    result = node.outputs[0]
    undone = _undoes(node, first) or _have_same_shape(first.inputs[0], result, known)
    if undone and first.inputs[0] is not None and can_replace(result, first.inputs[0]):
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
    replace_node(node, one)
    remove(first)
    discard(*others)
    change.applied += 1
    return True

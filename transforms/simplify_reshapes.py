"""Merge reshapes and make their targets constant."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.queries import axes_of, computing_nodes, made_by, node_name, producer_of, sole_reader
from .graphs.rewriter import add_target, can_replace, discard, names, remove, remove_unread, replace, replace_node
from .merge_transposes import merged
from .parts.reshape_before_transpose import RESHAPES, moved_before, transposed_alone
from .parts.tokens_and_images import moved_to_tokens
from .patterns.attention import REPEATS
from .patterns.lengths import Axis, Lengths, Named, is_computed
from .registry import Change, transform

SHAPE_IS_INPUT = 5  # the opset from which the target of a Reshape is an input


@transform("simplify_reshapes", after=("fold_constants",))
def simplify_reshapes(model: ir.Model) -> Change:
    """Merge consecutive reshapes, and give a Reshape with computed lengths a constant target where that is possible.

    Before:  y = Reshape(x, Concat(Gather(Shape(x), 0), [8, 64]));  z = Squeeze(Unsqueeze(Reshape(x, s), a), b)
             t = Reshape(x, Concat(Gather(Shape(x), 0), Gather(Shape(x), 1), [8, 64]))
    After:   y = Reshape(x, [0, 8, 64]);                            z = Reshape(x, [-1, 8]), z (N, 8)
             t = Reshape(x, [0, 0, 8, 64]): lengths of axes that keep their place are 0
    Before:  y = Expand(Unsqueeze(k, [2]), s), s = Concat(Gather(Shape(k), 0), [2], [3], Gather(Shape(k), 2), [16])
    After:   y = Expand(Unsqueeze(k, [2]), [1, 2, 3, 1, 16]): lengths of axes that keep theirs are 1
        An Unsqueeze and a Squeeze of the same axes are both removed. Exporters write computed targets if the batch size
        is dynamic; shape inference then fails, and the computation of the targets takes longer than the reshapes.
        `strip_unused_nodes` removes the nodes that computed the target.
    Before:  y = Reshape(Transpose(Reshape(x, [10, 7, 16]), perm [0, 2, 1]), [2, 5, 16, 7]), x (2, 5, 7, 16)
    After:   y = Transpose(x, perm [0, 1, 3, 2]): a Reshape that splits or merges axes goes in front of a Transpose, if
             there it meets another one
    Before:  y = Reshape(Transpose(x, perm [0, 2, 1]), [N, C, H, W]), x (N, H * W, C)
             t = Transpose(Reshape(i, [N, C, H * W]), perm [0, 2, 1]), i (N, C, H, W)
    After:   y = Transpose(Reshape(x, [N, H, W, C]), perm [0, 3, 1, 2])
             t = Reshape(Transpose(i, perm [0, 2, 3, 1]), [N, H * W, C]): integer convolutions compute with channels
             last, and transpose images in the other direction
    Left alone: a tensor between two reshapes that other nodes read (``read-between``); an Unsqueeze in front of an
        Expand or a Tile, which native attention knows as repeated heads (``repeated``); results with more than one
        unknown length (``shape-unknown``) or with a length of 0 (``empty``); images with one row, column or channel, or
        whose Transpose and reshape have other readers; opsets below 5.
    """
    change = Change()
    if model.opset_imports.get("", 0) < SHAPE_IS_INPUT:
        return change
    taken = names(model)
    progress = True
    while progress:
        progress = False
        change.skipped.clear()
        lengths = Lengths(model)
        for node in computing_nodes(model, "Expand"):
            progress |= node.graph is not None and _fix_expand(node, lengths, taken, change)
        for node in computing_nodes(model, *RESHAPES):  # before a reshape between two Transposes moves away
            progress |= node.graph is not None and (_merge_turns(node, change) or _stand_alone(node, lengths, change))
        for node in computing_nodes(model, *RESHAPES):
            if node.graph is not None:  # an earlier merge removes nodes
                progress |= _fix_target(node, lengths, taken, change)
                merged = _merge(node, lengths, taken, change) or _move(node, lengths, taken, change)
                progress |= merged or _turn(node, lengths, taken, change)
    return change


def _fix_target(node: ir.Node, lengths: Lengths, taken: set[str], change: Change) -> bool:
    """Replace a target made of constants and computed lengths by a constant; return whether it changed.

    One computed length may be unknown; the others are those of axes that keep their place.
    """
    target = node.inputs[1] if node.op_type == "Reshape" and len(node.inputs) > 1 else None
    given = lengths.of_target(target) if is_computed(target) else None
    if given is None:
        return False
    if 0 in given:
        change.skip("empty")
        return False
    numbers = lengths.of_multiple(node.inputs[0], given) or lengths.kept(node.inputs[0], given)
    if numbers.count(-1) > 1:
        return False
    numbers = lengths.without_rest(node.inputs[0], numbers)
    node.attributes.pop("allowzero", None)  # no number of the target was 0
    node.replace_input_with(1, add_target(node, numbers, taken))
    remove_unread([target.producer()] if target is not None else [])
    change.applied += 1
    return True


def _fix_expand(node: ir.Node, lengths: Lengths, taken: set[str], change: Change) -> bool:
    """Replace the target of an Expand by a constant; return whether it changed.

    Each computed length is that of the same axis of the tensor: an Expand to 1 keeps it.
    """
    x, target = node.inputs
    given, shape = lengths.of_expanded(target) if is_computed(target) else None, lengths.of(x)
    if given is None or shape is None or len(given) != len(shape) or 0 in given:
        return False
    # 0 stands for a length that is kept
    numbers = [number or 1 for number in lengths.kept(x, given)]
    if min(numbers, default=1) < 1:
        return False
    node.replace_input_with(1, add_target(node, numbers, taken))
    remove_unread([target.producer()] if target is not None else [])
    change.applied += 1
    return True


def _merge_turns(node: ir.Node, change: Change) -> bool:
    """Merge two Transposes in front of a reshape; return whether they are one now."""
    second = made_by(node.inputs[0], "Transpose")
    first = None if second is None else made_by(second.inputs[0], "Transpose")
    if first is None or second is None or merged(first, second):
        return False
    change.applied += 1
    return True


def _stand_alone(node: ir.Node, lengths: Lengths, change: Change) -> bool:
    """Let a Transpose between two reshapes stand alone; return whether it does."""
    shapes, result = _around_transpose(node, lengths), lengths.of(node.outputs[0])
    alone = shapes is not None and result is not None and transposed_alone(node, *shapes, result)
    change.applied += alone
    return alone


def _around_transpose(node: ir.Node, lengths: Lengths) -> tuple[Named, Named] | None:
    """Return the shapes in front of and behind the reshape that stands before a Transpose; None without both."""
    turned = made_by(node.inputs[0], "Transpose")
    first = None if turned is None or turned.inputs[0] is None else turned.inputs[0].producer()
    if turned is None or first is None or not first.inputs:
        return None
    whole, between = lengths.of(first.inputs[0]), lengths.of(turned.inputs[0])
    return None if whole is None or between is None else (whole, between)


def _move(node: ir.Node, lengths: Lengths, taken: set[str], change: Change) -> bool:
    """Move a reshape in front of a Transpose behind another reshape; return whether it moved."""
    shapes, result = _around_transpose(node, lengths), lengths.of(node.outputs[0])
    moved = shapes is not None and result is not None and moved_before(node, _fixed(shapes[1]), _fixed(result), taken)
    change.applied += moved
    return moved


def _turn(node: ir.Node, lengths: Lengths, taken: set[str], change: Change) -> bool:
    """Move a reshape between tokens and images to where channels come last; return whether it moved."""
    moved = moved_to_tokens(node, lengths, taken)
    change.applied += moved
    return moved


def _fixed(shape: Named) -> list[int | None]:
    """Return the lengths of a shape, None for those that are no numbers."""
    return [length if isinstance(length, int) else None for length in shape]


def _undoes(second: ir.Node, first: ir.Node) -> bool:
    """Whether one of two nodes inserts the axes that the other one removes."""
    if {first.op_type, second.op_type} != {"Squeeze", "Unsqueeze"}:
        return False
    axes = axes_of(first)
    return bool(axes) and axes == axes_of(second)


def _have_same_shape(before: ir.Value | None, after: ir.Value, lengths: Lengths) -> bool:
    """Whether two tensors are known to have the same shape."""
    one, other = lengths.of(before), lengths.of(after)
    return one is not None and one == other and None not in one


def _merge(node: ir.Node, lengths: Lengths, taken: set[str], change: Change) -> bool:
    """Merge a reshape with the reshape before it; return whether the graph changed."""
    between = node.inputs[0]
    first = producer_of(between)
    if between is None or first is None or first.domain or first.op_type not in RESHAPES:
        return False
    if sole_reader(between) is not node:
        change.skip("read-between")
        return False
    if node.op_type == "Unsqueeze" and any(use.node.op_type in REPEATS for use in node.outputs[0].uses()):
        change.skip("repeated")
        return False
    result = node.outputs[0]
    undone = _undoes(node, first) or _have_same_shape(first.inputs[0], result, lengths)
    if undone and first.inputs[0] is not None and can_replace(result, first.inputs[0]):
        others = (*node.inputs[1:], *first.inputs[1:])
        replace(result, first.inputs[0])
        remove(node)
        remove(first)
        discard(*others)
        change.applied += 1
        return True
    shape = lengths.of(result)
    if shape is not None and 0 in shape:
        change.skip("empty")
        return False
    axes = [length if isinstance(length, int) else Axis(result, axis) for axis, length in enumerate(shape or ())]
    numbers = lengths.kept(first.inputs[0], axes)
    if shape is None or numbers.count(-1) > 1:
        change.skip("shape-unknown")
        return False
    one = ir.node("Reshape", [first.inputs[0], add_target(node, numbers, taken)], name=node_name(node))
    others = (*node.inputs[1:], *first.inputs[1:])
    replace_node(node, one)
    remove(first)
    discard(*others)
    change.applied += 1
    return True

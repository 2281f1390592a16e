"""Reshapes between tokens (N, H * W, C) and images (N, C, H, W): they go to the side where channels come last."""

from __future__ import annotations

import onnx_ir as ir

from ..graphs.queries import is_standard, node_name, producer_of, sole_reader
from ..graphs.rewriter import add_target, discard, insert_before, remove, replace_node
from ..patterns.lengths import Lengths

COLUMNS = (0, 2, 1)
"""The permutation between (N, H * W, C) and (N, C, H * W)."""
CHANNELS_FIRST, CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)


def moved_to_tokens(node: ir.Node, lengths: Lengths, taken: set[str]) -> bool:
    """Move a reshape between tokens and images past the Transpose of the channels; return whether it moved.

    Before:  y = Reshape(Transpose(x, perm [0, 2, 1]), [N, C, H, W]), x (N, H * W, C)
             t = Transpose(Reshape(i, [N, C, H * W]), perm [0, 2, 1]), i (N, C, H, W)
    After:   y = Transpose(Reshape(x, [N, H, W, C]), perm [0, 3, 1, 2])
             t = Reshape(Transpose(i, perm [0, 2, 3, 1]), [N, H * W, C])
        Integer convolutions compute with channels last: they transpose images in the other direction, and two
        Transposes side by side cancel. No axis has length 1 but the batch: `moved_before` would move the reshape of t
        back in front of the Transpose if it could be read as a split.

    Args:
        node: The reshape.
        lengths: The lengths of the axes of the tensors.
        taken: The names in the model.
    """
    if node.op_type != "Reshape" or node.inputs[0] is None:
        return False
    before, after = lengths.of(node.inputs[0]) or (), lengths.of(node.outputs[0]) or ()
    image, rows = (after, before) if len(after) > len(before) else (before, after)
    sizes = [length for length in image[1:] if isinstance(length, int) and length > 1]
    if len(image) != len(CHANNELS_LAST) or len(sizes) != len(image) - 1:
        return False
    channels, height, width = sizes
    if [*rows[1:]] != [channels, height * width]:  # the batch stays, because all other axes do
        return False
    batch = before[0] if isinstance(before[0], int) else 0
    target = [batch, height, width, channels] if image is after else [batch, height * width, channels]
    return _split_first(node, target, taken) if image is after else _merge_last(node, target, taken)


def _split_first(node: ir.Node, target: list[int], taken: set[str]) -> bool:
    """Move a reshape that makes images in front of the Transpose before it; return whether there is one."""
    turn = producer_of(node.inputs[0])
    if turn is None or not _is_turn(turn, node) or sole_reader(turn.outputs[0]) is not node:
        return False
    shape = add_target(node, target, taken)
    image = insert_before(node, taken, "Reshape", [turn.inputs[0], shape], stem=f"{node_name(node)}/image")
    others = node.inputs[1:]
    replace_node(node, ir.node("Transpose", [image], {"perm": CHANNELS_FIRST}, name=node_name(node)))
    remove(turn)
    discard(*others)
    return True


def _merge_last(node: ir.Node, target: list[int], taken: set[str]) -> bool:
    """Move a reshape that makes tokens behind the Transpose after it; return whether there is one."""
    turn = sole_reader(node.outputs[0])
    if turn is None or not _is_turn(turn, node):
        return False
    shape, stem = add_target(node, target, taken), f"{node_name(node)}/image"
    image = insert_before(turn, taken, "Transpose", [node.inputs[0]], {"perm": CHANNELS_LAST}, stem=stem)
    others = node.inputs[1:]
    replace_node(turn, ir.node("Reshape", [image, shape], name=node_name(turn)))
    remove(node)
    discard(*others)
    return True


def _is_turn(turn: ir.Node, node: ir.Node) -> bool:
    """Whether a node is a Transpose that exchanges channels and pixels, in the graph of another node."""
    is_transpose = is_standard(turn, "Transpose") and turn.graph is node.graph
    return is_transpose and tuple(turn.attributes.get_ints("perm", ())) == COLUMNS

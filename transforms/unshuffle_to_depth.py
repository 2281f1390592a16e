"""Replace the Transpose of a pixel unshuffle by a SpaceToDepth."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from .graphs.queries import (
    axes_of,
    computing_nodes,
    constant,
    graph_of,
    integers_of,
    is_standard,
    node_name,
    producer_of,
    sole_reader,
)
from .graphs.rewriter import derive_initializer, discard, insert_before, names, remove_unread, replace, unused_name
from .patterns.lengths import Lengths
from .registry import Change, LeftAlone, transform

RESHAPES = ("Reshape", "Squeeze", "Unsqueeze")
BLOCKS_FIRST = (0, 1, 3, 5, 2, 4)  # (N, C, H / b, b, W / b, b) as (N, C, b, b, H / b, W / b)
IMAGE = 4  # axes
CHANNELS = (1, -3)  # the axis of the channels of an image
Size: TypeAlias = tuple[Fraction, frozenset[int]]
"""A length: a number, and the axes of an image, of free lengths, with which it is multiplied."""
FIXED: frozenset[int] = frozenset()
ONE: Size = (Fraction(1), FIXED)


class Unshuffle(NamedTuple):
    """A pixel unshuffle.

    Attributes:
        source: The image (N, C, H, W).
        channels: C.
        block: The rows and the columns of a block, b.
        result: The blocks (N, C * b * b, H / b, W / b).
    """

    source: ir.Value
    channels: int
    block: int
    result: ir.Value


@transform("unshuffle_to_depth", after=("fold_constants", "simplify_reshapes"))
def unshuffle_to_depth(model: ir.Model) -> Change:
    """Turn the Transpose of a pixel unshuffle into a SpaceToDepth, and reorder the weights behind it.

    Before:  y = Conv(Reshape(Transpose(Reshape(x, [N, C, H / b, b, W / b, b]), perm [0, 1, 3, 5, 2, 4]),
                              [N, C * b * b, H / b, W / b]), W),  x of shape (N, C, H, W)
    After:   y = Conv(SpaceToDepth(x, blocksize b), W'),  W' with the input channels of W in another order
        PyTorch exports PixelUnshuffle so, for free H and W with an Unsqueeze, a Squeeze and lengths of 0 and -1.
        ONNX Runtime takes ten times as long for the Transpose of six axes as for a SpaceToDepth. This one counts
        the pixels of a block first, then the channels; the unshuffle counts the channels first. A Concat of channels
        may stand before the Conv. Images of one channel have one order, and may have any reader.
    Left alone: a Transpose of six axes with another order (``other-order``), or between reshapes that do not make a
        pixel unshuffle for all lengths (``not-unshuffle``); other types than float32 (``not-float32``); results that
        another operator reads, or several, or a Conv with groups or computed weights (``other-reader``).
    """
    change, taken = Change(), names(model)
    turns = [node for node in computing_nodes(model, "Transpose") if len(_order(node)) == len(BLOCKS_FIRST)]
    lengths = Lengths(model) if turns else None
    for node in turns:
        try:
            if lengths is not None:
                _replace(node, lengths, taken)
                change.applied += 1
        except LeftAlone as reason:
            change.skip(str(reason))
    return change


def _order(node: ir.Node) -> tuple[int, ...]:
    """Return the order of the axes that a Transpose gives; empty if it reverses them."""
    return tuple(node.attributes.get_ints("perm", ()))


def _replace(turn: ir.Node, lengths: Lengths, taken: set[str]) -> None:
    """Replace one Transpose and the reshapes around it.

    Raises:
        LeftAlone: It must stay.
    """
    if _order(turn) != BLOCKS_FIRST:
        raise LeftAlone("other-order")
    found = _unshuffle_of(turn, lengths)
    if found is None:
        raise LeftAlone("not-unshuffle")
    if lengths.dtype(found.source) is not ir.DataType.FLOAT:
        raise LeftAlone("not-float32")
    if found.channels > 1:
        _reorder(found, lengths, taken)
    name = node_name(turn)
    made = insert_before(turn, taken, "SpaceToDepth", [found.source], {"blocksize": found.block}, stem=f"{name}/blocks")
    made.type = ir.TensorType(ir.DataType.FLOAT)
    last = found.result.producer()
    replace(found.result, made)
    remove_unread([last])
    if turn.graph is None and (node := producer_of(made)) is not None:
        node.name = name  # by which the user knows, and may exclude, the Transpose


def _reorder(found: Unshuffle, lengths: Lengths, taken: set[str]) -> None:
    """Give the Conv that reads an unshuffle the weights for the channels of a SpaceToDepth.

    Raises:
        LeftAlone: The reader is no Conv that can have them.
    """
    first, conv = 0, sole_reader(found.result)
    if is_standard(conv, "Concat") and conv.attributes.get_int("axis") in CHANNELS:
        before = conv.inputs[: conv.inputs.index(found.result)]
        counts = [[*(lengths.of(value) or ())][1:2] for value in before]
        if not all(count and isinstance(count[0], int) for count in counts):
            raise LeftAlone("other-reader")
        first = sum(number for count in counts for number in count if isinstance(number, int))
        conv = sole_reader(conv.outputs[0])
    weight = constant(conv.inputs[1]) if is_standard(conv, "Conv") else None
    if conv is None or weight is None or conv.attributes.get_int("group", 1) != 1:
        raise LeftAlone("other-reader")
    shape, count = tuple(weight.shape.numpy()), found.channels * found.block**2
    old = conv.inputs[1]
    if shape[1] < first + count:
        raise LeftAlone("other-reader")
    order = np.arange(shape[1])
    blocks = order[first : first + count].reshape(found.channels, found.block, found.block)
    order[first : first + count] = blocks.transpose(1, 2, 0).reshape(-1)
    name = unused_name(taken, f"{node_name(conv)}/weights")
    made = derive_initializer(graph_of(conv), name, weight, lambda array: array[:, order], shape)
    conv.replace_input_with(1, made)
    discard(old)


def _unshuffle_of(turn: ir.Node, lengths: Lengths) -> Unshuffle | None:
    """Return the pixel unshuffle to which a Transpose of six axes belongs; None for others."""
    before: list[ir.Node] = []
    source = turn.inputs[0]
    while is_standard(node := producer_of(source), *RESHAPES) and (source := node.inputs[0]) is not None:
        before.insert(0, node)
        image = lengths.of(source) or ()
        if len(image) != IMAGE or not isinstance(image[1], int) or 0 in image:
            continue
        axes = [
            (Fraction(each), FIXED) if isinstance(each, int) else (Fraction(1), frozenset({axis}))
            for axis, each in enumerate(image)
        ]
        block = _block_of(axes, _reshaped(axes, before))
        result = None if block is None else _result_of(turn, axes, block)
        if block is not None and result is not None:
            return Unshuffle(source, image[1], block, result)
    return None


def _block_of(image: Sequence[Size], split: Sequence[Size] | None) -> int | None:
    """Return the rows of the blocks into which the axes of an image are split; None for another split."""
    if split is None or len(split) != len(BLOCKS_FIRST) or split[3][1] or split[3][0].denominator > 1:
        return None
    block = int(split[3][0])
    return block if block > 1 and split == _split(image, block) else None


def _split(image: Sequence[Size], block: int) -> list[Size]:
    """Return the lengths (N, C, H / b, b, W / b, b) for an image (N, C, H, W)."""
    many, channels, rows, columns = image
    side = (Fraction(block), FIXED)
    return [many, channels, (rows[0] / block, rows[1]), side, (columns[0] / block, columns[1]), side]


def _result_of(turn: ir.Node, image: Sequence[Size], block: int) -> ir.Value | None:
    """Return the tensor (N, C * b * b, H / b, W / b) that reshapes make of a Transpose of the pixels of an image.

    None if there is none, or if other nodes read a tensor in between.
    """
    split = _split(image, block)
    axes = [split[axis] for axis in BLOCKS_FIRST]
    many, channels, _, _, rows, columns = axes
    value, after = turn.outputs[0], list[ir.Node]()
    while is_standard(node := sole_reader(value), *RESHAPES) and node.inputs[0] is value:
        after.append(node)
        value = node.outputs[0]
        if _reshaped(axes, after) == [many, (channels[0] * block**2, FIXED), rows, columns]:
            return value
    return None


def _reshaped(axes: Sequence[Size], nodes: Sequence[ir.Node]) -> list[Size] | None:
    """Return the lengths of a tensor with the lengths `axes` behind reshapes; None if they are not known."""
    found: list[Size] | None = [*axes]
    for node in nodes:
        numbers = integers_of(node.inputs[1]) if node.op_type == "Reshape" and len(node.inputs) > 1 else axes_of(node)
        if not numbers or found is None:
            return None
        if node.op_type == "Reshape":
            found = _to_target(found, numbers, keeps=not node.attributes.get_int("allowzero", 0))
        elif node.op_type == "Squeeze":
            found = _without(found, {axis % len(found) for axis in numbers})
        else:
            found = _with_ones(found, {axis % (len(found) + len(numbers)) for axis in numbers})
    return found


def _to_target(axes: Sequence[Size], target: Sequence[int], *, keeps: bool) -> list[Size] | None:
    """Return the lengths behind a Reshape with this target; None if they are not known.

    Args:
        axes: The lengths before it.
        target: The numbers of the target.
        keeps: Whether a 0 stands for the length of the same axis before.
    """
    kept = [axis for axis, number in enumerate(target) if number == 0]
    if target.count(-1) > 1 or (kept and (not keeps or kept[-1] >= len(axes))):
        return None
    found = [axes[axis] if number == 0 else (Fraction(number), FIXED) for axis, number in enumerate(target)]
    if -1 in target:
        place = target.index(-1)
        others = [*found[:place], *found[place + 1 :]]
        free = FIXED.union(*(length[1] for length in axes)).difference(*(length[1] for length in others))
        found[place] = (_product(axes) / _product(others), free)
    return found


def _product(axes: Sequence[Size]) -> Fraction:
    """Return the product of the numbers of lengths."""
    return prod((number for number, _ in axes), start=Fraction(1))


def _without(axes: Sequence[Size], gone: set[int]) -> list[Size] | None:
    """Return lengths without those at some places; None if one of these is not 1."""
    if any(axes[axis] != ONE for axis in gone):
        return None
    return [length for axis, length in enumerate(axes) if axis not in gone]


def _with_ones(axes: Sequence[Size], new: set[int]) -> list[Size]:
    """Return lengths with a 1 at some places of the result."""
    rest = iter(axes)
    return [ONE if axis in new else next(rest) for axis in range(len(axes) + len(new))]

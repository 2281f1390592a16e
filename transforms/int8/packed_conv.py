"""Pack 2x2 pixels into one for first convolutions: few channels are slow in the integer kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from ..graphs.queries import constant, made_by, producer_of
from ..graphs.rewriter import remove_if_unread
from .qparams import Array
from .writer import Writer

THIN = 4  # the largest number of channels for which packing pays
BLOCK = 2


class Taps(NamedTuple):
    """The position of the taps of a kernel along one axis after pixels are packed into blocks.

    Attributes:
        block: The block index of each tap, int64 (k,), from 0.
        within: The position of each tap in its block, int64 (k,).
        taps: The number of taps of the packed kernel.
        pads: The padding at the beginning and at the end, in blocks.
    """

    block: Array
    within: Array
    taps: int
    pads: tuple[int, int]


def taps_of(kernel: int, begin: int, length: int, outputs: int) -> Taps | None:
    """Return the packed taps of a kernel of stride `BLOCK`; None if the padding would be negative.

    For tap t, output o reads pixel ``2 o + t - begin``: position ``(t - begin) mod 2`` of block
    ``o + floor((t - begin) / 2)``.

    Args:
        kernel: The number of taps.
        begin: The padding at the beginning, in pixels.
        length: The number of pixels along the axis, even.
        outputs: The number of outputs along the axis.
    """
    offsets = np.arange(kernel) - begin
    blocks, within = np.divmod(offsets, BLOCK)
    first = int(blocks[0])
    count = int(blocks[-1]) - first + 1
    end = outputs + count - 1 - length // BLOCK + first
    return Taps(blocks - first, within, count, (-first, end)) if first <= 0 <= end else None


def pack_pixels(
    node: ir.Node, values: Mapping[str, ir.Value], writer: Writer, *, computes_blocks: bool = False
) -> bool:
    """Make a convolution of stride 2 over few channels read blocks of 2x2 pixels; return whether it changed.

    Before:  x8 = QuantizeLinear(x (N, C, H, W));  y = Conv(DequantizeLinear(x8), DequantizeLinear(W8 (M, C, k, k)), b),
             strides [2, 2]
    After:   p8 = QuantizeLinear(SpaceToDepth(x) (N, 4C, H/2, W/2));  y = Conv(DequantizeLinear(p8),
             DequantizeLinear(W8' (M, 4C, k', k')), b), strides [1, 1]
             computes_blocks: p8 = QuantizeLinear(SpaceToDepth(DequantizeLinear(x8)))
    The result is exactly equal: the same integers are summed. The integer kernel gathers the channels of one pixel at
    a time, and gathering three channels takes most of its run time. With twelve channels the convolution takes 0.5 to
    0.7 times as long. The blocks are made in float: ONNX Runtime has no SpaceToDepth of uint8 before 1.28, and that of
    float is as fast.
    Left alone: int8 activations, more than `THIN` channels, groups, dilations, other strides, odd or unknown sides.

    Args:
        node: A Conv between DequantizeLinear and QuantizeLinear.
        values: The float tensors of the model by name, with shapes.
        writer: Adds names and constants.
        computes_blocks: Whether the convolution computes the blocks itself, from x8: then it can become one native
            operator.
    """
    dq, weights = map(producer_of, node.inputs[:2])
    taps = None if weights is None else _packed_taps(node, weights, values)
    if taps is None or dq is None or weights is None:
        return False
    integers, zero = constant(weights.inputs[0]), constant(weights.inputs[2])
    graph, x8 = node.graph, dq.inputs[0]
    if integers is None or zero is None or x8 is None or not isinstance(graph, ir.Graph):
        return False
    name = str(node.name)
    array = _packed(integers.numpy(), zero.numpy(), taps)
    packed = writer.initializer(graph, f"{integers.name}/packed", array)
    kernel = writer.like(weights, packed, f"{weights.name}/packed")
    made = _packed_pixels(dq, x8, name, writer, computes_blocks=computes_blocks)
    graph.insert_before(node, [*made, kernel])
    node.replace_input_with(0, made[-1].outputs[0])
    node.replace_input_with(1, kernel.outputs[0])
    rows, columns = taps
    node.attributes["strides"] = ir.AttrInt64s("strides", [1, 1])
    node.attributes["kernel_shape"] = ir.AttrInt64s("kernel_shape", [rows.taps, columns.taps])
    node.attributes["pads"] = ir.AttrInt64s("pads", [rows.pads[0], columns.pads[0], rows.pads[1], columns.pads[1]])
    node.attributes.pop("auto_pad", None)
    for old in (dq, weights, x8.producer()):
        if old is not None:
            remove_if_unread(old)
    return True


def _packed_pixels(dq: ir.Node, x8: ir.Value, name: str, writer: Writer, *, computes_blocks: bool) -> list[ir.Node]:
    """Return the nodes that make blocks of pixels, quantized and dequantized; they are in no graph yet."""
    quantizes = x8.producer()
    assert quantizes is not None  # `_packed_taps` has found it
    whole = [writer.like(dq, x8, f"{dq.name}/pixels")] if computes_blocks else []
    pixels = whole[0].outputs[0] if computes_blocks else quantizes.inputs[0]
    blocks = ir.node("SpaceToDepth", [pixels], {"blocksize": BLOCK}, name=writer.name(f"{name}/blocks"))
    blocks.outputs[0].name, blocks.outputs[0].dtype = writer.name(f"{name}/blocks_output"), ir.DataType.FLOAT
    like = dq if computes_blocks else quantizes
    again = writer.like(like, blocks.outputs[0], f"{name}/blocks/quantize", op="QuantizeLinear")
    return [*whole, blocks, again, writer.like(dq, again.outputs[0], f"{dq.name}/packed")]


class Packing(NamedTuple):
    """How `pack_pixels` has made a uint8 tensor of blocks.

    Attributes:
        source: The tensor whose pixels are packed: uint8 if the convolution computes the blocks itself, else float.
        blocks: The SpaceToDepth.
        nodes: All nodes between the two tensors, in order.
    """

    source: ir.Value
    blocks: ir.Node
    nodes: tuple[ir.Node, ...]

    @property
    def computes_blocks(self) -> bool:
        """Whether the convolution computes the blocks itself, from the uint8 tensor."""
        return self.nodes[0] is not self.blocks


def packing_of(packed: ir.Value | None) -> Packing | None:
    """Return how a uint8 tensor of blocks was made; None for another tensor.

    A SpaceToDepth of the user's model between the same operators looks alike.
    """
    quantizes = made_by(packed, "QuantizeLinear")
    blocks = None if quantizes is None else made_by(quantizes.inputs[0], "SpaceToDepth")
    if quantizes is None or blocks is None or blocks.inputs[0] is None:
        return None
    whole = made_by(blocks.inputs[0], "DequantizeLinear")
    if whole is None or whole.inputs[0] is None or whole.inputs[1] is not quantizes.inputs[1]:
        return Packing(blocks.inputs[0], blocks, (blocks, quantizes))
    return Packing(whole.inputs[0], blocks, (whole, blocks, quantizes))


def shapes_read(node: ir.Node) -> tuple[ir.Value | None, ir.Value] | None:
    """Return the float tensors whose shapes `pack_pixels` needs: the input and the result of a convolution.

    None for a convolution that is left alone whatever their shapes are.
    """
    dq, weights = map(producer_of, node.inputs[:2])
    if dq is None or weights is None or {dq.op_type, weights.op_type} != {"DequantizeLinear"}:
        return None
    integers, zero = constant(weights.inputs[0]), constant(dq.inputs[2]) if len(dq.inputs) > 2 else None
    usual = node.attributes.get_ints("strides", ()) == (BLOCK, BLOCK) and node.attributes.get_int("group", 1) == 1
    usual = usual and all(step == 1 for step in node.attributes.get_ints("dilations", (1, 1)))
    usual = usual and node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    # With int8, ONNX Runtime runs SpaceToDepth and the convolution in float.
    usual = usual and zero is not None and zero.dtype == ir.DataType.UINT8
    if not usual or integers is None or len(integers.shape) != 4 or integers.shape.numpy()[1] > THIN:
        return None
    origin = producer_of(dq.inputs[0])
    source = origin.inputs[0] if origin is not None and origin.op_type == "QuantizeLinear" else None
    return source, node.outputs[0]


def _packed_taps(node: ir.Node, weights: ir.Node, values: Mapping[str, ir.Value]) -> tuple[Taps, Taps] | None:
    """Return the packed taps along both axes; None for a convolution that is left alone."""
    read, integers = shapes_read(node), constant(weights.inputs[0])
    if read is None or integers is None:
        return None
    known = [values.get(str(value.name)) if value is not None else None for value in read]
    shapes = [value.shape if value is not None else None for value in known]
    if None in shapes:
        return None
    before, after = ([axis for axis in tuple(shape or ())[-3:] if isinstance(axis, int)] for shape in shapes)
    pads = list(node.attributes.get_ints("pads", (0, 0, 0, 0)))
    kernel = integers.shape.numpy()[2:]
    if len(before) < 3 or len(after) < 3 or before[0] > THIN or any(side % BLOCK for side in before[1:]):
        return None
    if any(side < BLOCK for side in before[1:]) or min(kernel) < BLOCK or before[0] != integers.shape[1]:
        return None
    axes = zip(kernel, pads, before[1:], after[1:], strict=False)
    rows, columns = (taps_of(taps, begin, side, outputs) for taps, begin, side, outputs in axes)
    return (rows, columns) if rows is not None and columns is not None else None


def _packed(weights: Array, zero: Array, taps: tuple[Taps, Taps]) -> Array:
    """Return (M, C, k, k) weights as (M, 4 C, k', k') in the channel order of SpaceToDepth; added taps are zero."""
    rows, columns = taps
    many, channels = weights.shape[:2]
    filling = np.broadcast_to(zero.reshape(-1, 1, 1, 1, 1, 1), (many, BLOCK, BLOCK, channels, rows.taps, columns.taps))
    packed = filling.astype(weights.dtype)
    for down, (block_row, row) in enumerate(zip(rows.block, rows.within, strict=True)):
        for across, (block_column, column) in enumerate(zip(columns.block, columns.within, strict=True)):
            packed[:, row, column, :, block_row, block_column] = weights[:, :, down, across]
    return packed.reshape(many, BLOCK * BLOCK * channels, rows.taps, columns.taps)


def unpacked(weights: Array, pads: Sequence[int]) -> tuple[Array, list[int]]:
    """Return the weights (M, C, k, k) and the pads of the convolution of stride `BLOCK` that a packed one computes.

    Zeros around all kernels are left out, except at a side where the kernel would then begin behind the first pixel.

    Args:
        weights: Packed int8 weights (M, 4 C, k', k') with zero points 0.
        pads: The pads of the packed convolution: top, left, bottom, right.
    """
    many, channels, height, width = weights.shape
    parts = weights.reshape(many, BLOCK, BLOCK, channels // BLOCK**2, height, width)
    whole = parts.transpose(0, 3, 4, 1, 5, 2).reshape(many, -1, BLOCK * height, BLOCK * width)
    begins = [BLOCK * pad for pad in pads]
    for axis in (2, 3):
        used = np.flatnonzero(whole.any(axis=tuple({0, 1, 2, 3} - {axis})))
        first, last = (int(used[0]), int(used[-1])) if used.size else (0, 0)
        first = min(first, begins[axis - 2], BLOCK - 1)
        last = max(last, whole.shape[axis] - BLOCK)
        whole = whole.take(range(first, last + 1), axis)
        begins[axis - 2] -= first
    return whole, begins

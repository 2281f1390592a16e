"""First convolutions whose pixels are too thin for the integer kernel: four neighbours become one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from .graph import constant, remove, unread
from .qparams import Array
from .writer import Writer

THIN = 4  # channels up to which a pixel is worth packing
BLOCK = 2


class Taps(NamedTuple):
    """Where the taps of a kernel along one axis go when pixels are taken in blocks.

    Attributes:
        block: The block of each tap, from 0, (k,) int64.
        within: Its place in the block, (k,) int64.
        taps: Taps of the packed kernel.
        pads: Blocks of padding at the beginning and at the end.
    """

    block: Array
    within: Array
    taps: int
    pads: tuple[int, int]


def taps_of(kernel: int, begin: int, length: int, made: int) -> Taps | None:
    """Return the taps of a kernel of stride `BLOCK`; None where padding would have to be taken away.

    Output o reads pixel ``2 o + t - begin`` for tap t, that is place ``(t - begin) mod 2`` of block
    ``o + floor((t - begin) / 2)``.

    Args:
        kernel: Taps.
        begin: Pixels of padding at the beginning.
        length: Pixels along the axis, even.
        made: Outputs along the axis.
    """
    offsets = np.arange(kernel) - begin
    blocks, within = np.divmod(offsets, BLOCK)
    first = int(blocks[0])
    count = int(blocks[-1]) - first + 1
    end = made + count - 1 - length // BLOCK + first
    return Taps(blocks - first, within, count, (-first, end)) if first <= 0 <= end else None


def pack_pixels(node: ir.Node, values: Mapping[str, ir.Value], writer: Writer) -> bool:
    """Let a convolution of stride 2 over few channels read blocks of 2x2 pixels; tell whether it does.

    Before:  y = Conv(DequantizeLinear(x8 (N, C, H, W)), DequantizeLinear(W8 (M, C, k, k)), b), strides [2, 2]
    After:   y = Conv(DequantizeLinear(SpaceToDepth(x8) (N, 4C, H/2, W/2)), DequantizeLinear(W8' (M, 4C, k', k')), b),
             strides [1, 1]
    The sums are the same, of the same integers. The integer kernel gathers the channels of one pixel at a time: of
    three at a time it takes most of the run, and of twelve 0.5 to 0.7 times as long.
    Left alone: activations of int8, more than `THIN` channels, groups, dilations, other strides, odd or unknown sides.

    Args:
        node: A convolution between pairs.
        values: The float tensors of the model by name, with shapes.
        writer: Writes constants.
    """
    dq, weights = (value.producer() if value is not None else None for value in node.inputs[:2])
    made = _planned(node, dq, weights, values)
    if made is None or dq is None or weights is None:
        return False
    integers, zero = constant(weights.inputs[0]), constant(weights.inputs[2])
    graph, x8 = node.graph, dq.inputs[0]
    if integers is None or zero is None or x8 is None or not isinstance(graph, ir.Graph):
        return False
    name = str(node.name)
    array = _packed(integers.numpy(), zero.numpy(), made)
    packed = writer.initializer(graph, f"{integers.name}/packed", array)
    blocks = ir.node("SpaceToDepth", [x8], {"blocksize": BLOCK}, name=writer.name(f"{name}/blocks"))
    again = writer.like(dq, blocks.outputs[0], f"{dq.name}/packed")
    kernel = writer.like(weights, packed, f"{weights.name}/packed")
    blocks.outputs[0].name = writer.name(f"{name}/blocks_output")
    if x8.dtype is not None:
        blocks.outputs[0].dtype = x8.dtype
    graph.insert_before(node, [blocks, again, kernel])
    node.replace_input_with(0, again.outputs[0])
    node.replace_input_with(1, kernel.outputs[0])
    rows, columns = made
    node.attributes["strides"] = ir.AttrInt64s("strides", [1, 1])
    node.attributes["kernel_shape"] = ir.AttrInt64s("kernel_shape", [rows.taps, columns.taps])
    node.attributes["pads"] = ir.AttrInt64s("pads", [rows.pads[0], columns.pads[0], rows.pads[1], columns.pads[1]])
    node.attributes.pop("auto_pad", None)
    for old in (dq, weights):
        if unread(old):
            remove(old)
    return True


def _planned(
    node: ir.Node, dq: ir.Node | None, weights: ir.Node | None, values: Mapping[str, ir.Value]
) -> tuple[Taps, Taps] | None:
    """Return the taps along both axes; None for a convolution that is left alone."""
    if dq is None or weights is None or {dq.op_type, weights.op_type} != {"DequantizeLinear"}:
        return None
    origin = dq.inputs[0].producer() if dq.inputs[0] is not None else None
    source = origin.inputs[0] if origin is not None and origin.op_type == "QuantizeLinear" else None
    known = [values.get(str(value.name)) if value is not None else None for value in (source, node.outputs[0])]
    shapes = [value.shape if value is not None else None for value in known]
    integers, zero = constant(weights.inputs[0]), constant(dq.inputs[2]) if len(dq.inputs) > 2 else None
    usual = node.attributes.get_ints("strides", ()) == (BLOCK, BLOCK) and node.attributes.get_int("group", 1) == 1
    usual = usual and all(step == 1 for step in node.attributes.get_ints("dilations", (1, 1)))
    usual = usual and node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    # ONNX Runtime runs SpaceToDepth of int8, and then the convolution, in float.
    usual = usual and zero is not None and zero.dtype == ir.DataType.UINT8
    if not usual or integers is None or len(integers.shape) != 4 or None in shapes:
        return None
    before, after = ([axis for axis in tuple(shape or ())[-3:] if isinstance(axis, int)] for shape in shapes)
    pads = list(node.attributes.get_ints("pads", (0, 0, 0, 0)))
    kernel = [int(axis) for axis in integers.shape[2:]]  # type: ignore[arg-type]
    if len(before) < 3 or len(after) < 3 or before[0] > THIN or any(side % BLOCK for side in before[1:]):
        return None
    if any(side < BLOCK for side in before[1:]) or min(kernel) < BLOCK or before[0] != integers.shape[1]:
        return None
    found = [
        taps_of(k, begin, side, made) for k, begin, side, made in zip(kernel, pads, before[1:], after[1:], strict=False)
    ]
    return (found[0], found[1]) if found[0] is not None and found[1] is not None else None


def _packed(weights: Array, zero: Array, taps: tuple[Taps, Taps]) -> Array:
    """Return (M, C, k, k) weights as (M, 4 C, k', k'), in SpaceToDepth's order of channels; what is new is zero."""
    rows, columns = taps
    many, channels = weights.shape[:2]
    filling = np.broadcast_to(zero.reshape(-1, 1, 1, 1, 1, 1), (many, BLOCK, BLOCK, channels, rows.taps, columns.taps))
    packed = filling.astype(weights.dtype)
    for down, (block_row, row) in enumerate(zip(rows.block, rows.within, strict=True)):
        for across, (block_column, column) in enumerate(zip(columns.block, columns.within, strict=True)):
            packed[:, row, column, :, block_row, block_column] = weights[:, :, down, across]
    return packed.reshape(many, BLOCK * BLOCK * channels, rows.taps, columns.taps)

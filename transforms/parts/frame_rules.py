"""How operators compute on the frames of volumes: images, of which a volume has one for each place along its depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ..graphs.inference import Known
from ..graphs.queries import Shape, constant
from ..patterns.elementwise import CHANNELWISE, ELEMENTWISE
from ..patterns.linear import CONVOLUTIONS, convolves

VOLUME = 5  # axes: batch, channels, depth, rows, columns
CHANNELS, DEPTH = 1, 2
NORM = "InstanceNormalization"


@dataclass(frozen=True, slots=True)
class Volume:
    """The lengths of the axes of a volume.

    Attributes:
        batch: The number of volumes; None if it is free.
        channels: The channels.
        depth: The frames of one volume.
        rows: The rows of a frame.
        columns: The columns of a frame.
    """

    batch: int | None
    channels: int
    depth: int
    rows: int
    columns: int

    @property
    def frames(self) -> int | None:
        """The frames of all volumes; None if the batch is free."""
        return None if self.batch is None else self.batch * self.depth


def volume_of(known: Known, value: ir.Value | None) -> Volume | None:
    """Return the lengths of a volume; None if one of them, except the batch, is unknown or 0, or for other ranks."""
    lengths = known.lengths(value)
    if lengths is None or len(lengths) != VOLUME or not all(lengths[1:]) or lengths[0] == 0:
        return None
    batch, *others = lengths
    channels, depth, rows, columns = (length for length in others if length is not None)
    return Volume(batch, channels, depth, rows, columns)


@dataclass(frozen=True, slots=True)
class Taps:
    """The frames that one frame of a result is computed from.

    Attributes:
        pads: Frames of zeros in front of each volume and behind it.
        starts: The first frame of each tap, in the padded volume.
        stride: The step from a frame of a tap to the next.
        count: The frames of the result.
    """

    pads: tuple[int, int]
    starts: Sequence[int]
    stride: int
    count: int

    def changes(self, depth: int) -> bool:
        """Whether the taps are not a single one, of all frames of a volume of this depth."""
        return self.pads != (0, 0) or len(self.starts) != 1 or self.stride != 1 or self.count != depth


@dataclass(frozen=True, slots=True)
class Framed:
    """How a node computes on frames.

    Attributes:
        data: The indices of the inputs that are frames then.
        constants: New values of constant inputs, by index.
        attributes: New values of attributes.
        taps: The frames that a convolution joins along the channels of its input; None for other nodes.
        phases: The frames that the channels of one frame of the result hold, one behind the other.
        along: The attributes of a second pool, along the depth of images (N, C, D, H * W); empty for none.
    """

    data: Sequence[int] = (0,)
    constants: Mapping[int, NDArray[np.generic]] = field(default_factory=dict)
    attributes: Mapping[str, int | list[int]] = field(default_factory=dict)
    taps: Taps | None = None
    phases: int = 1
    along: Mapping[str, int | list[int]] = field(default_factory=dict)


Rule = Callable[[ir.Node, Known], "Framed | None"]


def window_of(node: ir.Node, name: str, default: int) -> list[int]:
    """Return an attribute of a window with a value for each axis, or twice as many for pads."""
    count = 6 if name == "pads" else 3
    return list(node.attributes.get_ints(name, (default,) * count))


def _convolved(node: ir.Node, known: Known) -> Framed | None:
    """A Conv, whose taps along the depth become channels."""
    volume, weights = volume_of(known, node.inputs[0]), constant(node.inputs[1])
    result = volume_of(known, node.outputs[0])
    if volume is None or result is None or weights is None or not _is_explicit(node):
        return None
    array = weights.numpy()
    outputs, inputs, depth, *window = array.shape
    if depth > 1 and node.attributes.get_int("group", 1) != 1:
        return None
    kept, taps = _taps(node, depth, volume.depth, result.depth)
    wide = array[:, :, kept].transpose(0, 2, 1, 3, 4).reshape(outputs, len(kept) * inputs, *window)
    return Framed(constants={1: wide}, attributes=_flat(node), taps=taps)


def _taps(node: ir.Node, window: int, depth: int, count: int) -> tuple[list[int], Taps]:
    """Return which taps along the depth a Conv needs, and their frames; those that read pads alone add nothing.

    Args:
        node: The Conv.
        window: The frames of its window.
        depth: The frames of a volume.
        count: The frames of a result.
    """
    pads, stride = window_of(node, "pads", 0), window_of(node, "strides", 1)[0]
    dilation = window_of(node, "dilations", 1)[0]
    frames, reach = range(pads[0], pads[0] + depth), stride * (count - 1) + 1
    starts = [tap * dilation for tap in range(window)]
    kept = [tap for tap, start in enumerate(starts) if any(f in frames for f in range(start, start + reach, stride))]
    kept = kept or [0]
    first, end = starts[kept[0]], starts[kept[-1]] + reach
    cut = min(first, pads[0])
    behind = max(0, end - frames.stop)
    return kept, Taps((pads[0] - cut, behind), [starts[tap] - cut for tap in kept], stride, count)


def _transposed(node: ir.Node, known: Known) -> Framed | None:
    """A ConvTranspose: the frames that one frame of the input adds to, for each place in a stride, are channels."""
    volume, weights = volume_of(known, node.inputs[0]), constant(node.inputs[1])
    result = volume_of(known, node.outputs[0])
    if not _is_explicit(node) or "output_shape" in node.attributes:
        return None
    if volume is None or result is None or weights is None:
        return None
    stride, bias = window_of(node, "strides", 1)[0], node.inputs[2] if len(node.inputs) > 2 else None
    if weights.shape[2] == 1 and _keeps_depth(node) and result.depth == volume.depth:
        return Framed(constants={1: weights.numpy()[:, :, 0]}, attributes=_flat(node))
    one_group = node.attributes.get_int("group", 1) == window_of(node, "dilations", 1)[0] == 1
    if not one_group or result.depth != stride * volume.depth or (bias is not None and constant(bias) is None):
        return None
    taps, wide = _phases(weights.numpy(), stride, window_of(node, "pads", 0)[0], volume.depth)
    constants = {1: wide}
    if (tensor := constant(bias)) is not None:
        constants[2] = np.tile(tensor.numpy(), stride)
    return Framed(constants=constants, attributes=_flat(node), taps=taps, phases=stride)


def _phases(weights: NDArray[np.generic], stride: int, front: int, depth: int) -> tuple[Taps, NDArray[np.generic]]:
    """Return the taps of a ConvTranspose along the depth, and its weights (taps * C, stride * M, P, Q) on frames.

    Frame ``stride * e + phase`` of the result is the sum over the frames ``e + offset`` of the input, each with the
    weights at ``phase + front - stride * offset``, where the window has them.

    Args:
        weights: The weights (C, M, K, P, Q).
        stride: The stride along the depth; the result has as many frames for each of the input.
        front: The frames that are cut off in front.
        depth: The frames of the input.
    """
    inputs, outputs, window, *plane = weights.shape
    places = {
        ((phase + front - k) // stride, phase): k
        for phase in range(stride)
        for k in range(window)
        if (phase + front - k) % stride == 0 and abs((phase + front - k) // stride) < depth
    }
    offsets = sorted({offset for offset, _ in places} | ({0} if not places else set()))
    before = max(0, -offsets[0])
    wide = np.zeros((len(offsets), inputs, stride, outputs, *plane), weights.dtype)
    for (offset, phase), k in places.items():
        wide[offsets.index(offset), :, phase] = weights[:, :, k]
    taps = Taps((before, max(0, offsets[-1])), [offset + before for offset in offsets], 1, depth)
    return taps, wide.reshape(len(offsets) * inputs, stride * outputs, *plane)


def _pooled(node: ir.Node, known: Known) -> Framed | None:
    """A pool: in each frame, then along the depth. A mean that leaves out pads is not a mean of means."""
    if node.attributes.get_int("ceil_mode", 0) or any(value.name for value in node.outputs[1:]):
        return None
    if not _is_explicit(node) or "kernel_shape" not in node.attributes:
        return None
    window, pads = window_of(node, "kernel_shape", 0)[0], window_of(node, "pads", 0)
    if window == 1 and _keeps_depth(node):
        return Framed(attributes=_flat(node))
    if node.op_type == "AveragePool" and any(pads) and not node.attributes.get_int("count_include_pad", 0):
        return None
    along: dict[str, int | list[int]] = {"kernel_shape": [window, 1], "pads": [pads[0], 0, pads[3], 0]}
    for name in ("strides", "dilations"):
        if name in node.attributes:
            along[name] = [window_of(node, name, 1)[0], 1]
    if "count_include_pad" in node.attributes:
        along["count_include_pad"] = node.attributes.get_int("count_include_pad", 0)
    return Framed(attributes=_flat(node), along=along)


def _is_explicit(node: ir.Node) -> bool:
    """Whether the pads of a window are given."""
    return node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"


def _keeps_depth(node: ir.Node) -> bool:
    """Whether a window moves from frame to frame."""
    pads = window_of(node, "pads", 0)
    return pads[0] == pads[3] == 0 and window_of(node, "strides", 1)[0] == 1


def _flat(node: ir.Node) -> dict[str, int | list[int]]:
    """Return the attributes of a window without the depth."""
    found: dict[str, int | list[int]] = {}
    for name in ("kernel_shape", "strides", "dilations", "output_padding"):
        if name in node.attributes:
            found[name] = list(node.attributes.get_ints(name, ()))[1:]
    if "pads" in node.attributes:
        pads = window_of(node, "pads", 0)
        found["pads"] = [*pads[1:3], *pads[4:]]
    return found


def _alike(node: ir.Node, known: Known) -> Framed | None:
    """A function of each element, perhaps of several tensors; constants lose the axis of the depth."""
    data: list[int] = []
    constants: dict[int, NDArray[np.generic]] = {}
    for index, value in enumerate(node.inputs):
        tensor = constant(value)
        if value is None or (node.op_type == "BatchNormalization" and index):
            continue
        if tensor is None:
            data.append(index)
        elif len(tensor.shape) > 1:
            lengths = (*[1] * (VOLUME - len(tensor.shape)), *tensor.shape.numpy())
            if len(lengths) > VOLUME or lengths[0] != 1 or lengths[DEPTH] != 1:
                return None
            constants[index] = tensor.numpy().reshape(1, lengths[CHANNELS], *lengths[DEPTH + 1 :])
    plain = len(node.outputs) == 1 and _repeat(node, data, known)
    return Framed(data, constants) if plain else None


def _repeat(node: ir.Node, data: Sequence[int], known: Known) -> bool:
    """Whether the inputs of a node repeat along the axes of a frame alone, or a single volume repeats one frame."""
    whole = _lengths(known, node.outputs[0])
    if not data or whole is None:
        return False
    if len(data) == 1:
        return _lengths(known, node.inputs[data[0]]) == whole or whole[0] is None
    for index in data:
        part = _lengths(known, node.inputs[index])
        if part is None or len(part) != VOLUME or part[0] is None or part[0] != whole[0]:
            return False
        if part[DEPTH] != whole[DEPTH] and (part[0] != 1 or part[DEPTH] != 1):
            return False
    return True


def _lengths(known: Known, value: ir.Value | None) -> Shape | None:
    """Return the lengths of the axes of a tensor: numbers, names, or None where unknown; None without a shape."""
    shape = known.shape(value)
    return None if shape is None else tuple(axis if isinstance(axis, int) else axis.value for axis in shape)


def _normalized(node: ir.Node, known: Known) -> Framed | None:
    """An InstanceNormalization, which computes on images whose rows are the frames of a volume."""
    return Framed() if all(constant(value) is not None for value in node.inputs[1:]) else None


def _joined(node: ir.Node, known: Known) -> Framed | None:
    """A Concat along the channels."""
    if node.attributes.get_int("axis", 0) % VOLUME != CHANNELS:
        return None
    shapes = [_lengths(known, value) for value in node.inputs]
    batches = {None if shape is None else shape[0] for shape in shapes}
    if len(batches) != 1 or None in batches or any(constant(value) is not None for value in node.inputs):
        return None
    return Framed(range(len(node.inputs)), attributes={"axis": CHANNELS})


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE | CHANNELWISE | {"Identity"}, _alike),
    **dict.fromkeys(("AveragePool", "MaxPool"), _pooled),
    "Conv": _convolved,
    "ConvTranspose": _transposed,
    "Concat": _joined,
    NORM: _normalized,
}
"""How an operator computes on frames, by its type; others read volumes."""


def framed(node: ir.Node, known: Known) -> Framed | None:
    """Return how a node computes on frames; None if it does not, or if shapes are unknown."""
    if node.domain or node.op_type not in RULES or volume_of(known, node.outputs[0]) is None:
        return None
    if node.op_type in CONVOLUTIONS and not convolves(node, VOLUME):
        return None
    found = RULES[node.op_type](node, known)
    if found is None or any(volume_of(known, node.inputs[index]) is None for index in found.data):
        return None
    return found


def bytes_of(volume: Volume, taps: Taps) -> int:
    """Return the bytes of the taps of one volume of floats, joined."""
    return 4 * len(taps.starts) * taps.count * prod((volume.channels, volume.rows, volume.columns))

"""Find a Resize of images to sizes that are known: the nearest pixels, or what is between up to four of them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..graphs.queries import Shape, constant, is_standard

POSITIONS = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
"""Where the pixels of the result may lie among those of the image, in the order of the native operator."""
NEAREST = ("", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
"""How a position becomes that of a pixel, in the order of the native operator; the first one is for no pixel."""
IMAGE, SPATIAL = 4, 2  # axes: (batch, channels, height, width); and those that change
SCALES, SIZES = 2, 3  # among the inputs


@dataclass(frozen=True, slots=True)
class Resizing:
    """How a Resize makes an image of another size.

    Attributes:
        positions: One of `POSITIONS`.
        nearest: One of `NEAREST`; empty if values are between those of pixels.
        scales: The ratios of the heights and of the widths; empty if the sizes are given.
        sizes: The height and the width of the result; empty if the scales are given.
        others: Other axes with the lengths that are given for them.
    """

    positions: str
    nearest: str = ""
    scales: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    others: tuple[tuple[int, int], ...] = ()

    def keeps_others(self, shape: Shape) -> bool:
        """Whether batch and channels of an image of this shape stay as they are: another length would resize them."""
        return all(shape[axis] == length for axis, length in self.others)


def find_resizing(node: ir.Node) -> Resizing | None:
    """Return what a Resize does; None if it does not resize height and width to constant sizes, or in another way."""
    get = node.attributes.get_string
    mode, positions = get("mode", "nearest"), get("coordinate_transformation_mode", "half_pixel")
    nearest = get("nearest_mode", NEAREST[1]) if mode == "nearest" else ""
    if not is_standard(node, "Resize") or mode not in ("nearest", "linear") or positions not in POSITIONS:
        return None
    unusual = any(node.attributes.get_int(name, 0) for name in ("antialias", "exclude_outside"))
    stretches = get("keep_aspect_ratio_policy", "stretch") == "stretch"
    scales, sizes = (_lengths(node, index) for index in (SCALES, SIZES))
    if unusual or not stretches or nearest not in NEAREST or (scales is None) == (sizes is None):
        return None
    lengths = scales if scales is not None else sizes or []
    spatial, others = [number for _, number in lengths[-SPATIAL:]], lengths[:-SPATIAL]
    if sizes is not None:
        kept = tuple((axis, int(length)) for axis, length in others)
        return Resizing(positions, nearest, sizes=tuple(map(int, spatial)), others=kept)
    return Resizing(positions, nearest, scales=tuple(spatial)) if all(scale == 1 for _, scale in others) else None


def interpolates(node: ir.Node) -> bool:
    """Return whether a node is a Resize of images whose values are between those of pixels."""
    found = find_resizing(node)
    return found is not None and not found.nearest


def _lengths(node: ir.Node, index: int) -> list[tuple[int, float]] | None:
    """Return axes and the values of a constant input for them, all above 0; height and width come last.

    Return None without the input, or for other axes.
    """
    tensor = constant(node.inputs[index]) if index < len(node.inputs) else None
    if tensor is None or not tensor.size:
        return None
    values, axes = tensor.numpy().reshape(-1), node.attributes.get_ints("axes", None)
    whole = list(range(IMAGE)) if axes is None else [axis % IMAGE for axis in axes]
    if len(values) != len(whole) or whole[-SPATIAL:] != [IMAGE - 2, IMAGE - 1] or not (values > 0).all():
        return None
    return list(zip(whole, values.tolist(), strict=True))

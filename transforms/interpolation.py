"""Find a Resize of images to sizes that are known, whose values are between those of up to four pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .graph import constant

POSITIONS = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
"""Where the pixels of the result may lie among those of the image, in the order of the native operator."""
IMAGE, SPATIAL = 4, 2  # axes: (batch, channels, height, width); and those that change
SCALES, SIZES = 2, 3  # among the inputs


@dataclass(frozen=True, slots=True)
class Interpolation:
    """How a Resize makes an image of another size.

    Attributes:
        positions: One of `POSITIONS`.
        scales: The ratios of the heights and of the widths; empty if the sizes are given.
        sizes: The height and the width of the result; empty if the scales are given.
    """

    positions: str
    scales: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()


def find_interpolation(node: ir.Node) -> Interpolation | None:
    """Return what a Resize does; None if it is no linear interpolation of height and width to constant sizes."""
    get = node.attributes.get_string
    plain = node.op_type == "Resize" and not node.domain and get("mode", "nearest") == "linear"
    positions = get("coordinate_transformation_mode", "half_pixel")
    unusual = any(node.attributes.get_int(name, 0) for name in ("antialias", "exclude_outside"))
    stretches = get("keep_aspect_ratio_policy", "stretch") == "stretch"
    if not plain or unusual or not stretches or positions not in POSITIONS:
        return None
    scales, sizes = (_spatial(node, index) for index in (SCALES, SIZES))
    if (scales is None) == (sizes is None):
        return None
    if scales is not None:
        return Interpolation(positions, scales=tuple(map(float, scales)))
    assert sizes is not None
    return Interpolation(positions, sizes=tuple(map(int, sizes)))


def _spatial(node: ir.Node, index: int) -> np.ndarray | None:
    """Return the values of a constant input for height and width, both above 0; None without it, or for other axes."""
    tensor = constant(node.inputs[index]) if index < len(node.inputs) else None
    if tensor is None or not tensor.size:
        return None
    values, axes = tensor.numpy().reshape(-1), node.attributes.get_ints("axes", None)
    whole = list(range(IMAGE)) if axes is None else [axis % IMAGE for axis in axes]
    if len(values) != len(whole) or whole[-SPATIAL:] != [IMAGE - 2, IMAGE - 1] or not (values > 0).all():
        return None
    others = values[:-SPATIAL]
    return values[-SPATIAL:] if index == SIZES or (others == 1).all() else None

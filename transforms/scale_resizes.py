"""Resize by constant scales, where a model computes the sizes that they give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .graphs.queries import computing_nodes, constant, graph_of, node_name
from .graphs.rewriter import add_initializer, names, remove_unread, unused_name
from .patterns.lengths import Length, Lengths
from .registry import Change, LeftAlone, transform

SCALES, SIZES = 2, 3  # among the inputs


@transform("scale_resizes", after=("fold_constants",))
def scale_resizes(model: ir.Model) -> Change:
    """Give a Resize constant scales in place of sizes that the model computes from shapes.

    Before:  y = Resize(x, , , Concat(Slice(Shape(x), [0:2]), Slice(Shape(z), [2:4])))
    After:   y = Resize(x, , [1, 1, 2, 2]),  x (N, 32, 9, 9), z (N, 8, 18, 18)
        PyTorch writes ``interpolate(x, size=z.shape[2:])`` so where the batch is free: in U-Nets, feature pyramids and
        heads of segmentation. The runtime computes the same scales from the sizes in each run. Native operators need
        constants, and shapes behind are known without running the model.
    Left alone: lengths that are free, in x or in the result, unless the axis keeps its length (``free-length``); other
        policies than stretch (``keeps-ratio``); the nearest pixels where no quotient of lengths is the scale
        (``moves-pixels``).
    """
    change, taken = Change(), names(model)
    resizes = [node for node in computing_nodes(model, "Resize") if _computed_sizes(node) is not None]
    lengths = Lengths(model) if resizes else None
    for node in resizes:
        try:
            if lengths is not None:
                _replace(node, _scales(node, lengths), taken)
            change.applied += 1
        except LeftAlone as reason:
            change.skip(str(reason))
    return change


def _computed_sizes(node: ir.Node) -> ir.Value | None:
    """Return the sizes of a Resize if a node computes them; None for constant ones and without sizes."""
    sizes = node.inputs[SIZES] if len(node.inputs) > SIZES else None
    return None if sizes is None or constant(sizes) is not None else sizes


def _scales(node: ir.Node, lengths: Lengths) -> list[np.float32]:
    """Return the scales of a Resize: one for each axis that it resizes.

    Raises:
        LeftAlone: A scale is unknown.
    """
    if node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise LeftAlone("keeps-ratio")
    x, wanted = node.inputs[0], lengths.of_target(_computed_sizes(node))
    shape = lengths.of(x)
    if shape is None or wanted is None:
        raise LeftAlone("free-length")
    axes: Sequence[int] = node.attributes.get_ints("axes", ()) or range(len(shape))
    if len(axes) != len(wanted):
        raise LeftAlone("free-length")
    nearest = node.attributes.get_string("mode", "nearest") == "nearest"
    return [
        np.float32(1) if lengths.is_axis(length, x, axis % len(shape)) else _scale(shape[axis], length, nearest=nearest)
        for axis, length in zip(axes, wanted, strict=True)
    ]


def _scale(before: int | str | None, after: Length, *, nearest: bool) -> np.float32:
    """Return the scale from one length to another, with which the runtime and ONNX find the other one.

    Both round ``length * scale`` down, the runtime in float32 and ONNX's shape inference in float64. Where the quotient
    gives less, the next float32 above it does not (all lengths up to 1500 to all up to 3000). This one moves
    interpolated values by their rounding, but may pick another nearest pixel.

    Args:
        before: The length in x.
        after: The length in the result.
        nearest: Whether the nearest pixels are picked.

    Raises:
        LeftAlone: A length is free, or another pixel may be picked.
    """
    if not isinstance(before, int) or not isinstance(after, int) or min(before, after) < 1:
        raise LeftAlone("free-length")
    scale = np.float32(np.float32(after) / np.float32(before))
    if int(scale * np.float32(before)) == int(float(scale) * before) == after:
        return scale
    if nearest:
        raise LeftAlone("moves-pixels")
    return np.float32(np.nextafter(scale, np.float32(np.inf)))


def _replace(node: ir.Node, scales: Sequence[np.float32], taken: set[str]) -> None:
    """Set the scales of a Resize, and remove its sizes."""
    sizes = _computed_sizes(node)
    name = unused_name(taken, f"{node_name(node)}/scales")
    node.replace_input_with(SCALES, add_initializer(graph_of(node), name, np.array(scales, np.float32)))
    node.resize_inputs(SIZES)
    if sizes is not None:
        remove_unread([sizes.producer()])

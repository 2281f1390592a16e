"""Find the transposed convolutions of images that a native operator computes."""

from __future__ import annotations

import onnx_ir as ir

from ..graphs.queries import DEEPEST, FARTHEST, has_plain_window
from .resizes import IMAGE

LONGEST = 256
"""The longest stride; ``kLongest`` in the native sources."""


def has_whole_strides(node: ir.Node, weights: ir.TensorProtocol | None) -> bool:
    """Return whether a ConvTranspose has one group, no dilations, and a result as long as a multiple of each stride.

    By axis, ``kernel - stride - pads + output_padding`` is such a multiple too: with a stride of 2, a kernel of 2, one
    of 4 with the usual padding, or one of 3 with an output padding of 1. Pads are smaller than the kernel, and results
    have at most `DEEPEST` products.

    Args:
        node: The ConvTranspose.
        weights: Its weights, (C, M, height, width); None if they are computed.
    """
    given = node.attributes
    if weights is None or len(weights.shape) != IMAGE or "output_shape" in given or not has_plain_window(node):
        return False
    if given.get_int("group", 1) != 1 or any(step != 1 for step in given.get_ints("dilations", ())):
        return False
    strides, pads = given.get_ints("strides", (1, 1)), given.get_ints("pads", (0, 0, 0, 0))
    longer = given.get_ints("output_padding", (0, 0))
    kernels = weights.shape.numpy()[2:]
    more = [kernels[i] - strides[i] - pads[i] - pads[i + 2] + longer[i] for i in range(2)]
    cut = any(max(pads[i], pads[i + 2]) >= kernels[i] for i in range(2))
    whole = not any(each % step for each, step in zip(more, strides, strict=True))
    near = not cut and max(longer) <= FARTHEST and max(strides) <= LONGEST
    return whole and near and weights.size // weights.shape.numpy()[1] <= DEEPEST

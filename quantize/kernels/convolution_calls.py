"""The calls of native operators for convolutions and transposed convolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ...calibration.model.session import Array
from ...transforms.graphs.queries import DEEPEST, constant, has_plain_window
from ...transforms.int8.packed_conv import BLOCK, Packing, packing_of, unpacked
from ...transforms.patterns.conv_transposes import has_whole_strides
from .call import Anchor, Call
from .site import IMAGE, WINDOW, Site, X, Y, are_constants, clipping, dequantized, operands, with_defaults

INT8 = np.iinfo(np.int8)
RESIDUAL = ("residual", "residual_scale", "residual_zero_point")
CURVE = ("curve", "grid")
CONVOLUTION = (*X, "w", "w_scale", "w_zero_point", *Y, "B", "table", *RESIDUAL, *CURVE)
WEIGHTS, BIAS = CONVOLUTION.index("w"), CONVOLUTION.index("B")
TRANSPOSED = CONVOLUTION[: CONVOLUTION.index("table") + 1]


def convolution_call(site: Site) -> Call | None:
    """Return the call for a convolution with the Relu or Clip that it absorbs; None if it has another form."""
    anchor, *absorbed = (site.nodes[name] for name in site.unit.nodes)
    pairs = _weighted(anchor)
    inputs = _convolution_inputs(pairs, site.quantize) if pairs else []
    if not pairs or not _is_supported(anchor, inputs):
        return None
    values = clipping(absorbed, site.quantize)
    attributes = with_defaults(anchor, WINDOW, group=anchor.attributes.get_int("group", 1))
    body = [*pairs, anchor, *absorbed, site.quantize]
    call = Call("Convolution", str(anchor.name), CONVOLUTION, inputs, body, attributes)
    whole = replace(call, anchor=Anchor(anchor), values=values)
    x, w, *_ = (operands(pair) for pair in pairs)
    packing, packed, zeros, channels = packing_of(x[0]), constant(w[0]), constant(w[2]), site.shapes[0][1]
    if packing is None or not packing.computes_blocks or packed is None or zeros is None:
        return whole
    if not isinstance(channels, int):
        return whole
    if packed.shape[1] != BLOCK**2 * channels:  # a SpaceToDepth of the user's model
        return whole
    zero = zeros.numpy().reshape(-1, 1, 1, 1)
    weights, pads = unpacked(packed.numpy() - zero, call.attributes["pads"].as_ints())
    return _over_pixels(call, packing, pads, {**values, "w": weights + zero})


def _weighted(node: ir.Node) -> list[ir.Node]:
    """Return the DequantizeLinear of each input of a convolution; none if another node computes an input."""
    pairs = [dequantized(value) for value in node.inputs if value is not None]
    known = [pair for pair in pairs if pair is not None]
    return known if len(known) == len(pairs) else []


def _convolution_inputs(pairs: Sequence[ir.Node], quantize_node: ir.Node) -> list[ir.Value | None]:
    """Return the inputs of a native convolution up to the bias."""
    x, w, *bias = (operands(pair) for pair in pairs)
    return [*x, *w, *operands(quantize_node)[1:], *(each[0] for each in bias)]


def _over_pixels(call: Call, packing: Packing, pads: Sequence[int], values: Mapping[str, Array]) -> Call:
    """Return the call of a packed convolution that reads pixels: blocks (`packed_conv`) gain nothing in the operator.

    The body computes the blocks, and reads the packed weights, which are one more constant of the function.
    """
    window = {**WINDOW, "pads": list(pads), "strides": [BLOCK, BLOCK]}
    attributes = with_defaults(packing.blocks, window, group=1)
    inputs = [packing.source, *call.inputs[1:WEIGHTS], None, *call.inputs[WEIGHTS + 1 :]]
    return replace(call, inputs=inputs, body=[*packing.nodes, *call.body], attributes=attributes, values=values)


def _is_supported(node: ir.Node, inputs: Sequence[ir.Value | None]) -> bool:
    """Return whether the operator computes a convolution with these inputs, its own up to the bias."""
    tensors = [constant(value) for value in inputs[1:]]
    if any(tensor is None for tensor in tensors) or not has_plain_window(node):
        return False
    by_name = {name: tensor for name, tensor in zip(CONVOLUTION[1:], tensors, strict=False) if tensor is not None}
    unsigned = by_name["x_zero_point"].dtype is by_name["y_zero_point"].dtype is ir.DataType.UINT8
    return unsigned and len(by_name["w"].shape) == IMAGE and fits_operator(by_name["w"], by_name["w_zero_point"])


def fits_operator(weights: ir.TensorProtocol, zeros: ir.TensorProtocol) -> bool:
    """Return whether the operator takes the weights of a convolution, (outputs, inputs / group, height, width).

    They must be int8, also without their zero points, one for all or one for each output, and int32 must hold all sums.
    """
    if weights.dtype is not ir.DataType.INT8 or math.prod(weights.shape.numpy()[1:]) > DEEPEST:
        return False
    zero = zeros.numpy()
    if not zero.any():
        return True
    shifted = weights.numpy().astype(np.int16) - zero.reshape(-1, *[1] * (len(weights.shape) - 1))
    return bool(shifted.min() >= INT8.min and shifted.max() <= INT8.max)


def transposed_call(site: Site) -> Call | None:
    """Return the call for a ConvTranspose with the Relu or Clip that it absorbs; None if it has another form."""
    anchor, *absorbed = (site.nodes[name] for name in site.unit.nodes)
    pairs = _weighted(anchor)
    if not pairs or not site.images or not _is_supported_transposed(anchor, pairs[1]):
        return None
    if not are_constants([*operands(pairs[0])[1:], *operands(site.quantize)[1:]]):
        return None
    inputs, values = _convolution_inputs(pairs, site.quantize), clipping(absorbed, site.quantize)
    attributes = with_defaults(anchor, {**WINDOW, "output_padding": [0, 0]}, group=1)
    body = [*pairs, anchor, *absorbed, site.quantize]
    return Call("ConvTranspose", str(anchor.name), TRANSPOSED, inputs, body, attributes, Anchor(anchor), values=values)


def _is_supported_transposed(node: ir.Node, weights: ir.Node) -> bool:
    """Return whether the operator computes a ConvTranspose with the weights of a DequantizeLinear."""
    stored, zeros = constant(weights.inputs[0]), constant(operands(weights)[2])
    if stored is None or zeros is None or stored.dtype is not ir.DataType.INT8 or zeros.numpy().any():
        return False
    return has_whole_strides(node, stored)

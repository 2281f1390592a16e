"""Put the quantization of images into functions, which the native operator ``Quantize`` computes."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ...transforms.graph import Shape, constant, sole_reader
from .calls import IMAGE, Call
from .wrap import TO_NHWC, put_calls

INPUTS = ("x", "y_scale", "y_zero_point")
CHANNELS = 3  # the most that the operator takes
LARGEST = 2.0**60  # the largest scale that it takes; the smallest one is its inverse


def wrap_pixels(model: ir.Model, shapes: Mapping[str, Shape]) -> int:
    """Put QuantizeLinears of images, and the Transposes behind them, into functions; return how many.

    Before:  y8 = Transpose(QuantizeLinear(x), perm 0 2 3 1)
    After:   y8 = ai.requant.Quantize(x), whose body is what was there
        Both compute the same. The operator passes once over the image, where two passed over it.
    Left alone: images of more than three channels, zero points that are not uint8, scales beyond 2^60, and results with
        other readers.

    Args:
        model: A model with native operators.
        shapes: Shapes of the float tensors by name.
    """
    calls = {}
    for node in model.graph:
        call = _call(node, shapes) if node.op_type == "QuantizeLinear" else None
        if call is not None:
            calls[call.body[-1].outputs[0]] = call
    return put_calls(model, calls)


def _call(node: ir.Node, shapes: Mapping[str, Shape]) -> Call | None:
    """Return the call of the operator for a QuantizeLinear; None if it has another form."""
    turn, x, parameters = sole_reader(node.outputs[0]), node.inputs[0], [constant(value) for value in node.inputs[1:]]
    if turn is None or turn.op_type != "Transpose" or tuple(turn.attributes.get_ints("perm", ())) != TO_NHWC:
        return None
    shape = shapes.get(str(x.name), ()) if x is not None else ()
    if len(shape) != IMAGE or shape[1] not in range(1, CHANNELS + 1):
        return None
    types = [tensor.dtype if tensor is not None and tensor.size == 1 else None for tensor in parameters]
    scale = parameters[0]
    if scale is None or types != [ir.DataType.FLOAT, ir.DataType.UINT8]:
        return None
    if not 1 / LARGEST < float(scale.numpy().item()) < LARGEST:
        return None
    return Call(
        "Quantize",
        str(node.name),
        INPUTS,
        list(node.inputs),
        [node, turn],
        dtype=ir.DataType.FLOAT,
        made=ir.DataType.UINT8,
    )

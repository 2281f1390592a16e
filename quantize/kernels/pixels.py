"""Put the quantization of images into functions, which the native operator ``Quantize`` computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import onnx_ir as ir

from ...transforms.graphs.queries import Shape, constant, sole_reader
from .call import Call, Tensors
from .functions import TO_NCHW, TO_NHWC
from .put_calls import put_calls
from .site import IMAGE

INPUTS = ("x", "y_scale", "y_zero_point")
CHANNELS = 3  # the most that the operator takes
LARGEST = 2.0**60  # the largest scale that it takes; the smallest one is its inverse


def wrap_pixels(model: ir.Model, shapes: Mapping[str, Shape]) -> int:
    """Put QuantizeLinears of images, and the Transposes behind them, into functions; return how many.

    Before:  y8 = Transpose(QuantizeLinear(x), perm 0 2 3 1)
    After:   y8 = ai.requant.Quantize(x), whose body is what was there
        Both compute the same. The operator passes once over the image, where two passed over it.
    Left alone: images of more than three channels, zero points that are not uint8, scales beyond 2^60, results with
        other readers, and images that come in NHWC: the runtime removes the Transpose in front of such a QuantizeLinear
        together with the one behind it.

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
    if not _is_turn(turn, TO_NHWC) or x is None or _is_turn(x.producer(), TO_NCHW):
        return None
    shape = shapes.get(str(x.name), ())
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
        tensors=Tensors(dtype=ir.DataType.FLOAT, made=ir.DataType.UINT8),
    )


def _is_turn(node: ir.Node | None, order: tuple[int, ...]) -> TypeGuard[ir.Node]:
    """Return whether a node is a Transpose to an order of axes."""
    return node is not None and node.op_type == "Transpose" and tuple(node.attributes.get_ints("perm", ())) == order

"""Put normalizations into functions, which the native operator ``Normalization`` computes."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ...transforms.graph import Shape, constant
from .call import FLOATS, Call
from .wrap import put_calls

INPUTS = ("x", "scale", "B")
CENTRED: Mapping[str, int] = {"LayerNormalization": 1, "RMSNormalization": 0}
EPSILON = 1e-5  # of both operators, if they do not say


def wrap_normalizations(model: ir.Model, shapes: Mapping[str, Shape]) -> int:
    """Put normalizations of the last axis into functions; return how many.

    Before:  y = LayerNormalization(x, scale, B)
    After:   y = ai.requant.Normalization(x, scale, B), whose body is what was there
        Both compute in float. The operator takes 0.6 to 0.8 of the time, and a sixth of the time of the kernel into
        which the runtime joins an Add and a LayerNormalization.
    Left alone: normalizations of several axes, with more results than one, of other types than float32, and in bodies
        of control flow; SimplifiedLayerNormalization, because a function with it ends ONNX Runtime 1.32 with a fault.

    Args:
        model: A model.
        shapes: Shapes of the float tensors by name.
    """
    calls = {}
    for node in model.graph:
        call = _call(node, shapes)
        if call is not None:
            calls[node.outputs[0]] = call
    return put_calls(model, calls)


def _call(node: ir.Node, shapes: Mapping[str, Shape]) -> Call | None:
    """Return the call of the operator for a normalization; None for other nodes."""
    if node.op_type not in CENTRED or node.domain or any(value.name for value in node.outputs[1:]):
        return None
    x, *parameters = node.inputs
    tensors = [constant(value) for value in parameters if value is not None]
    shape = shapes.get(str(node.outputs[0].name), ())  # x may come from a DequantizeLinear
    rank = len(shape)
    single = rank > 0 and node.attributes.get_int("axis", -1) in (-1, rank - 1)
    if not single or x is None or any(each is None or each.dtype is not ir.DataType.FLOAT for each in tensors):
        return None
    lengths = {each.size for each in tensors if each is not None}
    if len(lengths) != 1 or lengths != {shape[-1]}:
        return None
    attributes = {
        "epsilon": ir.AttrFloat32("epsilon", node.attributes.get_float("epsilon", EPSILON)),
        "centred": ir.AttrInt64("centred", CENTRED[node.op_type]),
    }
    name = str(node.name)
    return Call("Normalization", name, INPUTS, list(node.inputs), [node], attributes, tensors=FLOATS)

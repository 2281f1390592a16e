"""Put normalizations into functions, which the native operator ``Normalization`` computes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ... import NATIVE_DOMAIN
from ...transforms.graphs.queries import Shape, constant
from ...transforms.graphs.rewriter import add_initializer, discard
from ...transforms.patterns.norms_in_parts import FoundNormalization, find_normalization
from .call import FLOATS, Call
from .put_calls import put_calls

INPUTS = ("x", "scale", "B")
CENTRED: Mapping[str, int] = {"LayerNormalization": 1, "RMSNormalization": 0}
EPSILON = 1e-5  # of both operators, if they do not say


def wrap_normalizations(model: ir.Model, shapes: Mapping[str, Shape]) -> int:
    """Put normalizations of the last axis into functions; return how many.

    Before:  y = LayerNormalization(x, scale, B)
    After:   y = ai.requant.Normalization(x, scale, B), whose body is what was there
        Both compute in float. The operator takes 0.6 to 0.8 of the time, and a sixth of the time of the kernel into
        which the runtime joins an Add and a LayerNormalization.
    Before:  y = x * (1 / sqrt(mean(x ** 2) + epsilon)) * scale, or x / sqrt(...) * scale, in several operators
    After:   y = ai.requant.Normalization(x, scale), centred 0, whose body is what was there; scale is 1 where none is
        The runtime joins only some of these spellings into one kernel.
    Before:  d = x - mean(x); y = d / sqrt(mean(d ** 2) + epsilon) * scale + B, in several operators
    After:   y = ai.requant.Normalization(x, scale, B), whose body is what was there
        Operator sets before 17 have no LayerNormalization.
    Left alone: normalizations of several axes, with more results than one, of other types than float32, and in bodies
        of control flow; SimplifiedLayerNormalization, because a function with it ends ONNX Runtime 1.32 with a fault.

    Args:
        model: A model.
        shapes: Shapes of the float tensors by name.
    """
    calls = {}
    for node in model.graph:
        found = find_normalization(node, shapes)
        call = _call(node, shapes) if found is None else _call_of_several(model.graph, found, shapes)
        if call is not None:
            calls[call.body[-1].outputs[0]] = call
    count = put_calls(model, calls)
    discard(*(call.inputs[1] for call in calls.values()))  # of those for which no function was left
    return count


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
    attributes = _attributes(node.attributes.get_float("epsilon", EPSILON), CENTRED[node.op_type])
    name = str(node.name)
    return Call("Normalization", name, INPUTS, list(node.inputs), [node], attributes, tensors=FLOATS)


def _call_of_several(graph: ir.Graph, found: FoundNormalization, shapes: Mapping[str, Shape]) -> Call:
    """Return the call of the operator for a normalization in several operators.

    Args:
        graph: The graph of the normalization; where it has no gain, the graph gets one of ones, one for each length.
        found: The normalization.
        shapes: Shapes of the float tensors by name.
    """
    last, gain = found.nodes[-1], found.gain
    if gain is None:
        length = shapes[str(last.outputs[0].name)][-1]
        assert isinstance(length, int)  # otherwise it is not found
        name = f"{NATIVE_DOMAIN}/ones/{length}"
        gain = graph.initializers.get(name) or add_initializer(graph, name, np.ones(length, np.float32))
    inputs = [found.x, gain, *([] if found.shift is None else [found.shift])]
    attributes = _attributes(found.epsilon, int(found.centred))
    return Call("Normalization", str(last.name), INPUTS, inputs, found.nodes, attributes, tensors=FLOATS)


def _attributes(epsilon: float, centred: int) -> dict[str, ir.Attr]:
    """Return the attributes of the operator."""
    return {"epsilon": ir.AttrFloat32("epsilon", epsilon), "centred": ir.AttrInt64("centred", centred)}

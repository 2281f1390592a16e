"""Remove a quantization."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.queries import computing_nodes, constant, graph_of, is_standard, producer_of
from .graphs.rewriter import (
    add_initializer,
    can_replace,
    discard,
    names,
    remove,
    remove_if_unread,
    replace,
    unused_name,
)
from .int8.existing import is_linear, zero_point_of
from .int8.qlinear import equal_parameters
from .int8.qparams import QParams, dequantize
from .registry import Change, LeftAlone, transform


@transform("remove_qdq", changes_values=True)
def remove_qdq(model: ir.Model) -> Change:
    """Remove pairs of QuantizeLinear and DequantizeLinear, and turn dequantized constants into float constants.

    Before:  y = Conv(DequantizeLinear(QuantizeLinear(x, s, z), s, z), DequantizeLinear(W8, sw, 0))
    After:   y = Conv(x, W),  W = W8 * sw in float32
        Activations are no longer rounded; weights keep their rounded values. A DynamicQuantizeLinear counts as a
        QuantizeLinear. `qoperator_to_qdq` rewrites fused integer operators into such pairs first.
    Left alone: a DequantizeLinear without a QuantizeLinear before it (``not-a-pair``) or with other parameters
        (``other-parameters``); constants that are quantized in blocks (``blocks``), with computed scales (``dynamic``)
        or with scales of another type than float32 (``not-float32``); a pair between an input and an output of a graph,
        because both names must stay (``graph-output``).
    """
    change, taken = Change(), names(model)
    for node in computing_nodes(model):
        if not is_linear(node, "DequantizeLinear"):
            continue
        try:
            source = _source(node, taken)
        except LeftAlone as left:
            change.skip(str(left))
            continue
        quantize = producer_of(node.inputs[0])
        inputs = tuple(node.inputs)
        replace(node.outputs[0], source)
        remove(node)
        if quantize is not None and quantize.op_type != "Constant":
            parameters = tuple(quantize.inputs[1:])
            inputs += parameters if remove_if_unread(quantize) else ()
        discard(*inputs)
        change.applied += 1
    return change


def _source(node: ir.Node, taken: set[str]) -> ir.Value:
    """Return the float tensor that equals the result of a DequantizeLinear up to rounding.

    Raises:
        LeftAlone: There is no such tensor.
    """
    result, data = node.outputs[0], node.inputs[0]
    quantize = producer_of(data)
    if data is None or "block_size" in node.attributes:
        raise LeftAlone("blocks")
    tensor = constant(data)
    if tensor is not None:
        if result.is_graph_output():
            raise LeftAlone("graph-output")
        scale, zero = constant(node.inputs[1]), zero_point_of(node)
        if scale is None or zero is None:
            raise LeftAlone("dynamic")
        if scale.dtype is not ir.DataType.FLOAT:
            raise LeftAlone("not-float32")
        axis = node.attributes.get_int("axis", 1) if len(scale.shape) else None
        array = dequantize(tensor.numpy(), QParams(scale=scale.numpy(), zero_point=zero, axis=axis))
        return add_initializer(graph_of(node), unused_name(taken, f"{result.name}/float"), array)
    if quantize is None or quantize.graph is not node.graph:
        raise LeftAlone("not-a-pair")
    if is_standard(quantize, "DynamicQuantizeLinear"):
        same = list(node.inputs[1:3]) == list(quantize.outputs[1:3])
    elif is_linear(quantize, "QuantizeLinear"):
        same = equal_parameters(quantize.inputs[1:], node.inputs[1:])
        same = same and quantize.attributes.get_int("axis", 1) == node.attributes.get_int("axis", 1)
    else:
        raise LeftAlone("not-a-pair")
    source = quantize.inputs[0]
    if not same or source is None:
        raise LeftAlone("other-parameters")
    if not can_replace(result, source):
        raise LeftAlone("graph-output")
    return source

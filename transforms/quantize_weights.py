"""Store weights as int8."""

from __future__ import annotations

import onnx_ir as ir

from .graph import add_initializer, constant, drop_unused, fresh_name
from .ops import OPS
from .qparams import quantize, symmetric_s8
from .registry import Change, transform


@transform("quantize_weights", after=("fold_batch_norms",), changes_values=True)
def quantize_weights(model: ir.Model, *, minimum_size: int = 1024) -> Change:
    """Store large float weights as int8 with a DequantizeLinear in front of their readers.

    Before:  y = Conv(x, W)                        W float32 (M, C, *spatial)
    After:   y = Conv(x, DequantizeLinear(W8, scale, 0, axis=0)),  scale (M,) = max|W[m]| / 127
    The weights of Conv, Gemm and MatMul get one scale per output channel, all others one scale.
    Left alone: constants of fewer than ``minimum_size`` elements (``small``) or of another type than float32
    (``not-float32``), and initializers that a caller may override.
    """
    change = Change()
    for weight in list(model.graph.initializers.values()):
        tensor = constant(weight)
        if tensor is None or not weight.uses() or _is_parameter(weight):
            continue
        if tensor.dtype is not ir.DataType.FLOAT:
            change.skip("not-float32")
        elif tensor.size < minimum_size:
            change.skip("small")
        else:
            _store(model, weight, tensor)
            change.applied += 1
    return change


def _is_parameter(value: ir.Value) -> bool:
    """Whether `value` is data, scale or zero point of a quantization that is there already."""
    return all(use.node.op_type in ("QuantizeLinear", "DequantizeLinear") for use in value.uses())


def _store(model: ir.Model, weight: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Replace `weight` by an int8 initializer and a DequantizeLinear."""
    graph, array = model.graph, tensor.numpy()
    params = symmetric_s8(array, _channel_axis(weight, array.ndim))
    inputs = [
        add_initializer(graph, fresh_name(model, f"{weight.name}/{part}"), values)
        for part, values in (
            ("int8", quantize(array, params)),
            ("scale", params.scale),
            ("zero_point", params.zero_point),
        )
    ]
    attributes = {} if params.axis is None else {"axis": params.axis}
    dequantize = ir.node("DequantizeLinear", inputs, attributes, name=f"{weight.name}/dequantize")
    output = dequantize.outputs[0]
    output.name, output.type = fresh_name(model, f"{weight.name}/dequantized"), ir.TensorType(ir.DataType.FLOAT)
    output.shape = ir.Shape(array.shape)
    graph.insert_before(graph[0], [dequantize])
    weight.replace_all_uses_with(output, replace_graph_outputs=True)
    drop_unused(graph, (weight,))


def _channel_axis(weight: ir.Value, rank: int) -> int | None:
    """Return the output-channel axis that all readers of a weight agree on, None when there is none."""
    axes = set()
    for use in weight.uses():
        row = OPS.get(use.node.op_type)
        known = row is not None and row.weight == use.idx and not use.node.domain
        axes.add(row.channel_axis(use.node) % rank if known and row is not None and rank > 1 else None)
    return axes.pop() if len(axes) == 1 else None

"""Store float weights as int8."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .graphs.queries import QDQ, constant, release
from .graphs.rewriter import add_initializer, drop_unused, names, replace, unused_name
from .int8.ops import OPS, Op
from .int8.qparams import quantize, symmetric_s8
from .parts.functions import DOMAIN
from .registry import Change, transform


@transform("quantize_weights", after=("fold_batch_norms",), changes_values=True)
def quantize_weights(model: ir.Model, *, minimum_size: int = 1024) -> Change:
    """Store large float weights as int8, followed by a DequantizeLinear.

    Before:  y = Conv(x, W)                        W float32 (M, C, *spatial)
    After:   y = Conv(x, DequantizeLinear(W8, scale, 0, axis=0)),  scale (M,) = max|W[m]| / 127
    The weights of Conv, Gemm and MatMul get one scale per output channel. Batched matrices and all other constants get
    one scale.
    Left alone: small constants (``small``), constants of another type than float32 (``not-float32``) or with values
        that are not finite (``not-finite``), the biases of Conv, Gemm and MatMul (``bias``), the scales of a Resize
        (``resize``), initializers that a caller may override,
        and models of an opset without per-channel scales (``opset-below-13``: run `convert_opset` first).

    Options:
        minimum_size: A constant with fewer elements stays float.
    """
    change = Change()
    old, taken = model.opset_imports.get("", 0) < 13, names(model)
    for weight in list(model.graph.initializers.values()):
        tensor = constant(weight)
        if tensor is None or not weight.uses() or _is_parameter(weight):
            continue
        if tensor.dtype is not ir.DataType.FLOAT:
            change.skip("not-float32")
        elif tensor.size < minimum_size:
            change.skip("small")
        elif any((row := _row(use.node)) is not None and row.bias == use.idx for use in weight.uses()):
            change.skip("bias")
        elif any(use.node.op_type == "Resize" and not use.node.domain for use in weight.uses()):
            change.skip("resize")
        elif old:
            change.skip("opset-below-13")
        elif not np.isfinite(tensor.numpy()).all():
            change.skip("not-finite")
        else:
            _store(model.graph, weight, tensor, taken)
            change.applied += 1
    return change


def _is_parameter(value: ir.Value) -> bool:
    """Whether `value` is the data, a scale, a bias or a bound of an existing quantization."""
    roles = [(use.node.op_type in QDQ, use) for use in value.uses()]
    return all(linear for linear, _ in roles) or any(
        use.node.domain == DOMAIN or (linear and use.idx > 0) for linear, use in roles
    )


def _row(node: ir.Node) -> Op | None:
    """Return the operator row of a standard operator; None for other domains."""
    return None if node.domain else OPS.get(node.op_type)


def _store(graph: ir.Graph, weight: ir.Value, tensor: ir.TensorProtocol, taken: set[str]) -> None:
    """Replace `weight` by an int8 initializer and a DequantizeLinear; their names are added to `taken`."""
    array = tensor.numpy()
    release(tensor)
    params = symmetric_s8(array, _channel_axis(weight, array.ndim))
    inputs = [
        add_initializer(graph, unused_name(taken, f"{weight.name}/{part}"), values)
        for part, values in (
            ("int8", quantize(array, params)),
            ("scale", params.scale),
            ("zero_point", params.zero_point),
        )
    ]
    attributes = {} if params.axis is None else {"axis": params.axis}
    dequantize = ir.node("DequantizeLinear", inputs, attributes, name=unused_name(taken, f"{weight.name}/dequantize"))
    output = dequantize.outputs[0]
    output.name, output.type = unused_name(taken, f"{weight.name}/dequantized"), ir.TensorType(ir.DataType.FLOAT)
    output.shape = ir.Shape(array.shape)
    graph.insert_before(graph[0], [dequantize])
    replace(weight, output)
    drop_unused(graph, (weight,))


def _channel_axis(weight: ir.Value, rank: int) -> int | None:
    """Return the output-channel axis if it is the same for all readers of a weight, else None.

    Batched matrices get one scale: the integer product into which ONNX Runtime fuses them fails with several scales.
    """
    axes = set()
    for use in weight.uses():
        row = _row(use.node)
        known = row is not None and row.weight == use.idx and rank > 1 and (use.node.op_type != "MatMul" or rank == 2)
        axes.add(row.channel_axis(use.node) % rank if known and row is not None else None)
    return axes.pop() if len(axes) == 1 else None

"""The fused operators: what QLinearConv, QLinearMatMul and QGemm are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .graph import add_initializer, constant, fresh_name
from .ops import MS
from .qparams import Array, QParams, dequantize, fit_bias, quantize, quantize_bias

Quantized = tuple[ir.Value, ir.Value, ir.Value]  # integer tensor, scale, zero point


def equal_parameters(one: Sequence[ir.Value | None], other: Sequence[ir.Value | None]) -> bool:
    """Whether two scales, or a scale and zero point each, are the same values or equal constants of one type."""
    return len(one) == len(other) and all(
        a is b or _equal(constant(a), constant(b)) for a, b in zip(one, other, strict=True)
    )


def _equal(a: ir.TensorProtocol | None, b: ir.TensorProtocol | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a.numpy(), b.numpy())


@dataclass(frozen=True, slots=True)
class Weights:
    """Constant int8 weights with their bias.

    Attributes:
        values: int8, in the layout of the operator: (M, C/group, *kernel) or (K, N).
        scale: float32, shape () or (M,) or (N,).
        bias: float32 (M,) or (N,); None for none.
    """

    values: Array
    scale: Array
    bias: Array | None


def product_node(
    model: ir.Model, like: ir.Node, x: Quantized, weights: Weights, y: tuple[ir.Value, ir.Value], name: str
) -> ir.Node:
    """Make the fused node of an integer product: QLinearConv, QGemm (with a bias) or QLinearMatMul.

    The bias becomes int32 of scale ``x_scale * w_scale``, rounded half to even. Where it would not fit, the weights
    of that channel are stored again on a coarser grid (`qparams.fit_bias`).

    Args:
        model: Where constants are added.
        like: A ConvInteger, whose attributes are kept; or a MatMulInteger, of two dimensions where there is a bias.
        x: The uint8 activation; its scale is an initializer.
        weights: int8 weights.
        y: Scale and zero point of the result, initializers.
        name: What the node and its constants are called after.
    """
    convolution = like.op_type == "ConvInteger"
    x_scale = float(x[1].const_value.numpy())  # type: ignore[union-attr]
    values, scale, bias = _fitted(weights, x_scale, axis=0 if convolution else 1)

    def add(part: str, array: Array) -> ir.Value:
        return add_initializer(model.graph, fresh_name(model, f"{name}/{part}"), array)

    w = [add("w", values), add("w_scale", scale), add("w_zero_point", np.zeros(scale.shape, np.int8))]
    b = None if bias is None else add("bias", bias)
    if convolution:
        return ir.node("QLinearConv", [*x, *w, *y, b], dict(like.attributes), name=name)
    if bias is None:
        return ir.node("QLinearMatMul", [*x, *w, *y], name=name)
    model.opset_imports[MS] = 1
    return ir.node("QGemm", [*x, *w, b, *y], domain=MS, name=name)


def _fitted(weights: Weights, x_scale: float, axis: int) -> tuple[Array, Array, Array | None]:
    """Return weights, scales and int32 bias such that the bias fits."""
    if weights.bias is None:
        return weights.values, weights.scale, None
    channel = axis if weights.scale.ndim else None
    stored = QParams(scale=weights.scale, zero_point=np.zeros(weights.scale.shape, np.int8), axis=channel)
    fitted = fit_bias(stored, weights.bias, x_scale)
    values = weights.values
    if not np.array_equal(fitted.scale, stored.scale):
        values = quantize(dequantize(values, stored), fitted)
    return values, fitted.scale, quantize(weights.bias, quantize_bias(weights.bias, x_scale, fitted.scale))

"""Build the fused integer operators QLinearConv, QLinearMatMul and QGemm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graphs.queries import MS, constant
from ..graphs.rewriter import add_initializer, unused_name
from .qparams import Array, QParams, dequantize, fit_bias, quantize, quantize_bias

Quantized = tuple[ir.Value, ir.Value, ir.Value]  # integer tensor, scale, zero point


def equal_parameters(one: Sequence[ir.Value | None], other: Sequence[ir.Value | None]) -> bool:
    """Whether two lists of parameters (scale, zero point) are the same tensors, or equal constants of equal type."""
    return len(one) == len(other) and all(
        a is b or _equal(constant(a), constant(b)) for a, b in zip(one, other, strict=True)
    )


def _equal(a: ir.TensorProtocol | None, b: ir.TensorProtocol | None) -> bool:
    """Whether two constants have the same type and values."""
    return a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a.numpy(), b.numpy())


@dataclass(frozen=True, slots=True)
class Weights:
    """Constant int8 weights with their bias.

    Attributes:
        values: int8, in the layout of the operator: (M, C/group, *kernel) or (K, N).
        scale: float32, shape () or (M,) or (N,).
        bias: float32 (M,) or (N,); None without a bias.
    """

    values: Array
    scale: Array
    bias: Array | None


def product_node(
    model: ir.Model,
    like: ir.Node,
    x: Quantized,
    weights: Weights,
    y: tuple[ir.Value, ir.Value],
    named: tuple[str, set[str]],
) -> ir.Node:
    """Return the fused node of an integer product: QLinearConv, QGemm (with a bias) or QLinearMatMul.

    The bias becomes int32 with scale ``x_scale * w_scale``, rounded half to even. If it does not fit into int32, the
    weights of that channel are requantized with a larger scale (`qparams.fit_bias`).

    Args:
        model: The model to which constants are added.
        like: A ConvInteger, whose attributes are copied; or a MatMulInteger, of two dimensions if there is a bias.
        x: The uint8 activation; its scale is an initializer.
        weights: int8 weights.
        y: The scale and zero point of the result, initializers.
        named: The name of the node, which is the stem of the names of its constants; and the names in the model, to
            which these are added.
    """
    convolution, (name, taken) = like.op_type == "ConvInteger", named
    x_scale = float(x[1].const_value.numpy())  # type: ignore[union-attr]
    values, scale, bias = _fitted(weights, x_scale, axis=0 if convolution else 1)

    def add(part: str, array: Array) -> ir.Value:
        return add_initializer(model.graph, unused_name(taken, f"{name}/{part}"), array)

    w = [add("w", values), add("w_scale", scale), add("w_zero_point", np.zeros(scale.shape, np.int8))]
    b = None if bias is None else add("bias", bias)
    if convolution:
        return ir.node("QLinearConv", [*x, *w, *y, b], dict(like.attributes), name=name)
    if bias is None:
        return ir.node("QLinearMatMul", [*x, *w, *y], name=name)
    model.opset_imports[MS] = 1
    return ir.node("QGemm", [*x, *w, b, *y], domain=MS, name=name)


def _fitted(weights: Weights, x_scale: float, axis: int) -> tuple[Array, Array, Array | None]:
    """Return int8 weights, scales and an int32 bias that fits."""
    if weights.bias is None:
        return weights.values, weights.scale, None
    channel = axis if weights.scale.ndim else None
    stored = QParams(scale=weights.scale, zero_point=np.zeros(weights.scale.shape, np.int8), axis=channel)
    fitted = fit_bias(stored, weights.bias, x_scale)
    values = weights.values
    if not np.array_equal(fitted.scale, stored.scale):
        values = quantize(dequantize(values, stored), fitted)
    return values, fitted.scale, quantize(weights.bias, quantize_bias(weights.bias, x_scale, fitted.scale))

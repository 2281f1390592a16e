"""Fuse an integer product and the requantization of its result into an operator that has a VNNI kernel."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .graphs.queries import constant, sole_reader
from .graphs.rewriter import add_initializer, names, remove, replace_node, unused_name
from .int8.existing import drop_round_trips
from .int8.qlinear import Weights, product_node
from .int8.qparams import Array, QParams, asymmetric_u8
from .parts.functions import DOMAIN, drop_functions
from .registry import Change, transform


@transform(
    "fuse_quantized_conv_and_requantize",
    after=("freeze_requantization_ranges", "freeze_min", "freeze_max"),
    changes_values=True,
)
def fuse_quantized_conv_and_requantize(model: ir.Model) -> Change:
    """Fuse a ConvInteger with its only reader, a Requantize with a frozen range.

    Before:  q = Requantize(ConvInteger(x, W8, xz), xs, ws, b, <frozen_min>, <frozen_max>)
    After:   q = QLinearConv(x, xs, xz, W8, ws, 0, ys, yz, b32),   b32 = round(b / (xs * ws)), half to even
    A Quantize with a frozen range becomes a QuantizeLinear. A DequantizeLinear and QuantizeLinear with equal parameters
    are removed.
    Left alone: ranges computed at run time (``dynamic-range``); a product with other readers (``shared``).
    """
    return _fuse(model, "ConvInteger")


@transform(
    "fuse_quantized_matmul_and_requantize",
    after=("freeze_requantization_ranges", "freeze_min", "freeze_max"),
    changes_values=True,
)
def fuse_quantized_matmul_and_requantize(model: ir.Model) -> Change:
    """Fuse a MatMulInteger with its only reader, a Requantize with a frozen range.

    Before:  q = Requantize(MatMulInteger(x, W8, xz), xs, ws, b, <frozen_min>, <frozen_max>)
    After:   q = QGemm(x, xs, xz, W8, ws, 0, b32, ys, yz) with a bias,
             q = QLinearMatMul(x, xs, xz, W8, ws, 0, ys, yz) without
    A Quantize with a frozen range becomes a QuantizeLinear. A DequantizeLinear and QuantizeLinear with equal parameters
    are removed.
    Left alone: ranges computed at run time (``dynamic-range``); a product with other readers (``shared``); a bias of a
    product with more than two dimensions (``batched-bias``).
    """
    return _fuse(model, "MatMulInteger")


def _fuse(model: ir.Model, op: str) -> Change:
    """Fuse the products of type `op` in execution order: the scale of a result is the next product's input scale."""
    change = Change()
    taken = names(model)
    for node in list(model.graph):
        if node.domain != DOMAIN or node.op_type not in ("Quantize", "Requantize"):
            continue
        product = node.inputs[0].producer() if node.op_type == "Requantize" and node.inputs[0] is not None else None
        if node.op_type == "Quantize" and _frozen(node) is not None:
            _to_quantize_linear(model, node, taken)
            change.applied += 1
        elif product is not None and product.op_type == op:
            reason = _fuse_one(model, product, node, taken)
            if reason:
                change.skip(reason)
            else:
                change.applied += 1
    change.applied += drop_round_trips(model, mixed_domains=False)
    drop_functions(model)
    return change


def _frozen(node: ir.Node) -> QParams | None:
    """Return the scale and zero point of a Quantize or Requantize with a frozen range, else None."""
    lo, hi = (constant(value) for value in node.inputs[-2:])
    return None if lo is None or hi is None else asymmetric_u8(float(lo.numpy()), float(hi.numpy()))


def _constant_parameters(model: ir.Model, node: ir.Node, taken: set[str]) -> tuple[ir.Value, ir.Value]:
    """Replace the outputs scale and zero point of `node`, which has a frozen range, by initializers; return these."""
    params = _frozen(node)
    assert params is not None
    values = []
    parts = (("scale", params.scale), ("zero_point", params.zero_point))
    for output, (part, array) in zip(node.outputs[1:], parts, strict=True):
        value = add_initializer(model.graph, unused_name(taken, f"{node.name}/{part}"), array)
        output.replace_all_uses_with(value)
        values.append(value)
    return values[0], values[1]


def _to_quantize_linear(model: ir.Model, node: ir.Node, taken: set[str]) -> None:
    """Replace a Quantize with a frozen range by the standard operator."""
    linear = ir.node("QuantizeLinear", [node.inputs[0], *_constant_parameters(model, node, taken)], name=node.name)
    replace_node(node, linear)


def _fuse_one(model: ir.Model, product: ir.Node, requantize: ir.Node, taken: set[str]) -> str:
    """Replace an integer product and its Requantize by one fused node; return the skip code, empty on success."""
    x, w, x_zero = product.inputs[:3]
    x_scale, w_scale, bias = requantize.inputs[1:4]
    weights, scales, offsets = (_numbers(value) for value in (w, w_scale, bias))
    assert x is not None and x_scale is not None
    before = x_scale.producer()
    if _frozen(requantize) is None or (before is not None and (before.domain != DOMAIN or _frozen(before) is None)):
        return "dynamic-range"
    if sole_reader(product.outputs[0]) is not requantize:
        return "shared"
    shape = product.outputs[0].shape
    if product.op_type == "MatMulInteger" and offsets.any() and (shape is None or len(shape) != 2):
        return "batched-bias"
    if before is not None:  # a product of the other kind, not fused yet: its frozen scale is known
        _constant_parameters(model, before, taken)
        x_scale, x_zero = requantize.inputs[1], product.inputs[2]
    assert x_scale is not None and x_zero is not None
    channels = weights.shape[0 if product.op_type == "ConvInteger" else -1]
    operands = Weights(
        values=weights,
        scale=scales.reshape(-1 if scales.size > 1 else ()),
        bias=np.broadcast_to(offsets.reshape(-1), channels) if offsets.any() else None,
    )
    y = _constant_parameters(model, requantize, taken)
    fused = product_node(model, product, (x, x_scale, x_zero), operands, y, (str(requantize.name), taken))
    replace_node(requantize, fused)
    remove(product)
    return ""


def _numbers(value: ir.Value | None) -> Array:
    """Return constant weights, scales or biases from `quantize_nodes`."""
    tensor = constant(value)
    assert tensor is not None
    return tensor.numpy()

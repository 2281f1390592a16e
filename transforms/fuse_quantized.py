"""Fuse an integer product with the requantization of its result: the operators that VNNI kernels run."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .functions import DOMAIN, drop_functions
from .graph import add_initializer, constant, fresh_name, remove, replace, sole_reader
from .qlinear import Quantized, Weights, product_node
from .qparams import QParams, asymmetric_u8
from .registry import Change, transform


@transform(
    "fuse_quantized_conv_and_requantize",
    after=("freeze_requantization_ranges", "freeze_min", "freeze_max"),
    changes_values=True,
)
def fuse_quantized_conv_and_requantize(model: ir.Model) -> Change:
    """Fuse a ConvInteger with the Requantize of frozen range that alone reads it.

    Before:  q = Requantize(ConvInteger(x, W8, xz), xs, ws, b, <frozen_min>, <frozen_max>)
    After:   q = QLinearConv(x, xs, xz, W8, ws, 0, ys, yz, b32),   b32 = round(b / (xs * ws)), half to even
    A Quantize of frozen range becomes a QuantizeLinear, and a Dequantize/Quantize pair of equal parameters disappears.
    Left alone: ranges still found at run time (``dynamic-range``), or a sum that somebody else reads (``shared``).
    """
    return _fuse(model, "ConvInteger")


@transform(
    "fuse_quantized_matmul_and_requantize",
    after=("freeze_requantization_ranges", "freeze_min", "freeze_max"),
    changes_values=True,
)
def fuse_quantized_matmul_and_requantize(model: ir.Model) -> Change:
    """Fuse a MatMulInteger with the Requantize of frozen range that alone reads it.

    Before:  q = Requantize(MatMulInteger(x, W8, xz), xs, ws, b, <frozen_min>, <frozen_max>)
    After:   q = QGemm(x, xs, xz, W8, ws, 0, b32, ys, yz) with a bias, q = QLinearMatMul(x, xs, xz, W8, ws, 0, ys, yz) without
    A Quantize of frozen range becomes a QuantizeLinear, and a Dequantize/Quantize pair of equal parameters disappears.
    Left alone: ranges still found at run time (``dynamic-range``), a sum that somebody else reads (``shared``), a
    bias on a product of more than two dimensions (``batched-bias``).
    """
    return _fuse(model, "MatMulInteger")


def _fuse(model: ir.Model, op: str) -> Change:
    """Fuse the products of type `op`, in execution order: a result's scale is the next operator's input scale."""
    change = Change()
    for node in list(model.graph):
        if node.domain != DOMAIN or node.op_type not in ("Quantize", "Requantize"):
            continue
        lo, hi = (constant(value) for value in node.inputs[-2:])
        product = node.inputs[0].producer() if node.op_type == "Requantize" and node.inputs[0] else None
        wanted = product is not None and product.op_type == op
        if lo is None or hi is None:
            if wanted:
                change.skip("dynamic-range")
            continue
        scale, zero = _constant_parameters(model, node, asymmetric_u8(float(lo.numpy()), float(hi.numpy())))
        if node.op_type == "Quantize":
            _to_quantize_linear(node, scale, zero)
            change.applied += 1
        elif wanted and product is not None:
            _fuse_one(model, product, node, (scale, zero), change)
    change.applied += _drop_round_trips(model)
    drop_functions(model)
    return change


def _constant_parameters(model: ir.Model, node: ir.Node, params: QParams) -> tuple[ir.Value, ir.Value]:
    """Let whoever reads the scale and zero point of `node` read initializers of the frozen values."""
    made = []
    for output, part, array in zip(
        node.outputs[1:], ("scale", "zero_point"), (params.scale, params.zero_point), strict=True
    ):
        name = f"{node.name}/{part}"
        value = model.graph.initializers.get(name)
        if value is None:
            value = add_initializer(model.graph, fresh_name(model, name), array)
        output.replace_all_uses_with(value)
        made.append(value)
    return made[0], made[1]


def _to_quantize_linear(node: ir.Node, scale: ir.Value, zero: ir.Value) -> None:
    """Replace a Quantize of frozen range by the standard operator."""
    linear = ir.node("QuantizeLinear", [node.inputs[0], scale, zero], name=node.name)
    _take_place(node, linear)


def _take_place(old: ir.Node, new: ir.Node) -> None:
    """Put `new` where `old` was; its first output stands for the first output of `old`."""
    graph, output = old.graph, new.outputs[0]
    assert isinstance(graph, ir.Graph)
    output.type, output.shape = old.outputs[0].type, old.outputs[0].shape
    name = old.outputs[0].name
    graph.insert_after(old, [new])
    replace(old.outputs[0], output)
    remove(old)
    output.name = name


def _fuse_one(
    model: ir.Model, product: ir.Node, requantize: ir.Node, y: tuple[ir.Value, ir.Value], change: Change
) -> None:
    """Replace an integer product and its Requantize by one fused node, or count why not."""
    x, w, x_zero = product.inputs[:3]
    x_scale, w_scale, bias = (constant(value) for value in requantize.inputs[1:4])
    if x_scale is None or constant(x_zero) is None or w_scale is None or bias is None:
        change.skip("dynamic-range")
        return
    if sole_reader(product.outputs[0]) is not requantize:
        change.skip("shared")
        return
    assert x is not None and x_zero is not None and requantize.inputs[1] is not None
    weights = constant(w)
    assert weights is not None
    array = weights.numpy()
    offsets = np.broadcast_to(bias.numpy().reshape(-1), array.shape[0 if product.op_type == "ConvInteger" else -1])
    scales = w_scale.numpy().reshape(-1 if w_scale.size > 1 else ())
    operands = Weights(array, scales, offsets if offsets.any() else None)
    source: Quantized = (x, requantize.inputs[1], x_zero)
    fused = product_node(model, product, source, operands, y, str(requantize.name))
    if fused is None:
        change.skip("batched-bias")
        return
    _take_place(requantize, fused)
    remove(product)
    change.applied += 1


def _drop_round_trips(model: ir.Model) -> int:
    """Remove QuantizeLinear nodes that undo a DequantizeLinear of equal parameters; return how many."""
    dropped = 0
    for node in list(model.graph):
        before = node.inputs[0].producer() if node.op_type == "QuantizeLinear" and node.inputs[0] is not None else None
        if before is None or before.op_type != "DequantizeLinear" or not _equal_parameters(node, before):
            continue
        source = before.inputs[0]
        assert source is not None
        node.outputs[0].replace_all_uses_with(source)
        remove(node)
        if not before.outputs[0].uses() and not before.outputs[0].is_graph_output():
            remove(before)
        dropped += 1
    return dropped


def _equal_parameters(quantize: ir.Node, dequantize: ir.Node) -> bool:
    """Whether two nodes have the same constant scale and zero point, of the same type."""
    for a, b in zip(quantize.inputs[1:], dequantize.inputs[1:], strict=False):
        if a is b:
            continue
        left, right = constant(a), constant(b)
        if (
            left is None
            or right is None
            or left.dtype != right.dtype
            or not np.array_equal(left.numpy(), right.numpy())
        ):
            return False
    return len(quantize.inputs) == len(dequantize.inputs)

"""Rewrite a QDQ graph with the operators that compute on integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from .graphs.queries import MS, computing_nodes, constant, graph_of, producer_of, sole_reader
from .graphs.rewriter import derive_initializer, discard, names, remove_if_unread, replace_node, unused_name
from .int8.existing import is_linear
from .int8.ops import OPS, Op, only_moves
from .int8.qlinear import Quantized, equal_parameters
from .int8.qparams import QParams
from .patterns import pads
from .patterns.elementwise import clip_bounds
from .registry import Change, transform

BYTES = frozenset({ir.DataType.INT8, ir.DataType.UINT8})
Build = Callable[[ir.Node, list[Quantized], "Quantized | None"], "ir.Node | None"]


@transform("qdq_to_qoperator", changes_values=True)
def qdq_to_qoperator(model: ir.Model) -> Change:
    """Replace an operator between DequantizeLinear and QuantizeLinear by its integer operator.

    Before:  QuantizeLinear(Relu(Conv(DequantizeLinear(x), DequantizeLinear(W8), DequantizeLinear(b32))))
    After:   QLinearConv(x, ..., W8, ..., b32)
    Gemm becomes QGemm and MatMul becomes QLinearMatMul. If nothing quantizes their result, they become QGemm with float
    output and MatMulIntegerToFloat. Add, Mul, Concat, Where, AveragePool, GlobalAveragePool, LeakyRelu and Sigmoid
    become their QLinear operators. MaxPool, Reshape and other operators that only move values run on uint8.
    Left alone: operators without an integer operator (``no-integer-form``), or without one for their types (``types``),
    with a float operand (``float-operand``), with scales that the integer operator does not support (``scales``), with
    a result that is also read in float (``read-in-float``), or with a Relu or Clip that saturation does not replace
    (``clip``).
    """
    change, taken = Change(), names(model)
    for node in computing_nodes(model):
        row = OPS.get(node.op_type)
        if node.domain or row is None or row.kind == "float" or row.native_u8 or not node.inputs:
            continue
        before = _dequantizers(node)
        if not any(before):
            continue
        last, quantize, reason = _requantized(node)
        y = _parameters(quantize) if quantize is not None else None
        reason = reason or _obstacle(node, before, y)
        operands = [_parameters(each) for each in before if each is not None]
        fused = None if reason else _fused(node, operands, y)
        if fused is None:
            change.skip(reason or "no-integer-form")
            continue
        if fused.domain == MS:
            model.opset_imports[MS] = 1
        replace_node(quantize if quantize is not None else node, fused)
        _make_scalars(fused, [*operands, *(() if y is None else (y,))], taken)
        for done in dict.fromkeys([last, node, *before]):
            remove_if_unread(done)
        change.applied += 1
    return change


def _make_scalars(node: ir.Node, operands: Sequence[Quantized], taken: set[str]) -> None:
    """Give an integer operator scales and zero points without axes: a DequantizeLinear may have them in shape (1,)."""
    parameters = {part for operand in operands for part in operand[1:]}
    for index, value in enumerate(node.inputs):
        tensor = constant(value) if value in parameters else None
        if value is not None and tensor is not None and tensor.size == 1 and len(tensor.shape):
            name = unused_name(taken, f"{value.name}_scalar")
            scalar = derive_initializer(graph_of(node), name, tensor, lambda array: array.reshape(()), ())
            node.replace_input_with(index, scalar)
            discard(value)


def _dequantizers(node: ir.Node) -> list[ir.Node | None]:
    """Return the DequantizeLinear of each operand that a node has; None for a float operand."""
    row = OPS[node.op_type]
    chosen = {"same": (0,), "arith": row.activations, "compute": None}[row.kind]
    operands = [v for i, v in enumerate(node.inputs) if v is not None and (chosen is None or i in chosen)]
    before = [*map(producer_of, operands)]
    return [each if _is_linear(each, "DequantizeLinear") else None for each in before]


def _is_linear(node: ir.Node | None, op_type: str) -> bool:
    """Whether `node` is a QuantizeLinear or DequantizeLinear with a zero point."""
    return node is not None and is_linear(node, op_type) and len(node.inputs) == 3


def _obstacle(node: ir.Node, before: list[ir.Node | None], y: Quantized | None) -> str:
    """Return the skip code if the operands of a node do not fit its integer operator; empty if they fit."""
    row = OPS[node.op_type]
    x = [_parameters(each) for each in before if each is not None]
    if len(x) < len(before):
        return "float-operand"
    for index, (each, operand) in enumerate(zip(before, x, strict=True)):
        scale = constant(operand[1])
        axis = each.attributes.get_int("axis", 1) if each is not None else 1
        rank = None if operand[0].shape is None else len(operand[0].shape)
        if scale is None or (scale.size > 1 and not _along_channels(node, index, axis, rank)):
            return "scales"
    if not _has_kernel([operand[2].dtype for operand in x], None if y is None else y[2].dtype, row):
        return "types"
    return "scales" if row.bias is not None and len(x) > row.bias and not _bias_scale_fits(x) else ""


def _has_kernel(types: Sequence[ir.DataType | None], result: ir.DataType | None, row: Op) -> bool:
    """Whether the runtime has the integer operator for types.

    Args:
        types: The types of the operands. All are that of the first one, except for a bias, and a weight in int8.
        result: The type of the result; None for float.
        row: The operator.
    """
    first = types[0]
    fits = {index: {first} for index in range(len(types)) if index != row.bias}
    if row.weight in fits:
        fits[row.weight] = {first, ir.DataType.INT8}
    return first in BYTES and result in (first, None) and all(types[index] in each for index, each in fits.items())


def _along_channels(node: ir.Node, index: int, axis: int, rank: int | None) -> bool:
    """Whether scales along `axis` of an operand are scales per output channel of the weight or the bias."""
    row = OPS[node.op_type]
    if index != row.weight or rank is None:
        return row.bias is not None and index == row.bias
    return (axis - row.channel_axis(node)) % rank == 0 and (rank == 2 or node.op_type != "MatMul")


def _bias_scale_fits(x: list[Quantized]) -> bool:
    """Whether the bias is int32 with scale ``s_x * s_w``, which the integer operators assume."""
    scales = [constant(operand[1]) for operand in x[:3]]
    a, b, bias = (np.asarray(0) if scale is None else scale.numpy() for scale in scales)
    units = a * b * np.float32(1)
    rounding = 4 * np.finfo(np.float32).eps  # of the product and of the stored scale
    return x[2][0].dtype is ir.DataType.INT32 and bool(np.all(np.abs(bias - units) <= rounding * units))


def _parameters(node: ir.Node) -> Quantized:
    """Return the integers, scale and zero point of a QuantizeLinear or DequantizeLinear."""
    data = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
    scale, zero = node.inputs[1:3]
    assert data is not None and scale is not None and zero is not None
    return data, scale, zero


def _requantized(node: ir.Node) -> tuple[ir.Node, ir.Node | None, str]:
    """Return the last node that the integer operator replaces, the QuantizeLinear of its result, and a skip code.

    The last node is the node itself, or a Relu or Clip that it absorbs. The QuantizeLinear is None if the result is
    float.
    """
    last, reader = node, sole_reader(node.outputs[0])
    if reader is not None and not reader.domain and reader.op_type in OPS[node.op_type].absorbs:
        after = sole_reader(reader.outputs[0])
        if after is not None and _is_linear(after, "QuantizeLinear"):
            return reader, after, "" if _saturates(reader, after) else "clip"
    if reader is not None and _is_linear(reader, "QuantizeLinear"):
        return last, reader, ""
    quantizes = [u.node for u in node.outputs[0].uses() if _is_linear(u.node, "QuantizeLinear")]
    return last, None, "read-in-float" if quantizes else ""


def _saturates(relu: ir.Node, quantize: ir.Node) -> bool:
    """Whether every value of the quantized tensor lies within the bounds of the Relu or Clip."""
    bounds, scale, zero = clip_bounds(relu), constant(quantize.inputs[1]), constant(quantize.inputs[2])
    if bounds is None or scale is None or zero is None or scale.size != 1:
        return False
    params = QParams(scale=scale.numpy().reshape(()), zero_point=zero.numpy().reshape(()))
    least, most = params.range
    slack = float(params.scale) / 2  # rounding moves any value by up to half a step
    return bounds[0] - slack <= least and most <= bounds[1] + slack


def _fused(node: ir.Node, x: list[Quantized], y: Quantized | None) -> ir.Node | None:
    """Return the integer operator for a node; None if there is none."""
    build = {"same": _same, "arith": _arith, "compute": _compute}[OPS[node.op_type].kind]
    return build(node, x, y)


def _same(node: ir.Node, x: list[Quantized], y: Quantized | None) -> ir.Node | None:
    """Return an operator that moves values on uint8; input and result must have equal parameters."""
    filled = node.op_type == "Pad" and pads.fills(node)
    if y is None or filled or not only_moves(node) or len(node.outputs) > 1 or not equal_parameters(x[0][1:], y[1:]):
        return None
    inputs = list(node.inputs[1:])
    if node.op_type == "Pad" and len(inputs) > 1:
        inputs[1] = None  # the value of the mode constant; it is float
    return ir.node(node.op_type, [x[0][0], *inputs], dict(node.attributes), name=node.name)


def _arith(node: ir.Node, x: list[Quantized], y: Quantized | None) -> ir.Node | None:
    """Return a QLinear operator such as QLinearAdd; QLinearConcat takes the parameters of the result first."""
    if y is None or "dilations" in node.attributes:  # QLinearAveragePool has no dilations
        return None
    if node.op_type == "HardSigmoid":  # its table lookup has another scale (`forms.to_lookup`)
        return None
    name = str(OPS[node.op_type].u8[1])  # type: ignore[index]
    operands: list[ir.Value | None] = [part for source in x for part in source]
    if node.op_type == "Where":
        operands.insert(0, node.inputs[0])
    inputs = [*y[1:], *operands] if node.op_type == "Concat" else [*operands, *y[1:]]
    return ir.node(name, inputs, dict(node.attributes), domain=MS, name=node.name)


def _compute(node: ir.Node, x: list[Quantized], y: Quantized | None) -> ir.Node | None:
    """Return a QLinearConv, QGemm or QLinearMatMul, or a product with a float result."""
    a, b, bias = x[0], x[1], x[2][0] if len(x) > 2 else None
    if node.op_type == "Conv":
        return (
            None if y is None else ir.node("QLinearConv", [*a, *b, *y[1:], bias], dict(node.attributes), name=node.name)
        )
    if node.op_type == "Gemm" and any(node.attributes.get_float(factor, 1.0) != 1.0 for factor in ("alpha", "beta")):
        return None
    if node.op_type == "Gemm":
        return ir.node("QGemm", [*a, *b, bias, *(y[1:] if y else ())], _transposes(node), domain=MS, name=node.name)
    if y is not None:
        return ir.node("QLinearMatMul", [*a, *b, *y[1:]], name=node.name)
    return ir.node("MatMulIntegerToFloat", [a[0], b[0], a[1], b[1], a[2], b[2]], domain=MS, name=node.name)


def _transposes(node: ir.Node) -> dict[str, ir.Attr]:
    """Return the attributes of a Gemm that a QGemm has too."""
    return {name: attr for name, attr in node.attributes.items() if name in ("transA", "transB")}

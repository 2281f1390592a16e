"""Rewrite integer operators as float operators between DequantizeLinear and QuantizeLinear."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from .graphs.queries import MS, computing_nodes, constant, graph_of, key, node_name
from .graphs.rewriter import add_initializer, discard, names, replace_node, unused_name
from .int8.writer import FIRST_WITH_AXIS
from .registry import Change, LeftAlone, transform

Triple = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class QOp:
    """The input positions of an integer operator.

    Attributes:
        op: The standard operator.
        operands: For each operand of the standard operator, the inputs with integers, scale and zero point.
        result: The inputs with the scale and zero point of the result; None if the result is always float.
        bias: The input with the int32 or float bias; it becomes the last operand.
        dropped: Attributes that the standard operator does not have.
    """

    op: str
    operands: tuple[Triple, ...]
    result: tuple[int, int] | None
    bias: int | None = None
    dropped: frozenset[str] = frozenset()


ONE: tuple[Triple, ...] = ((0, 1, 2),)
LAYOUT = frozenset({"channels_last"})
QOPS: dict[str, QOp] = {
    "QLinearConv": QOp("Conv", ((0, 1, 2), (3, 4, 5)), (6, 7), bias=8),
    "QLinearMatMul": QOp("MatMul", ((0, 1, 2), (3, 4, 5)), (6, 7)),
    f"{MS}.QGemm": QOp("Gemm", ((0, 1, 2), (3, 4, 5)), (7, 8), bias=6),
    f"{MS}.MatMulIntegerToFloat": QOp("MatMul", ((0, 2, 4), (1, 3, 5)), None),
    f"{MS}.QLinearAdd": QOp("Add", ((0, 1, 2), (3, 4, 5)), (6, 7)),
    f"{MS}.QLinearMul": QOp("Mul", ((0, 1, 2), (3, 4, 5)), (6, 7)),
    f"{MS}.QLinearAveragePool": QOp("AveragePool", ONE, (3, 4), dropped=LAYOUT),
    f"{MS}.QLinearGlobalAveragePool": QOp("GlobalAveragePool", ONE, (3, 4), dropped=LAYOUT),
    f"{MS}.QLinearLeakyRelu": QOp("LeakyRelu", ONE, (3, 4)),
    f"{MS}.QLinearSigmoid": QOp("Sigmoid", ONE, (3, 4)),
    f"{MS}.QLinearSoftmax": QOp("Softmax", ONE, (3, 4), dropped=frozenset({"opset"})),
    f"{MS}.QLinearWhere": QOp("Where", ((1, 2, 3), (4, 5, 6)), (7, 8)),
}


def qop_of(node: ir.Node) -> QOp | None:
    """Return the input positions of an integer operator; None for any other node."""
    if node.domain == MS and node.op_type == "QLinearConcat":
        return QOp("Concat", tuple((i, i + 1, i + 2) for i in range(2, len(node.inputs), 3)), (0, 1))
    return QOPS.get(key(node))


@dataclass
class _Pairs:
    """Writes DequantizeLinear and QuantizeLinear nodes; equal nodes of a graph are written once.

    Attributes:
        model: The model.
        domain: The domain of these nodes: com.microsoft if the standard operators of the opset have no axis.
        taken: The names in use.
        stored: The dequantized tensors and scalars, by graph and operands.
    """

    model: ir.Model
    domain: str
    taken: set[str]
    stored: dict[object, ir.Value] = field(default_factory=dict)

    def dequantized(self, node: ir.Node, operands: list[ir.Value | None], axis: int | None) -> ir.Value:
        """Return the float tensor of `operands`: integers, scale and zero point."""
        graph = graph_of(node)
        key = (graph, *(id(value) for value in operands), axis)
        if key not in self.stored:
            data = operands[0]
            stem = str(data.name) if data is not None else node_name(node)
            attributes = {} if axis is None else {"axis": axis}
            dequantize = ir.node("DequantizeLinear", operands, attributes, domain=self.domain)
            dequantize.name = unused_name(self.taken, f"{stem}/dequantize")
            value = dequantize.outputs[0]
            value.name = unused_name(self.taken, f"{stem}/dequantized")
            value.type = ir.TensorType(ir.DataType.FLOAT)
            value.shape = data.shape if data is not None else None
            graph.insert_before(node, [dequantize])
            self.stored[key] = value
        return self.stored[key]


@transform("qoperator_to_qdq", changes_values=True)
def qoperator_to_qdq(model: ir.Model) -> Change:
    """Replace integer operators by float operators between DequantizeLinear and QuantizeLinear.

    Before:  y = QLinearConv(x, sx, zx, W8, sw, zw, sy, zy, b32)
    After:   y = QuantizeLinear(Conv(DequantizeLinear(x, sx, zx), DequantizeLinear(W8, sw, zw),
                 DequantizeLinear(b32, sx * sw)), sy, zy)
        QLinearMatMul, QGemm, MatMulIntegerToFloat, QLinearAdd, QLinearMul, QLinearConcat, QLinearWhere,
        QLinearAveragePool, QLinearGlobalAveragePool, QLinearLeakyRelu, QLinearSigmoid and QLinearSoftmax likewise. A
        runtime that fuses QuantizeLinear and DequantizeLinear computes the same as before; another runtime computes in
        float. Operators that only move integers do not change. `qdq_to_qoperator` does the opposite.
    Left alone: an int32 bias with computed scales of weights or activations (``dynamic``), scales that are neither per
        tensor nor per channel (``scales``), an operand without a zero point (``no-zero-point``), channels in the last
        axis (``channels-last``).
    """
    change = Change()
    domain = "" if model.opset_imports.get("", 0) >= FIRST_WITH_AXIS else MS
    pairs = _Pairs(model, domain, names(model))
    for node in computing_nodes(model):
        form = qop_of(node)
        if form is None:
            continue
        try:
            _check(node, form)
            _expand(node, form, pairs)
            change.applied += 1
        except LeftAlone as left:
            change.skip(str(left))
    if change.applied and domain == MS:
        model.opset_imports.setdefault(MS, 1)
    return change


def _value(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _check(node: ir.Node, form: QOp) -> None:
    """Check that a node can be rewritten, before anything changes.

    Raises:
        LeftAlone: An operand cannot be written with a DequantizeLinear.
    """
    if node.attributes.get_int("channels_last", 0):
        raise LeftAlone("channels-last")
    for data, scale, zero in form.operands:
        if _value(node, data) is None or _value(node, scale) is None or _value(node, zero) is None:
            raise LeftAlone("no-zero-point")
    for index, (_, scale, _) in enumerate(form.operands):
        _axis(node, form, index, constant(_value(node, scale)))
    if form.bias is not None and _value(node, form.bias) is not None:
        scales = [constant(_value(node, scale)) for _, scale, _ in form.operands]
        if any(scale is None for scale in scales):
            raise LeftAlone("dynamic")
    if form.result is not None and _value(node, form.result[0]) is not None and _value(node, form.result[1]) is None:
        raise LeftAlone("no-zero-point")


def _axis(node: ir.Node, form: QOp, index: int, scale: ir.TensorProtocol | None) -> int | None:
    """Return the axis of the scales of an operand; None for one scale."""
    if scale is None or scale.size == 1:
        if scale is not None and len(scale.shape) > 1:
            raise LeftAlone("scales")
        return None
    if index == 0 or form.op not in ("Conv", "Gemm", "MatMul") or len(scale.shape) != 1:
        raise LeftAlone("scales")
    if form.op == "Conv":
        return 0
    weight = _value(node, form.operands[1][0])
    tensor = constant(weight)
    rank = len(tensor.shape) if tensor is not None else len(weight.shape) if weight is not None and weight.shape else 0
    if rank == 0:
        raise LeftAlone("scales")
    return 0 if form.op == "Gemm" and node.attributes.get_int("transB", 0) != 0 else rank - 1


def _expand(node: ir.Node, form: QOp, pairs: _Pairs) -> None:
    """Replace a node by the float operator with DequantizeLinear and QuantizeLinear around it."""
    inputs = tuple(node.inputs)
    operands: list[ir.Value | None] = []
    for index, places in enumerate(form.operands):
        axis = _axis(node, form, index, constant(_value(node, places[1])))
        operands.append(pairs.dequantized(node, [_scalar(node, _value(node, place), pairs) for place in places], axis))
    if form.op == "Where":
        operands.insert(0, node.inputs[0])
    bias = _value(node, form.bias) if form.bias is not None else None
    if bias is not None:
        operands.append(_bias(node, form, bias, pairs))
    name = node_name(node)
    attributes = {key: value for key, value in node.attributes.items() if key not in form.dropped}
    compute = ir.node(form.op, operands, attributes, name=name)
    scale = _value(node, form.result[0]) if form.result is not None else None
    added = _value(node, 6) if node.op_type == "MatMulIntegerToFloat" else None
    if scale is None and added is None:
        replace_node(node, compute)
    else:
        compute.outputs[0].name = unused_name(pairs.taken, f"{name}/float")
        compute.outputs[0].type, compute.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), node.outputs[0].shape
        graph_of(node).insert_before(node, [compute])
        if added is not None:
            last = ir.node("Add", [compute.outputs[0], added], name=unused_name(pairs.taken, f"{name}/add"))
        else:
            zero = _value(node, form.result[1]) if form.result is not None else None
            parameters = [_scalar(node, value, pairs) for value in (scale, zero)]
            called = unused_name(pairs.taken, f"{name}/quantize")
            last = ir.node("QuantizeLinear", [compute.outputs[0], *parameters], domain=pairs.domain, name=called)
        replace_node(node, last)
    discard(*inputs)


def _scalar(node: ir.Node, value: ir.Value | None, pairs: _Pairs) -> ir.Value | None:
    """Return a per-tensor scale or zero point of shape (1,) with shape (); any other one unchanged."""
    tensor = constant(value)
    if value is None or tensor is None or tuple(tensor.shape.numpy()) != (1,):
        return value
    key = (graph_of(node), id(value), "scalar")
    if key not in pairs.stored:
        name = unused_name(pairs.taken, f"{value.name}/scalar")
        pairs.stored[key] = add_initializer(graph_of(node), name, tensor.numpy().reshape(()))
    return pairs.stored[key]


def _bias(node: ir.Node, form: QOp, bias: ir.Value, pairs: _Pairs) -> ir.Value:
    """Return the float value of an int32 bias, whose scale is ``s_x * s_w``."""
    scales = [constant(_value(node, scale)) for _, scale, _ in form.operands]
    a, b = (np.asarray(0) if scale is None else scale.numpy().reshape(-1) for scale in scales)
    units = np.asarray(a * b, np.float32)
    axis = 0 if units.size > 1 else None
    units = units if units.size > 1 else units.reshape(())
    stem = f"{node_name(node)}/bias"
    parameters = [
        add_initializer(graph_of(node), unused_name(pairs.taken, f"{stem}_{part}"), array)
        for part, array in (("scale", units), ("zero_point", np.zeros(units.shape, np.int32)))
    ]
    return pairs.dequantized(node, [bias, *parameters], axis)

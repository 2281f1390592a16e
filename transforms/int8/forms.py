"""Operators with another form in int8: dynamic products, stored weights, and operators that read uint8 directly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graphs.queries import MS, graph_of, made_by
from ..graphs.rewriter import discard, remove, remove_if_unread, replace_node
from ..patterns import pads
from .gru_form import to_scan
from .ops import FUNCTION, OPS
from .plan import Plan, Unit
from .qlinear import equal_parameters
from .qparams import QParams, quantize, symmetric_s8
from .reasons import GATE_RANGE, NONE, Reason
from .recurrent import to_int8_recurrent
from .weights import WeightWriter
from .writer import Writer

LEVELS = 255  # steps of uint8
QATTENTION_ATTRIBUTES = ("num_heads", "unidirectional", "scale", "mask_filter_value", "past_present_share_buffer")
LSTM_ATTRIBUTES = ("activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size")


def to_dynamic(node: ir.Node, unit: Unit, weights: WeightWriter) -> int:
    """Replace a MatMul, Gemm, LSTM or GRU by the operator that computes the range of its activations at run time.

    Before:  y = Gemm(x, W, b)
    After:   y = com.microsoft.DynamicQuantizeMatMul(x, int8 W (K, N), scale (N,), zero point (N,), b)

    Returns:
        The number of constants that became int8.
    """
    if unit.op in RECURRENT:
        return RECURRENT[unit.op](node, unit, weights)
    array = weights.array(node, 1)
    if node.attributes.get_int("transB", 0):
        array = np.ascontiguousarray(array.T)
    params = weights.without_saturation(unit, array, weights.params(array, 1), -1)
    inputs = [node.inputs[0], *weights.store(node, 1, quantize(array, params), params)]
    bias = weights.bias_row(node)
    inputs += [] if bias is None else [bias]
    replace_node(node, ir.node("DynamicQuantizeMatMul", inputs, domain=MS, name=node.name))
    return 1


def to_native(node: ir.Node, unit: Unit, weights: WeightWriter) -> int:
    """Replace a unit by the form that a native operator may compute; see `to_dynamic` and `to_int8_recurrent`.

    Returns:
        The number of constants that became int8.
    """
    return to_int8_recurrent(node, weights) if unit.op in RECURRENT else to_dynamic(node, unit, weights)


def _dynamic_lstm(node: ir.Node, unit: Unit, weights: WeightWriter) -> int:
    """LSTM(X, W (D, 4H, I), R (D, 4H, H), ...) -> DynamicQuantizeLSTM(X, W (D, I, 4H), R (D, H, 4H), ..., scales)."""
    inputs = [*node.inputs, *[None] * (8 - len(node.inputs))]
    scales: list[ir.Value | None] = []
    for index in (1, 2):
        array = weights.array(node, index)
        directions, gates, _ = array.shape
        rows = array.reshape(directions * gates, -1)
        params = weights.without_saturation(unit, rows, weights.params(rows, 0), 0)
        stored = quantize(rows, params).reshape(array.shape).transpose(0, 2, 1)
        shape = (directions, gates)
        by_gate = QParams(scale=params.scale.reshape(shape), zero_point=params.zero_point.reshape(shape))
        matrix, *parameters = weights.store(node, index, np.ascontiguousarray(stored), by_gate)
        inputs[index] = matrix
        scales += parameters
    attributes = {name: attr for name, attr in node.attributes.items() if name in (*LSTM_ATTRIBUTES, "input_forget")}
    new = ir.node(
        "DynamicQuantizeLSTM",
        [*inputs[:8], *scales],
        attributes,
        domain=MS,
        name=node.name,
        num_outputs=len(node.outputs),
    )
    replace_node(node, new)
    return 2


RECURRENT = {"LSTM": _dynamic_lstm, "GRU": to_scan}


def store_weights(node: ir.Node, unit: Unit, weights: WeightWriter) -> int:
    """Store constant weights as int8 in the file; the operator computes in float.

    Before:  y = ConvTranspose(x, W, b)
    After:   y = ConvTranspose(x, DequantizeLinear(int8 W, scale), b)
    A Gather selects rows in int8 and dequantizes them afterwards; each row has its own scale.

    Returns:
        The number of constants that became int8.
    """
    if unit.op == "Gather":
        return _gather_rows(node, weights)
    row = OPS[unit.op]
    for index in row.stores:
        array = weights.array(node, index)
        params = weights.params(array, row.channel_axis(node) % array.ndim)
        weights.writer.replace_constant(node, index, quantize(array, params), params)
    return len(row.stores)


def _gather_rows(node: ir.Node, weights: WeightWriter) -> int:
    """Gather(table, i) -> Mul(Cast(Gather(int8 table, i)), Gather(scales (V, 1, ...), i))."""
    graph, writer, table = graph_of(node), weights.writer, node.inputs[0]
    assert table is not None  # required by the operator
    key = (graph, table, "rows")
    if (key, "int8") not in writer.stored:
        array = weights.array(node, 0)
        params = symmetric_s8(array, 0)  # a zero point would cost a subtraction at run time
        scale = params.scale.reshape(-1, *[1] * (array.ndim - 1))
        for part, values in (("int8", quantize(array, params)), ("scale", scale)):
            writer.stored[key, part] = writer.initializer(graph, f"{table.name}/{part}", values)
    integers = ir.node("Gather", [writer.stored[key, "int8"], node.inputs[1]], name=writer.name(f"{node.name}/int8"))
    scales = ir.node("Gather", [writer.stored[key, "scale"], node.inputs[1]], name=writer.name(f"{node.name}/scale"))
    cast = ir.node("Cast", [integers.outputs[0]], {"to": ir.DataType.FLOAT}, name=writer.name(f"{node.name}/cast"))
    for each in (integers, scales, cast):
        each.outputs[0].name = writer.name(f"{each.name}_output")
    graph.insert_before(node, [integers, scales, cast])
    replace_node(node, ir.node("Mul", [cast.outputs[0], scales.outputs[0]], name=node.name))
    return 1


def to_qattention(node: ir.Node) -> None:
    """Replace an Attention with dequantized input and weights by the operator on integers.

    Before:  y = Attention(DequantizeLinear(x8), DequantizeLinear(W8), b, mask, past)
    After:   y = QAttention(x8, W8, b, x_scale, W_scale, mask, x_zero_point, W_zero_point, past)
    """
    (x, xs, xz), (w, ws, wz) = (integer_source(node.inputs[index]) for index in (0, 1))
    bias, mask, past = [*node.inputs[2:5], None, None, None][:3]
    inputs = [x, w, bias, xs, ws, mask, xz, wz, past]
    attributes = {name: attr for name, attr in node.attributes.items() if name in QATTENTION_ATTRIBUTES}
    pairs = [_dequantizer(node.inputs[index]) for index in (0, 1)]
    replace_node(
        node, ir.node("QAttention", inputs, attributes, domain=MS, name=node.name, num_outputs=len(node.outputs))
    )
    for dq in pairs:
        remove_if_unread(dq)


def integer_source(value: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the integer tensor, scale and zero point that the DequantizeLinear of a tensor reads."""
    x, scale, zero = _dequantizer(value).inputs[:3]
    assert x is not None and scale is not None and zero is not None
    return x, scale, zero


def _dequantizer(value: ir.Value | None) -> ir.Node:
    """Return the DequantizeLinear that computes a tensor."""
    node = made_by(value, "DequantizeLinear")
    assert node is not None  # `insert_qdq` has inserted the pairs
    return node


def gate_obstacle(node: ir.Node) -> Reason:
    """Return why a HardSigmoid has no lookup form on uint8; `NONE` if it has one."""
    slope, height = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    usual = slope > 0 and 1 / LEVELS <= height < 1
    usual = usual and LEVELS * height - int(LEVELS * height) <= height  # the last code is at most one step above 1
    return NONE if usual else GATE_RANGE


@dataclass(frozen=True, slots=True)
class Lookup:
    """How the lookup of a HardSigmoid rounds its result, see `gate_params`.

    Attributes:
        step: The scale that the codes are written with. A result of 1 has the code 255 whatever the scale.
        read: The scale that they are read with.
    """

    step: float
    read: QParams


def lookup_rounding(node: ir.Node) -> Lookup:
    """Return how the lookup of a HardSigmoid rounds its result."""
    return Lookup(_gate_grid(node)[0], gate_params(node))


def gate_params(node: ir.Node) -> QParams:
    """Return the scale and the zero point of the uint8 result of a HardSigmoid's lookup.

    The codes are ``x * alpha / s`` plus the zero point ``floor(255 beta)``, with ``s = beta / floor(255 beta)``. They
    saturate where the operator does. With zero point 0 and scale s the same codes are the result, but the last code is
    ``e = 255 s - 1`` above 1, at most one step. Therefore the scale is smaller by half of this: the error at both ends
    is at most half a step. The error of a code c is ``s / 2`` from rounding and ``c s e / (2 + e)`` from the scale.
    """
    step, _ = _gate_grid(node)
    return QParams(scale=np.asarray(step * 2 / (1 + LEVELS * step), np.float32), zero_point=np.asarray(0, np.uint8))


def _gate_grid(node: ir.Node) -> tuple[float, int]:
    """Return the step of the codes of a HardSigmoid, and the code of ``beta``."""
    height = node.attributes.get_float("beta", 0.5)
    zero = int(LEVELS * height)
    return height / zero, zero


def lookups_of(plan: Plan, nodes: Mapping[str, ir.Node]) -> list[ir.Node]:
    """Return the HardSigmoids that a plan has as lookups. In a `FUNCTION` the result of one is not rounded.

    Args:
        plan: The plan.
        nodes: The nodes of the model by name.
    """
    units = (unit for unit in plan.units if plan.impl(unit).reads_u8 and unit.op != FUNCTION)
    return [nodes[name] for unit in units for name in unit.nodes if nodes[name].op_type == "HardSigmoid"]


def with_lookups(lookups: Iterable[ir.Node], qparams: Mapping[str, QParams]) -> Mapping[str, QParams]:
    """Return scales and zero points with those of the results of lookups, which the operator gives and not the data."""
    return {**qparams, **{str(node.outputs[0].name): gate_params(node) for node in lookups}}


def to_lookup(node: ir.Node, writer: Writer) -> None:
    """Replace a HardSigmoid between pairs by a lookup that saturates.

    Before:  y8 = QuantizeLinear(HardSigmoid(DequantizeLinear(x8)), scale, 0)
    After:   y8 = com.microsoft.QLinearLeakyRelu(x8, x_scale, x_zero_point, s / alpha, floor(255 beta)), alpha 1
    A change of scale and zero point computes a clipped line, like HardSigmoid. The runtime uses a lookup table for it.
    """
    x, scale, zero = integer_source(node.inputs[0])
    dq, graph = _dequantizer(node.inputs[0]), graph_of(node)
    quantizer = next(use.node for use in node.outputs[0].uses() if use.node.op_type == "QuantizeLinear")
    step, center = _gate_grid(node)
    stretched = np.float32(step / node.attributes.get_float("alpha", 0.2))
    parts = (("line_scale", stretched), ("line_zero_point", np.uint8(center)))
    line = [writer.initializer(graph, f"{node.name}/{part}", np.asarray(value)) for part, value in parts]
    name = writer.name(f"{node.name}/lookup")
    replace_node(quantizer, ir.node("QLinearLeakyRelu", [x, scale, zero, *line], {"alpha": 1.0}, domain=MS, name=name))
    remove(node)
    remove_if_unread(dq)


def to_integer_move(node: ir.Node) -> None:
    """Make an operator that moves values read and write integers, and remove the pairs around it.

    Before:  y8 = QuantizeLinear(Pad(DequantizeLinear(x8), pads)), with equal scales and zero points
    After:   y8 = Pad(x8, pads, zero point)
    """
    x, scale, zero = integer_source(node.inputs[0])
    quantizers = [next(iter(output.uses())).node for output in node.outputs if output.uses()]
    if any(q.op_type != "QuantizeLinear" or not equal_parameters((scale, zero), q.inputs[1:3]) for q in quantizers):
        return
    dq = _dequantizer(node.inputs[0])
    node.replace_input_with(0, x)
    if node.op_type == "Pad":
        node.resize_inputs(max(len(node.inputs), pads.VALUE + 1))
        value = node.inputs[pads.VALUE]
        node.replace_input_with(pads.VALUE, zero if pads.fills(node) else None)
        discard(value)
    for output in node.outputs:
        for use in list(output.uses()):
            q = use.node
            name = q.outputs[0].name
            output.type, output.shape = q.outputs[0].type, output.shape
            q.outputs[0].replace_all_uses_with(output, replace_graph_outputs=True)
            remove(q)
            output.name = name
    remove_if_unread(dq)

"""Rewrites that avoid a behaviour of ONNX Runtime in a graph with quantize/dequantize pairs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ..graphs.inference import inferred
from ..graphs.queries import MS, QDQ, constant, graph_of, is_standard, producer_of, sole_reader
from ..graphs.rewriter import add_initializer, discard, names, remove_if_unread, replace_node, unused_name
from ..patterns import pads
from .forms import integer_source
from .ops import OPS, RELUS
from .plan import Impl, Plan
from .writer import FIRST_WITH_TYPE, Writer

# Operators that the runtime replaces by integer ones between DequantizeLinear and QuantizeLinear
FUSED = frozenset({"Softmax", *(name for name, row in OPS.items() if row.kind == "arith" and name != "HardSigmoid")})
IMPLIED = ("output_dtype", "saturate")
"""Attributes of a QuantizeLinear that change nothing if its zero point is int8."""


def keep_floats(plan: Plan, nodes: Mapping[str, ir.Node], writer: Writer) -> None:
    """Keep the units that the plan has in float from being computed in integers."""
    floats = [unit for unit in plan.units if plan.impl(unit) is Impl.FLOAT]
    for unit in floats:
        between = plan.produced_u8.intersection(unit.inputs) and plan.read_u8.intersection(unit.outputs)
        if unit.op == "Conv" and between:
            keep_conv_float(nodes[unit.nodes[0]])
    for unit in floats:
        if unit.op in FUSED and plan.read_u8.issuperset(unit.outputs):
            separate_from_quantize(nodes[unit.nodes[-1]], writer)


def keep_conv_float(conv: ir.Node) -> None:
    """Replace a float Conv between integer neighbours by FusedConv with an activation that changes nothing, in place.

    Before:  y = QuantizeLinear(Conv(DequantizeLinear(x8), W))
    After:   y = QuantizeLinear(FusedConv(DequantizeLinear(x8), W)), activation LeakyRelu with alpha 1
    ONNX Runtime quantizes the weights of a Conv between DequantizeLinear and QuantizeLinear by itself, with one scale
    for all channels. It does not quantize a FusedConv, and runs it in the same float kernel. FusedConv requires an
    activation.
    """
    conv.op_type, conv.domain = "FusedConv", MS
    conv.attributes["activation"] = ir.AttrString("activation", "LeakyRelu")
    conv.attributes["activation_params"] = ir.AttrFloat32s("activation_params", [1.0])


def separate_from_quantize(node: ir.Node, writer: Writer) -> None:
    """Put an activation that changes nothing between a float operator and the QuantizeLinear of its result.

    Before:  QuantizeLinear(Add(DequantizeLinear(a), DequantizeLinear(b)))
    After:   QuantizeLinear(LeakyRelu(Add(DequantizeLinear(a), DequantizeLinear(b)), alpha = 1))
    ONNX Runtime computes an operator of `FUSED` between DequantizeLinear and QuantizeLinear in integers. An Identity
    between the two would not help, because the runtime removes it.
    Left alone: an operator with a float operand, which the runtime does not fuse.
    """
    value, graph = node.outputs[0], node.graph
    first = node.inputs[0].producer() if node.inputs[0] is not None and node.op_type in RELUS else node
    operands = [_producer_before_casts(v) for v in (first or node).inputs if v is not None and constant(v) is None]
    if not isinstance(graph, ir.Graph) or any(p is None or p.op_type != "DequantizeLinear" for p in operands):
        return
    quantizers = [use.node for use in value.uses() if use.node.op_type == "QuantizeLinear" and use.idx == 0]
    name = writer.name(f"{node.name}/apart")
    barrier = ir.node("LeakyRelu", [value], {"alpha": 1.0}, name=name)
    barrier.outputs[0].name = writer.name(f"{value.name}/apart")
    barrier.outputs[0].type, barrier.outputs[0].shape = value.type, value.shape
    graph.insert_after(node, [barrier])
    for quantizer in quantizers:
        quantizer.replace_input_with(0, barrier.outputs[0])


def _producer_before_casts(value: ir.Value) -> ir.Node | None:
    """Return the node that computes a tensor, skipping Casts: the runtime removes Casts from float to float."""
    node = value.producer()
    while node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node


def move_relu_behind_max_pool(value: ir.Value, writer: Writer) -> ir.Value:
    """Swap a Relu and the MaxPool that reads it, before the result is quantized; return the new result.

    Before:  QuantizeLinear(MaxPool(Relu(x)))
    After:   QuantizeLinear(Relu(MaxPool(x))), with equal values
    ONNX Runtime moves a QuantizeLinear above a MaxPool, and a MaxPool on uint8 outside of a chain of integer
    convolutions takes 27 times as long as a float one. The runtime does not move a QuantizeLinear above a Relu.
    Left alone: any other tensor, which is returned unchanged.

    Args:
        value: The float tensor that is about to be quantized.
        writer: Makes the names.
    """
    pool = value.producer()
    before = pool.inputs[0] if is_standard(pool, "MaxPool") else None
    relu = producer_of(before)
    if pool is None or before is None or relu is None or relu.op_type != "Relu" or sole_reader(before) is not pool:
        return value
    graph = pool.graph
    if not isinstance(graph, ir.Graph) or value.is_graph_output() or len(pool.outputs) != 1:
        return value
    pool.replace_input_with(0, relu.inputs[0])
    readers = list(value.uses())
    graph.remove(relu)
    relu.replace_input_with(0, value)
    graph.insert_after(pool, [relu])
    name = value.name
    value.name, before.name = writer.name(f"{name}/pooled"), name
    before.type, before.shape = value.type, value.shape
    for use in readers:
        use.node.replace_input_with(use.idx, before)
    return before


def replace_relu_by_max(relu: ir.Node, writer: Writer) -> None:
    """Replace the Relu behind a Gemm with a float result by a Max with 0.

    Before:  y = Relu(Gemm(DequantizeLinear(x8), DequantizeLinear(W8)))
    After:   y = Max(Gemm(DequantizeLinear(x8), DequantizeLinear(W8)), 0)
    ONNX Runtime fuses a Gemm with a Relu before it looks for integer operators, and then computes both in float.
    Left alone: any operator but a Relu.
    """
    if relu.op_type != "Relu" or not isinstance(relu.graph, ir.Graph):
        return
    zero = writer.initializer(relu.graph, f"{relu.name}/zero", np.asarray(0, np.float32))
    replace_node(relu, ir.node("Max", [relu.inputs[0], zero], name=relu.name))


def to_integer_product(node: ir.Node) -> None:
    """Replace a MatMul of dequantized factors with a bias behind it by the integer operator with a float result.

    Before:  y = MatMul(DequantizeLinear(x8), DequantizeLinear(W8)), which an Add reads
    After:   y = MatMulIntegerToFloat(x8, W8, x_scale, W_scale, x_zero_point, W_zero_point)
    ONNX Runtime fuses a MatMul and an Add to a float Gemm before it looks for integer operators: also between two
    reshapes where all lengths of more than two axes are known.
    Left alone: a MatMul without an Add behind it, which the runtime does not fuse.
    """
    reader = sole_reader(node.outputs[0])
    if not is_standard(reader, "Add"):
        return
    (a, a_scale, a_zero), (b, b_scale, b_zero) = (integer_source(value) for value in node.inputs)
    pairs = [value.producer() for value in node.inputs if value is not None]
    inputs = [a, b, a_scale, b_scale, a_zero, b_zero]
    replace_node(node, ir.node("MatMulIntegerToFloat", inputs, domain=MS, name=node.name))
    for dq in pairs:
        remove_if_unread(dq)


def move_signed_pairs(model: ir.Model) -> int:
    """Give signed activations that are quantized already the operators of com.microsoft, in place; return how many.

    Before:  DequantizeLinear(QuantizeLinear(x, s, int8 z), s, int8 z)
    After:   com.microsoft.DequantizeLinear(com.microsoft.QuantizeLinear(x, s, z), s, z)
    ONNX Runtime 1.31 and 1.32 cannot load a model of opset 21 or later with a standard pair before a Transpose: they
    move the pair, set output_dtype, and then fail to make it unsigned. `Writer.of` avoids this for new pairs.
    Left alone: dequantized constants; scales in blocks; zero points that are computed or not there.
    """
    if model.opset_imports.get("", 0) < FIRST_WITH_TYPE:
        return 0
    nodes = [node for graph in model.graphs() for node in graph if _is_signed_conversion(node)]
    for node in nodes:
        node.domain = MS
        for name in IMPLIED:
            node.attributes.pop(name, None)
    return len(nodes)


def _is_signed_conversion(node: ir.Node) -> bool:
    """Whether a node is a standard conversion between a computed float tensor and int8."""
    if node.domain or node.op_type not in QDQ or constant(node.inputs[0]) is not None:
        return False
    zero = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    return zero is not None and zero.dtype is ir.DataType.INT8 and node.attributes.keys() <= {"axis", *IMPLIED}


def pad_every_axis(model: ir.Model) -> int:
    """Give each Pad along selected axes pads for all axes, in place; return how many nodes changed.

    Before:  y = Pad(x (N, C, H, W), pads [p, q], value, axes [1])
    After:   y = Pad(x, pads [0, p, 0, 0, 0, q, 0, 0], value)
    ONNX Runtime 1.31 changes the layout of tensors between integer convolutions, and then reads the pads of selected
    axes as pads of all axes: the session fails when it runs.
    Left alone: computed pads or axes; an unknown rank.
    """
    every = (node for graph in model.graphs() for node in graph if is_standard(node, "Pad"))
    selective = [node for node in every if pads.selects_axes(node)]
    values = inferred(model, bodies=True) if selective else {}
    taken = names(model) if selective else set()
    return sum(_pad_every_axis(node, values, taken) for node in selective)


def _pad_every_axis(node: ir.Node, values: Mapping[str, ir.Value], taken: set[str]) -> int:
    """Give one Pad pads for all axes; `values` has the rank of its input. Return 1 when the node changed, else 0."""
    x, old, _, axes = node.inputs
    known = values.get(str(x.name)) if x is not None else None
    lengths = pads.lengths(node, len(known.shape)) if known is not None and known.shape is not None else None
    if old is None or lengths is None:
        return 0
    name = unused_name(taken, f"{old.name}/every_axis")
    every = np.concatenate(lengths, dtype=np.int64)
    node.replace_input_with(pads.LENGTHS, add_initializer(graph_of(node), name, every))
    node.resize_inputs(pads.AXES)
    discard(old, axes)
    return 1

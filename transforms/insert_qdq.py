"""Write a plan into the graph: QuantizeLinear and DequantizeLinear pairs, integer weights, dynamic products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import onnx_ir as ir

from .graph import constant, inferred, nodes_by_name, sole_reader, take_place
from .int8_forms import (
    gate_params,
    lay_bare,
    pad_every_axis,
    store_weights,
    to_dynamic,
    to_integer_product,
    to_lookup,
    to_qattention,
    would_merge,
)
from .int8_weights import Adjustment, WeightWriter, shift_behind
from .ops import GATE, MS, OPS, RELUS
from .packed_conv import pack_pixels
from .plan import Domain, Impl, Plan, Unit
from .qparams import Array, QParams, Scheme, quantize
from .units import activations
from .writer import Writer

# Operators of which the runtime makes an integer one between DequantizeLinear and QuantizeLinear, asked or not
FUSED = frozenset({"Softmax", *(name for name, row in OPS.items() if row.kind == "arith" and name != "HardSigmoid")})
Use = tuple[ir.Node, int]  # a reader and which of its inputs


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of a plan.

    Attributes:
        applied: How many tensors and constants became integers.
        relieved: By unit, the output channels whose weights lost range so that 16 bits cannot saturate.
    """

    applied: int = 0
    relieved: Mapping[str, int] = field(default_factory=dict)


def insert_qdq(
    model: ir.Model,
    *,
    plan: Plan,
    qparams: Mapping[str, QParams],
    means: Mapping[str, Array] | None = None,
    adjusted: Mapping[str, Adjustment] | None = None,
    scheme: Scheme | None = None,
    exact: bool = True,
) -> Inserted:
    """Put a quantize/dequantize pair on every tensor that the plan has in uint8, and int8 weights in its units.

    Before:  y = Relu(Conv(x, W, b))
    After:   x' = DequantizeLinear(QuantizeLinear(x)),  W' = DequantizeLinear(int8 W, axis=0),
             b' = DequantizeLinear(int32 b, scale s_x * s_w),
             y = DequantizeLinear(QuantizeLinear(Relu(Conv(x', W', b'))))
    A tensor has one pair however many readers it has, and one more in each body of control flow that computes on it in
    integers. Of a tensor that a float operator produces, only the readers that compute in integers read the
    dequantized copy; one that an integer kernel produces has no float original.
    Left alone: every unit that the plan has in float, its weights included.

    Args:
        model: A simplified model: weights are initializers, Gemm has alpha = beta = 1, names are unique.
        plan: What becomes int8.
        qparams: Scale and zero point of every tensor in ``plan.observed``.
        means: Mean per channel, (C,), of tensors that integer units read; biases are corrected by them
            (`bias_correction.mean_shift`).
        adjusted: By unit, weights and corrections of biases that were found on data, which win; of a MatMul the Add
            behind it has the bias.
        scheme: The types of weights; of activations `qparams` has them. int8, symmetric, when None.
        exact: Whether the target adds products of 8 bits exactly; if not, weights lose range where 16 bits could
            saturate (`saturation`).
    """
    scheme = scheme or Scheme()
    if plan.quantized:
        pad_every_axis(model)
    shifted = frozenset(unit.name for unit in plan.units if plan.impl(unit) is Impl.U8_GEMM)
    weights = WeightWriter(
        Writer.of(model, scheme), scheme.weight_params, means or {}, adjusted or {}, exact, shifted=shifted
    )
    nodes = nodes_by_name(model)
    for name, found in weights.adjusted.items():
        if found.shift is not None and nodes[name].op_type == "MatMul":
            shift_behind(nodes[name], found.shift)
    integer = [unit for unit in plan.units if plan.impl(unit).reads_u8]
    lookups = [node for unit in integer for node in map(nodes.__getitem__, unit.nodes) if node.op_type == "HardSigmoid"]
    qparams = {**qparams, **{str(node.outputs[0].name): gate_params(node) for node in lookups}}
    rewritten = [unit for unit in plan.units if plan.impl(unit) in (Impl.DYNAMIC, Impl.WEIGHT)]
    applied = sum(_rewrite_unit(nodes[unit.nodes[0]], unit, plan.impl(unit), weights) for unit in rewritten)
    for unit in integer:
        applied += _constants(nodes[unit.nodes[0]], unit, qparams[plan.root(unit.inputs[0])], scheme, weights)
    applied += _insert_pairs(model, plan, qparams, weights.writer)
    for unit in integer:
        if unit.op == GATE:
            applied += _insert_gate([nodes[name] for name in unit.nodes], scheme, qparams, weights.writer)
    for node in lookups:
        to_lookup(node, weights.writer)
    if not plan.portable:
        _hold_floats(plan, nodes, weights.writer)
        _import_runtime_domain(model)  # without which no shape behind its operators is inferred
        values = inferred(model) if any(unit.op == "Conv" for unit in integer) and exact else {}
        for unit in integer:
            _suit_runtime(unit, plan, nodes, values, weights.writer)
    _import_runtime_domain(model)
    return Inserted(applied, weights.relieved)


def _hold_floats(plan: Plan, nodes: Mapping[str, ir.Node], writer: Writer) -> None:
    """Keep ONNX Runtime from computing in integers what the plan has in float."""
    floats = [unit for unit in plan.units if plan.impl(unit) is Impl.FLOAT]
    for unit in floats:
        between = plan.produced_u8.intersection(unit.inputs) and plan.read_u8.intersection(unit.outputs)
        if unit.op == "Conv" and between:
            _hold_float(nodes[unit.nodes[0]])
    for unit in floats:
        if unit.op in FUSED and plan.read_u8.issuperset(unit.outputs):
            _hold_apart(nodes[unit.nodes[-1]], writer)


def _suit_runtime(
    unit: Unit, plan: Plan, nodes: Mapping[str, ir.Node], values: Mapping[str, ir.Value], writer: Writer
) -> None:
    """Spell an operator between pairs as ONNX Runtime computes it in integers, and fast.

    Args:
        unit: It.
        plan: The plan.
        nodes: The nodes of the model by name.
        values: Its tensors with their shapes; none where 16 bits hold pairs of products, which packing would change.
        writer: Writes constants.
    """
    node = nodes[unit.nodes[0]]
    if unit.op == "Conv" and values:
        pack_pixels(node, values, writer)
    elif OPS[unit.op].bare:
        lay_bare(node)
    elif unit.op == f"{MS}.Attention":
        to_qattention(node)
    elif unit.op == "MatMul" and plan.impl(unit) is Impl.U8_FLOAT and would_merge(node):
        to_integer_product(node)
    elif unit.op == "Gemm" and plan.impl(unit) is Impl.U8_FLOAT:
        _hold_relu(nodes[unit.nodes[-1]], writer)


def _import_runtime_domain(model: ir.Model) -> None:
    """Declare the runtime's own domain where a node is of it."""
    if any(node.domain == MS for graph in model.graphs() for node in graph):
        model.opset_imports[MS] = 1


def _rewrite_unit(node: ir.Node, unit: Unit, impl: Impl, weights: WeightWriter) -> int:
    """Rewrite a unit that needs no pairs; return how many constants changed."""
    return to_dynamic(node, unit, weights) if impl is Impl.DYNAMIC else store_weights(node, unit, weights)


def _insert_gate(nodes: Sequence[ir.Node], scheme: Scheme, qparams: Mapping[str, QParams], writer: Writer) -> int:
    """Put a pair between the two operators of a gate; return how many."""
    gate, product = nodes
    value, graph = gate.outputs[0], gate.graph
    assert isinstance(graph, ir.Graph)  # a unit of the plan stands in a graph
    name = str(value.name)
    params = qparams[name] if gate.op_type == "HardSigmoid" else scheme.activation_params(0.0, 1.0)
    uses = [(product, index) for index, each in enumerate(product.inputs) if each is value]
    _insert_pair(value, graph, uses, whole=False, root=name, params=params, writer=writer)
    return 1


def _constants(node: ir.Node, unit: Unit, x: QParams, scheme: Scheme, weights: WeightWriter) -> int:
    """Make the constants of a unit on uint8 integers; return how many there were."""
    if OPS[unit.op].kind == "compute":
        return weights.static(node, unit, float(x.scale)) if constant(node.inputs[1]) is not None else 0
    operands = list(constant_operands(node, unit, scheme))
    for index, stored, params in operands:
        weights.writer.replace_constant(node, index, stored, params)
    return len(operands)


def constant_operands(node: ir.Node, unit: Unit, scheme: Scheme) -> Iterator[tuple[int, Array, QParams]]:
    """Yield the constants that a unit of arithmetic reads as activations: index, integers, and their parameters."""
    row = OPS[unit.op]
    for index in (row.activations or range(len(node.inputs))) if row.kind == "arith" else ():
        tensor = constant(node.inputs[index])
        if tensor is not None:
            array = tensor.numpy()
            params = scheme.activation_params(float(array.min()), float(array.max()))
            yield index, quantize(array, params), params


def _insert_pairs(model: ir.Model, plan: Plan, qparams: Mapping[str, QParams], writer: Writer) -> int:
    """Put the pairs on every tensor of the plan, and into every body that computes on it; return how many."""
    nodes = nodes_by_name(model)
    integer = [unit for unit in plan.units if plan.impl(unit).reads_u8]
    readers = {id(nodes[name]) for unit in integer for name in (unit.nodes if unit.op == GATE else unit.nodes[:1])}
    values = ir.convenience.create_value_mapping(model.graph)
    count = 0
    for tensor in plan.quantized:
        value, root = values[tensor], plan.root(tensor)
        produced = plan.domain(tensor) is Domain.U8
        if not produced:
            value = _hold_boundary(value, writer)
        home = value.graph
        assert isinstance(home, ir.Graph)  # functions are inlined
        uses = [(use.node, use.idx) for use in value.uses() if _reads_u8(use.node, use.idx, readers)]
        abroad: dict[ir.Graph, list[Use]] = {}
        for node, index in uses:
            if isinstance(node.graph, ir.Graph) and node.graph is not home:
                abroad.setdefault(node.graph, []).append((node, index))
        pair = partial(_insert_pair, writer=writer, root=root, params=qparams[root])
        result = value
        if produced or len(uses) > sum(map(len, abroad.values())):
            everyone = [(use.node, use.idx) for use in value.uses()]
            at_home = everyone if produced else [use for use in uses if use[0].graph is home]
            result = pair(value, home, at_home, whole=produced)
            count += 1
        for body, inside in abroad.items():
            pair(result if produced else value, body, inside, whole=False)
            count += 1
    return count


def _insert_pair(
    value: ir.Value,
    graph: ir.Graph,
    uses: list[Use],
    *,
    whole: bool,
    root: str,
    params: QParams,
    writer: Writer,
) -> ir.Value:
    """Put Q and DQ on `value` in `graph`; `uses`, and graph outputs where `whole`, read the dequantized copy."""
    name = str(value.name)
    parameters = writer.parameters(graph, root, params)
    q = ir.node("QuantizeLinear", [value, *parameters], domain=writer.domain, name=writer.name(f"{name}/quantize"))
    quantized = q.outputs[0]
    quantized.name = writer.name(f"{name}/quantized")
    quantized.dtype, quantized.shape = ir.DataType.from_numpy(params.zero_point.dtype), value.shape
    called = writer.name(f"{name}/dequantize")
    dq = ir.node("DequantizeLinear", [quantized, *parameters], domain=writer.domain, name=called)
    dequantized = dq.outputs[0]
    dequantized.name = writer.name(f"{name}/dequantized")
    dequantized.type, dequantized.shape = value.type, value.shape
    producer = value.producer()
    if producer is None or producer.graph is not graph:
        graph.insert_before(graph[0], [q, dq])
    else:
        graph.insert_after(producer, [q, dq])
    for node, index in uses:
        node.replace_input_with(index, dequantized)
    if whole and value.is_graph_output():
        value.name, dequantized.name = writer.name(f"{name}/float"), name
        for index, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[index] = dequantized
    return dequantized


def _hold_boundary(value: ir.Value, writer: Writer) -> ir.Value:
    """Move a Relu behind the MaxPool whose float result is about to be quantized; return that result.

    Before:  MaxPool(Relu(x)) -> QuantizeLinear
    After:   Relu(MaxPool(x)) -> QuantizeLinear
    The two commute. ONNX Runtime moves a QuantizeLinear above a MaxPool, and a MaxPool on uint8 outside of a chain of
    integer convolutions takes 27 times as long as the float one; a Relu in between stops it.
    """
    pool = value.producer()
    before = pool.inputs[0] if pool is not None and pool.op_type == "MaxPool" and not pool.domain else None
    relu = before.producer() if before is not None else None
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


def _hold_float(conv: ir.Node) -> None:
    """Spell a float Conv between integer neighbours as the runtime's FusedConv with an activation that does nothing.

    ONNX Runtime quantizes the weights of a Conv between DequantizeLinear and QuantizeLinear by itself, to one scale for
    all channels; a FusedConv it leaves alone, and runs it in the same float kernel. Other runtimes want the activation.
    """
    conv.op_type, conv.domain = "FusedConv", MS
    conv.attributes["activation"] = ir.AttrString("activation", "LeakyRelu")
    conv.attributes["activation_params"] = ir.AttrFloat32s("activation_params", [1.0])


def _hold_relu(relu: ir.Node, writer: Writer) -> None:
    """Spell a Relu behind a Gemm that writes float as a Max with 0.

    ONNX Runtime fuses a Gemm with a Relu before it looks for integer operators, and then computes both in float.
    Left alone: anything but a Relu.
    """
    if relu.op_type != "Relu" or not isinstance(relu.graph, ir.Graph):
        return
    zero = writer.initializer(relu.graph, f"{relu.name}/zero", np.asarray(0, np.float32))
    take_place(relu, ir.node("Max", [relu.inputs[0], zero], name=relu.name))


def _hold_apart(node: ir.Node, writer: Writer) -> None:
    """Put an activation that does nothing between a float operator and the QuantizeLinear of its result.

    Before:  QuantizeLinear(Add(DequantizeLinear(a), DequantizeLinear(b)))
    After:   QuantizeLinear(LeakyRelu(Add(DequantizeLinear(a), DequantizeLinear(b)), alpha = 1))
    Between the two ONNX Runtime would compute the operator in integers after all. An Identity it would remove.
    Left alone: an operator one of whose operands is float, which is not fused.
    """
    value, graph = node.outputs[0], node.graph
    first = node.inputs[0].producer() if node.inputs[0] is not None and node.op_type in RELUS else node
    operands = [_origin(v) for v in (first or node).inputs if v is not None and constant(v) is None]
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


def _origin(value: ir.Value) -> ir.Node | None:
    """Return what computes a tensor, Casts aside: those from float to float the runtime removes."""
    node = value.producer()
    while node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node


def _reads_u8(node: ir.Node, index: int, readers: set[int]) -> bool:
    """Whether input `index` of `node` is an activation that an integer kernel reads."""
    return id(node) in readers and node.inputs[index] in activations(node)

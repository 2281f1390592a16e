"""Rewrite a graph as a plan says: QuantizeLinear and DequantizeLinear pairs, integer weights, dynamic products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import onnx_ir as ir

from ..graphs.inference import inferred
from ..graphs.queries import MS, constant, nodes_by_name
from .block_forms import to_blocks
from .forms import (
    lookups_of,
    store_weights,
    to_dynamic,
    to_integer_move,
    to_lookup,
    to_native,
    to_qattention,
    with_lookups,
)
from .ops import ATTENTIONS, GATE, OPS
from .packed_conv import pack_pixels, shapes_read
from .plan import Domain, Impl, Plan, Unit
from .qparams import Array, QParams, Scheme, quantize
from .runtime_workarounds import (
    keep_floats,
    move_relu_behind_max_pool,
    move_signed_pairs,
    pad_every_axis,
    replace_relu_by_max,
    to_integer_product,
)
from .units import activations
from .weights import Adjustment, WeightWriter, shift_behind
from .writer import Writer

WITHOUT_PAIRS: Mapping[Impl, Callable[[ir.Node, Unit, WeightWriter], int]] = {
    Impl.DYNAMIC: to_dynamic,
    Impl.DYNAMIC_NATIVE: to_native,
    Impl.BLOCK: to_blocks,
    Impl.BLOCK_NATIVE: to_blocks,
    Impl.WEIGHT: store_weights,
}
"""By form, the function that rewrites a unit that needs no pairs; it returns the number of constants that changed."""
Use = tuple[ir.Node, int]  # a reader and the index of its input


@dataclass(frozen=True, slots=True)
class Inserted:
    """The result of `insert_qdq`.

    Attributes:
        applied: The number of tensors and constants that became integers.
        relieved: By unit, the number of output channels whose weights lost range so that 16 bits cannot saturate.
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
    """Put a quantize/dequantize pair on each tensor that the plan has in uint8, and store weights as int8, in place.

    Before:  y = Relu(Conv(x, W, b))
    After:   x' = DequantizeLinear(QuantizeLinear(x)),  W' = DequantizeLinear(int8 W, axis=0),
             b' = DequantizeLinear(int32 b, scale s_x * s_w),
             y = DequantizeLinear(QuantizeLinear(Relu(Conv(x', W', b'))))
    A tensor has one pair for all its readers, and one more in each body of control flow that computes on it in
    integers. When a float operator produces a tensor, only the readers that compute in integers read the dequantized
    copy. When an integer kernel produces it, all readers do.
    Left alone: units that the plan has in float, and their weights.

    Args:
        model: A simplified model: weights are initializers, Gemm has alpha = beta = 1, names are unique.
        plan: The implementation of each unit.
        qparams: Scale and zero point of each tensor in ``plan.observed``.
        means: Mean per channel, (C,), of tensors that integer units read. `bias_correction.mean_shift` corrects biases
            with these means.
        adjusted: By unit, integer weights and bias corrections computed from data; they override `means` and rounding
            to nearest. The bias of a MatMul is in the Add behind it.
        scheme: The integer types of weights; None for symmetric int8. The types of activations are in `qparams`.
        exact: Whether the target adds products of 8 bits exactly. If not, weights lose range where 16 bits could
            saturate (`saturation`).
    """
    scheme = scheme or Scheme()
    if plan.quantized:
        pad_every_axis(model)
    if not plan.portable:
        move_signed_pairs(model)
    weights = WeightWriter(
        Writer.of(model, scheme),
        scheme.weight_params,
        means or {},
        adjusted or {},
        exact,
        shifted=frozenset(unit.name for unit in plan.units if plan.shifts(unit)),
        blocks=scheme.blocks,
        portable=plan.portable,
    )
    nodes = nodes_by_name(model)
    _shift_behind_products(nodes, weights.adjusted)
    integer = [unit for unit in plan.units if plan.impl(unit).reads_u8]
    lookups = lookups_of(plan, nodes)
    qparams = with_lookups(lookups, qparams)
    applied = _rewrite_without_pairs(plan, nodes, weights)
    for unit in integer:
        applied += _constants(nodes[unit.nodes[0]], unit, qparams[plan.root(unit.inputs[0])], scheme, weights)
    applied += _insert_pairs(model, plan, qparams, weights.writer)
    gates = [[nodes[name] for name in unit.nodes] for unit in integer if unit.op == GATE]
    applied += sum(_insert_gate(gate, scheme, qparams, weights.writer) for gate in gates)
    for node in lookups:
        to_lookup(node, weights.writer)
    if not plan.portable:
        _to_runtime_forms(model, plan, nodes, weights.writer, exact=exact)
    _import_runtime_domain(model)
    return Inserted(applied, weights.relieved)


def _shift_behind_products(nodes: Mapping[str, ir.Node], adjusted: Mapping[str, Adjustment]) -> None:
    """Correct the biases of MatMuls, which are in the Adds behind them."""
    for name, adjustment in adjusted.items():
        if adjustment.shift is not None and nodes[name].op_type == "MatMul":
            shift_behind(nodes[name], adjustment.shift)


def _rewrite_without_pairs(plan: Plan, nodes: Mapping[str, ir.Node], weights: WeightWriter) -> int:
    """Rewrite the units that need no pairs; return the number of constants that became integers."""
    rewritten = [u for u in plan.units if plan.impl(u) in WITHOUT_PAIRS and u.op not in ATTENTIONS]  # stays as it is
    return sum(WITHOUT_PAIRS[plan.impl(unit)](nodes[unit.nodes[0]], unit, weights) for unit in rewritten)


def _to_runtime_forms(
    model: ir.Model, plan: Plan, nodes: Mapping[str, ir.Node], writer: Writer, *, exact: bool
) -> None:
    """Rewrite what is between pairs in the forms that ONNX Runtime computes in integers, and fastest."""
    integer = [unit for unit in plan.units if plan.impl(unit).reads_u8]
    keep_floats(plan, nodes, writer)
    _import_runtime_domain(model)  # required to infer the shapes behind its operators
    values = _shapes_to_pack(model, [nodes[unit.nodes[0]] for unit in integer if unit.op == "Conv"]) if exact else {}
    for unit in integer:
        _to_runtime_form(unit, plan, nodes, values, writer)


def _shapes_to_pack(model: ir.Model, convolutions: Sequence[ir.Node]) -> Mapping[str, ir.Value]:
    """Return the tensors by name, with shapes, that `pack_pixels` reads of some convolutions; empty if it reads none.

    Shapes are inferred only where they are not recorded: of a model of thousands of nodes that takes half a second. The
    recorded shape of a graph output is only declared.
    """
    read = [value for node in convolutions for value in shapes_read(node) or () if value is not None]
    sure = (value.shape is not None and value.shape.is_static() and not value.is_graph_output() for value in read)
    return {str(value.name): value for value in read} if all(sure) else inferred(model)


def _to_runtime_form(
    unit: Unit, plan: Plan, nodes: Mapping[str, ir.Node], values: Mapping[str, ir.Value], writer: Writer
) -> None:
    """Rewrite a unit between pairs in the form that ONNX Runtime computes in integers, and fastest.

    Args:
        unit: The unit.
        plan: The plan.
        nodes: The nodes of the model by name.
        values: The tensors of the model by name, with shapes. Empty when the target adds pairs of products in 16 bits,
            because packing changes the pairs.
        writer: Writes constants.
    """
    node = nodes[unit.nodes[0]]
    if unit.op == "Conv" and values:
        pack_pixels(node, values, writer, computes_blocks=plan.impl(unit) is Impl.U8_NATIVE)
    elif OPS[unit.op].bare:
        to_integer_move(node)
    elif unit.op == f"{MS}.Attention":
        to_qattention(node)
    elif unit.op == "MatMul" and plan.impl(unit) is Impl.U8_FLOAT:
        to_integer_product(node)
    elif unit.op == "Gemm" and plan.impl(unit) is Impl.U8_FLOAT:
        replace_relu_by_max(nodes[unit.nodes[-1]], writer)


def _import_runtime_domain(model: ir.Model) -> None:
    """Import the runtime's own operator set if a node uses it."""
    if any(node.domain == MS for graph in model.graphs() for node in graph):
        model.opset_imports[MS] = 1


def _insert_gate(nodes: Sequence[ir.Node], scheme: Scheme, qparams: Mapping[str, QParams], writer: Writer) -> int:
    """Put a pair between the two operators of a gate; return the number of pairs, 1."""
    gate, product = nodes
    value, graph = gate.outputs[0], gate.graph
    assert isinstance(graph, ir.Graph)  # a unit of the plan is in a graph
    name = str(value.name)
    params = qparams[name] if gate.op_type == "HardSigmoid" else scheme.activation_params(0.0, 1.0)
    uses = [(product, index) for index, each in enumerate(product.inputs) if each is value]
    _insert_pair(value, graph, uses, whole=False, root=name, params=params, writer=writer)
    return 1


def _constants(node: ir.Node, unit: Unit, x: QParams, scheme: Scheme, weights: WeightWriter) -> int:
    """Replace the constants of a unit that reads uint8 by integers; return their number."""
    if OPS[unit.op].kind == "compute":
        return weights.static(node, unit, float(x.scale)) if constant(node.inputs[1]) is not None else 0
    operands = list(constant_operands(node, unit, scheme))
    for index, stored, params in operands:
        weights.writer.replace_constant(node, index, stored, params)
    return len(operands)


def constant_operands(node: ir.Node, unit: Unit, scheme: Scheme) -> Iterator[tuple[int, Array, QParams]]:
    """Yield the constants that an arithmetic unit reads as activations: input index, integers, and their parameters."""
    row = OPS[unit.op]
    for index in (row.activations or range(len(node.inputs))) if row.kind == "arith" else ():
        tensor = constant(node.inputs[index])
        if tensor is not None:
            array = tensor.numpy()
            params = scheme.activation_params(float(array.min()), float(array.max()))
            yield index, quantize(array, params), params


def _insert_pairs(model: ir.Model, plan: Plan, qparams: Mapping[str, QParams], writer: Writer) -> int:
    """Put pairs on the tensors of the plan, also in each body that computes on them; return the number of pairs."""
    nodes = nodes_by_name(model)
    integer = [unit for unit in plan.units if plan.impl(unit).reads_u8]
    readers = {id(nodes[name]) for unit in integer for name in unit.readers}
    values = ir.convenience.create_value_mapping(model.graph)
    count = 0
    for tensor in plan.quantized:
        value, root = values[tensor], plan.root(tensor)
        produced = plan.domain(tensor) is Domain.U8
        if not produced:
            value = move_relu_behind_max_pool(value, writer)
        home = value.graph
        assert isinstance(home, ir.Graph)  # functions are inlined
        uses = [(use.node, use.idx) for use in value.uses() if _reads_u8(use.node, use.idx, readers)]
        in_bodies: dict[ir.Graph, list[Use]] = {}
        for node, index in uses:
            if isinstance(node.graph, ir.Graph) and node.graph is not home:
                in_bodies.setdefault(node.graph, []).append((node, index))
        pair = partial(_insert_pair, writer=writer, root=root, params=qparams[root])
        result = value
        if produced or len(uses) > sum(map(len, in_bodies.values())):
            all_uses = [(use.node, use.idx) for use in value.uses()]
            home_uses = all_uses if produced else [use for use in uses if use[0].graph is home]
            result = pair(value, home, home_uses, whole=produced)
            count += 1
        for body, body_uses in in_bodies.items():
            pair(result if produced else value, body, body_uses, whole=False)
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
    """Put QuantizeLinear and DequantizeLinear on `value` in `graph`; return the dequantized copy.

    Args:
        value: The float tensor.
        graph: The graph that gets the two nodes.
        uses: The readers that will read the dequantized copy.
        whole: Whether the dequantized copy also replaces a graph output.
        root: The tensor whose scale and zero point are used; tensors with one root share the initializers.
        params: The scale and the zero point.
        writer: Writes names and constants.
    """
    name = str(value.name)
    parameters = writer.parameters(graph, root, params)
    q = ir.node("QuantizeLinear", [value, *parameters], domain=writer.domain, name=writer.name(f"{name}/quantize"))
    quantized = q.outputs[0]
    quantized.name = writer.name(f"{name}/quantized")
    quantized.dtype, quantized.shape = ir.DataType.from_numpy(params.zero_point.dtype), value.shape
    dq_name = writer.name(f"{name}/dequantize")
    dq = ir.node("DequantizeLinear", [quantized, *parameters], domain=writer.domain, name=dq_name)
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


def _reads_u8(node: ir.Node, index: int, readers: set[int]) -> bool:
    """Whether input `index` of `node` is an activation that an integer kernel reads."""
    return id(node) in readers and node.inputs[index] in activations(node)

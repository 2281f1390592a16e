"""Write a plan into the graph as QuantizeLinear and DequantizeLinear pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from .bias_correction import mean_shift
from .graph import add_initializer, constant, drop_unused, names, sole_reader, take
from .ops import MS, OPS
from .plan import Domain, Impl, Plan, Unit
from .qparams import Array, QParams, dequantize, fit_bias, quantize, quantize_bias, symmetric_s8
from .registry import Change
from .units import activations, node_name


def insert_qdq(
    model: ir.Model, *, plan: Plan, qparams: Mapping[str, QParams], means: Mapping[str, Array] | None = None
) -> Change:
    """Put a quantize/dequantize pair on every tensor that the plan has in uint8, and int8 weights in its units.

    Before:  y = Relu(Conv(x, W, b))
    After:   x' = DequantizeLinear(QuantizeLinear(x)),  W' = DequantizeLinear(int8 W, axis=0),
             b' = DequantizeLinear(int32 b, scale s_x * s_w),
             y = DequantizeLinear(QuantizeLinear(Relu(Conv(x', W', b'))))
    A tensor has one pair however many readers it has. Of a tensor that a float operator produces, only the readers
    that compute in integers read the dequantized copy; one that an integer kernel produces has no float original.
    Left alone: every unit that the plan has in float, its weights included.

    Args:
        model: A simplified model: weights are initializers, Gemm has alpha = beta = 1.
        plan: What becomes int8.
        qparams: uint8 scale and zero point of every tensor in ``plan.observed``.
        means: Mean per channel, (C,), of tensors that integer units read; biases are corrected by them
            (`bias_correction.mean_shift`).
    """
    change = Change()
    # QuantizeLinear has an axis from opset 13 on; for older models the runtime's own domain has one
    emitter = _Emitter(model, means or {}, "" if model.opset_imports.get("", 0) >= 13 else MS, names(model))
    nodes = {node_name(node): node for node in model.graph}
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    integer = [unit for unit in plan.units if plan.impl(unit) is not Impl.FLOAT]
    for unit in integer:
        if OPS[unit.op].kind == "compute":
            scale = float(qparams[plan.root(unit.inputs[0])].scale)
            change.applied += emitter.quantize_weights(nodes[unit.nodes[0]], unit, scale)
    readers = {id(nodes[unit.nodes[0]]) for unit in integer}
    for tensor in plan.quantized:
        produced = plan.domain(tensor) is Domain.U8
        value = values[tensor] if produced else _hold_boundary(values[tensor], emitter)
        emitter.insert_pair(value, plan.root(tensor), qparams, None if produced else readers)
        change.applied += 1
    for unit in plan.units:
        between = plan.produced_u8.intersection(unit.inputs) and plan.read_u8.intersection(unit.outputs)
        if unit.op == "Conv" and plan.impl(unit) is Impl.FLOAT and between:
            _hold_float(nodes[unit.nodes[0]])
    if any(node.domain == MS for node in model.graph):
        model.opset_imports[MS] = 1
    return change


def _hold_boundary(value: ir.Value, emitter: _Emitter) -> ir.Value:
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
    value.name, before.name = emitter.name(f"{name}/pooled"), name
    before.type, before.shape = value.type, value.shape
    for use in readers:
        use.node.replace_input_with(use.idx, before)
    return before


def _hold_float(conv: ir.Node) -> None:
    """Spell a float Conv between integer neighbours as the runtime's FusedConv without an activation.

    ONNX Runtime quantizes the weights of a Conv between DequantizeLinear and QuantizeLinear by itself, to one scale for
    all channels; a FusedConv it leaves alone, and runs it in the same float kernel.
    """
    conv.op_type, conv.domain = "FusedConv", MS


@dataclass
class _Emitter:
    """The model being written, with the domain of its pairs, the names taken, and the constants that nodes share."""

    model: ir.Model
    means: Mapping[str, Array]
    domain: str
    taken: set[str]
    stored: dict[object, ir.Value] = field(default_factory=dict)

    def name(self, stem: str) -> str:
        """Take a name that no value and no node has."""
        return take(self.taken, stem)

    def insert_pair(self, value: ir.Value, root: str, qparams: Mapping[str, QParams], readers: set[int] | None) -> None:
        """Put Q and DQ after `value`; `readers` (node ids), or all of them when None, read the dequantized copy."""
        name = str(value.name)
        parameters = self._parameters(root, qparams[root])
        uses = [use for use in value.uses() if readers is None or _reads_u8(use.node, use.idx, readers)]
        q = ir.node("QuantizeLinear", [value, *parameters], domain=self.domain, name=self.name(f"{name}/quantize"))
        quantized = q.outputs[0]
        quantized.name = self.name(f"{name}/quantized")
        quantized.dtype, quantized.shape = ir.DataType.UINT8, value.shape
        called = self.name(f"{name}/dequantize")
        dq = ir.node("DequantizeLinear", [quantized, *parameters], domain=self.domain, name=called)
        dequantized = dq.outputs[0]
        dequantized.name = self.name(f"{name}/dequantized")
        dequantized.type, dequantized.shape = value.type, value.shape
        producer, graph = value.producer(), self.model.graph
        if producer is None:
            graph.insert_before(graph[0], [q, dq])
        else:
            graph.insert_after(producer, [q, dq])
        for use in uses:
            use.node.replace_input_with(use.idx, dequantized)
        if readers is None and value.is_graph_output():
            value.name, dequantized.name = self.name(f"{name}/float"), name
            for index, output in enumerate(graph.outputs):
                if output is value:
                    graph.outputs[index] = dequantized

    def _parameters(self, name: str, params: QParams) -> tuple[ir.Value, ir.Value]:
        """Return the scale and zero-point initializers called after `name`, made once."""
        made = []
        for part, array in (("scale", params.scale), ("zero_point", params.zero_point)):
            key = f"{name}/{part}"
            if key not in self.stored:
                self.stored[key] = add_initializer(self.model.graph, self.name(key), array)
            made.append(self.stored[key])
        return made[0], made[1]

    def quantize_weights(self, node: ir.Node, unit: Unit, input_scale: float) -> int:
        """Give the node of a compute unit int8 weights and an int32 bias; return how many constants changed."""
        weight = node.inputs[1]
        tensor = constant(weight)
        assert weight is not None and tensor is not None  # the planner leaves computed weights in float
        array = tensor.numpy()
        batched = unit.op == "MatMul" and array.ndim > 2  # QLinearMatMul wants one scale for a stack of matrices
        axis = None if batched else OPS[unit.op].channel_axis(node) % array.ndim
        bias = _bias(node)
        params = symmetric_s8(array, axis)
        if bias is not None:
            params = fit_bias(params, bias, input_scale)
        stored = quantize(array, params)
        self._replace(node, 1, stored, params)
        shift = self._shift(node, unit, array - dequantize(stored, params))
        if shift is not None:
            bias = shift if bias is None else bias + shift
        if bias is None:
            return 1
        bias_params = quantize_bias(bias, input_scale, params.scale)
        self._replace(node, 2, quantize(bias, bias_params), bias_params)
        return 2

    def _shift(self, node: ir.Node, unit: Unit, error: Array) -> Array | None:
        """Return what bias correction adds, None where there are no means or the operator has no bias."""
        mean = self.means.get(unit.inputs[0])
        return None if mean is None or OPS[unit.op].bias is None else mean_shift(node, error, mean)

    def _replace(self, node: ir.Node, index: int, array: Array, params: QParams) -> None:
        """Let input `index` of `node` read a DequantizeLinear of `array`; equal constants are stored once."""
        old = node.inputs[index] if index < len(node.inputs) else None
        name = str(old.name) if old is not None else f"{node_name(node)}/bias"
        key = (name, params.axis, params.scale.tobytes(), array.tobytes())
        if key not in self.stored:
            parts = ((str(array.dtype), array), ("scale", params.scale), ("zero_point", params.zero_point))
            graph = self.model.graph
            inputs = [add_initializer(graph, self.name(f"{name}/{part}"), values) for part, values in parts]
            attributes = {} if params.axis is None else {"axis": params.axis}
            stem = str(inputs[0].name)
            called = self.name(f"{stem}/dequantize")
            dq = ir.node("DequantizeLinear", inputs, attributes, domain=self.domain, name=called)
            value = dq.outputs[0]
            value.name = self.name(f"{stem}/dequantized")
            value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(array.shape)
            graph.insert_before(graph[0], [dq])
            self.stored[key] = value
        if index >= len(node.inputs):
            node.resize_inputs(index + 1)
        node.replace_input_with(index, self.stored[key])
        drop_unused(self.model.graph, (old,))


def _reads_u8(node: ir.Node, index: int, readers: set[int]) -> bool:
    """Whether input `index` of `node` is an activation that an integer kernel reads."""
    return id(node) in readers and node.inputs[index] in activations(node)


def _bias(node: ir.Node) -> Array | None:
    """Return a constant bias as a vector (M,), None where there is none."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return None
    tensor = constant(node.inputs[2])
    assert tensor is not None  # the planner leaves a unit with a computed bias in float
    return tensor.numpy().reshape(-1)

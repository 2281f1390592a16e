"""Replace float products by integer products with ranges found at run time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from ..system.numbers import FLOAT_MAX
from .graphs.queries import constant, is_standard, node_name, producer_of
from .graphs.rewriter import add_initializer, names, remove, remove_if_unread, replace, unused_name
from .int8.ops import OPS, only_moves
from .int8.plan import Unit
from .int8.qlinear import Quantized
from .int8.qparams import Array
from .int8.units import units
from .parts.functions import DOMAIN, add_functions, drop_functions
from .patterns.elementwise import clip_bounds
from .registry import Change, TransformError, transform

UINT8, INT32, FLOAT = (ir.TensorType(t) for t in (ir.DataType.UINT8, ir.DataType.INT32, ir.DataType.FLOAT))
Range = tuple[float, float] | None


@dataclass
class _Rewriter:
    """Writes nodes and constants; names are unique and constants are shared."""

    model: ir.Model
    input_range: Range
    fallback_range: Range
    taken: set[str]
    constants: dict[str, ir.Value] = field(default_factory=dict)

    def name(self, stem: str) -> str:
        """Return an unused name, based on `stem`."""
        return unused_name(self.taken, stem)

    def scalar(self, name: str, value: float) -> ir.Value:
        """Return the float initializer called `name`; it is added at the first call."""
        if name not in self.constants:
            self.constants[name] = self.array(name, np.asarray(value, np.float32))
        return self.constants[name]

    def array(self, name: str, values: Array) -> ir.Value:
        """Add an initializer; its name is based on `name`."""
        return add_initializer(self.model.graph, self.name(name), values)

    def node(
        self,
        op: str,
        inputs: list[ir.Value],
        name: str,
        *,
        outputs: int = 1,
        domain: str = "",
        attributes: Mapping[str, ir.Attr | int] = MappingProxyType({}),
    ) -> ir.Node:
        """Return a new node; its name is based on `name`, the names of its outputs on its name."""
        called = self.name(name.replace(";", "_"))  # a semicolon ends a name in a log
        node = ir.node(op, inputs, attributes, domain=domain, name=called, num_outputs=outputs)
        for index, output in enumerate(node.outputs):
            output.name = self.name(f"{node.name}:{index}")
        return node


@transform("quantize_nodes", after=("quantize_weights",), changes_values=True)
def quantize_nodes(
    model: ir.Model,
    *,
    input_min: float | None = None,
    input_max: float | None = None,
    fallback_min: float | None = None,
    fallback_max: float | None = None,
    ignore_op: tuple[str, ...] = (),
) -> Change:
    """Compute Conv, Gemm and MatMul with int8 weights in integers; each run finds its ranges.

    Before:  y = Relu(Conv(x, DequantizeLinear(W8, sw), b))
    After:   lo, hi = ReduceMin(x), ReduceMax(x);   q, s, z = Quantize(x, lo, hi)
             acc = ConvInteger(q, W8, z)                                                             int32
             lo, hi = RequantizationRange(acc, s, sw, b, 0, max);  q, s, z = Requantize(acc, s, sw, b, lo, hi)
             y = DequantizeLinear(q, s, z)
    A Relu or Clip becomes the bounds of the range. MaxPool, Reshape and other operators that only move values run on
    uint8 between two such operators. An operator reads the uint8 tensor behind a DequantizeLinear directly.
    Left alone: weights that are not int8 (``float-weights``), weights that are not symmetric with one scale or one
    scale per output channel (``weight-form``), a bias that is computed or not per channel (``bias-form``), MatMul
    weights of more than two dimensions (``batched-weights``), a Gemm with transA, alpha or beta (``gemm-form``),
    ignored operators (``ignored``).

    Options:
        input_min, input_max: A fixed range of the graph's inputs; without it, each run finds the range.
        fallback_min, fallback_max: A fixed range of every result; without it, each run finds the ranges.
        ignore_op: Operator types that stay float.

    Raises:
        TransformError: Only one of two bounds is given, or the minimum is not below the maximum.
    """
    rewriter = _Rewriter(
        model, _both("input", input_min, input_max), _both("fallback", fallback_min, fallback_max), names(model)
    )
    change = Change()
    nodes = {node_name(node): node for node in model.graph}
    add_functions(model)
    for unit in units(model.graph):
        row = OPS.get(unit.op)
        anchor = nodes[unit.nodes[0]]
        if row is None or anchor.domain or row.kind not in ("compute", "same") or row.native_u8:
            continue
        reason = "ignored" if unit.op in ignore_op else _obstacle(anchor, unit)
        if reason:
            change.skip(reason)
        elif row.bare or len(anchor.outputs) > 1:
            continue  # the operator does not map one tensor to one tensor on uint8
        elif row.kind == "compute":
            _integer_product(rewriter, anchor, [nodes[name] for name in unit.nodes])
            change.applied += 1
        else:
            change.applied += _move_below(rewriter, anchor)
    if change.applied:
        _drop_idle_dequantizers(model)
    drop_functions(model)
    return change


def _both(kind: str, low: float | None, high: float | None) -> Range:
    """Return a range; None if neither bound is set.

    Raises:
        TransformError: One bound is missing, or the bounds are not in order.
    """
    if low is None and high is None:
        return None
    if low is None or high is None or low >= high:
        raise TransformError(f"give both {kind}_min and {kind}_max, the first below the second")
    return low, high


def _obstacle(node: ir.Node, unit: Unit) -> str:
    """Return the skip code if a Conv, Gemm or MatMul cannot be rewritten; empty if it can."""
    row = OPS[unit.op]
    if row.kind != "compute":
        return ""
    weight = _dequantized(node.inputs[1])
    tensor = None if weight is None else constant(weight[0])
    if weight is None or tensor is None or tensor.dtype is not ir.DataType.INT8:
        return "float-weights"
    if unit.op == "MatMul" and len(tensor.shape) != 2:
        return "batched-weights"
    if not _weight_fits(node, weight, len(tensor.shape)):
        return "weight-form"
    if not _bias_fits(node, tensor):
        return "bias-form"
    if unit.op == "Gemm":
        a = node.attributes
        plain = not a.get_int("transA", 0) and a.get_float("alpha", 1.0) == 1.0 and a.get_float("beta", 1.0) == 1.0
        return "" if plain else "gemm-form"
    return ""


def _weight_fits(node: ir.Node, weight: Quantized, rank: int) -> bool:
    """Whether dequantized weights have zero point 0 and one scale, or one per output channel."""
    scale, zero = constant(weight[1]), constant(weight[2])
    if scale is None or zero is None or zero.numpy().any():
        return False
    axis = node.inputs[1].producer().attributes.get_int("axis", 1)  # type: ignore[union-attr]
    return scale.size == 1 or (len(scale.shape) == 1 and (axis - OPS[node.op_type].channel_axis(node)) % rank == 0)


def _bias_fits(node: ir.Node, weight: ir.TensorProtocol) -> bool:
    """Whether the bias, if any, is a constant of one value, or of one per output channel."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return True
    bias = constant(node.inputs[2])
    axis = OPS[node.op_type].channel_axis(node)
    channels = int(weight.shape[axis])  # type: ignore[arg-type]
    return bias is not None and (bias.size == 1 or bias.size == bias.shape[-1] == channels)


def _dequantized(value: ir.Value | None) -> Quantized | None:
    """Return the integer tensor, scale and zero point that a DequantizeLinear turns into `value`."""
    node = producer_of(value)
    if not is_standard(node, "DequantizeLinear") or len(node.inputs) < 3:
        return None
    q, scale, zero = node.inputs[:3]
    return None if q is None or scale is None or zero is None else (q, scale, zero)


def _uint8(value: ir.Value | None) -> Quantized | None:
    """Return the uint8 tensor, scale and zero point of `value`, if a DequantizeLinear with one scale writes it."""
    ready = _dequantized(value)
    scale = None if ready is None else constant(ready[1])
    one = scale is None or scale.size == 1
    return ready if ready is not None and ready[0].dtype is ir.DataType.UINT8 and one else None


def _quantized(rewriter: _Rewriter, x: ir.Value) -> Quantized:
    """Return `x` in uint8: the input of its DequantizeLinear, or the result of a Quantize with the range of the run."""
    ready = _uint8(x)
    if ready is not None:
        return ready
    name = f"{x.name}/eightbit"
    for use in x.uses():
        if use.node.domain == DOMAIN and use.node.op_type == "Quantize":
            return use.node.outputs[0], use.node.outputs[1], use.node.outputs[2]
    ranged: list[ir.Node] = []
    if x.is_graph_input() and rewriter.input_range is not None:
        lo, hi = (
            rewriter.scalar(f"{name}/{part}", bound)
            for part, bound in zip(("min", "max"), rewriter.input_range, strict=True)
        )
    else:
        ranged = [
            rewriter.node(op, [x], f"{name}/{part}", attributes={"keepdims": 0})
            for op, part in (("ReduceMin", "min"), ("ReduceMax", "max"))
        ]
        lo, hi = ranged[0].outputs[0], ranged[1].outputs[0]
        lo.type, hi.type = FLOAT, FLOAT
    quantize = rewriter.node("Quantize", [x, lo, hi], f"{name}/quantize", outputs=3, domain=DOMAIN)
    quantize.outputs[0].shape = x.shape
    _type(quantize.outputs, UINT8, FLOAT, UINT8)
    graph = rewriter.model.graph
    producer = x.producer()
    if producer is None:
        graph.insert_before(graph[0], [*ranged, quantize])
    else:
        graph.insert_after(producer, [*ranged, quantize])
    return quantize.outputs[0], quantize.outputs[1], quantize.outputs[2]


def _integer_product(rewriter: _Rewriter, anchor: ir.Node, nodes: list[ir.Node]) -> None:
    """Replace a Conv, Gemm or MatMul, and the Relu or Clip that it absorbs, by integer nodes."""
    x, weight = anchor.inputs[0], _dequantized(anchor.inputs[1])
    assert x is not None and weight is not None  # `_obstacle` checked both
    result, name = nodes[-1].outputs[0], f"{node_name(anchor)}/eightbit"
    q, x_scale, x_zero = _quantized(rewriter, x)
    w, w_scale, bias = _operands(rewriter, anchor, name, weight)
    kind, attributes = ("ConvInteger", dict(anchor.attributes)) if anchor.op_type == "Conv" else ("MatMulInteger", {})
    product = rewriter.node(kind, [q, w, x_zero], name, attributes=attributes)
    acc = product.outputs[0]
    acc.shape = anchor.outputs[0].shape or (ir.Shape([None, None]) if anchor.op_type == "Gemm" else None)
    lo, hi, ranged = _result_range(rewriter, [acc, x_scale, w_scale, bias], name, nodes)
    requantize = rewriter.node(
        "Requantize", [acc, x_scale, w_scale, bias, lo, hi], f"{name}/requantize", outputs=3, domain=DOMAIN
    )
    dequantize = rewriter.node("DequantizeLinear", list(requantize.outputs), f"{name}/dequantize")
    _type([acc, *requantize.outputs, *dequantize.outputs], INT32, UINT8, FLOAT, UINT8, FLOAT)
    requantize.outputs[0].shape = dequantize.outputs[0].shape = result.shape
    rewriter.model.graph.insert_after(nodes[-1], [product, *ranged, requantize, dequantize])
    replace(result, dequantize.outputs[0])
    for node in reversed(nodes):
        remove(node)


def _result_range(
    rewriter: _Rewriter, operands: list[ir.Value], name: str, nodes: list[ir.Node]
) -> tuple[ir.Value, ir.Value, list[ir.Node]]:
    """Return the minimum and maximum of the result, and the nodes that compute them: none for a fixed range."""
    least, most = (clip_bounds(nodes[-1]) if len(nodes) > 1 else None) or (-FLOAT_MAX, FLOAT_MAX)
    if rewriter.fallback_range is not None:
        low, high = rewriter.fallback_range
        lo = rewriter.scalar(f"{name}/fallback_min", max(low, least))
        hi = rewriter.scalar(f"{name}/fallback_max", min(high, most))
        return lo, hi, []
    limits = [
        rewriter.scalar(f"requant/least_{least:.9g}", max(least, -FLOAT_MAX)),
        rewriter.scalar(f"requant/most_{most:.9g}", min(most, FLOAT_MAX)),
    ]
    ranged = rewriter.node(
        "RequantizationRange", [*operands, *limits], f"{name}/requant_range", outputs=2, domain=DOMAIN
    )
    _type(ranged.outputs, FLOAT, FLOAT)
    return ranged.outputs[0], ranged.outputs[1], [ranged]


def _operands(rewriter: _Rewriter, node: ir.Node, name: str, weight: Quantized) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return int8 weights in the layout of the integer operator, and scale and bias that broadcast over its result."""
    w, scale, bias = weight[0], weight[1].const_value, constant(node.inputs[2]) if len(node.inputs) > 2 else None
    assert w.const_value is not None and scale is not None
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1:
        w = rewriter.array(f"{w.name}/transposed", np.ascontiguousarray(w.const_value.numpy().T))
    tail = (1,) * (len(w.const_value.shape) - 2) if node.op_type == "Conv" else ()  # type: ignore[union-attr]
    scales, biases = scale.numpy(), np.zeros(1, np.float32) if bias is None else bias.numpy()
    if tail:
        scales, biases = scales.reshape(-1, *tail), biases.reshape(-1, *tail)
    return w, rewriter.array(f"{name}/w_scale", scales), rewriter.array(f"{name}/bias", biases)


def _move_below(rewriter: _Rewriter, node: ir.Node) -> int:
    """Move a DequantizeLinear behind an operator that only moves values; return 1 if it moved, else 0."""
    ready, graph = _uint8(node.inputs[0]), node.graph
    if ready is None or not isinstance(graph, ir.Graph) or not only_moves(node):
        return 0
    result = node.outputs[0]
    inputs = [ready[0], *node.inputs[1:]]
    name = rewriter.name(f"{node_name(node)}/eightbit")
    moved = ir.node(node.op_type, inputs, dict(node.attributes), name=name)
    moved.outputs[0].name, moved.outputs[0].shape = rewriter.name(f"{name}/output"), result.shape
    dequantize = rewriter.node("DequantizeLinear", [moved.outputs[0], *ready[1:]], f"{moved.name}/dequantize")
    _type([moved.outputs[0], *dequantize.outputs], UINT8, FLOAT)
    dequantize.outputs[0].shape = result.shape
    graph.insert_after(node, [moved, dequantize])
    replace(result, dequantize.outputs[0])
    remove(node)
    return 1


def _drop_idle_dequantizers(model: ir.Model) -> None:
    """Remove each DequantizeLinear whose result nothing reads."""
    for node in reversed(list(model.graph)):
        if node.op_type == "DequantizeLinear":
            remove_if_unread(node)


def _type(values: object, *types: ir.TensorType) -> None:
    """Set the types of `values`, in order."""
    for value, type_ in zip(values, types, strict=True):  # type: ignore[call-overload]
        value.type = type_

"""Join two pointwise convolutions whose results are only added into one convolution over the channels of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graphs.inference import inferred
from ..graphs.queries import Shape, constant, node_name, nodes_by_name, producer_of, release
from ..graphs.rewriter import remove_unread, replace_node
from .plan import Impl, Plan, Unit
from .qparams import Array, QParams, Scheme, fit_bias
from .writer import Writer

LARGEST = 2**20
"""The maximum size in bytes of joined weights: beyond the second-level cache, two convolutions are as fast."""
INT32_MAX = 2**31 - 1
FIRST_POOL_OF_INTEGERS = 12  # the first opset whose MaxPool accepts uint8
DEQUANTIZE = "DequantizeLinear"
ADDS = frozenset({Impl.U8, Impl.U8_NATIVE})


@dataclass(frozen=True, slots=True)
class Sum:
    """An Add of two convolutions.

    Attributes:
        unit: The Add, with what it absorbs.
        convs: Names of the convolutions.
        inputs: The tensors that they read.
        results: The tensors that they write; joining removes these tensors.
        native: Whether native operators compute them: pairs stay between the operators, which become functions.
    """

    unit: Unit
    convs: tuple[str, str]
    inputs: tuple[str, str]
    results: tuple[str, str]
    native: bool

    @property
    def add(self) -> str:
        """Name of the Add."""
        return self.unit.nodes[0]


@dataclass(frozen=True, slots=True)
class Joined:
    """The units that compute a sum after its convolutions are joined.

    Attributes:
        add: Name of the Add, which is no longer in the model.
        units: The units, in execution order.
        inner: The tensors between them, each with the operand of the sum whose rows and columns it has, and its
            channels.
    """

    add: str
    units: tuple[Unit, ...]
    inner: Mapping[str, tuple[str, int]]


def with_joined(
    units: Sequence[Unit], shapes: Mapping[str, Shape], joined: Sequence[Joined]
) -> tuple[list[Unit], dict[str, Shape]]:
    """Return units and shapes of tensors, with the units of joined sums in place of their Adds."""
    units_of = {each.add: each.units for each in joined}
    inner = {
        name: (shapes[like][0], channels, *shapes[like][2:])
        for each in joined
        for name, (like, channels) in each.inner.items()
        if like in shapes
    }
    return [each for unit in units for each in units_of.get(unit.nodes[0], (unit,))], {**shapes, **inner}


def find_sums(model: ir.Model, plan: Plan) -> tuple[Sum, ...]:
    """Return the sums of two convolutions that `join_convs` can join, in execution order.

    Both convolutions and the Add compute on uint8, and both convolutions use the same implementation (direct, matrix
    product, or native if the Add is native too). The kernels are 1x1, without groups and pads. The results have one
    shape and no other readers. The joined input has at most as many channels as the output, because a join saves one
    pass over the outputs and costs one pass over the inputs.

    Args:
        model: A simplified model.
        plan: The implementation of each unit.
    """
    if model.opset_imports.get("", 0) < FIRST_POOL_OF_INTEGERS:
        return ()
    nodes, units = nodes_by_name(model), {t: u for u in plan.units for t in u.outputs if plan.impl(u).writes_u8}
    sums = []
    for unit in plan.units:
        producers = [units.get(tensor) for tensor in unit.inputs]
        if unit.op != "Add" or plan.impl(unit) not in ADDS or nodes[unit.nodes[0]].graph is not model.graph:
            continue
        convs = [each for each in producers if each is not None and _pointwise(each, nodes)]
        alike = len({conv.name for conv in convs}) == 2 and len({plan.impl(conv) for conv in convs}) == 1
        native = [plan.impl(each) is Impl.U8_NATIVE for each in (unit, *convs)]
        if not alike or len({*native}) > 1 or not _pays([nodes[conv.name] for conv in convs]):
            continue
        first, second = convs
        inputs, results = (first.inputs[0], second.inputs[0]), (first.outputs[0], second.outputs[0])
        sums.append(Sum(unit, (first.name, second.name), inputs, results, native[0]))
    shapes = inferred(model) if sums else {}
    return tuple(each for each in sums if _same_shape(each.results, shapes))


def _pointwise(unit: Unit, nodes: Mapping[str, ir.Node]) -> bool:
    """Whether a unit is a 1x1 convolution without groups and pads, with one reader."""
    node = nodes[unit.nodes[0]]
    if unit.op != "Conv" or len(unit.nodes) != 1 or node.domain or len(node.inputs) < 3 or len(node.outputs) != 1:
        return False
    weights, bias, result = constant(node.inputs[1]), constant(node.inputs[2]), node.outputs[0]
    if weights is None or bias is None or len(result.uses()) != 1 or result.is_graph_output():
        return False
    shape = tuple(weights.shape)
    single = len(shape) == 4 and shape[2:] == (1, 1) and node.attributes.get_int("group", 1) == 1
    padded = any(node.attributes.get_ints("pads", ())) or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET"
    return single and not padded


def _pays(convs: Sequence[ir.Node]) -> bool:
    """Whether one convolution is faster than two convolutions and an Add."""
    shapes = [tensor.shape.numpy() for conv in convs if (tensor := constant(conv.inputs[1])) is not None]
    outputs, inputs = shapes[0][0], sum(shape[1] for shape in shapes)
    return shapes[1][0] == outputs and inputs <= outputs and inputs * outputs <= LARGEST


def _same_shape(tensors: Sequence[str], values: Mapping[str, ir.Value]) -> bool:
    """Whether two tensors have equal, known channels, rows and columns, so that their sum does not broadcast."""
    shapes = [values[tensor].shape if tensor in values else None for tensor in tensors]
    inner = [tuple(shape)[1:] if shape is not None else () for shape in shapes]
    return inner[0] == inner[1] and len(inner[0]) == 3 and all(isinstance(axis, int) for axis in inner[0])


def common_scales(
    model: ir.Model, plan: Plan, sums: Sequence[Sum], qparams: Mapping[str, QParams], scheme: Scheme
) -> dict[str, Array]:
    """Return weight scales with which the integer products of two convolutions have the same unit.

    With an input scale s and a weight scale w of an output channel, the unit of a product is s w. Both convolutions get
    the larger unit. The precision that the other one loses is less than the sum loses in any case.

    Args:
        model: The simplified model.
        plan: The implementation of each unit.
        sums: From `find_sums`.
        qparams: Scale and zero point of the tensors in ``plan.observed``.
        scheme: The types of weights.

    Returns:
        The scale of each output channel by convolution, float32 (M,).
    """
    nodes, common = nodes_by_name(model), {}
    for each in sums:
        inputs = [float(qparams[plan.root(tensor)].scale) for tensor in each.inputs]
        units = [_own_scale(nodes[name], scheme, s) * s for name, s in zip(each.convs, inputs, strict=True)]
        unit = np.maximum(*units)
        common.update({name: (unit / s).astype(np.float32) for name, s in zip(each.convs, inputs, strict=True)})
    return common


def _own_scale(node: ir.Node, scheme: Scheme, input_scale: float) -> Array:
    """Return the weight scales of a single convolution, float64 (M,)."""
    weights, bias = constant(node.inputs[1]), constant(node.inputs[2])
    assert weights is not None and bias is not None  # `find_sums` has checked
    params = fit_bias(scheme.weight_params(weights.numpy(), 0), bias.numpy().reshape(-1), input_scale)
    release(weights)
    return params.scale.astype(np.float64)


def join_convs(model: ir.Model, sums: Sequence[Sum], scheme: Scheme) -> list[Joined]:
    """Join each pair of convolutions whose results are only added; return the sums that were joined.

    Before:  y = Add(DequantizeLinear(QuantizeLinear(Conv(DequantizeLinear(a8), W, b))),
                     DequantizeLinear(QuantizeLinear(Conv(DequantizeLinear(c8), V, d), strides s)))
    After:   y = Conv(DequantizeLinear(Concat(a8, MaxPool(c8, kernel 1, strides s))), [W, V], b + d)
    With `common_scales` the result is the same sum of the same integers, without the intermediate rounding. The joined
    convolution reads c8 with the scale and zero point z_a of a8. The weight scales compensate for the scale, and the
    bias for the zero point: it grows by ``(z_a - z_c) * sum(V)``. The bottleneck blocks of a ResNet that change the
    resolution contain such sums. Where native operators compute the sum, Concat and MaxPool stand between pairs too.
    Left alone: sums that no longer have this form.

    Args:
        model: An emitted model.
        sums: From `find_sums`.
        scheme: The types of weights.
    """
    nodes, writer = nodes_by_name(model), Writer.of(model, scheme)
    joined = [_joined(nodes, each, writer) for each in sums]
    return [each for each in joined if each is not None]


@dataclass(frozen=True, slots=True)
class _Part:
    """A convolution between pairs: the node, and the DequantizeLinears of its input, weights and bias."""

    conv: ir.Node
    x: ir.Node
    weights: ir.Node
    bias: ir.Node

    def number(self, dq: ir.Node, index: int) -> Array:
        """Return a constant input of one of the DequantizeLinears."""
        tensor = constant(dq.inputs[index])
        assert tensor is not None  # scales, zero points and stored weights are constants
        return tensor.numpy()


def _part(conv: ir.Node | None, add: ir.Node) -> _Part | None:
    """Return a convolution whose quantized result only the Add reads; None for any other node."""
    producers = [producer_of(value) for value in (conv.inputs[:3] if conv is not None else ())]
    if conv is None or conv.op_type != "Conv" or len(producers) != 3:
        return None
    x, weights, bias = producers
    if x is None or weights is None or bias is None or {x.op_type, weights.op_type, bias.op_type} != {DEQUANTIZE}:
        return None
    behind = [dq for quantize in _readers(conv) for dq in _readers(quantize)]
    read = [node for dq in behind for node in _readers(dq)]
    return _Part(conv, x, weights, bias) if [dq.op_type for dq in behind] == [DEQUANTIZE] and read == [add] else None


def _readers(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the readers of the first output of a node."""
    return (use.node for use in node.outputs[0].uses())


def _joined(nodes: Mapping[str, ir.Node], each: Sum, writer: Writer) -> Joined | None:
    """Join the convolutions of one sum; return None if it has another form now."""
    add = nodes[each.add]
    parts = [part for part in (_part(nodes.get(name), add) for name in each.convs) if part is not None]
    bias = _common_bias(parts) if len(parts) == 2 and add.op_type == "Add" else None
    if bias is None or not isinstance(add.graph, ir.Graph):
        return None
    first, stem, graph = parts[0], node_name(parts[0].conv), add.graph
    like = first.x if each.native else None
    steps = [_strided_pixels(part, writer, like) for part in parts]
    pixels = [part.x.inputs[0] if step is None else step.integers for part, step in zip(parts, steps, strict=True)]
    joined = _step("Concat", pixels, {"axis": 1}, f"{stem}/joined", add, writer, like)
    weights = _with_one_zero_point(parts)
    wide = writer.initializer(graph, f"{stem}/joined_weights", np.concatenate(weights, axis=1))
    shifted = writer.initializer(graph, f"{stem}/joined_bias", bias.astype(np.int32))
    pairs = ((first.x, joined.integers, "x"), (first.weights, wide, "weights"), (first.bias, shifted, "bias"))
    inputs = [writer.like(dq, integers, f"{stem}/joined_{name}/dequantize") for dq, integers, name in pairs]
    graph.insert_before(add, inputs)
    operands = [value.producer() for value in add.inputs if value is not None]
    conv = ir.node("Conv", [dq.outputs[0] for dq in inputs], {"kernel_shape": [1, 1]}, name=writer.name(f"{stem}/sum"))
    replace_node(add, conv)
    remove_unread(operands)
    return _units_of_sum(each, steps, joined, conv, [int(each.shape[1]) for each in weights])


def _with_one_zero_point(parts: Sequence[_Part]) -> list[Array]:
    """Return the integers of both weights, int8 (M, C, 1, 1), with the zero points of the first."""
    first, second = (part.number(part.weights, 0) for part in parts)
    zeros = [part.number(part.weights, 2).astype(np.int16).reshape(-1, 1, 1, 1) for part in parts]
    return [first, (second - zeros[1] + zeros[0]).astype(np.int8)]


def _common_bias(parts: Sequence[_Part]) -> Array | None:
    """Return the bias of the joined convolution, int64 (M,); None if it may not fit, or the weights are not int8."""
    zeros = [int(part.number(part.x, 2)) for part in parts]
    biases = [part.number(part.bias, 0).astype(np.int64) for part in parts]
    weights, shifts = (parts[1].number(parts[1].weights, index) for index in (0, 2))
    sums = (weights.astype(np.int64) - shifts.reshape(-1, 1, 1, 1)).sum(axis=(1, 2, 3))
    bias = biases[0] + biases[1] + (zeros[0] - zeros[1]) * sums
    return bias if np.abs(bias).max(initial=0) <= INT32_MAX // 2 and weights.dtype == np.int8 else None


@dataclass(frozen=True, slots=True)
class _Step:
    """An operator that moves integers: the node, and the uint8 tensor that it writes, or a QuantizeLinear behind it."""

    node: ir.Node
    integers: ir.Value


def _strided_pixels(part: _Part, writer: Writer, like: ir.Node | None) -> _Step | None:
    """Insert a MaxPool of size 1 with the strides of a convolution; it reads the pixels that the convolution reads.

    Return None for a convolution without strides. `writer` and `like` are those of `_step`.
    """
    strides = part.conv.attributes.get_ints("strides", (1, 1))
    if all(step == 1 for step in strides):
        return None
    attributes = {"kernel_shape": [1, 1], "strides": list(strides)}
    return _step("MaxPool", [part.x.inputs[0]], attributes, f"{node_name(part.conv)}/every", part.conv, writer, like)


def _step(
    op: str,
    integers: Sequence[ir.Value | None],
    attributes: Mapping[str, int | list[int]],
    stem: str,
    place: ir.Node,
    writer: Writer,
    like: ir.Node | None,
) -> _Step:
    """Insert an operator that moves integers.

    Args:
        op: The operator.
        integers: The uint8 tensors that it reads.
        attributes: Its attributes.
        stem: Its name is based on it.
        place: The node in front of which it stands.
        writer: The writer of the model.
        like: A DequantizeLinear; with one the operator stands between pairs with its scale and zero point.
    """
    name, graph = writer.name(stem), place.graph
    assert isinstance(graph, ir.Graph)
    before = [] if like is None else [writer.like(like, each, f"{name}/x") for each in integers if each is not None]
    node = ir.node(op, [dq.outputs[0] for dq in before] or integers, dict(attributes), name=name)
    result = node.outputs[0]
    result.name, result.type = f"{name}_output", integers[0].type if integers[0] is not None else None
    behind = [] if like is None else [writer.like(like, result, f"{name}/y", "QuantizeLinear")]
    if behind:
        result.type = ir.TensorType(ir.DataType.FLOAT)
    graph.insert_before(place, [*before, node, *behind])
    return _Step(node, behind[0].outputs[0] if behind else result)


def _units_of_sum(
    each: Sum, steps: Sequence[_Step | None], joined: _Step, conv: ir.Node, channels: Sequence[int]
) -> Joined:
    """Return the units that compute a joined sum.

    Args:
        each: The sum.
        steps: The MaxPools in front of the Concat, by input; None for an input without one.
        joined: The Concat.
        conv: The joined convolution.
        channels: The number of channels of each input.
    """
    made, tensors, inner = [], [], {}
    for step, x, result, count in zip(steps, each.inputs, each.results, channels, strict=True):
        tensors.append(x if step is None else str(step.node.outputs[0].name))
        if step is not None:
            made.append(_unit(step.node, (x,), (tensors[-1],)))
            inner[tensors[-1]] = (result, count)
    whole = str(joined.node.outputs[0].name)
    inner[whole] = (each.results[0], sum(channels))
    end = _unit(conv, (whole,), each.unit.outputs, each.unit.nodes[1:])
    made += [_unit(joined.node, tuple(tensors), (whole,)), end]
    return Joined(each.add, tuple(made), inner)


def _unit(node: ir.Node, inputs: tuple[str, ...], outputs: tuple[str, ...], absorbed: tuple[str, ...] = ()) -> Unit:
    """Return the unit of a node, with what it absorbs."""
    name = node_name(node)
    return Unit(name=name, op=node.op_type, nodes=(name, *absorbed), inputs=inputs, outputs=outputs)

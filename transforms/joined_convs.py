"""Join two pointwise convolutions whose results are only added into one convolution over the channels of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .graph import constant, node_name, nodes_by_name, release, remove_if_unread, take_place
from .inference import inferred
from .plan import Impl, Plan, Unit
from .qparams import Array, QParams, Scheme, fit_bias
from .writer import Writer

LARGEST = 2**20
"""The maximum size in bytes of joined weights: beyond the second-level cache, two convolutions are as fast."""
INT32_MAX = 2**31 - 1
FIRST_POOL_OF_INTEGERS = 12  # the first opset whose MaxPool accepts uint8
DEQUANTIZE = "DequantizeLinear"


@dataclass(frozen=True, slots=True)
class Sum:
    """An Add of two convolutions.

    Attributes:
        add: Name of the Add.
        convs: Names of the convolutions.
        inputs: The tensors that they read.
        results: The tensors that they write; joining removes these tensors.
    """

    add: str
    convs: tuple[str, str]
    inputs: tuple[str, str]
    results: tuple[str, str]


def find_sums(model: ir.Model, plan: Plan) -> tuple[Sum, ...]:
    """Return the sums of two convolutions that `join_convs` can join, in execution order.

    Both convolutions and the Add compute on uint8, and both convolutions use the same implementation (direct or matrix
    product). The kernels are 1x1, without groups and pads. The results have one shape and no other readers. The joined
    input has at most as many channels as the output, because a join saves one pass over the outputs and costs one pass
    over the inputs.

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
        if unit.op != "Add" or plan.impl(unit) is not Impl.U8 or nodes[unit.nodes[0]].graph is not model.graph:
            continue
        convs = [each for each in producers if each is not None and _pointwise(each, nodes)]
        alike = len({conv.name for conv in convs}) == 2 and len({plan.impl(conv) for conv in convs}) == 1
        if not alike or not _pays([nodes[conv.name] for conv in convs]):
            continue
        first, second = convs
        inputs, results = (first.inputs[0], second.inputs[0]), (first.outputs[0], second.outputs[0])
        sums.append(Sum(unit.nodes[0], (first.name, second.name), inputs, results))
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


def join_convs(model: ir.Model, sums: Sequence[Sum], scheme: Scheme) -> int:
    """Join each pair of convolutions whose results are only added; return the number of sums joined.

    Before:  y = Add(DequantizeLinear(QuantizeLinear(Conv(DequantizeLinear(a8), W, b))),
                     DequantizeLinear(QuantizeLinear(Conv(DequantizeLinear(c8), V, d), strides s)))
    After:   y = Conv(DequantizeLinear(Concat(a8, MaxPool(c8, kernel 1, strides s))), [W, V], b + d)
    With `common_scales` the result is the same sum of the same integers, without the intermediate rounding. The joined
    convolution reads c8 with the scale and zero point z_a of a8. The weight scales compensate for the scale, and the
    bias for the zero point: it grows by ``(z_a - z_c) * sum(V)``. The bottleneck blocks of a ResNet that change the
    resolution contain such sums.
    Left alone: sums that no longer have this form.

    Args:
        model: An emitted model.
        sums: From `find_sums`.
        scheme: The types of weights.
    """
    nodes, writer = nodes_by_name(model), Writer.of(model, scheme)
    return sum(_joined(nodes, each, writer) for each in sums)


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
    producers = [
        value.producer() if value is not None else None for value in (conv.inputs[:3] if conv is not None else ())
    ]
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


def _joined(nodes: Mapping[str, ir.Node], each: Sum, writer: Writer) -> bool:
    """Join one sum; return whether it was possible."""
    add = nodes[each.add]
    first, second = (_part(nodes.get(name), add) for name in each.convs)
    if first is None or second is None or add.op_type != "Add" or not isinstance(add.graph, ir.Graph):
        return False
    stem, graph = node_name(first.conv), add.graph
    weights, shifts = ([part.number(part.weights, index) for part in (first, second)] for index in (0, 2))
    zeros = [int(part.number(part.x, 2)) for part in (first, second)]
    biases = [part.number(part.bias, 0).astype(np.int64) for part in (first, second)]
    sums = (weights[1].astype(np.int64) - shifts[1].reshape(-1, 1, 1, 1)).sum(axis=(1, 2, 3))
    bias = biases[0] + biases[1] + (zeros[0] - zeros[1]) * sums
    if np.abs(bias).max(initial=0) > INT32_MAX // 2 or weights[0].dtype != np.int8:
        return False
    pixels = [_read_pixels(part, writer) for part in (first, second)]
    joined = ir.node("Concat", pixels, {"axis": 1}, name=writer.name(f"{stem}/joined"))
    joined.outputs[0].name, joined.outputs[0].type = writer.name(f"{stem}/joined_output"), pixels[0].type
    graph.insert_before(add, [joined])
    wide = writer.initializer(graph, f"{stem}/joined_weights", np.concatenate(weights, axis=1))
    shifted = writer.initializer(graph, f"{stem}/joined_bias", bias.astype(np.int32))
    pairs = ((first.x, joined.outputs[0], "x"), (first.weights, wide, "weights"), (first.bias, shifted, "bias"))
    inputs = [writer.like(dq, integers, f"{stem}/joined_{name}/dequantize") for dq, integers, name in pairs]
    graph.insert_before(add, inputs)
    operands = [value.producer() for value in add.inputs if value is not None]
    take_place(
        add,
        ir.node("Conv", [dq.outputs[0] for dq in inputs], {"kernel_shape": [1, 1]}, name=writer.name(f"{stem}/sum")),
    )
    _remove_unread([node for node in operands if node is not None])
    return True


def _read_pixels(part: _Part, writer: Writer) -> ir.Value:
    """Return the integers of the pixels that a convolution reads; strides become a MaxPool of size 1."""
    strides, source, graph = part.conv.attributes.get_ints("strides", (1, 1)), part.x.inputs[0], part.conv.graph
    assert source is not None and isinstance(graph, ir.Graph)
    if all(step == 1 for step in strides):
        return source
    name = writer.name(f"{node_name(part.conv)}/every")
    every = ir.node("MaxPool", [source], {"kernel_shape": [1, 1], "strides": list(strides)}, name=name)
    every.outputs[0].name, every.outputs[0].type = f"{name}_output", source.type
    graph.insert_before(part.conv, [every])
    return every.outputs[0]


def _remove_unread(nodes: list[ir.Node]) -> None:
    """Remove nodes without readers, and then their producers without readers."""
    while nodes:
        node = nodes.pop()
        before = [value.producer() for value in node.inputs if value is not None]
        if remove_if_unread(node):
            nodes += [each for each in before if each is not None]

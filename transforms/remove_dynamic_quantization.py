"""Turn operators that compute the range of their activations at run time back into float operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np
import onnx_ir as ir

from .graphs.queries import MS, computing_nodes, constant, graph_of, is_standard, node_name, producer_of, sole_reader
from .graphs.rewriter import (
    can_replace,
    derive_initializer,
    names,
    remove,
    remove_unread,
    replace,
    replace_node,
    unused_name,
)
from .int8.forms import LSTM_ATTRIBUTES, QATTENTION_ATTRIBUTES
from .int8.ops import MOVES
from .int8.qparams import Array, QParams, dequantize
from .registry import Change, LeftAlone, transform

RANGES = "DynamicQuantizeLinear"
AT_RUN_TIME = frozenset({("", RANGES), (MS, "DynamicQuantizeMatMul"), (MS, "DynamicQuantizeLSTM")})
"""Domain and name of the operators that compute ranges at run time."""
LSTM = (*LSTM_ATTRIBUTES, "input_forget")
BIAS_STEPS = (("Reshape",), ("Cast",), ("Floor", "Round"), ("Div",))  # from the sum back to the float bias
ATTENTION = (*QATTENTION_ATTRIBUTES, "do_rotary")


def count_at_run_time(model: ir.Model) -> int:
    """Return how many operators compute ranges at run time, in graphs, bodies and functions."""
    nodes = chain(model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values()))
    return sum((node.domain, node.op_type) in AT_RUN_TIME for node in nodes)


@dataclass(frozen=True)
class _Floats:
    """Writes the float tensors that take the place of integers; each is written once per graph.

    Attributes:
        taken: The names in use.
        stored: The float tensors, by graph, integers, scale and zero point.
    """

    taken: set[str]
    stored: dict[object, ir.Value] = field(default_factory=dict)

    def activation(self, data: ir.Value | None, zero: ir.Value | None, scale: ir.Value | None) -> ir.Value:
        """Return the float tensor that a DynamicQuantizeLinear has quantized to `data`, moved as `data` is.

        Raises:
            LeftAlone: `data` does not come from one, or with another scale or zero point.
        """
        path, source = _origin(data)
        x = None if source is None else source.inputs[0]
        if source is None or x is None:
            raise LeftAlone("not-dynamic")
        if [scale, zero] != list(source.outputs[1:3]):
            raise LeftAlone("other-parameters")
        for move in reversed(path):
            if (move, x) not in self.stored:
                name = unused_name(self.taken, f"{node_name(move)}/float")
                moved = ir.node(move.op_type, [x, *move.inputs[1:]], move.attributes, name=name)
                moved.outputs[0].name, moved.outputs[0].shape = name, move.outputs[0].shape
                moved.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
                graph_of(move).insert_after(move, [moved])
                self.stored[move, x] = moved.outputs[0]
            x = self.stored[move, x]
        return x

    def weight(self, node: ir.Node, integers: ir.Value | None, scales: Array, zeros: Array, axis: int) -> ir.Value:
        """Return the float weights ``(W8 - zero) * scale``, with one scale and zero point or one per slice of `axis`.

        Raises:
            LeftAlone: The weights are computed, or the scales are of another number.
        """
        tensor = constant(integers)
        if integers is None or tensor is None:
            raise LeftAlone("weights-computed")
        shape = tuple(tensor.shape.numpy())
        count = shape[axis] if len(shape) > 1 else 1
        if {scales.size, zeros.size} - {1, count}:
            raise LeftAlone("scales")
        key = (graph_of(node), integers, axis, scales.tobytes(), zeros.tobytes())
        if key not in self.stored:
            params = _params(scales, zeros, axis)
            name = unused_name(self.taken, f"{integers.name}/float")
            compute = partial(dequantize, params=params)
            self.stored[key] = derive_initializer(graph_of(node), name, tensor, compute, shape, ir.DataType.FLOAT)
        return self.stored[key]


def _params(scales: Array, zeros: Array, axis: int) -> QParams:
    """Return scales and zero points as parameters of a tensor: one each, or one per slice along `axis`."""
    if scales.size == zeros.size == 1:
        return QParams(scale=scales.reshape(()), zero_point=zeros.reshape(()))
    count = max(scales.size, zeros.size)
    scale, zero = (np.broadcast_to(each.reshape(-1), count).copy() for each in (scales, zeros))
    return QParams(scale=scale, zero_point=zero, axis=axis)


@transform("remove_dynamic_quantization", after=("inline_functions",), changes_values=True)
def remove_dynamic_quantization(model: ir.Model, *, exclude_node: tuple[str, ...] = ()) -> Change:
    """Turn a model whose ranges are computed at run time back into a float model.

    Before:  x8, sx, zx = DynamicQuantizeLinear(x);  y = Cast(MatMulInteger(x8, W8, zx, zw)) * (sx * sw) + b
    After:   y = MatMul(x, W) + b,  W = (W8 - zw) * sw in float32
        The same for ConvInteger (also with a bias that is rounded at run time and added in int32),
        MatMulIntegerToFloat, DynamicQuantizeMatMul, DynamicQuantizeLSTM and QAttention, with one scale or one per
        output channel, with a Reshape or Transpose behind the DynamicQuantizeLinear, and for a DequantizeLinear of its
        result. A product of two quantized activations becomes their float product. The weights
        keep their rounded values; activations are no longer rounded. Weights of more than 1 MiB are computed when they
        are read. ONNX Runtime's ``quantize_dynamic`` writes such models.
    Left alone: operators whose activations are quantized with other than computed ranges (``not-dynamic``), with
        another scale or zero point than the DynamicQuantizeLinear has (``other-parameters``) or with computed weights
        (``weights-computed``); a product that is not scaled back to float32 (``not-scaled``) or that has other readers
        before it is (``read-between``); scales that are neither one nor one per output channel (``scales``); the named
        nodes (``excluded``).

    Options:
        exclude_node: Names of nodes to leave alone.
    """
    change, floats = Change(), _Floats(names(model))
    for node in computing_nodes(model):
        write = WRITERS.get((node.domain, node.op_type))
        if write is None or (node.op_type == "DequantizeLinear" and _origin(node.inputs[0])[1] is None):
            continue
        try:
            if node.name in exclude_node:
                raise LeftAlone("excluded")
            write(node, floats)
            change.applied += 1
        except LeftAlone as left:
            change.skip(str(left))
    return change


def _origin(data: ir.Value | None) -> tuple[list[ir.Node], ir.Node | None]:
    """Return the operators that move `data`, the last first, and the DynamicQuantizeLinear before them, if any."""
    path: list[ir.Node] = []
    source = producer_of(data)
    while source is not None and source.op_type in MOVES and not source.domain and source.inputs[0] is not None:
        path.append(source)
        data = source.inputs[0]
        source = data.producer()
    dynamic = is_standard(source, RANGES) and source.outputs[0] is data
    return path, source if dynamic else None


def _inputs(node: ir.Node, count: int) -> list[ir.Value | None]:
    """Return the first `count` inputs of a node; missing ones are None."""
    return [*node.inputs, *[None] * count][:count]


def _numbers(value: ir.Value | None, default: float | None = None, dtype: type[np.generic] = np.float32) -> Array:
    """Return the values of a constant; for a missing input `default` in `dtype`.

    Raises:
        LeftAlone: The value is computed, or is missing without a default.
    """
    if value is None and default is not None:
        return np.asarray(default, dtype)
    tensor = constant(value)
    if tensor is None:
        raise LeftAlone("weights-computed")
    return tensor.numpy()


def _zeros(value: ir.Value | None, integers: ir.Value | None) -> Array:
    """Return the zero points of constant integers; a missing one is 0 in their type."""
    tensor = constant(integers)
    return _numbers(value, 0, np.uint8 if tensor is None else tensor.dtype.numpy().type)


def _finish(old: ir.Node, new: ir.Node, added: ir.Value | None, floats: _Floats) -> None:
    """Put `new` in the place of `old`, with ``Add(y, added)`` behind it if something is added."""
    sources = [value.producer() for value in old.inputs if value is not None]
    if added is not None:
        new.outputs[0].name = unused_name(floats.taken, f"{new.name}/float")
        new.outputs[0].type, new.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), old.outputs[0].shape
        graph_of(old).insert_before(old, [new])
        new = ir.node("Add", [new.outputs[0], added], name=unused_name(floats.taken, f"{new.name}/add"))
    replace_node(old, new)
    remove_unread(sources)


# ------------------------------------------------------------------------------- MatMulInteger and ConvInteger


def _scaled(node: ir.Node) -> tuple[ir.Node, list[ir.Value]]:
    """Return the last Mul that scales integer sums back to float, and all factors.

    Args:
        node: The operator that writes the sums.

    Raises:
        LeftAlone: The sums are not scaled by a scale that a DynamicQuantizeLinear computes.
    """
    last = _reader(node)
    if not is_standard(last, "Cast") or last.attributes.get_int("to", 0) != ir.DataType.FLOAT:
        raise LeftAlone("not-scaled")
    factors: list[ir.Value] = []
    while (reader := sole_reader(last.outputs[0])) is not None and _is_product(reader):
        more = _factors(_other_operand(reader, last))
        if not all(map(_is_scale, more)):
            break
        last, factors = reader, [*factors, *more]
    if not factors:
        raise LeftAlone("not-scaled")
    return last, factors


def _reader(node: ir.Node) -> ir.Node:
    """Return the only reader of a node.

    Raises:
        LeftAlone: It has none or several.
    """
    reader = sole_reader(node.outputs[0])
    if reader is None:
        raise LeftAlone("read-between")
    return reader


def _other_operand(node: ir.Node, source: ir.Node) -> ir.Value | None:
    """Return the operand of a node of two operands that does not come from `source`."""
    first, second = node.inputs
    return second if first is source.outputs[0] else first


def _is_product(node: ir.Node | None) -> bool:
    """Whether a node is a Mul of two tensors."""
    return is_standard(node, "Mul") and None not in node.inputs


def _factors(value: ir.Value | None) -> list[ir.Value]:
    """Return the factors of a product of products."""
    node = producer_of(value)
    if node is not None and _is_product(node):
        return [factor for each in node.inputs for factor in _factors(each)]
    return [] if value is None else [value]


def _is_scale(value: ir.Value) -> bool:
    """Whether a tensor is the scale of a DynamicQuantizeLinear, or a float constant."""
    tensor, node = constant(value), value.producer()
    if tensor is not None:
        return tensor.dtype is ir.DataType.FLOAT
    return is_standard(node, RANGES) and value is node.outputs[1]


def _integer_product(node: ir.Node, floats: _Floats) -> None:
    """Replace a MatMulInteger or ConvInteger, with the Cast and the Muls behind it, by a MatMul or Conv."""
    a, b, a_zero, b_zero = _inputs(node, 4)
    if _origin(a)[1] is None:
        raise LeftAlone("not-dynamic")
    biased = _integer_bias(node)
    last, factors = _scaled(node if biased is None else biased.sum)
    if biased is not None and set(biased.factors) != set(factors):
        raise LeftAlone("other-parameters")
    computed = [factor for factor in factors if constant(factor) is None]
    fixed = [tensor.numpy() for factor in factors if (tensor := constant(factor)) is not None]
    op = "Conv" if node.op_type == "ConvInteger" else "MatMul"
    if len(computed) == 2 and not fixed and _origin(b)[1] is not None:
        a_scale, b_scale = computed if computed[0].producer() is _origin(a)[1] else reversed(computed)
        operands = [floats.activation(a, a_zero, a_scale), floats.activation(b, b_zero, b_scale)]
    elif len(computed) == 1:
        scales = _channel_scales(op, fixed, constant(b))
        x = floats.activation(a, a_zero, computed[0])
        operands = [x, floats.weight(node, b, scales, _zeros(b_zero, b), 0 if op == "Conv" else -1)]
    else:
        raise LeftAlone("other-parameters")
    if biased is not None:
        operands.append(biased.bias)
    new = ir.node(op, operands, node.attributes, name=node_name(node))
    _finish(last, new, None, floats)


@dataclass(frozen=True, slots=True)
class _IntegerBias:
    """A bias of a ConvInteger that is rounded to int32 at run time.

    Attributes:
        sum: The Add of products and bias.
        bias: The float bias, a constant (M).
        factors: The scales by which it is divided.
    """

    sum: ir.Node
    bias: ir.Value
    factors: list[ir.Value]


def _integer_bias(node: ir.Node) -> _IntegerBias | None:
    """Return the bias of a ConvInteger: ``Add(sums, Reshape(Cast(Floor(Div(bias, scales))), (1, M, 1...)))``, if any.

    Early versions of ONNX Runtime's quantizer wrote it so.
    """
    add = sole_reader(node.outputs[0])
    if node.op_type != "ConvInteger" or not is_standard(add, "Add"):
        return None
    steps: list[ir.Node] = []
    value = _other_operand(add, node)
    for ops in BIAS_STEPS:
        source = producer_of(value)
        if source is None or source.op_type not in ops or source.domain:
            return None
        steps.append(source)
        value = source.inputs[0]
    bias, shape = constant(value), constant(steps[0].inputs[1])
    if value is None or bias is None or shape is None or len(bias.shape) != 1:
        return None
    if any(axis != 1 and side != 1 for axis, side in enumerate(shape.numpy())):
        return None
    return _IntegerBias(add, value, _factors(steps[-1].inputs[1]))


def _channel_scales(op: str, fixed: Iterable[Array], weights: ir.TensorProtocol | None) -> Array:
    """Return the product of constant factors of a result: one number, or one per output channel.

    Raises:
        LeftAlone: A factor has other values along another axis than that of the channels.
    """
    rank = 0 if weights is None else len(weights.shape)
    product = np.asarray(1, np.float32)
    for each in fixed:
        place = rank - 2 if op == "Conv" else 0  # axes behind that of the channels
        axes = [axis for axis, length in enumerate(reversed(each.shape)) if length != 1]
        if axes not in ([], [place]):
            raise LeftAlone("scales")
        product = np.asarray(product * each.reshape(-1), np.float32)
    return product


# ------------------------------------------------------------------------------------------ operators of the runtime


def _to_float(node: ir.Node, floats: _Floats) -> None:
    """Replace a MatMulIntegerToFloat by a MatMul."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = _inputs(node, 7)
    x = floats.activation(a, a_zero, a_scale)
    weight = floats.weight(node, b, _numbers(b_scale), _zeros(b_zero, b), -1)
    _finish(node, ir.node("MatMul", [x, weight], name=node_name(node)), bias, floats)


def _matmul(node: ir.Node, floats: _Floats) -> None:
    """Replace a DynamicQuantizeMatMul by a MatMul."""
    x, b, scale, zero, bias = _inputs(node, 5)
    weight = floats.weight(node, b, _numbers(scale), _zeros(zero, b), -1)
    _finish(node, ir.node("MatMul", [x, weight], name=node_name(node)), bias, floats)


def _attention(node: ir.Node, floats: _Floats) -> None:
    """Replace a QAttention by an Attention."""
    a, b, bias, a_scale, b_scale, mask, a_zero, b_zero, past = _inputs(node, 9)
    x = floats.activation(a, a_zero, a_scale)
    weight = floats.weight(node, b, _numbers(b_scale), _zeros(b_zero, b), -1)
    attributes = {name: node.attributes[name] for name in ATTENTION if name in node.attributes}
    inputs, outputs = [x, weight, bias, mask, past], len(node.outputs)
    new = ir.node("Attention", inputs, attributes, domain=MS, name=node_name(node), num_outputs=outputs)
    _finish(node, new, None, floats)


def _lstm(node: ir.Node, floats: _Floats) -> None:
    """DynamicQuantizeLSTM(X, W (D, I, 4H), R (D, H, 4H), ..., scales (D,) or (D, 4H)) -> LSTM(X, W (D, 4H, I), ...)."""
    inputs = _inputs(node, 12)
    for index, scale, zero in ((1, 8, 9), (2, 10, 11)):
        inputs[index] = _recurrent(node, inputs[index], _numbers(inputs[scale]), inputs[zero], floats)
    attributes = {name: node.attributes[name] for name in LSTM if name in node.attributes}
    new = ir.node("LSTM", inputs[:8], attributes, name=node_name(node), num_outputs=len(node.outputs))
    _finish(node, new, None, floats)


def _recurrent(
    node: ir.Node, integers: ir.Value | None, scales: Array, zero: ir.Value | None, floats: _Floats
) -> ir.Value:
    """Return float weights (D, 4H, K) of an LSTM from integers (D, K, 4H), a scale per direction or per row.

    Raises:
        LeftAlone: The weights are computed, or the scales are of another number.
    """
    tensor = constant(integers)
    if integers is None or tensor is None:
        raise LeftAlone("weights-computed")
    directions, _, rows = shape = tuple(tensor.shape.numpy())
    zeros = _zeros(zero, integers)
    if {scales.size, zeros.size} - {directions, directions * rows}:
        raise LeftAlone("scales")
    scales, zeros = (np.repeat(each.reshape(-1), directions * rows // each.size) for each in (scales, zeros))
    name = unused_name(floats.taken, f"{integers.name}/float")

    def compute(array: Array) -> Array:
        turned = np.ascontiguousarray(array.transpose(0, 2, 1))
        params = QParams(scale=scales, zero_point=zeros, axis=0)
        return dequantize(turned.reshape(directions * rows, -1), params).reshape(turned.shape)

    turned = (shape[0], shape[2], shape[1])
    return derive_initializer(graph_of(node), name, tensor, compute, turned, ir.DataType.FLOAT)


def _pair(node: ir.Node, floats: _Floats) -> None:
    """Let the readers of a DequantizeLinear read the tensor that a DynamicQuantizeLinear quantizes."""
    data, scale, zero = _inputs(node, 3)
    x, sources = floats.activation(data, zero, scale), [value.producer() for value in node.inputs if value]
    if not can_replace(node.outputs[0], x):
        raise LeftAlone("graph-output")
    replace(node.outputs[0], x)
    remove(node)
    remove_unread(sources)


WRITERS: dict[tuple[str, str], Callable[[ir.Node, _Floats], None]] = {
    ("", "MatMulInteger"): _integer_product,
    ("", "ConvInteger"): _integer_product,
    ("", "DequantizeLinear"): _pair,
    (MS, "DequantizeLinear"): _pair,
    (MS, "MatMulIntegerToFloat"): _to_float,
    (MS, "DynamicQuantizeMatMul"): _matmul,
    (MS, "QAttention"): _attention,
    (MS, "DynamicQuantizeLSTM"): _lstm,
}

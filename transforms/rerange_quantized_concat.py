"""Give the inputs and the result of a Concat one range, so that the Concat only copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from .graphs.queries import MS, computing_nodes, constant, graph_of, is_standard, producer_of
from .graphs.rewriter import add_initializer, discard, names, unused_name
from .int8.existing import is_linear
from .int8.ops import OPS, only_moves
from .int8.qparams import INT32_MAX, QParams, asymmetric_u8
from .qoperator_to_qdq import qop_of
from .registry import Change, LeftAlone, transform

Slot = tuple[ir.Node, int, int]
"""A node, and the indices of its inputs that are the scale and zero point of a tensor."""


@dataclass
class _Joined:
    """The integer tensors that must share the parameters of one Concat, and the positions of these parameters.

    Attributes:
        tensors: The tensors.
        makers: The parameters at the nodes that write the tensors.
        readers: The parameters at the nodes that read the tensors.
    """

    tensors: list[ir.Value] = field(default_factory=list)
    makers: list[Slot] = field(default_factory=list)
    readers: list[Slot] = field(default_factory=list)


@transform(
    "rerange_quantized_concat",
    after=("fuse_quantized_conv_and_requantize", "fuse_quantized_matmul_and_requantize"),
    changes_values=True,
)
def rerange_quantized_concat(model: ir.Model) -> Change:
    """Give the integer inputs and the result of a Concat one scale and zero point.

    Before:  y = QLinearConcat(sy, zy, a, sa, za, b, sb, zb);  a, b = two QLinearConv
    After:   all of them with the scale and zero point of the range from the lowest minimum to the highest maximum
        The Concat then rounds nothing. A Concat between DequantizeLinear and QuantizeLinear is treated in the same way.
        Tensors before and after poolings and other operators that only move integers change too, and the tensors of a
        nested Concat. The int32 biases of products that read such a tensor are rescaled. A branch with a narrow range
        loses resolution.
    Left alone: a tensor that comes from an input of the graph or has computed parameters (``not-frozen``), that a
        caller reads (``graph-output``), or that another kind of operator reads (``other-reader``); tensors of different
        types (``types``); a fused result that is never negative beside one that can be (``relu``): its Relu is the
        saturation at zero, which a wider range would remove. A fused upper bound counts as the maximum of its tensor.
    """
    change = Change()
    taken = names(model)
    for node in computing_nodes(model):
        concat = node.op_type == "QLinearConcat" and node.domain == MS
        if not concat and not (is_standard(node, "Concat") and _is_quantized(node)):
            continue
        try:
            joined = _gather(node)
            change.applied += _unify(joined, taken)
        except LeftAlone as left:
            change.skip(str(left))
    return change


def _is_quantized(concat: ir.Node) -> bool:
    """Whether a Concat joins dequantized tensors."""
    producers = [*map(producer_of, concat.inputs)]
    return all(node is not None and is_linear(node, "DequantizeLinear") for node in producers)


def _gather(concat: ir.Node) -> _Joined:
    """Find all tensors and parameters that must change with a Concat.

    Raises:
        LeftAlone: A tensor or one of its readers cannot change.
    """
    joined = _Joined()
    waiting: list[ir.Value | None] = []
    if concat.op_type == "Concat":
        for value in concat.inputs:
            producer = producer_of(value)
            waiting.append(producer.inputs[0] if producer is not None else None)
        quantizes = [use.node for use in concat.outputs[0].uses()]
        waiting += [node.outputs[0] for node in quantizes if is_linear(node, "QuantizeLinear")]
    else:
        waiting += [*concat.inputs[2::3], concat.outputs[0]]
    while waiting:
        value = waiting.pop()
        if value is None or constant(value) is not None or value.is_graph_input():
            raise LeftAlone("not-frozen")
        if value.is_graph_output():
            raise LeftAlone("graph-output")
        if any(value is each for each in joined.tensors):
            continue
        joined.tensors.append(value)
        waiting += _sources(value, joined)
        for use in value.uses():
            waiting += _follow(use.node, use.idx, joined)
    return joined


def _sources(value: ir.Value, joined: _Joined) -> Iterator[ir.Value | None]:
    """Record the parameters at the producer of a tensor; yield the tensors that share them."""
    node = value.producer()
    if node is None:
        raise LeftAlone("not-frozen")
    form = qop_of(node)
    if is_linear(node, "QuantizeLinear"):
        joined.makers.append((node, 1, 2))
        yield from _dequantized_parts(node)
    elif form is not None and form.result is not None:
        joined.makers.append((node, *form.result))
        if form.op == "Concat":
            yield from (node.inputs[data] for data, _, _ in form.operands)
    elif _moves(node):
        yield node.inputs[0]
    else:
        raise LeftAlone("not-frozen")


def _dequantized_parts(quantize: ir.Node) -> Iterator[ir.Value | None]:
    """Yield the integer tensors behind the inputs of a Concat before a QuantizeLinear."""
    before = producer_of(quantize.inputs[0])
    if is_standard(before, "Concat") and _is_quantized(before):
        for value in before.inputs:
            producer = producer_of(value)
            yield producer.inputs[0] if producer is not None else None


def _moves(node: ir.Node) -> bool:
    """Whether an operator only moves values, so that its result has the scale of its input."""
    row = OPS.get(node.op_type)
    return row is not None and row.kind == "same" and not node.domain and only_moves(node) and len(node.outputs) == 1


def _follow(node: ir.Node, index: int, joined: _Joined) -> Iterator[ir.Value | None]:
    """Record the parameters at a reader of a tensor; yield the tensor that shares them."""
    form = qop_of(node)
    if is_linear(node, "DequantizeLinear") and index == 0:
        joined.readers.append((node, 1, 2))
    elif form is not None and any(data == index for data, _, _ in form.operands):
        joined.readers.extend((node, scale, zero) for data, scale, zero in form.operands if data == index)
    elif _moves(node) and index == 0:
        yield node.outputs[0]
    else:
        raise LeftAlone("other-reader")


def _params(slot: Slot) -> QParams:
    """Return the constant scale and zero point of a slot."""
    node, *places = slot
    tensors = [constant(node.inputs[place]) if place < len(node.inputs) else None for place in places]
    arrays = [tensor.numpy() for tensor in tensors if tensor is not None and tensor.size == 1]
    if len(arrays) != 2:
        raise LeftAlone("not-frozen")
    return QParams(scale=arrays[0].reshape(()), zero_point=arrays[1].reshape(()))


def _unify(joined: _Joined, taken: set[str]) -> int:
    """Give all tensors the parameters of the joint range; return the number of changed producers."""
    current = [_params(slot) for slot in joined.makers]
    for slot in joined.readers:
        _params(slot)
    dtypes = {params.zero_point.dtype for params in current}
    if len(dtypes) != 1 or not dtypes <= {np.dtype(np.uint8), np.dtype(np.int8)}:
        raise LeftAlone("types")
    low, high = min(params.range[0] for params in current), max(params.range[1] for params in current)
    fused = [params.range[0] for (node, *_), params in zip(joined.makers, current, strict=True) if qop_of(node)]
    if low < 0 and 0.0 in fused:
        raise LeftAlone("relu")
    first = current[0]
    if all(params.scale == first.scale and params.zero_point == first.zero_point for params in current):
        return 0
    shared = asymmetric_u8(low, high)
    (dtype,) = dtypes
    shift = int(np.iinfo(dtype).min)
    params = QParams(scale=shared.scale, zero_point=np.asarray(int(shared.zero_point) + shift, dtype))
    by_graph: dict[ir.Graph, tuple[ir.Value, ir.Value]] = {}
    for slot in (*joined.makers, *joined.readers):
        graph = graph_of(slot[0])
        if graph not in by_graph:
            stem = str(joined.tensors[0].name)
            parts = (("scale", params.scale), ("zero_point", params.zero_point))
            scale, zero = (add_initializer(graph, unused_name(taken, f"{stem}/joined_{part}"), a) for part, a in parts)
            by_graph[graph] = scale, zero
        _set(slot, params, by_graph[graph], taken)
    return len(joined.makers)


def _set(slot: Slot, params: QParams, values: tuple[ir.Value, ir.Value], taken: set[str]) -> None:
    """Set the parameters of a slot to the initializers `values`, and rescale the int32 biases that depend on them."""
    node, scale_at, zero_at = slot
    form = qop_of(node)
    reads = form is not None and any(scale == scale_at for _, scale, _ in form.operands)
    if form is not None and reads and form.bias is not None and len(node.inputs) > form.bias:
        _rescale_bias(node, form.bias, _params(slot).scale / params.scale, taken)
    if is_linear(node, "DequantizeLinear"):
        for use in node.outputs[0].uses():
            _rescale_pair(use.node, use.idx, _params(slot).scale / params.scale, taken)
    for place, value in zip((scale_at, zero_at), values, strict=True):
        old = node.inputs[place]
        node.replace_input_with(place, value)
        discard(old)


def _rescale_bias(node: ir.Node, index: int, factor: np.ndarray, taken: set[str]) -> None:
    """Multiply an int32 bias by ``old scale / new scale``, rounded half to even."""
    old = node.inputs[index]
    tensor = constant(old)
    if old is None or tensor is None or tensor.dtype is not ir.DataType.INT32:
        return
    bias = np.clip(np.rint(tensor.numpy() * np.float64(factor)), -INT32_MAX, INT32_MAX).astype(np.int32)
    node.replace_input_with(index, add_initializer(graph_of(node), unused_name(taken, f"{old.name}_rescaled"), bias))
    discard(old)


def _rescale_pair(node: ir.Node, index: int, factor: np.ndarray, taken: set[str]) -> None:
    """Rescale the int32 bias of a product whose bias is dequantized, and the scale of that bias."""
    row = OPS.get(node.op_type)
    if node.domain or index != 0 or row is None or row.bias is None or len(node.inputs) <= row.bias:
        return
    value = node.inputs[row.bias]
    pair = producer_of(value)
    scale = constant(pair.inputs[1]) if pair is not None and is_linear(pair, "DequantizeLinear") else None
    if pair is None or scale is None or constant(pair.inputs[0]) is None or len(pair.outputs[0].uses()) != 1:
        return
    _rescale_bias(pair, 0, factor, taken)
    old, finer = pair.inputs[1], np.asarray(scale.numpy() / factor, np.float32)
    pair.replace_input_with(1, add_initializer(graph_of(pair), unused_name(taken, f"{pair.name}/joined_scale"), finer))
    discard(old)

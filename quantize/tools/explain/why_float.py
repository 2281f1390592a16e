"""Why a product ran in float: what the graph lacks for an integer kernel. Why other kernels take their time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .... import NATIVE_DOMAIN
from ....transforms.graphs.queries import constant, made_by, producer_of
from ....transforms.int8.ops import OPS, float_reason, only_moves
from ....transforms.int8.reasons import CONTROL_FLOW
from ....transforms.patterns.conv_transposes import has_whole_strides
from ....transforms.patterns.elementwise import clip_bounds
from ....transforms.patterns.resizes import SCALES, SIZES
from ...runtime.executed import Kernel

QUANTIZED = frozenset(
    "QuantizeLinear DequantizeLinear DynamicQuantizeLinear QLinearConv QLinearMatMul QGemm ConvInteger MatMulInteger "
    "MatMulIntegerToFloat DynamicQuantizeMatMul QAttention DynamicQuantizeLSTM MatMulNBits".split()
)
ABSORBED = frozenset({"Relu", "Clip"})
MOVERS = frozenset({"Concat", *(op for op, row in OPS.items() if row.kind == "same")})
"""Operators that only move or select values."""
INTEGERS = re.compile(r"[us]\d+([·→][us]\d+)*")
"""The precision of a kernel that reads and writes integers alone."""
EIGHT_BITS = frozenset({ir.DataType.UINT8, ir.DataType.INT8})
NO_KERNEL = frozenset("LSTM GRU RNN Attention MultiHeadAttention Einsum".split())
"""Products that QDQ pairs around them never turn into an integer kernel."""
TRANSPOSED = "the runtime has no integer kernel for ConvTranspose; {}"
NATIVE, NOT_NATIVE = (
    "a native operator of requant computes such a one from uint8 to uint8",
    "requant's native operator has no such weights, strides, groups or dilations",
)
NO_PAIRS = "it has an integer kernel, which needs a DequantizeLinear before it and a QuantizeLinear after it"
NATIVE_FLOAT = "a native operator computes it"
MOVES = "it only moves or selects values, which are integers already"
COMPUTES = "it computes in integers already"
NO_PRODUCT = "it is no product"
COMPUTED_SIZE = "; its size is computed, and native operators need a constant one"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a node ran in float.

    Attributes:
        kind: The reason without names; nodes of one kind are reported together.
        text: The reason with the tensors and nodes concerned.
    """

    kind: str
    text: str


def why_float(model: ir.Model, node: ir.Node, *, ends: bool = True) -> tuple[Obstacle, ...]:
    """Return the reasons why a Conv, Gemm or MatMul has no integer kernel, the most important first.

    A Conv needs a DequantizeLinear right before its input, another on its constant weight, and a QuantizeLinear right
    after it. A MatMul or Gemm does not need the last. Between product and QuantizeLinear there may be a Relu or Clip
    that the range of the uint8 tensor includes.

    Args:
        model: The model.
        node: The product.
        ends: Whether an integer convolution must end in a QuantizeLinear; in OpenVINO it may write float.
    """
    if node.op_type == "ConvTranspose":
        dequantize = _dequantized(node, 1)
        fits = has_whole_strides(node, constant(node.inputs[1] if dequantize is None else dequantize.inputs[0]))
        return (_same(TRANSPOSED.format(NATIVE if fits else NOT_NATIVE)),)
    if node.op_type in NO_KERNEL:
        return (_same(f"{node.op_type} has no integer kernel for static ranges"),)
    if not any(other.op_type in QUANTIZED or other.domain == NATIVE_DOMAIN for other in model.graph.all_nodes()):
        return (_same("the model is not quantized"),)
    data, weight, after = _dequantized(node, 0), _dequantized(node, 1), _after(node)
    if data is None and weight is None and after.quantize is None and _upstream(node) is None:
        return (_same("it is not quantized: neither its input nor its weight comes from a DequantizeLinear"),)
    if data is None and weight is not None and _upstream(node) is None:
        return (_same("only its weight is int8: its input is never quantized"),)
    found = [*_input_reasons(node, data), *_weight_reasons(node, weight)]
    found += _output_reasons(node, after) if ends else ()
    return tuple(found) or (_same("the graph fits an integer kernel, but the runtime did not choose it"),)


def why_rest_float(op: str, domain: str = "", node: ir.Node | None = None) -> str:
    """Return why an operator that is no product ran in float.

    Args:
        op: The operator that ran.
        domain: Its domain.
        node: The node of the model that it computes, if it is known: the attributes of a Resize decide its reason.
    """
    name = f"{domain}.{op}" if f"{domain}.{op}" in OPS else op
    row = OPS.get(name)
    if name == "Resize" and node is not None and node.op_type == "Resize" and only_moves(node):
        return NO_PAIRS + (COMPUTED_SIZE if _computes_size(node) else "")
    if row is None or not row.u8 or row.why:
        return float_reason(name).text
    return row.slow.text or NO_PAIRS


def why_rest(kernel: Kernel, op: str, node: ir.Node | None) -> str:
    """Return why a kernel that is no product takes the time it takes.

    Args:
        kernel: The kernel.
        op: The operator that ran (`called`).
        node: The node of the model that it computes, if it is known.
    """
    row = OPS.get(op)
    if kernel.precision == "float32" and kernel.run.domain != NATIVE_DOMAIN:
        return why_rest_float(op, kernel.run.domain, node)
    if row is not None and row.why.code == CONTROL_FLOW.code:
        return row.why.text
    if not INTEGERS.fullmatch(kernel.precision):
        return NATIVE_FLOAT if kernel.run.domain == NATIVE_DOMAIN else NO_PRODUCT
    return MOVES if op in MOVERS else COMPUTES


def _computes_size(resize: ir.Node) -> bool:
    """Whether the scales or the sizes of a Resize are no constants."""
    given = (value for value in resize.inputs[SCALES : SIZES + 1] if value is not None and value.name)
    return any(constant(value) is None for value in given)


def _same(text: str) -> Obstacle:
    """Return a reason that names no tensor or node."""
    return Obstacle(text, text)


def _dequantized(node: ir.Node, index: int) -> ir.Node | None:
    """Return the DequantizeLinear that computes an input."""
    return made_by(node.inputs[index], "DequantizeLinear") if index < len(node.inputs) else None


def _upstream(node: ir.Node) -> ir.Node | None:
    """Return the node between a product and a DequantizeLinear, if there is exactly one."""
    producer = producer_of(node.inputs[0]) if node.inputs else None
    return producer if producer is not None and _dequantized(producer, 0) is not None else None


def parameters(node: ir.Node) -> tuple[np.ndarray | None, np.ndarray]:
    """Return scale and zero point of a QuantizeLinear or DequantizeLinear; None for a computed scale."""
    scale = constant(node.inputs[1])
    zero = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    shift = np.zeros(1, np.uint8) if zero is None else np.asarray(zero.numpy())
    return (None if scale is None else np.asarray(scale.numpy())), shift


def _integers(node: ir.Node) -> ir.DataType:
    """Return the integer type of a QuantizeLinear or DequantizeLinear."""
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    held = constant(zero)
    if held is not None:
        return held.dtype
    data = node.inputs[0]
    known = data.dtype if data is not None and node.op_type == "DequantizeLinear" else None
    return known or ir.DataType.UINT8


def _input_reasons(node: ir.Node, data: ir.Node | None) -> Iterator[Obstacle]:
    """Yield what the first input lacks; `data` is the DequantizeLinear that computes it."""
    value = node.inputs[0]
    name = value.name if value is not None else ""
    if data is None:
        between = _upstream(node)
        if between is not None:
            kind = f"{between.op_type} stands between the DequantizeLinear and it"
            yield Obstacle(kind, f"{between.op_type} {between.name!r} stands between the DequantizeLinear and it")
        else:
            yield Obstacle("its input is float", f"its input {name!r} does not come from a DequantizeLinear")
        return
    if _integers(data) not in EIGHT_BITS:
        width = _integers(data).name.lower()
        yield Obstacle(f"{width} activations have no integer kernel", f"its input {name!r} is {width}, not 8 bits wide")
    scale, _ = parameters(data)
    if scale is not None and scale.size > 1:
        text = f"its input {name!r} has {scale.size} scales, one per channel; the integer kernel takes one"
        yield Obstacle("per-channel activation scales", text)


def _weight_reasons(node: ir.Node, weight: ir.Node | None) -> Iterator[Obstacle]:
    """Yield what the weight lacks; `weight` is the DequantizeLinear that computes it."""
    value = node.inputs[1]
    name = value.name if value is not None else ""
    if weight is None:
        held = "is float" if constant(value) is not None else "is computed, but not by a DequantizeLinear"
        yield Obstacle("its weight does not come from a DequantizeLinear", f"its weight {name!r} {held}")
        return
    if _integers(weight) not in EIGHT_BITS:
        width = _integers(weight).name.lower()
        yield Obstacle(f"{width} weights have no integer kernel", f"its weight {name!r} is {width}, not 8 bits wide")
    if weight.attributes.get_int("block_size", 0) > 0:
        yield Obstacle("weights quantized in blocks", f"its weight {name!r} has a scale per block, not per channel")
    scale, _ = parameters(weight)
    if scale is not None and scale.size > 1 and node.op_type in ("Gemm", "MatMul"):
        axis, rank = weight.attributes.get_int("axis", 1), len(value.shape) if value is not None and value.shape else 2
        wanted = 0 if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1 else rank - 1
        if axis % rank != wanted:
            text = f"its weight {name!r} has a scale for each index of axis {axis}, over which the product sums"
            yield Obstacle("weight scales along the wrong axis", text)


@dataclass(frozen=True, slots=True)
class _After:
    """The nodes after a product: an activation, the QuantizeLinear, other readers."""

    activation: ir.Node | None
    quantize: ir.Node | None
    other_readers: tuple[ir.Node, ...]
    is_output: bool


def _after(node: ir.Node) -> _After:
    """Return the nodes after a product; one activation may precede the QuantizeLinear."""
    value, activation = node.outputs[0], None
    users = [use.node for use in value.uses()]
    if len(users) == 1 and users[0].op_type != "QuantizeLinear":
        (next_one,) = users
        beyond = [use.node for output in next_one.outputs for use in output.uses()]
        if next_one.op_type in ABSORBED or any(user.op_type == "QuantizeLinear" for user in beyond):
            activation, users, value = next_one, beyond, next_one.outputs[0]
    quantize = next((user for user in users if user.op_type == "QuantizeLinear"), None)
    other_readers = tuple(user for user in users if user is not quantize)
    return _After(activation, quantize, other_readers, value.is_graph_output())


def _output_reasons(node: ir.Node, after: _After) -> Iterator[Obstacle]:
    """Yield what the nodes after a product lack."""
    if after.quantize is None:
        yield from _without_quantize(node, after)
        return
    if _integers(after.quantize) not in EIGHT_BITS:
        width = _integers(after.quantize).name.lower()
        yield _same(f"{width} results have no integer kernel")
        return
    scale, zero = parameters(after.quantize)
    name = after.quantize.inputs[0].name if after.quantize.inputs[0] is not None else ""
    if scale is not None and scale.size > 1:
        text = f"its output {name!r} has {scale.size} scales, one per channel; the integer kernel takes one"
        yield Obstacle("per-channel activation scales", text)
    elif after.activation is not None and (problem := _not_absorbed(after.activation, scale, zero)) is not None:
        yield problem
    if after.other_readers or after.is_output:
        readers = [f"{reader.op_type} {reader.name!r}" for reader in after.other_readers]
        who = [*readers, "the model's output"][0]
        yield Obstacle("its output is also read in float", f"its output {name!r} is also read in float, by {who}")


def _without_quantize(node: ir.Node, after: _After) -> Iterator[Obstacle]:
    """Yield why a product needs a QuantizeLinear, if its operator does: a Conv, and a Gemm with a float bias."""
    readers = [f"{user.op_type} {user.name!r}" for user in after.other_readers[:1]] or ["the model's output"]
    if node.op_type == "Conv":
        text = f"no QuantizeLinear on its output, which goes to {readers[0]} in float"
        yield Obstacle("no QuantizeLinear on its output", text)
    elif node.op_type == "Gemm" and len(node.inputs) > 2 and _dequantized(node, 2) is None:
        text = f"no QuantizeLinear on its output, and its bias {node.inputs[2].name!r} is float"  # type: ignore[union-attr]
        yield Obstacle("no QuantizeLinear on its output, and its bias is float", text)


def _not_absorbed(activation: ir.Node, scale: np.ndarray | None, zero: np.ndarray) -> Obstacle | None:
    """Return why an activation is not absorbed by the QuantizeLinear after it."""
    name = f"{activation.op_type} {activation.name!r}"
    if activation.op_type not in ABSORBED:
        kind = f"{activation.op_type} before its QuantizeLinear is not absorbed"
        return Obstacle(kind, f"{name} stands between it and its QuantizeLinear, and is not absorbed")
    limits = np.iinfo(zero.dtype)
    if scale is None:
        return None
    low, high = (float((end - int(zero.flat[0])) * scale.flat[0]) for end in (limits.min, limits.max))
    if activation.op_type == "Relu":
        if int(zero.flat[0]) == limits.min:
            return None
        kind = "zero point after Relu is not the smallest of the type"
        return Obstacle(kind, f"zero point {int(zero.flat[0])} after {name}, which is absorbed only with {limits.min}")
    bounds = clip_bounds(activation)
    if bounds is None:
        return _same("the bounds of the Clip before its QuantizeLinear are not constant, or do not contain 0")
    if bounds[0] <= low * (1 + 1e-6) and high <= bounds[1] * (1 + 1e-6):  # the scale is rounded to float32
        return None
    text = f"{name} to {bounds[0]:g}..{bounds[1]:g} cuts into the range {low:g}..{high:g} of its QuantizeLinear"
    return Obstacle("Clip cuts into the range of its QuantizeLinear", text)

"""Multiply-accumulates of each operator, from the shapes of its tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import onnx_ir as ir

from ... import NATIVE_DOMAIN
from ...transforms.graphs.queries import made_by

NATIVE = tuple(
    f"{NATIVE_DOMAIN}.{operator}"
    for operator in (
        "Convolution ConvTranspose MatMul MatMulNBits Attention WindowAttention CachedAttention "
        "QuantizedCacheAttention GRU LSTM"
    ).split()
)
NATIVE_CONVOLUTION, NATIVE_TRANSPOSED, NATIVE_PRODUCT, NATIVE_BLOCK_PRODUCT, *NATIVE_OTHERS = NATIVE
NATIVE_ATTENTION, NATIVE_WINDOWS, NATIVE_CACHED, *NATIVE_RECURRENT = NATIVE_OTHERS
INTEGER = frozenset(
    "QLinearConv ConvInteger MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul QLinearMatMul QGemm "
    "DynamicQuantizeLSTM QAttention".split()
) | {*NATIVE}
NUMBER = re.compile(r"_[0-9]+$")  # of the names of a native operator
INTEGER_LEVEL = 4
"""The accuracy_level with which a MatMulNBits multiplies integers."""
CACHE = 4  # axes of the keys of earlier runs: batch, heads, rows, columns


Shape = tuple[int, ...]


def _convolution(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Each output needs one product per weight of its channel; weights are (M, C/group, *kernel)."""
    return math.prod(output) * math.prod(_weight_shape(node, inputs, rank=len(output))[1:])


def _transposed(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Each input takes part in one product per weight of its channel; weights are (C, M/group, *kernel)."""
    return math.prod(inputs[0]) * math.prod(_weight_shape(node, inputs, rank=len(output))[1:])


def _product(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Each output needs one product per element of the common axis."""
    transposed = node.attributes.get_int("transA", 0) and len(inputs[0]) > 1
    return math.prod(output) * inputs[0][-2 if transposed else -1]


def _recurrent(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Each step of (T, N, ...) uses every weight of W and R once; both have three dimensions."""
    stored = [v.shape if v.const_value is None else v.const_value.shape for v in node.inputs[1:3] if v is not None]
    weights = [[axis for axis in shape if isinstance(axis, int)] for shape in stored if shape is not None]
    return math.prod(inputs[0][:2]) * sum(math.prod(shape) for shape in weights if len(shape) == 3)


def _native_recurrent(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Each step of (T, N, ...) uses every weight of w and r once; w may be float."""
    weights = [v.const_value for v in (node.inputs[1], node.inputs[4]) if v is not None and v.const_value is not None]
    return math.prod(inputs[0][:2]) * sum(each.size for each in weights)


def _attention(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Projections of (N, S, K) by (K, 3 H), then scores and weighted sums, S x S x H; the standard one has none."""
    if not node.domain:
        return _multi_head(node, inputs, output)
    weights = _constant_shape(node, rank=2)
    return math.prod(inputs[0]) * weights[1] + 2 * math.prod(output) * inputs[0][1]


def _multi_head(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Each query is multiplied by each key, and each result needs one product per key; 0 if all are in one tensor."""
    apart = len(inputs) > 1 and len(inputs[1]) > 1
    return (math.prod(inputs[0]) + math.prod(output)) * inputs[1][-2] if apart else 0


def _heads(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Each query is multiplied by each key, and each result needs one product per key."""
    order = node.attributes.get_ints("orders", (0, 0, 0, 0))[1]
    if not node.attributes.get_int("heads", 0):
        return (math.prod(inputs[0]) + math.prod(output)) * inputs[1][-2 - order]
    depth, width = node.attributes.get_ints("columns", (1, 1))  # heads side by side in the last axis
    return math.prod(output) // max(width, 1) * (depth + width) * inputs[1][-1 - order]


def _cached(node: ir.Node, inputs: Sequence[Shape], output: Shape) -> int:
    """Each query is multiplied by each key, and each result needs one product per key; without a past by new keys."""
    past = max((shape[2] for shape in inputs if len(shape) == CACHE), default=0)
    return 2 * math.prod(output) * (past + output[1])


MACS: dict[str, Callable[[ir.Node, Sequence[Shape], Shape], int]] = {
    **dict.fromkeys("Conv FusedConv NhwcFusedConv QLinearConv ConvInteger".split(), _convolution),
    NATIVE_CONVOLUTION: _convolution,
    **dict.fromkeys(("ConvTranspose", NATIVE_TRANSPOSED), _transposed),
    **dict.fromkeys(
        "MatMul FusedMatMul Gemm FusedGemm MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul QLinearMatMul "
        "QGemm MatMulNBits".split(),
        _product,
    ),
    **dict.fromkeys((NATIVE_PRODUCT, NATIVE_BLOCK_PRODUCT), _product),
    **dict.fromkeys(("Attention", "QAttention"), _attention),
    "MultiHeadAttention": _multi_head,
    NATIVE_ATTENTION: _heads,
    NATIVE_WINDOWS: _heads,
    NATIVE_CACHED: _cached,
    "GroupQueryAttention": _cached,
    **dict.fromkeys(NATIVE_RECURRENT, _native_recurrent),
    **dict.fromkeys("LSTM GRU RNN DynamicQuantizeLSTM".split(), _recurrent),
}
"""Multiply-accumulates of one run, from the node and the shapes of its inputs and of its first output."""


def counted_as(op: str, domain: str) -> str:
    """Return the name of an operator in `MACS` and `INTEGER`; a native operator has its domain there, and no number."""
    return f"{domain}.{NUMBER.sub('', op)}" if domain == NATIVE_DOMAIN else op


def multiply_accumulates(op: str, node: ir.Node | None, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Return the multiply-accumulates of one run of a node; 0 for operators that are not in `MACS`.

    Args:
        op: The executed operator, see `counted_as`.
        node: The node with its constants.
        inputs: Shapes of its inputs, in order, without constants that the kernel has packed.
        outputs: Shapes of its outputs.
    """
    if node is None or op not in MACS or not outputs or not inputs or not inputs[0]:
        return 0
    return MACS[op](node, inputs, outputs[0])


def accuracy_level(node: ir.Node | None) -> int:
    """Return the accuracy_level of a node; 0 for operators that have none."""
    return 0 if node is None else int(node.attributes.get_int("accuracy_level", 0))


def multiplies_integers(op: str, level: int) -> bool:
    """Return whether an operator multiplies integers.

    Args:
        op: The operator, see `counted_as`.
        level: Its accuracy_level.
    """
    return op in INTEGER or (op == "MatMulNBits" and level == INTEGER_LEVEL)


def _weight_shape(node: ir.Node, inputs: Sequence[Shape], rank: int) -> Shape:
    """Return the shape of the weight of a convolution: a constant, or the computed second input."""
    shape = _constant_shape(node, rank)
    if any(shape) or len(inputs) < 2 or len(inputs[1]) != rank:
        return shape
    return inputs[1]


def _constant_shape(node: ir.Node, rank: int) -> tuple[int, ...]:
    """Return the shape of the first constant input of `rank` dimensions; (0, 0) if the weights are computed.

    Weights that every run dequantizes count as constant.
    """
    for value in node.inputs:
        dq = made_by(value, "DequantizeLinear")
        held = value if dq is None else dq.inputs[0]
        if held is not None and held.const_value is not None and len(held.const_value.shape) == rank:
            return tuple(int(d) for d in held.const_value.shape)  # type: ignore[arg-type]
    return (0, 0)

"""What in an operator itself keeps it from computing in integers: attributes, constants, and ranges that differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import onnx_ir as ir

from ...transforms.graphs.queries import MS, constant, made_by, release
from ...transforms.int8.forms import gate_obstacle
from ...transforms.int8.gru_form import FIRST_OPSET as FIRST_GRU_OPSET
from ...transforms.int8.ops import Op, only_moves
from ...transforms.int8.qparams import asymmetric_u8, dequantize, quantize
from ...transforms.int8.reasons import ALREADY, NONE, Reason
from ...transforms.int8.recurrent import ACTIVATIONS
from ...transforms.int8.units import activations
from ...transforms.patterns import pads
from . import reasons as why
from .facts import Facts

# A first convolution, of few channels and without groups, is slower as a QLinearConv below this many products per
# output: on 1 or 3 channels 3x3 and 5x5 take 2.4 to 3.6 times as long in int8, a 7x7 on 3 channels 0.7 times.
LEAST_PRODUCTS = 64
FEW_CHANNELS = 8
# Branches do not meet in uint8 if their ranges differ by more than this: the narrow one would keep under 4 bits.
WIDEST_SPREAD = 16.0
RANKS = {"Conv": (3, 4, 5), "Gemm": (2,), f"{MS}.Attention": (2,)}
# The noise of a rounded factor, as a share of the product, if all channels of the product are alike: -30 dB, the noise
# of uint8 itself. Step / sqrt(12) of a constant that is 28 times its median.
FACTOR_NOISE = 1e-3
FINITE: WeakKeyDictionary[ir.TensorProtocol, bool] = WeakKeyDictionary()
"""Whether all values of a tensor are finite; each tensor is read once."""
ROUNDED: WeakKeyDictionary[ir.TensorProtocol, float] = WeakKeyDictionary()
"""What `_rounded_spread` returns of a tensor; each tensor is read once."""


# ------------------------------------------------------------------------------------------ operators with weights


def compute_obstacle(node: ir.Node, row: Op) -> Reason:
    """Return what keeps an operator with weights from computing in integers."""
    weight = constant(node.inputs[1])
    if weight is None:
        return ALREADY if made_by(node.inputs[1], "DequantizeLinear") else why.WEIGHTS_COMPUTED
    if weight.dtype is not ir.DataType.FLOAT:
        return why.WEIGHTS_NOT_FLOAT32
    shape = weight.shape.numpy()
    if len(shape) not in RANKS.get(node.op_type, range(2, 9)):
        return why.WEIGHTS_RANK.about(len(shape))
    if not weight.size or not is_finite(weight):
        return why.WEIGHTS_NOT_FINITE if weight.size else why.WEIGHTS_EMPTY
    bias = node.inputs[row.bias] if row.bias is not None and len(node.inputs) > row.bias else None
    if found := bias_obstacle(bias):
        return found
    rule = {"Gemm": _gemm_obstacle, "Attention": _attention_obstacle}.get(node.op_type)
    return rule(node, shape, bias) if rule is not None else NONE


def bias_obstacle(bias: ir.Value | None) -> Reason:
    """Return what keeps a bias from being added in integers, or written anew; `NONE` without a bias."""
    if bias is None:
        return NONE
    tensor = constant(bias)
    if tensor is None:
        return why.BIAS_COMPUTED
    return NONE if is_finite(tensor) else why.BIAS_NOT_FINITE


def few_products(node: ir.Node) -> Reason:
    """Return why a convolution is expected to be slower in integers."""
    weight = constant(node.inputs[1])
    if node.op_type != "Conv" or weight is None:
        return NONE
    shape = weight.shape.numpy()
    products = math.prod(shape[1:])
    if node.attributes.get_int("group", 1) == 1 and products < LEAST_PRODUCTS and shape[1] < FEW_CHANNELS:
        return why.FEW_PRODUCTS.about(products)
    return NONE


def _attention_obstacle(node: ir.Node, shape: Sequence[int], bias: ir.Value | None) -> Reason:
    """Return what keeps an Attention from being a QAttention."""
    spare = [value for value in node.inputs[5:] if value is not None]
    sizes = node.attributes.get_ints("qkv_hidden_sizes", None)
    rotary: list[int] = [node.attributes.get_int(name, 0) for name in ("do_rotary", "rotary_embedding_dim")]
    if spare or sizes or any(rotary):
        return why.ATTENTION
    return why.BIAS_MISSING if len(node.inputs) < 3 or constant(node.inputs[2]) is None else NONE


def _gemm_obstacle(node: ir.Node, shape: Sequence[int], bias: ir.Value | None) -> Reason:
    """Return what keeps a Gemm from being a QGemm."""
    if node.attributes.get_int("transA", 0):
        return why.TRANSPOSED
    if node.attributes.get_float("alpha", 1.0) != 1.0 or node.attributes.get_float("beta", 1.0) != 1.0:
        return why.ALPHA_BETA
    channels = shape[0 if node.attributes.get_int("transB", 0) else 1]
    tensor = constant(bias)
    per_column = tensor is None or tensor.size == channels == (tensor.shape[-1] if len(tensor.shape) else 1)
    return NONE if per_column else why.BIAS_SHAPE


def cell_obstacle(node: ir.Node, facts: Facts) -> Reason:
    """Return what keeps a GRU from being integer products and a Scan, and a GRU or LSTM from being native."""
    if found := bias_obstacle(node.inputs[3] if len(node.inputs) > 3 else None):
        return found
    named = [name.lower() for name in node.attributes.get_strings("activations", ())]
    usual = [name.lower() for name in ACTIVATIONS[node.op_type]]
    if "clip" in node.attributes or named != usual * (len(named) // len(usual)):
        return why.OTHER_ACTIVATIONS
    return why.OLD_OPSET.about(facts.opset) if facts.opset < FIRST_GRU_OPSET else NONE


# ---------------------------------------------------------------------------------------- operators without weights


def follower_obstacle(node: ir.Node, row: Op, facts: Facts) -> Reason:
    """Return what keeps an operator that follows its neighbours from running on uint8."""
    read = [v for v in activations(node) if v.name]
    if not read:
        return why.OPERAND_CONSTANT
    if node.op_type == "HardSigmoid":
        return _gate_form_obstacle(node, facts)
    if row.kind == "same":
        return _moved_obstacle(node, row, facts)
    window = _window_obstacle(node) if node.op_type == "AveragePool" else NONE
    return window or _scale_obstacle(node, row, read, facts)


def _gate_form_obstacle(node: ir.Node, facts: Facts) -> Reason:
    """Return what keeps a HardSigmoid from computing on uint8."""
    if facts.signed:
        return why.SIGNED_GATE
    unusual = gate_obstacle(node)
    return why.UNUSUAL_GATE.about(unusual) if unusual else NONE


def _window_obstacle(node: ir.Node) -> Reason:
    """Return what in the window of an AveragePool its integer kernel does not compute."""
    if any(step != 1 for step in node.attributes.get_ints("dilations", ())):
        return why.DILATED_POOL
    cut = all(node.attributes.get_int(name, 0) for name in ("ceil_mode", "count_include_pad"))
    return why.CUT_WINDOW if cut else NONE


def _scale_obstacle(node: ir.Node, row: Op, read: Iterable[ir.Value], facts: Facts) -> Reason:
    """Return what keeps the tensors of an operator from meeting in uint8: odd constants, or ranges that differ much.

    Args:
        node: The operator.
        row: Its row of the operator table.
        read: The tensors that it reads and that are not constant.
        facts: The input of the rules.
    """
    constants = [constant(node.inputs[index]) for index in row.activations or range(len(node.inputs))]
    known = [tensor for tensor in constants if tensor is not None]
    for tensor in known:
        if tensor.dtype is not ir.DataType.FLOAT or not tensor.size:
            return why.OPERAND_NOT_FLOAT32
        if not is_finite(tensor):
            return why.OPERAND_NOT_FINITE
    ranges = [facts.ranges[str(v.name)] for v in read if v.name in facts.ranges]
    ranges += [(float(tensor.numpy().min()), float(tensor.numpy().max())) for tensor in known]
    if node.op_type == "Mul":  # each factor of a product keeps its own scale
        lost = max(map(_rounded_spread, known), default=0.0)
        return why.CONSTANT_SPREAD.about(lost) if lost else NONE
    spread = _spread(ranges)
    return why.RANGES_DIFFER.about(spread) if spread > WIDEST_SPREAD else NONE


def _rounded_spread(tensor: ir.TensorProtocol) -> float:
    """Return how many times its median the largest value of a factor is if uint8 rounds the factor too much, else 0.

    A norm has large factors where values are small, so all its results count alike: the error of a typical factor, as
    a share of this factor, is the noise. Magnitudes count, and zeros do not, because every scale keeps them.
    """
    if tensor not in ROUNDED:
        values = np.asarray(tensor.numpy(), np.float32)
        sizes = np.abs(values[values != 0])
        median = float(np.median(sizes)) if sizes.size else 1.0
        params = asymmetric_u8(float(values.min()), float(values.max()))
        error = np.square(dequantize(quantize(values, params), params) - values, dtype=np.float64).mean()
        noisy = error > FACTOR_NOISE * median**2
        ROUNDED[tensor] = float(sizes.max()) / median if noisy else 0.0
        release(tensor)
    return ROUNDED[tensor]


def _moved_obstacle(node: ir.Node, row: Op, facts: Facts) -> Reason:
    """Return why the output of an operator of kind ``same`` has other values than its first input."""
    if not only_moves(node):
        return row.why or why.SEVERAL_OUTPUTS
    if node.op_type != "Pad" or not pads.fills(node):
        return NONE
    value = pads.value(node)
    if facts.opset < 13 or value is None:
        return why.PAD_FORM
    return NONE if value == 0.0 else why.PAD_VALUE


def _spread(ranges: Iterable[tuple[float, float]]) -> float:
    """Return the ratio of the widest range to the narrowest; 1 for fewer than two. Zero is exact on any scale."""
    spans = [span for lo, hi in ranges if (span := max(hi, 0.0) - min(lo, 0.0)) > 0]
    return max(spans) / min(spans) if spans else 1.0


# -------------------------------------------------------------------------------------------------------- tensors


def is_finite(tensor: ir.TensorProtocol | None) -> bool:
    """Return whether all values of a float tensor are finite; True without a tensor."""
    if tensor is None:
        return True
    if tensor not in FINITE:
        FINITE[tensor] = bool(np.isfinite(tensor.numpy().sum(dtype=np.float64)))  # of float32 no such sum overflows
        release(tensor)
    return FINITE[tensor]

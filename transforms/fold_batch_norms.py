"""Fold what scales and shifts the channels of a convolution or a matrix product into its weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .graph import (
    add_initializer,
    can_replace,
    constant,
    drop_unused,
    fresh_name,
    release,
    remove,
    replace,
    sole_reader,
)
from .registry import Change, LeftAlone, transform

Floats = npt.NDArray[np.float64]

LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@dataclass(frozen=True, slots=True)
class _Weights:
    """The constants of a linear node, as ``y = linear(x, weight) + bias``.

    Attributes:
        node: Conv, ConvTranspose, Gemm or MatMul.
        weight: As stored.
        axis: The axis of the weight along which its output channels lie.
        groups: How many groups share that axis: channel ``g * length + i`` is at ``i`` of group ``g`` of axis 0.
        bias: Float64, shape (M,), or None when the node has none.
        channels: M, the number of output channels.
    """

    node: ir.Node
    weight: np.ndarray
    axis: int
    groups: int
    bias: Floats | None
    channels: int


@transform("fold_batch_norms", after=("fold_constants",))
def fold_batch_norms(model: ir.Model, *, max_gain: float = inf) -> Change:
    """Fold a BatchNormalization, or a Mul or Add of one constant per channel, into the linear operator before it.

    Before:  y = BatchNormalization(Conv(x, W, b), gamma, beta, mean, var)
             y = Add(Mul(Conv(x, W, b), s), t)
    After:   y = Conv(x, W * g, (b - mean) * g + beta),  g = gamma / sqrt(var + epsilon), shape (M,)
             y = Conv(x, W * s, b * s + t)
        The same for ConvTranspose and Gemm, and for MatMul where nothing needs a bias. The arithmetic is done in
        float64, and the result is stored in the weight's type. Shared weights get a copy.
    Left alone: a linear output with other readers, or that is a graph output; a parameter that is not constant or
        not one per channel; BatchNormalization in training mode or without a linear operator directly before it; a
        channel that would be scaled by more than max_gain; results that are not finite.

    Options:
        max_gain: The largest factor by which a channel's weights may grow.
    """
    change = Change()
    for node in tuple(model.graph):
        if node.domain != "" or node.op_type not in ("BatchNormalization", "Mul", "Add"):
            continue
        linear = _linear_before(node)
        if linear is None:
            if node.op_type == "BatchNormalization":
                change.skip("no-linear-operator-before")
            continue
        try:
            if node.op_type == "BatchNormalization" and _is_training(model, node):
                raise LeftAlone("training-mode")
            _fold(model, linear, node, max_gain)
        except LeftAlone as left:
            change.skip(str(left))
        else:
            change.applied += 1
    return change


def _linear_before(node: ir.Node) -> ir.Node | None:
    """Return the linear operator whose output `node` may scale; a Mul or Add has a constant on the other side."""
    for value, other in ((0, 1), (1, 0)) if node.op_type != "BatchNormalization" else ((0, 0),):
        source = node.inputs[value]
        linear = source.producer() if source is not None else None
        if linear is None or linear.domain != "" or linear.op_type not in LINEAR:
            continue
        if value == other or constant(node.inputs[other]) is not None:
            return linear
    return None


def _fold(model: ir.Model, linear: ir.Node, node: ir.Node, max_gain: float) -> None:
    """Rewrite `linear` so that it gives what `node` gives, and remove `node`.

    Raises:
        LeftAlone: That cannot be done exactly; nothing was changed.
    """
    output = linear.outputs[0]
    if sole_reader(output) is not node or not can_replace(node.outputs[0], output):
        raise LeftAlone("output-shared")
    weights = _weights(linear)
    scale, shift = _affine(node, weights, output)
    if np.max(np.abs(scale), initial=0) > max_gain:
        raise LeftAlone("gain-above-maximum")
    weight, bias = _scaled(weights, scale, shift)
    if weight is not weights.weight:
        _set_constant(model, linear, 1, weight, f"{_stem(linear)}_weight")
    if bias is not None:
        _set_constant(model, linear, 2, bias, f"{_stem(linear)}_bias")
        linear.attributes.pop("beta", None)
    name = node.outputs[0].name
    replace(node.outputs[0], output)
    remove(node)
    output.name = name  # a name stands for the same values before and after


def _weights(linear: ir.Node) -> _Weights:
    """Read the weight and the bias of a linear operator."""
    tensor = constant(linear.inputs[1])
    if tensor is None:
        raise LeftAlone("weight-not-constant")
    if not tensor.dtype.is_floating_point():
        raise LeftAlone("weight-not-float")
    weight = tensor.numpy()
    release(tensor)
    if linear.op_type == "MatMul" and weight.ndim != 2:
        raise LeftAlone("weight-not-a-matrix")
    transposed = linear.attributes.get_int("transB", 0)
    axis = {"Conv": 0, "ConvTranspose": 1, "Gemm": 0 if transposed else 1, "MatMul": 1}[linear.op_type]
    groups = linear.attributes.get_int("group", 1) if linear.op_type == "ConvTranspose" else 1
    channels = weight.shape[axis] * groups
    return _Weights(linear, weight, axis, groups, _bias(linear, channels), channels)


def _bias(linear: ir.Node, channels: int) -> Floats | None:
    """Return what a linear operator adds, shape (channels,)."""
    value = linear.inputs[2] if len(linear.inputs) > 2 else None
    if value is None:
        return None
    tensor = constant(value)
    if tensor is None:
        raise LeftAlone("bias-not-constant")
    beta = linear.attributes.get_float("beta", 1.0) if linear.op_type == "Gemm" else 1.0
    return _per_channel(tensor.numpy(), 1, channels, "bias-not-per-channel") * beta


def _per_channel(array: np.ndarray, last: int, channels: int, reason: str) -> Floats:
    """Return a constant that broadcasts along one axis only, as one value per channel.

    Args:
        array: The constant.
        last: Which axis of the output holds the channels, counted from the end: 1 for the last.
        channels: The length of that axis.
        reason: Why the candidate is left when the constant varies along another axis.
    """
    along = array.shape[-last] if array.ndim >= last else 1
    if array.size != along or along not in (1, channels):
        raise LeftAlone(reason)
    return np.broadcast_to(array.astype(np.float64).reshape(-1), (channels,))


def _affine(node: ir.Node, weights: _Weights, output: ir.Value) -> tuple[Floats, Floats]:
    """Return scale and shift, both of shape (M,), such that `node` computes ``x * scale + shift``."""
    if node.op_type == "BatchNormalization":
        return _normalization(node, weights.channels)
    tensor = constant(node.inputs[0]) or constant(node.inputs[1])
    if tensor is None:
        raise LeftAlone("not-constant")
    array = tensor.numpy()
    convolution = weights.node.op_type in ("Conv", "ConvTranspose")
    rank = weights.weight.ndim if weights.node.op_type != "MatMul" else len(output.shape or (0,))
    if array.ndim > rank:  # the constant would give the output more dimensions
        raise LeftAlone("not-per-channel")
    values = _per_channel(array, rank - 1 if convolution else 1, weights.channels, "not-per-channel")
    if node.op_type == "Mul":
        return values, np.zeros(weights.channels)
    return np.ones(weights.channels), values


def _is_training(model: ir.Model, node: ir.Node) -> bool:
    """Whether a BatchNormalization uses the statistics of the batch, or gives statistics that somebody may read."""
    if model.opset_imports.get("", 0) < 7:
        return node.attributes.get_int("is_test", 0) == 0
    return bool(node.attributes.get_int("training_mode", 0)) or any(value.name for value in node.outputs[1:])


def _normalization(node: ir.Node, channels: int) -> tuple[Floats, Floats]:
    """Return scale and shift of a BatchNormalization in inference mode (onnx's Operators.md, BatchNormalization)."""
    if node.attributes.get_int("spatial", 1) == 0:  # up to opset 8: one set of parameters per element
        raise LeftAlone("not-per-channel")
    tensors = [constant(value) for value in node.inputs[1:5]]
    arrays = [tensor.numpy().astype(np.float64) for tensor in tensors if tensor is not None]
    if len(arrays) != 4:
        raise LeftAlone("not-constant")
    gamma, beta, mean, variance = (_per_channel(array, 1, channels, "not-per-channel") for array in arrays)
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    return scale, beta - mean * scale


def _scaled(weights: _Weights, scale: Floats, shift: Floats) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the weight times `scale`, itself when that is 1, and the bias that goes with it, in the weight's type."""
    kind = weights.weight.dtype
    shape = weights.weight.shape
    split = (weights.groups, shape[0] // weights.groups, *shape[1:])
    factors = [1] * len(split)
    factors[0], factors[weights.axis + 1] = weights.groups, weights.channels // weights.groups
    with np.errstate(all="ignore"):
        weight = (weights.weight.astype(np.float64).reshape(split) * scale.reshape(factors)).reshape(shape)
        bias = shift if weights.bias is None else weights.bias * scale + shift
        stored = (weights.weight if (scale == 1).all() else weight.astype(kind)), bias.astype(kind)
    if not all(np.isfinite(array.astype(np.float64)).all() for array in stored):
        raise LeftAlone("not-finite")
    if weights.bias is None and not shift.any():
        return stored[0], None
    if weights.node.op_type == "MatMul":
        raise LeftAlone("no-bias-input")
    return stored


def _stem(linear: ir.Node) -> str:
    """Return the name that new constants of a node start with."""
    weight = linear.inputs[1]
    return linear.name or (weight.name if weight is not None else None) or linear.op_type


def _set_constant(model: ir.Model, node: ir.Node, index: int, array: np.ndarray, stem: str) -> None:
    """Give `node` a new constant as input `index`: under the old name when nothing else reads the old one."""
    old = node.inputs[index] if index < len(node.inputs) else None
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, None)
    name = old.name if old is not None and old.is_initializer() and not old.uses() else None
    drop_unused(model.graph, (old,))
    node.replace_input_with(index, add_initializer(model.graph, name or fresh_name(model, stem), array))

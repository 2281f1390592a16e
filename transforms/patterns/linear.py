"""Linear operators with constant weights, and folding a scale and a shift per channel into their constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..graphs.queries import constant, graph_of, is_standard, release, sole_reader
from ..graphs.rewriter import add_initializer, discard, unused_name
from ..registry import LeftAlone

Floats = npt.NDArray[np.float64]

LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
BY_CONSTANT = frozenset({"Add", "Div", "Mul", "Sub"})
AFFINE = BY_CONSTANT | {"BatchNormalization"}
SCALE_FREE = frozenset({"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LeakyRelu", "MaxPool", "PRelu", "Relu"})
"""Operators f with f(x * s) = f(x) * s for each factor s above 0 of a channel."""
DEVIATIONS = 3
"""Standard deviations around the mean in which the values of a channel are expected."""


def convolves(node: ir.Node, rank: int) -> bool:
    """Return whether a node is a convolution of tensors of some rank, by the rank of its weights."""
    if node.domain or node.op_type not in CONVOLUTIONS or len(node.inputs) < 2 or node.inputs[1] is None:
        return False
    weights = constant(node.inputs[1])
    shape = node.inputs[1].shape if weights is None else weights.shape
    return shape is not None and len(shape) == rank


@dataclass(frozen=True, slots=True)
class Weights:
    """The constants of a linear node, as ``y = linear(x, weight) + bias``.

    Attributes:
        node: Conv, ConvTranspose, Gemm or MatMul.
        weight: The stored array.
        bias: float64, shape (M,); None if the node has no bias.
        channels: M, the number of output channels.
        groups: The number of channel groups of a convolution.
    """

    node: ir.Node
    weight: np.ndarray
    bias: Floats | None
    channels: int
    groups: int

    @property
    def inputs(self) -> int:
        """The number of input channels."""
        shape = self.weight.shape
        if self.node.op_type == "Conv":
            return int(shape[1] * self.groups)
        return int(shape[1 if self.transposed else 0])

    @property
    def transposed(self) -> bool:
        """Whether the node is a Gemm whose weight has its output channels first."""
        return self.node.op_type == "Gemm" and self.node.attributes.get_int("transB", 0) != 0

    def axis(self, *, outputs: bool) -> int:
        """The axis of the `split` weight that holds the output (or input) channels of a group.

        A Conv and a Gemm with transB have their output channels first; a ConvTranspose has its input channels first.
        """
        return 1 if outputs == (self.node.op_type == "Conv" or self.transposed) else 2

    def along(self, values: Floats, *, outputs: bool) -> Floats:
        """Reshape one value per output (or input) channel so that it broadcasts over the `split` weight."""
        shape = [1] * (self.weight.ndim + 1)
        shape[0], shape[self.axis(outputs=outputs)] = self.groups, len(values) // self.groups
        return values.reshape(shape)

    @property
    def split(self) -> Floats:
        """The weight in float64, of shape (groups, shape[0] / groups, *shape[1:])."""
        shape = self.weight.shape
        return self.weight.astype(np.float64).reshape(self.groups, shape[0] // self.groups, *shape[1:])


def weights_of(linear: ir.Node) -> Weights:
    """Read the weight and the bias of a linear operator.

    Raises:
        LeftAlone: The weight is not a constant float tensor, is not a matrix in a MatMul, or the bias is not constant
            and per channel.
    """
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
    groups = linear.attributes.get_int("group", 1) if linear.op_type in CONVOLUTIONS else 1
    channels = weight.shape[axis] * (groups if linear.op_type == "ConvTranspose" else 1)
    return Weights(linear, weight, _bias(linear, channels), channels, groups)


def _bias(linear: ir.Node, channels: int) -> Floats | None:
    """Return the bias of a linear operator times beta, shape (channels,); None if it has no bias."""
    value = linear.inputs[2] if len(linear.inputs) > 2 else None
    if value is None:
        return None
    tensor = constant(value)
    if tensor is None:
        raise LeftAlone("bias-not-constant")
    beta = linear.attributes.get_float("beta", 1.0) if linear.op_type == "Gemm" else 1.0
    return per_channel(tensor.numpy(), 1, channels, "bias-not-per-channel") * beta


def per_channel(array: np.ndarray, last: int, channels: int, reason: str) -> Floats:
    """Return a constant that varies along one axis only as one value per channel.

    Args:
        array: The constant.
        last: The channel axis, counted from the end: 1 for the last axis.
        channels: The length of the channel axis.
        reason: The skip code if the constant varies along another axis.

    Raises:
        LeftAlone: The constant varies along another axis.
    """
    along = array.shape[-last] if array.ndim >= last else 1
    if array.size != along or along not in (1, channels):
        raise LeftAlone(reason)
    return np.broadcast_to(array.astype(np.float64).reshape(-1), (channels,))


def bias_behind(
    product: ir.Node, weights: ir.TensorProtocol, channel_axis: int, axes: int | None = None
) -> tuple[ir.Node, ir.Value] | None:
    """Return the Add of a bias that alone reads the result of a product, and the bias; None without one.

    Args:
        product: The product; its first output has the channels in the last axis.
        weights: The weights of the product.
        channel_axis: The axis of the output channels in the weights. The bias is a float32 constant with one element
            for each channel, in its last axis.
        axes: The most axes of the bias, which has at least one; None for any number.
    """
    result = product.outputs[0]
    add = sole_reader(result)
    if not is_standard(add, "Add"):
        return None
    bias = add.inputs[1 if add.inputs[0] is result else 0]
    tensor = constant(bias)
    if bias is None or tensor is None or tensor.dtype is not ir.DataType.FLOAT or not tensor.shape:
        return None
    if axes is not None and len(tensor.shape) > axes:
        return None
    return (add, bias) if tensor.size == weights.shape[channel_axis] == tensor.shape[-1] else None


def channel_place(linear: ir.Node, tensor: ir.Value | None) -> tuple[int, int]:
    """Return the rank of a tensor that a linear operator reads or writes, and its channel axis, counted from the end.

    The rank is 0 if it is not known; only a MatMul can have a tensor of unknown rank.
    """
    if linear.op_type in CONVOLUTIONS:
        weight = constant(linear.inputs[1])
        rank = 0 if weight is None else len(weight.shape)
        return rank, rank - 1
    if linear.op_type == "Gemm":
        return 2, 1
    return len(tensor.shape) if tensor is not None and tensor.shape is not None else 0, 1


def affine(node: ir.Node, value: ir.Value, channels: int, place: tuple[int, int], opset: int) -> tuple[Floats, Floats]:
    """Return scale and shift, both of shape (channels,), such that `node` computes ``value * scale + shift``.

    Args:
        node: One of `AFFINE`.
        value: The input that is scaled.
        channels: The number of channels of `value`.
        place: The rank of `value`, and its channel axis, counted from the end.
        opset: The version of the standard operators.

    Raises:
        LeftAlone: Its other inputs are not constant, or do not have one value per channel.
    """
    rank, last = place
    if node.op_type == "BatchNormalization":
        if _is_training(node, opset):
            raise LeftAlone("training-mode")
        if last != rank - 1:  # BatchNormalization scales axis 1
            raise LeftAlone("not-per-channel")
        return _normalization(node, channels)
    if "axis" in node.attributes or "broadcast" in node.attributes:  # before opset 7
        raise LeftAlone("not-per-channel")
    index = next(index for index, each in enumerate(node.inputs) if each is not value)
    tensor = constant(node.inputs[index])
    if tensor is None:
        raise LeftAlone("not-constant")
    array = tensor.numpy()
    if array.ndim > max(rank, 1):  # the result would have more dimensions than `value`
        raise LeftAlone("not-per-channel")
    values = per_channel(array, last, channels, "not-per-channel")
    ones, zeros = np.ones(channels), np.zeros(channels)
    with np.errstate(all="ignore"):
        if node.op_type == "Mul":
            return values, zeros
        if node.op_type == "Div":
            if index == 0:
                raise LeftAlone("divides-a-constant")
            return ones / values, zeros
        if node.op_type == "Sub":
            return (-ones, values) if index == 0 else (ones, -values)
    return ones, values


def _is_training(node: ir.Node, opset: int) -> bool:
    """Whether a BatchNormalization uses the statistics of the batch, or writes statistics that may be read."""
    if opset < 7:
        return node.attributes.get_int("is_test", 0) == 0
    return bool(node.attributes.get_int("training_mode", 0)) or any(value.name for value in node.outputs[1:])


def _normalization(node: ir.Node, channels: int) -> tuple[Floats, Floats]:
    """Return scale and shift of a BatchNormalization in inference mode (onnx's Operators.md, BatchNormalization)."""
    if node.attributes.get_int("spatial", 1) == 0:  # up to opset 8: one set of parameters per element
        raise LeftAlone("not-per-channel")
    gamma, beta, mean, variance = _moments(node, channels)
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    return scale, beta - mean * scale


def _moments(node: ir.Node, channels: int) -> tuple[Floats, ...]:
    """Return gamma, beta, mean and variance of a BatchNormalization, each of shape (channels,)."""
    tensors = [constant(value) for value in node.inputs[1:5]]
    arrays = [tensor.numpy().astype(np.float64) for tensor in tensors if tensor is not None]
    if len(arrays) != 4:
        raise LeftAlone("not-constant")
    return tuple(per_channel(array, 1, channels, "not-per-channel") for array in arrays)


def noise_before(norm: ir.Node, channels: int) -> float:
    """Return the noise behind a norm if the tensor in front of it is uint8, as a share of the variance behind it.

    The norm knows mean and variance of each channel. The range of the tensor is that of all channels, `DEVIATIONS`
    standard deviations around their means. A step s adds s^2 / 12 to a value, or the value's own square if it is less,
    because such a value is 0; the norm multiplies it by its factor.

    Raises:
        LeftAlone: A parameter is not constant or not one per channel.
    """
    _, _, mean, variance = _moments(norm, channels)
    factors, _ = _normalization(norm, channels)
    with np.errstate(all="ignore"):
        reach = DEVIATIONS * np.sqrt(variance)
        step = (np.max(mean + reach, initial=0) - np.min(mean - reach, initial=0)) / 255
        noise = np.minimum(step**2 / 12, variance + mean**2)
        return float(np.divide((factors**2 * noise).sum(), (factors**2 * variance).sum()))


Constants = tuple[np.ndarray | None, np.ndarray | None]
"""A new weight and a new bias; None for one that does not change."""


def scaled_outputs(weights: Weights, scale: Floats, shift: Floats) -> Constants:
    """Return constants with which the operator computes ``y * scale + shift`` instead of y, per output channel.

    Raises:
        LeftAlone: The constants are not finite, or the operator has no bias input for the shift.
    """
    with np.errstate(all="ignore"):
        weight = weights.split * weights.along(scale, outputs=True)
        bias = shift if weights.bias is None else weights.bias * scale + shift
    return _stored(weights, None if (scale == 1).all() else weight, bias)


def scaled_inputs(weights: Weights, scale: Floats, shift: Floats) -> Constants:
    """Return constants with which the operator computes from x what it now computes from ``x * scale + shift``.

    Raises:
        LeftAlone: The constants are not finite, the operator has no bias input for the shift, or it pads with zeros,
            which would need the shift too.
    """
    node = weights.node
    if shift.any() and node.op_type in CONVOLUTIONS and (node.op_type == "ConvTranspose" or has_pads(node)):
        raise LeftAlone("padding")
    with np.errstate(all="ignore"):
        split = weights.split
        moved = split * weights.along(shift, outputs=False)
        others = tuple(axis for axis in range(1, moved.ndim) if axis != weights.axis(outputs=True))
        total = moved.sum(axis=others).reshape(-1)
        bias = total * (node.attributes.get_float("alpha", 1.0) if node.op_type == "Gemm" else 1.0)
        bias = bias if weights.bias is None else weights.bias + bias
    return _stored(weights, None if (scale == 1).all() else split * weights.along(scale, outputs=False), bias)


def has_pads(conv: ir.Node) -> bool:
    """Whether a Conv or a pooling pads."""
    explicit = conv.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return not explicit or any(conv.attributes.get_ints("pads", ()))


def _stored(weights: Weights, weight: Floats | None, bias: Floats) -> Constants:
    """Return the constants in the type of the weight, and the weight in its stored shape."""
    kind = weights.weight.dtype
    with np.errstate(all="ignore"):
        stored = None if weight is None else weight.reshape(weights.weight.shape).astype(kind)
        added = bias.astype(kind)
    if not all(np.isfinite(array.astype(np.float64)).all() for array in (stored, added) if array is not None):
        raise LeftAlone("not-finite")
    if weights.bias is None and not bias.any():
        return stored, None
    if weights.node.op_type == "MatMul":
        raise LeftAlone("no-bias-input")
    return stored, added


def set_constants(taken: set[str], linear: ir.Node, constants: Constants) -> None:
    """Set the weight and the bias of a linear operator; None keeps the old one. New names are added to `taken`."""
    value = linear.inputs[1]
    stem = linear.name or (value.name if value is not None else None) or linear.op_type
    weight, bias = constants
    if weight is not None:
        set_constant(taken, linear, 1, weight, f"{stem}_weight")
    if bias is not None:
        set_constant(taken, linear, 2, bias, f"{stem}_bias")
        linear.attributes.pop("beta", None)


def set_constant(taken: set[str], node: ir.Node, index: int, array: np.ndarray, stem: str) -> None:
    """Set input `index` of `node` to a new constant, under the old name if nothing else reads the old constant."""
    graph = graph_of(node)
    old = node.inputs[index] if index < len(node.inputs) else None
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, None)
    free = old is not None and old.is_initializer() and not old.uses() and old.graph is graph
    name = old.name if old is not None and free and not old.is_graph_output() else None
    discard(old)
    node.replace_input_with(index, add_initializer(graph, name or unused_name(taken, stem), array))


def distinct(nodes: Sequence[ir.Node]) -> bool:
    """Whether no node occurs twice."""
    return len({id(node) for node in nodes}) == len(nodes)

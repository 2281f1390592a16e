"""Which channels of tensors are constant, which belong together, and which nothing needs.

Tensors have their channels in axis 1. A channel gets a number where a linear operator computes it, and keeps the number
in functions of one element, poolings, depthwise convolutions and a Concat. Where two tensors are added or multiplied,
their channels become one class: they can only be removed together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..graphs.evaluation import evaluated
from ..graphs.inference import stand_ins
from ..graphs.queries import Shape, constant, integers_of, is_float32, plain_shape
from ..patterns.elementwise import ELEMENTWISE
from ..patterns.linear import LINEAR, Floats, Weights, has_pads, weights_of
from ..registry import LeftAlone
from .channel_numbers import Classes, Numbers

Mask: TypeAlias = npt.NDArray[np.bool_]
Matrices: TypeAlias = dict[ir.Node, Mask]
"""By linear operator, for each output channel and each input channel whether any weight is not 0."""


def used_weights(model: ir.Model) -> Matrices:
    """Return which weights of the linear operators of the main graph are not 0.

    Left out: weights that are not constant or not float32, convolutions in groups that are not depthwise, and products
    with tensors that have more than two axes.
    """
    found = {}
    for node in model.graph:
        if node.domain or node.op_type not in LINEAR or _reads_tokens(node):
            continue
        try:
            weights = weights_of(node)
        except LeftAlone:
            continue
        depthwise = is_depthwise(weights)
        if weights.weight.dtype == np.float32 and (weights.groups == 1 or depthwise) and not _turned(node):
            found[node] = (by_channels(weights) != 0).any(axis=2)
    return found


def is_depthwise(weights: Weights) -> bool:
    """Whether each output channel of a convolution reads the input channel of the same number."""
    return weights.node.op_type == "Conv" and weights.groups == weights.channels == weights.inputs > 1


def by_channels(weights: Weights) -> np.ndarray:
    """Return weights in the order output channel, input channel of the group, place in the kernel."""
    array = weights.weight
    if weights.node.op_type != "Conv" and not weights.transposed:
        array = array.swapaxes(0, 1)
    return array.reshape(*array.shape[:2], -1)


def _reads_tokens(node: ir.Node) -> bool:
    """Whether a MatMul is known to read a tensor with more axes than one for items and one for channels."""
    shape = plain_shape(node.inputs[0])
    return node.op_type == "MatMul" and shape is not None and len(shape) != 2


def _turned(node: ir.Node) -> bool:
    """Whether a Gemm reads its first input transposed."""
    return node.op_type == "Gemm" and node.attributes.get_int("transA", 0) != 0


class ChannelFlow:
    """The channels of the tensors of a graph.

    Attributes:
        numbers: By tensor, the numbers of its channels; tensors without an entry cannot lose channels.
        fixed: By tensor, the value that a channel has in all places, and NaN for other channels, float32.
        classes: Channels that can only be removed together.
        reads: The linear operators that read such a tensor, each with the channels that it needs.
    """

    def __init__(self, model: ir.Model, used: Matrices) -> None:
        """Follow the channels through the main graph.

        Args:
            model: The model.
            used: The result of `used_weights`.
        """
        self.used, self.opsets = used, dict(model.opset_imports)
        self._inferred = stand_ins(model)
        self.numbers: dict[ir.Value, Numbers] = {}
        self.fixed: dict[ir.Value, np.ndarray] = {}
        self.classes = Classes()
        self.reads: list[tuple[ir.Value, Mask]] = []
        for node in model.graph:
            rule = RULES.get(node.op_type) if not node.domain else None
            if rule is None or len([value for value in node.outputs if value.name]) > 1 or not rule(self, node):
                self._pin(node)
        for value, numbers in self.numbers.items():
            if value.is_graph_output() or any(use.node.graph is not model.graph for use in value.uses()):
                self.classes.pin(numbers)

    def _pin(self, node: ir.Node) -> None:
        """Keep all channels that a node reads."""
        for value in node.inputs:
            if value in self.numbers:
                self.classes.pin(self.numbers[value])

    def shape(self, value: ir.Value | None) -> Shape:
        """Return the lengths of the axes of a tensor; without axes if they are not known."""
        found = None if value is None else self._inferred.get(value, value)
        return plain_shape(found) or ()

    def is_float32(self, value: ir.Value) -> bool:
        """Return whether a tensor is known to be float32."""
        return is_float32(self._inferred.get(value, value))

    def set(self, value: ir.Value, numbers: Numbers, fixed: np.ndarray) -> bool:
        """Store numbers and constant values of the channels of a tensor; return True."""
        self.numbers[value], self.fixed[value] = numbers, fixed.astype(np.float32)
        return True

    def removable(self) -> Mask:
        """Return for each class whether no operator needs its channels."""
        needed = self.classes.pinned()
        for value, mask in self.reads:
            needed[self.classes.of(self.numbers[value])[mask]] = True
        return ~needed


def takes_constant(node: ir.Node) -> bool:
    """Whether a linear operator reads a channel of one value as a summand of its bias: it pads no zeros."""
    return node.op_type == "Gemm" or (node.op_type == "Conv" and not has_pads(node))


def _linear(flow: ChannelFlow, node: ir.Node) -> bool:
    """Follow a linear operator: the output channels are new."""
    used, source = flow.used.get(node), node.inputs[0]
    if used is None or source is None:
        return False
    weights = weights_of(node)
    numbers = flow.numbers.get(source)
    if is_depthwise(weights):
        return numbers is not None and _depthwise(flow, weights, source)
    known = np.zeros(used.shape[1], bool)
    if numbers is not None:
        if len(numbers) != used.shape[1]:
            return False
        known = _known(flow, node, source)
        flow.reads.append((source, used.any(axis=0) & ~known))
    steady = ~used[:, ~known].any(axis=1)
    result = np.full(len(used), np.nan)
    if steady.any():
        inputs = np.where(known, flow.fixed[source], 0) if numbers is not None else np.zeros(len(known))
        result[steady] = summands(weights, inputs)[steady]
    if node.op_type == "MatMul" and len(flow.shape(source)) != 2:
        return False
    return flow.set(node.outputs[0], flow.classes.new(len(used)), result)


def _known(flow: ChannelFlow, node: ir.Node, source: ir.Value) -> Mask:
    """Return which channels of a tensor give a linear operator the same summand in all places."""
    fixed = flow.fixed[source]
    return np.asarray(np.isfinite(fixed) if takes_constant(node) else fixed == 0)


def summands(weights: Weights, inputs: np.ndarray) -> Floats:
    """Return the bias of a linear operator, plus what channels of one value add, one number for each output channel.

    Args:
        weights: The operator. It is no depthwise convolution.
        inputs: The value of each input channel, 0 for channels that are no constants.
    """
    bias = np.zeros(weights.channels) if weights.bias is None else weights.bias
    if not inputs.any():
        return bias
    chosen = np.flatnonzero(inputs)
    alpha = weights.node.attributes.get_float("alpha", 1.0) if weights.node.op_type == "Gemm" else 1.0
    kernel: Floats = by_channels(weights)[:, chosen].sum(axis=2, dtype=np.float64)
    return bias + alpha * (kernel @ inputs[chosen].astype(np.float64))


def _depthwise(flow: ChannelFlow, weights: Weights, source: ir.Value) -> bool:
    """Follow a depthwise convolution: it keeps the channels, and their constants where it pads nothing."""
    node, numbers = weights.node, flow.numbers[source]
    if len(numbers) != weights.channels:
        return False
    zero, known = ~flow.used[node][:, 0], _known(flow, node, source)
    bias = np.zeros(weights.channels) if weights.bias is None else weights.bias
    inputs = np.where(known, flow.fixed[source], 0)
    values = bias + inputs * by_channels(weights)[:, 0].sum(axis=1, dtype=np.float64)
    return flow.set(node.outputs[0], numbers, np.where(zero, bias, np.where(known, values, np.nan)))


def _elementwise(flow: ChannelFlow, node: ir.Node) -> bool:
    """Follow a function of one element, of one tensor or of several with the same channels."""
    computed = [value for value in node.inputs if value is not None and constant(value) is None]
    if not computed or any(value not in flow.numbers for value in computed) or "broadcast" in node.attributes:
        return False
    numbers, rank = flow.numbers[computed[0]], len(flow.shape(computed[0]))
    if rank < 2 or any(len(flow.shape(value)) != rank or not flow.is_float32(value) for value in computed):
        return False
    count = len(numbers)
    if any(len(flow.numbers[value]) != count for value in computed):
        return False
    constants = [constant(value) for value in node.inputs if value is not None and value not in flow.numbers]
    if any(each is None or not _fits(each.shape.numpy(), rank, count) for each in constants):
        return False
    for value in computed[1:]:
        flow.classes.join(numbers, flow.numbers[value])
    return flow.set(node.outputs[0], numbers, _function(flow, node, rank, count))


def _fits(shape: Sequence[int], rank: int, count: int) -> bool:
    """Whether a constant has one value for each channel, or the same for all of them."""
    return len(shape) <= rank and channel_length(shape, rank) in (1, count)


def channel_length(shape: Sequence[int], rank: int) -> int:
    """Return the length of the channel axis of a constant that is read beside a tensor of this rank; 1 without one."""
    return shape[1 - rank] if len(shape) >= rank - 1 else 1


def _function(flow: ChannelFlow, node: ir.Node, rank: int, count: int) -> np.ndarray:
    """Return the constant channels of the result of a function of one element."""
    columns, feeds = [], {}
    for value in node.inputs:
        if value is None or not value.name:
            continue
        column = flow.fixed.get(value)
        if column is None:
            tensor = constant(value)
            assert tensor is not None
            array = tensor.numpy()
            feeds[value.name] = tensor
            same = array.size == channel_length(array.shape, rank)
            column = np.broadcast_to(array.reshape(-1), (count,)) if same else np.full(count, np.nan)
        else:
            plain = np.nan_to_num(column, nan=0.0).reshape(1, count, *[1] * (rank - 2))
            feeds[value.name] = ir.Tensor(plain)
        columns.append(column)
    steady = np.logical_and.reduce([np.isfinite(column) for column in columns])
    if node.op_type == "Mul":
        steady |= np.logical_or.reduce([column == 0 for column in columns])
    result = np.full(count, np.nan, np.float32)
    if not steady.any():
        return result
    try:
        (found,) = evaluated([node], feeds, [str(node.outputs[0].name)], flow.opsets)
    except LeftAlone:
        return result
    values = np.asarray(found, np.float32)
    if values.size == count:
        result[steady] = values.reshape(-1)[steady]
    return result


def _pass(flow: ChannelFlow, node: ir.Node) -> bool:
    """Follow an operator whose result has the channels of its input, with values of the input."""
    source = node.inputs[0]
    if source is None or source not in flow.numbers:
        return False
    return flow.set(node.outputs[0], flow.numbers[source], flow.fixed[source])


def _mean(flow: ChannelFlow, node: ir.Node) -> bool:
    """Follow an AveragePool, which may count the zeros that it pads."""
    if not _pass(flow, node):
        return False
    if node.attributes.get_int("count_include_pad", 0) and has_pads(node):
        fixed = flow.fixed[node.outputs[0]]
        fixed[fixed != 0] = np.nan
    return True


def _resize(flow: ChannelFlow, node: ir.Node) -> bool:
    """Follow a Resize by constant scales; sizes hold the number of channels."""
    sizes = node.inputs[3] if len(node.inputs) > 3 else None
    scales = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    mode = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    if sizes is not None or scales is None or "axes" in node.attributes or mode == "tf_crop_and_resize":
        return False
    return scales.size > 1 and bool(scales.numpy()[1] == 1) and _pass(flow, node)


def _flatten(flow: ChannelFlow, node: ir.Node) -> bool:
    """Follow a Flatten, Reshape or Squeeze of (N, C, 1, ...) to (N, C), which does not name the number of channels."""
    shape, after = flow.shape(node.inputs[0]), flow.shape(node.outputs[0])
    if len(shape) < 2 or len(after) != 2 or any(length != 1 for length in shape[2:]):
        return False
    if shape[1] != after[1] or not isinstance(shape[1], int):
        return False
    if node.op_type == "Reshape" and (integers_of(node.inputs[1]) or [0])[-1] != -1:
        return False
    return _pass(flow, node)


def _concat(flow: ChannelFlow, node: ir.Node) -> bool:
    """Follow a Concat of channels: the numbers stand behind each other."""
    rank = len(flow.shape(node.outputs[0]))
    if rank < 2 or node.attributes.get_int("axis", 0) % rank != 1:
        return False
    numbers, fixed = [], []
    for value in node.inputs:
        count = next(iter(flow.shape(value)[1:2]), None)
        if value is None or not isinstance(count, int):
            return False
        if value not in flow.numbers:  # an input or a constant: all of its channels stay
            added = flow.classes.new(count)
            flow.classes.pin(added)
            numbers.append(added)
            fixed.append(np.full(count, np.nan, np.float32))
        else:
            numbers.append(flow.numbers[value])
            fixed.append(flow.fixed[value])
    return flow.set(node.outputs[0], np.concatenate(numbers), np.concatenate(fixed))


RULES: Mapping[str, Callable[[ChannelFlow, ir.Node], bool]] = {
    **dict.fromkeys(sorted(LINEAR), _linear),
    **dict.fromkeys([*sorted(ELEMENTWISE), "PRelu"], _elementwise),
    **dict.fromkeys(("Dropout", "GlobalAveragePool", "GlobalMaxPool", "Identity", "MaxPool"), _pass),
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze"), _flatten),
    "AveragePool": _mean,
    "Concat": _concat,
    "Resize": _resize,
}
"""By operator, a function that follows the channels; it returns False where they must stay."""

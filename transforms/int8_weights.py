"""int8 weights and int32 biases for the operators that multiply by constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from .bias_correction import mean_shift
from .graph import add_initializer, constant, drop_unused, release, sole_reader
from .ops import OPS, Op
from .plan import Unit
from .qparams import Array, QParams, fit_bias, quantize, quantize_bias
from .saturation import relieve
from .writer import Writer

WeightParams = Callable[[Array, "int | None"], QParams]


@dataclass(frozen=True, slots=True, eq=False)
class Adjustment:
    """What was found for the weights of a unit on data.

    Attributes:
        shift: What its bias is raised by, float32 (M,); None where that is left to `bias_correction.mean_shift`.
        stored: Its weights as integers, in the node's layout; None for the nearest ones.
        least: The least scale that the weights of each output channel have, float32 (M,); None for the finest.
    """

    shift: Array | None = None
    stored: Array | None = None
    least: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FloatWeights:
    """The weights of a unit before they become integers.

    Attributes:
        array: The weights, in the node's layout.
        params: The parameters that they will have.
        bias: The bias, (M,); None where there is none.
    """

    array: Array
    params: QParams
    bias: Array | None


@dataclass(frozen=True)
class WeightWriter:
    """How weights become integers.

    Attributes:
        writer: Where they are written.
        params: Scale and zero point of an array, along an axis or as a whole.
        means: Mean per channel of tensors that integer units read, for bias correction.
        adjusted: By unit, what takes the place of the nearest integers and of the correction by `means`.
        exact: Whether the target adds products in 32 bits; if not, channels that can saturate 16 bits lose range.
        relieved: Filled with the number of such channels by unit.
        shifted: Units whose int8 weights have the zero point -1.
    """

    writer: Writer
    params: WeightParams
    means: Mapping[str, Array] = field(default_factory=dict)
    adjusted: Mapping[str, Adjustment] = field(default_factory=dict)
    exact: bool = True
    relieved: dict[str, int] = field(default_factory=dict)
    shifted: frozenset[str] = frozenset()

    def static(self, node: ir.Node, unit: Unit, input_scale: float) -> int:
        """Give the node of a unit with uint8 inputs integer weights and an int32 bias; return how many changed."""
        found = self.weights(node, unit, input_scale)
        array, params, bias = found.array, found.params, found.bias
        adjusted = self.adjusted.get(unit.name, Adjustment())
        stored = quantize(array, params) if adjusted.stored is None else adjusted.stored
        written = _shifted(stored, params) if unit.name in self.shifted else (stored, params)
        self.writer.replace_constant(node, 1, *written, own=adjusted.stored is not None)
        shift = adjusted.shift
        mean = self.means.get(unit.inputs[0])
        if OPS[unit.op].bias is None:
            return 1
        if shift is None and mean is not None:
            shift = mean_shift(node, _rounding_error(array, stored, params), mean)
        if shift is not None:
            bias = shift if bias is None else bias + shift
        if bias is None:
            return 1
        bias_params = quantize_bias(bias, input_scale, params.scale)
        self.writer.replace_constant(node, 2, quantize(bias, bias_params), bias_params)
        return 2

    def weights(self, node: ir.Node, unit: Unit, input_scale: float) -> FloatWeights:
        """Return the weights of a unit with uint8 inputs, and the parameters that they will have.

        A stack of matrices gets one scale: the kernels want a single one there.
        """
        array = self.array(node, 1)
        axis = None if unit.op == "MatMul" and array.ndim > 2 else OPS[unit.op].channel_axis(node) % array.ndim
        bias = _bias(node, OPS[unit.op])
        params = self.params(array, axis)
        if bias is not None:
            params = fit_bias(params, bias, input_scale)
        if (least := self.adjusted.get(unit.name, Adjustment()).least) is not None:
            params = replace(params, scale=np.maximum(params.scale, least))
        params = self.within(unit, array, params, OPS[unit.op].channel_axis(node), _group(node))
        return FloatWeights(array, params, bias)

    def within(self, unit: Unit, array: Array, params: QParams, channel_axis: int, group: int = 1) -> QParams:
        """Return parameters with which no pair of products leaves 16 bits, where the target adds in 16 bits."""
        if self.exact:
            return params
        lower = relieve(params, array, channel_axis, group=group)
        changed = int(np.count_nonzero(lower.scale != params.scale))
        if changed:
            self.relieved[unit.name] = changed
        return lower

    def array(self, node: ir.Node, index: int) -> Array:
        """Return the float weights of a node."""
        tensor = constant(node.inputs[index])
        assert tensor is not None  # the planner leaves computed weights in float
        array = tensor.numpy()
        release(tensor)  # the array keeps the pages of a file mapped; nothing does when it is gone
        return array


def _shifted(stored: Array, params: QParams) -> tuple[Array, QParams]:
    """Return the same weights as integers one lower, about the zero point -1: those from -127 to 127 still fit."""
    return stored - np.int8(1), replace(params, zero_point=params.zero_point - np.int8(1))


def _rounding_error(array: Array, stored: Array, params: QParams) -> Array:
    """Return ``array - dequantize(stored)`` with one copy of the array in memory, float32."""
    shape = [1] * array.ndim if params.axis is None else [-1 if i == params.axis else 1 for i in range(array.ndim)]
    error = stored.astype(np.float32)
    if params.zero_point.any():
        error -= params.zero_point.reshape(shape)
    error *= params.scale.reshape(shape)
    return np.subtract(array, error, out=error)


def _group(node: ir.Node) -> int:
    """Return the groups of a convolution."""
    return node.attributes.get_int("group", 1) if node.op_type == "Conv" else 1


def _bias(node: ir.Node, row: Op) -> Array | None:
    """Return a constant bias as a vector (M,), None where there is none."""
    if row.bias is None or len(node.inputs) <= row.bias or node.inputs[row.bias] is None:
        return None
    tensor = constant(node.inputs[row.bias])
    assert tensor is not None  # the planner leaves a unit with a computed bias in float
    return tensor.numpy().reshape(-1)


def bias_behind(node: ir.Node) -> tuple[ir.Node, int] | None:
    """Return the Add that gives the result of a MatMul its bias, and which of its inputs that is; None without one."""
    add = sole_reader(node.outputs[0])
    if add is None or add.op_type != "Add" or add.domain:
        return None
    index = 1 if add.inputs[0] is node.outputs[0] else 0
    tensor, weight = constant(add.inputs[index]), constant(node.inputs[1])
    if tensor is None or weight is None or tensor.dtype is not ir.DataType.FLOAT or not tensor.shape:
        return None
    columns = weight.shape[-1]
    return (add, index) if tensor.size == columns == tensor.shape[-1] else None


def shift_behind(node: ir.Node, shift: Array) -> None:
    """Raise the bias behind a MatMul.

    Args:
        node: The MatMul; `bias_behind` finds the bias.
        shift: By how much, float32 (N,).
    """
    found = bias_behind(node)
    assert found is not None  # only biases that are there are corrected
    add, index = found
    tensor = constant(add.inputs[index])
    assert tensor is not None and isinstance(add.graph, ir.Graph)
    array = tensor.numpy()
    name = f"{add.inputs[index].name}/{node.name}/corrected"  # type: ignore[union-attr]
    corrected = add_initializer(add.graph, name, array + shift.astype(np.float32).reshape(array.shape))
    old = add.inputs[index]
    add.replace_input_with(index, corrected)
    if old is not None and isinstance(old.graph, ir.Graph):
        drop_unused(old.graph, (old,))

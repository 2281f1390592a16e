"""int8 weights and int32 biases for the operators that multiply by constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from .bias_correction import mean_shift
from .graph import constant, release
from .ops import OPS, Op
from .plan import Unit
from .qparams import Array, QParams, fit_bias, quantize, quantize_bias
from .saturation import relieve
from .writer import Writer

WeightParams = Callable[[Array, "int | None"], QParams]


@dataclass(frozen=True)
class WeightWriter:
    """How weights become integers.

    Attributes:
        writer: Where they are written.
        params: Scale and zero point of an array, along an axis or as a whole.
        means: Mean per channel of tensors that integer units read, for bias correction.
        exact: Whether the target adds products in 32 bits; if not, channels that can saturate 16 bits lose range.
        relieved: Filled with the number of such channels by unit.
    """

    writer: Writer
    params: WeightParams
    means: Mapping[str, Array] = field(default_factory=dict)
    exact: bool = True
    relieved: dict[str, int] = field(default_factory=dict)

    def static(self, node: ir.Node, unit: Unit, input_scale: float) -> int:
        """Give the node of a unit with uint8 inputs integer weights and an int32 bias; return how many changed.

        A stack of matrices gets one scale: the kernels want a single one there.
        """
        array = self.array(node, 1)
        axis = None if unit.op == "MatMul" and array.ndim > 2 else OPS[unit.op].channel_axis(node) % array.ndim
        bias = _bias(node, OPS[unit.op])
        params = self.params(array, axis)
        if bias is not None:
            params = fit_bias(params, bias, input_scale)
        params = self.within(unit, array, params, OPS[unit.op].channel_axis(node), _group(node))
        stored = quantize(array, params)
        self.writer.replace_constant(node, 1, stored, params)
        mean = self.means.get(unit.inputs[0])
        if mean is not None and OPS[unit.op].bias is not None:
            shift = mean_shift(node, _rounding_error(array, stored, params), mean)
            bias = bias if shift is None else shift if bias is None else bias + shift
        if bias is None:
            return 1
        bias_params = quantize_bias(bias, input_scale, params.scale)
        self.writer.replace_constant(node, 2, quantize(bias, bias_params), bias_params)
        return 2

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

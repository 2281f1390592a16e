"""int8 weights and int32 biases for the operators that multiply by constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ..graphs.queries import constant, graph_of, release
from ..graphs.rewriter import add_initializer, discard
from ..patterns.linear import bias_behind
from .bias_correction import mean_shift
from .block_weights import Blocked, in_blocks
from .ops import OPS, Op
from .plan import Unit
from .qparams import Array, BlockForm, QParams, along_axis, fit_bias, quantize, quantize_bias
from .saturation import even_channels, prevent_saturation
from .writer import Writer

WeightParams = Callable[[Array, "int | None"], QParams]


@dataclass(frozen=True, slots=True, eq=False)
class Adjustment:
    """Weights and bias correction of a unit, computed from data.

    Attributes:
        shift: The number to add to the bias, float32 (M,); None to use `bias_correction.mean_shift`.
        stored: The integer weights in the node's layout; None to round to nearest.
        least: The minimum weight scale of each output channel, float32 (M,); None for no minimum.
        blocked: The weights of a unit with weights in blocks; None for the least error of the weights.
    """

    shift: Array | None = None
    stored: Array | None = None
    least: Array | None = None
    blocked: Blocked | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FloatWeights:
    """The weights of a unit before they become integers.

    Attributes:
        array: The weights, in the node's layout.
        params: Scale and zero point of the integers.
        bias: The bias, (M,); None without one.
    """

    array: Array
    params: QParams
    bias: Array | None


@dataclass(frozen=True)
class WeightWriter:
    """Replaces float weights by integers.

    Attributes:
        writer: Writes names and constants.
        params: Returns scale and zero point of an array, along an axis or (None) for the whole array.
        means: Mean per channel of the tensors that integer units read, for bias correction.
        adjusted: By unit, weights and corrections that override rounding to nearest and `means`.
        exact: Whether the target adds products in 32 bits. If not, channels that can saturate 16 bits lose range.
        portable: Whether the target may be another runtime, whose convolutions add other pairs.
        relieved: By unit, the number of channels that lost range; filled by `without_saturation`.
        shifted: Units whose int8 weights have the zero point -1.
        blocks: The form of weights in blocks.
    """

    writer: Writer
    params: WeightParams
    means: Mapping[str, Array] = field(default_factory=dict)
    adjusted: Mapping[str, Adjustment] = field(default_factory=dict)
    exact: bool = True
    relieved: dict[str, int] = field(default_factory=dict)
    shifted: frozenset[str] = frozenset()
    blocks: BlockForm = field(default_factory=BlockForm)
    portable: bool = False

    def static(self, node: ir.Node, unit: Unit, input_scale: float) -> int:
        """Store weights as int8 and the bias as int32, for a unit with uint8 inputs; return the number of constants."""
        weights = self.weights(node, unit, input_scale)
        array, params, bias = weights.array, weights.params, weights.bias
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
        """Return the weights of a unit with uint8 inputs, with the scale and zero point of their integers.

        A stack of matrices gets one scale, because the kernels accept only one.
        """
        array = self.array(node, 1)
        axis = None if unit.op == "MatMul" and array.ndim > 2 else OPS[unit.op].channel_axis(node) % array.ndim
        bias = _bias(node, OPS[unit.op])
        params = self.params(array, axis)
        if bias is not None:
            params = fit_bias(params, bias, input_scale)
        if (least := self.adjusted.get(unit.name, Adjustment()).least) is not None:
            params = replace(params, scale=np.maximum(params.scale, least))
        params = self.without_saturation(unit, array, params, OPS[unit.op].channel_axis(node), groups_of(node))
        return FloatWeights(array, params, bias)

    def blocked(self, node: ir.Node, unit: Unit) -> Blocked:
        """Return the weights of a matrix product, or the rows that a Gather selects, in blocks: rows (N, K)."""
        found = self.adjusted.get(unit.name, Adjustment()).blocked
        if found is not None:
            return found
        if unit.op == "Gather":
            return in_blocks(self.array(node, 0), self.blocks)
        return in_blocks(turned(node, self.array(node, 1)), self.blocks)

    def bias_row(self, node: ir.Node) -> ir.Value | None:
        """Return the bias of a Gemm as a vector (N,); None without a bias."""
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is None:
            return None
        tensor = constant(bias)
        assert tensor is not None  # the planner leaves a computed bias in float
        if len(tensor.shape) == 1:
            return bias
        return self.writer.initializer(graph_of(node), f"{bias.name}/row", tensor.numpy().reshape(-1))

    def store(self, node: ir.Node, index: int, array: Array, params: QParams) -> list[ir.Value]:
        """Return initializers in the graph of `node`: integers for input `index`, their scale and their zero point."""
        graph, source = graph_of(node), node.inputs[index]
        assert source is not None  # required by the operator
        parts = ((str(array.dtype), array), ("scale", params.scale), ("zero_point", params.zero_point))
        transposed = node.attributes.get_int("transB", 0)
        key = (source, "stored", transposed, array.shape, params.scale.tobytes())
        return [self.writer.shared((key, part), graph, f"{source.name}/{part}", values) for part, values in parts]

    def without_saturation(
        self, unit: Unit, array: Array, params: QParams, channel_axis: int, group: int = 1
    ) -> QParams:
        """Return parameters with which no sum of two products exceeds 16 bits; unchanged if the target adds exactly."""
        if self.exact or OPS[unit.op].native_u8:  # native operators add in 32 bits
            return params
        lower = prevent_saturation(params, array, channel_axis, group=group)
        if self.portable and unit.op == "Conv":
            lower = prevent_saturation(lower, even_channels(array), channel_axis, group=group)
        changed = int(np.count_nonzero(lower.scale != params.scale))
        if changed:
            self.relieved[unit.name] = self.relieved.get(unit.name, 0) + changed  # an LSTM has two matrices
        return lower

    def array(self, node: ir.Node, index: int) -> Array:
        """Return the float weights of a node."""
        tensor = constant(node.inputs[index])
        assert tensor is not None  # the planner leaves computed weights in float
        array = tensor.numpy()
        release(tensor)  # the array keeps the file mapped until the array is deleted
        return array


def turned(node: ir.Node, array: Array) -> Array:
    """Return the weights of a matrix product as rows (N, K); and rows (N, K) as the weights of the node."""
    return array if node.attributes.get_int("transB", 0) else np.ascontiguousarray(array.T)


def _shifted(stored: Array, params: QParams) -> tuple[Array, QParams]:
    """Return equal weights with integers lower by 1 and the zero point -1; integers from -127 to 127 stay in int8."""
    return stored - np.int8(1), replace(params, zero_point=params.zero_point - np.int8(1))


def _rounding_error(array: Array, stored: Array, params: QParams) -> Array:
    """Return ``array - dequantize(stored)``, float32; only one copy of the array is made, to save memory."""
    error = stored.astype(np.float32)
    if params.zero_point.any():
        error -= along_axis(params.zero_point, params, array.ndim)
    error *= along_axis(params.scale, params, array.ndim)
    return np.subtract(array, error, out=error)


def groups_of(node: ir.Node) -> int:
    """Return the number of groups of a convolution; 1 for other operators."""
    return node.attributes.get_int("group", 1) if node.op_type == "Conv" else 1


def _bias(node: ir.Node, row: Op) -> Array | None:
    """Return a constant bias as a vector (M,), None without a bias."""
    if row.bias is None or len(node.inputs) <= row.bias or node.inputs[row.bias] is None:
        return None
    tensor = constant(node.inputs[row.bias])
    assert tensor is not None  # the planner leaves a unit with a computed bias in float
    return tensor.numpy().reshape(-1)


def bias_of_product(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """Return the Add of the bias behind a MatMul with constant weights, and the bias; None without one."""
    weight = constant(node.inputs[1])
    return None if weight is None else bias_behind(node, weight, -1)


def shift_behind(node: ir.Node, shift: Array) -> None:
    """Add a vector to the bias behind a MatMul.

    Args:
        node: The MatMul; `bias_of_product` must find a bias.
        shift: The vector, float32 (N,).
    """
    place = bias_of_product(node)
    assert place is not None  # a MatMul without a bias is not corrected
    add, bias = place
    tensor = constant(bias)
    assert tensor is not None and isinstance(add.graph, ir.Graph)
    array = tensor.numpy()
    name = f"{bias.name}/{node.name}/corrected"
    corrected = add_initializer(add.graph, name, array + shift.astype(np.float32).reshape(array.shape))
    add.replace_input_with(add.inputs.index(bias), corrected)
    discard(bias)

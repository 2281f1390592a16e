"""The arithmetic of linear quantization: ranges to scales and zero points, arrays to integers and back.

``q = saturate(round_half_even(x / scale) + zero_point)`` and ``x = (q - zero_point) * scale``, as defined by the
ONNX operators QuantizeLinear and DequantizeLinear (https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

INT32_MAX = 2**31 - 1
FLOAT_MAX = float(np.finfo(np.float32).max)
# float32 cannot divide by a scale below its least normal number; such a tensor is constant for our purposes.
TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True, kw_only=True)
class QParams:
    """Scale and zero point of a tensor, per tensor or per channel.

    Attributes:
        scale: float32, shape () or (C,); positive.
        zero_point: uint8, int8 or int32, of the same shape; its dtype is the dtype of the quantized tensor.
        axis: The channel axis where the shape is (C,), else None.
    """

    scale: Array
    zero_point: Array
    axis: int | None = None

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest real value that a per-tensor quantized tensor can hold."""
        info = np.iinfo(self.zero_point.dtype)
        scale, zero = float(self.scale), int(self.zero_point)
        return (info.min - zero) * scale, (info.max - zero) * scale


def asymmetric_u8(lo: float, hi: float) -> QParams:
    """Return the uint8 scale and zero point of a range, widened so that zero is exactly representable.

    The arithmetic is float32 throughout and is the same, operation by operation, as in the graph that
    `quantize_nodes` emits, so that a frozen range gives the scale that the dynamic graph computed.

    >>> q = asymmetric_u8(0.0, 6.0)
    >>> float(q.scale * 255), int(q.zero_point)
    (6.0, 0)
    """
    low, high = np.float32(min(lo, 0.0)), np.float32(max(hi, 0.0))
    step = np.float32(high / np.float32(255.0) - low / np.float32(255.0))  # high - low may overflow
    scale = np.float32(1.0) if step < np.float32(TINY) else step
    zero = np.clip(np.rint(-low / scale), 0, 255).astype(np.uint8)
    return QParams(scale=np.asarray(scale), zero_point=np.asarray(zero))


def symmetric_s8(weights: Array, axis: int | None) -> QParams:
    """Return int8 scales with zero point 0, per slice along `axis` or (None) for the whole array.

    The range is ±127, not -128: a symmetric grid has no bias, and a product with a uint8 cannot saturate a VNNI
    accumulator either way. An all-zero slice has scale 1.
    """
    magnitude = np.abs(np.asarray(weights, dtype=np.float32))
    if axis is None:
        peak = magnitude.max(initial=0.0)
    else:
        peak = magnitude.max(axis=tuple(i for i in range(weights.ndim) if i != axis % weights.ndim), initial=0.0)
    step = np.asarray(peak / np.float32(127), np.float32)
    scale = np.where(step < np.float32(TINY), np.float32(1), step).astype(np.float32)
    return QParams(scale=scale, zero_point=np.zeros_like(scale, dtype=np.int8), axis=axis)


def fit_bias(weight: QParams, bias: Array, input_scale: float) -> QParams:
    """Raise weight scales where ``bias / (input_scale * scale)`` would not fit an int32.

    A channel of tiny weights has a tiny scale, and its bias in units of that scale may overflow (ONNX Runtime
    lost half a model's accuracy this way before its 1.18). A coarser grid costs such a channel nothing: its weights
    are negligible beside its bias. Half of the int32 range is left to the accumulated products. Nor does the bias's
    own scale, ``input_scale * scale``, become too small for float32.

    Args:
        weight: Per-tensor or per-channel scales, shape () or (C,).
        bias: float32, shape (C,).
        input_scale: Scale of the activation that the weights multiply.
    """
    least = np.maximum(np.abs(np.asarray(bias, np.float64)) / (INT32_MAX // 2), TINY) / input_scale
    if weight.axis is None:
        least = least.max(initial=0.0)
    scale = np.maximum(weight.scale, least.astype(np.float32) * np.float32(1 + 2**-20))
    return QParams(scale=scale.astype(np.float32), zero_point=weight.zero_point, axis=weight.axis)


def quantize(values: Array, params: QParams) -> Array:
    """Return `values` as integers of the dtype of `params.zero_point`, rounded half to even and saturated."""
    scale, zero = _broadcast(params.scale, params, values.ndim), _broadcast(params.zero_point, params, values.ndim)
    info = np.iinfo(params.zero_point.dtype)
    steps = np.rint(np.asarray(values, np.float32) / scale).astype(np.float64) + zero
    return np.clip(steps, info.min, info.max).astype(params.zero_point.dtype)


def dequantize(values: Array, params: QParams) -> Array:
    """Return the float32 values that the integers stand for."""
    scale, zero = _broadcast(params.scale, params, values.ndim), _broadcast(params.zero_point, params, values.ndim)
    return ((values.astype(np.int64) - zero) * scale.astype(np.float64)).astype(np.float32)


def quantize_bias(bias: Array, input_scale: float, weight_scale: Array) -> QParams:
    """Return the int32 parameters of a bias: scale ``input_scale * weight_scale``, zero point 0."""
    scale = np.asarray(np.float32(input_scale) * weight_scale, np.float32)
    if scale.ndim == 0:
        scale = np.broadcast_to(scale, bias.shape).copy()
    return QParams(scale=scale, zero_point=np.zeros(scale.shape, np.int32), axis=0)


def _broadcast(array: Array, params: QParams, rank: int) -> Array:
    """Shape a per-channel array so that it broadcasts along the channel axis of a tensor of `rank`."""
    if params.axis is None or array.ndim == 0:
        return array
    return array.reshape([-1 if i == params.axis % rank else 1 for i in range(rank)])

"""The arithmetic of linear quantization: ranges to scales and zero points, arrays to integers and back.

``q = saturate(round_half_even(x / scale) + zero_point)`` and ``x = (q - zero_point) * scale``, as defined by the
ONNX operators QuantizeLinear and DequantizeLinear (https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import UnknownNameError

Array = npt.NDArray[Any]
Index = tuple[slice, ...]

BLOCK = 2**18
"""Elements that are worked on at a time: 1 MB of float32, which with its temporaries stays in a cache."""

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
    channel = None if axis is None else axis % weights.ndim
    peak = np.zeros(() if channel is None else weights.shape[channel], np.float32)
    for index in blocks(weights.shape):
        part = () if channel is None else (index[channel],)
        magnitude = np.abs(np.asarray(weights[index], np.float32))
        peak[part] = np.maximum(peak[part], _peak(magnitude, channel))
    step = np.asarray(peak / np.float32(127), np.float32)
    scale = np.where(step < np.float32(TINY), np.float32(1), step).astype(np.float32)
    return QParams(scale=scale, zero_point=np.zeros_like(scale, dtype=np.int8), axis=axis)


def symmetric_u8(lo: float, hi: float) -> QParams:
    """Return the uint8 scale of a range with zero point 128, so that steps of -127 to 127 reach its farther end.

    >>> q = symmetric_u8(-1.0, 254.0)
    >>> float(q.scale), int(q.zero_point)
    (2.0, 128)
    """
    step = np.float32(max(-lo, hi, 0.0)) / np.float32(127)
    scale = np.float32(1.0) if step < np.float32(TINY) else step
    return QParams(scale=np.asarray(scale), zero_point=np.asarray(128, np.uint8))


def _retyped(params: QParams, dtype: type[np.integer[Any]]) -> QParams:
    """Return the same grid of real values, stored as `dtype`: all integers move by the difference of the minima."""
    shift = int(np.iinfo(dtype).min) - int(np.iinfo(params.zero_point.dtype).min)
    zero = np.asarray(params.zero_point.astype(np.int64) + shift, dtype)
    return QParams(scale=params.scale, zero_point=zero, axis=params.axis)


DTYPES: dict[str, type[np.integer[Any]]] = {"u8": np.uint8, "s8": np.int8}
"""The element types of a quantized tensor, by the names of the options."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How ranges become scales and zero points: the element types, and where zero lies.

    Attributes:
        activation: ``u8`` or ``s8``. Both hold the same 256 real values: ``s8`` is ``u8`` with all integers, the zero
            point among them, 128 lower.
        weight: ``s8`` with zero point 0 or ``u8`` with zero point 128; both hold the same 255 real values.
        symmetric: Whether the zero point of an activation is the middle of the type. A tensor that is never negative
            keeps the type's minimum even so: half of the steps would be lost, and ONNX Runtime fuses a Relu into the
            kernel before it only where the zero point of the output is the minimum.

    Raises:
        RequantError: A type is neither of the two.
    """

    activation: str = "u8"
    weight: str = "s8"
    symmetric: bool = False

    def __post_init__(self) -> None:
        for kind, name in (("activation", self.activation), ("weight", self.weight)):
            if name not in DTYPES:
                raise UnknownNameError(f"{kind} type", name, DTYPES)

    def activation_params(self, lo: float, hi: float) -> QParams:
        """Return the scale and zero point of a tensor whose values lie in ``[lo, hi]``."""
        grid = symmetric_u8 if self.symmetric and lo < 0 else asymmetric_u8
        return _retyped(grid(lo, hi), DTYPES[self.activation])

    def weight_params(self, array: Array, axis: int | None) -> QParams:
        """Return the scales of weights, per slice along `axis` or (None) one for the whole array."""
        return _retyped(symmetric_s8(array, axis), DTYPES[self.weight])


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
    dtype = params.zero_point.dtype
    info = np.iinfo(dtype)
    # float32 holds the sum of a step and a zero point exactly wherever it is not saturated anyway, up to 16 bits
    exact = np.float32 if dtype.itemsize <= 2 else np.float64
    scale, zero = _broadcast(params.scale, params, values.ndim), _broadcast(params.zero_point, params, values.ndim)
    shifted = bool(zero.any())
    stored = np.empty(values.shape, dtype)
    for index in blocks(values.shape):
        steps = np.asarray(np.asarray(values[index], np.float32) / _part(scale, index))
        steps = np.rint(steps, out=steps).astype(exact, copy=False)
        if shifted:
            steps += _part(zero, index).astype(exact)
        stored[index] = np.clip(steps, info.min, info.max, out=steps)
    return stored


def dequantize(values: Array, params: QParams) -> Array:
    """Return the float32 values that the integers stand for."""
    scale, zero = _broadcast(params.scale, params, values.ndim), _broadcast(params.zero_point, params, values.ndim)
    real = np.empty(values.shape, np.float32)
    for index in blocks(values.shape):
        steps = values[index].astype(np.float64) - _part(zero, index)
        real[index] = steps * _part(scale, index).astype(np.float64)
    return real


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


def _part(array: Array, index: Index) -> Array:
    """Return what of a broadcast `array` belongs to a block."""
    return array[tuple(part if length > 1 else slice(None) for part, length in zip(index, array.shape, strict=False))]


def blocks(shape: tuple[int, ...]) -> Iterator[Index]:
    """Yield a slice per axis for each part of an array, at most `BLOCK` elements that are neighbours in memory.

    Temporaries of a part are small, whatever the size of the array.
    """
    whole, axis = 1, len(shape)  # the axes from `axis` on fit into one block, with `whole` elements
    while axis > 0 and whole * shape[axis - 1] <= BLOCK:
        axis -= 1
        whole *= shape[axis]
    rest = (slice(None),) * (len(shape) - axis)
    if axis == 0:
        yield rest
        return
    step = max(1, BLOCK // whole)
    for lead in np.ndindex(*shape[: axis - 1]):
        for start in range(0, shape[axis - 1], step):
            yield (*(slice(i, i + 1) for i in lead), slice(start, start + step), *rest)


def _peak(magnitude: Array, axis: int | None) -> Array:
    """Return the greatest value per slice along `axis`, or of all; no value is negative.

    NumPy reduces short rows (those of a 3x3 kernel) slowly, but takes the maximum of two columns fast.
    """
    if axis is None:
        return np.asarray(magnitude.max(initial=0.0))
    ahead = magnitude.max(axis=tuple(range(axis)), initial=0.0) if axis else magnitude
    rows = ahead.reshape(len(ahead), math.prod(ahead.shape[1:]))
    if rows.shape[1] < 64:
        return reduce(np.maximum, rows.T, np.zeros(len(rows), np.float32))
    return np.asarray(rows.max(axis=1))

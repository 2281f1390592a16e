"""The arithmetic of linear quantization: from ranges to scales and zero points, from floats to integers and back.

``q = saturate(round_half_even(x / scale) + zero_point)`` and ``x = (q - zero_point) * scale``, as defined by the
ONNX operators QuantizeLinear and DequantizeLinear (https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ... import RequantError, UnknownNameError
from ...system.given import normalise_fields

Array: TypeAlias = npt.NDArray[Any]
"""An array of any type; outside of `transforms` it is that of `calibration/model/session.py`."""
Index = tuple[slice, ...]

BLOCK = 2**18
"""Elements computed at a time: 1 MB of float32, so that the block and its temporaries fit into the cache."""

INT32_MAX = 2**31 - 1
# float32 cannot divide by a scale below its smallest normal number; such a tensor counts as constant.
TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True, kw_only=True)
class QParams:
    """Scale and zero point of a tensor, per tensor or per channel.

    Attributes:
        scale: float32, shape () or (C,); positive.
        zero_point: uint8, int8 or int32, of the same shape; its dtype is the dtype of the quantized tensor.
        axis: The channel axis if the shape is (C,), else None.
    """

    scale: Array
    zero_point: Array
    axis: int | None = None

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest real value of a per-tensor quantized tensor."""
        info = np.iinfo(self.zero_point.dtype)
        scale, zero = float(self.scale), int(self.zero_point)
        return (info.min - zero) * scale, (info.max - zero) * scale


def asymmetric_u8(lo: float, hi: float) -> QParams:
    """Return the uint8 scale and zero point of a range; the range is widened to contain zero.

    All operations are the float32 operations of the graph that `quantize_nodes` emits, in the same order. So a frozen
    range gives exactly the scale that the dynamic graph computes.

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
    """Return int8 scales with zero point 0, one per slice along `axis`; for axis None one for the whole array.

    The integers are -127 to 127: a symmetric grid has no bias, and products with uint8 do not saturate a VNNI
    accumulator. A slice of zeros has scale 1.
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
    """Return the uint8 scale of a range with zero point 128; 127 steps reach the bound with the larger magnitude.

    >>> q = symmetric_u8(-1.0, 254.0)
    >>> float(q.scale), int(q.zero_point)
    (2.0, 128)
    """
    step = np.float32(max(-lo, hi, 0.0)) / np.float32(127)
    scale = np.float32(1.0) if step < np.float32(TINY) else step
    return QParams(scale=np.asarray(scale), zero_point=np.asarray(128, np.uint8))


def _retyped(params: QParams, dtype: type[np.integer[Any]]) -> QParams:
    """Return the same grid of real values stored as `dtype`: all integers shift by the difference of the minima."""
    shift = int(np.iinfo(dtype).min) - int(np.iinfo(params.zero_point.dtype).min)
    zero = np.asarray(params.zero_point.astype(np.int64) + shift, dtype)
    return QParams(scale=params.scale, zero_point=zero, axis=params.axis)


DTYPES: dict[str, type[np.integer[Any]]] = {"u8": np.uint8, "s8": np.int8}
"""The element types of quantized tensors, by option value."""


BLOCK_BITS = (4, 8)
BLOCK_SIZES = (16, 32, 64, 128, 256)
USUAL_SIZES = {8: 128, 4: 32}
"""The size of blocks by bits. With one row, blocks of 128 are 1.4 times as fast as blocks of 32 (AVX2)."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The form of weights in blocks.

    Attributes:
        bits: Bits of an integer, one of `BLOCK_BITS`.
        size: Weights of a block, one of `BLOCK_SIZES`; the last block of a row may have fewer.

    Raises:
        RequantError: There is no kernel for these bits or sizes.
    """

    bits: int = 8
    size: int = 128

    def __post_init__(self) -> None:
        for name, value, known in (("block-bits", self.bits, BLOCK_BITS), ("block-size", self.size, BLOCK_SIZES)):
            if value not in known:
                raise RequantError(f"--{name} {value}: there are {', '.join(map(str, known))}")

    @property
    def zero(self) -> int:
        """The code of zero: 8 or 128."""
        return int(2 ** (self.bits - 1))

    def within(self, columns: int) -> BlockForm:
        """Return the form for rows of some weights: the least size that holds a row, if that is smaller."""
        return BlockForm(self.bits, next((size for size in BLOCK_SIZES if columns <= size < self.size), self.size))

    def blocks(self, columns: int) -> int:
        """Return the number of blocks of a row."""
        return -(-columns // self.size)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How ranges become scales and zero points: the element types and the position of zero.

    Attributes:
        activation: ``u8`` or ``s8``. Both represent the same 256 real values: in ``s8`` all integers and the zero
            point are 128 lower.
        weight: ``s8`` with zero point 0 or ``u8`` with zero point 128; both represent the same 255 real values.
        symmetric: Whether the zero point of an activation is the middle of the type. The zero point of a tensor that
            is never negative is always the minimum of the type: the middle would lose half of the steps, and ONNX
            Runtime fuses a Relu into the kernel before it only if the zero point of the output is the minimum.
        block_bits: Bits of weights in blocks.
        block_size: Weights of a block; 0 for the usual size, `USUAL_SIZES`.

    Raises:
        UnknownNameError: A type is neither ``u8`` nor ``s8``.
        RequantError: There is no kernel for these blocks, or an attribute is of another type.
    """

    activation: str = "u8"
    weight: str = "s8"
    symmetric: bool = False
    block_bits: int = 8
    block_size: int = 0

    def __post_init__(self) -> None:
        normalise_fields(self)
        for kind, name in (("activation", self.activation), ("weight", self.weight)):
            if name not in DTYPES:
                raise UnknownNameError(f"{kind} type", name, DTYPES)
        _ = self.blocks

    @property
    def blocks(self) -> BlockForm:
        """The form of weights in blocks."""
        return BlockForm(self.block_bits, self.block_size or USUAL_SIZES.get(self.block_bits, 0))

    def activation_params(self, lo: float, hi: float) -> QParams:
        """Return the scale and zero point of a tensor with values in ``[lo, hi]``."""
        grid = symmetric_u8 if self.symmetric and lo < 0 else asymmetric_u8
        return _retyped(grid(lo, hi), DTYPES[self.activation])

    def weight_params(self, array: Array, axis: int | None) -> QParams:
        """Return the scales of weights, one per slice along `axis`; for axis None one for the whole array."""
        return _retyped(symmetric_s8(array, axis), DTYPES[self.weight])


def fit_bias(weight: QParams, bias: Array, input_scale: float) -> QParams:
    """Raise the weight scales of channels whose ``bias / (input_scale * scale)`` does not fit into an int32.

    A channel with tiny weights has a tiny scale, and its quantized bias may overflow (ONNX Runtime before 1.18 lost
    half of a model's accuracy this way). A larger scale costs such a channel no accuracy, because its weights are
    negligible compared with its bias. Half of the int32 range is reserved for the accumulated products. The scale of
    the bias, ``input_scale * scale``, also stays a normal float32 number.

    Args:
        weight: Per-tensor or per-channel scales, shape () or (C,).
        bias: float32, shape (C,).
        input_scale: The scale of the activation.
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
    # up to 16 bits, float32 holds the sum of step and zero point exactly, unless the sum saturates
    exact = np.float32 if dtype.itemsize <= 2 else np.float64
    scale, zero = along_axis(params.scale, params, values.ndim), along_axis(params.zero_point, params, values.ndim)
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
    """Return the float32 values of the integers: products with the scale, rounded once."""
    # up to 16 bits, float32 holds the difference exactly; otherwise the product is rounded from float64
    exact = np.float32 if values.dtype.itemsize <= 2 else np.float64
    scale, zero = along_axis(params.scale, params, values.ndim), along_axis(params.zero_point, params, values.ndim)
    real = np.empty(values.shape, np.float32)
    for index in blocks(values.shape):
        steps = values[index].astype(exact) - _part(zero, index).astype(exact)
        real[index] = steps * _part(scale, index)
    return real


def quantize_bias(bias: Array, input_scale: float, weight_scale: Array) -> QParams:
    """Return the int32 parameters of a bias: scale ``input_scale * weight_scale``, zero point 0."""
    scale = np.asarray(np.float32(input_scale) * weight_scale, np.float32)
    if scale.ndim == 0:
        scale = np.broadcast_to(scale, bias.shape).copy()
    return QParams(scale=scale, zero_point=np.zeros(scale.shape, np.int32), axis=0)


def along_axis(array: Array, params: QParams, rank: int) -> Array:
    """Reshape a per-channel array so that it broadcasts along the channel axis of a tensor of `rank`."""
    if params.axis is None or array.ndim == 0:
        return array
    return array.reshape([-1 if i == params.axis % rank else 1 for i in range(rank)])


def _part(array: Array, index: Index) -> Array:
    """Return the part of a broadcast `array` that belongs to a block."""
    return array[tuple(part if length > 1 else slice(None) for part, length in zip(index, array.shape, strict=False))]


def blocks(shape: tuple[int, ...]) -> Iterator[Index]:
    """Yield one slice per axis for each block of an array: at most `BLOCK` elements that are contiguous in memory.

    Working by blocks keeps temporaries small for arrays of any size.
    """
    whole, axis = 1, len(shape)  # axes `axis` and later fit into one block of `whole` elements
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
    """Return the maximum per slice along `axis`, or of the whole array for None; no value is negative.

    NumPy reduces short rows (such as 3x3 kernels) slowly; the maximum of two columns is fast.
    """
    if axis is None:
        return np.asarray(magnitude.max(initial=0.0))
    ahead = magnitude.max(axis=tuple(range(axis)), initial=0.0) if axis else magnitude
    rows = ahead.reshape(len(ahead), math.prod(ahead.shape[1:]))
    if rows.shape[1] < 64:
        return reduce(np.maximum, rows.T, np.zeros(len(rows), np.float32))
    return np.asarray(rows.max(axis=1))

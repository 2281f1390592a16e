"""Find int8 weights that saturate on a CPU without VNNI, and the smallest scales that keep sums exact.

Without VNNI, ONNX Runtime's uint8 x int8 kernels for x86 multiply with VPMADDUBSW: two neighbouring products are added
in 16 bits, and a sum outside -32768..32767 saturates without a warning. One product fits (255 * 127 = 32385, 255 * -128
= -32640); two products of different signs fit as well. With activations of 255, two weights of equal sign fit if and
only if ``|w0 + w1| <= 128``: 255 * 128 = 32640, 255 * 129 = 32895. So the weights alone determine which channels can
saturate.

The kernel sources define which weights form a pair (onnxruntime/core/mlas/lib; qlinearconv.cc is in
onnxruntime/core/providers/cpu/quantization):

- Matrix products (MatMulInteger, QLinearMatMul, QGemm, MatMulIntegerToFloat, DynamicQuantizeMatMul, QAttention): rows
  2i and 2i + 1 of the (K, N) matrix; for odd K the last row has no partner. Four rows at a time are interleaved, and K
  is sliced by 128 or 384 (x86_64/QgemmU8S8KernelAvx2.S, x86_64/QgemvU8S8KernelAvx2.S, qgemm_kernel_avx2.cpp,
  x86_64/QgemmU8X8KernelAvx512Core.S). A transposed B becomes (K, N) first.
- Convolutions, 1-D to 3-D, with groups: the same, with K = ``tap * C/g + channel``, for any layout of the input: the
  kernel computes channels-last (qlinearconv.cc, ``ReorderFilter``; convsym.cpp, ``MlasConvSymPackW``;
  x86_64/ConvSymKernelAvx2.S, x86_64/ConvSymKernelAvx512Core.S).
- Depthwise convolutions, one input and one output channel per group: no pairs; products are added in 32 bits
  (intrinsics/avx2/qdwconv_avx2.cpp, and the depthwise kernels of the last two files above).
- uint8 weights: no pairs; both factors are widened to 16 bits (x86_64/QgemmU8U8KernelAvx2.S).

The same holds for int8 activations in a QDQ model: the runtime converts them to uint8.

OpenVINO's kernels add the same pairs, except in convolutions that are not depthwise: they fill the channels of each tap
with zeros to a multiple of four (oneDNN, src/cpu/x64/jit_uni_x8s8s32x_conv_kernel.cpp), so that no pair has channels of
two taps. `even_channels` makes such pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .qparams import BLOCK, Array, QParams

PAIR_LIMIT = 128
"""The largest ``|w0 + w1|`` of a pair of weights that cannot saturate for any uint8 activations."""


def prevent_saturation(params: QParams, weights: Array, channel_axis: int, *, group: int = 1) -> QParams:
    """Return `params` with higher scales for the channels whose sums can saturate, so that no sum saturates.

    Each raised scale is the smallest float32 scale at which all pairs of the channel have ``|w0 + w1| <= 128`` after
    rounding by `qparams.quantize`. A per-tensor scale is raised to that of the worst channel.

    Args:
        params: Scales per tensor or along `channel_axis`, zero point 0. The scales of uint8 weights are not changed.
        weights: The float weights: (..., K, N) with `channel_axis` -1; (N, K) with `channel_axis` 0; or those of a
            convolution, (M, C/g, *kernel), with `channel_axis` 0.
        channel_axis: The axis of the output channels.
        group: The number of groups of a convolution.
    """
    if not _paired(weights, channel_axis, group) or params.zero_point.dtype != np.int8:
        return params
    scale = np.array(np.broadcast_to(params.scale, weights.shape[channel_axis]))
    for channels, first, second in _pairs(weights, channel_axis):
        raised = scale[channels]  # a view
        first, second = np.asarray(first, np.float32), np.asarray(second, np.float32)
        over = np.nonzero(_sum(first, second, raised) > PAIR_LIMIT)
        _fit(raised, first[over], second[over], over[1])
    raised_scale = np.asarray(scale.max()) if params.axis is None else scale
    return QParams(scale=raised_scale, zero_point=params.zero_point, axis=params.axis)


def even_channels(weights: Array) -> Array:
    """Return the weights of a convolution, (M, C/g, *kernel), with an even number of input channels; more are zero.

    A depthwise convolution stays as it is: no kernel adds its products in pairs.
    """
    odd = weights.shape[1] % 2 if weights.shape[1] > 1 else 0
    return np.pad(weights, [(0, 0), (0, odd), *[(0, 0)] * (weights.ndim - 2)]) if odd else weights


def pair_partners(weights: Array, channel_axis: int, *, group: int = 1) -> Array:
    """Return, for each of the K weights of an output channel, the weight with which the kernel adds it; -1 without one.

    Args:
        weights: Weights in a layout of `prevent_saturation`.
        channel_axis: The axis of the output channels.
        group: The number of groups of a convolution.

    Returns:
        int64 (K,); for a convolution K counts channel by channel, ``channel * taps + tap``.
    """
    if channel_axis % weights.ndim == 0:
        inner = np.arange(weights[:1].size).reshape(weights.shape[1:])
        order = np.moveaxis(inner, 0, -1).reshape(-1)
    else:
        order = np.arange(weights.shape[-2])
    partners = np.full(len(order), -1)
    if _paired(weights, channel_axis, group):
        even, odd = _halves(order)
        partners[even], partners[odd] = odd, even
    return partners


def _paired(weights: Array, channel_axis: int, group: int) -> bool:
    """Whether the kernel adds products in pairs: not for empty weights and not for depthwise convolutions."""
    depthwise = weights.ndim > 2 and channel_axis % weights.ndim == 0 and weights.shape[:2] == (group, 1)
    return weights.size > 0 and not depthwise


def _pairs(weights: Array, channel_axis: int) -> Iterator[tuple[slice, Array, Array]]:
    """Yield, for each block of the weights, its output channels and both weights of each pair, (pairs, channels)."""
    if channel_axis % weights.ndim == 0:
        step = max(1, BLOCK // max(1, weights[:1].size))
        for start in range(0, len(weights), step):
            part = weights[start : start + step]
            rows = np.moveaxis(part, 1, -1).reshape(len(part), -1).T
            yield slice(start, start + step), *_halves(rows)
        return
    step = max(2, BLOCK // max(1, weights.shape[-1]) // 2 * 2)
    for lead in np.ndindex(*weights.shape[:-2]):
        for start in range(0, weights.shape[-2], step):
            yield slice(None), *_halves(weights[lead][start : start + step])


def _halves(rows: Array) -> tuple[Array, Array]:
    """Return rows 0, 2, ... and rows 1, 3, ...; the last of an odd number of rows is dropped."""
    return rows[: len(rows) // 2 * 2 : 2], rows[1::2]


def _fit(scale: Array, first: Array, second: Array, channel: Array) -> None:
    """Raise scales (C,) in place until all pairs fit; `channel` is the channel of each pair.

    The pair with the largest sum of a channel comes first: at the scale at which it fits, nearly all others fit too and
    need no search.
    """
    weight = np.abs(first.astype(np.float64) + second)
    heaviest = np.zeros(scale.shape)
    np.maximum.at(heaviest, channel, weight)
    for chosen in (weight == heaviest[channel], np.full(weight.shape, True)):
        chosen &= _sum(first, second, scale[channel]) > PAIR_LIMIT
        at = channel[chosen]
        np.maximum.at(scale, at, _least(first[chosen], second[chosen], scale[at]))


def _sum(first: Array, second: Array, scale: Array) -> Array:
    """Return ``|q0 + q1|`` of weights as `qparams.quantize` stores them."""
    steps = [np.clip(np.rint(half / scale), -128, 127) for half in (first, second)]
    return np.asarray(np.abs(steps[0] + steps[1]))


def _least(first: Array, second: Array, scale: Array) -> Array:
    """Return the smallest scale at which each pair fits; at `scale` no pair fits.

    Rounding adds at most half a step to each weight, so a pair fits at ``|w0 + w1| / 127``. Between these two scales
    the sum falls as the scale rises. The search is a bisection over the bits: positive float32 numbers are ordered like
    their bits.
    """
    low = np.asarray(scale, np.float32).view(np.int32)
    fits = np.abs(first.astype(np.float64) + second) / (PAIR_LIMIT - 1) * (1 + 2**-20)
    high = fits.astype(np.float32).view(np.int32)
    while np.any(high - low > 1):
        middle = low + (high - low) // 2
        over = _sum(first, second, middle.view(np.float32)) > PAIR_LIMIT
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    return high.view(np.float32)

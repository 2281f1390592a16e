"""Bias correction: restore the mean of a result that rounded weights change."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .qparams import Array


def mean_shift(node: ir.Node, error: Array, input_mean: Array) -> Array | None:
    """Return by how much rounded weights reduce the mean of each output channel.

    With ``W' = W - error`` the mean of output channel m falls by ``sum_c (sum_k error[m, c, k]) E[x_c]``; added to the
    bias this restores it (Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction, 2019,
    section 4.2, with measured instead of derived means). The formula ignores padding, so it is exact only away from
    borders.

    A result of a ConvTranspose has the taps of one phase; all phases together have the mean over them.

    Args:
        node: A Conv, a ConvTranspose of one group, or a Gemm or MatMul with a constant second factor.
        error: Float weights minus dequantized weights, in the node's layout: (M, C/group, *kernel), (K, N) or (N, K);
            (C, M, *kernel) of a ConvTranspose.
        input_mean: Mean of the activation per channel, shape (C,) or (K,).

    Returns:
        float32 of shape (M,) or (N,); None if the shapes do not fit together.
    """
    if node.op_type == "Conv":
        group = node.attributes.get_int("group", 1)
        taps = error.sum(axis=tuple(range(2, error.ndim)), dtype=np.float64)  # (M, C/group)
        if input_mean.size != taps.shape[1] * group or taps.shape[0] % group:
            return None
        per_group = taps.reshape(group, -1, taps.shape[1])
        means = input_mean.reshape(group, taps.shape[1], 1)
        return np.asarray((per_group @ means).reshape(-1), np.float32)
    if node.op_type == "ConvTranspose":
        taps = error.sum(axis=tuple(range(2, error.ndim)), dtype=np.float64)  # (C, M)
        phases = math.prod(node.attributes.get_ints("strides", (1,) * (error.ndim - 2)))
        return None if input_mean.size != len(taps) else np.asarray(input_mean @ taps / phases, np.float32)
    matrix = error.T if node.attributes.get_int("transB", 0) else error
    if matrix.ndim != 2 or matrix.shape[0] != input_mean.size:
        return None
    return np.asarray(input_mean @ matrix.astype(np.float64), np.float32)


def mean_axis(node: ir.Node) -> int:
    """Return the channel axis of the activation, for the means that `mean_shift` takes."""
    return 1 if node.op_type in ("Conv", "ConvTranspose") else -1

"""Equalize the ranges of the weights before and after an activation; no data is needed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from .graphs.queries import constant, release
from .graphs.rewriter import names
from .parts.equalize import Group, find, scale_group
from .patterns.channel_scales import Floats, Fold
from .registry import Change, transform

SWEEPS = 64
"""The maximum number of passes. The scales of a group change the weights of its neighbours, so passes repeat."""
MOST_EXPONENT = 8
"""The maximum scale of a channel is two to this power."""


@transform("equalize_weights", after=("fold_constants", "fold_batch_norms"))
def equalize_weights(model: ir.Model) -> Change:
    """Scale channels between two layers so that the weights before and after them have equal ranges.

    Before:  y = Conv(Relu(Conv(x, V, a)), W, b)
    After:   y = Conv(Relu(Conv(x, V / s, a / s)), W * s, b),  s_c = sqrt(max |V_c| / max |W_c|), shape (C,)
        Each s is rounded to a power of two, so that all results stay equal bit by bit (Nagel et al., Data-Free
        Quantization Through Weight Equalization and Bias Correction, 2019, section 4.1). The layers may be Conv,
        ConvTranspose, Gemm, MatMul, a BatchNormalization or a Mul by a constant, and before the activation also a
        normalization; several layers may share an activation. Between the layers, Relu, LeakyRelu, PRelu, poolings,
        sums and operators that move values are possible. Weights with other readers are copied.
    Left alone: a tensor that is an input or output of the graph, is read in a body, or is next to an operator whose
        output has another scale; a Clip with an upper bound in between; constants that would not stay finite.
    """
    changed, taken = set[str](), names(model)
    every, skipped = find(model)
    unbounded = [group for group in every if not np.isfinite(group.ceiling)]
    bounded = len(every) - len(unbounded)
    skipped.update({"clip-with-a-bound": bounded} if bounded else {})
    for _ in range(SWEEPS):
        done = 0
        for group in unbounded:
            scale = _equalizing(group)
            if (scale != 1).any() and scale_group(group, scale, taken):
                done += 1
                changed.add(group.tensor)
        if not done:
            break
    return Change(len(changed), skipped)


def _equalizing(group: Group) -> Floats:
    """Return the powers of two that make the ranges before and after a group most similar, (C,)."""
    before, after = _ranges(group.producers, group.channels), _ranges(group.readers, group.channels)
    live = (before > 0) & (after > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.where(live, np.rint((np.log2(before) - np.log2(after)) / 2), 0.0)
    return np.asarray(2.0 ** np.clip(exponents, -MOST_EXPONENT, MOST_EXPONENT))


def _ranges(folds: Iterable[Fold], channels: int) -> Floats:
    """Return the largest magnitude of the constants for each channel, (C,)."""
    widest = np.zeros(channels)
    for fold in folds:
        tensor = constant(fold.node.inputs[fold.index])
        assert tensor is not None  # a fold is a constant
        array = np.abs(np.asarray(tensor.numpy(), np.float64))
        release(tensor)
        split = np.moveaxis(array.reshape(fold.groups, -1, *array.shape[1:]), fold.axis, 1)
        widest = np.maximum(widest, split.max(axis=tuple(range(2, split.ndim))).reshape(-1))
    return widest

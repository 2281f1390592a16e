"""Fold normalisations that are spelled in single operators."""

from __future__ import annotations

from math import inf

import onnx_ir as ir

from .fold_batch_norms import fold
from .linear import BY_CONSTANT
from .registry import Change, transform


@transform("fold_subdivmul_batch_norms", after=("fold_constants",))
def fold_subdivmul_batch_norms(model: ir.Model, *, max_gain: float = inf) -> Change:
    """Fold Sub, Div, Mul and Add of one constant per channel into a linear operator beside them.

    Before:  y = Add(Mul(Div(Sub(Conv(x, W, b), mean), deviation), gamma), beta)
    After:   y = Conv(x, W * g, (b - mean) * g + beta),  g = gamma / deviation, shape (M,)
    Left alone: what `fold_batch_norms` leaves alone, and BatchNormalization.

    Options:
        max_gain: The largest factor by which a channel's weights may grow.
    """
    return fold(model, BY_CONSTANT, max_gain)

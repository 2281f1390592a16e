"""Fold BatchNormalization nodes alone."""

from __future__ import annotations

from math import inf

import onnx_ir as ir

from .fold_batch_norms import fold
from .registry import Change, transform


@transform("fold_old_batch_norms", after=("fold_constants",))
def fold_old_batch_norms(model: ir.Model, *, max_gain: float = inf) -> Change:
    """Fold a BatchNormalization into a linear operator beside it: the part of `fold_batch_norms` for one operator.

    Before:  y = BatchNormalization(Concat(Conv(x, V), Conv(x, W)), gamma, beta, mean, var)
    After:   y = Concat(Conv(x, V * g[:M], c[:M]), Conv(x, W * g[M:], c[M:])),
             g = gamma / sqrt(var + epsilon),  c = beta - mean * g
    Left alone: what `fold_batch_norms` leaves alone, and Mul, Div, Add and Sub.

    Options:
        max_gain: The largest factor by which a channel's weights may grow.
    """
    return fold(model, {"BatchNormalization"}, max_gain)

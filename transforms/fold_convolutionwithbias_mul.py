"""Fold a factor behind a convolution."""

from __future__ import annotations

import onnx_ir as ir

from .fold_batch_norms import fold
from .registry import Change, transform


@transform("fold_convolutionwithbias_mul", after=("fold_constants",))
def fold_convolutionwithbias_mul(model: ir.Model) -> Change:
    """Fold a Mul by a single number into the weight and the bias of the Conv before it.

    Before:  y = Add(x, Mul(Conv(x, W, b), 0.17)), the scaled branch of an Inception-ResNet
    After:   y = Add(x, Conv(x, W * 0.17, b * 0.17))
    Left alone: what `fold_batch_norms` leaves alone, constants of several numbers, other operators than Conv and Mul.
    """
    return fold(model, {"Mul"}, numbers=True)

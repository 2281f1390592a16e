"""The names under which TensorFlow's and Intel's tools fuse a Pad into a convolution."""

from __future__ import annotations

import onnx_ir as ir

from .fuse_pad_and_conv import fuse_pad_and_conv
from .registry import Change, transform


@transform("fuse_convolutions", after=("fold_constants",))
def fuse_convolutions(model: ir.Model) -> Change:
    """Do what `fuse_pad_and_conv` does: the name that TensorFlow's own documentation calls it by.

    Before:  t = Pad(x, pads=[0, 0, 1, 1, 0, 0, 1, 1]); y = Conv(t, W), pads [0, 0, 0, 0]
    After:   y = Conv(x, W), pads [1, 1, 1, 1]
    Left alone: what `fuse_pad_and_conv` leaves alone; a Resize before a Conv, of which ONNX has no fused form.
    """
    return fuse_pad_and_conv(model)


@transform("fuse_resize_pad_and_conv", after=("fold_constants",))
def fuse_resize_pad_and_conv(model: ir.Model) -> Change:
    """Do what `fuse_pad_and_conv` does, behind a Resize too, which stays.

    Before:  t = Pad(Resize(x, s), p); y = Conv(t, W)
    After:   y = Conv(Resize(x, s), W), pads p
    Left alone: what `fuse_pad_and_conv` leaves alone; the Resize, of which ONNX has no fused form.
    """
    return fuse_pad_and_conv(model)


@transform("mkl_fuse_pad_and_conv", after=("fold_constants",))
def mkl_fuse_pad_and_conv(model: ir.Model) -> Change:
    """Do what `fuse_pad_and_conv` does, in a graph with quantize/dequantize pairs too.

    Before:  t = Pad(DequantizeLinear(q), p); y = QuantizeLinear(Conv(t, W))
    After:   y = QuantizeLinear(Conv(DequantizeLinear(q), W)), pads p
    Left alone: what `fuse_pad_and_conv` leaves alone.
    """
    return fuse_pad_and_conv(model)

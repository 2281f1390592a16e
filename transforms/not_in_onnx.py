"""TensorFlow graph transforms that have no meaning in ONNX; registered so that a pipeline may name them."""

from __future__ import annotations

import onnx_ir as ir

from .registry import Change, transform


def _nothing_to_do() -> Change:
    """Return a change that reports ``not-in-onnx``."""
    change = Change()
    change.skip("not-in-onnx")
    return change


@transform("remove_device")
def remove_device(model: ir.Model) -> Change:
    """Do nothing and report it: an ONNX node has no device; the runtime chooses the device by its providers.

    Before:  y = Relu(x)
    After:   the same
    Left alone: everything (``not-in-onnx``).
    """
    return _nothing_to_do()


@transform("set_device")
def set_device(model: ir.Model, *, device: str = "", if_default: bool = False) -> Change:
    """Do nothing and report it: an ONNX node has no device; the runtime chooses the device by its providers.

    Before:  y = Relu(x)
    After:   the same
    Left alone: everything (``not-in-onnx``).

    Options:
        device: Not used.
        if_default: Not used.
    """
    return _nothing_to_do()


@transform("remove_control_dependencies")
def remove_control_dependencies(model: ir.Model) -> Change:
    """Do nothing and report it: ONNX nodes depend on each other through tensors only.

    Before:  y = Relu(x)
    After:   the same
    Left alone: everything (``not-in-onnx``).
    """
    return _nothing_to_do()


@transform("sparsify_gather")
def sparsify_gather(model: ir.Model) -> Change:
    """Do nothing and report it: ONNX has no hash tables to replace a Gather from mostly empty rows.

    Before:  y = Gather(W, i)
    After:   the same; `quantize_weights` stores the rows as int8
    Left alone: everything (``not-in-onnx``).
    """
    return _nothing_to_do()


@transform("backport_concatv2")
def backport_concatv2(model: ir.Model) -> Change:
    """Do nothing and report it: ONNX has one Concat; `convert_opset` changes the opset of a model.

    Before:  y = Concat(a, b)
    After:   the same
    Left alone: everything (``not-in-onnx``).
    """
    return _nothing_to_do()


@transform("backport_tensor_array_v3")
def backport_tensor_array_v3(model: ir.Model) -> Change:
    """Do nothing and report it: ONNX has no tensor arrays, only sequences.

    Before:  y = SequenceAt(s, i)
    After:   the same
    Left alone: everything (``not-in-onnx``).
    """
    return _nothing_to_do()


@transform("fuse_resize_and_conv")
def fuse_resize_and_conv(model: ir.Model) -> Change:
    """Do nothing and report it: ONNX has no operator that combines a resize and a convolution.

    Before:  y = Conv(Resize(x, s), W)
    After:   the same; `fuse_pad_and_conv` fuses a Pad
    Left alone: everything (``not-in-onnx``).
    """
    return _nothing_to_do()

"""Transforms of TensorFlow's graphs for what ONNX models have not: registered, so that a pipeline may name them."""

from __future__ import annotations

import onnx_ir as ir

from .registry import Change, transform


def _nothing_to_do() -> Change:
    """Say that there was nothing to do."""
    change = Change()
    change.skip("not-in-onnx")
    return change


@transform("remove_device")
def remove_device(model: ir.Model) -> Change:
    """Do nothing, and say so: an ONNX node names no device; the runtime's providers decide where it runs.

    Before:  y = Relu(x)
    After:   the same
    Left alone: everything (``not-in-onnx``).
    """
    return _nothing_to_do()


@transform("set_device")
def set_device(model: ir.Model, *, device: str = "", if_default: bool = False) -> Change:
    """Do nothing, and say so: an ONNX node names no device; the runtime's providers decide where it runs.

    Before:  y = Relu(x)
    After:   the same
    Left alone: everything (``not-in-onnx``).

    Options:
        device: A device; it is not used.
        if_default: Whether to spare nodes that have one; it is not used.
    """
    return _nothing_to_do()


@transform("remove_control_dependencies")
def remove_control_dependencies(model: ir.Model) -> Change:
    """Do nothing, and say so: ONNX nodes depend on each other by tensors alone.

    Before:  y = Relu(x)
    After:   the same
    Left alone: everything (``not-in-onnx``).
    """
    return _nothing_to_do()


@transform("sparsify_gather")
def sparsify_gather(model: ir.Model) -> Change:
    """Do nothing, and say so: ONNX has no hash tables that a Gather of mostly empty rows could become.

    Before:  y = Gather(W, i)
    After:   the same; ``quantize_weights`` makes the rows int8
    Left alone: everything (``not-in-onnx``).
    """
    return _nothing_to_do()


@transform("backport_concatv2")
def backport_concatv2(model: ir.Model) -> Change:
    """Do nothing, and say so: ONNX has one Concat; ``convert_opset`` changes the version of a model.

    Before:  y = Concat(a, b)
    After:   the same
    Left alone: everything (``not-in-onnx``).
    """
    return _nothing_to_do()


@transform("backport_tensor_array_v3")
def backport_tensor_array_v3(model: ir.Model) -> Change:
    """Do nothing, and say so: ONNX has no tensor arrays; its sequences are of one kind.

    Before:  y = SequenceAt(s, i)
    After:   the same
    Left alone: everything (``not-in-onnx``).
    """
    return _nothing_to_do()


@transform("fuse_resize_and_conv")
def fuse_resize_and_conv(model: ir.Model) -> Change:
    """Do nothing, and say so: ONNX has no operator that resizes and convolves.

    Before:  y = Conv(Resize(x, s), W)
    After:   the same; `fuse_pad_and_conv` fuses a Pad
    Left alone: everything (``not-in-onnx``).
    """
    return _nothing_to_do()

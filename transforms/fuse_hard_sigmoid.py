"""Fuse a clipped sum and its division into a HardSigmoid."""

from __future__ import annotations

from math import isclose

import numpy as np
import onnx_ir as ir

from .graph import computing_nodes, constant, remove, sole_reader, take_place
from .registry import Change, transform


@transform("fuse_hard_sigmoid", after=("fold_constants", "merge_clips"))
def fuse_hard_sigmoid(model: ir.Model) -> Change:
    """Replace a sum that is clipped and then divided by a HardSigmoid.

    Before:  y = Div(Clip(Add(x, 3), 0, 6), 6)
    After:   y = HardSigmoid(x), alpha 1/6, beta 1/2
        Any constant may be added. The upper bound must be equal to the divisor, or to the reciprocal of a factor. The
        exporters of PyTorch and PaddlePaddle write a hard-swish in this form; HardSigmoid and Mul have an integer form.
    Left alone: a lower bound that is not 0, or an upper bound that is not the divisor (``other-bounds``); an
        intermediate result with other readers (``read-between``); other types than float32.
    """
    change = Change()
    for clip in computing_nodes(model, "Clip"):
        add = clip.inputs[0].producer() if clip.inputs[0] is not None else None
        scale = sole_reader(clip.outputs[0])
        if add is None or add.op_type != "Add" or add.domain:
            continue
        shift = next((number for value in add.inputs if (number := _number(value)) is not None), None)
        if shift is None:
            continue
        if scale is None or sole_reader(add.outputs[0]) is not clip:
            change.skip("read-between")
            continue
        factor = _factor(scale)
        low, high = (_bound(clip, index, name) for index, name in ((1, "min"), (2, "max")))
        if factor is None:
            continue
        if low != 0 or high is None or high <= 0 or not isclose(high * factor, 1, rel_tol=1e-5):
            change.skip("other-bounds")
            continue
        source = next(value for value in add.inputs if constant(value) is None)
        attributes = {"alpha": factor, "beta": shift * factor}
        take_place(scale, ir.node("HardSigmoid", [source], attributes, name=scale.name))
        for node in (clip, add):
            remove(node)
        change.applied += 1
    return change


def _number(value: ir.Value | None) -> float | None:
    """Return a constant float32 scalar of rank 0, which cannot broadcast the other operand."""
    tensor = constant(value)
    if tensor is None or len(tensor.shape) or tensor.dtype is not ir.DataType.FLOAT:
        return None
    return float(np.asarray(tensor.numpy(), np.float64))


def _bound(clip: ir.Node, index: int, name: str) -> float | None:
    """Return a constant bound of a Clip, from the input or, in old opsets, the attribute."""
    if len(clip.inputs) == 1:
        return clip.attributes.get_float(name, None)
    return _number(clip.inputs[index]) if len(clip.inputs) > index else None


def _factor(node: ir.Node) -> float | None:
    """Return the constant by which a Mul or Div multiplies; None without one."""
    if node.domain or node.op_type not in ("Mul", "Div"):
        return None
    places = (1,) if node.op_type == "Div" else (0, 1)
    number = next((number for i in places if (number := _number(node.inputs[i])) is not None), None)
    return None if not number else 1 / number if node.op_type == "Div" else number

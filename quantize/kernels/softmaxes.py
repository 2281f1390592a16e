"""Put softmaxes over few classes into functions, which native operators compute."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import onnx_ir as ir

from ...transforms.graphs.queries import Shape, constant, is_standard, sole_reader
from ...transforms.int8.existing import is_linear
from .call import FLOATS, Call, Tensors
from .chains import is_uint8
from .put_calls import put_calls
from .site import X

MOST_CLASSES = 16
"""Of the last axis. The runtime computes longer rows in vectors too."""
FEWEST_BESIDE = 16
"""The fewest values behind another axis; they are computed together."""
BY_AXIS = 13
"""The first opset whose Softmax normalizes along its axis alone; before, it normalized over all axes from there on."""


def wrap_softmaxes(model: ir.Model, shapes: Mapping[str, Shape]) -> int:
    """Put softmaxes over few classes into functions; return how many.

    Before:  y = Softmax(x)
    After:   y = ai.requant.Softmax(x), whose body is what was there
        Both compute in float. The runtime computes one row after the other, and transposes a tensor for an axis that is
        not the last one. With x = DequantizeLinear(q, s, z) of a uint8 q, which nothing else reads, it is
        y = ai.requant.DequantizeSoftmax(q, s, z).
    Left alone: the last axis with more than 16 values, or of a length that is not known; another axis with fewer than
        16 values behind it, or in a model of an opset before 13; other types than float32; bodies of control flow.

    Args:
        model: A model.
        shapes: Shapes of the float tensors by name.
    """
    calls, by_axis = {}, model.opset_imports.get("", 0) >= BY_AXIS
    for node in model.graph:
        call = _call(node, shapes, by_axis=by_axis) if is_standard(node, "Softmax") else None
        if call is not None:
            calls[node.outputs[0]] = call
    return put_calls(model, calls)


def _call(node: ir.Node, shapes: Mapping[str, Shape], *, by_axis: bool) -> Call | None:
    """Return the call of the operator for a softmax; None for one that the runtime computes as fast.

    Args:
        node: A Softmax.
        shapes: Shapes of the float tensors by name.
        by_axis: Whether a Softmax normalizes along its axis alone, not over all axes from there on.
    """
    (x,), y = node.inputs, node.outputs[0]
    shape = shapes.get(str(y.name))  # x may come from a DequantizeLinear
    axis = node.attributes.get_int("axis", -1 if by_axis else 1)
    if not shape or x is None or x.dtype not in (None, ir.DataType.FLOAT) or not -len(shape) <= axis < len(shape):
        return None
    classes, behind = shape[axis], shape[axis % len(shape) + 1 :]
    if not behind and not (isinstance(classes, int) and classes <= MOST_CLASSES):
        return None
    beside = [length for length in behind if isinstance(length, int)]
    if behind and (not by_axis or (len(beside) == len(behind) and prod(beside) < FEWEST_BESIDE)):
        return None
    attributes, name = {"axis": ir.AttrInt64("axis", axis)}, str(node.name)
    dq = x.producer()
    if dq is None or not _only_for(dq, node):
        return Call("Softmax", name, ("x",), [x], [node], attributes, tensors=FLOATS)
    return Call(
        "DequantizeSoftmax", name, X, dq.inputs, [dq, node], attributes, tensors=Tensors(made=ir.DataType.FLOAT)
    )


def _only_for(dq: ir.Node, node: ir.Node) -> bool:
    """Whether a node dequantizes a uint8 tensor by one scale for another node alone."""
    if not is_linear(dq, "DequantizeLinear") or len(dq.inputs) != len(X) or sole_reader(dq.outputs[0]) is not node:
        return False
    data, scale = dq.inputs[0], constant(dq.inputs[1])
    return data is not None and constant(data) is None and is_uint8(dq, 2) and scale is not None and scale.size == 1

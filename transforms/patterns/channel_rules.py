"""A table of operators with rules for the channel scales of their inputs and outputs: equal, free, or 1.

The inputs and outputs of a Relu, a pooling or a sum have equal scales. The scales before and after a convolution or a
product with constant weights are free, because the weights compensate for both. For any other operator the scales are
1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import onnx_ir as ir

from ..graphs.queries import MS, constant
from ..registry import LeftAlone
from .channel_scales import Fold, Look, first, floats
from .elementwise import clip_bounds

Free: TypeAlias = tuple[int, ...]
"""The indices of a node's inputs whose scales may differ from 1."""
Rule: TypeAlias = Callable[[Look, ir.Node], Free]


def _weight_rank(node: ir.Node, least: int, most: int = 9) -> int:
    """Return the rank of the constant second input; raise LeftAlone if it is not within the bounds."""
    tensor = floats(first(node, 1))
    if tensor is None:
        raise LeftAlone("weight-not-constant")
    if not least <= len(tensor.shape) <= most:
        raise LeftAlone("weight-of-another-rank")
    return len(tensor.shape)


def _pass(look: Look, node: ir.Node) -> Free:
    look.join(node, first(node))
    return (0,)


def _clip(look: Look, node: ir.Node) -> Free:
    bounds = clip_bounds(node)
    if bounds is None or bounds[0] not in (0.0, -math.inf):
        raise LeftAlone("clip-not-at-zero")
    if bounds[1] < math.inf:
        look.ceilings.append((node.outputs[0], bounds[1]))
    return _pass(look, node)


def _conv(look: Look, node: ir.Node) -> Free:
    rank, split = _weight_rank(node, 3), node.attributes.get_int("group", 1)
    inner, outer = (
        ((1, 1 - rank), split),
        ((1, -rank), 1),
    )  # weights (M, C/group, *kernel); for a ConvTranspose (C, M/group, *kernel)
    read, written = (outer, inner) if node.op_type == "ConvTranspose" else (inner, outer)
    look.reads(node, 1 - rank, *read)
    look.writes(node, 1 - rank, *written)
    look.adds(node, 2, -1)
    return (0,)


def _gemm(look: Look, node: ir.Node) -> Free:
    _weight_rank(node, 2, 2)
    if node.attributes.get_int("transA", 0):
        raise LeftAlone("channels-on-another-axis")
    k, n = (-1, -2) if node.attributes.get_int("transB", 0) else (-2, -1)
    look.reads(node, -1, (1, k))
    look.writes(node, -1, (1, n))
    look.adds(node, 2, -1)
    return (0,)


def _matmul(look: Look, node: ir.Node) -> Free:
    if constant(node.inputs[1]) is not None:
        _weight_rank(node, 2)
        look.reads(node, -1, (1, -2))
        look.writes(node, -1, (1, -1))
        return (0,)
    if look.axis_of(first(node, 1)) != -1:  # a product sums over the rows of the second factor; its columns remain
        raise LeftAlone("channels-on-another-axis")
    look.join(node, first(node, 1))
    return (1,)


def _add(look: Look, node: ir.Node) -> Free:
    constants = [index for index in (0, 1) if constant(node.inputs[index]) is not None]
    if constants:
        source = first(node, 1 - constants[0])
        look.join(node, source)
        look.adds(node, constants[0], look.axis_of(source))
        return (1 - constants[0],)
    left, right = first(node), first(node, 1)
    if look.axis_of(left) != look.axis_of(right):
        raise LeftAlone("channels-on-another-axis")
    look.join(node, left)
    look.join(node, right)
    return (0, 1)


def _mul(look: Look, node: ir.Node) -> Free:
    constants = [index for index in (0, 1) if constant(node.inputs[index]) is not None]
    if constants:
        return _mul_constant(look, node, 1 - constants[0], constants[0])
    sides = [index for index in (0, 1) if first(node, index) in look.axis]
    free = [index for index in sides if not look.is_pinned(first(node, index))]
    if not sides:
        raise LeftAlone("channels-unknown")
    chosen = (free or sides)[0]  # the result has the scale of one factor; the scale of the other factor is 1
    look.join(node, first(node, chosen))
    return (chosen,)


def _mul_constant(look: Look, node: ir.Node, data: int, other: int) -> Free:
    """With a factor per channel both scales are free; with a single factor they are equal."""
    source, shape = first(node, data), look.shape(node.inputs[other])
    wide = [axis - len(shape) for axis, length in enumerate(shape) if length != 1]
    if len(wide) != 1 or floats(node.inputs[other]) is None or look.axis.get(source, wide[0]) != wide[0]:
        look.join(node, source)
        return (data,)
    look.fold(source, Fold(node, other, wide[0], 1, "reader", str(source.name)))
    look.writes(node, wide[0], (other, wide[0]))
    return (data,)


def _div(look: Look, node: ir.Node) -> Free:
    if constant(node.inputs[1]) is None:
        raise LeftAlone("next-to-Div")
    return _pass(look, node)


def _batch_norm(look: Look, node: ir.Node) -> Free:
    training = node.attributes.get_int("training_mode", 0) or len([value for value in node.outputs if value.name]) > 1
    if training or node.attributes.get_int("spatial", 1) == 0:
        raise LeftAlone("statistics-of-the-batch")
    if any(floats(value) is None for value in node.inputs[1:5]):
        raise LeftAlone("weight-not-constant")
    axis = 1 - len(look.shape(first(node)))
    look.reads(node, axis, (1, -1))  # gamma * s * (x / s - mean / s) is gamma * (x - mean)
    look.fold(first(node), Fold(node, 3, -1, -1, "between", str(first(node).name)))
    look.writes(node, axis, (1, -1))
    look.adds(node, 2, -1)
    return (0,)


def _norm(scale: int, bias: int | None, *, channels_first: bool = False) -> Rule:
    """Return the rule of a normalization: the scale of the output is free, the scale of the input is 1."""

    def rule(look: Look, node: ir.Node) -> Free:
        weight = floats(first(node, scale))
        if weight is None or len(weight.shape) != 1:
            raise LeftAlone("weight-not-constant")
        rank = len(look.shape(first(node))) if channels_first or node.attributes.get_int("axis", -1) != -1 else 0
        if not channels_first and node.attributes.get_int("axis", -1) not in (-1, rank - 1):
            raise LeftAlone("channels-on-another-axis")
        look.writes(node, 1 - rank if channels_first else -1, (scale, -1))
        if bias is not None:
            look.adds(node, bias, -1)
        return ()

    return rule


def _transpose(look: Look, node: ir.Node) -> Free:
    axis, perm = look.axis_of(first(node)), node.attributes.get_ints("perm", None)
    if perm is None:
        raise LeftAlone("channels-on-another-axis")
    look.join(node, first(node), list(perm).index(len(perm) + axis) - len(perm))
    return (0,)


def _flatten(look: Look, node: ir.Node) -> Free:
    """A Flatten, Reshape or Squeeze of (N, C, 1, ...) to (N, C)."""
    axis, shape, after = look.axis_of(first(node)), look.shape(first(node)), look.shape(node.outputs[0])
    if axis != 1 - len(shape) or any(length != 1 for length in shape[2:]) or len(after) != 2 or after[1] != shape[1]:
        raise LeftAlone("channels-reshaped")
    look.join(node, first(node), -1)
    return (0,)


def _gather(look: Look, node: ir.Node) -> Free:
    axis, shape, picked = look.axis_of(first(node)), look.shape(first(node)), look.shape(first(node, 1))
    at = node.attributes.get_int("axis", 0) % len(shape) - len(shape)
    if at == axis:
        raise LeftAlone("channels-reshaped")
    look.join(node, first(node), axis if at < axis else axis - len(picked) + 1)
    return (0, 1)


def _resize(look: Look, node: ir.Node) -> Free:
    axis = look.axis_of(first(node))
    before, after = look.shape(first(node))[axis], look.shape(node.outputs[0])[axis]
    where = node.attributes.get("coordinate_transformation_mode")
    if before is None or before != after or (where is not None and where.as_string() == "tf_crop_and_resize"):
        raise LeftAlone("channels-reshaped")
    return _pass(look, node)


def _shape_of(look: Look, node: ir.Node) -> Free:
    return (0,)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Identity", "Dropout", "Relu", "LeakyRelu", "PRelu", "Abs", "Neg"), _pass),
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"), _pass),
    **dict.fromkeys(("Conv", "ConvTranspose"), _conv),
    **dict.fromkeys(("Add", "Sub"), _add),
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze"), _flatten),
    **dict.fromkeys(("Shape", "Size"), _shape_of),
    "Clip": _clip,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Mul": _mul,
    "Div": _div,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _norm(1, 2, channels_first=True),
    "LayerNormalization": _norm(1, 2),
    "RMSNormalization": _norm(1, None),
    "SimplifiedLayerNormalization": _norm(1, None),
    f"{MS}.SkipLayerNormalization": _norm(2, 3),
    f"{MS}.SkipSimplifiedLayerNormalization": _norm(2, None),
    "Transpose": _transpose,
    "Gather": _gather,
    "Resize": _resize,
}
"""The rule of each operator; for an operator without a row all scales are 1."""

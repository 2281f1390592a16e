"""Find normalizations of images by groups of channels: instance and group norms, in one operator or in several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ..graphs.queries import Shape, constant, is_standard, made_by, sole_reader
from .norms_in_parts import behind, of_each_place

IMAGE, CHANNELS = 4, 1  # axes of an image, and that of the channels
GROUPED = 3  # axes of a tensor of groups
EPSILON = 1e-5  # of both operators, if they do not say
INSTANCE = "InstanceNormalization"
OPERATORS = frozenset({INSTANCE, "GroupNormalization"})


@dataclass(frozen=True, eq=False)
class GroupNorm:
    """What a normalization computes: ``y = (x - mean) / sqrt(variance + epsilon) * scale + shift``.

    Attributes:
        groups: How many groups of neighbouring channels have a mean and a variance of their own.
        epsilon: What is added to the variance; above 0.
        scale: The factor of each channel, float32 (C,).
        shift: The summand of each channel, float32 (C,).
    """

    groups: int
    epsilon: float
    scale: NDArray[np.float32]
    shift: NDArray[np.float32]


def find_group_norm(node: ir.Node, shapes: Mapping[str, Shape]) -> list[ir.Node]:
    """Return the nodes of the normalization of an image whose operator this is, in order; none if it is another.

    The image has four axes, and the number of its channels is known; sequences become images with one row before
    (`lift_sequence_convs`). Before opset 21 a group norm is::

        Reshape(x, (N, groups, -1)); InstanceNormalization; Reshape(., the shape of x); Mul(., scale); Add(., shift)

    A Mul and an Add behind the operator or the Reshape belong to it. The tensors between them have no other readers.

    Args:
        node: A node.
        shapes: Shapes of the float tensors by name.
    """
    if node.op_type not in OPERATORS or node.domain or not node.inputs:
        return []
    shape, front, nodes = _shape(node.outputs[0], shapes), made_by(node.inputs[0], "Reshape"), [node]
    if len(shape) == GROUPED and node.op_type == INSTANCE and front is not None:
        nodes = _regrouped(front, node, shapes) if sole_reader(front.outputs[0]) is node else []
        shape = _shape(front.inputs[0], shapes) if nodes else ()
    channels = shape[CHANNELS] if len(shape) == IMAGE else None
    if not isinstance(channels, int):
        return []
    gain = of_each_place(nodes[-1], "Mul", CHANNELS, shape)
    shift = of_each_place(nodes[-1] if gain is None else gain[0], "Add", CHANNELS, shape)
    nodes += [step[0] for step in (gain, shift) if step is not None]
    return nodes if group_norm_of(nodes, channels) is not None else []


def _shape(value: ir.Value | None, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of a tensor; empty without one."""
    return () if value is None else shapes.get(str(value.name), ())


def _regrouped(front: ir.Node, norm: ir.Node, shapes: Mapping[str, Shape]) -> list[ir.Node]:
    """Return the Reshape to groups, the operator and the Reshape back; nothing if they have another form."""
    back = behind(norm, ("Reshape",), place=0)
    image, grouped = (_shape(value, shapes) for value in (front.inputs[0], front.outputs[0]))
    result = _shape(back[0].outputs[0], shapes) if back else ()
    if len(image) != IMAGE or len(result) != IMAGE or not _keeps_batch(front, image, grouped):
        return []
    channels, groups = image[CHANNELS], grouped[1]
    whole = isinstance(channels, int) and isinstance(groups, int) and channels % groups == 0
    alike = [length is not None and length == result[axis] for axis, length in enumerate(image) if axis]
    if whole and (all(alike) or _restores(back[0], front.inputs[0], (image, grouped, result))):
        return [front, norm, *back]
    return []


def _restores(back: ir.Node, image: ir.Value | None, shapes: tuple[Shape, Shape, Shape]) -> bool:
    """Whether a Reshape of groups gives an image its shape again, where its lengths are not all known.

    Args:
        back: The Reshape.
        image: The image.
        shapes: Those of the image, the groups and the result of the Reshape.
    """
    target = made_by(back.inputs[1], "Shape")
    if is_standard(target, "Shape") and target.inputs[0] is image and not target.attributes:
        return True
    before, grouped, after = shapes
    pairs = list(zip(before, after, strict=True))[1:]
    others = [pair for pair in pairs if pair[0] is None or pair[0] != pair[1]]
    unknown = not any(isinstance(one, int) and isinstance(other, int) for one, other in others)
    return len(others) == 1 and unknown and _keeps_batch(back, grouped, after)  # all other lengths tell the last one


def _keeps_batch(front: ir.Node, image: Shape, grouped: Shape) -> bool:
    """Whether a Reshape of an image to groups, or of groups to an image, keeps the first axis."""
    if isinstance(image[0], int) and isinstance(grouped[0], int):
        return image[0] == grouped[0]
    target = constant(front.inputs[1])
    return target is not None and target.numpy().tolist()[:2] == [0, grouped[1]]


def group_norm_of(nodes: Sequence[ir.Node], channels: int) -> GroupNorm | None:
    """Return what the nodes of a normalization compute; None if a number is computed or of another formula.

    Args:
        nodes: The nodes that `find_group_norm` returns, and others behind them.
        channels: The number of channels of the image.
    """
    norm = next(node for node in nodes if node.op_type in OPERATORS)
    operands = {node: _operands(node) for node in nodes if node is norm or node.op_type in ("Mul", "Add")}
    own = operands.pop(norm)
    if len(own) != 2 or any(len(found) != 1 for found in operands.values()):
        return None
    each_channel = norm is nodes[0] and "num_groups" not in norm.attributes
    groups = channels if each_channel else norm.attributes.get_int("num_groups", own[0].size)
    epsilon = norm.attributes.get_float("epsilon", EPSILON)
    if not {own[0].size, own[1].size} <= {groups, channels} or channels % groups or not epsilon > 0:
        return None
    scale, shift = (np.repeat(each, channels // each.size) for each in own)
    for node, (operand,) in operands.items():
        scale, shift = (scale * operand, shift * operand) if node.op_type == "Mul" else (scale, shift + operand)
    return GroupNorm(groups, epsilon, scale, shift)


def _operands(node: ir.Node) -> list[NDArray[np.float32]]:
    """Return the constants that a node reads, of finite float32 values, each as one axis."""
    tensors = [tensor for value in node.inputs if (tensor := constant(value)) is not None]
    values = [tensor.numpy().reshape(-1) for tensor in tensors if tensor.dtype is ir.DataType.FLOAT and tensor.size]
    return [each for each in values if np.isfinite(each).all()]

"""Convolutions whose channels have a free scale and shift, because a normalization of each channel takes them out.

An instance norm, or a group norm with a group for each channel, computes ``(x - mean) / sqrt(variance + epsilon)`` of
each channel. With ``k (x - d)`` in place of x the result is the same, but for epsilon, which becomes epsilon / k^2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from ..graphs.inference import inferred
from ..graphs.queries import Shape, constant, graph_of, is_standard, made_by, plain_shape, sole_reader
from ..graphs.rewriter import derive_initializer, discard, unused_name
from ..patterns.channel_rules import RULES
from ..patterns.channel_scales import Floats, Fold, Look, floats
from ..patterns.group_norms import EPSILON, INSTANCE, OPERATORS, find_group_norm, group_norm_of
from ..registry import LeftAlone
from .equalize import Group, scale_group

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
MOVING = frozenset({"MaxPool"})
"""Operators that commute with a positive factor and with a summand of each channel."""
SCALING = frozenset({"Relu", "LeakyRelu", "PRelu", "AveragePool"})
"""Operators that commute with a positive factor of each channel."""


@dataclass(frozen=True, eq=False)
class NormedChannels:
    """The channels of a convolution that only a normalization of each channel reads.

    Attributes:
        normed: What the normalization reads, of shape (N, C, ...).
        epsilon: What the normalization adds to the variance.
        produced: The weights and the bias of the convolution, as a group of tensors up to `normed`.
        gain: The factors of the normalization, as a group with its result.
        shifts: Whether a summand of each channel is free too: the convolution has a bias, and the operators behind it
            only move values.
    """

    normed: ir.Value
    epsilon: float
    produced: Group
    gain: Group
    shifts: bool

    @property
    def conv(self) -> ir.Node:
        """The convolution."""
        return self.produced.folds[0].node


def find_normed(model: ir.Model) -> list[NormedChannels]:
    """Return the convolutions of the main graph whose channels have a free scale, in order of execution.

    Between the convolution and the normalization Relu, LeakyRelu, PRelu and poolings are possible. The tensors between
    them have no other readers and are no outputs of the graph. Weights, bias and factors are constants.
    """
    norms = [node for node in model.graph if is_standard(node, *OPERATORS)]
    known = inferred(model) if norms else {}
    shapes = {name: shape for name, value in known.items() if (shape := plain_shape(value)) is not None}
    found = [_normed(node, known, shapes) for node in norms]
    return [each for each in found if each is not None]


def scale_normed(found: NormedChannels, factor: Floats, shift: Floats, gain: Floats, taken: set[str]) -> bool:
    """Scale and shift channels in front of a normalization, in place; return whether the constants stay finite.

    Before:  x = Conv(z, V, a);  y = InstanceNormalization(x, g, b)
    After:   x = Conv(z, k V, k (a - d));  y = InstanceNormalization(x, f g, b)

    Args:
        found: The channels.
        factor: k, positive, of shape (C,).
        shift: d, of shape (C,), in units of x before; 0 unless `NormedChannels.shifts`.
        gain: f, positive, of shape (C,); it makes up for epsilon.
        taken: The names in use, from `names`; new ones are added.
    """
    if not scale_group(found.produced, 1 / factor, taken):
        return False
    if shift.any():
        _add_to_bias(found.conv, -factor * shift, taken)
    return scale_group(found.gain, 1 / gain, taken)


def _add_to_bias(conv: ir.Node, summand: Floats, taken: set[str]) -> None:
    """Add to the constant bias of a convolution, (C,); other readers keep the old bias."""
    old = conv.inputs[2]
    tensor = constant(old)
    assert old is not None and tensor is not None  # a convolution with `shifts` has a constant bias
    name = unused_name(taken, f"{old.name}_centred")
    moved = derive_initializer(graph_of(conv), name, tensor, partial(np.add, summand), tensor.shape.numpy())
    conv.replace_input_with(2, moved)
    discard(old)


def _normed(norm: ir.Node, known: Mapping[str, ir.Value], shapes: Mapping[str, Shape]) -> NormedChannels | None:
    """Return the channels that a normalization reads; None if they have no free scale."""
    gain = floats(norm.inputs[1])
    channels = 0 if gain is None else int(np.prod(gain.shape.numpy()))
    normed = _read_by(norm, channels, shapes) if channels else None
    path = None if normed is None else _path(normed)
    if normed is None or path is None:
        return None
    conv, *passed = path
    look = Look(known)
    try:
        RULES[conv.op_type](look, conv)
    except LeftAlone:
        return None
    folds = tuple(fold for _, fold in look.folds if fold.role != "reader")
    if {length for value, length in look.lengths if value is conv.outputs[0]} != {channels}:
        return None
    axes = {str(node.outputs[0].name): look.axis[conv.outputs[0]] for node in path}
    result = str(norm.outputs[0].name)
    factors = Fold(norm, 1, -1, -1, "producer", result)
    biased = any(fold.index == 2 for fold in folds)  # weights come first
    return NormedChannels(
        normed,
        norm.attributes.get_float("epsilon", EPSILON),
        Group(str(conv.outputs[0].name), channels, axes, folds, tuple(passed)),
        Group(result, channels, {result: 1}, (factors,), ()),
        biased and all(node.op_type in MOVING for node in passed),
    )


def _read_by(norm: ir.Node, channels: int, shapes: Mapping[str, Shape]) -> ir.Value | None:
    """Return the tensor (N, C, ...) whose channels a normalization takes one by one; None for other normalizations.

    Args:
        norm: The normalization.
        channels: The number of its factors.
        shapes: Shapes of the float tensors by name.
    """
    if norm.op_type != INSTANCE or made_by(norm.inputs[0], "Reshape") is None:
        groups = norm.attributes.get_int("num_groups", channels)
        return norm.inputs[0] if groups == channels else None
    nodes = find_group_norm(norm, shapes)
    image = nodes[0].inputs[0] if nodes else None
    whole = (shapes.get(str(image.name)) or ()) if image is not None else ()
    if len(whole) < 2 or whole[1] != channels:  # the scales are those of larger groups
        return None
    known = group_norm_of(nodes, channels)
    return image if known is not None and known.groups == channels else None


def _path(normed: ir.Value) -> list[ir.Node] | None:
    """Return the convolution and the operators up to a tensor, each with one reader; None without a convolution."""
    path: list[ir.Node] = []
    value: ir.Value | None = normed
    while value is not None and sole_reader(value) is not None:
        node = value.producer()
        if node is None or node.domain or node.op_type not in MOVING | SCALING | CONVOLUTIONS:
            return None
        path.append(node)
        if node.op_type in CONVOLUTIONS:
            return path[::-1]
        value = node.inputs[0]
    return None

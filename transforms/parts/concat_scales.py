"""The channels of a Concat with a scale each, where the weights behind it take the scales out again.

In uint8 the result of a Concat has one step, and a part whose range is narrow has few steps of it. With a factor for
each channel in front of the Concat, and the weights that read the channel divided by it, all parts have similar
ranges. If each factor is a power of two, even the rounding of the float model is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graphs.inference import inferred
from ..graphs.queries import graph_of, is_float32, is_standard, node_name
from ..graphs.rewriter import add_initializer, insert_before, unused_name
from ..patterns.channel_rules import RULES
from ..patterns.channel_scales import Floats, Look
from ..patterns.linear import LINEAR, SCALE_FREE
from ..registry import LeftAlone
from .equalize import Group, scale_group

PASSED = SCALE_FREE | {"Identity", "Resize", "Transpose"}
"""Operators behind a Concat that a factor of a channel goes through."""
PART = "/part"
"""What is between the name of a Concat and the index of a part in the name of the operator that scales the part."""


@dataclass(frozen=True, eq=False)
class JoinedParts:
    """A Concat of channels that only linear operators with constant weights read.

    Attributes:
        node: The Concat.
        lengths: The number of channels of each part.
        readers: The result and what has its scale, with the weights that undo the scale of its channels.
    """

    node: ir.Node
    lengths: tuple[int, ...]
    readers: Group

    @property
    def tensor(self) -> str:
        """The name of the result."""
        return str(self.node.outputs[0].name)

    def split(self, channels: Floats) -> list[Floats]:
        """Return the values of the channels of each part, of those of all channels, (C,)."""
        return np.split(channels, np.cumsum(self.lengths)[:-1])


def find_joined(model: ir.Model) -> list[JoinedParts]:
    """Return the Concats of the main graph whose parts have a free scale each, in order of execution.

    Behind it may be operators of `PASSED`. All that reads it, directly or behind these, is a Conv, a ConvTranspose of
    one group, a Gemm or a MatMul with constant weights. The number of channels of at most one
    part is unknown.
    """
    concats = [node for node in model.graph if is_standard(node, "Concat") and len(node.inputs) > 1]
    known = inferred(model) if concats else {}
    found = []
    for node in concats:
        try:
            found.append(_joined(node, Look(known)))
        except LeftAlone:
            continue
    return found


def scale_parts(joined: JoinedParts, factors: Floats, taken: set[str]) -> bool:
    """Scale the channels of a Concat in front of it, in place; return whether the weights stay finite.

    Before:  y = Conv(Concat(a, b), W)
    After:   y = Conv(Concat(a, Mul(b, f)), W'),  W' = W with the weights of the channels of b divided by f
        A part whose factors are 1 is read as it is.

    Args:
        joined: The Concat.
        factors: The factor of each channel, positive, (C,).
        taken: The names in use, from `names`; new ones are added.
    """
    if not scale_group(joined.readers, 1 / factors, taken):
        return False
    for index, own in enumerate(joined.split(factors)):
        if (own != 1).any():
            _scale_part(joined, index, own, taken)
    return True


def _scale_part(joined: JoinedParts, index: int, factors: Floats, taken: set[str]) -> None:
    """Insert a Mul in front of a Concat: with one number if all factors of the part are equal."""
    node = joined.node
    part, stem = node.inputs[index], f"{node_name(node)}{PART}{index}"
    assert part is not None  # a Concat has no empty inputs
    behind = [1] * (-joined.readers.tensors[joined.tensor] - 1)
    array = factors.reshape(-1, *behind) if (factors != factors[0]).any() else factors[0]
    value = add_initializer(graph_of(node), unused_name(taken, f"{stem}/factor"), np.asarray(array, np.float32))
    scaled = insert_before(node, taken, "Mul", [part, value], stem=stem)
    scaled.type, scaled.shape = part.type, part.shape
    node.replace_input_with(index, scaled)


def scales_part(name: str, names: Collection[str]) -> bool:
    """Whether an operator of this name scales a part of a Concat that has one of the other names."""
    concat, mark, index = name.rpartition(PART)
    return bool(mark) and index.isdigit() and concat in names


def _joined(node: ir.Node, look: Look) -> JoinedParts:
    """Return the parts of a Concat.

    Raises:
        LeftAlone: Their scales are not free.
    """
    result = node.outputs[0]
    if not is_float32(look.known.get(str(result.name))):
        raise LeftAlone("not-float32")
    shape = look.shape(result)
    axis = node.attributes.get_int("axis", 0) % len(shape) - len(shape)
    look.axis[result] = axis
    _follow(look, result)
    folds = tuple(fold for _, fold in look.folds)
    if not folds:
        raise LeftAlone("no-reader")
    lengths = _lengths([look.shape(value)[axis] for value in node.inputs], {length for _, length in look.lengths})
    axes = {str(value.name): each for value, each in look.axis.items()}
    passed = tuple(each for _, each in look.passed)
    return JoinedParts(node, lengths, Group(str(result.name), sum(lengths), axes, folds, passed))


def _lengths(lengths: Sequence[int | None], totals: set[int]) -> tuple[int, ...]:
    """Return the number of channels of each part; the readers' weights tell one that is unknown.

    Raises:
        LeftAlone: More are unknown, or the weights are for another number.
    """
    rest = max(totals) - sum(length or 0 for length in lengths)
    whole = tuple(rest if length is None else length for length in lengths)
    if len(totals) != 1 or min(whole) < 1 or sum(whole) not in totals:
        raise LeftAlone("channels-differ")
    return whole


def _follow(look: Look, value: ir.Value) -> None:
    """Record the weights behind a tensor that undo the scale of its channels.

    Raises:
        LeftAlone: Something else reads the tensor.
    """
    if value.is_graph_output():
        raise LeftAlone("graph-output")
    for node, index in value.uses():
        if node.op_type in ("Shape", "Size") and not node.domain:
            continue
        if node.domain or index or node.graph is not value.graph or [*node.inputs].count(value) > 1:
            raise LeftAlone(f"read-by-{node.op_type}")
        if node.op_type in LINEAR:
            inner = Look(look.known)
            inner.axis[value] = look.axis[value]
            RULES[node.op_type](inner, node)
            if inner.pinned:
                raise LeftAlone("channels-on-another-axis")
            look.folds += [(each, fold) for each, fold in inner.folds if fold.role == "reader"]
            look.lengths += [(each, length) for each, length in inner.lengths if each is value]
        elif node.op_type in PASSED:
            RULES[node.op_type](look, node)
            _follow(look, node.outputs[0])
        else:
            raise LeftAlone(f"read-by-{node.op_type}")

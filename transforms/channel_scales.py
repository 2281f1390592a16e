"""Scales of channels as unknowns: which tensors share one, which constants take it up, and where it must be 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .graph import constant
from .registry import LeftAlone

Floats = npt.NDArray[np.float64]
Role = Literal["producer", "reader", "between"]


@dataclass(frozen=True, slots=True)
class Fold:
    """A constant that takes up the scale of a tensor.

    Attributes:
        node: Who reads the constant.
        index: As which input.
        axis: Along which axis of the constant the channels lie, counted from the end; where it is too short or has
            length 1 there, it is broadcast.
        power: 1 where it is multiplied by the scale, -1 where it is divided.
        role: Whether its node writes the channels, undoes their scale, or adds to them.
        tensor: The tensor that its node reads, or writes.
        groups: Groups of a convolution, where channel ``g * length + i`` is at ``i`` of group ``g`` of the first axis.
    """

    node: ir.Node
    index: int
    axis: int
    power: int
    role: Role
    tensor: str
    groups: int = 1

    def factor(self, scale: Floats) -> Floats:
        """Return by what the constant is multiplied, in a shape that broadcasts with it."""
        factors = scale.astype(np.float64) ** self.power
        if self.groups > 1:
            tensor = constant(self.node.inputs[self.index])
            assert tensor is not None  # it is a fold
            factors = np.repeat(factors.reshape(self.groups, -1), tensor.shape.numpy()[0] // self.groups, axis=0)
        return factors.reshape(*factors.shape, *[1] * (-self.axis - 1))


@dataclass
class Look:
    """What the nodes so far have said.

    Attributes:
        known: Values with shapes, by name.
        parent: The union-find forest of tensors that share a scale.
        axis: The channel axis of each tensor that has one, counted from the end.
        pinned: Why the scale of a root is 1.
        folds: The constants at each tensor.
        lengths: Numbers of channels that constants show at each tensor.
        passed: Nodes that pass a tensor's channels on.
        ceilings: Upper bounds of Clip nodes at each tensor.
    """

    known: Mapping[str, ir.Value]
    parent: dict[ir.Value, ir.Value] = field(default_factory=dict)
    axis: dict[ir.Value, int] = field(default_factory=dict)
    pinned: dict[ir.Value, str] = field(default_factory=dict)
    folds: list[tuple[ir.Value, Fold]] = field(default_factory=list)
    lengths: list[tuple[ir.Value, int]] = field(default_factory=list)
    passed: list[tuple[ir.Value, ir.Node]] = field(default_factory=list)
    ceilings: list[tuple[ir.Value, float]] = field(default_factory=list)

    def root(self, value: ir.Value) -> ir.Value:
        """Return the tensor that stands for all that share a scale with `value`."""
        while (parent := self.parent.get(value, value)) is not value:
            value = parent
        return value

    def pin(self, value: ir.Value, reason: str) -> None:
        """Let the scale be 1."""
        self.pinned.setdefault(self.root(value), reason)

    def is_pinned(self, value: ir.Value) -> bool:
        """Whether the scale is 1 by what was seen so far."""
        return self.root(value) in self.pinned

    def join(self, node: ir.Node, source: ir.Value, axis: int | None = None) -> None:
        """Let the first output of `node` have the scale of `source`, along `axis` when that is another one."""
        output = node.outputs[0]
        axis = self.axis_of(source) if axis is None else axis
        if self.axis.setdefault(output, axis) != axis:
            raise LeftAlone("channels-on-another-axis")
        first, second = self.root(source), self.root(output)
        if first is not second:
            self.parent[second] = first
            if second in self.pinned:
                self.pinned.setdefault(first, self.pinned[second])
        self.passed.append((source, node))

    def axis_of(self, value: ir.Value) -> int:
        """Return the channel axis of a tensor."""
        if value not in self.axis:
            raise LeftAlone(self.pinned.get(self.root(value), "channels-unknown"))
        return self.axis[value]

    def reads(self, node: ir.Node, axis: int, weight: tuple[int, int], groups: int = 1) -> None:
        """Let a constant, given as input and axis, undo the scale of the first input, whose channels lie at `axis`."""
        value = first(node)
        if self.axis.get(value, axis) != axis:
            self.pin(value, "channels-on-another-axis")
        self.fold(value, Fold(node, *weight, 1, "reader", str(value.name), groups))

    def writes(self, node: ir.Node, axis: int, weight: tuple[int, int], groups: int = 1) -> None:
        """Let a constant, given as input and axis, divide the first output, whose channels lie at `axis`."""
        output = node.outputs[0]
        self.axis[output] = axis
        self.fold(output, Fold(node, *weight, -1, "producer", str(output.name), groups))

    def adds(self, node: ir.Node, index: int, axis: int) -> None:
        """Divide what `node` adds to the channels of its first output, if it does."""
        if index >= len(node.inputs) or node.inputs[index] is None:
            return
        if floats(node.inputs[index]) is None:
            raise LeftAlone("bias-not-constant")
        output = node.outputs[0]
        self.fold(output, Fold(node, index, axis, -1, "between", str(output.name)))

    def fold(self, value: ir.Value, fold: Fold) -> None:
        """Take down a constant, and what it shows of the number of channels."""
        shape = self.shape(fold.node.inputs[fold.index])
        length = shape[fold.axis] if len(shape) >= -fold.axis else 1
        if length is not None and (fold.role != "between" or length != 1):
            self.lengths.append((value, length * fold.groups))
        self.folds.append((value, fold))

    def shape(self, value: ir.Value | None) -> tuple[int | None, ...]:
        """Return the lengths of a tensor as far as they are known."""
        tensor = constant(value)
        known = self.known.get((value.name if value is not None else None) or "", value)
        shape = tensor.shape if tensor is not None else known.shape if known is not None else None
        if shape is None:
            raise LeftAlone("shape-unknown")
        return tuple(length if isinstance(length, int) else None for length in shape)


def floats(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return a constant of floats."""
    tensor = constant(value)
    return tensor if tensor is not None and tensor.dtype.is_floating_point() else None


def first(node: ir.Node, index: int = 0) -> ir.Value:
    """Return an input that an operator cannot do without."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        raise LeftAlone("input-missing")
    return value

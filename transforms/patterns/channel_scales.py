"""Channel scales as unknowns: which tensors share a scale, which constants absorb it, and where it must be 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..graphs.queries import constant
from ..registry import LeftAlone

Floats = npt.NDArray[np.float64]
Role = Literal["producer", "reader", "between"]


@dataclass(frozen=True, slots=True)
class Fold:
    """A constant that absorbs the scale of a tensor.

    Attributes:
        node: The node that reads the constant.
        index: The input of the node.
        axis: The channel axis of the constant, counted from the end. A constant without this axis, or with length 1,
            is broadcast.
        power: 1 to multiply the constant by the scale, -1 to divide it.
        role: ``"producer"`` if the node writes the channels, ``"reader"`` if it undoes their scale, ``"between"`` if it
            adds to them.
        tensor: The scaled tensor, which the node reads or writes.
        groups: The groups of a convolution: channel ``g * length + i`` is at index i of group g of the first axis.
    """

    node: ir.Node
    index: int
    axis: int
    power: int
    role: Role
    tensor: str
    groups: int = 1

    def factor(self, scale: Floats) -> Floats:
        """Return the factor of the constant, in a shape that broadcasts with the constant."""
        factors = scale.astype(np.float64) ** self.power
        if self.groups > 1:
            tensor = constant(self.node.inputs[self.index])
            assert tensor is not None  # a fold is a constant
            factors = np.repeat(factors.reshape(self.groups, -1), tensor.shape.numpy()[0] // self.groups, axis=0)
        return factors.reshape(*factors.shape, *[1] * (-self.axis - 1))


@dataclass
class Look:
    """The constraints on channel scales from the nodes visited so far.

    Attributes:
        known: The values of the graph with inferred shapes, by name.
        parent: The union-find forest of tensors that share a scale.
        axis: The channel axis of tensors, counted from the end.
        pinned: The reason why the scale of a root is 1.
        folds: Tensors with the constants that absorb their scale.
        lengths: Tensors with the numbers of channels that their constants have.
        passed: Tensors with the nodes whose output has the same scale.
        ceilings: Tensors with the upper bounds of Clip nodes.
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
        """Return the root of the tensors that share a scale with `value`."""
        while (parent := self.parent.get(value, value)) is not value:
            value = parent
        return value

    def pin(self, value: ir.Value, reason: str) -> None:
        """Set the scale to 1, for a reason."""
        self.pinned.setdefault(self.root(value), reason)

    def is_pinned(self, value: ir.Value) -> bool:
        """Whether the nodes visited so far require the scale to be 1."""
        return self.root(value) in self.pinned

    def join(self, node: ir.Node, source: ir.Value, axis: int | None = None) -> None:
        """Give the first output of `node` the scale of `source`; `axis` is its channel axis if it differs."""
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
        """Record a constant (input and axis) that undoes the scale of the first input, whose channel axis is `axis`."""
        value = first(node)
        if self.axis.get(value, axis) != axis:
            self.pin(value, "channels-on-another-axis")
        self.fold(value, Fold(node, *weight, 1, "reader", str(value.name), groups))

    def writes(self, node: ir.Node, axis: int, weight: tuple[int, int], groups: int = 1) -> None:
        """Record a constant (input and axis) that scales the first output, whose channel axis is `axis`."""
        output = node.outputs[0]
        self.axis[output] = axis
        self.fold(output, Fold(node, *weight, -1, "producer", str(output.name), groups))

    def adds(self, node: ir.Node, index: int, axis: int) -> None:
        """Record a constant that `node` adds to its first output, if it has input `index`."""
        if index >= len(node.inputs) or node.inputs[index] is None:
            return
        if floats(node.inputs[index]) is None:
            raise LeftAlone("bias-not-constant")
        output = node.outputs[0]
        self.fold(output, Fold(node, index, axis, -1, "between", str(output.name)))

    def fold(self, value: ir.Value, fold: Fold) -> None:
        """Record a constant and the number of channels that it has."""
        shape = self.shape(fold.node.inputs[fold.index])
        length = shape[fold.axis] if len(shape) >= -fold.axis else 1
        if length is not None and (fold.role != "between" or length != 1):
            self.lengths.append((value, length * fold.groups))
        self.folds.append((value, fold))

    def shape(self, value: ir.Value | None) -> tuple[int | None, ...]:
        """Return the lengths of a tensor; None for an unknown length."""
        tensor = constant(value)
        known = self.known.get((value.name if value is not None else None) or "", value)
        shape = tensor.shape if tensor is not None else known.shape if known is not None else None
        if shape is None:
            raise LeftAlone("shape-unknown")
        return tuple(length if isinstance(length, int) else None for length in shape)


def floats(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of a constant of floats; None for any other value."""
    tensor = constant(value)
    return tensor if tensor is not None and tensor.dtype.is_floating_point() else None


def first(node: ir.Node, index: int = 0) -> ir.Value:
    """Return a required input; raise LeftAlone if it is missing."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        raise LeftAlone("input-missing")
    return value

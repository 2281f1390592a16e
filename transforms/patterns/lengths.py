"""Lengths that a model computes: the target of a Reshape or Expand as numbers and as lengths of axes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import onnx_ir as ir

from ..graphs.inference import Known
from ..graphs.queries import constant, integers_of, producer_of

SAME = frozenset({"Cast", "Identity", "Squeeze", "Unsqueeze"})
"""Operators whose result has the numbers of their first input, in their order."""
ARITHMETIC: dict[str, Callable[[int, int], int]] = {"Add": operator.add, "Mul": operator.mul, "Sub": operator.sub}
WIDEST = {"MatMul": 2, "Add": 1, "Mul": 1, "Sub": 1, "Div": 1}
"""Operators that keep all axes of a tensor but the last one, and the most axes of the constant beside it."""


@dataclass(frozen=True)
class Axis:
    """The length of an axis of a tensor that the model does not fix.

    Attributes:
        tensor: The tensor.
        index: The axis, from the first one.
        times: What the length is multiplied by.
    """

    tensor: ir.Value
    index: int
    times: int = 1


Named: TypeAlias = Sequence[int | str | None]
"""Lengths of axes: numbers, names, or None for an unknown one. Axes whose lengths have one name have one length."""
Length: TypeAlias = int | Axis | None
"""A number, the length of an axis (`Axis.times` it), or None for another length that is computed."""


class Lengths:
    """The lengths of the axes of a model's tensors, and what its nodes compute from them.

    Values that are inserted later have the shapes that they say.
    """

    def __init__(self, model: ir.Model) -> None:
        """Take a model, which does not change; the shapes are inferred at the first question, as by `Known`."""
        self._known = Known(model)
        self._found: dict[ir.Value | None, Named | None] = {}
        shapes = (value.shape for value in model.graph.inputs if value.shape is not None)
        named = [[each.value for each in shape if isinstance(each, ir.SymbolicDim)] for shape in shapes]
        apart = {name for names in named if len({*names}) > 1 for name in names}
        # exporters may name all free axes "?": a name that one input has twice, and none beside others, says nothing
        self._vague = {name for names in named for name in names if names.count(name) > 1} - apart
        self._given = tuple(model.graph.inputs)

    @cached_property
    def _inputs(self) -> dict[str | None, tuple[ir.Value, int]]:
        """For each name of a length the first input and axis that have it."""
        found: dict[str | None, tuple[ir.Value, int]] = {}
        for value in self._given:
            for axis, length in enumerate(self.of(value) or ()):
                if isinstance(length, str):
                    found.setdefault(length, (value, axis))
        return found

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """Return the element type of a tensor; None if it is not known."""
        return self._known.dtype(value)

    def of(self, value: ir.Value | None) -> Named | None:
        """Return the lengths of the axes of a tensor; None if the rank is unknown."""
        if value not in self._found:
            shape, node = self._known.shape(value), standard(value)
            names = None if shape is None else [each if isinstance(each, int) else each.value for each in shape]
            found: Named | None = None if names is None else [None if each in self._vague else each for each in names]
            self._found[value] = (
                self._reshaped(node, found) if node is not None and node.op_type == "Reshape" else found
            )
        return self._found[value]

    def _reshaped(self, node: ir.Node, found: Named | None) -> Named | None:
        """Return the lengths of the result of a Reshape with those that its target tells and onnx does not infer."""
        given = self.of_target(node.inputs[1]) if len(node.inputs) > 1 else None
        if found is None or given is None or len(given) != len(found):
            return found
        told = [self._told(length) for length in given]
        return [one if isinstance(one, int) else other or one for one, other in zip(found, told, strict=True)]

    def _told(self, length: Length) -> int | str | None:
        """Return what a length in a target says of the axis: a number or a name; None for others."""
        if isinstance(length, int):
            return length if length > 0 else None
        return None if length is None or length.times != 1 else self._name(length.tensor, length.index)

    def of_target(self, target: ir.Value | None) -> list[Length] | None:
        """Return the lengths in the target of a Reshape; None if their number is unknown."""
        if (numbers := integers_of(target)) is not None:
            return [*numbers]
        node = standard(target)
        if node is not None and node.op_type == "Concat":
            parts = [self.of_target(value) for value in node.inputs]
            return None if None in parts else [length for each in parts for length in each or ()]
        flattens = node is not None and node.op_type == "Reshape" and integers_of(node.inputs[1]) == [-1]
        if node is not None and (node.op_type in SAME or flattens):
            return self.of_target(node.inputs[0])
        found = None
        if node is not None and node.op_type in ("Gather", "Shape", "Slice"):
            found = self._picked(node)
        elif node is not None and node.op_type in ARITHMETIC:
            found = self._result(node)
        return self._unknown(target) if found is None else found

    def of_expanded(self, target: ir.Value | None) -> list[Length] | None:
        """Return the lengths in the target of an Expand; None if their number is unknown.

        Exporters write 1 for lengths of -1, ``Where(Equal(s, -1), 1, s)``, where ``s = Reshape(Concat(...), [-1])``.
        """
        node = standard(target)
        if node is None or node.op_type != "Where":
            return self.of_target(target)
        condition, one, other = node.inputs
        equal = standard(condition)
        same = equal is not None and equal.op_type == "Equal" and other in equal.inputs
        compared = [value for value in equal.inputs if value is not other] if same and equal is not None else []
        if not compared or {*(integers_of(compared[0]) or ())} != {-1} or {*(integers_of(one) or ())} != {1}:
            return None
        lengths = self.of_target(other)
        return None if lengths is None else [1 if length == -1 else length for length in lengths]

    def kept(self, x: ir.Value | None, lengths: Sequence[Length]) -> list[int]:
        """Return lengths as numbers: 0 for one that is that of the same axis of x, -1 for others that are computed."""
        return [
            length if isinstance(length, int) else 0 if self.is_axis(length, x, axis) else -1
            for axis, length in enumerate(lengths)
        ]

    def without_rest(self, x: ir.Value | None, numbers: Sequence[int]) -> list[int]:
        """Return the target of a Reshape of x without -1, if the lengths of x tell what it stands for.

        Before:  [0, 0, -1, 64] or [0, -1, 6, 64], x (N, T, 384)
        After:   [0, 0, 6, 64]
        """
        shape = self.of(x)
        if shape is None or -1 not in numbers:
            return [*numbers]
        place, divisor = numbers.index(-1), math.prod(number for number in numbers if number > 0)
        left = {axis: length for axis, length in enumerate(shape) if numbers[axis : axis + 1] != [0]}
        whole = math.prod(length for length in left.values() if isinstance(length, int))
        free = [axis for axis, length in left.items() if not isinstance(length, int)]
        rest = whole // divisor if whole and not free and whole % divisor == 0 else -1
        if free == [place] and whole == divisor:
            rest = 0
        return [rest if number == -1 else number for number in numbers]

    def of_multiple(self, x: ir.Value | None, lengths: Sequence[Length]) -> list[int] | None:
        """Return the target of a Reshape of x with a multiple of the only free length of x; None for other targets.

        Before:  [N * 6, -1, 64], x (N, 6, 7, 64)
        After:   [-1, 7, 64]
        """
        shape = self.of(x) or ()
        free = [axis for axis, length in enumerate(shape) if not isinstance(length, int)]
        multiples = [length for length in lengths if isinstance(length, Axis) and length.times > 1]
        others = [length for length in lengths if isinstance(length, int)]
        if len(free) != 1 or len(multiples) != 1 or len(others) != len(lengths) - 1:
            return None
        (axis,), (multiple,) = free, multiples
        whole = math.prod(length for length in shape if isinstance(length, int))
        known = multiple.times * math.prod(length for length in others if length > 0)
        if 0 in others or not whole or not self.is_axis(replace(multiple, times=1), x, axis):
            return None
        if whole % known or others.count(-1) > 1 or (-1 not in others and whole != known):
            return None
        numbers = [length if isinstance(length, int) else 0 for length in lengths]
        return [{0: -1, -1: whole // known}.get(number, number) for number in numbers]

    def is_axis(self, length: Length, x: ir.Value | None, axis: int) -> bool:
        """Whether a length is that of an axis of x: a number, the length of x itself, or of an axis like it."""
        if isinstance(length, int):
            return [*(self.of(x) or ())][axis : axis + 1] == [length]
        if length is None or x is None or length.times != 1:
            return False
        names = self._name(length.tensor, length.index), self._name(x, axis)
        same = None not in names and names[0] == names[1]
        return same or self.origin(length.tensor, length.index) == self.origin(x, axis)

    def _name(self, x: ir.Value, axis: int) -> str | None:
        """Return the name of the length of an axis; None without one."""
        lengths = self.of(x) or ()
        length = lengths[axis] if axis < len(lengths) else None
        return length if isinstance(length, str) else None

    def _picked(self, node: ir.Node) -> list[Length] | None:
        """Return the lengths of a shape, or of a part of one; None if they are not all lengths of known axes."""
        shape = node if node.op_type == "Shape" else _shape_before(node.inputs[0])
        x = None if shape is None else shape.inputs[0]
        if shape is None or x is None:
            return None
        lengths = self.of(x)
        axes = _axes(shape, None if lengths is None else len(lengths))
        if node.op_type == "Gather":
            axes = _gathered(node, shape, axes)
        elif node.op_type == "Slice":
            axes = _sliced(node, axes)
        if axes is None:
            return None
        numbers = {axis: each for axis, each in enumerate(lengths or ()) if isinstance(each, int)}
        return [numbers.get(axis, Axis(x, axis)) for axis in axes]

    def _result(self, node: ir.Node) -> list[Length] | None:
        """Return what arithmetic with two known lengths, or an axis times a number, gives; None for others."""
        sides = [self.of_target(value) or [] for value in node.inputs]
        lengths = [length for side in sides if len(side) == 1 for length in side]
        numbers = [length for length in lengths if isinstance(length, int)]
        axes = [length for length in lengths if isinstance(length, Axis)]
        if len(numbers) == len(sides):
            return [ARITHMETIC[node.op_type](*numbers)]
        if node.op_type == "Mul" and len(numbers) == len(axes) == 1 and numbers[0] > 0:
            return [replace(axes[0], times=axes[0].times * numbers[0])]
        return None

    def _unknown(self, value: ir.Value | None) -> list[Length] | None:
        """Return None for each computed number of a tensor; None if it is not known how many it has."""
        shape = self.of(value)
        if shape is not None and not shape:
            return [None]
        if shape is not None and isinstance(shape[0], int):
            return [None] * shape[0] if len(shape) == 1 else None
        node = standard(value)
        if node is not None and node.op_type == "Gather" and (picked := constant(node.inputs[1])) is not None:
            return [None] * picked.size
        if node is not None and node.op_type == "Slice" and len(node.inputs) > 2:
            starts, ends = (integers_of(each) for each in node.inputs[1:3])
            one = starts and ends and len(starts) == 1 and ends[0] - starts[0] == 1
            return [None] if one else None
        return None

    def number(self, length: Length) -> int | None:
        """Return a length as a number, if it is that of a known axis; None for others."""
        if not isinstance(length, Axis):
            return length
        x, axis = self.origin(length.tensor, length.index)
        known = [*(self.of(x) or ())][axis : axis + 1]
        return known[0] * length.times if known and isinstance(known[0], int) else None

    def origin(self, x: ir.Value, axis: int) -> tuple[ir.Value, int]:
        """Return the first tensor with an axis that has the length of an axis of x, and this axis.

        Products, biases, further axes (Unsqueeze), repeated ones (Expand, Tile), and Transposes and Reshapes tell so.
        """
        while (node := standard(x)) is not None:
            if (name := self._name(x, axis)) in self._inputs:
                return self._inputs[name]
            if (before := self._axis_before(node, axis)) is not None:
                x, axis = before
                continue
            widest = WIDEST.get(node.op_type, -1)
            computed = [value for value in node.inputs if value is not None and constant(value) is None]
            constants = [tensor for tensor in map(constant, node.inputs) if tensor is not None]
            plain = len(computed) == len(constants) == 1 and len(constants[0].shape) <= widest
            turned = node.op_type == "MatMul" and computed[:1] != [node.inputs[0]]
            shape = self.of(x)
            if not plain or turned or shape is None or axis >= len(shape) - 1:
                break
            (x,) = computed
        return x, axis

    def _axis_before(self, node: ir.Node, axis: int) -> tuple[ir.Value, int] | None:
        """Return the tensor, and its axis, whose length a node gives an axis of its result; None if it is not known."""
        x, shape = node.inputs[0] if node.inputs else None, self.of(node.inputs[0]) if node.inputs else None
        if x is None or axis < 0:
            return None
        if node.op_type == "Transpose":
            order = node.attributes.get_ints("perm", ())
            return (x, order[axis]) if axis < len(order) else None
        if node.op_type not in ("Expand", "Reshape", "Tile", "Unsqueeze") or len(node.inputs) < 2:
            return None
        if node.op_type in ("Reshape", "Tile"):
            target = (self.of_target(node.inputs[1]) or [])[axis : axis + 1]
            if node.op_type == "Tile":
                return (x, axis) if target == [1] else None
            if target == [0] and node.attributes.get_int("allowzero", 0) == 0:
                return x, axis
            found = [(each.tensor, each.index) for each in target if isinstance(each, Axis) and each.times == 1]
            return found[0] if found else None
        given = integers_of(node.inputs[1])
        if node.op_type == "Expand":
            same = given is not None and len(shape or ()) == len(given) and given[axis : axis + 1] == [1]
            return (x, axis) if same else None
        named = given is not None and axis not in given and min(given) >= 0
        return (x, axis - sum(each < axis for each in given or ())) if named else None


def is_computed(target: ir.Value | None) -> bool:
    """Whether nodes compute a target: it is no constant, and no caller gives it."""
    return standard(target) is not None and constant(target) is None


def standard(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes a tensor if it is a standard operator."""
    node = producer_of(value)
    return node if node is not None and not node.domain else None


def _shape_before(value: ir.Value | None) -> ir.Node | None:
    """Return the Shape whose numbers a tensor has; None if there is none."""
    while (node := standard(value)) is not None and node.op_type in ("Cast", "Identity"):
        value = node.inputs[0]
    return node if node is not None and node.op_type == "Shape" else None


def _axes(shape: ir.Node, rank: int | None) -> Sequence[int] | None:
    """Return the axes whose lengths a Shape returns; None if the rank is unknown."""
    end = shape.attributes.get_int("end") if "end" in shape.attributes else None
    return None if rank is None else range(rank)[shape.attributes.get_int("start", 0) : end]


def _gathered(node: ir.Node, shape: ir.Node, axes: Sequence[int] | None) -> Sequence[int] | None:
    """Return which axes of a Shape a Gather takes; of an unknown rank it must count them from the first one."""
    picked = integers_of(node.inputs[1])
    if picked is None:
        return None
    if axes is None:
        whole = not {"start", "end"} & {*shape.attributes}
        return picked if whole and min(picked, default=-1) >= 0 else None
    return [axes[index] for index in picked] if all(-len(axes) <= each < len(axes) for each in picked) else None


def _sliced(node: ir.Node, axes: Sequence[int] | None) -> Sequence[int] | None:
    """Return the axes that a Slice takes from some; None before opset 10, where the bounds were attributes."""
    numbers = [integers_of(value) for value in node.inputs[1:]]
    if axes is None or len(numbers) < 2 or any(value is None or len(value) != 1 for value in numbers):
        return None
    (start,), (end,), *rest = (value for value in numbers if value is not None)
    (step,) = rest[1] if len(rest) > 1 else (1,)
    return axes[start:end:step] if step > 0 else None

"""Find what is computed of tensors whose heads of attention are merged with the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx_ir as ir

from .graph import constant, one_number
from .patterns.lengths import SAME, Axis, Length, Lengths, standard
from .registry import LeftAlone

MERGED, APART = 3, 4  # axes of tensors whose heads are merged with the batch, and of those with an axis for heads
ROWS_TURNED = (0, 2, 1)
SUMS = frozenset({"Add", "Sub"})
SCALED = frozenset({"Div", "Mul"})
ENTRIES = frozenset({"Expand", "Reshape", "Tile"})

Count: TypeAlias = int | str | tuple[ir.Value, int]
"""The length of an axis: a number, a name, or the tensor and the axis."""
Counts: TypeAlias = tuple[Count, Count]
"""The lengths of the last two axes of a tensor with merged heads."""


def count_of(value: ir.Value | None, axis: int, lengths: Lengths) -> Count:
    """Return the length of an axis of a tensor."""
    assert value is not None
    shape = lengths.of(value) or ()
    length = shape[axis] if axis < len(shape) else None
    return (value, axis) if length is None else length


def merging(reshape: ir.Node, lengths: Lengths) -> tuple[int, Count] | None:
    """Return the heads and the batch that a Reshape merges to one axis; None if it does something else."""
    source = lengths.of(reshape.inputs[0])
    heads = source[1] if source is not None and len(source) == APART else None
    given = lengths.of_target(reshape.inputs[1]) if isinstance(heads, int) and len(reshape.inputs) > 1 else None
    if given is None or len(given) != MERGED or not isinstance(heads, int) or heads < 2 or 0 in given:
        return None
    rest = [count_of(reshape.inputs[0], axis, lengths) for axis in (2, 3)]
    result = [count_of(reshape.outputs[0], axis, lengths) for axis in (1, 2)]
    told = [_named(length, lengths) for length in given[1:]]
    same = all(one in (other, known) for one, other, known in zip(rest, told, result, strict=True))
    return (heads, count_of(reshape.inputs[0], 0, lengths)) if same else None


def _named(length: Length, lengths: Lengths) -> Count | None:
    """Return a length in a target as that of an axis; None for others."""
    if isinstance(length, int):
        return length if length > 0 else None
    return None if length is None or length.times != 1 else count_of(length.tensor, length.index, lengths)


@dataclass(eq=False)
class MergedHeads:
    """What is computed of tensors with merged heads.

    Attributes:
        heads: The number of heads.
        batch: The length of the batch.
        lengths: The lengths of the model's tensors.
        graph: The graph that it is in.
        entries: Tensors with merged heads that the region reads, each with the Reshape, Tile or Expand that makes it.
        weights: Constants with merged heads that it reads.
        nodes: Its operators.
        ends: The Reshapes that split heads.
        counts: The lengths of the last two axes of its tensors.
    """

    heads: int
    batch: Count
    lengths: Lengths
    graph: ir.Graph
    entries: dict[ir.Value, ir.Node] = field(default_factory=dict)
    weights: set[ir.Value] = field(default_factory=set)
    nodes: dict[ir.Node, None] = field(default_factory=dict)
    ends: dict[ir.Node, None] = field(default_factory=dict)
    counts: dict[ir.Value, Counts] = field(default_factory=dict)

    def fill(self, reshape: ir.Node) -> None:
        """Collect the region around a Reshape that merges heads.

        Raises:
            LeftAlone: Heads cannot be apart in it.
        """
        waiting, seen = [reshape.outputs[0]], set[ir.Value]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            if value.is_graph_output():
                raise LeftAlone("output")
            waiting += self._before(value)
            if value in self.weights or (value in self.entries and self.entries[value].op_type != "Reshape"):
                continue  # other readers keep it
            for node in [use.node for use in value.uses()]:
                if node.graph is not self.graph:
                    raise LeftAlone("operators")
                waiting += self._behind(node)
        order = {node: place for place, node in enumerate(self.graph)}
        self.nodes = dict.fromkeys(sorted(self.nodes, key=order.__getitem__))
        self._measure()

    def _before(self, value: ir.Value) -> list[ir.Value]:
        """Note what makes a tensor; return tensors with merged heads that this reads."""
        node = standard(value)
        if constant(value) is not None:
            self.weights.add(value)
        elif node is not None and node.op_type in ENTRIES:
            self.entries[value] = node
        elif node is not None and node.op_type in RULES:
            self.nodes[node] = None
            return self.operands(node)
        else:
            raise LeftAlone("operators")
        return []

    def _behind(self, node: ir.Node) -> list[ir.Value]:
        """Note what reads a tensor; return its result if that has merged heads."""
        if node.domain or (node.op_type not in RULES and node.op_type not in ("Reshape", "Shape")):
            raise LeftAlone("operators")
        if node.op_type in RULES:
            return [node.outputs[0]]
        if node.op_type == "Reshape":
            self.ends[node] = None
        return []

    def operands(self, node: ir.Node) -> list[ir.Value]:
        """Return the inputs of an operator that have merged heads: all but factors."""
        inputs = [value for value in node.inputs if value is not None]
        if node.op_type not in SCALED:
            return inputs
        places = (1,) if node.op_type == "Div" else (1, 0)
        factor = next((place for place in places if self.is_number(inputs[place])), None)
        if factor is None:
            raise LeftAlone("operators")
        return [inputs[1 - factor]]

    def is_number(self, value: ir.Value) -> bool:
        """Whether a tensor has one element."""
        shape = self.lengths.of(value)
        return shape is not None and len(shape) <= MERGED and all(length == 1 for length in shape)

    def _measure(self) -> None:
        """Note the lengths of all tensors.

        Raises:
            LeftAlone: Some are not those of tensors with merged heads.
        """
        for weight in self.weights:
            shape = self.lengths.of(weight) or ()
            if len(shape) != MERGED or not isinstance(self.batch, int) or shape[0] != self.batch * self.heads:
                raise LeftAlone("lengths")
            self.counts[weight] = count_of(weight, 1, self.lengths), count_of(weight, 2, self.lengths)
        order = {"Reshape": 0, "Tile": 1, "Expand": 2}  # the target of a Tile and Expand may be lengths of others
        for value, node in sorted(self.entries.items(), key=lambda each: order[each[1].op_type]):
            self.counts[value] = self._entered(node)
        for node in self.nodes:
            parts = [self.counts[value] for value in self.operands(node)]
            self.counts[node.outputs[0]] = RULES[node.op_type](node, parts)
        for end in self.ends:
            if end.outputs[0].is_graph_output():
                raise LeftAlone("output")
            if not self._splits(end):
                raise LeftAlone("lengths")

    def _entered(self, node: ir.Node) -> Counts:
        """Return the lengths of a tensor that the region reads."""
        source = node.inputs[0]
        shape = self.lengths.of(source)
        if node.op_type == "Reshape":
            if merging(node, self.lengths) != (self.heads, self.batch):
                raise LeftAlone("lengths")
            return count_of(source, 2, self.lengths), count_of(source, 3, self.lengths)
        if shape is None or len(shape) != MERGED:
            raise LeftAlone("lengths")
        if node.op_type == "Tile":
            if shape[0] != self.heads or not self._is_batch(node.inputs[1]):
                raise LeftAlone("lengths")
            return count_of(source, 1, self.lengths), count_of(source, 2, self.lengths)
        given = self.lengths.of_expanded(node.inputs[1])
        if shape[0] != 1 or given is None or len(given) != MERGED or not self._is_merged(given[0]):
            raise LeftAlone("lengths")
        one, other = (self._expanded(source, axis, given[axis]) for axis in (1, 2))
        return one, other

    def _expanded(self, source: ir.Value | None, axis: int, length: Length) -> Count:
        """Return the length to which an Expand makes an axis."""
        before, after = count_of(source, axis, self.lengths), self.count(length)
        if after in (1, before) or after is None:
            if after is None:
                raise LeftAlone("lengths")
            return before
        return after

    def count(self, length: Length) -> Count | None:
        """Return a length in a target as that of an axis; None for others."""
        if isinstance(length, Axis) and length.times == 1 and length.index > 0 and length.tensor in self.counts:
            return self.counts[length.tensor][length.index - 1]
        return _named(length, self.lengths)

    def target(self, value: ir.Value, source: ir.Value | None) -> list[Count]:
        """Return the lengths to which an Expand makes its input, with heads apart; 1 for those that it keeps."""
        before = [count_of(source, axis, self.lengths) for axis in (1, 2)]
        kept = [1 if one == other else one for one, other in zip(self.counts[value], before, strict=True)]
        return [self.batch, self.heads, *kept]

    def _is_merged(self, length: Length) -> bool:
        """Whether a length in a target is that of the batch and the heads."""
        if isinstance(length, int):
            return isinstance(self.batch, int) and length == self.batch * self.heads
        if length is None:
            return False
        if length.times == 1:
            return length.index == 0 and length.tensor in self.counts
        return length.times == self.heads and count_of(length.tensor, length.index, self.lengths) == self.batch

    def _is_batch(self, repeats: ir.Value | None) -> bool:
        """Whether a Tile repeats the first of three axes alone, as often as the batch is long."""
        given = self.lengths.of_target(repeats)
        if given is None or len(given) != MERGED or given[1:] != [1, 1]:
            return False
        node = standard(repeats)
        first = node.inputs[0] if node is not None and node.op_type == "Concat" else None
        while (node := standard(first)) is not None and node.op_type in SAME:
            first = node.inputs[0]
        if node is not None and node.op_type == "Div" and one_number(node.inputs[1], 1) == self.heads:
            whole = self.lengths.of_target(node.inputs[0]) or [None]
            return self._is_merged(whole[0])
        return self.count(given[0]) == self.batch

    def _splits(self, reshape: ir.Node) -> bool:
        """Whether a Reshape splits merged heads."""
        given, result = self.lengths.of_target(reshape.inputs[1]), self.lengths.of(reshape.outputs[0]) or ()
        if given is None or len(given) != APART or 0 in given:
            return False
        known: list[Count | None] = [*result] if len(result) == APART else [None] * APART
        wanted = [self.batch, self.heads, *self.counts[self.given(reshape)]]
        fits = [one in (self.count(length), other) for one, length, other in zip(wanted, given, known, strict=True)]
        return fits[1] and fits.count(False) <= 1  # the number of elements tells the last one

    @staticmethod
    def given(reshape: ir.Node) -> ir.Value:
        """Return what a Reshape reads."""
        assert reshape.inputs[0] is not None
        return reshape.inputs[0]

    def number(self, value: ir.Value | None) -> float | None:
        """Return the number that a tensor is; None if it is not known."""
        known, node = one_number(value, MERGED), standard(value)
        if known is not None or node is None:
            return known
        if node.op_type in SAME:
            return self.number(node.inputs[0])
        if node.op_type == "Sqrt":
            inner = self.number(node.inputs[0])
            return None if inner is None or inner < 0 else math.sqrt(inner)
        if node.op_type == "Mul":
            one, other = (self.number(each) for each in node.inputs)
            return None if one is None or other is None else one * other
        given = self.lengths.of_target(value) or []
        length = self.count(given[0]) if len(given) == 1 else None
        return float(length) if isinstance(length, int) else None


# ------------------------------------------------------------------------------------------------ lengths of results

Rule: TypeAlias = Callable[[ir.Node, list[Counts]], Counts]


def _of_product(node: ir.Node, parts: list[Counts]) -> Counts:
    """Return the lengths of a product of matrices."""
    left, right = parts
    return left[0], right[1]


def _of_sum(_: ir.Node, parts: list[Counts]) -> Counts:
    """Return the lengths of a sum: of an axis of length 1 the other one."""
    if len(parts) != 2:
        raise LeftAlone("operators")
    (one, other), (more, last) = parts
    return _longer(one, more), _longer(other, last)


def _longer(one: Count, other: Count) -> Count:
    """Return the length of an axis in a sum: a number or a name, if one of the terms has it."""
    known = [each for each in (one, other) if each != 1]
    return min(known, key=lambda each: (isinstance(each, tuple), isinstance(each, str)), default=1)


def _of_factor(_: ir.Node, parts: list[Counts]) -> Counts:
    """Return the lengths of a scaled tensor."""
    return parts[0]


def _of_softmax(node: ir.Node, parts: list[Counts]) -> Counts:
    """Return the lengths of the result of a Softmax along the last axis."""
    if node.attributes.get_int("axis", 0) not in (-1, MERGED - 1):  # the default depends on the operator set
        raise LeftAlone("operators")
    return parts[0]


def _of_turn(node: ir.Node, parts: list[Counts]) -> Counts:
    """Return the lengths of rows and columns that change places."""
    if tuple(node.attributes.get_ints("perm", ())) != ROWS_TURNED:
        raise LeftAlone("operators")
    rows, columns = parts[0]
    return columns, rows


def _of_gathered(node: ir.Node, parts: list[Counts]) -> Counts:
    """Return the lengths of the indices along the last axis."""
    if node.attributes.get_int("axis", 0) not in (-1, MERGED - 1):
        raise LeftAlone("operators")
    return parts[1]


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(SUMS, _of_sum),
    **dict.fromkeys(SCALED, _of_factor),
    "GatherElements": _of_gathered,
    "MatMul": _of_product,
    "Softmax": _of_softmax,
    "Transpose": _of_turn,
}
"""Operators that do the same to heads that are apart, each with what returns the lengths of its result."""

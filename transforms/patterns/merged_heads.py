"""Find what is computed of tensors whose heads of attention are merged with the batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ..graphs.queries import constant, integers_of, made_by
from ..registry import LeftAlone
from .lengths import Axis, Length, Lengths, standard

MERGED, APART = 3, 4  # axes of tensors whose heads are merged with the batch, and of those with an axis for heads
LAST = (-1, MERGED - 1)
SUMS = frozenset({"Add", "Sub"})
SCALED = frozenset({"Div", "Mul"})
ENTRIES = frozenset({"Reshape", "Tile"})
OPERATORS = SUMS | SCALED | {"GatherElements", "MatMul", "Softmax", "Transpose"}
"""Operators that do the same to heads that are apart."""
NUMBERS = ((), (1,), (1, 1), (1, 1, 1))
"""The shapes of factors that change no other shape."""


@dataclass(eq=False)
class MergedHeads:
    """What is computed of tensors with merged heads, between Reshapes that merge heads and Reshapes that use them.

    That the batch has one length in all of its tensors needs no proof: its operators could not compute otherwise.

    Attributes:
        graph: The graph that it is in.
        lengths: The lengths of the model's tensors.
        heads: The number of heads.
        entries: Tensors with merged heads that it reads: results of a Reshape, and of a Tile of a constant.
        weights: Constants with merged heads that it reads.
        nodes: Its operators, in their order.
        ends: The Reshapes behind it, each with whether its result is what it reads with heads apart.
        axis: The merged axis of each of its tensors.
        obstacle: Why heads cannot be apart in it; empty if they may be.
    """

    graph: ir.Graph
    lengths: Lengths
    heads: int = 0
    entries: dict[ir.Value, ir.Node] = field(default_factory=dict)
    weights: dict[ir.Value, None] = field(default_factory=dict)
    nodes: dict[ir.Node, None] = field(default_factory=dict)
    ends: dict[ir.Node, bool] = field(default_factory=dict)
    axis: dict[ir.Value, int] = field(default_factory=dict)
    obstacle: str = ""

    def fill(self, reshape: ir.Node) -> None:
        """Collect the region behind a Reshape that merges heads.

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
                self.obstacle = "output"
            waiting += self._before(value)
            if value not in self.weights and made_by(value, "Tile") is None:  # other readers of these keep them
                waiting += self._behind(value)
        if self.obstacle:
            raise LeftAlone(self.obstacle)
        order = {node: place for place, node in enumerate(self.graph)}
        self.nodes = dict.fromkeys(sorted(self.nodes, key=order.__getitem__))
        self._place()
        self._finish()

    def _before(self, value: ir.Value) -> list[ir.Value]:
        """Note what makes a tensor; return the tensors with merged heads that this reads."""
        node = standard(value)
        if constant(value) is not None:
            self.weights[value] = None
        elif node is None or node.graph is not self.graph or node.op_type not in OPERATORS | ENTRIES:
            self.obstacle = self.obstacle or "operators"
        elif node.op_type in ENTRIES:
            self.entries[value] = node
        else:
            self.nodes[node] = None
            return self.operands(node)
        return []

    def _behind(self, value: ir.Value) -> list[ir.Value]:
        """Note the Reshapes that read a tensor; return the results of other readers."""
        results = []
        for node in [use.node for use in value.uses()]:
            if node.graph is not self.graph or node.domain or node.op_type not in OPERATORS | {"Reshape", "Shape"}:
                self.obstacle = self.obstacle or "operators"
            elif node.op_type == "Reshape":
                self.ends[node] = False
            elif node.op_type != "Shape":
                results.append(node.outputs[0])
        return results

    def operands(self, node: ir.Node) -> list[ir.Value]:
        """Return the inputs of an operator that have merged heads: no factors, common masks, or expanded indices."""
        inputs = [value for value in node.inputs if value is not None]
        shapes = [None if (shape := self.lengths.of(value)) is None else tuple(shape) for value in inputs]
        if node.op_type in SCALED:
            places = (1,) if node.op_type == "Div" else (1, 0)
            numbers = [place for place in places if shapes[place] in NUMBERS]
            return [value for place, value in enumerate(inputs) if place not in numbers[:1]]
        if node.op_type in SUMS:
            masks = [shape is not None and len(shape) < MERGED + (shape[:1] == (1,)) for shape in shapes]
            inputs = [value for value, mask in zip(inputs, masks, strict=True) if not mask]
        if node.op_type == "GatherElements" and made_by(inputs[1], "Expand") is not None:
            return inputs[:1]
        return inputs

    # --------------------------------------------------------------------------------------------------- merged axes

    def _place(self) -> None:
        """Note the merged axis of each tensor.

        Raises:
            LeftAlone: There is none, or an operator mixes heads.
        """
        once = [value for value in self.entries if made_by(value, "Tile") is not None]
        for value, node in self.entries.items():
            if node.op_type == "Reshape":
                heads, self.axis[value] = merging(node, self.lengths) or (0, 0)
                self.heads = self.heads or heads
                if heads != self.heads or not heads:
                    raise LeftAlone("heads")
        for value in [*once, *self.weights]:
            shape = self.lengths.of(self.entries[value].inputs[0] if value in self.entries else value) or ()
            length = shape[0] if len(shape) == MERGED else None
            if not isinstance(length, int) or length % self.heads or (value in self.entries and not self._tiles(value)):
                raise LeftAlone("lengths")
            self.axis[value] = 0
        shared = {*once}  # all items of the batch have one, so an operator must read another tensor beside
        for node in self.nodes:
            operands, result = self.operands(node), node.outputs[0]
            self.axis[result] = self._behind_operator(node, [self.axis[value] for value in operands])
            if not self.axis.keys().isdisjoint({*node.inputs} - {*operands}):
                raise LeftAlone("operators")
            if shared.issuperset(operands):
                shared.add(result)
            elif node.op_type == "GatherElements" and not shared.isdisjoint(operands):
                raise LeftAlone("operators")
        if any(end.inputs[0] in shared for end in self.ends):
            raise LeftAlone("operators")

    def _tiles(self, value: ir.Value) -> bool:
        """Whether a tensor with merged heads is a constant (heads, rows, columns) that a Tile repeats."""
        source, repeats = self.entries[value].inputs
        shape = self.lengths.of(source) or ()
        given = self.lengths.of_target(repeats) or ()
        return constant(source) is not None and shape[0] == self.heads and [*given[1:]] == [1, 1]

    def _behind_operator(self, node: ir.Node, axes: list[int]) -> int:
        """Return the merged axis of the result of an operator, from those of its operands.

        Raises:
            LeftAlone: The operator mixes heads.
        """
        axis = axes[0] if axes else -1
        if node.op_type == "Transpose" and len(perm(node)) == MERGED:
            return perm(node).index(axis)
        fits = node.op_type != "Transpose" and len({*axes}) == 1 and (node.op_type not in SCALED or len(axes) == 1)
        if node.op_type in ("GatherElements", "Softmax"):  # the default axis of a Softmax depends on the operator set
            fits &= node.attributes.get_int("axis", 0) in LAST and axis < LAST[-1]
        if node.op_type in ("GatherElements", "MatMul") or (node.op_type in SUMS and len(axes) == 1):
            fits &= axis == 0
        if node.op_type == "GatherElements" and len(axes) == 1:
            fits &= self._is_index(node)
        if not fits:
            raise LeftAlone("operators")
        return axis

    def _is_index(self, node: ir.Node) -> bool:
        """Whether indices (1, rows, columns) are expanded to heads and the batch, and known lengths.

        Raises:
            LeftAlone: The lengths are others.
        """
        source, given = self.expanded(node)
        shape = self.lengths.of(source) or ()
        rest = all(isinstance(each, int) or (each is not None and each.times == 1) for each in given[1:])
        if len(shape) != MERGED or shape[0] != 1 or len(given) != MERGED or not rest or not self._is_merged(given[0]):
            raise LeftAlone("lengths")
        return True

    def expanded(self, node: ir.Node) -> tuple[ir.Value | None, list[Length]]:
        """Return what the indices of a GatherElements are expanded from, and the lengths to which they are."""
        expand = made_by(node.inputs[1], "Expand")
        assert expand is not None
        return expand.inputs[0], self.lengths.of_expanded(expand.inputs[1]) or []

    def _is_merged(self, length: Length) -> bool:
        """Whether a length is that of a merged axis: that of a tensor of the region, or heads times the batch."""
        sources = [node.inputs[0] for value, node in self.entries.items() if made_by(value, "Reshape")]
        if isinstance(length, Axis) and length.times == 1:
            return self.axis.get(length.tensor) == length.index
        if isinstance(length, Axis):
            batch: Length = Axis(length.tensor, length.index)
            return length.times == self.heads and any(self.lengths.is_axis(batch, each, 0) for each in sources)
        return length is not None and any((self.lengths.of(value) or (None,))[0] == length for value in self.axis)

    # ------------------------------------------------------------------------------------------------------ the ends

    def _finish(self) -> None:
        """Note which Reshapes split heads; others read the same numbers with heads apart.

        Raises:
            LeftAlone: A Reshape, or a Shape, needs merged heads.
        """
        if not self.ends or not any(node.op_type == "MatMul" for node in self.nodes):
            raise LeftAlone("operators")
        for end in self.ends:
            axis, given = self.axis[value_of(end)], self.lengths.of_target(end.inputs[1])
            self.ends[end] = splits = axis == 0 and self._splits(end)
            if splits and end.outputs[0].is_graph_output():
                raise LeftAlone("output")
            keeps = given is not None and 0 not in given[1:] and not (0 in given and _has_zeros(end))
            if not splits and not (axis == 1 and keeps):
                raise LeftAlone("lengths")
        gone = {end for end, splits in self.ends.items() if splits}
        uses = (use.node for node in self.nodes for use in node.outputs[0].uses() if use.node.op_type == "Shape")
        if not all(_is_for(node, gone) for node in uses):
            raise LeftAlone("operators")

    def _splits(self, reshape: ir.Node) -> bool:
        """Whether the result of a Reshape has the lengths (batch, heads, rows, columns)."""
        given = self.lengths.of_target(reshape.inputs[1]) or []
        result = self.lengths.of(reshape.outputs[0]) or given
        return len(given) == APART and self.heads in (given[1], result[1]) and _same(reshape, given, self.lengths)


def merging(reshape: ir.Node, lengths: Lengths) -> tuple[int, int] | None:
    """Return the number of heads that a Reshape merges with the batch, and the merged axis; None if it does not.

    It reads (batch, heads, rows, columns), or (rows, batch, heads * columns).
    """
    source = lengths.of(reshape.inputs[0]) or ()
    given = (lengths.of_target(reshape.inputs[1]) if len(reshape.inputs) > 1 else None) or []
    if len(given) != MERGED or (0 in given and _has_zeros(reshape)):
        return None
    if len(source) == APART:
        heads = source[1]
        fits = isinstance(heads, int) and 0 not in given and _same(reshape, given, lengths)
        return (heads, 0) if fits and isinstance(heads, int) and heads > 1 else None
    width, target = source[-1] if len(source) == MERGED else None, integers_of(reshape.inputs[1])
    if target is None or not isinstance(width, int) or target[-1] < 1 or width % target[-1]:
        return None
    rows, merged, depth = target
    heads = width // depth
    fits = merged % heads == 0 if merged > 0 else merged == -1 and rows in (0, source[0])
    return (heads, 1) if fits and heads > 1 else None


def _same(reshape: ir.Node, given: list[Length], lengths: Lengths) -> bool:
    """Whether a Reshape keeps the lengths of the last two axes."""
    source, result = (lengths.of(value) or () for value in (reshape.inputs[0], reshape.outputs[0]))
    last = [(len(source) - place, len(given) - place) for place in (2, 1)]
    return min(len(source), len(given)) >= MERGED and all(
        lengths.is_axis(given[after], reshape.inputs[0], before)
        or (len(result) == len(given) and source[before] is not None and source[before] == result[after])
        for before, after in last
    )


def _is_for(node: ir.Node, ends: set[ir.Node]) -> bool:
    """Whether nothing but the targets of some Reshapes is computed of what a node returns."""
    readers = {use.node for value in node.outputs for use in value.uses()} - ends
    plain = all(each.op_type in ("Cast", "Concat", "Gather", "Slice", "Squeeze", "Unsqueeze") for each in readers)
    return plain and not node.outputs[0].is_graph_output() and all(_is_for(each, ends) for each in readers)


def _has_zeros(reshape: ir.Node) -> bool:
    """Whether 0 in the target of a Reshape is a length."""
    return reshape.attributes.get_int("allowzero", 0) == 1


def value_of(node: ir.Node) -> ir.Value:
    """Return the first input of a node, which has one."""
    assert node.inputs[0] is not None
    return node.inputs[0]


def perm(transpose: ir.Node) -> tuple[int, ...]:
    """Return the permutation of a Transpose; empty if it is not written."""
    return tuple(transpose.attributes.get_ints("perm", ()))

"""Normalizations in several operators: layer norms, and norms by the root of the mean square."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from typing import TypeAlias

import onnx_ir as ir

from ..graphs.queries import Shape, axes_of, constant, is_standard, made_by, one_number, sole_reader

Step: TypeAlias = tuple[ir.Node, ir.Value]
"""A Mul or Add, and its constant."""


@dataclass(frozen=True, eq=False)
class FoundNormalization:
    """A normalization of the last axis.

    Attributes:
        x: What it normalizes.
        epsilon: What it adds to the mean square.
        centred: Whether it subtracts the mean first, as a layer normalization.
        gain: The factor of each place of the last axis; None if it has none.
        shift: The summand of each place; None if it has none.
        nodes: Its operators, in order; the last one computes the result.
    """

    x: ir.Value
    epsilon: float
    centred: bool
    gain: ir.Value | None
    shift: ir.Value | None
    nodes: Sequence[ir.Node]


@dataclass(frozen=True, slots=True)
class Parts:
    """The operators of a normalization, without its gain and shift.

    Attributes:
        x: What it normalizes.
        chain: Its operators from the square to the quotient.
        nodes: All its operators, in order; the last one computes the quotient.
    """

    x: ir.Value
    chain: Sequence[ir.Node]
    nodes: Sequence[ir.Node]

    @property
    def means(self) -> list[ir.Node]:
        """The ReduceMean operators."""
        return [node for node in self.nodes if node.op_type == "ReduceMean"]

    @property
    def is_read_between(self) -> bool:
        """Whether others read a tensor inside, or one is an output of the graph."""
        inner = [node.outputs[0] for node in self.nodes[:-1]]
        return any(each.is_graph_output() or any(use.node not in self.nodes for use in each.uses()) for each in inner)


def find_normalization(square: ir.Node, shapes: Mapping[str, Shape]) -> FoundNormalization | None:
    """Return the normalization of the last axis whose square this node is; None if there is none.

    The square is Pow(d, 2) or Mul(d, d). Behind it is what `find_quotient` finds. In a layer normalization d is
    Sub(x, ReduceMean(x)). A Mul by a constant that alone reads the result is its gain, an Add behind that its shift.
    None too where another node reads a tensor inside, or one is an output, and for other types than float32.

    Args:
        square: A node.
        shapes: Shapes of the float tensors by name. Only that of the result must be there.
    """
    for centred, parts in ((True, find_centred(square)), (False, _by_root_mean_square(square))):
        if parts is None or parts.is_read_between:
            continue
        shape = shapes.get(str(parts.nodes[-1].outputs[0].name), ())
        rank = len(shape)
        if not shape or not isinstance(shape[-1], int) or not all(is_mean_of(m, rank - 1, rank) for m in parts.means):
            continue
        epsilon = epsilon_of(parts.chain, rank)
        if epsilon is None:
            return None
        gain = of_each_place(parts.nodes[-1], "Mul", rank - 1, shape)
        shift = None if gain is None or not centred else of_each_place(gain[0], "Add", rank - 1, shape)
        nodes = [*parts.nodes, *(step[0] for step in (gain, shift) if step is not None)]
        factor, summand = (None if step is None else step[1] for step in (gain, shift))
        return FoundNormalization(parts.x, epsilon, centred, factor, summand, nodes)
    return None


def find_centred(square: ir.Node) -> Parts | None:
    """Return the layer normalization that squares the distances from a mean here; None if there is none."""
    front = _distance(squared(square))
    x = front[0].inputs[0] if front else None
    if x is None:
        return None
    dividends = {use.node.outputs[0]: found for use in x.uses() if (found := _distance(use.node.outputs[0]))}
    behind_it = find_quotient(square, [*dividends])
    if behind_it is None:
        return None
    other = next(dividends[value] for value in behind_it[-1].inputs if value in dividends)
    return Parts(x, [square, *behind_it], [*dict.fromkeys([*front, *other, square, *behind_it])])


def _by_root_mean_square(square: ir.Node) -> Parts | None:
    """Return the normalization by the root of the mean square of a tensor; None if there is none."""
    x = squared(square)
    found = None if x is None else find_quotient(square, [x])
    return None if x is None or found is None else Parts(x, [square, *found], [square, *found])


def _distance(value: ir.Value | None) -> tuple[ir.Node, ...]:
    """Return the ReduceMean and the Sub that compute x - mean(x); nothing for other tensors."""
    sub = made_by(value, "Sub")
    mean = None if sub is None or sub.domain else made_by(sub.inputs[1], "ReduceMean")
    if sub is None or mean is None or mean.domain or mean.inputs[0] is not sub.inputs[0]:
        return ()
    return mean, sub


def squared(square: ir.Node) -> ir.Value | None:
    """Return the computed x of a Pow(x, .) or Mul(x, x); None for other nodes."""
    if not is_standard(square, "Pow", "Mul") or len(square.inputs) != 2:
        return None
    x, other = square.inputs
    return None if constant(x) is not None or (square.op_type == "Mul" and other is not x) else x


def find_quotient(square: ir.Node, dividends: Sequence[ir.Value]) -> list[ir.Node] | None:
    """Return the operators behind a square that divide one of some tensors by the root of its mean; None without them.

    They are ReduceMean, Add, Sqrt, and then Mul(x, .) of a Reciprocal or Div(1, .), or Div(x, .). A Pow may be in place
    of the Sqrt, or of the Sqrt and the Reciprocal. Each is the only reader of the one before. Whether the numbers are
    those of a normalization, `epsilon_of` says.
    """
    front = behind(square, ("ReduceMean", "Add"))
    root = (behind(front[-1], ("Sqrt",)) or behind(front[-1], ("Pow",), place=0)) if front else []
    if not root:
        return None
    divided = behind(root[0], ("Div",), place=1)
    if divided and divided[0].inputs[0] in dividends:
        return [*front, *root, *divided]
    inverse = divided or behind(root[0], ("Reciprocal",))
    product = behind([*root, *inverse][-1], ("Mul",))
    if not product or not any(value in dividends for value in product[0].inputs):
        return None
    return [*front, *root, *inverse, *product]


def behind(node: ir.Node, operators: Sequence[str], place: int | None = None) -> list[ir.Node]:
    """Return nodes of these operators, each the only reader of the one before; none if one of them is another.

    Args:
        node: The node in front of them.
        operators: The operators.
        place: Which input of each is the result before; None for any.
    """
    found: list[ir.Node] = []
    for operator in operators:
        value = node.outputs[0]
        reader = sole_reader(value)
        if reader is None or reader.domain or reader.op_type != operator:
            return []
        if place is not None and reader.inputs[place] is not value:
            return []
        found.append(node := reader)
    return found


def epsilon_of(nodes: Sequence[ir.Node], axes: int) -> float | None:
    """Return what is added to the mean square; None unless all numbers are those of a normalization in float32.

    Args:
        nodes: The operators from the square to the result.
        axes: The number of axes of the result.
    """
    square, mean, add, root, *inverse = nodes
    if square.op_type == "Pow" and one_number(square.inputs[1], axes) != 2:
        return None
    power = 0.5 if root.op_type == "Sqrt" else one_number(root.inputs[1], axes)
    if power != (-0.5 if [node.op_type for node in inverse] == ["Mul"] else 0.5):
        return None
    if len(inverse) == 2 and inverse[0].op_type == "Div" and one_number(inverse[0].inputs[0], axes) != 1:
        return None
    number = next((value for value in add.inputs if value is not mean.outputs[0]), None)
    tensor, epsilon = constant(number), one_number(number, axes)
    if tensor is None or tensor.dtype is not ir.DataType.FLOAT or epsilon is None or epsilon < 0 or isinf(epsilon):
        return None
    return epsilon


def is_mean_of(mean: ir.Node, axis: int, rank: int) -> bool:
    """Whether a ReduceMean reduces one axis, counted from 0, of a tensor of this rank to one value, and keeps it."""
    return axes_of(mean) in ([axis - rank], [axis]) and mean.attributes.get_int("keepdims", 1) == 1


def of_each_place(last: ir.Node, op: str, axis: int, lengths: Sequence[int | str | None]) -> Step | None:
    """Return the only reader of a result, and the constant that it has for each place of an axis; None without one.

    Args:
        last: The node that computes the result.
        op: The operator of the reader.
        axis: The axis, counted from 0.
        lengths: The lengths of the result.
    """
    shape = [length if place == axis else 1 for place, length in enumerate(lengths)]
    for node in behind(last, (op,)):
        for value in node.inputs:
            tensor = constant(value)
            if value is None or tensor is None or tensor.dtype is not ir.DataType.FLOAT:
                continue
            if [1] * (len(shape) - len(tensor.shape)) + list(tensor.shape) == shape:
                return node, value
    return None

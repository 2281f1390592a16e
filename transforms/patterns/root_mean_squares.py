"""Normalizations by the root of the mean square, x / sqrt(mean(x ** 2) + epsilon), in several operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isinf

import onnx_ir as ir

from ..graph import Shape, constant, one_number, sole_reader


@dataclass(frozen=True, eq=False)
class FoundNormalization:
    """A normalization of the last axis by the root of its mean square.

    Attributes:
        x: What it normalizes.
        epsilon: What it adds to the mean square.
        gain: The factor of each place of the last axis; None if it has none.
        nodes: Its operators, in order; the last one computes the result.
    """

    x: ir.Value
    epsilon: float
    gain: ir.Value | None
    nodes: Sequence[ir.Node]


def find_normalization(square: ir.Node, shapes: Mapping[str, Shape]) -> FoundNormalization | None:
    """Return the normalization that begins with a square; None if there is none.

    The square is Pow(x, 2) or Mul(x, x). Behind it is what `find_quotient` finds, for the last axis. A Mul by a
    constant that alone reads the result is its gain.
    None too where another node reads a tensor inside, or one is an output, and for other types than float32.

    Args:
        square: A node.
        shapes: Shapes of the float tensors by name. Only that of the result must be there.
    """
    x = squared(square)
    found = None if x is None else find_quotient(square, [x])
    if x is None or found is None:
        return None
    nodes = [square, *found]
    shape = shapes.get(str(nodes[-1].outputs[0].name), ())
    if not shape or not isinstance(shape[-1], int) or not is_mean_of(nodes[1], len(shape) - 1, len(shape)):
        return None
    epsilon = epsilon_of(nodes, len(shape))
    if epsilon is None:
        return None
    for gain, product in _gains(nodes[-1], shape):
        return FoundNormalization(x, epsilon, gain, [*nodes, product])
    return FoundNormalization(x, epsilon, None, nodes)


def squared(square: ir.Node) -> ir.Value | None:
    """Return the computed x of a Pow(x, .) or Mul(x, x); None for other nodes."""
    if square.domain or square.op_type not in ("Pow", "Mul") or len(square.inputs) != 2:
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
    axes = constant(mean.inputs[1]) if len(mean.inputs) > 1 else None  # before opset 18 they are an attribute
    found = [*mean.attributes.get_ints("axes", ())] if axes is None else axes.numpy().reshape(-1).tolist()
    return found in ([axis - rank], [axis]) and mean.attributes.get_int("keepdims", 1) == 1


def _gains(last: ir.Node, shape: Shape) -> Iterator[tuple[ir.Value, ir.Node]]:
    """Yield the gain behind a normalization with a result of this shape, and its Mul, if it has one."""
    for node in behind(last, ("Mul",)):
        for value in node.inputs:
            tensor = constant(value)
            if value is None or tensor is None or tensor.dtype is not ir.DataType.FLOAT:
                continue
            if tensor.size == shape[-1] and list(tensor.shape)[-1:] == [shape[-1]] and len(tensor.shape) <= len(shape):
                yield value, node

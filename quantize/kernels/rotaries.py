"""Put rotary embeddings into functions, which the native operator ``RotaryEmbedding`` computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import onnx_ir as ir

from ...transforms.graphs.inference import inferred
from ...transforms.graphs.queries import Shape, axes_of, constant, is_standard, made_by, producer_of
from .call import Call, Tensors
from .put_calls import put_calls

INPUTS = ("x", "cos", "sin")


@dataclass(frozen=True, eq=False)
class _Rotary:
    """Operators that turn pairs of values.

    Attributes:
        x: What they turn.
        cos: The cosines of the angles.
        sin: Their sines.
        interleaved: Whether the pairs stand in the last axis of x; otherwise they are half of it apart.
        nodes: The operators; the last one computes the result.
    """

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    interleaved: bool
    nodes: Sequence[ir.Node]


def wrap_rotaries(model: ir.Model, shapes: Mapping[str, Shape]) -> int:
    """Put rotary embeddings into functions; return how many.

    Before:  a, b = Gather(x, 0), Gather(x, 1);  y = Concat(Unsqueeze(a * cos - b * sin), Unsqueeze(a * sin + b * cos))
    After:   y = ai.requant.RotaryEmbedding(x, cos, sin), interleaved 1, whose body is what was there
    Before:  y = x * cos + Concat(Neg(Slice(x, half:)), Slice(x, :half)) * sin
    After:   y = ai.requant.RotaryEmbedding(x, cos, sin), interleaved 0, whose body is what was there
        Both compute the same.
    Left alone: tensors whose last axis has an unknown length, other types than float32, and bodies of control flow.

    Args:
        model: A model.
        shapes: Shapes of the tensors by name.
    """
    places = {node: place for place, node in enumerate(model.graph)}
    found = [rotary for node in places if (rotary := _of_pairs(node, shapes) or _of_halves(node, shapes)) is not None]
    values = inferred(model) if found else {}
    calls = {
        each.nodes[-1].outputs[0]: _call(each, sorted(each.nodes, key=places.__getitem__))
        for each in found
        if _is_float32(each, values)
    }
    return put_calls(model, calls)


def _is_float32(rotary: _Rotary, values: Mapping[str, ir.Value]) -> bool:
    """Return whether tensors are float32; all of them have the same type, which may be known of some only.

    Args:
        rotary: The operators.
        values: Tensors of the model with inferred types by name.
    """
    tensors = (rotary.x, rotary.cos, rotary.sin, rotary.nodes[-1].outputs[0])
    types = {each.dtype or values.get(str(each.name), each).dtype for each in tensors}
    return types - {None} == {ir.DataType.FLOAT}


def _width(value: ir.Value, shapes: Mapping[str, Shape]) -> int | str | None:
    """Return the length of the last axis of a tensor; None if it is not known, or if there is none."""
    return (shapes.get(str(value.name)) or (None,))[-1]


def _call(found: _Rotary, body: Sequence[ir.Node]) -> Call:
    """Return the call of the operator."""
    attributes = {"interleaved": ir.AttrInt64("interleaved", int(found.interleaved))}
    inputs, name = [found.x, found.cos, found.sin], str(body[-1].name)
    tensors = Tensors(range(3), dtype=ir.DataType.FLOAT)
    return Call("RotaryEmbedding", name, INPUTS, inputs, body, attributes, tensors=tensors)


# ------------------------------------------------------------------------------------------------------------ pairs


def _of_pairs(node: ir.Node, shapes: Mapping[str, Shape]) -> _Rotary | None:
    """Return the rotary embedding of pairs in the last axis that ends with a Concat; None if there is none."""
    if not is_standard(node, "Concat") or len(node.inputs) != 2 or not _is_last(node, node.outputs[0], shapes):
        return None
    ends = [made_by(value, "Unsqueeze") for value in node.inputs]
    one, other = ends
    if one is None or other is None or not all(_is_last(end, end.outputs[0], shapes) for end in (one, other)):
        return None
    difference, total = made_by(one.inputs[0], "Sub"), made_by(other.inputs[0], "Add")
    if difference is None or total is None:
        return None
    for a, cos, b, sin in _operands(difference.inputs):
        if {frozenset(each) for each in _factors(total.inputs)} != {frozenset((a, sin)), frozenset((b, cos))}:
            continue
        first, second = made_by(a, "Gather"), made_by(b, "Gather")
        if first is None or second is None or first.inputs[0] is not second.inputs[0] or first.inputs[0] is None:
            continue
        x = first.inputs[0]
        picks = [_picked(each, shapes) for each in (first, second)]
        if picks == [0, 1] and _width(x, shapes) == 2 and len(shapes[str(x.name)]) > 1:
            products = _producers((*difference.inputs, *total.inputs))
            return _Rotary(x, cos, sin, True, [first, second, *products, difference, total, one, other, node])
    return None


def _operands(inputs: Sequence[ir.Value | None]) -> Iterator[tuple[ir.Value, ir.Value, ir.Value, ir.Value]]:
    """Yield the four factors of two products, in all orders within a product."""
    pairs = _factors(inputs)
    if len(pairs) == 2:
        for a, c in permutations(pairs[0]):
            for b, s in permutations(pairs[1]):
                yield a, c, b, s


def _factors(inputs: Sequence[ir.Value | None]) -> list[tuple[ir.Value, ir.Value]]:
    """Return the two factors of each tensor that a Mul computes."""
    products = [made_by(value, "Mul") for value in inputs]
    return [
        (each.inputs[0], each.inputs[1])
        for each in products
        if each is not None and each.inputs[0] is not None and each.inputs[1] is not None
    ]


def _producers(values: Sequence[ir.Value | None]) -> list[ir.Node]:
    """Return the nodes that compute tensors."""
    found = [*map(producer_of, values)]
    return [node for node in found if node is not None]


def _picked(gather: ir.Node, shapes: Mapping[str, Shape]) -> int | None:
    """Return which place of the last axis a Gather takes; None if it takes several, or places of another axis."""
    x, index = gather.inputs[0], constant(gather.inputs[1])
    rank = len(shapes.get(str(x.name), ())) if x is not None else 0
    if index is None or len(index.shape) or gather.attributes.get_int("axis", 0) not in (-1, rank - 1):
        return None
    return int(index.numpy())


def _is_last(node: ir.Node, value: ir.Value, shapes: Mapping[str, Shape]) -> bool:
    """Return whether a Concat or Unsqueeze works on the last axis of its result."""
    rank = len(shapes.get(str(value.name), ()))
    found = [node.attributes.get_int("axis", 0)] if node.op_type == "Concat" else axes_of(node) or []
    return len(found) == 1 and (found[0] == -1 or found[0] == rank - 1 >= 0)


# ----------------------------------------------------------------------------------------------------------- halves


def _of_halves(node: ir.Node, shapes: Mapping[str, Shape]) -> _Rotary | None:
    """Return the rotary embedding of halves of the last axis that ends with an Add; None if there is none."""
    if not is_standard(node, "Add"):
        return None
    for x, cos, turned, sin in (*_operands(node.inputs), *_operands(node.inputs[::-1])):
        parts = _halves_of(turned, x, shapes)
        if parts:
            return _Rotary(x, cos, sin, False, [*parts, *_producers(node.inputs), node])
    return None


def _halves_of(turned: ir.Value, x: ir.Value, shapes: Mapping[str, Shape]) -> list[ir.Node]:
    """Return the operators of Concat(Neg(Slice(x, half:)), Slice(x, :half)) along the last axis; none for others."""
    concat, width = made_by(turned, "Concat"), _width(x, shapes)
    if concat is None or len(concat.inputs) != 2 or not isinstance(width, int) or width % 2:
        return []
    negative, low = made_by(concat.inputs[0], "Neg"), made_by(concat.inputs[1], "Slice")
    high = None if negative is None else made_by(negative.inputs[0], "Slice")
    if negative is None or high is None or low is None or not _is_last(concat, turned, shapes):
        return []
    rank = len(shapes[str(x.name)])
    bounds = [_bounds(each, rank, width) for each in (high, low)]
    whole = high.inputs[0] is x is low.inputs[0]
    return [high, low, negative, concat] if whole and bounds == [(width // 2, width), (0, width // 2)] else []


def _bounds(node: ir.Node, rank: int, width: int) -> tuple[int, int] | None:
    """Return where a Slice of the last axis begins and ends; None for other slices."""
    tensors = [constant(value) for value in node.inputs[1:]]
    if len(tensors) < 3 or any(each is None or each.size != 1 for each in tensors):
        return None
    start, end, axis, *step = (int(each.numpy().reshape(())) for each in tensors if each is not None)
    return (start, min(end, width)) if axis in (-1, rank - 1) and step in ([], [1]) else None

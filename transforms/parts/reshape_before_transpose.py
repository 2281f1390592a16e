"""Reshapes on both sides of a Transpose: the second one goes in front, where it meets the first one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import prod

import numpy as np
import onnx_ir as ir

from ..graphs.queries import graph_of, node_name, sole_reader
from ..graphs.rewriter import add_target, discard, remove, replace_node, unused_name
from ..patterns.lengths import Named

RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
Shape = Sequence[int | None]
"""Lengths of axes; None for an unknown one."""


def moved_before(node: ir.Node, before: Shape, after: Shape, taken: set[str]) -> bool:
    """Move a reshape in front of the Transpose before it, behind which another reshape stands; return whether it moved.

    Before:  y = Reshape(Transpose(Reshape(x, [10, 7, 16]), perm [0, 2, 1]), [2, 5, 16, 7])
    After:   y = Transpose(Reshape(Reshape(x, [10, 7, 16]), [2, 5, 7, 16]), perm [0, 1, 3, 2])

    Args:
        node: The second reshape.
        before: The shape of the Transpose's input.
        after: The shape of the result.
        taken: The names in the model.
    """
    turn = _alone_before(node)
    first = None if turn is None or turn.op_type != "Transpose" else _alone_before(turn)
    if turn is None or first is None or first.op_type not in RESHAPES:
        return False
    order = list(turn.attributes.get_ints("perm", range(len(before))[::-1]))
    parts = split_axes([before[axis] for axis in order], after)
    if parts is None or list(after).count(None) > 1:
        return False
    by_axis = dict(zip(order, parts, strict=True))
    places = np.cumsum([0, *(len(by_axis[axis]) for axis in range(len(before)))])
    lengths = [-1 if length is None else length for axis in range(len(before)) for length in by_axis[axis]]
    graph = graph_of(node)
    target = add_target(node, lengths, taken)
    moved = ir.node("Reshape", [turn.inputs[0], target], name=unused_name(taken, f"{node_name(node)}/before"))
    moved.outputs[0].name = unused_name(taken, f"{node_name(node)}/reshaped")
    perm = [int(places[axis]) + place for axis in order for place in range(len(by_axis[axis]))]
    turned = ir.node("Transpose", moved.outputs, {"perm": perm}, name=node_name(node))
    graph.insert_before(node, [moved])
    others = node.inputs[1:]
    replace_node(node, turned)
    remove(turn)
    discard(*others)
    return True


def transposed_alone(node: ir.Node, whole: Named, between: Named, result: Named) -> bool:
    """Let a Transpose between two reshapes stand alone, if these only merge and split axes; return whether it does.

    Before:  y = Reshape(Transpose(Reshape(x, [-1, T, 64]), perm [0, 2, 1]), [N, 6, 64, T]), x (N, 6, T, 64)
    After:   y = Transpose(x, perm [0, 1, 3, 2])
        PyTorch writes keys so.

    Args:
        node: The second reshape.
        whole: The shape of what the first reshape reads.
        between: The shape of its result.
        result: The shape of the result of the second reshape.
    """
    turn = _alone_before(node)
    first = None if turn is None or turn.op_type != "Transpose" else _alone_before(turn)
    if turn is None or first is None or first.op_type not in RESHAPES or None in whole or None in result:
        return False
    order = turn.attributes.get_ints("perm", range(len(between))[::-1])
    for ends in combinations(range(1, len(whole)), max(len(between) - 1, 0)):
        groups = [[*range(*bounds)] for bounds in pairwise((0, *ends, len(whole)))]
        merged = [_merged([whole[axis] for axis in group]) for group in groups]
        others = sum(one is None or one != other for one, other in zip(merged, between, strict=True))
        perm = _with_ones([axis for place in order for axis in groups[place]], whole, result)
        if others <= 1 and perm is not None:  # the other lengths tell an unknown one
            targets = (*node.inputs[1:], *first.inputs[1:])
            replace_node(node, ir.node("Transpose", [first.inputs[0]], {"perm": perm}, name=node_name(turn)))
            remove(turn)
            remove(first)
            discard(*targets)
            return True
    return False


def _with_ones(order: Sequence[int], whole: Named, result: Named) -> list[int] | None:
    """Return an order of axes with those of length 1 where the result has them; None if the other lengths differ."""
    ones = [axis for axis in order if whole[axis] == 1]
    rest = [axis for axis in order if whole[axis] != 1]
    if len(ones) != [*result].count(1) or [whole[axis] for axis in rest] != [each for each in result if each != 1]:
        return None
    left, kept = iter(ones), iter(rest)
    return [next(left) if length == 1 else next(kept) for length in result]


def _merged(lengths: Named) -> int | str | None:
    """Return the length of merged axes: that of a single one, or the product of numbers; None if it has no name."""
    if len(lengths) == 1:
        return lengths[0]
    numbers = [length for length in lengths if isinstance(length, int)]
    return prod(numbers) if len(numbers) == len(lengths) else None


def split_axes(whole: Shape, parts: Shape) -> list[list[int | None]] | None:
    """Return for each axis of a tensor the lengths into which a reshape splits it; None if it does something else.

    An axis of unknown length, or else the first one, gets the parts that the others leave. Lengths of 1 may be at
    either side of where two axes meet.
    """
    unknown = [axis for axis, length in enumerate(whole) if length is None]
    if len(unknown) > 1 or not whole:
        return None
    middle, left = (unknown[0] if unknown else 0), list(parts)
    found: list[list[int | None]] = [[] for _ in whole]
    for axis in [*range(len(whole) - 1, middle, -1), *range(middle)]:
        behind = axis > middle
        count = _count(left[::-1] if behind else left, whole[axis])
        if count is None:
            return None
        at = len(left) - count if behind else count
        found[axis], left = (left[at:], left[:at]) if behind else (left[:at], left[at:])
    fits = whole[middle] is None or (None not in left and prod(map(int, filter(None, left))) == whole[middle])
    found[middle] = left
    return found if fits and 0 not in left else None


def _count(lengths: Shape, whole: int | None) -> int | None:
    """Return how many of the first lengths give an axis; None if none do."""
    product = 1
    for count in range(len(lengths) + 1):
        if product == whole:
            return count
        length = lengths[count] if count < len(lengths) else None
        if not length:
            return None
        product *= length
    return None


def _alone_before(node: ir.Node) -> ir.Node | None:
    """Return the standard operator whose result a node alone reads; None if there is none."""
    value = node.inputs[0]
    before = None if value is None or sole_reader(value) is not node else value.producer()
    return before if before is not None and not before.domain and before.graph is node.graph else None

"""Find heads that stand side by side in the last axis of a tensor, and heads that operators repeat."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from ... import RequantError
from ...calibration.model.session import Array, open_session, run_session
from ...transforms.graphs.queries import Shape, constant
from ...transforms.patterns.attention import BATCH_SECOND, HEADS, HEADS_OF, REPEATS, ROWS_FIRST
from .chains import Constants, copied, serialized

MOVES = frozenset("Flatten Gather Identity Reshape Slice Split Squeeze Transpose Unsqueeze".split())
"""Operators that move values and compute none."""
TO_HEADS_FIRST = {order: turn for turn, order in HEADS_OF.items()}
"""The permutation from each order of axes to `HEADS_FIRST`."""
FREE = ((2, 3), (5, 2))  # lengths of the first two axes that are tried where the model leaves them open


@dataclass(frozen=True, slots=True)
class Places:
    """Where heads stand in a tensor of three axes.

    Attributes:
        order: `ROWS_FIRST` for (batch, rows, columns), `BATCH_SECOND` for (rows, batch, columns).
        count: How many heads there are.
        columns: The columns of each.
        first: The first column of the first head.
        step: The columns from the first one of a head to that of the next.
        has_head_axis: Whether the tensor that attention reads has an axis for heads.
    """

    order: int
    count: int
    columns: int
    first: int
    step: int
    has_head_axis: bool = True


@dataclass(frozen=True, eq=False)
class Heads:
    """Heads of attention in a tensor.

    Attributes:
        source: The tensor.
        places: Where they are.
        nodes: The operators that move them out, in order.
    """

    source: ir.Value
    places: Places
    nodes: tuple[ir.Node, ...]

    def divided(self, count: int) -> Heads:
        """Return a single head as `count` heads side by side; they stay one in the result."""
        columns = self.places.columns // count
        return replace(self, places=replace(self.places, count=count, columns=columns, step=columns))


def heads_of(
    model: ir.Model, value: ir.Value, order: int, shapes: Mapping[str, Shape], *, only_itself: bool = False
) -> Heads | None:
    """Return the tensor that holds the heads of a tensor side by side in its last axis; None if there is none.

    The operators between the two are run on the numbers of the elements: so any of them that move values may be
    there, in any order. Of several tensors the farthest is taken. A tensor without heads, (batch, rows, columns), has
    one head.

    Args:
        model: The model.
        value: The tensor that attention reads.
        order: The order of its axes.
        shapes: Shapes of the tensors by name.
        only_itself: Whether only the tensor itself may hold them, with no operators between.
    """
    for source, moves in reversed([*_sources(value, () if only_itself else MOVES)]):
        *outer, width = shapes.get(str(source.name)) or (None,)
        if len(outer) == len(FREE[0]) and isinstance(width, int):
            moved = _serialized_moves(model, source, value, moves) if moves else None
            places = _single(width) if moved is None else _places(moved, outer, width, order)
            if places is not None:
                return Heads(source, places, moves)
    return None


def fewer_heads(
    model: ir.Model, value: ir.Value, order: int, shapes: Mapping[str, Shape]
) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """Return the tensor whose heads operators repeat for neighbouring queries, and these operators.

    Without such operators it is the tensor itself. As in `heads_of`, the operators are run on the numbers of elements.

    Args:
        model: The model.
        value: The tensor that attention reads.
        order: The order of its axes and of those of the tensor with fewer heads, `HEADS_FIRST` or `ROWS_FIRST`.
        shapes: Shapes of the tensors by name.
    """
    axis = 2 if order == ROWS_FIRST else 1
    for source, moves in _sources(value, MOVES | REPEATS):
        shape = shapes.get(str(source.name)) or ()
        if len(shape) != len(HEADS) or not any(node.op_type in REPEATS for node in moves):
            continue
        batch, heads, rows, columns = shape if axis == 1 else [shape[each] for each in HEADS]
        if not isinstance(heads, int) or not isinstance(columns, int):
            continue
        moved = _serialized_moves(model, source, value, moves)
        tried = [(one, heads, other) if axis == 1 else (one, other, heads) for one, other in _tried((batch, rows))]
        if all(_repeats(moved, (*lengths, columns), axis) for lengths in tried):
            return source, moves
    return value, ()


def _sources(value: ir.Value, allowed: Collection[str]) -> Iterator[tuple[ir.Value, tuple[ir.Node, ...]]]:
    """Yield a tensor and those in front of it, the nearest first, each with the allowed operators behind it."""
    nodes, source = list[ir.Node](), value
    yield source, ()
    while (node := source.producer()) is not None and _moves(node, allowed) and node.inputs[0] is not None:
        nodes.insert(0, node)
        source = node.inputs[0]
        yield source, tuple(nodes)


def _single(width: int) -> Places:
    """Return where the head of a tensor without heads stands."""
    return Places(ROWS_FIRST, count=1, columns=width, first=0, step=width, has_head_axis=False)


def _moves(node: ir.Node, allowed: Collection[str]) -> bool:
    """Return whether a node is allowed and moves the values of its first input, with constants as the others."""
    others = [value for value in node.inputs[1:] if value is not None]
    return node.op_type in allowed and not node.domain and all(constant(value) is not None for value in others)


def _serialized_moves(model: ir.Model, source: ir.Value, value: ir.Value, nodes: Sequence[ir.Node]) -> bytes:
    """Return a model of some nodes, from ``x`` to ``y``, with int32 tensors."""
    axes = None if source.shape is None else [None] * len(source.shape)
    x, constants = ir.val("x", dtype=ir.DataType.INT32, shape=axes), Constants()
    copies = copied(nodes, {source: x}, constants.add)
    result = copies[-1].outputs[nodes[-1].outputs.index(value)]
    result.dtype = ir.DataType.INT32
    return serialized(model, (x, result), copies, constants)


def _places(moves: bytes, outer: Shape, width: int, order: int) -> Places | None:
    """Return where the heads stand in a tensor (*outer, width), for all lengths of free axes; None without heads."""
    one, other = ({*_found(moves, (*lengths, width), order)} for lengths in _tried(outer))
    return min(one & other, key=lambda places: places.order, default=None)


def _tried(lengths: Shape) -> list[tuple[int, ...]]:
    """Return the lengths of two axes that are tried: those that the model knows, and others for free axes."""
    return [
        tuple(given if isinstance(given, int) else free for given, free in zip(lengths, each, strict=True))
        for each in FREE
    ]


@lru_cache(maxsize=256)
def _found(moves: bytes, lengths: tuple[int, ...], order: int) -> tuple[Places, ...]:
    """Return all ways in which heads may stand in a tensor of these lengths; layers of a model have the same."""
    result = _moved(moves, _numbers(lengths))
    if result is None:
        return ()
    has_head_axis = result.ndim == len(HEADS)
    if result.ndim not in (len(lengths), len(HEADS)) or not result.size:
        return ()
    result = result if has_head_axis else result[:, None]
    result = result.transpose(TO_HEADS_FIRST[order]) if order in TO_HEADS_FIRST else result
    found = (_side_by_side(result, lengths, order) for order in (ROWS_FIRST, BATCH_SECOND))
    return tuple(replace(places, has_head_axis=has_head_axis) for places in found if places is not None)


@lru_cache(maxsize=256)
def _repeats(moves: bytes, lengths: tuple[int, ...], axis: int) -> bool:
    """Return whether operators repeat each head of a tensor of these lengths in place; `axis` is that of the heads."""
    numbers = _numbers(lengths)
    result, heads = _moved(moves, numbers), lengths[axis]
    if result is None or result.ndim != len(HEADS) or not result.size or result.shape[axis] % heads:
        return False
    return np.array_equal(result, np.repeat(numbers, result.shape[axis] // heads, axis=axis))


def _numbers(lengths: tuple[int, ...]) -> Array:
    """Return the number of each element of a tensor."""
    return np.arange(math.prod(lengths), dtype=np.int32).reshape(lengths)


def _moved(moves: bytes, numbers: Array) -> Array | None:
    """Run operators that move values; return None if they do not run with these lengths."""
    try:
        return run_session(open_session(moves, threads=1, optimize=False), ["y"], {"x": numbers}, "moves")["y"]
    except RequantError:
        return None


def _side_by_side(numbers: Array, lengths: tuple[int, ...], order: int) -> Places | None:
    """Return where heads stand in a tensor whose axes have this order; None if they do not.

    Args:
        numbers: Of which element of the tensor each is a copy, (batch, heads, rows, columns).
        lengths: The lengths of the tensor's axes.
        order: The order of the axes.
    """
    batch, heads, rows, columns = numbers.shape
    if lengths[:2] != ((batch, rows) if order == ROWS_FIRST else (rows, batch)):
        return None
    of_heads = numbers[0, :, 0, 0]
    steps = {int(after - before) for before, after in pairwise(of_heads)} or {columns}
    first, step = int(of_heads[0]), min(steps)
    one, other = lengths[1] * lengths[2], lengths[2]
    by_batch, by_row = (one, other) if order == ROWS_FIRST else (other, one)
    batches, heads_, rows_, columns_ = np.ogrid[:batch, :heads, :rows, :columns]
    expected = by_batch * batches + step * heads_ + by_row * rows_ + columns_ + first
    return Places(order, heads, columns, first, step) if step > 0 and (numbers == expected).all() else None

"""Why attention cannot be a native operator.

Attention is softmax(scale * q k' + mask) v. The native operator needs float32 and shapes of known ranks. Lengths need
not be known, except where the result depends on them: heads, and the width of q if it gives the scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ...transforms.graphs.queries import Shape, is_float32, plain_shape
from ...transforms.int8.plan import Unit
from ...transforms.int8.reasons import NONE, Reason
from ...transforms.patterns.attention import FoundAttention, attention_among
from ...transforms.patterns.cached_attention import CACHED, find_cached
from . import reasons as why
from .facts import Facts


def attention_obstacle(unit: Unit, facts: Facts) -> Reason:
    """Return why attention, with a cache or without it, cannot be a native operator; `NONE` if it can."""
    return _cached_obstacle(unit, facts) if unit.op in CACHED else _form_obstacle(unit, facts)


def _cached_obstacle(unit: Unit, facts: Facts) -> Reason:
    """Return why attention with a cache cannot be a native operator."""
    found = find_cached(facts.nodes[unit.nodes[0]])
    if isinstance(found, str):
        return why.ATTENTION_FORM.about(found)
    values = (facts.values.get(str(value.name), value) for value in found.floats)
    if not all(map(is_float32, (*values, *(facts.values.get(name) for name in unit.outputs)))):
        return why.NOT_FLOAT32
    return NONE


def _form_obstacle(unit: Unit, facts: Facts) -> Reason:
    """Return why attention without an operator for its cache cannot be a native operator; `NONE` if it can.

    The first of these checks that fails gives the reason: the operators are found; the types fit; all ranks are known;
    the shapes fit.
    """
    found = attention_among(facts.nodes[name] for name in unit.nodes)
    if found is None:
        return why.NO_FORM
    inputs = [facts.values.get(str(value.name), value) for value in found.inputs if value is not found.windows]
    results = [facts.values.get(name) for name in unit.outputs]
    if not all(map(is_float32, (*_numbers(found, inputs), *results))):
        return why.NOT_FLOAT32
    shapes = [shape for shape in map(plain_shape, inputs) if shape is not None]
    if len(shapes) < len(inputs):
        return why.NO_FORM
    return NONE if _shapes_fit(found, shapes, facts) else why.NO_FORM


def _numbers(found: FoundAttention, inputs: Sequence[ir.Value]) -> list[ir.Value]:
    """Return the inputs that must be float32: all but a mask that tells which keys are seen.

    Such a mask is of booleans, or of int32 where the operator says what a hidden key adds (`FoundAttention.hidden`).
    """
    of_mask = ir.DataType.BOOL if found.hidden is None else ir.DataType.INT32
    return [value for value in inputs if value.dtype is not of_mask]


def _shapes_fit(found: FoundAttention, shapes: Sequence[Shape], facts: Facts) -> bool:
    """Return whether the native operator takes tensors of these shapes.

    Args:
        found: The attention.
        shapes: The shapes of q, k and v, and of the mask if there is one.
        facts: The input of the rules.
    """
    return (
        _operands_fit(found, shapes)
        and (not found.past or _follows_cache(found, shapes, facts))
        and _scale_is_known(found, shapes)
        and all(len(mask) in _ranks_of_mask(found, shapes) for mask in shapes[3:])
        and (not _heads_side_by_side(found) or _splits(found, shapes))
    )


def _heads_side_by_side(found: FoundAttention) -> bool:
    """Return whether the heads stand side by side in the last axis of (batch, rows, columns)."""
    return any(found.heads)


def _operands_fit(found: FoundAttention, shapes: Sequence[Shape]) -> bool:
    """Return whether q, k and v have one rank, and the operator takes it.

    It is 3 where heads stand side by side. Without that it is 4, or 3 for a single head; where a query that sees no key
    gives 0, it is 4.
    """
    ranks = {len(shape) for shape in shapes[:3]}
    if _heads_side_by_side(found):
        return ranks == {3}
    return ranks == {4} or (ranks == {3} and not found.zero)


def _scale_is_known(found: FoundAttention, shapes: Sequence[Shape]) -> bool:
    """Return whether the scale of the scores is known: it is given, or follows from the width of q."""
    return found.scale is not None or isinstance(shapes[0][-1], int)


def _ranks_of_mask(found: FoundAttention, shapes: Sequence[Shape]) -> range:
    """Return the ranks that the mask may have.

    A mask of padding is (batch, keys): other forms of it, as lengths, are not known. Another mask is added to the
    scores, so it has at most their axes: those of q, or 4 where heads stand side by side.
    """
    if found.hidden is not None:
        return range(2, 3)
    return range((4 if _heads_side_by_side(found) else len(shapes[0])) + 1)


def _follows_cache(found: FoundAttention, shapes: Sequence[Shape], facts: Facts) -> bool:
    """Return whether the native operator takes keys and values of earlier runs.

    The cache must be float32. The heads of q must be known to be a multiple of the heads of k. With a causal mask there
    must be as many new keys as queries.
    """
    side_by_side = _heads_side_by_side(found)
    heads_of_q, heads_of_k = found.heads if side_by_side else (shapes[0][1], shapes[1][1])
    if not isinstance(heads_of_q, int) or not isinstance(heads_of_k, int):
        return False
    if heads_of_q <= 0 or heads_of_k <= 0 or heads_of_q % heads_of_k:
        return False
    axis_of_rows = 1 if side_by_side else 2
    if found.causal and _differ(found, shapes[0][axis_of_rows], shapes[1][axis_of_rows]):
        return False
    return all(is_float32(facts.values.get(str(value.name), value)) for value in found.past)


def _differ(found: FoundAttention, queries: int | str | None, keys: int | str | None) -> bool:
    """Return whether there are not as many new keys as queries, as far as both numbers are known.

    The runtime hides no key from a single query, but the native operator does.
    """
    names = _names(found)
    return len({length for length in (queries, keys) if isinstance(length, int) or length in names}) > 1


def _names(found: FoundAttention) -> set[str | None]:
    """Return the names of lengths in the user's model. onnx gives every other length a name of its own."""
    graph = found.nodes[0].graph
    inputs = () if graph is None else graph.inputs
    return {axis for value in inputs for axis in plain_shape(value) or () if isinstance(axis, str)}


def _splits(found: FoundAttention, shapes: Sequence[Shape]) -> bool:
    """Return whether the last axes of q, k and v are known to be whole heads side by side."""
    counts = (found.heads[0], found.heads[1], found.heads[1])
    of_each = [(shape[-1], count) for shape, count in zip(shapes, counts, strict=False)]
    whole = all(isinstance(width, int) and count and width % count == 0 for width, count in of_each)
    return whole and found.heads[0] % found.heads[1] == 0

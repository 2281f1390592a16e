"""Why attention cannot be a native operator."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ...transforms.graphs.queries import is_float32, plain_shape
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
    """Return why attention cannot be a native operator.

    q, k and v have the same rank, and the mask no more axes, except where heads stand side by side. A mask of padding
    has a number for each key, and no lengths in place of them. The widths of q and v are known if the operator has to
    know them.
    """
    found = attention_among(facts.nodes[name] for name in unit.nodes)
    if found is None:
        return why.NO_FORM
    values = [facts.values.get(str(value.name), value) for value in found.inputs if value is not found.windows]
    of_mask = ir.DataType.BOOL if found.hidden is None else ir.DataType.INT32
    numbers = [value for value in values if value.dtype is not of_mask]
    if not all(map(is_float32, (*numbers, *(facts.values.get(name) for name in unit.outputs)))):
        return why.NOT_FLOAT32
    shapes = [shape for shape in map(plain_shape, values) if shape is not None]
    ranks, joined = [len(shape) for shape in shapes], any(found.heads)
    expected = (3,) if joined else (4,) if found.zero else (3, 4)
    if len(ranks) < len(values) or len({*ranks[:3]}) != 1 or ranks[0] not in expected:
        return why.NO_FORM
    if found.past and not _follows_cache(found, shapes, facts):
        return why.NO_FORM
    known = found.scale is not None or isinstance(shapes[0][-1], int)
    of_masks = range(2, 3) if found.hidden is not None else range(5 if joined else ranks[0] + 1)
    if not known or any(rank not in of_masks for rank in ranks[3:]) or (joined and not _splits(found, shapes)):
        return why.NO_FORM
    return NONE


def _follows_cache(found: FoundAttention, shapes: Sequence[Sequence[int | str | None]], facts: Facts) -> bool:
    """Return whether the cache of attention is float32, and the heads are known that q and k have.

    With a causal mask there must be as many new keys as queries, where both numbers are known: the runtime hides no
    key from a single query, but the operator does.
    """
    joined = any(found.heads)
    counts = found.heads if joined else (shapes[0][1], shapes[1][1])
    of_q, of_k = (count if isinstance(count, int) else 0 for count in counts)
    rows, names = {shape[1 if joined else 2] for shape in shapes[:2]}, _names(found)
    if found.causal and len({count for count in rows if isinstance(count, int) or count in names}) > 1:
        return False
    known = of_q > 0 and of_k > 0 and of_q % of_k == 0
    return known and all(is_float32(facts.values.get(str(value.name), value)) for value in found.past)


def _names(found: FoundAttention) -> set[str | None]:
    """Return the names of lengths in the user's model. onnx gives every other length a name of its own."""
    graph = found.nodes[0].graph
    inputs = () if graph is None else graph.inputs
    return {axis for value in inputs for axis in plain_shape(value) or () if isinstance(axis, str)}


def _splits(found: FoundAttention, shapes: Sequence[Sequence[int | str | None]]) -> bool:
    """Return whether the last axes of q, k and v are known to be whole heads side by side."""
    counts = (found.heads[0], found.heads[1], found.heads[1])
    of_each = [(shape[-1], count) for shape, count in zip(shapes, counts, strict=False)]
    whole = all(isinstance(width, int) and count and width % count == 0 for width, count in of_each)
    return whole and found.heads[0] % found.heads[1] == 0

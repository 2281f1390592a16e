"""Find attention over keys and values of earlier runs: operators that read a cache, and return it with the new rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ..graphs.queries import key, unread
from .attention import CACHES, GROUP_QUERY, UNREAD, FoundAttention, are_factors, padded, unknown

KNOWN = frozenset(
    "causal do_rotary kv_num_heads local_window_size num_heads rotary_interleaved scale smooth_softmax softcap".split()
)
"""The attributes of a GroupQueryAttention that are known; those of newer versions, as for quantized caches, are not."""
PLACES, LAST = 9, 11
"""Among the inputs of a GroupQueryAttention: the places of the tokens, and the last one that the native one has."""
TENSORS = "q k v mask past_key past_value lengths total cos sin sinks".split()
"""The inputs of the native operator, in order."""
INTEGERS = frozenset({"lengths", "total"})
"""Those that are no floats."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CachedAttention:
    """An operator that is attention over the rows of a cache and new rows.

    Attributes:
        q: Queries, (batch, rows, heads * depth). Without `k` and `v`, keys and values stand behind them. q, k and v may
            be (batch, heads, rows, columns) too.
        k: New keys, (batch, rows, shared * depth); None if they stand in `q`.
        v: New values, (batch, rows, shared * width); None if they stand in `q`.
        mask: What is added to the scores; None without it.
        past_key: Keys of earlier runs, (batch, shared, room, depth); None without them.
        past_value: Values of earlier runs; None without them.
        lengths: int32 (batch,): the number of keys of each item, less one; None if all rows of the cache are keys.
        total: int32, one number: the number of keys of the longest item; None without `lengths`.
        cos: The cosines by which q and k are rotated, (places, angles); None without rotation.
        sin: The sines.
        sinks: (heads,): a score of each query beside those of the keys, whose share of the softmax has no value; None
            without it.
        heads: How many heads q has.
        shared: How many heads k and v have.
        scale: What the scores are multiplied by; 0 for 1 / sqrt(depth).
        interleaved: Whether neighbours are rotated; otherwise values that are `angles` apart.
        causal: Whether each query sees the keys up to its own; otherwise it sees all.
        zero: Whether a query that sees no key gives 0; otherwise NaN.
        window: How many keys each query sees at most, with its own; 0 for all.
        cap: What scores are capped at: they become cap * tanh(score / cap) before the mask; 0 if they stay.
        smooth: Whether each query has a sink of 0.
    """

    q: ir.Value
    k: ir.Value | None
    v: ir.Value | None
    mask: ir.Value | None
    past_key: ir.Value | None
    past_value: ir.Value | None
    lengths: ir.Value | None = None
    total: ir.Value | None = None
    cos: ir.Value | None = None
    sin: ir.Value | None = None
    sinks: ir.Value | None = None
    heads: int
    shared: int
    scale: float
    interleaved: bool = False
    causal: bool = True
    zero: bool = True
    window: int = 0
    cap: float = 0
    smooth: bool = False

    @property
    def inputs(self) -> dict[str, ir.Value | None]:
        """The tensors that it reads, by name, in the order of the native operator."""
        return {name: getattr(self, name) for name in TENSORS}

    @property
    def floats(self) -> list[ir.Value]:
        """The tensors of floats that it reads."""
        return [value for name, value in self.inputs.items() if value is not None and name not in INTEGERS]


def find_cached(node: ir.Node) -> CachedAttention | str:
    """Return the attention that an operator in `CACHED` computes, or what it has that the native operator has not."""
    return CACHED[key(node)](node)


def _group_query(node: ir.Node) -> CachedAttention | str:
    """Return what a GroupQueryAttention computes, or what it has that the native operator has not."""
    q, k, v, past_key, past_value, lengths, total, cos, sin, _, mask, sinks = padded(node, LAST + 1)[: LAST + 1]
    integers, reals = node.attributes.get_int, node.attributes.get_float
    turns = bool(integers("do_rotary", 0))
    if missing := _missing(node):
        return missing
    assert q is not None  # else it lacks factors
    return CachedAttention(
        q=q,
        k=k,
        v=v,
        mask=mask,
        past_key=past_key,
        past_value=past_value,
        lengths=lengths,
        total=total,
        cos=cos if turns else None,
        sin=sin if turns else None,
        sinks=sinks,
        heads=integers("num_heads", 0),
        shared=integers("kv_num_heads", 0),
        scale=reals("scale", 0),
        interleaved=bool(integers("rotary_interleaved", 0)),
        window=max(integers("local_window_size", -1), 0),
        cap=reals("softcap", 0),
        smooth=integers("smooth_softmax", 0) > 0,
    )


def cached(found: FoundAttention, heads: tuple[int, int]) -> CachedAttention:
    """Return attention behind a cache of which all rows are keys; `heads`: how many q, and k and v, have."""
    past_key, past_value = found.past
    return CachedAttention(
        q=found.q,
        k=found.k,
        v=found.v,
        mask=found.mask,
        past_key=past_key,
        past_value=past_value,
        heads=heads[0],
        shared=heads[1],
        scale=found.scale or 0,
        causal=found.causal,
        zero=found.zero,
        cap=found.cap,
    )


def _missing(node: ir.Node) -> str:
    """Return what a GroupQueryAttention has that the native operator has not; empty if there is nothing."""
    integers, reals = node.attributes.get_int, node.attributes.get_float
    q, k, v, *_ = given = padded(node, LAST + 1)
    spare = [index for index, value in enumerate(given) if value is not None and (index == PLACES or index > LAST)]
    lacks = {
        "position_ids": PLACES in spare,
        "further inputs": bool(spare),
        unknown(node, KNOWN): bool(unknown(node, KNOWN)),
        "softcap below 0": reals("softcap", 0) < 0,
        "attention that is not causal": integers("causal", 1) != 1,
        "scale that is not above 0": reals("scale", 0) < 0,
        UNREAD: len(node.outputs) < CACHES,
        "scores as a result": not unread(node, CACHES),
        "factors that are constant or equal": not are_factors(q, *(() if k is None else (k, v))),
    }
    return next((name for name, asked in lacks.items() if asked), "")


CACHED: Mapping[str, Callable[[ir.Node], CachedAttention | str]] = {GROUP_QUERY: _group_query}
"""Operators with caches, by their key, and what returns the attention, or what it has that the native one has not."""

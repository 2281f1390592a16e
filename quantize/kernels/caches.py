"""Put attention with a cache into functions, which the native operator ``CachedAttention`` computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import onnx_ir as ir

from ...transforms.graphs.queries import nodes_by_name
from ...transforms.int8.ops import OPS
from ...transforms.int8.plan import Unit
from ...transforms.patterns.attention import CACHES, GROUP_QUERY
from ...transforms.patterns.cached_attention import CACHED, INTEGERS, TENSORS, CachedAttention, find_cached
from ...transforms.quantize_caches import find_bytes, find_floats
from .call import Call, Results, Tensors, attributes_of
from .put_calls import put_calls

WITH_BYTES, PASTS = "QuantizedCacheAttention", ("past_key", "past_value")
"""The operator whose cache is bytes, and the inputs that are the cache."""


def wrap_caches(model: ir.Model, units: Iterable[Unit]) -> int:
    """Put attention with a cache into functions; return how many.

    Before:  y, k2, v2 = com.microsoft.GroupQueryAttention(q, k, v, past_key, past_value, lengths, total, ...)
    After:   y, k2, v2 = ai.requant.CachedAttention(q, k, v, , past_key, past_value, lengths, total, ...), whose body is
             what was there
        The operator rounds q, k and v with ranges that it finds and multiplies integers; the body computes in float.
    Left alone: attention in bodies of control flow, and other units.

    Args:
        model: A model.
        units: Units of the model that compute in integers, in order.
    """
    nodes, calls = nodes_by_name(model), dict[ir.Value, Call]()
    for unit in (each for each in units if each.op in CACHED):
        node = nodes[unit.nodes[0]]
        found = find_cached(node)
        if isinstance(found, CachedAttention) and node.graph is model.graph:
            calls[node.outputs[0]] = cached_call(unit.name, found, [node])
    return put_calls(model, calls)


def cached_call(name: str, found: CachedAttention, body: Sequence[ir.Node]) -> Call:
    """Return the call of the operator in place of some nodes; the last one has the results.

    If the cache is bytes (`quantize_caches`), the operator reads and writes these.
    """
    inputs = found.inputs
    values: dict[str, int | float] = {
        "heads": found.heads,
        "shared": found.shared,
        "scale": found.scale,
        "interleaved": int(found.interleaved),
        **({} if found.causal else {"causal": 0}),
        **({} if found.zero else {"zero": 0}),
        **({"window": found.window} if found.window else {}),
        **({"cap": found.cap} if found.cap else {}),
        **({"smooth": 1} if found.smooth else {}),
    }
    places = [place for place, name in enumerate(TENSORS) if inputs[name] is not None and name not in INTEGERS]
    call = Call(
        OPS[GROUP_QUERY].native,
        name,
        TENSORS,
        [*inputs.values()],
        body,
        attributes_of(values),
        tensors=Tensors(places, dtype=ir.DataType.FLOAT),
        results=Results(CACHES),
    )
    return _with_bytes(call, found)


def _with_bytes(call: Call, found: CachedAttention) -> Call:
    """Return a call that reads and writes the bytes of a cache; the same call for a cache of floats."""
    pasts = [find_floats(value) for value in (found.past_key, found.past_value)]
    presents = [find_bytes(value) for value in call.body[-1].outputs[1:CACHES]]
    before, after = ([each for each in found if each is not None] for found in (pasts, presents))
    if len(before) + len(after) < len(pasts) + len(presents):
        return call
    inputs = dict(zip(call.names, call.inputs, strict=True))
    inputs |= {name: each.values for name, each in zip(PASTS, before, strict=True)}
    inputs |= {f"{name}_scale": each.scale for name, each in zip(PASTS, before, strict=True)}
    return replace(
        call,
        operator=WITH_BYTES,
        names=[*inputs],
        inputs=[*inputs.values()],
        body=[*(node for each in before for node in each.nodes), *call.body],
        tensors=replace(call.tensors, places=[each for each in call.tensors.places if call.names[each] not in PASTS]),
        results=Results(
            behind=[node for each in after for node in each.nodes],
            more=[*(each.values for each in after), *(each.scale for each in after)],
        ),
    )

"""Put attention into functions, which the native operator ``Attention`` computes."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ...transforms.attention import FoundAttention, attention_among
from ...transforms.graph import nodes_by_name
from ...transforms.ops import ATTENTION, OPS
from ...transforms.plan import Unit
from .calls import Call
from .wrap import put_calls

INPUTS = ("q", "k", "v", "mask")


def wrap_attentions(model: ir.Model, units: Iterable[Unit]) -> int:
    """Put attention into functions; return how many.

    Before:  y = MatMul(Softmax(Add(Mul(MatMul(q, Transpose(k)), scale), mask)), v)
    After:   y = ai.requant.Attention(q, k, v, mask), whose body is what was there
        The operator rounds q, k and v with ranges that it finds and multiplies integers; the body computes in float.
    Left alone: attention in bodies of control flow.

    Args:
        model: A model.
        units: Units of the model that compute in integers, in order; those that are no attention are left alone.
    """
    nodes = nodes_by_name(model)
    calls: dict[ir.Value, Call] = {}
    for unit in (each for each in units if each.op == ATTENTION):
        found = attention_among(nodes[name] for name in unit.nodes)
        if found is not None and found.nodes[-1].graph is model.graph:
            calls[found.nodes[-1].outputs[0]] = _call(unit.name, found)
    return put_calls(model, calls)


def _call(name: str, found: FoundAttention) -> Call:
    """Return the call of the operator for attention."""
    attributes = {
        "scale": ir.AttrFloat32("scale", found.scale),
        "rows_first": ir.AttrInt64s("rows_first", [int(first) for first in found.rows_first]),
    }
    operator, sources = OPS[ATTENTION].native, range(len(found.inputs))
    return Call(operator, name, INPUTS, found.inputs, found.nodes, attributes, sources=sources, dtype=ir.DataType.FLOAT)

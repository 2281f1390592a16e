"""Put attention into functions, which the native operator ``Attention`` computes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from ...transforms.graphs.queries import Shape, constant, nodes_by_name
from ...transforms.graphs.rewriter import names
from ...transforms.int8.ops import ATTENTION, OPS
from ...transforms.int8.plan import Unit
from ...transforms.patterns.attention import HEADS, HEADS_FIRST, ROWS_FIRST, FoundAttention, attention_among
from ...transforms.patterns.cached_attention import cached
from .attention_inputs import PlainInputs
from .caches import cached_call
from .call import Call, Tensors, attributes_of
from .common_rows import Part, join_products
from .heads import Heads, fewer_heads, heads_of
from .put_calls import put_calls

INPUTS = ("q", "k", "v", "mask", "windows")
WITH_WINDOWS = "WindowAttention"
FACTORS = 3  # q, k and v
JOINED = 3  # what ``orders`` says of a result whose heads stand side by side in the last axis


def wrap_attentions(model: ir.Model, units: Iterable[Unit], shapes: Mapping[str, Shape], *, join: bool = False) -> int:
    """Put attention into functions; return how many.

    Before:  y = MatMul(Softmax(Add(Mul(MatMul(q, Transpose(k)), scale), mask)), v)
    After:   y = ai.requant.Attention(q, k, v, mask), whose body is what was there
        The operator rounds q, k and v with ranges that it finds and multiplies integers; the body computes in float.
        With `join`, where operators move the heads of q, k and v out of tensors in which they stand side by side, they
        belong to the body: the native operator reads the heads where they are. If these tensors are products of the
        same rows, the products become one. Else, operators that repeat a head of k or v for several queries belong to
        the body: the native operator takes fewer heads.
    Before:  y = MatMul(Softmax(Reshape(Add(Reshape(Add(MatMul(q, Transpose(k)), bias)), mask))), v), where the mask has
             a part for each window, and the batch has whole images
    After:   y = ai.requant.WindowAttention(q, k, v, bias, mask)
    Before:  y = Attention(q, k, v, mask), the operator of opset 23, with a mask of booleans
    After:   y = ai.requant.Attention(q, k, v, Where(mask, 0, -infinity)), whose body is the Attention
        One mask of all layers is one Where. A MultiHeadAttention is the same, and its bias is added in front.
    Before:  y, k2, v2 = Attention(q, k, v, mask, past_key, past_value)
    After:   y, k2, v2 = ai.requant.CachedAttention(q, k, v, mask, past_key, past_value)
    Left alone: attention in bodies of control flow.

    Args:
        model: A model.
        units: Units of the model that compute in integers, in order; those that are no attention are left alone.
        shapes: Shapes of the float tensors by name.
        join: Whether a call includes what is in front of it.
    """
    units = [*units]
    products = {unit.nodes[0] for unit in units if unit.op != ATTENTION}
    calls, inputs = dict[ir.Value, Call](), PlainInputs(model, dict(shapes), names(model))
    # all inputs first: they need the names that are in use, and joined products add some
    for name, found in _plain(model, units, inputs):
        if found.past:
            behind = cached(found, _counts(found, inputs.shapes))
            calls[found.nodes[-1].outputs[0]] = cached_call(name, behind, found.nodes)
            continue
        call = _call(name, found, inputs.shapes)
        if heads := _side_by_side(model, found, inputs.shapes, join=join):
            call = _of_heads(call, found, _of_one_product(found, heads, model, products) if join else heads)
        elif any(found.heads):  # the operator would take them for one head
            continue
        elif join:
            call = _of_groups(call, found, model, inputs.shapes)
        calls[found.nodes[-1].outputs[0]] = call
    return put_calls(model, calls)


def _plain(model: ir.Model, units: Iterable[Unit], inputs: PlainInputs) -> list[tuple[str, FoundAttention]]:
    """Return the attentions of the main graph with plain inputs, each with the name of its unit."""
    nodes, plain = nodes_by_name(model), list[tuple[str, FoundAttention]]()
    for unit in (each for each in units if each.op == ATTENTION):
        found = attention_among(nodes[name] for name in unit.nodes)
        if found is None or found.nodes[-1].graph is not model.graph:
            continue
        for value, tensor in zip(found.inputs[:FACTORS], unit.inputs, strict=False):  # a pair renames what it rounds
            inputs.shapes.setdefault(str(value.name), inputs.shapes.get(tensor, ()))
        found = inputs.of(found)
        if found is not None:
            plain.append((unit.name, found))
    return plain


def _call(name: str, found: FoundAttention, shapes: Mapping[str, Shape]) -> Call:
    """Return the call of the operator for attention."""
    attributes = {
        "scale": ir.AttrFloat32("scale", _scale(found, shapes)),
        "orders": ir.AttrInt64s("orders", found.orders),
        **({"causal": ir.AttrInt64("causal", 1)} if found.causal else {}),
        **({"zero": ir.AttrInt64("zero", 1)} if found.zero else {}),
        **({"cap": ir.AttrFloat32("cap", found.cap)} if found.cap else {}),
    }
    windows, tensors = constant(found.windows), Tensors(range(len(found.inputs)), dtype=ir.DataType.FLOAT)
    if windows is not None:
        attributes["windows"] = ir.AttrInt64("windows", int(windows.shape.numpy()[1]))
    operator, formal = (OPS[ATTENTION].native, INPUTS[:-1]) if windows is None else (WITH_WINDOWS, INPUTS)
    return Call(operator, name, formal, found.inputs, found.nodes, attributes, tensors=tensors)


def _scale(found: FoundAttention, shapes: Mapping[str, Shape]) -> float:
    """Return what scores are multiplied by: 1 / sqrt(depth) if the model does not say it."""
    if found.scale is not None:
        return found.scale
    width = shapes[str(found.q.name)][-1]
    assert isinstance(width, int)  # else attention is no unit
    return 1 / math.sqrt(width // max(found.heads[0], 1))


def _side_by_side(model: ir.Model, found: FoundAttention, shapes: Mapping[str, Shape], *, join: bool) -> list[Heads]:
    """Return where the heads of q, k and v stand side by side; empty unless all do, and heads of k and v are shared.

    Args:
        model: The model.
        found: The attention.
        shapes: Shapes of the float tensors by name.
        join: Whether they may be moved out of other tensors on the way to the attention.
    """
    if not join and not any(found.heads):
        return []
    tensors = zip(found.inputs[:FACTORS], found.orders, strict=False)
    heads = [heads_of(model, value, order, shapes, only_itself=not join) for value, order in tensors]
    whole = [each for each in heads if each is not None]
    if any(found.heads) and len(whole) == FACTORS:
        of_q, of_k = found.heads
        whole = [each.divided(count) for each, count in zip(whole, (of_q, of_k, of_k), strict=True)]
    counts = [each.places.count for each in whole]
    return whole if len(counts) == FACTORS and counts[1] == counts[2] and counts[0] % counts[1] == 0 else []


def _of_one_product(
    found: FoundAttention, heads: Sequence[Heads], model: ir.Model, products: Collection[str]
) -> list[Heads]:
    """Join the products of the same rows in which heads stand, if only attention reads them; return the heads."""
    inside = {*found.nodes}.union(*(each.nodes for each in heads))
    read = [value for each in heads for value in (each.source, *(v for node in each.nodes for v in node.outputs))]
    if any(value.is_graph_output() or any(use.node not in inside for use in value.uses()) for value in read):
        return [*heads]
    parts = join_products(model, (each.source for each in heads), products)
    return [_in_part(each, parts[each.source]) if each.source in parts else each for each in heads]


def _in_part(heads: Heads, part: Part) -> Heads:
    """Return where heads of a part of a product stand in the whole product."""
    places = replace(heads.places, first=part.first + heads.places.first)
    return Heads(part.whole, places, (part.split, *heads.nodes))


def _of_groups(call: Call, found: FoundAttention, model: ir.Model, shapes: Mapping[str, Shape]) -> Call:
    """Return the call that reads each head of k and v once, where operators repeat it for neighbouring queries.

    q must have all heads: the operator learns from it how many there are.
    """
    of_q = _heads_in(found.q, found.orders[0], shapes)
    fewer = [
        fewer_heads(model, value, order, shapes)
        if order in (HEADS_FIRST, ROWS_FIRST) and of_q == _heads_in(value, order, shapes)
        else (value, ())
        for value, order in ((found.k, found.orders[1]), (found.v, found.orders[2]))
    ]
    inputs = [found.q, *(source for source, _ in fewer), *found.inputs[FACTORS:]]
    moves = (node for _, nodes in fewer for node in nodes)
    return replace(call, inputs=inputs, body=[*dict.fromkeys([*moves, *found.nodes])])


def _heads_in(value: ir.Value, order: int, shapes: Mapping[str, Shape]) -> int | str | None:
    """Return how many heads a tensor has; None without an axis for heads, or if its shape is unknown."""
    shape = shapes.get(str(value.name), ())
    return shape[1 if order == HEADS_FIRST else 2] if len(shape) == len(HEADS) else None


def _counts(found: FoundAttention, shapes: Mapping[str, Shape]) -> tuple[int, int]:
    """Return how many heads q has, and how many k and v have."""
    if any(found.heads):
        return found.heads
    of_q, of_k = (_heads_in(value, HEADS_FIRST, shapes) for value in (found.q, found.k))
    assert isinstance(of_q, int)  # else attention with a cache is no native operator
    assert isinstance(of_k, int)
    return of_q, of_k


def _of_heads(call: Call, found: FoundAttention, heads: Sequence[Heads]) -> Call:
    """Return the call that reads the heads of q, k and v where they stand.

    Args:
        call: The call that reads q, k and v.
        found: The attention.
        heads: The heads of q, k and v.
    """
    q, k, v = (each.places for each in heads)
    values: dict[str, int | list[int]] = {
        "orders": [q.order, k.order, v.order, found.orders[-1] if q.has_head_axis else JOINED],
        "heads": q.count,
        **({"shared_heads": k.count} if k.count != q.count else {}),
        "first": [q.first, k.first, v.first],
        "step": [q.step, k.step, v.step],
        "columns": [q.columns, v.columns],
    }
    moves = (node for each in heads for node in each.nodes)  # each tensor's in order; tensors may have some in common
    return replace(
        call,
        inputs=[*(each.source for each in heads), *found.inputs[FACTORS:]],
        body=[*dict.fromkeys([*moves, *found.nodes])],
        attributes={**call.attributes, **attributes_of(values)},
    )

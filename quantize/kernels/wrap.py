"""Put units of a QDQ model into functions of the domain ``ai.requant``, which native operators compute.

A runtime with the library computes the node by the operator of the same name. Any other runtime replaces the node by
the body of the function: the nodes that were there before. The operators take NHWC, so that a Transpose stands on both
sides of the node, and of the body. ONNX Runtime cancels them, if the types and shapes of the tensors are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ... import NATIVE_DOMAIN
from ...transforms.graphs.queries import Shape, constant, graph_of
from ...transforms.graphs.rewriter import add_initializer, names, remove_unread, unused_name
from ...transforms.int8.plan import Unit
from .call import Call, Tensors, attributes_of
from .calls import PAIR, Surroundings, call_of
from .chains import table_of
from .convolution_calls import BIAS, CONVOLUTION, CURVE, RESIDUAL, WEIGHTS
from .curves import SEGMENTS, curve_of
from .put_calls import put_calls
from .site import X, Y

CURVED = frozenset({"Convolution", "GroupNormalization"})
"""The operators that take a function of their result as a curve."""


def wrap_units(
    model: ir.Model, units: Iterable[Unit], shapes: Mapping[str, Shape], *, join: bool = False, exact: bool = False
) -> int:
    """Put units between uint8 tensors into functions; return how many.

    Before:  y8 = QuantizeLinear(Conv(DequantizeLinear(x8), DequantizeLinear(w8), DequantizeLinear(b32)))
    After:   y8 = Transpose(ai.requant.Convolution(Transpose(x8), ..., w8, ..., b32)), a function with the old body
    Left alone: units that have another form in the model, units in bodies of control flow, weights that are not int8
        without their zero points, and tensors of unknown rank.

    Args:
        model: A model in QDQ form.
        units: Convolutions, pools, sums and products, and units that are functions of each element of one tensor, in
            order.
        shapes: Shapes of the float tensors by name.
        join: Whether a convolution and what alone reads it, a sum or a function, become one call; and a group norm and
            a function.
        exact: Whether a call computes what its body computes. If not, joined calls round the sums only once, behind the
            function or the other sum: their results are not those of their bodies, but more accurate.
    """
    return put_calls(model, _calls(model, units, shapes, join=join, exact=exact))


def drop_inner_rounding(model: ir.Model, units: Iterable[Unit], shapes: Mapping[str, Shape]) -> int:
    """Remove the pairs at which joined calls do not round; return how many.

    Before:  y8 = QuantizeLinear(Sigmoid(DequantizeLinear(QuantizeLinear(Conv(x, w, b)))))
    After:   y8 = QuantizeLinear(Sigmoid(Clip(Conv(x, w, b))))
    The model then computes with float operators what `wrap_units` writes as joined calls: corrections that are learned
    on it fit those. A curve clips what it is a function of; a sum is not clipped in front of a residual.
    Left alone: functions that become tables.

    Args:
        model: A model in QDQ form.
        units: As for `wrap_units`.
        shapes: Shapes of the float tensors by name.
    """
    removed, taken = 0, names(model)
    for call in _calls(model, units, shapes, join=True, exact=False).values():
        grid = call.values.get("grid")
        if grid is None and (call.operator != "Convolution" or len(call.tensors.places) == 1):
            continue
        # blocks of pixels are rounded in front of the convolution
        after = next((place for place, node in enumerate(call.body) if node.op_type == "Conv"), 0)
        rounded = [node for node in call.body[after:-1] if node.op_type == "QuantizeLinear"]
        for node in rounded:
            value = node.inputs[0]
            assert value is not None
            if grid is not None and node is rounded[0]:
                value = _clipped(model, node, value, (grid[0], grid[0] + SEGMENTS * grid[1]), taken)
            pairs = [use.node for use in node.outputs[0].uses()]
            for pair in pairs:
                pair.outputs[0].replace_all_uses_with(value)
            remove_unread(pairs)
        removed += len(rounded)
    return removed


def _clipped(model: ir.Model, place: ir.Node, value: ir.Value, bounds: Sequence[float], taken: set[str]) -> ir.Value:
    """Return a tensor clipped to bounds, by a Clip in front of `place`."""
    limits = [
        add_initializer(model.graph, unused_name(taken, f"{value.name}/bound"), np.asarray(each, np.float32))
        for each in bounds
    ]
    clip = ir.node("Clip", [value, *limits], name=unused_name(taken, f"{value.name}/clip"))
    clip.outputs[0].name = unused_name(taken, f"{value.name}/clipped")
    graph_of(place).insert_before(place, [clip])
    return clip.outputs[0]


def native_calls(model: ir.Model) -> list[ir.Node]:
    """Return the native operators of a model."""
    return [node for node in model.graph if node.domain == NATIVE_DOMAIN]


# ----------------------------------------------------------------------------------------------------------- joined


def _calls(
    model: ir.Model, units: Iterable[Unit], shapes: Mapping[str, Shape], *, join: bool, exact: bool
) -> dict[ir.Value, Call]:
    """Return the calls for units, by the uint8 tensor that they compute; the arguments are those of `wrap_units`."""
    around = Surroundings.of(model, shapes)
    calls: dict[ir.Value, Call] = {}
    for unit in units:
        call = call_of(unit, around)
        if call is None:
            continue
        for end in _joinable(calls, call) if join else ():
            both = _joined(model, calls[end], end, call, exact=exact)
            if both is not None:
                del calls[end]
                call = both
                break
        calls[call.body[-1].outputs[0]] = call
    return calls


def _joinable(calls: dict[ir.Value, Call], call: Call) -> list[ir.Value]:
    """Return the results of convolutions and group norms that a call alone reads, the last one first."""
    found = []
    for end in (end for end in reversed(calls) if end in call.computed):
        images = calls[end].operator in CURVED and calls[end].tensors.shapes and call.tensors.shapes
        if images and not end.is_graph_output() and _read_inside(end, call):
            found.append(end)
    return found


def _read_inside(end: ir.Value, call: Call) -> bool:
    """Return whether only the body of a call reads a tensor, also where one DequantizeLinear serves several readers."""
    pairs = [use.node for use in end.uses()]
    uses = [use.node for pair in pairs if pair is not call.body[-1] for value in pair.outputs for use in value.uses()]
    return all(node in call.body for node in (*pairs, *uses))


def _joined(model: ir.Model, first: Call, end: ir.Value, call: Call, *, exact: bool) -> Call | None:
    """Return one call for a convolution or a group norm and the unit behind it; None if there is no such call.

    Args:
        model: The model.
        first: The convolution or the group norm.
        end: Its result.
        call: What reads it.
        exact: As for `wrap_units`.
    """
    if call.chain is not None:
        return _with_function(model, first, call, exact=exact)
    if call.operator == "Add" and first.operator == "Convolution" and not exact:
        return _with_sum(first, end, call)
    return None


def _with_function(model: ir.Model, first: Call, function: Call, *, exact: bool) -> Call | None:
    """Return the call of a convolution or a group norm with the function of its result behind it.

    The function is a curve or, only behind a convolution, a table. None if the call has a curve already, or for a
    function of each channel: lines take no longer than a table behind it.
    """
    chain = function.chain
    assert chain is not None  # it is a Table
    if "curve" in first.values or chain.place is not None:
        return None
    clipped, body = first.values.get("table"), [*first.body, *function.body]
    curve = None if exact or clipped is not None or _is_bounded(first) else curve_of(model, chain)
    if curve is not None:
        first, values = _curved(first), {"curve": curve.lines, "grid": curve.grid}
    elif "table" in first.names:
        table = table_of(model, chain)
        values = {"table": table if clipped is None else table[clipped]}
    else:
        return None
    return replace(first, body=body, values={**first.values, **values})


def _curved(call: Call) -> Call:
    """Return a call that has inputs for a curve; those that a group norm has not always are told by an attribute."""
    if "curve" in call.names:
        return call
    assert call.anchor is not None
    told = attributes_of({"curved": 1})
    anchor = replace(call.anchor, beside=(*call.anchor.beside, *told))
    return replace(call, names=(*call.names, *CURVE), attributes={**call.attributes, **told}, anchor=anchor)


def _is_bounded(call: Call) -> bool:
    """Return whether a group norm has absorbed a Relu or Clip that changes a result."""
    bounds = [call.attributes[name].as_int() for name in ("least", "most") if name in call.attributes]
    return bool(bounds) and bounds != [0, 255]


def _with_sum(convolution: Call, end: ir.Value, total: Call) -> Call | None:
    """Return the call of a convolution whose result is added to another tensor, the residual, before it is rounded.

    None for a residual that is a value for each channel, for a depthwise convolution, which takes no residual, and for
    a convolution that absorbed a Relu or Clip: it stands between the two.
    """
    one, other, result = total.tensors.shapes
    plain = {"DequantizeLinear", "Conv", "QuantizeLinear"}.issuperset(node.op_type for node in convolution.body)
    if list(one) != list(other) or not plain or len(convolution.tensors.places) > 1:
        return None
    weights = constant(convolution.inputs[WEIGHTS])
    assert weights is not None  # only a convolution over blocks has none, and its body is not plain
    if convolution.attributes["group"].as_int() > 1 and weights.shape[1] == 1:
        return None
    named = dict(zip(PAIR, total.inputs, strict=False))
    operands = [[named[name] for name in X], [named["b"], named["b_scale"], named["b_zero_point"]]]
    (residual,) = (operand for operand in operands if operand[0] is not end)
    place = CONVOLUTION.index(RESIDUAL[0])
    inputs = [*convolution.inputs, *[None] * (place - len(convolution.inputs)), *residual]
    inputs[BIAS - len(Y) : BIAS] = [named[name] for name in Y]
    shapes = (convolution.tensors.shapes[0], result, result)
    tensors, body = Tensors((0, place), shapes=shapes), [*convolution.body, *total.body]
    return replace(convolution, inputs=inputs, body=body, values=total.values, tensors=tensors)

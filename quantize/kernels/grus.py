"""Put GRUs with weights in int8 into functions, which the native operator ``GRU`` computes in integers."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ...transforms.graph import made_by, nodes_by_name
from ...transforms.int8_gru import BACKWARD
from ...transforms.ops import OPS
from ...transforms.plan import Unit
from .calls import Call
from .wrap import put_calls

INPUTS = ("x", "w", "w_scale", "w_zero_point", "r", "r_scale", "r_zero_point", "B", "start")
BIAS, START = 3, 5  # among the inputs of a GRU; the lengths of sequences stand between them


def wrap_grus(model: ir.Model, units: Iterable[Unit]) -> int:
    """Put GRUs into functions; return how many.

    Before:  y = GRU(x, Reshape(DequantizeLinear(w)), Reshape(DequantizeLinear(r)), B, , start)
    After:   y = ai.requant.GRU(x, w, ..., r, ..., B, start), whose body is what was there
        The operator rounds each row of x and each state with ranges that it finds and multiplies integers; the body
        computes in float.
    Left alone: GRUs in bodies of control flow, and those that have another form in the model.

    Args:
        model: A model.
        units: Units of the model that compute in integers, in order; those that are no GRU are left alone.
    """
    nodes = nodes_by_name(model)
    calls: dict[ir.Value, Call] = {}
    for unit in units:
        node = nodes.get(unit.nodes[0])
        call = None if node is None or node.op_type != "GRU" or node.graph is not model.graph else _call(node)
        if call is not None:
            calls[call.body[-1].outputs[0]] = call
    return put_calls(model, calls)


def _call(node: ir.Node) -> Call | None:
    """Return the call of the operator for a GRU; None if its weights are not in int8."""
    body, weights = [node], list[ir.Value | None]()
    for value in node.inputs[1:3]:
        reshape = made_by(value, "Reshape")
        pair = None if reshape is None else made_by(reshape.inputs[0], "DequantizeLinear")
        if reshape is None or pair is None:
            return None
        body[-1:-1] = [pair, reshape]
        weights += pair.inputs
    given = [*node.inputs, *[None] * (START + 1)]
    values: dict[str, int | tuple[int, ...]] = {
        "backward": BACKWARD[node.attributes.get_string("direction", "forward")],
        "linear_before_reset": node.attributes.get_int("linear_before_reset", 0),
    }
    attributes = {each.name: each for each in ir.convenience.convert_attributes(values)}
    inputs = [given[0], *weights, given[BIAS], given[START]]
    return Call(OPS["GRU"].native, str(node.name), INPUTS, inputs, body, attributes, dtype=ir.DataType.FLOAT)

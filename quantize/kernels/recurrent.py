"""Put GRUs and LSTMs with weights in int8 into functions, which native operators compute in integers."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ...transforms.graph import made_by, nodes_by_name
from ...transforms.int8_recurrent import BACKWARD, STATES
from ...transforms.ops import OPS
from ...transforms.plan import Unit
from .calls import Call
from .wrap import put_calls

INPUTS = ("x", "w", "w_scale", "w_zero_point", "r", "r_scale", "r_zero_point", "B", "lengths", "start", "cell")
"""The inputs of the operator for an LSTM; that for a GRU has no cell."""
STEADY = 5  # inputs of an ONNX operator in front of its first states


def wrap_recurrent(model: ir.Model, units: Iterable[Unit]) -> int:
    """Put GRUs and LSTMs into functions; return how many.

    Before:  y, h, c = LSTM(x, Reshape(DequantizeLinear(w)), Reshape(DequantizeLinear(r)), B, lengths, start, cell)
    After:   y, h, c = ai.requant.LSTM(x, w, ..., r, ..., B, lengths, start, cell), whose body is what was there
        The operator rounds each row of x and each state with ranges that it finds and multiplies integers; the body
        computes in float.
    Left alone: those in bodies of control flow, those that have another form in the model, and other units.

    Args:
        model: A model.
        units: Units of the model that compute in integers, in order.
    """
    nodes = nodes_by_name(model)
    calls: dict[ir.Value, Call] = {}
    for unit in units:
        node = nodes.get(unit.nodes[0])
        call = None if node is None or node.op_type not in STATES or node.graph is not model.graph else _call(node)
        if call is not None:
            calls[call.body[-1].outputs[0]] = call
    return put_calls(model, calls)


def _call(node: ir.Node) -> Call | None:
    """Return the call of the operator for a GRU or LSTM; None if its weights are not in int8."""
    body, weights, states = [node], list[ir.Value | None](), STATES[node.op_type]
    for value in node.inputs[1:3]:
        reshape = made_by(value, "Reshape")
        pair = None if reshape is None else made_by(reshape.inputs[0], "DequantizeLinear")
        if reshape is None or pair is None:
            return None
        body[-1:-1] = [pair, reshape]
        weights += pair.inputs
    given = [*node.inputs, *[None] * (STEADY + states)][: STEADY + states]
    values: dict[str, int | tuple[int, ...]] = {
        "backward": BACKWARD[node.attributes.get_string("direction", "forward")],
    }
    if node.op_type == "GRU":
        values["linear_before_reset"] = node.attributes.get_int("linear_before_reset", 0)
    attributes = {each.name: each for each in ir.convenience.convert_attributes(values)}
    inputs = [given[0], *weights, *given[3:]]
    return Call(
        OPS[node.op_type].native,
        str(node.name),
        INPUTS[: len(inputs)],
        inputs,
        body,
        attributes,
        dtype=ir.DataType.FLOAT,
        results=1 + states,
    )

"""Put GRUs and LSTMs with weights in int8 into functions, which native operators compute in integers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from ...transforms.graphs.queries import constant, graph_of, made_by, nodes_by_name
from ...transforms.graphs.rewriter import add_initializer, insert_before, names, unused_name
from ...transforms.int8.existing import insert_product, zero_point_of
from ...transforms.int8.ops import OPS
from ...transforms.int8.plan import Unit
from ...transforms.int8.recurrent import BACKWARD, STATES
from .call import FLOATS, Call, Results, attributes_of
from .put_calls import put_calls

INPUTS = ("x", "w", "w_scale", "w_zero_point", "r", "r_scale", "r_zero_point", "B", "lengths", "start", "cell")
"""The inputs of the operator for an LSTM; that for a GRU has no cell."""
STEADY = 5  # inputs of an ONNX operator in front of its first states


def wrap_recurrent(model: ir.Model, units: Iterable[Unit]) -> int:
    """Put GRUs and LSTMs into functions; return how many.

    Before:  y, h, c = LSTM(x, Reshape(DequantizeLinear(w)), Reshape(DequantizeLinear(r)), B, lengths, start, cell)
    After:   y, h, c = ai.requant.LSTM(x, w, ..., r, ..., B, lengths, start, cell), whose body is
                 LSTM(x, Reshape(Mul(Cast(w), w_scale)), Reshape(Mul(Cast(r), r_scale)), B, lengths, start, cell)
        The operator rounds each row of x and each state with ranges that it finds and multiplies integers; the body
        computes in float. Without the library the runtime computes the float weights of the body once, when it loads
        the model; it would run a DequantizeLinear each time.
    The body of one whose input stays float reads w as it is, (D, G H, I) without scales and zero points.
    Left alone: those in bodies of control flow, those that have another form in the model, and other units.

    Args:
        model: A model.
        units: Units of the model that compute in integers, in order.
    """
    nodes, taken = nodes_by_name(model), names(model)
    calls: dict[ir.Value, Call] = {}
    for unit in units:
        node = nodes.get(unit.nodes[0])
        known = node is not None and node.op_type in STATES and node.graph is model.graph
        call = _call(node, taken) if node is not None and known else None
        if call is not None:
            calls[call.body[-1].outputs[0]] = call
    return put_calls(model, calls)


def _folded(pair: ir.Node, taken: set[str]) -> list[ir.Node]:
    """Replace the DequantizeLinear of a matrix by nodes that the runtime computes when it loads a model; return them.

    Before:  DequantizeLinear<axis = 0>(w (R, K), scale (R,), zeros)
    After:   Mul(Cast(w), Unsqueeze(scale, 1))
    A DequantizeLinear with other zero points stays.
    """
    zero = zero_point_of(pair)
    if zero is None or zero.any():
        return [pair]
    stem, graph = str(pair.outputs[0].name), graph_of(pair)
    axis = add_initializer(graph, unused_name(taken, f"{stem}/axis"), np.array([1], np.int64))
    column = insert_before(pair, taken, "Unsqueeze", [pair.inputs[1], axis], stem=f"{stem}/column")
    whole, product = insert_product(pair, taken, column)
    result, before = product.outputs[0], pair.outputs[0]
    result.type, result.shape = before.type, before.shape
    before.replace_all_uses_with(result)
    graph.remove(pair, safe=True)
    return [whole, *filter(None, [column.producer()]), product]


def _call(node: ir.Node, taken: set[str]) -> Call | None:
    """Return the call of the operator for a GRU or LSTM; None if its weights of the state are not in int8."""
    states = STATES[node.op_type]
    found: list[tuple[ir.Node, ir.Node]] = []
    in_float = constant(node.inputs[1]) is not None
    for value in node.inputs[2 if in_float else 1 : 3]:
        reshape = made_by(value, "Reshape")
        pair = None if reshape is None else made_by(reshape.inputs[0], "DequantizeLinear")
        if reshape is None or pair is None:
            return None
        found.append((pair, reshape))
    weights = [value for pair, _ in found for value in pair.inputs]  # before the model is changed
    if in_float:
        weights = [node.inputs[1], None, None, *weights]
    body = [each for pair, reshape in found for each in (*_folded(pair, taken), reshape)]
    given = [*node.inputs, *[None] * (STEADY + states)][: STEADY + states]
    values: dict[str, int | tuple[int, ...]] = {
        "backward": BACKWARD[node.attributes.get_string("direction", "forward")],
    }
    if node.op_type == "GRU":
        values["linear_before_reset"] = node.attributes.get_int("linear_before_reset", 0)
    inputs = [given[0], *weights, *given[3:]]
    return Call(
        OPS[node.op_type].native,
        str(node.name),
        INPUTS[: len(inputs)],
        inputs,
        [*body, node],
        attributes_of(values),
        tensors=FLOATS,
        results=Results(1 + states),
    )

"""A GRU with weights in int8, which a native operator may compute in integers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .graph import discard, graph_of, insert_before, node_name, replace
from .int8_weights import WeightWriter
from .qparams import quantize

BACKWARD = {"forward": (0,), "reverse": (1,), "bidirectional": (0, 1)}
"""By the attribute ``direction``, for each direction whether the last step is the first one."""
OUTPUTS = 2  # Y and Y_h


def to_int8_gru(node: ir.Node, weights: WeightWriter) -> int:
    """Store the weights of a GRU in int8, with a scale for each row.

    Before:  y, h = GRU(X, W (D, 3H, I), R (D, 3H, H), b, , h0)
    After:   y = GRU(X, Reshape(DequantizeLinear(int8 W (3HD, I))), Reshape(DequantizeLinear(int8 R (3HD, H))), b, , h0)
             h = Gather(y, -1): y of the last step; of the first step for a direction that begins with the last one

    Returns:
        The number of constants that became int8.
    """
    for index in (1, 2):
        before = node.inputs[index]
        node.replace_input_with(index, _dequantized(node, index, weights))
        discard(before)
    if len(node.outputs) >= OUTPUTS and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        last = _last_states(node, weights)
        old, name = node.outputs[1], node.outputs[1].name
        old.name = weights.writer.name(f"{name}/unread")
        last.type, last.shape = old.type, old.shape
        replace(old, last)
        last.name = name
    return OUTPUTS


def _dequantized(node: ir.Node, index: int, weights: WeightWriter) -> ir.Value:
    """Return weights (D, 3H, K) computed from int8 (3HD, K)."""
    array, source, graph = weights.array(node, index), node.inputs[index], graph_of(node)
    assert source is not None  # required by the operator
    rows = array.reshape(-1, array.shape[-1])
    params = weights.params(rows, 0)
    parts = (("int8", quantize(rows, params)), ("scale", params.scale), ("zero_point", params.zero_point))
    stored = [weights.writer.initializer(graph, f"{source.name}/{part}", values) for part, values in parts]
    target = weights.writer.initializer(graph, f"{source.name}/shape", np.array(array.shape, np.int64))
    taken, domain = weights.writer.taken, weights.writer.domain
    stem = f"{source.name}/rows"
    matrix = insert_before(node, taken, "DequantizeLinear", stored, {"axis": 0}, stem=stem, domain=domain)
    return insert_before(node, taken, "Reshape", [matrix, target], stem=f"{source.name}/dequantized")


def _last_states(node: ir.Node, weights: WeightWriter) -> ir.Value:
    """Return the last state of each direction, (D, N, H), computed from the states of all steps."""
    writer, graph, stem = weights.writer, graph_of(node), node_name(node)
    backward = BACKWARD[node.attributes.get_string("direction", "forward")]
    y = node.outputs[0]
    y.name = y.name or writer.name(f"{stem}/states")
    place = ir.node("Identity", [y])  # stands where the new operators are inserted
    graph.insert_after(node, [place])

    def states_of(step: int) -> ir.Value:
        index = writer.initializer(graph, f"{stem}/step", np.array(step, np.int64))
        return insert_before(place, writer.taken, "Gather", [y, index], {"axis": 0}, stem=f"{stem}/gather")

    found = [states_of(0 if back else -1) for back in backward]
    last = found[0]
    if len(found) > 1:
        first = writer.initializer(graph, f"{stem}/forward", np.array([True, False]).reshape(-1, 1, 1))
        last = insert_before(place, writer.taken, "Where", [first, *found], stem=f"{stem}/last")
    graph.remove(place, safe=True)
    return last

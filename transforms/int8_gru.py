"""A GRU with weights in int8, which a native operator may compute in integers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .graph import discard, graph_of, insert_before, replace
from .int8_weights import WeightWriter
from .qparams import Array, quantize
from .writer import Writer

BACKWARD = {"forward": (0,), "reverse": (1,), "bidirectional": (0, 1)}
"""By the attribute ``direction``, for each direction whether the last step is the first one."""


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
    if len(node.outputs) > 1:
        old = node.outputs[1]
        if old.uses() or old.is_graph_output():
            last, name = _last_states(node, weights.writer), old.name
            replace(old, last)
            node.resize_outputs(1)
            last.name = name
    return 2


def _dequantized(node: ir.Node, index: int, weights: WeightWriter) -> ir.Value:
    """Return weights (D, 3H, K) computed from int8 (3HD, K)."""
    array, source, writer = weights.array(node, index), node.inputs[index], weights.writer
    assert source is not None  # required by the operator
    rows = array.reshape(-1, array.shape[-1])
    params = weights.params(rows, 0)
    stored, stem = weights.store(node, index, quantize(rows, params), params), f"{source.name}/rows"
    target = writer.initializer(graph_of(node), f"{source.name}/shape", np.array(array.shape, np.int64))
    matrix = insert_before(node, writer.taken, "DequantizeLinear", stored, {"axis": 0}, stem=stem, domain=writer.domain)
    return insert_before(node, writer.taken, "Reshape", [matrix, target], stem=f"{source.name}/dequantized")


def _last_states(node: ir.Node, writer: Writer) -> ir.Value:
    """Append the last state of each direction, (D, N, H), computed from the states of all steps."""
    y, graph, made = node.outputs[0], graph_of(node), list[ir.Node]()
    y.name = y.name or writer.name(f"{node.name}/states")

    def one(op: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        made.append(ir.node(op, inputs, attributes, name=writer.name(f"{node.name}/{op.lower()}")))
        made[-1].outputs[0].name = writer.name(f"{made[-1].name}_output")
        return made[-1].outputs[0]

    def constant(array: Array, what: str) -> ir.Value:
        return writer.initializer(graph, f"{node.name}/{what}", array)

    backward = BACKWARD[node.attributes.get_string("direction", "forward")]
    last, *other = (one("Gather", y, constant(np.array(-1 + back), "step"), axis=0) for back in backward)
    if other:
        last = one("Where", constant(np.array([True, False]).reshape(-1, 1, 1), "forward"), last, *other)
    graph.insert_after(node, made)
    return last

"""GRUs and LSTMs with weights in int8, which a native operator may compute in integers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graphs.queries import constant, graph_of
from ..graphs.rewriter import discard, insert_before
from .qparams import quantize
from .weights import WeightWriter

BACKWARD = {"forward": (0,), "reverse": (1,), "bidirectional": (0, 1)}
"""By the attribute ``direction``, for each direction whether the last step is the first one."""
ACTIVATIONS = {"GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
"""The functions that the forms in integers have: of the gates, of the candidate, and of the cell."""
STATES = {"GRU": 1, "LSTM": 2}
"""How many states an operator has: h, and the cell of an LSTM. Each is an input, and an output behind all steps."""
FEW_INPUTS = 4
"""The native form multiplies the input in float if the state has at least this many times its values.

The product of the input is a fifth of all products, or less, and is computed for all steps at once. Such an input is
mostly a spectrogram, whose rows have a few large values: in integers the small ones keep few steps.
"""


def keeps_input(node: ir.Node) -> bool:
    """Return whether the native form of a GRU or LSTM multiplies its input in float; see `FEW_INPUTS`."""
    w, r = (constant(value) for value in node.inputs[1:3])
    return w is not None and r is not None and FEW_INPUTS * w.shape.numpy()[-1] <= r.shape.numpy()[-1]


def to_int8_recurrent(node: ir.Node, weights: WeightWriter) -> int:
    """Store the weights of a GRU or LSTM in int8, with a scale for each row, and name all its outputs.

    Before:  y = LSTM(X, W (D, 4H, I), R (D, 4H, H), b, lengths, h0, c0)
    After:   y, h, c = LSTM(X, Reshape(DequantizeLinear(int8 W (4HD, I))), Reshape(DequantizeLinear(int8 R (4HD, H))),
             b, lengths, h0, c0)
    W stays float if the input has few values (`keeps_input`).

    Returns:
        The number of constants that became int8.
    """
    stored = (2,) if keeps_input(node) else (1, 2)
    for index in stored:
        before = node.inputs[index]
        node.replace_input_with(index, _dequantized(node, index, weights))
        discard(before)
    node.resize_outputs(1 + STATES[node.op_type])
    for output in node.outputs:
        output.name = output.name or weights.writer.name(f"{node.name}_output")
        output.type = output.type or ir.TensorType(ir.DataType.FLOAT)
    return len(stored)


def _dequantized(node: ir.Node, index: int, weights: WeightWriter) -> ir.Value:
    """Return weights (D, G H, K) computed from int8 (G H D, K)."""
    array, source, writer = weights.array(node, index), node.inputs[index], weights.writer
    assert source is not None  # required by the operator
    rows = array.reshape(-1, array.shape[-1])
    params = weights.params(rows, 0)
    stored, stem = weights.store(node, index, quantize(rows, params), params), f"{source.name}/rows"
    target = writer.initializer(graph_of(node), f"{source.name}/shape", np.array(array.shape, np.int64))
    matrix = insert_before(node, writer.taken, "DequantizeLinear", stored, {"axis": 0}, stem=stem, domain=writer.domain)
    return insert_before(node, writer.taken, "Reshape", [matrix, target], stem=f"{source.name}/dequantized")

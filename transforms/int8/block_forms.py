"""Operators whose weights are integers in blocks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graphs.queries import MS, graph_of
from ..graphs.rewriter import replace_node
from .block_weights import Blocked
from .plan import Unit
from .weights import WeightWriter

INTEGER_PRODUCTS = 4  # the accuracy_level with which the kernel rounds the input to 8 bits in blocks


def to_blocks(node: ir.Node, unit: Unit, weights: WeightWriter) -> int:
    """Replace a matrix product, or a Gather of rows, by the operator that reads weights in blocks.

    Before:  y = Gemm(x, W, b)
    After:   y = com.microsoft.MatMulNBits(x, codes (N, blocks, bytes), scale (N, blocks), , , b)
    Before:  y = Gather(table, i)
    After:   y = com.microsoft.GatherBlockQuantized(codes (V, bytes), i, scale (V, blocks))
    The product rounds each block of its input to 8 bits, with the scale that its largest magnitude gives.

    Returns:
        The number of constants that became integers, 1.
    """
    blocked = weights.blocked(node, unit)
    gathers = unit.op == "Gather"
    codes, scale = _stored(node, 0 if gathers else 1, blocked, weights)
    form = blocked.form
    attributes: dict[str, int] = {"bits": form.bits, "block_size": form.size}
    if gathers:
        inputs = [codes, node.inputs[1], scale]
        attributes |= {"gather_axis": 0, "quantize_axis": 1}
        replace_node(node, ir.node("GatherBlockQuantized", inputs, attributes, domain=MS, name=node.name))
        return 1
    rows, columns = blocked.steps.shape
    attributes |= {"K": columns, "N": rows, "accuracy_level": INTEGER_PRODUCTS}
    bias = weights.bias_row(node)
    inputs = [node.inputs[0], codes, scale, *([] if bias is None else [None, None, bias])]
    replace_node(node, ir.node("MatMulNBits", inputs, attributes, domain=MS, name=node.name))
    return 1


def _stored(node: ir.Node, index: int, blocked: Blocked, weights: WeightWriter) -> tuple[ir.Value, ir.Value]:
    """Return initializers in the graph of `node`, codes and scales; nodes of one weight share those that are equal.

    Steps of an unrolled recurrence may have scales of their own for the same codes.
    """
    graph, source, form = graph_of(node), node.inputs[index], blocked.form
    assert source is not None  # required by the operator
    rows, columns = blocked.steps.shape
    if node.op_type == "Gather":
        codes = blocked.packed(columns)
    else:
        codes = blocked.packed(form.blocks(columns) * form.size).reshape(rows, form.blocks(columns), -1)

    def initializer(part: str, array: np.ndarray) -> ir.Value:
        key = (source, part, array.shape, hash(array.tobytes()))
        return weights.writer.shared(key, graph, f"{source.name}/{part}", array)

    return initializer("codes", codes), initializer("scale", blocked.scale)

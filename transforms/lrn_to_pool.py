"""Compute a LRN with an average pooling over the channels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.opsets import AXES_ARE_INPUT
from .graphs.queries import computing_nodes, graph_of, node_name
from .graphs.rewriter import add_initializer, insert_before, names, replace_by_earlier, unused_name
from .registry import Change, transform

IMAGE = 4  # axes: batch, channels, rows, columns
BETA = 0.75  # of AlexNet and its successors


@transform("lrn_to_pool", after=("fold_constants", "convert_opset"))
def lrn_to_pool(model: ir.Model) -> Change:
    """Compute a LRN from standard operators that the runtime has fast kernels for.

    Before:  y = LRN(x), size 5, alpha, beta 0.75, bias,  x of shape (N, C, H, W)
    After:   m = Squeeze(AveragePool(Unsqueeze(Mul(x, x), 1)), 1),  kernel_shape [5, 1, 1], padding counted
             t = Add(Mul(m, alpha), bias);  y = Div(x, Mul(Sqrt(t), Sqrt(Sqrt(t))))
        LRN is x / (bias + alpha / size * sum)^beta, with the sum of the squares of `size` channels around each: a
        pooling over the channels whose padding is 0 and counts. ONNX Runtime computes each power by itself, and takes
        eight times as long. Another beta than 0.75 is a Pow.
    Left alone: what ONNX Runtime does not run: other types than float32 (``not-float32``), other ranks than 4
        (``not-an-image``), even sizes (``even-size``); opsets below 13 (``old-opset``).
    """
    change, known, taken = Change(), Known(model), names(model)
    for node in computing_nodes(model, "LRN"):
        if model.opset_imports.get("", 0) < AXES_ARE_INPUT:
            change.skip("old-opset")
        elif known.dtype(node.inputs[0]) is not ir.DataType.FLOAT:
            change.skip("not-float32")
        elif known.rank(node.inputs[0]) != IMAGE:
            change.skip("not-an-image")
        elif _size(node) % 2 == 0:
            change.skip("even-size")
        else:
            _replace(node, taken)
            change.applied += 1
    return change


def _size(lrn: ir.Node) -> int:
    """Return the number of channels whose squares are added."""
    return int(lrn.attributes.get_int("size", 0))


def _replace(lrn: ir.Node, taken: set[str]) -> None:
    """Write the operators in front of a LRN, and remove it."""
    graph, stem = graph_of(lrn), node_name(lrn)

    def add(op: str, *inputs: ir.Value | None, **attributes: object) -> ir.Value:
        return insert_before(lrn, taken, op, inputs, attributes, stem=f"{stem}/{op.lower()}")

    def number(name: str, default: float) -> ir.Value:
        value = np.array(lrn.attributes.get_float(name, default), np.float32)
        return add_initializer(graph, unused_name(taken, f"{stem}/{name}"), value)

    x, size = lrn.inputs[0], _size(lrn)
    axis = add_initializer(graph, unused_name(taken, f"{stem}/axis"), np.array([1], np.int64))
    squares = add("Unsqueeze", add("Mul", x, x), axis)
    pads = [size // 2, 0, 0, size // 2, 0, 0]
    pooled = add("AveragePool", squares, kernel_shape=[size, 1, 1], pads=pads, count_include_pad=1)
    means = add("Squeeze", pooled, axis)
    base = add("Add", add("Mul", means, number("alpha", 1e-4)), number("bias", 1.0))
    root = add("Sqrt", base)
    beta = lrn.attributes.get_float("beta", BETA)
    power = add("Mul", root, add("Sqrt", root)) if beta == BETA else add("Pow", base, number("beta", BETA))
    replace_by_earlier(lrn, add("Div", x, power))

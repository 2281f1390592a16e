"""Fold the sum of a tensor and of its product with a gate into the gate."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import onnx_ir as ir

from .graphs.inference import stand_ins
from .graphs.queries import computing_nodes, constant, graph_of, made_by, node_name, plain_shape, sole_reader
from .graphs.rewriter import add_initializer, insert_before, names, remove_unread, replace_node, unused_name
from .registry import Change, transform


@transform("fold_gated_sums", after=("sum_to_add",))
def fold_gated_sums(model: ir.Model) -> Change:
    """Add one to a gate, in place of adding a tensor to its product with the gate.

    Before:  y = Add(x, Mul(x, g)),  g with one value where x has many: (N, C, 1, 1)
    After:   y = Mul(x, Add(g, 1))
        A squeeze-excite block with a residual, as detectors of text have it, reads and writes its images once and not
        twice. The results differ by the rounding of float32.
    Left alone: a product with other readers (``read-between``); a gate that is as large as the tensor, or of a size
        that is not known, and other types than float32 (``not-smaller``); a constant gate.
    """
    change, taken = Change(), names(model)
    known = cache(partial(stand_ins, model))
    for node in computing_nodes(model, "Add"):
        found = _gated(node)
        if found is None:
            continue
        x, gate, product = found
        if sole_reader(product.outputs[0]) is not node:
            change.skip("read-between")
        elif not _is_smaller(known().get(gate), known().get(x)):
            change.skip("not-smaller")
        else:
            name = unused_name(taken, f"{node_name(node)}/one")
            one = add_initializer(graph_of(node), name, np.ones((), np.float32))
            grown = insert_before(product, taken, "Add", [gate, one], stem=f"{node_name(node)}/gate")
            replace_node(node, ir.node("Mul", [x, grown], name=node.name))
            remove_unread([product])
            change.applied += 1
    return change


def _gated(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Node] | None:
    """Return x, g and the product of an ``Add(x, Mul(x, g))``; None for other sums."""
    for x, other in (node.inputs, node.inputs[::-1]):
        product = made_by(other, "Mul")
        if x is None or product is None or product.domain or x not in product.inputs:
            continue
        gate = product.inputs[product.inputs[0] is x]
        if gate is not None and gate is not x and constant(gate) is None:
            return x, gate, product
    return None


def _is_smaller(gate: ir.Value | None, x: ir.Value | None) -> bool:
    """Whether a gate has one value where a tensor of float32 has many, and nowhere more than it."""
    sides, whole = plain_shape(gate), plain_shape(x)
    if gate is None or x is None or sides is None or whole is None or x.dtype is not ir.DataType.FLOAT:
        return False
    pairs = list(zip(reversed(sides), reversed(whole), strict=False))
    fits = len(sides) <= len(whole) and all(side in (1, length) for side, length in pairs)
    return fits and any(side == 1 != length for side, length in pairs)

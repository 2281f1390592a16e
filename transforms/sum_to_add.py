"""Replace a Sum of two operands by an Add."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.queries import computing_nodes
from .graphs.rewriter import replace_node
from .registry import Change, transform


@transform("sum_to_add")
def sum_to_add(model: ir.Model) -> Change:
    """Replace a Sum of two operands by an Add.

    Before:  y = Sum(a, b)
    After:   y = Add(a, b)
        Residual connections of older exporters are Sum nodes; Add has an integer kernel, Sum has none.
    Left alone: sums of another number of operands (``not-two``).
    """
    change = Change()
    for node in computing_nodes(model, "Sum"):
        if len(node.inputs) != 2:
            change.skip("not-two")
            continue
        replace_node(node, ir.node("Add", node.inputs, name=node.name))
        change.applied += 1
    return change

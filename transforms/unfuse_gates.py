"""Replace HardSwish and Swish by a gate and a product."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.queries import computing_nodes, node_name
from .graphs.rewriter import insert_before, names, replace_node
from .registry import Change, transform

SLOPE, HALF = 1 / 6, 0.5
"""alpha and beta of the hard sigmoid in a HardSwish (https://onnx.ai/onnx/operators/onnx__HardSwish.html)."""


@transform("unfuse_gates", after=("inline_functions", "fuse_hard_sigmoid"))
def unfuse_gates(model: ir.Model) -> Change:
    """Replace a HardSwish or Swish by its gate and a Mul.

    Before:  y = HardSwish(x)
    After:   g = HardSigmoid(x), alpha 1/6, beta 1/2;  y = Mul(x, g)
        A Swish becomes a Sigmoid and a Mul. These operators have integer kernels, HardSwish and Swish have none. In
        float the runtime fuses them again.
    Left alone: a Swish with alpha other than 1 (``other-alpha``).
    """
    change = Change()
    taken = names(model)
    for node in computing_nodes(model, "HardSwish", "Swish"):
        hard = node.op_type == "HardSwish"
        if not hard and node.attributes.get_float("alpha", 1.0) != 1.0:
            change.skip("other-alpha")
            continue
        op, attributes = ("HardSigmoid", {"alpha": SLOPE, "beta": HALF}) if hard else ("Sigmoid", {})
        gate = insert_before(node, taken, op, node.inputs, attributes, stem=f"{node_name(node)}/gate")
        replace_node(node, ir.node("Mul", [node.inputs[0], gate], name=node.name))
        change.applied += 1
    return change

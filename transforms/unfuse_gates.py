"""Spell a gated activation as the product that it is."""

from __future__ import annotations

import onnx_ir as ir

from .graph import computing_graphs, insert_before, names, node_name, take_place
from .registry import Change, transform

SLOPE, HALF = 1 / 6, 0.5
"""Of the hard sigmoid in a HardSwish, which has no attributes (https://onnx.ai/onnx/operators/onnx__HardSwish.html)."""


@transform("unfuse_gates", after=("inline_functions", "fuse_hard_sigmoid"))
def unfuse_gates(model: ir.Model) -> Change:
    """Replace a HardSwish, or a Swish, by its gate and the product with it.

    Before:  y = HardSwish(x)
    After:   g = HardSigmoid(x), alpha 1/6, beta 1/2;  y = Mul(x, g)
        A Swish is a Sigmoid and a Mul. In float the runtime fuses both again; as products they have integer forms,
        which the fused operators lack.
    Left alone: a Swish whose slope is not 1 (``other-alpha``).
    """
    change = Change()
    taken = names(model)
    for node in [node for graph in computing_graphs(model) for node in graph]:
        if node.domain or node.op_type not in ("HardSwish", "Swish"):
            continue
        hard = node.op_type == "HardSwish"
        if not hard and node.attributes.get_float("alpha", 1.0) != 1.0:
            change.skip("other-alpha")
            continue
        op, attributes = ("HardSigmoid", {"alpha": SLOPE, "beta": HALF}) if hard else ("Sigmoid", {})
        gate = insert_before(node, taken, op, node.inputs, attributes, stem=f"{node_name(node)}/gate")
        take_place(node, ir.node("Mul", [node.inputs[0], gate], name=node.name))
        change.applied += 1
    return change

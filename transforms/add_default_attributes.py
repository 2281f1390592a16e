"""Write the default values of attributes into the nodes."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import AddDefaultAttributesPass

from .graphs.queries import every_node
from .graphs.rewriter import quiet
from .registry import Change, transform


@transform("add_default_attributes")
def add_default_attributes(model: ir.Model) -> Change:
    """Give each node the attributes that it lacks, with their default values.

    Before:  y = Softmax(x)
    After:   y = Softmax(x), axis -1: the default of the model's opset
    Left alone: existing attributes; attributes without a default; operators of domains that onnx does not define.
    """
    before = sum(len(node.attributes) for node in every_node(model))
    with quiet():
        AddDefaultAttributesPass()(model)
    return Change(sum(len(node.attributes) for node in every_node(model)) - before)

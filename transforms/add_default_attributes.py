"""Write down what operators assume."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import AddDefaultAttributesPass

from .graph import every_node, quiet
from .registry import Change, transform


@transform("add_default_attributes")
def add_default_attributes(model: ir.Model) -> Change:
    """Give every node the attributes that it leaves to their defaults.

    Before:  y = Softmax(x)
    After:   y = Softmax(x), axis -1: the default of the model's opset
    Left alone: attributes that are there, those without a default, operators of domains that onnx does not know.
    """
    before = sum(len(node.attributes) for node in every_node(model))
    with quiet():
        AddDefaultAttributesPass()(model)
    return Change(sum(len(node.attributes) for node in every_node(model)) - before)

"""Remove an attribute from nodes."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.queries import every_node, key
from .registry import Change, transform


@transform("remove_attribute", changes_values=True)
def remove_attribute(model: ir.Model, *, attribute_name: str, op_name: str = "") -> Change:
    """Remove an attribute from all nodes, or from the nodes of one operator.

    Before:  y = LeakyRelu(x), alpha 0.2
    After:   y = LeakyRelu(x), for (attribute_name=alpha): the operator takes its default
    Left alone: nodes of other operators, if an operator is named. A required attribute that is missing afterwards is
        an error of the checks after this step.

    Options:
        attribute_name: The attribute.
        op_name: The operator, with its domain if that is not the standard one: ``com.microsoft.Gelu``. Default: all.
    """
    change = Change()
    for node in every_node(model):
        if attribute_name in node.attributes and op_name in ("", key(node)):
            del node.attributes[attribute_name]
            change.applied += 1
    return change

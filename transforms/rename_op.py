"""Rename operators."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.queries import every_node, key
from .registry import Change, TransformError, transform


@transform("rename_op", changes_values=True)
def rename_op(model: ir.Model, *, old_op_name: str, new_op_name: str) -> Change:
    """Change the operator of every node of one operator type; inputs and attributes stay.

    Before:  y = Relu(x)
    After:   y = my.domain.Relu(x), for (old_op_name=Relu, new_op_name=my.domain.Relu)
        The checks after this step compare inputs and attributes with the new operator, if onnx knows that operator.
    Left alone: all other nodes.

    Options:
        old_op_name: The operator, with its domain if that is not the standard one: ``com.microsoft.Gelu``.
        new_op_name: Its new name, in the same form. A new domain is imported in version 1.

    Raises:
        TransformError: The model has a function with the old or the new name.
    """
    domain, _, name = new_op_name.rpartition(".")
    for defined, function, _ in model.functions:
        if f"{defined}.{function}" in (old_op_name, new_op_name):
            raise TransformError(f"{defined}.{function} is a function of the model; run inline_functions first")
    change = Change()
    for node in every_node(model):
        if old_op_name != new_op_name and key(node) == old_op_name:
            node.domain, node.op_type = domain, name
            change.applied += 1
    if change.applied and domain:
        model.opset_imports.setdefault(domain, 1)
        for each in model.functions.values():
            each.opset_imports.setdefault(domain, 1)
    return change

"""Call operators by another name."""

from __future__ import annotations

import onnx_ir as ir

from .graph import every_node
from .ops import key
from .registry import Change, TransformError, transform


@transform("rename_op", changes_values=True)
def rename_op(model: ir.Model, *, old_op_name: str, new_op_name: str) -> Change:
    """Make every node of one operator a node of another one, with the same inputs and attributes.

    Before:  y = Relu(x)
    After:   y = my.domain.Relu(x), for (old_op_name=Relu, new_op_name=my.domain.Relu)
        Whether the new operator takes these inputs and attributes is checked afterwards, where onnx knows it.
    Left alone: everything else; calls of model-local functions keep to the function.

    Options:
        old_op_name: The operator; one of another domain than the standard one begins with it: ``com.microsoft.Gelu``.
        new_op_name: Its new name, likewise. A new domain is imported in version 1.

    Raises:
        TransformError: The model has functions of the old or the new name.
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

"""Rename an attribute."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.queries import every_node, key
from .registry import Change, TransformError, transform


@transform("rename_attribute", changes_values=True)
def rename_attribute(model: ir.Model, *, old_attribute_name: str, new_attribute_name: str, op_name: str = "") -> Change:
    """Rename an attribute of all nodes, or of the nodes of one operator.

    Before:  y = my.domain.Norm(x), eps 0.1
    After:   y = my.domain.Norm(x), epsilon 0.1, for (old_attribute_name=eps, new_attribute_name=epsilon)
    Left alone: nodes of other operators, if an operator is named. An attribute that onnx does not know is an error of
        the checks after this step.

    Options:
        old_attribute_name: The attribute.
        new_attribute_name: Its new name.
        op_name: The operator, with its domain if that is not the standard one: ``com.microsoft.Gelu``. Default: all.

    Raises:
        TransformError: A node has attributes with both names.
    """
    change = Change()
    for node in every_node(model):
        old = node.attributes.get(old_attribute_name)
        if old is None or old_attribute_name == new_attribute_name or op_name not in ("", key(node)):
            continue
        if new_attribute_name in node.attributes:
            raise TransformError(f"node {node.name!r} ({node.op_type}) already has an attribute {new_attribute_name!r}")
        del node.attributes[old_attribute_name]
        if old.is_ref():
            node.attributes.add(ir.RefAttr(new_attribute_name, str(old.ref_attr_name), old.type))
        else:
            node.attributes.add(ir.Attr(new_attribute_name, old.type, old.value, doc_string=old.doc_string))
        change.applied += 1
    return change

"""Rename a node or a tensor."""

from __future__ import annotations

import onnx_ir as ir

from .. import UnknownNameError
from .graphs.queries import computing_graphs, own_values
from .registry import Change, TransformError, transform


@transform("rename_node", changes_io=True)
def rename_node(model: ir.Model, *, old_node_name: str, new_node_name: str) -> Change:
    """Rename the node and the tensor with a given name; readers of the tensor read it under the new name.

    Before:  conv: y = Conv(x, W);  z = Relu(y)
    After:   conv1: y = Conv(x, W); z = Relu(y), for (old_node_name=conv, new_node_name=conv1)
             conv: conv1 = Conv(x, W); z = Relu(conv1), for (old_node_name=y, new_node_name=conv1)
        Inputs and outputs of the graph are tensors too. A node without a name has the name of its first output.
    Left alone: functions; a model that has the new name but not the old one (``renamed-already``).

    Options:
        old_node_name: The old name of the node or tensor.
        new_node_name: Its new name.

    Raises:
        UnknownNameError: Neither name exists in the model.
        TransformError: The new name is already in use.
    """
    named: dict[str, list[ir.Node | ir.Value]] = {}
    for graph in computing_graphs(model):
        for thing in (*graph, *own_values(graph)):
            if thing.name:
                named.setdefault(thing.name, []).append(thing)
    change = Change()
    if old_node_name not in named:
        if new_node_name not in named:
            raise UnknownNameError("node or tensor", old_node_name, named)
        change.skip("renamed-already")
    elif old_node_name != new_node_name:
        if new_node_name in named:
            raise TransformError(f"the name {new_node_name!r} is already in use; choose another new_node_name")
        for thing in named[old_node_name]:
            thing.name = new_node_name
            change.applied += 1
    return change

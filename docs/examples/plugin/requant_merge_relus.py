"""A plug-in for requant: remove a Relu that reads a Relu."""

from __future__ import annotations

import onnx_ir as ir

from requant.transforms import Change, join, transform


@transform("merge_relus")
def merge_relus(model: ir.Model, *, keep: tuple[str, ...] = ()) -> Change:
    """Remove a Relu that reads a Relu.

    Before:  y = Relu(Relu(x))
    After:   y = Relu(x)
    Left alone: a Relu whose result is a graph output (``graph-output``); the nodes in `keep` (``kept``).

    Options:
        keep: Names of nodes that stay.
    """
    change = Change()
    for node in tuple(model.graph):
        before = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        if before is None or {(each.domain, each.op_type) for each in (node, before)} != {("", "Relu")}:
            continue
        if node.name in keep:
            change.skip("kept")
        elif node.outputs[0].is_graph_output():
            change.skip("graph-output")
        else:
            ir.convenience.replace_all_uses_with(node.outputs[0], before.outputs[0])
            model.graph.remove(node, safe=True)
            change.applied += 1
    return change


join("simplify", 45, "merge_relus")

"""Merge consecutive Transpose nodes."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.queries import code_graphs, producer_of, sole_reader
from .graphs.rewriter import remove
from .registry import Change, transform


@transform("merge_transposes")
def merge_transposes(model: ir.Model) -> Change:
    """Merge two consecutive Transpose nodes into one.

    Before:  y = Transpose(Transpose(x, perm=p), perm=q)
    After:   y = Transpose(x, perm=r),  r[i] = p[q[i]]
    Left alone: the tensor between the two has other readers or is a graph output; a perm is not given.
    """
    change = Change()
    for second in [node for graph in code_graphs(model) for node in graph]:
        first = producer_of(second.inputs[0]) if second.inputs else None
        if first is None or {(node.domain, node.op_type) for node in (first, second)} != {("", "Transpose")}:
            continue
        obstacle = merged(first, second)
        if obstacle:
            change.skip(obstacle)
        else:
            change.applied += 1
    return change


def merged(first: ir.Node, second: ir.Node) -> str:
    """Merge a Transpose into the one behind it; return an empty text, or the reason why they stay."""
    p, q = (node.attributes.get_ints("perm", None) for node in (first, second))
    if sole_reader(first.outputs[0]) is not second:
        return "read-between"
    if p is None or q is None:
        return "perm-not-given"
    second.attributes["perm"] = ir.AttrInt64s("perm", [p[i] for i in q])
    second.replace_input_with(0, first.inputs[0])
    remove(first)
    return ""

"""Merge equal nodes and equal initializers."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from .deduplicate_initializers import merge_initializers
from .graphs.queries import computing_graphs
from .graphs.rewriter import quiet
from .parts.constant_values import RANDOM
from .registry import Change, transform

MARK = "requant_unique"
TYPES = frozenset({ir.AttributeType.TYPE_PROTO, ir.AttributeType.TYPE_PROTOS})


@transform("merge_duplicate_nodes")
def merge_duplicate_nodes(model: ir.Model) -> Change:
    """Merge initializers with equal type, shape and content, and nodes with equal operator, inputs and attributes.

    Before:  a = Sigmoid(x); b = Sigmoid(x); y = Mul(a, V); z = Mul(b, W), with V equal to W
    After:   a = Sigmoid(x); y = Mul(a, V); z = Identity(y), because a graph output keeps its name
        Equal nodes inside one body are merged too.
    Left alone: random operators; control flow; operators of other domains, which may have a state; an Identity that
        only names a graph output; nodes that omit an output; constants of strings.
    """
    change = Change()
    merged = -1
    while merged:  # merged inputs can make more nodes equal
        with quiet():
            merged = merge_initializers(model) + sum(map(_merge_nodes, computing_graphs(model)))
        change.applied += merged
    return change


def _merge_nodes(graph: ir.Graph) -> int:
    """Merge equal nodes of a graph or body; return the number of removed nodes.

    The onnx-ir pass has no option to exclude nodes: a unique attribute protects the nodes that must stay. The pass
    also drops the type of a graph output if another node then computes the output; the type is restored here.
    """
    nodes = set(graph)
    ports = [(value.type, value.shape) for value in graph.outputs]
    kept = [node for node in graph if _must_stay(node)]
    types = [(node, each) for node in graph for each in node.attributes.values() if each.type in TYPES]
    for node, each in types:
        del node.attributes[each.name]
    for number, node in enumerate(kept):
        node.attributes.add(ir.AttrInt64(MARK, number))
    CommonSubexpressionEliminationPass()(ir.Model(graph, ir_version=10))  # the pass reads the main graph only
    for node in kept:
        del node.attributes[MARK]
    for node, each in types:
        node.attributes.add(each)
    for value, (kind, shape) in zip(graph.outputs, ports, strict=True):
        value.type, value.shape = kind or value.type, value.shape if shape is None else shape
    return len(nodes - set(graph))


def _must_stay(node: ir.Node) -> bool:
    """Whether a node must not be merged with an equal node."""
    names_output = node.op_type == "Identity" and node.outputs[0].is_graph_output()
    partial = not all(value.name for value in node.outputs)
    if any(each.type in TYPES for each in node.attributes.values()):  # the pass cannot compare types
        return True
    tensors = (each.as_tensor() for each in node.attributes.values() if each.type is ir.AttributeType.TENSOR)
    if any(tensor.dtype is ir.DataType.STRING for tensor in tensors):  # the pass compares strings by address
        return True
    return node.domain != "" or node.op_type in RANDOM or names_output or partial

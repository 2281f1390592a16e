"""Compute once what is computed twice, and store once what is stored twice."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, DeduplicateHashedInitializersPass

from .fold_constants import RANDOM
from .graph import quiet, release
from .registry import Change, transform

MARK = "requant_unique"
LARGE = 2**12
"""Elements of a tensor that is not read as a whole without need."""


@transform("merge_duplicate_nodes")
def merge_duplicate_nodes(model: ir.Model) -> Change:
    """Merge initializers of one type, shape and content, and nodes of one operator, inputs and attributes.

    Before:  a = Sigmoid(x); b = Sigmoid(x); y = Mul(a, V); z = Mul(b, W), with V equal to W
    After:   a = Sigmoid(x); y = Mul(a, V); z = Identity(y), because a graph output keeps its name
    Left alone: random operators; control flow, and nodes inside it; operators of other domains, which may have a
        state; copies that only give a graph output its name; nodes that leave out an output; constants of strings.
    """
    change = Change()
    merged = -1
    while merged:  # equal initializers make equal nodes, and equal nodes make their readers equal
        with quiet():
            merged = _merge_initializers(model) + _merge_nodes(model)
        change.applied += merged
    return change


def _merge_initializers(model: ir.Model) -> int:
    """Merge equal initializers of each graph; return how many are gone."""
    before = sum(len(graph.initializers) for graph in model.graphs())
    DeduplicateHashedInitializersPass(size_limit=max(map(_most_to_read, model.graphs())))(model)
    return before - sum(len(graph.initializers) for graph in model.graphs())


def _most_to_read(graph: ir.Graph) -> int:
    """Return the elements of the largest initializer that begins like another one, at least `LARGE`.

    The pass reads all of an initializer, which takes long where it is large; most differ soon.
    """
    seen: set[object] = set()
    most = LARGE
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.size > LARGE:
            begin = (tensor.dtype, tuple(tensor.shape.numpy()), tensor.numpy().reshape(-1)[:LARGE].tobytes())
            release(tensor)
            most = max(most, tensor.size if begin in seen else 0)
            seen.add(begin)
    return most


def _merge_nodes(model: ir.Model) -> int:
    """Merge equal nodes of the main graph; return how many are gone.

    The pass takes no exclusions, so an attribute that differs keeps those nodes apart that must stay. It also drops
    the type of a graph output when another node comes to compute it.
    """
    graph = model.graph
    nodes = set(graph)
    ports = [(value.type, value.shape) for value in graph.outputs]
    kept = [node for node in graph if _must_stay(node)]
    for number, node in enumerate(kept):
        node.attributes.add(ir.AttrInt64(MARK, number))
    CommonSubexpressionEliminationPass()(model)
    for node in kept:
        del node.attributes[MARK]
    for value, (kind, shape) in zip(graph.outputs, ports, strict=True):
        value.type, value.shape = kind or value.type, shape or value.shape
    return len(nodes - set(graph))


def _must_stay(node: ir.Node) -> bool:
    """Whether a node may not stand for another, or another for it."""
    names_output = node.op_type == "Identity" and node.outputs[0].is_graph_output()
    partial = not all(value.name for value in node.outputs)
    tensors = (each.as_tensor() for each in node.attributes.values() if each.type is ir.AttributeType.TENSOR)
    if any(tensor.dtype is ir.DataType.STRING for tensor in tensors):  # the pass would compare addresses
        return True
    return node.domain != "" or node.op_type in RANDOM or names_output or partial

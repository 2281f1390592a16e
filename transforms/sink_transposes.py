"""Cancel Transposes through operators that do not depend on the order of axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from .graphs.inference import stand_ins
from .graphs.queries import axes_of, computing_graphs, constant, graph_of, node_name
from .graphs.rewriter import (
    add_initializer,
    can_replace,
    discard,
    insert_before,
    names,
    remove,
    remove_if_unread,
    replace,
    unused_name,
)
from .patterns.transposed import REDUCTIONS, Part, does_as, order_of, parts_of, reshapes_of
from .registry import Change, transform


@transform("sink_transposes", after=("fold_constants",))
def sink_transposes(model: ir.Model) -> Change:
    """Remove Transposes that undo each other and have only operators between them that ignore the order of axes.

    Before:  y = Transpose(Relu(Add(Transpose(x, perm=[0, 2, 3, 1]), c)), perm=[0, 3, 1, 2]),  c (C,)
    After:   y = Relu(Add(x, c')),  c' (1, C, 1, 1)
    Before:  a = Add(Transpose(x, perm=[0, 2, 3, 1]), Transpose(z, perm=[0, 2, 3, 1])); m = ReduceMean(a, axes=[1, 2]);
             y = Transpose(a, perm=[0, 3, 1, 2])
    After:   y = Add(x, z); m = ReduceMean(y, axes=[2, 3])
        TensorFlow computes channels-last, so an exporter puts Transposes around each convolution. The operators are
        element-wise, a Concat, or a reduction; they and what they read and write are moved together, if that leaves
        fewer Transposes. Where others read a tensor between them, it is transposed once.
    Before:  y = Transpose(Mul(Transpose(x, perm=[0, 2, 3, 1]), Reshape(g, [1, 1, 1, C])), perm=[0, 3, 1, 2]),
             g (1, C, 1, 1)
    After:   y = Mul(x, g)
        A Reshape that moves only axes of length 1, as of the gate of a squeeze-excite block, counts as a Transpose.
    Left alone: Transposes that are needed as often elsewhere, or that would only be merged (``no-gain``); operators
        that depend on the order of axes, read a computed tensor that is not behind such a Transpose or has fewer axes,
        or write an output of the graph.
    """
    change, taken = Change(), names(model)
    progress = True
    while progress:  # what is moved may bring other Transposes together
        change.skipped.clear()
        graphs = computing_graphs(model)
        shapes = stand_ins(model) if any(map(reshapes_of, graphs)) else {}
        progress = sum(_sink(graph, taken, change, shapes) for graph in graphs) > 0
    return change


def _sink(graph: ir.Graph, taken: set[str], change: Change, shapes: Mapping[ir.Value, ir.Value]) -> int:
    """Move the parts of a graph that gain; return how many nodes changed.

    Parts may share Transposes, so that a part next to one that was moved waits for the next time.

    Args:
        graph: The graph.
        taken: The names in the model.
        change: Counts what is done.
        shapes: Values with the shapes of tensors.
    """
    moved: set[ir.Node] = set()
    for order in dict.fromkeys(order for node in graph if (order := order_of(node)) is not None):
        alike = [node for node in reshapes_of(graph) if node not in moved and does_as(node, order, shapes)]
        for part in [*parts_of(graph, order, alike)]:
            if part.gain > 0 and moved.isdisjoint(part.around):
                _move(part, taken)
                moved |= part.around
                change.applied += len(part.lasts) or 1
            elif part.gain <= 0 and part.nodes and (part.lasts or len(part.firsts) > 1):
                change.skip("no-gain")
    return len(moved)


def _move(part: Part, taken: set[str]) -> None:
    """Let a part compute on the tensors in front of its first Transposes."""
    for node in part.nodes:
        if part.loose[node.outputs[0]]:
            _transpose_for(part.loose[node.outputs[0]], node, part.order, taken)
    for first in part.firsts:
        stay = part.loose[first.outputs[0]]
        for reader, index in [(use.node, use.idx) for use in first.outputs[0].uses()]:
            if reader not in stay:
                reader.replace_input_with(index, first.inputs[0])
    for node in (*part.nodes, *part.reductions):
        _reorder(node, part.order, taken)
    for node in part.nodes:
        _reshape(node.outputs[0], part.order)
    for last in part.lasts:
        _remove_last(last, taken)
    for first in part.firsts:
        remove_if_unread(first)


def _transpose_for(readers: Sequence[ir.Node], node: ir.Node, order: Sequence[int], taken: set[str]) -> None:
    """Let some readers of a node read its transposed result."""
    value, name = node.outputs[0], unused_name(taken, f"{node_name(node)}/transposed")
    moved = ir.node("Transpose", [value], {"perm": list(order)}, name=name)
    moved.outputs[0].name, moved.outputs[0].type, moved.outputs[0].shape = name, value.type, value.shape
    graph_of(node).insert_after(node, [moved])
    for reader, index in [(use.node, use.idx) for use in value.uses()]:
        if reader in readers:
            reader.replace_input_with(index, moved.outputs[0])


def _remove_last(last: ir.Node, taken: set[str]) -> None:
    """Remove a Transpose whose input has the order of its result already."""
    value, result = last.inputs[0], last.outputs[0]
    assert value is not None
    if not can_replace(result, value):
        value = insert_before(last, taken, "Identity", [value], stem=f"{node_name(last)}/copy")
    replace(result, value)
    remove(last)


def _reorder(node: ir.Node, order: Sequence[int], taken: set[str]) -> None:
    """Give a node the constants and attributes for the axis order that its tensors have without the Transposes."""
    rank = len(order)
    if node.op_type == "Concat":
        node.attributes["axis"] = ir.AttrInt64("axis", order[node.attributes["axis"].as_int() % rank])
    if node.op_type in REDUCTIONS:
        _reduce(node, [order[axis % rank] for axis in axes_of(node) or ()], taken)
        return
    for index, value in enumerate(node.inputs):
        tensor = constant(value)
        if value is None or tensor is None or tensor.size == 1:
            continue
        array = tensor.numpy()
        wide = array.reshape((1,) * (rank - array.ndim) + array.shape)
        name = unused_name(taken, f"{value.name}_reordered")
        ordered = np.transpose(wide, np.argsort(order))
        node.replace_input_with(index, add_initializer(graph_of(node), name, ordered))
        discard(value)


def _reduce(node: ir.Node, axes: list[int], taken: set[str]) -> None:
    """Give a reduction other axes."""
    if "axes" in node.attributes:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)
    elif axes:
        value = node.inputs[1]
        name = unused_name(taken, f"{node_name(node)}/axes")
        node.replace_input_with(1, add_initializer(graph_of(node), name, np.array(axes, np.int64)))
        discard(value)


def _reshape(value: ir.Value, order: Sequence[int]) -> None:
    """Give a tensor the shape that it has without the Transposes."""
    shape = value.shape
    if shape is not None:
        value.shape = ir.Shape([shape[axis] for axis in np.argsort(order)]) if len(shape) == len(order) else None

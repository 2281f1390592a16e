"""Cancel pairs of Transposes through element-wise operators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .graph import (
    add_initializer,
    can_replace,
    computing_nodes,
    constant,
    discard,
    graph_of,
    names,
    remove,
    remove_if_unread,
    replace,
    sole_reader,
    unused_name,
)
from .registry import Change, transform

UNARY = frozenset(
    "Abs Cast Ceil Clip Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity LeakyRelu Log Mish Neg Not Reciprocal "
    "Relu Round Selu Sigmoid Sign Softplus Softsign Sqrt Tanh ThresholdedRelu".split()
)
BINARY = frozenset("Add Div Max Min Mul PRelu Pow Sub".split())


@transform("sink_transposes", after=("fold_constants",))
def sink_transposes(model: ir.Model) -> Change:
    """Remove two Transposes that undo each other and have only element-wise operators between them.

    Before:  y = Transpose(Relu(Add(Transpose(x, perm=[0, 2, 3, 1]), c)), perm=[0, 3, 1, 2]),  c (C,)
    After:   y = Relu(Add(x, c')),  c' (1, C, 1, 1)
        TensorFlow computes channels-last, so an exporter puts Transposes around each convolution. The first Transpose
        stays if other nodes read it.
    Left alone: a tensor between the two that has other readers or is an output of the graph (``read-between``), or that
        a constant of more axes broadcasts (``stretched``); operators between them that depend on the order of axes or
        read two computed tensors; Transposes without a matching one.
    """
    change = Change()
    taken: set[str] = names(model)
    progress = True
    while progress:  # a removed pair may bring another pair together
        progress = False
        for node in computing_nodes(model, "Transpose"):
            if _order(node) is not None and node.graph is not None and _cancel(node, taken, change):
                progress = True
    return change


def _order(node: ir.Node | None) -> list[int] | None:
    """Return the perm of a Transpose; None for any other node, or without a perm."""
    if node is None or node.op_type != "Transpose" or node.domain:
        return None
    order = node.attributes.get_ints("perm", None)
    return None if order is None else list(order)


def _cancel(last: ir.Node, taken: set[str], change: Change) -> bool:
    """Remove a Transpose and, if nothing else reads it, the earlier one that it undoes; return whether it worked."""
    path = _path(last)
    if not path:
        return False
    first = path.pop()
    order, back = _order(first), _order(last)
    if order is None or back is None or len(order) != len(back) or [order[axis] for axis in back] != sorted(order):
        return False
    if any(sole_reader(node.outputs[0]) is None for node in path):
        change.skip("read-between")
        return False
    source, result = first.inputs[0], last.outputs[0]
    end = path[0].outputs[0] if path else source
    if source is None or end is None or not can_replace(result, end):
        return False
    if not all(_fits(node, len(order)) for node in path):
        change.skip("stretched")
        return False
    for node in path:
        _reorder(node, order, taken)
        node.outputs[0].shape = None  # the order of its axes changed
    if path:
        (index,) = (i for i, value in enumerate(path[-1].inputs) if value is first.outputs[0])
        path[-1].replace_input_with(index, source)
        end.type, end.shape = result.type or end.type, result.shape
    replace(result, end)
    remove(last)
    remove_if_unread(first)
    change.applied += 1
    return True


def _path(last: ir.Node) -> list[ir.Node]:
    """Return the element-wise nodes before a Transpose, nearest first, and then the node before them."""
    path: list[ir.Node] = []
    node = last
    while not path or _is_elementwise(node):
        inputs = [value for value in node.inputs if value is not None and constant(value) is None]
        above = inputs[0].producer() if len(inputs) == 1 else None
        if above is None or above.graph is not last.graph:
            return []
        path.append(above)
        node = above
    return path


def _is_elementwise(node: ir.Node) -> bool:
    return node.op_type in UNARY | BINARY and not node.domain and len(node.outputs) == 1


def _fits(node: ir.Node, rank: int) -> bool:
    """Whether no constant of a node has more axes than the tensor."""
    shapes = [tensor.shape for value in node.inputs if (tensor := constant(value)) is not None]
    return all(len(shape) <= rank for shape in shapes)


def _reorder(node: ir.Node, order: list[int], taken: set[str]) -> None:
    """Transpose the constants of a node into the axis order that its tensor has without the Transpose."""
    for index, value in enumerate(node.inputs):
        tensor = constant(value)
        if value is None or tensor is None or tensor.size == 1:
            continue
        array = tensor.numpy()
        wide = array.reshape((1,) * (len(order) - array.ndim) + array.shape)
        name = unused_name(taken, f"{value.name}_reordered")
        ordered = np.transpose(wide, np.argsort(order))
        node.replace_input_with(index, add_initializer(graph_of(node), name, ordered))
        discard(value)

"""Parts of a graph between Transposes, which could compute on the tensors in front of these."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import onnx_ir as ir

from ..graphs.queries import axes_of, constant, is_standard

UNARY = frozenset(
    "Abs Cast Ceil Clip Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity LeakyRelu Log Mish Neg Not Reciprocal "
    "Relu Round Selu Sigmoid Sign Softplus Softsign Sqrt Tanh ThresholdedRelu".split()
)
BINARY = frozenset("Add Div Max Min Mul PRelu Pow Sub".split())
REDUCTIONS = frozenset(f"Reduce{name}" for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split())


@dataclass(frozen=True, eq=False)
class Part:
    """Nodes that compute on transposed tensors, and all that is next to them.

    Attributes:
        order: The perm of the Transposes in front.
        firsts: These Transposes, and Reshapes that do the same to tensors with axes of length 1.
        nodes: The nodes: element-wise operators, Concats, and reductions that keep the axes.
        lasts: Transposes behind them, or behind one in front, that undo the order.
        reductions: Reductions behind them that remove axes and leave the others in their order.
        loose: Other readers, by the tensor that they read.
    """

    order: tuple[int, ...]
    firsts: tuple[ir.Node, ...]
    nodes: tuple[ir.Node, ...]
    lasts: tuple[ir.Node, ...]
    reductions: tuple[ir.Node, ...]
    loose: Mapping[ir.Value, tuple[ir.Node, ...]]

    @property
    def gain(self) -> int:
        """How many Transposes fewer there are if the part computes on the tensors in front of the first ones.

        A first one stays where others read it. A tensor of the nodes that others read needs a new one. No gain counts
        where nothing cancels: to merge Transposes would take them away from what they stand next to.
        """
        ends = [node.outputs[0] for node in self.firsts if order_of(node) is not None]
        free = sum(not self.loose[value] and not value.is_graph_output() for value in ends)
        new = sum(bool(self.loose[node.outputs[0]]) for node in self.nodes)
        return len(self.lasts) + free - new if self.lasts or not new else 0

    @property
    def around(self) -> set[ir.Node]:
        """All nodes that change if the part moves: its own, the Transposes, and the readers of its tensors."""
        return {*self.firsts, *self.nodes, *self.lasts, *self.reductions, *chain(*self.loose.values())}


def order_of(node: ir.Node | None) -> tuple[int, ...] | None:
    """Return the perm of a Transpose; None for any other node, or without a perm."""
    if not is_standard(node, "Transpose"):
        return None
    order = node.attributes.get_ints("perm", None)
    return None if order is None else tuple(order)


def computed_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node that are not constant."""
    return [value for value in node.inputs if value is not None and constant(value) is None]


def reshapes_of(graph: ir.Graph) -> list[ir.Node]:
    """Return the Reshapes of a graph to constant shapes with axes of length 1, which may do what a Transpose does."""
    found = (node for node in graph if is_standard(node, "Reshape") and len(node.inputs) > 1)
    shapes = ((node, constant(node.inputs[1])) for node in found)
    return [node for node, shape in shapes if shape is not None and 1 in shape.numpy()]


def does_as(reshape: ir.Node, order: Sequence[int], shapes: Mapping[ir.Value, ir.Value]) -> bool:
    """Whether a Reshape, one of `reshapes_of`, does what a Transpose does: it moves only axes of length 1.

    Args:
        reshape: The Reshape.
        order: The perm of the Transpose.
        shapes: Values with the shapes of tensors.
    """
    source, target = reshape.inputs[0], constant(reshape.inputs[1])
    known = shapes[source].shape if source is not None and source in shapes else None
    if known is None or target is None or not len(known) == target.size == len(order):
        return False
    long = [axis for axis in order if known[axis] != 1]
    pairs = list(zip(target.numpy().ravel().tolist(), [known[axis] for axis in order], strict=True))
    fits = all(asked and asked in (-1, length) for asked, length in pairs)  # 0 copies a length
    return fits and long == sorted(long) and sum(asked == -1 for asked, _ in pairs) <= 1


def parts_of(graph: ir.Graph, order: tuple[int, ...], alike: Iterable[ir.Node] = ()) -> Iterator[Part]:
    """Yield the parts of a graph, without its bodies, behind Transposes of one order. No two share a node.

    Args:
        graph: The graph.
        order: The perm of the Transposes.
        alike: Reshapes that do what these Transposes do.
    """
    starts = {node for node in graph if order_of(node) == order}.union(alike)
    movable, done = _movable(graph, len(order), starts), set[ir.Node]()
    for node in [node for node in graph if order_of(node) == order]:
        if node in done:
            continue
        values, nodes = _connected(node.outputs[0], movable)
        firsts = tuple(made for value in values if (made := value.producer()) is not None and made not in nodes)
        done.update(firsts)
        yield _part(order, firsts, tuple(nodes), values)


def _part(
    order: tuple[int, ...],
    firsts: tuple[ir.Node, ...],
    nodes: tuple[ir.Node, ...],
    values: Iterable[ir.Value],
) -> Part:
    """Return the part with some nodes and Transposes in front, and with all their results."""
    inner, back = set(nodes), tuple(map(int, np.argsort(order)))
    lasts, reductions, loose = [], [], {}
    for value in values:
        others = []
        for reader in dict.fromkeys(use.node for use in value.uses() if use.node not in inner):
            near = reader.graph is value.graph
            if near and order_of(reader) == back and reader not in firsts:  # an order may undo itself
                lasts.append(reader)
            elif near and _keeps_order(reader, order):
                reductions.append(reader)
            else:
                others.append(reader)
        loose[value] = tuple(others)
    return Part(order, firsts, nodes, tuple(lasts), tuple(reductions), loose)


def _movable(graph: ir.Graph, rank: int, starts: Collection[ir.Node]) -> dict[ir.Node, None]:
    """Return the nodes all of whose computed inputs come from such nodes, or from the first ones, `starts`."""
    found = {node: None for node in graph if _ignores_order(node, rank)}
    waiting = list(found)
    while waiting:
        node = waiting.pop()
        makers = [value.producer() for value in computed_inputs(node)]
        moved = [made in found or made in starts for made in makers if made]
        if node in found and not (makers and len(moved) == len(makers) and all(moved)):
            del found[node]
            waiting += [use.node for use in node.outputs[0].uses()]
    return found


def _connected(start: ir.Value, movable: Mapping[ir.Node, None]) -> tuple[dict[ir.Value, None], dict[ir.Node, None]]:
    """Return the tensors that movable nodes connect with a first one, and these nodes."""
    values: dict[ir.Value, None] = {start: None}
    nodes: dict[ir.Node, None] = {}
    waiting = [start]
    while waiting:
        value = waiting.pop()
        for node in (value.producer(), *(use.node for use in value.uses())):
            if node is None or node not in movable or node in nodes:
                continue
            nodes[node] = None
            more = [each for each in (node.outputs[0], *computed_inputs(node)) if each not in values]
            values.update(dict.fromkeys(more))
            waiting += more
    return values, nodes


def _ignores_order(node: ir.Node, rank: int) -> bool:
    """Whether a node can compute on tensors with their axes in another order, with other constants and attributes."""
    if node.domain or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
        return False
    if node.op_type in REDUCTIONS:
        return node.attributes.get_int("keepdims", 1) == 1 and axes_of(node) is not None
    ranks = [len(tensor.shape) for value in node.inputs if (tensor := constant(value)) is not None]
    if node.op_type == "Concat":
        return all(each == rank for each in ranks)
    return node.op_type in UNARY | BINARY and all(each <= rank for each in ranks)


def _keeps_order(node: ir.Node, order: Sequence[int]) -> bool:
    """Whether a node is a reduction that removes axes, and leaves the others in the order of the tensor in front."""
    axes = axes_of(node) if node.op_type in REDUCTIONS and not node.domain else None
    if axes is None or node.attributes.get_int("keepdims", 1) == 1:
        return False
    removed = {axis % len(order) for axis in axes}
    left = [order[axis] for axis in range(len(order)) if axis not in removed] if axes else []
    return left == sorted(left)

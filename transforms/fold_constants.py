"""Compute tensors that do not depend on the model's inputs at conversion time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from .. import UnknownNameError
from .graphs.inference import stand_ins
from .graphs.queries import computing_nodes, constant, graph_of, producer_of
from .graphs.rewriter import add_initializer, discard, remove_if_unread
from .graphs.tensors import tensors
from .int8.ops import MOVES, row_of
from .parts.constant_ifs import take_branches
from .parts.constant_values import (
    StandIns,
    evaluate_node,
    expected_bytes,
    has_constant_inputs,
    has_size,
    has_value,
    results_of,
    why_left,
)
from .registry import Change, LeftAlone, transform

WEIGHT_PATH = MOVES | {"Cast", "Slice"}
"""Operators of one tensor that may stand between a weight and what reads it; a Concat may too."""
SCALING = frozenset({"Add", "Div", "Mul", "Sub"})
"""Operators that may stand there with a constant: a weight may be stored as integers with a scale and a zero point."""
RECURRENT_WEIGHTS = dict.fromkeys(("LSTM", "GRU", "RNN"), (1, 2))
"""The indices of the weights of recurrent operators; exporters put their gates in order by a Slice for each."""
GROWTH = 0.1
"""The share of its constants by which a model may grow."""
LEAST_GROWTH = 2**12
"""Bytes by which any model may grow: shapes and factors."""

MOST_WEIGHTS = 2**28
"""Bytes by which weights may grow in any model; in larger models, by the size of its constants."""
MOST_WIDENED = 8
"""How many times as long as their constants weights may be: 4 bits become float32. A mel filter bank is longer."""
MOST_NODES = 32
"""The most nodes that are judged together."""

Growing = tuple[float, Sequence[ir.Node]]
"""Nodes of which the last one needs the others, and the bytes by which the file grows if all become constants."""


@transform("fold_constants")
def fold_constants(
    model: ir.Model,
    *,
    max_size_in_bytes: int = 10 * 2**20,
    exclude_op: tuple[str, ...] = (),
    exclude_node: tuple[str, ...] = (),
) -> Change:
    """Replace each node with constant inputs, and each Shape of a known shape, by its value.

    Before:  w = Transpose(W); n = Constant(); s = Shape(x), x of shape (1, 3, 8, 8); d = Gather(Shape(z), n), z (N, 4);
             e = Slice(Shape(z), [1], [2]); y = If(true), then {t = Sqrt(x)}, else {f = Neg(x)}
    After:   w, n, s, d, e are initializers; y = Sqrt(x)
    An If with a constant condition gives way to the nodes of the branch that it takes, as the ``squeeze`` of PyTorch
        needs it where the shapes are known.
    The file grows by at most 10 % of the constants of the model, or 4 KiB: the results that make it grow least are
        stored first. Results between nodes do not count if they need not be stored, as in the standardization of a
        weight: up to 32 nodes are judged together. The weights of products and of recurrent operators, also those that
        are integers with a scale and a zero point, are stored if they grow by at most 256 MiB, or the size of all
        constants, and have at most 8 times the bytes of the constants of which they are made: 4 bits become 32.
    Left alone: results beyond this growth (``grows``); random operators; QuantizeLinear and DequantizeLinear, which
        hold the int8 weights; other control flow, except the nodes in its bodies; operators of other domains; outputs
        of graphs and bodies; results larger than both max_size_in_bytes and their inputs; operators that
        ``onnx.reference`` cannot compute, or computes in another type.

    Options:
        max_size_in_bytes: A larger result is stored only if it is no larger than the inputs of the node.
        exclude_op: Operator types to leave alone.
        exclude_node: Names of nodes to leave alone.

    Raises:
        UnknownNameError: No node has a name in exclude_node.
    """
    known = {node.name for node in computing_nodes(model) if node.name}
    for name in exclude_node:
        if name not in known:
            raise UnknownNameError("node", name, known)
    excluded = frozenset(
        node for node in computing_nodes(model) if node.op_type in exclude_op or node.name in exclude_node
    )
    folding = _Folding(model, max_size_in_bytes, excluded, _budget(model), max(_held(model), MOST_WEIGHTS))
    progress = True
    while progress:  # a Reshape to a constant shape makes the shapes behind it known
        before = folding.change.applied
        folding.change.skipped.clear()
        shapes = stand_ins(model)
        growing = folding.fold_free(shapes)
        folding.change.applied += take_branches(model, excluded)
        if folding.change.applied == before:
            growing += folding.fold_cones([node for _, (node,) in growing], shapes)
        if folding.change.applied == before:
            folding.fold_growing(growing, shapes)
        progress = folding.change.applied > before
    return folding.change


@dataclass(slots=True)
class _Folding:
    """A run of `fold_constants`.

    Attributes:
        model: The model.
        limit: The size of the largest result in bytes, unless the inputs are larger.
        excluded: Nodes to leave alone.
        left: Bytes by which the file may still grow.
        weights: Bytes by which weights may still grow.
        sizes: The size in bytes of results that were computed once, by node.
        change: What was done so far.
    """

    model: ir.Model
    limit: int
    excluded: frozenset[ir.Node]
    left: float
    weights: float
    sizes: dict[ir.Node, int] = field(default_factory=dict)
    change: Change = field(default_factory=Change)

    def fold_free(self, shapes: StandIns) -> list[Growing]:
        """Fold the nodes that do not make the file grow; return the others with the bytes by which they do."""
        growing: list[Growing] = []
        for node in computing_nodes(self.model):
            if not has_value(node):
                continue
            try:
                if node in self.excluded:
                    raise LeftAlone("excluded")
                arrays = [] if node in self.sizes else results_of(self.model, node, shapes, self.limit)
            except LeftAlone as left:
                self.change.skip(str(left))
                continue
            if node not in self.sizes:
                self.sizes[node] = _stored_bytes(node, arrays)
            growth = self.sizes[node] - _freed_bytes(node)
            if growth > 0 and not self._may_grow([node], growth):
                growing.append((growth, [node]))
                continue
            self.left -= min(growth, 0)
            self.weights -= max(growth, 0)
            self._store(node, arrays or results_of(self.model, node, shapes, self.limit))
        return growing

    def fold_cones(self, nodes: Sequence[ir.Node], shapes: StandIns) -> list[Growing]:
        """Fold nodes together with those that they need, where the file does not grow by what others read of them.

        Args:
            nodes: The nodes with constant inputs.
            shapes: Values with the shapes of tensors.

        Returns:
            The other nodes, each with those that it needs, and the bytes by which the file grows.
        """
        growing: list[Growing] = []
        for cone in _cones(self.model, nodes, self.excluded):
            if any(node.graph is None for node in cone):  # part of another cone
                continue
            try:
                growth = _cone_growth(cone, shapes)
                if growth > 0 and not self._may_grow(cone, growth):
                    growing.append((growth, cone))
                    continue
                self._store_cone(cone, shapes)
            except LeftAlone:
                continue
            self.left -= min(growth, 0)
            self.weights -= max(growth, 0)
        return growing

    def fold_growing(self, growing: Sequence[Growing], shapes: StandIns) -> None:
        """Fold nodes as long as the file may grow, those first that make it grow least."""
        for growth, cone in sorted(growing, key=lambda each: each[0]):
            if any(node.graph is None for node in cone):  # a Shape that lost its readers, or a part of another cone
                continue
            if growth > self.left:
                if len(cone) == 1:
                    self.change.skip("grows")
                continue
            try:
                self._store_cone(cone, shapes)
            except LeftAlone:
                continue
            self.left -= growth

    def _may_grow(self, cone: Sequence[ir.Node], growth: float) -> bool:
        """Return whether nodes compute weights that may grow by some bytes."""
        read = sum(each.nbytes for each in map(constant, {v for n in cone for v in n.inputs}) if each is not None)
        return growth <= min(self.weights, (MOST_WIDENED - 1) * read) and _is_weight(cone[-1])

    def _store_cone(self, cone: Sequence[ir.Node], shapes: StandIns) -> None:
        """Replace nodes by initializers for what others read of them.

        Raises:
            LeftAlone: A node must stay; then all stay.
        """
        if len(cone) == 1:
            self._store(cone[0], results_of(self.model, cone[0], shapes, self.limit))
            return
        results = _cone_results(self.model, cone, shapes, self.limit)
        for node in reversed(cone):  # what is between them has no readers left, and is not stored
            if node.graph is not None:  # a Shape leaves with its last reader
                self._store(node, [results.get(value, np.empty(0)) for value in node.outputs])

    def _store(self, node: ir.Node, arrays: Sequence[np.ndarray]) -> None:
        """Replace a node by initializers."""
        _store(node, arrays)
        self.change.applied += 1


def _budget(model: ir.Model) -> float:
    """Return the bytes by which a model may grow."""
    return max(GROWTH * _held(model), LEAST_GROWTH)


def _held(model: ir.Model) -> int:
    """Return the bytes of a model's constants."""
    return sum(tensor.nbytes for tensor in tensors(model))


def _freed_bytes(node: ir.Node) -> int:
    """Return the size of the constants that only this node reads."""
    sources = [value for value in dict.fromkeys(node.inputs) if value is not None and not value.is_graph_output()]
    alone = [value for value in sources if all(use.node is node for use in value.uses())]
    return sum(tensor.nbytes for value in alone if (tensor := constant(value)) is not None)


def _cones(model: ir.Model, growing: Sequence[ir.Node], excluded: frozenset[ir.Node]) -> list[list[ir.Node]]:
    """Return, for each node that depends on constants alone, this node and the nodes that it needs, in order.

    Args:
        model: The model.
        growing: The nodes with constant inputs that can be computed.
        excluded: Nodes to leave alone.
    """
    cones = {node: [node] for node in growing if has_constant_inputs(node)}
    for node in computing_nodes(model):
        if node in cones or node in excluded or node.op_type == "Constant":
            continue
        sources = [value.producer() for value in node.inputs if value is not None and constant(value) is None]
        parts = [cones[source] for source in sources if source in cones and source.graph is node.graph]
        if sources and len(parts) == len(sources) and not why_left(node):
            cone = [*dict.fromkeys(each for part in parts for each in part), node]
            if len(cone) <= MOST_NODES:
                cones[node] = cone
    return [cone for cone in cones.values() if len(cone) > 1]


def _cone_growth(cone: Sequence[ir.Node], shapes: StandIns) -> float:
    """Return the bytes by which the file grows if nodes are computed and only what others read is stored.

    Raises:
        LeftAlone: The size of a result is not known.
    """
    inside = set(cone)
    stored = [value for node in cone for value in node.outputs if any(use.node not in inside for use in value.uses())]
    if not all(has_size(shapes.get(value)) for value in stored):
        raise LeftAlone("shape-unknown")
    sources = dict.fromkeys(value for node in cone for value in node.inputs if value is not None)
    alone = [value for value in sources if not value.is_graph_output() and all(u.node in inside for u in value.uses())]
    freed = sum(tensor.nbytes for value in alone if (tensor := constant(value)) is not None)
    return sum(expected_bytes(shapes.get(value)) for value in stored) - freed


def _cone_results(model: ir.Model, cone: Sequence[ir.Node], shapes: StandIns, limit: int) -> dict[ir.Value, np.ndarray]:
    """Return what nodes compute that others read.

    Raises:
        LeftAlone: A node must stay.
    """
    results: dict[ir.Value, np.ndarray] = {}
    for index, node in enumerate(cone):
        results.update(zip(node.outputs, evaluate_node(model, node, shapes, limit, results), strict=True))
        done = set(cone[: index + 1])
        for value in [value for value in results if all(use.node in done for use in value.uses())]:
            del results[value]  # keeps no more results in memory than needed
    return results


def _stored_bytes(node: ir.Node, arrays: Sequence[np.ndarray]) -> int:
    """Return the size of the results of a node that must be stored; nothing for a Constant, whose tensor only moves."""
    stored = [] if node.op_type == "Constant" else zip(node.outputs, arrays, strict=True)
    return sum(array.nbytes for value, array in stored if value.name and value.uses())


def _is_weight(node: ir.Node) -> bool:
    """Whether a product or a recurrent operator reads the result of a node as weights: int8 needs constant ones."""
    waiting, seen = [node], {node}
    while waiting:
        for use in (use for value in waiting.pop().outputs for use in value.uses()):
            row, op = row_of(use.node), use.node.op_type
            if row is not None and row.kind == "compute" and use.idx == row.weight:
                return True
            if use.idx in RECURRENT_WEIGHTS.get(op, ()):
                return True
            if use.node not in seen and _passes_weight(use.node, use.idx):
                seen.add(use.node)
                waiting.append(use.node)
    return False


def _passes_weight(node: ir.Node, index: int) -> bool:
    """Whether a node only moves the tensor that is this input, or scales and shifts it by constants."""
    if node.op_type in SCALING:
        return all(constant(value) is not None for i, value in enumerate(node.inputs) if i != index)
    return node.op_type == "Concat" or (node.op_type in WEIGHT_PATH and index == 0)


def _store(node: ir.Node, arrays: Sequence[np.ndarray]) -> None:
    """Replace a node by initializers that have the names of its outputs."""
    graph = graph_of(node)
    inputs, outputs = tuple(node.inputs), tuple(node.outputs)
    for value, array in zip(outputs, arrays, strict=True):
        if value.name and value.uses():
            value.replace_all_uses_with(add_initializer(graph, value.name, array))
    graph.remove(node, safe=True)
    discard(*inputs)
    for source in inputs:  # removes a Shape without readers left
        shape = producer_of(source)
        if shape is not None and shape.domain == "" and shape.op_type == "Shape" and shape.graph is graph:
            remove_if_unread(shape)

"""A graph cut into pieces: the nodes between tensors that are known and a tensor that is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.analysis import analyze_implicit_usage

from ...transforms.graphs.queries import constant


@dataclass(frozen=True, eq=False)
class Piece:
    """The nodes between known tensors and a tensor that is taken.

    Attributes:
        index: Its place among the pieces, a prefix of its tensors in the session.
        nodes: The nodes, in the order of the graph.
        inputs: Tensors that are known before the piece runs.
        outputs: Tensors that are taken, or that later pieces read.
    """

    index: int
    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]

    @property
    def flag(self) -> str:
        """The name of the input that says whether it runs."""
        return f"{self.index}//run"

    def name(self, value: ir.Value) -> str:
        """Return the name of one of its inputs or outputs in the session."""
        return f"{self.index}/{value.name}"


class Reads:
    """What each node of a graph reads, itself and in its bodies.

    Attributes:
        computed: The tensors that nodes or callers give, by node.
        constants: The other tensors, by node.
        places: The place of each node in the graph.
    """

    def __init__(self, graph: ir.Graph) -> None:
        """Look at each node once."""
        captured = analyze_implicit_usage(graph)
        every = {node: _read_by(node, captured) for node in graph}
        self.computed = {node: [v for v in values if not _is_constant(v)] for node, values in every.items()}
        self.constants = {node: [v for v in values if _is_constant(v)] for node, values in every.items()}
        self.places = {node: place for place, node in enumerate(graph)}

    def ancestors(
        self, targets: Iterable[ir.Value], known: Collection[ir.Value], stops: Collection[ir.Value]
    ) -> list[ir.Node]:
        """Return the nodes that compute tensors, in the order of the graph.

        Args:
            targets: The tensors.
            known: Tensors that are known already.
            stops: Tensors that no node computes, since somebody sets them.
        """
        found: dict[ir.Node, None] = {}
        waiting = [value for value in targets if value not in known]
        while waiting:
            node = waiting.pop().producer()
            if node is None or node in found or any(value in stops for value in node.outputs):
                continue
            found[node] = None
            waiting += [value for value in self.computed[node] if value not in known]
        return sorted(found, key=self.places.__getitem__)


class Uses:
    """How often tensors will still be read by nodes, or taken."""

    def __init__(self, reads: Reads, nodes: Iterable[ir.Node], targets: Iterable[ir.Value]) -> None:
        """Count the readers of nodes that will run, and the tensors that will be taken, each as often as listed."""
        self._reads, self._waiting = reads, set(nodes)
        self._left = Counter(value for node in self._waiting for value in reads.computed[node])
        self._left.update(targets)

    def run(self, nodes: Iterable[ir.Node]) -> None:
        """Count nodes as run."""
        for node in self._waiting.intersection(nodes):
            self._left.subtract(self._reads.computed[node])
            self._waiting.remove(node)

    def take(self, value: ir.Value) -> None:
        """Count a tensor as taken once."""
        self._left[value] -= 1

    def __contains__(self, value: ir.Value) -> bool:
        """Return whether a tensor will be read or taken."""
        return self._left[value] > 0


def cut(
    reads: Reads, targets: Sequence[ir.Value], known: Collection[ir.Value], stops: Collection[ir.Value], uses: Uses
) -> dict[ir.Value, Piece]:
    """Return the piece that each target needs when targets are taken in this order.

    Args:
        reads: What the nodes read.
        targets: The tensors that will be taken.
        known: Tensors that are known before the first piece runs.
        stops: As for `Reads.ancestors`; each is known when it is read.
        uses: What will be read; it is counted down here.
    """
    found, pieces = {*known, *stops}, dict[ir.Value, Piece]()
    for target in targets:
        if target not in found:
            nodes = tuple(reads.ancestors([target], found, stops))
            uses.run(nodes)
            made = [output for node in nodes for output in node.outputs]
            outputs = dict.fromkeys([*(each for each in made if each in uses), target])
            inner = set(made)
            needed = dict.fromkeys(each for node in nodes for each in reads.computed[node] if each not in inner)
            inputs = tuple(each for each in needed if each in found)
            pieces[target] = Piece(len(pieces), nodes, inputs, tuple(outputs))
            found.update(outputs)
        uses.take(target)
    return pieces


def extracted(graph: ir.Graph, reads: Reads, piece: Piece) -> ir.Graph:
    """Return a copy of a piece as a graph, with the constants that it reads. The time depends on the piece alone."""
    constants = dict.fromkeys(value for node in piece.nodes for value in reads.constants[node])
    made = dict.fromkeys(node for value in constants if (node := value.producer()) is not None)
    nodes = sorted({*piece.nodes, *made}, key=reads.places.__getitem__)
    weights = [value for value in constants if value.is_initializer()]
    view = ir.GraphView(
        piece.inputs,
        piece.outputs,
        nodes=nodes,
        initializers=weights,
        opset_imports=graph.opset_imports,
        name=graph.name,
    )
    return view.clone()


def _is_constant(value: ir.Value) -> bool:
    """Whether a tensor is an initializer, also one that a caller may override, or made by a Constant."""
    return constant(value) is not None or value.is_initializer()


def _read_by(node: ir.Node, captured: Mapping[ir.Graph, set[ir.Value]]) -> list[ir.Value]:
    """Return the tensors that a node and its bodies read."""
    found = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            found += captured[attribute.as_graph()]
        elif attribute.type is ir.AttributeType.GRAPHS:
            found += [value for graph in attribute.as_graphs() for value in captured[graph]]
    return found

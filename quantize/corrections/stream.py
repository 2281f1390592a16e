"""Run a model piece by piece over a few samples, so that a caller can replace tensors between the pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.analysis import analyze_implicit_usage

from ...calibration.session import Array, open_session, run_session
from ...transforms.graph import constant
from ..model.files import serialize


class Stream:
    """The tensors of a model for some samples. A tensor is computed on first use and dropped after its last use."""

    def __init__(self, model: ir.Model, feeds: Sequence[Mapping[str, Array]], stops: Collection[ir.Value]) -> None:
        """Start with the inputs of a model.

        Args:
            model: The model; it must not change while the stream is in use.
            feeds: One feed per sample.
            stops: Tensors that are not computed; the caller sets them with `put`.
        """
        self._model, self._stops, self._samples = model, frozenset(stops), len(feeds)
        self._known: dict[ir.Value, list[Any]] = {}
        for value in model.graph.inputs:
            if all(value.name in feed for feed in feeds):
                self._known[value] = [feed[str(value.name)] for feed in feeds]
        captured = analyze_implicit_usage(model.graph)
        self._reads = {node: _read_by(node, captured) for node in model.graph}
        self._done: set[ir.Node] = set()
        self._needed: dict[ir.Node, None] = {}
        self._pending: Counter[ir.Value] = Counter()

    def plan(self, targets: Sequence[ir.Value]) -> None:
        """Set which tensors will be taken, each as often as it is listed. Other tensors are not kept."""
        self._needed = dict.fromkeys(self._ancestors(targets, ()))
        self._pending = Counter(targets)
        self._forget()

    def take(self, value: ir.Value) -> list[Any]:
        """Return a tensor, an array per sample.

        Raises:
            RequantError: The runtime rejects the nodes that compute it.
        """
        if value not in self._known:
            self._advance(value)
        arrays = self._known[value]
        self._pending[value] -= 1
        self._forget()
        return arrays

    def put(self, value: ir.Value, arrays: list[Array]) -> None:
        """Set one of the `stops`."""
        self._known[value] = arrays
        self._forget()

    def shorten(self, samples: int) -> None:
        """Keep the first samples only."""
        self._samples = min(self._samples, samples)
        self._known = {value: arrays[:samples] for value, arrays in self._known.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are kept."""
        kept = (each for arrays in self._known.values() for each in arrays)
        return sum(int(getattr(a, "nbytes", 0)) for each in kept for a in (each if isinstance(each, list) else [each]))

    def _ancestors(self, targets: Iterable[ir.Value], known: Collection[ir.Value]) -> list[ir.Node]:
        """Return the nodes that compute the targets from known tensors and stops."""
        nodes: dict[ir.Node, None] = {}
        waiting = [value for value in targets if value not in known]
        while waiting:
            node = waiting.pop().producer()
            if node is None or node in nodes or self._stops.intersection(node.outputs):
                continue
            nodes[node] = None
            waiting += [value for value in self._reads[node] if value not in known]
        return list(nodes)

    def _advance(self, value: ir.Value) -> None:
        """Compute a tensor, and the other results of the same nodes that are needed later."""
        nodes = set(self._ancestors([value], self._known))
        results = {output for node in nodes for output in node.outputs}
        needed = self._needed_values(nodes)
        outputs = [each for node in self._model.graph if node in nodes for each in node.outputs if each in needed]
        outputs += [] if value in outputs else [value]
        reads = dict.fromkeys(each for node in nodes for each in self._reads[node] if each not in results)
        inputs = [each for each in reads if each in self._known]
        for each, arrays in zip(outputs, self._run(inputs, outputs), strict=True):
            self._known[each] = arrays
        self._done |= nodes

    def _forget(self) -> None:
        """Drop the tensors that are not needed any more."""
        needed = self._needed_values(())
        self._known = {value: arrays for value, arrays in self._known.items() if value in needed}

    def _needed_values(self, nodes: Collection[ir.Node]) -> set[ir.Value]:
        """Return the tensors that will be taken, or that nodes still to be computed read; `nodes` count as computed."""
        later = (node for node in self._needed if node not in nodes and node not in self._done)
        taken = (value for value, times in self._pending.items() if times > 0)
        return {*taken, *(value for node in later for value in self._reads[node])}

    def _run(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> list[list[Any]]:
        """Compute outputs from inputs; one list of arrays per output."""
        graph = ir.convenience.extract(self._model.graph, inputs, outputs)
        for value, source in zip(graph.inputs, inputs, strict=True):
            first = self._known[source][0]
            if isinstance(first, np.ndarray):
                value.shape = ir.Shape([None] * first.ndim)
                if first.dtype.kind not in "OSU":  # strings and sequences keep the model's type
                    value.type = ir.TensorType(ir.DataType.from_numpy(first.dtype))
        for value in graph.outputs:
            value.shape = None
        piece = ir.Model(graph, ir_version=self._model.ir_version, functions=tuple(self._model.functions.values()))
        piece.opset_imports.update(self._model.opset_imports)
        names = [str(value.name) for value in outputs]
        session, place = open_session(serialize(piece), optimize=False, lean=True), str(self._model.graph.name)
        rows = [
            run_session(session, names, {str(value.name): self._known[value][index] for value in inputs}, place)
            for index in range(self._samples if inputs else 1)
        ]
        if not inputs:  # the piece reads constants only
            rows *= self._samples
        return [[row[name] for row in rows] for name in names]


def _read_by(node: ir.Node, captured: Mapping[ir.Graph, set[ir.Value]]) -> list[ir.Value]:
    """Return the tensors that a node and its bodies read, without constants."""
    values = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            values += captured[attribute.as_graph()]
        elif attribute.type is ir.AttributeType.GRAPHS:
            values += [value for graph in attribute.as_graphs() for value in captured[graph]]
    return [value for value in values if constant(value) is None and not value.is_initializer()]

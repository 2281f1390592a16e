"""A model run piece by piece over a few samples. Each piece reads the corrected results of the pieces before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx_ir.analysis import analyze_implicit_usage

from ... import RequantError
from ...calibration.session import open_session, run_session
from ...transforms.graph import constant
from ...transforms.inference import inferred
from ..model.files import serialize
from ..runtime.spread import spread

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

    from ...calibration.session import Array


GROUP = 8
"""Pieces in one session. An If whose branch is not taken costs some microseconds a run, a session some milliseconds."""


@dataclass(frozen=True, eq=False)
class _Piece:
    """The nodes between known tensors and a tensor that is taken.

    Attributes:
        index: Its place among the pieces, a prefix of its tensors in the session.
        nodes: The nodes.
        inputs: Tensors that are known before the piece runs.
        outputs: Tensors that are taken, or that later pieces read.
    """

    index: int
    nodes: frozenset[ir.Node]
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]

    @property
    def flag(self) -> str:
        """The name of the input that says whether it runs."""
        return f"{self.index}//run"

    def name(self, value: ir.Value) -> str:
        """Return the name of one of its inputs or outputs in the session."""
        return f"{self.index}/{value.name}"


class Stream:
    """The tensors of a model for some samples. Each is computed when it is first taken, and kept while it is read.

    A session runs up to `GROUP` pieces: its model has each in the branch of an If, since the runtime executes all nodes
    whatever outputs are fetched. A piece with a tensor of unknown type has a session of its own.
    """

    def __init__(
        self,
        model: ir.Model,
        feeds: Sequence[Mapping[str, Array]],
        stops: Collection[ir.Value],
        types: Mapping[str, ir.Value] | None = None,
    ) -> None:
        """Begin at the inputs of a model.

        Args:
            model: The model; it does not change while the stream lasts.
            feeds: One feed per sample.
            stops: Tensors that are not computed here, but `put`.
            types: Values with known types and shapes, by name; None for those that onnx infers.
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
        self._pieces: dict[ir.Value, _Piece] = {}
        self._sessions: dict[int, InferenceSession] = {}
        self._types = inferred(model) if types is None else types

    def plan(self, targets: Sequence[ir.Value]) -> None:
        """Set the tensors that will be taken, in order, each as often as it is listed: nothing else is kept."""
        self._needed = dict.fromkeys(self._ancestors(targets, ()))
        self._pending = Counter(targets)
        self._pieces = self._cut(targets)
        self._forget()

    def take(self, value: ir.Value) -> list[Any]:
        """Return a tensor, an array per sample.

        Raises:
            RequantError: The runtime does not run the nodes before it.
        """
        if value not in self._known:
            piece = self._pieces[value]
            self._done |= piece.nodes
            for each, arrays in zip(piece.outputs, self._run(piece), strict=True):
                self._known[each] = arrays
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
        """Return the nodes that compute tensors, back to known tensors and to `stops`."""
        found: dict[ir.Node, None] = {}
        waiting = [value for value in targets if value not in known]
        while waiting:
            node = waiting.pop().producer()
            if node is None or node in found or self._stops.intersection(node.outputs):
                continue
            found[node] = None
            waiting += [value for value in self._reads[node] if value not in known]
        return list(found)

    def _cut(self, targets: Sequence[ir.Value]) -> dict[ir.Value, _Piece]:
        """Return the piece that each target needs when targets are taken in this order."""
        known, pending, done = {*self._known, *self._stops}, Counter(targets), set(self._done)
        pieces: dict[ir.Value, _Piece] = {}
        for target in targets:
            if target not in known:
                nodes = frozenset(self._ancestors([target], known))
                done |= nodes
                later = self._wanted(done, pending)
                outputs = [each for node in self._model.graph if node in nodes for each in node.outputs]
                outputs = list(dict.fromkeys([*(each for each in outputs if each in later), target]))
                made = {output for node in nodes for output in node.outputs}
                reads = dict.fromkeys(each for node in nodes for each in self._reads[node] if each not in made)
                inputs = tuple(each for each in reads if each in known)
                pieces[target] = _Piece(len(pieces), nodes, inputs, tuple(outputs))
                known.update(outputs)
            pending[target] -= 1
        return pieces

    def _forget(self) -> None:
        """Drop the tensors that nothing will read or take."""
        wanted = self._wanted(self._done, self._pending)
        self._known = {value: arrays for value, arrays in self._known.items() if value in wanted}

    def _wanted(self, done: Collection[ir.Node], pending: Mapping[ir.Value, int]) -> set[ir.Value]:
        """Return the tensors that will be taken, or that a node reads which is needed and not done."""
        later = (node for node in self._needed if node not in done)
        taken = (value for value, times in pending.items() if times > 0)
        return {*taken, *(value for node in later for value in self._reads[node])}

    def _run(self, piece: _Piece) -> list[list[Any]]:
        """Compute the outputs of a piece; one list of arrays per output."""
        if piece.index not in self._sessions:
            self._open(piece)
        session = self._sessions[piece.index]
        names = [piece.name(value) for value in piece.outputs]
        flags = [each.name for each in session.get_overridable_initializers() if each.name == piece.flag]
        on = dict.fromkeys(flags, np.array(True))
        place = str(self._model.graph.name)

        def run(index: int) -> dict[str, Any]:
            feed = {piece.name(each): self._known[each][index] for each in piece.inputs}
            return run_session(session, names, feed | on, place)

        rows = list(spread(run, range(self._samples if piece.inputs else 1)))
        if not piece.inputs:  # it computes constants
            rows *= self._samples
        return [[row[name] for row in rows] for name in names]

    def _open(self, piece: _Piece) -> None:
        """Open a piece with the pieces after it, or alone where these do not load with it.

        Raises:
            RequantError: The runtime does not load it.
        """
        following = [each for each in self._pieces.values() if each.index >= piece.index]
        group = [each for each in following if all(map(self._is_typed, (*each.inputs, *each.outputs)))][:GROUP]
        if piece in group and len(group) > 1:
            with suppress(RequantError):
                self._sessions |= dict.fromkeys((each.index for each in group), self._opened(group))
                return
        self._sessions[piece.index] = self._opened([piece])

    def _opened(self, pieces: Sequence[_Piece]) -> InferenceSession:
        """Open the model of some pieces.

        Raises:
            RequantError: The runtime does not load it.
        """
        graph = ir.Graph([], [], nodes=[], opset_imports=self._model.opset_imports, name=self._model.graph.name)
        for piece in pieces:
            self._append(graph, piece, choose=len(pieces) > 1)
        model = ir.Model(graph, ir_version=self._model.ir_version, functions=tuple(self._model.functions.values()))
        return open_session(serialize(model), threads=1, optimize=False, lean=True)

    def _append(self, graph: ir.Graph, piece: _Piece, *, choose: bool) -> None:
        """Add a piece to a graph; where it can be chosen, in an If, and all inputs have defaults."""
        part = ir.convenience.extract(self._model.graph, piece.inputs, piece.outputs)
        nodes, inputs, outputs = list(part), list(part.inputs), list(part.outputs)
        weights = [value for value in part.initializers.values() if value not in inputs]
        for values in (part.inputs, part.outputs):
            values.clear()
        part.initializers.clear()
        part.remove(nodes)
        for value, source in zip(inputs, piece.inputs, strict=True):
            self._declare(value, source)
            value.name = piece.name(source)
        for value, source in zip(outputs, piece.outputs, strict=True):
            value.shape = None
            value.name = piece.name(source)
        if choose:
            inner = {*weights, *(value for node in nodes for value in node.outputs)}
            for value in inner:
                value.name = value.name and f"{piece.index}//{value.name}"
            body = ir.Graph([], outputs, nodes=nodes, initializers=weights, name=f"{piece.index}")
            flag = ir.val(piece.flag, dtype=ir.DataType.BOOL, shape=[])
            nodes, inputs = [self._chosen(flag, body, piece)], [*inputs, flag]
            outputs, weights = list(nodes[0].outputs), [_with_default(value) for value in inputs]
        graph.inputs.extend(inputs)
        for value in weights:
            graph.initializers.add(value)
        graph.extend(nodes)
        graph.outputs.extend(outputs)

    def _chosen(self, flag: ir.Value, body: ir.Graph, piece: _Piece) -> ir.Node:
        """Return an If that runs a piece, or gives empty tensors."""
        empty = [ir.node("Constant", [], {"value": _empty(*self._type(source))}) for source in piece.outputs]
        for index, node in enumerate(empty):
            node.outputs[0].name = f"{piece.index}//empty {index}"
        other = ir.Graph([], [node.outputs[0] for node in empty], nodes=empty, name=f"{piece.index}//empty")
        branches = {"then_branch": body, "else_branch": other}
        chosen = ir.node("If", [flag], branches, num_outputs=len(piece.outputs))
        for values in (body.outputs, other.outputs, chosen.outputs):
            for value, source in zip(values, piece.outputs, strict=True):
                value.type = ir.TensorType(self._type(source)[0])
        for value, source in zip(body.outputs, piece.outputs, strict=True):
            value.name = f"{piece.name(source)}//inside"
        for value, source in zip(chosen.outputs, piece.outputs, strict=True):
            value.name = piece.name(source)
        return chosen

    def _declare(self, value: ir.Value, source: ir.Value) -> None:
        """Give the input of a piece the type and the rank of the arrays, where they are known already."""
        arrays = self._known.get(source)
        if arrays is not None and isinstance(arrays[0], np.ndarray):
            value.shape = ir.Shape([None] * arrays[0].ndim)
            if arrays[0].dtype.kind not in "OSU":  # of strings, and of a sequence of tensors, the model has the type
                value.type = ir.TensorType(ir.DataType.from_numpy(arrays[0].dtype))
        elif self._is_typed(source):
            dtype, rank = self._type(source)
            value.type, value.shape = ir.TensorType(dtype), ir.Shape([None] * rank)

    def _is_typed(self, value: ir.Value) -> bool:
        """Whether a tensor has a known type and rank, and is no sequence and no text."""
        known, like = self._like(value)
        is_tensor = isinstance(known.type or like.type, ir.TensorType)
        return is_tensor and like.shape is not None and known.dtype is not ir.DataType.STRING

    def _type(self, value: ir.Value) -> tuple[ir.DataType, int]:
        """Return the type and the rank of a tensor that has them."""
        known, like = self._like(value)
        dtype = known.dtype or like.dtype
        assert dtype is not None and like.shape is not None  # `_is_typed`
        return dtype, len(like.shape)

    def _like(self, value: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return a value with the type of a tensor, and one with its rank: ``x`` has that of ``x/quantized``."""
        known = self._types.get(str(value.name), value)
        like = known if known.shape is not None else self._types.get(str(value.name).rpartition("/")[0], known)
        return known, like


def _with_default(value: ir.Value) -> ir.Value:
    """Make an input optional: an empty tensor, or False, is its default."""
    assert value.dtype is not None and value.shape is not None  # `Stream._is_typed`
    value.const_value = _empty(value.dtype, len(value.shape), value.name)
    return value


def _empty(dtype: ir.DataType, rank: int, name: str | None = None) -> ir.Tensor[Any]:
    """Return a tensor without elements; of rank 0, a zero."""
    return ir.Tensor(np.zeros([0] * rank, dtype.numpy()), dtype=dtype, name=name)


def _read_by(node: ir.Node, captured: Mapping[ir.Graph, set[ir.Value]]) -> list[ir.Value]:
    """Return the tensors that a node and its bodies read, without constants."""
    found = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            found += captured[attribute.as_graph()]
        elif attribute.type is ir.AttributeType.GRAPHS:
            found += [value for graph in attribute.as_graphs() for value in captured[graph]]
    return [value for value in found if constant(value) is None and not value.is_initializer()]

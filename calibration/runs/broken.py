"""Find the node that computes NaN or infinity from finite values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ... import RequantError
from ..data.samples import Sample
from ..model.bodies import FLOATS, bodies_of, tensors_of
from ..model.copies import OBSERVABLE, infer_types, load_copy, types_of
from ..model.session import Array, ModelSource
from .taps import Targets, open_tap

if TYPE_CHECKING:
    import onnx_ir as ir

UNNAMED = "the node that makes it is unknown"
CHUNK = 1 << 20
"""The number of values that are checked at once."""
CANDIDATES = 8
"""The most nodes whose whole results are checked."""
TOGETHER = 1 << 24
"""The most values of all tensors that one run returns whole; each run opens a session of the whole model."""
NAMED = 3
"""The most inputs of a node that a message shows."""


def first_broken(model: ModelSource, sample: Sample) -> str:
    """Return which node computes NaN or infinity from finite values: ``"made by Log 'l' from finite 'x' (...)"``.

    This is the first node, in the order of the graph, whose NaN or infinity reaches an output of the model. An
    infinity that a later operator removes, such as a mask before Softmax, does not count. The search first runs the
    model for the extremes of all tensors, and then reads a few whole tensors, one at a time.

    Args:
        model: The model.
        sample: A sample that makes an output NaN or infinite.

    Returns:
        A clause for a message; `UNNAMED` if the node cannot be found for any reason.
    """
    return next(iter(breakers(model, sample, None).values()), UNNAMED)


def breakers(model: ModelSource, sample: Sample, tensors: Sequence[str] | None) -> dict[str, str]:
    """Return the clause of `first_broken` for single tensors instead of the outputs.

    Args:
        model: The model.
        sample: A sample that makes the tensors NaN or infinite.
        tensors: Tensors of the main graph; None for all outputs together.

    Returns:
        A clause by tensor, under ``""`` for the outputs; tensors whose node is unknown are left out.
    """
    clauses: dict[str, str] = {}
    with suppress(Exception):  # the caller reports another error, which an error here must not replace
        search = _Search.open(model, sample)
        if tensors is None:
            clauses[""] = search.clause(search.graph.outputs)
        values = tensors_of(search.graph)
        for name in tensors or ():
            if name in values:
                clauses[name] = search.clause([values[name]])
    return {name: clause for name, clause in clauses.items() if clause != UNNAMED}


@dataclass(frozen=True, slots=True)
class _Seen:
    """A summary of a tensor's values.

    Attributes:
        finite: Whether no value is NaN or infinite. Wrongly False if a sum of large finite values overflows.
        lo: The smallest value, if all are finite.
        hi: The largest value, if all are finite.
        size: The number of float values.
    """

    finite: bool = True
    lo: float = 0.0
    hi: float = 0.0
    size: int = 0


@dataclass(slots=True)
class _Search:
    """The search for the origin of NaN and infinity in one run of a model.

    Attributes:
        model: The model.
        sample: The sample.
        copy: A copy of the model; values in the other attributes belong to it.
        seen: The summaries of values; `broken` adds further ones on demand.
        order: The float outputs of nodes, with their position in the graph.
        next: For a value with NaN or infinity, a value that depends on it, on the path to an end of the search.
    """

    model: ModelSource
    sample: Sample
    copy: ir.Model
    seen: dict[ir.Value, _Seen] = field(default_factory=dict)
    order: dict[ir.Value, int] = field(default_factory=dict)
    next: dict[ir.Value, ir.Value] = field(default_factory=dict)

    @property
    def graph(self) -> ir.Graph:
        """The main graph of the copy."""
        return self.copy.graph

    @classmethod
    def open(cls, model: ModelSource, sample: Sample) -> _Search:
        """Run the model for the extremes of all float tensors of the main graph."""
        copy, folder = load_copy(model)
        outputs = {value.name: value for node in copy.graph for value in node.outputs if value.name}
        types = types_of(copy, folder, outputs, few=True)
        search = cls(model, sample, copy)
        search.survey({name: value for name, value in outputs.items() if types[name] in OBSERVABLE})
        for value in copy.graph.inputs:
            if value.name in sample.feed:
                search.seen[value] = _seen(sample.feed[value.name])
        return search

    def survey(self, values: Mapping[str, ir.Value]) -> None:
        """Run the model and record the extremes of float tensors."""
        tap = open_tap(self.model, (), Targets(tuple(values), few=True))
        ends = dict(zip(tap.order, tap.extremes(tap.run(self.sample)).tolist(), strict=True))
        for name, value in values.items():
            lo, hi, total, size = ends[name]
            finite = not size or bool(np.isfinite([lo, hi]).all() and not np.isnan(total))
            self.seen[value] = _Seen(finite, lo, hi, int(size))
            self.order[value] = len(self.order)

    def broken(self, value: ir.Value) -> bool:
        """Whether a value contains NaN or infinity; a value that was not observed does if one of its sources does."""
        if value not in self.seen:
            self.seen[value] = _Seen()
            producer = value.producer()
            if producer is None and value.const_value is not None:
                self.seen[value] = _seen(value.const_value.numpy())
            elif producer is not None and (value.dtype is None or value.dtype.is_floating_point()):
                self.seen[value] = _Seen(finite=not any(self.broken(source) for source in _sources(producer)))
        return not self.seen[value].finite

    def clause(self, ends: Sequence[ir.Value]) -> str:
        """Return where the NaN or infinity in these values comes from."""
        for _ in range(CANDIDATES):
            roots = self._roots(ends)[:CANDIDATES]
            kinds = self._kinds(roots)
            finite = [root for root in roots if kinds[root] == set()]
            if roots and not finite:
                root = next((root for root in roots if "NaN" in (kinds[root] or ())), roots[0])
                return self._root_clause(root, kinds[root] or {"infinity"})
            for root in finite:
                self.seen[root] = replace(self.seen[root], finite=True)
        return UNNAMED

    def _roots(self, ends: Sequence[ir.Value]) -> list[ir.Value]:
        """Return the values with NaN or infinity on the way to `ends` whose own sources are all finite."""
        pending = [value for value in ends if self.broken(value)]
        visited, roots = set(pending), []
        self.next.clear()
        while pending:
            value = pending.pop()
            node = value.producer()
            sources = [] if node is None else [source for source in _sources(node) if self.broken(source)]
            if not sources and (node is not None or value.const_value is not None or value.name in self.sample.feed):
                roots.append(value)  # without inputs of bodies, whose values come from the node or the last iteration
            for source in sources:
                if source not in visited:
                    visited.add(source)
                    self.next[source] = value
                    pending.append(source)
        return sorted(roots, key=lambda value: (bool(_constant_noun(value)), self.order.get(value, -1)))

    def _kinds(self, values: Sequence[ir.Value]) -> dict[ir.Value, set[str] | None]:
        """Return which of NaN and infinity each value contains; None for one that cannot be read whole."""
        kinds: dict[ir.Value, set[str] | None] = dict.fromkeys(values)
        for value in values:
            if value.producer() is None:
                kinds[value] = _kinds_of(self._given(value))
        for part in self._parts(value for value in values if value.graph is self.graph and value in self.order):
            names = [value.name or "" for value in part]
            results = open_tap(self.model, names, Targets((), few=True), reductions=False).run(self.sample)
            kinds |= {value: _kinds_of(results[name]) for value, name in zip(part, names, strict=True)}
        return kinds

    def _given(self, value: ir.Value) -> Array:
        """Return an initializer, or an input of the sample."""
        return value.const_value.numpy() if value.const_value is not None else self.sample.feed[value.name or ""]

    def _parts(self, values: Iterable[ir.Value]) -> Iterator[list[ir.Value]]:
        """Yield values in parts that one run may return; a value above the limit is alone."""
        part: list[ir.Value] = []
        total = 0
        for value in values:
            size = self.seen[value].size
            if part and total + size > TOGETHER:
                yield part
                part, total = [], 0
            part.append(value)
            total += size
        if part:
            yield part

    def _root_clause(self, root: ir.Value, kinds: set[str]) -> str:
        """Return the first value with NaN or infinity, its node, and the node that turns infinity into NaN."""
        nan_node = self._nan_node(root) if kinds == {"infinity"} else None
        node = root.producer()
        if node is None or _constant_noun(root):
            text = f"{_constant_noun(root)} {root.name!r} holds {' and '.join(sorted(kinds))}"
            return text if nan_node is None else f"{text}, which becomes NaN in {_node_text(nan_node)}"
        text = self._inside(node) or f"made by {_node_text(node)}{self._finite_inputs(node)}"
        return text if nan_node is None else f"infinity {text} becomes NaN in {_node_text(nan_node)}"

    def _finite_inputs(self, node: ir.Node) -> str:
        """Return a node's finite inputs as text: ``" from finite 'x' (-3 to 1.5), 'b' (all 0)"``."""
        texts = []
        for value in dict.fromkeys(_sources(node)):
            seen = None if self.broken(value) else self.seen[value]
            if seen is not None and seen.size:
                values = f"{seen.lo:.4g} to {seen.hi:.4g}" if seen.lo < seen.hi else f"all {seen.lo:.4g}"
                texts.append(f"{value.name!r} ({values})")
        more = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
        return f" from finite {', '.join(texts[:NAMED])}{more}" if texts else ""

    def _nan_node(self, root: ir.Value) -> ir.Node | None:
        """Return the node that turns infinity into NaN on the path from a value to an end; None if there is none.

        Each run narrows the path to the part between two of the values that it returns.
        """
        path = [root]
        while path[-1] in self.next:
            path.append(self.next[path[-1]])
        path = [root, *(value for value in path[1:] if value in self.order and value.graph is self.graph)]
        low, high = 0, len(path) - 1
        if not high or self._have_nan([path[high]]) == [False]:
            return None
        while high - low > 1:
            places = self._spread(path, low, high)
            found = self._have_nan([path[at] for at in places])
            high = next((at for at, nan in zip(places, found, strict=True) if nan), high)
            low = max((at for at in places if at < high), default=low)
        return path[high].producer()

    def _have_nan(self, values: Sequence[ir.Value]) -> list[bool]:
        """Return which values contain NaN; one that cannot be read whole counts as one without."""
        kinds = self._kinds(values)
        return ["NaN" in (kinds[value] or ()) for value in values]

    def _spread(self, path: Sequence[ir.Value], low: int, high: int) -> list[int]:
        """Return places between two places of a path, evenly spread: as many as one run may return, at least one."""
        count = high - low - 1
        while True:
            places: list[int] = np.linspace(low, high, count + 2)[1:-1].astype(int).tolist()
            if count == 1 or sum(self.seen[path[at]].size for at in places) <= TOGETHER:
                return places
            count = (count + 1) // 2

    def _inside(self, node: ir.Node) -> str | None:
        """Return what makes NaN or infinity in the bodies of a node; None if it is unknown."""
        bodies = bodies_of(node)
        if not bodies:
            return None
        infer_types(self.copy, (), bodies=True)
        names = Counter(name for graph in (self.graph, *self.graph.subgraphs()) for name in tensors_of(graph))
        inner = {
            name: value
            for body in bodies
            for name, value in tensors_of(body).items()
            if names[name] == 1 and value.const_value is None and value.dtype is not None and value.dtype.name in FLOATS
        }
        try:
            self.survey(inner)
        except RequantError:
            return None
        clause = self.clause([value for body in bodies for value in body.outputs]) if inner else UNNAMED
        return None if clause == UNNAMED else f"{clause} in a body of {_node_text(node)}"


def _kinds_of(array: Array) -> set[str]:
    """Return which of NaN and infinity an array contains."""
    tests = (("NaN", np.isnan), ("infinity", np.isinf))
    return {kind for kind, test in tests if any(bool(test(chunk).any()) for chunk in _chunks(array))}


def _sources(node: ir.Node) -> list[ir.Value]:
    """Return the values that a node reads, including those that its bodies read from outer graphs."""
    values = [value for value in node.inputs if value is not None]
    for body in bodies_of(node):
        own = (body, *body.subgraphs())
        read = (value for graph in own for inner in graph for value in inner.inputs if value is not None)
        outputs = (value for graph in own for value in graph.outputs)
        values += [value for value in (*read, *outputs) if value.graph not in own]
    return values


def _seen(array: Array) -> _Seen:
    """Return the summary of an array."""
    if array.dtype.kind != "f" or not array.size:
        return _Seen()
    ends = [(chunk.min(), chunk.max()) for chunk in _chunks(array)]  # NaN is in both
    lo, hi = float(min(low for low, _ in ends)), float(max(high for _, high in ends))
    return _Seen(bool(np.isfinite(ends).all()), lo, hi, array.size)


def _chunks(array: Array) -> Iterator[Array]:
    """Yield the values of an array in chunks."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK]


def _constant_noun(value: ir.Value) -> str:
    """Return "the constant", "the initializer" or "the input"; an empty text for a computed value."""
    node = value.producer()
    if node is not None:
        return "the constant" if node.op_type == "Constant" else ""
    return "the initializer" if value.const_value is not None else "the input"


def _node_text(node: ir.Node) -> str:
    """Return a node as text for messages: ``"Log 'encoder/log'"``."""
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    if node.name:
        return f"{operator} {node.name!r}"
    return f"the {operator} that computes {next((value.name for value in node.outputs if value.name), '')!r}"

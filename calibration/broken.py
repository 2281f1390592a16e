"""Where NaN and infinity come from: the node that makes them of finite values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from .. import RequantError
from .bodies import FLOATS, bodies_of, tensors_of
from .samples import Sample
from .session import Array, ModelSource
from .taps import OBSERVABLE, Wanted, infer_types, load_copy, open_tap, types_of

if TYPE_CHECKING:
    import onnx_ir as ir

UNNAMED = "no node could be named"
CHUNK = 1 << 20
"""Values that are looked at together."""
CANDIDATES = 8
"""Nodes at most whose results are looked at whole."""
NAMED = 3
"""Inputs of a node at most that a message tells of."""


def first_broken(model: ModelSource, sample: Sample) -> str:
    """Say which node makes NaN or infinity of finite values for a sample: ``"made by Log 'l' from finite 'x' (...)"``.

    It is the first one, in the order of the graph, from which NaN or infinity goes on to an output of the model: what
    an operator takes back, as Softmax does with a mask of infinities, is not what is looked for. Only extremes leave
    the graph while it is searched; a few tensors, one at a time, are then looked at whole.

    Args:
        model: The model.
        sample: A sample that makes an output NaN or infinite.

    Returns:
        A clause for a message; `UNNAMED` when nothing can be found out, for whatever reason.
    """
    return next(iter(breakers(model, sample, None).values()), UNNAMED)


def breakers(model: ModelSource, sample: Sample, tensors: Sequence[str] | None) -> dict[str, str]:
    """Say for each of some tensors what `first_broken` says for the outputs.

    Args:
        model: The model.
        sample: A sample that makes the tensors NaN or infinite.
        tensors: Tensors of the main graph; None for all outputs together.

    Returns:
        A clause for each tensor of which something is found out, under the name ``""`` for the outputs.
    """
    told: dict[str, str] = {}
    with suppress(Exception):  # it explains another error, whose place no error of its own may take
        search = _Search.open(model, sample)
        if tensors is None:
            told[""] = search.told(search.graph.outputs)
        values = tensors_of(search.graph)
        for name in tensors or ():
            if name in values:
                told[name] = search.told([values[name]])
    return {name: clause for name, clause in told.items() if clause != UNNAMED}


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is known of a tensor's values.

    Attributes:
        finite: Whether no value is NaN or infinite. A sum of huge values of both signs can make it look otherwise.
        lo: The smallest value, where all are finite.
        hi: The largest one.
        size: How many floats there are.
    """

    finite: bool = True
    lo: float = 0.0
    hi: float = 0.0
    size: int = 0


@dataclass(slots=True)
class _Search:
    """A model that has been run over a sample.

    Attributes:
        model: The model.
        sample: The sample.
        copy: A copy of the model, whose values stand for those of the model.
        seen: What is known of values; of others it is found out when asked for.
        order: The float tensors that nodes give, by their place in the graph.
        next: For a value that is NaN or infinite, another one that it makes so, on the way to an end of the search.
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
        """Run the model."""
        copy, folder = load_copy(model)
        made = {value.name: value for node in copy.graph for value in node.outputs if value.name}
        types = types_of(copy, folder, made, few=True)
        search = cls(model, sample, copy)
        search.survey({name: value for name, value in made.items() if types[name] in OBSERVABLE})
        for value in copy.graph.inputs:
            if value.name in sample.feed:
                search.seen[value] = _seen(sample.feed[value.name])
        return search

    def survey(self, values: Mapping[str, ir.Value]) -> None:
        """Run the model for the extremes of float tensors."""
        tap = open_tap(self.model, (), Wanted(tuple(values), few=True))
        ends = dict(zip(tap.order, tap.extremes(tap.run(self.sample)).tolist(), strict=True))
        for name, value in values.items():
            lo, hi, total, size = ends[name]
            finite = not size or bool(np.isfinite([lo, hi]).all() and not np.isnan(total))
            self.seen[value] = _Seen(finite, lo, hi, int(size))
            self.order[value] = len(self.order)

    def broken(self, value: ir.Value) -> bool:
        """Whether a value holds NaN or infinity; what cannot be observed does when it is made of what does."""
        if value not in self.seen:
            self.seen[value] = _Seen()
            producer = value.producer()
            if producer is None and value.const_value is not None:
                self.seen[value] = _seen(value.const_value.numpy())
            elif producer is not None and (value.dtype is None or value.dtype.is_floating_point()):
                self.seen[value] = _Seen(finite=not any(self.broken(source) for source in _sources(producer)))
        return not self.seen[value].finite

    def told(self, ends: Sequence[ir.Value]) -> str:
        """Say where the NaN and the infinity come from that are in some of these values."""
        for _ in range(CANDIDATES):
            roots = self._roots(ends)[:CANDIDATES]
            held = {root: self._held(root) for root in roots}
            overflown = [root for root in roots if held[root] == set()]
            if roots and not overflown:
                root = next((root for root in roots if "NaN" in (held[root] or ())), roots[0])
                return self._clause(root, held[root] or {"infinity"})
            for root in overflown:
                self.seen[root] = replace(self.seen[root], finite=True)
        return UNNAMED

    def _roots(self, ends: Sequence[ir.Value]) -> list[ir.Value]:
        """Return the values that NaN or infinity begins with: what nodes make of other values first."""
        pending = [value for value in ends if self.broken(value)]
        met, roots = set(pending), []
        self.next.clear()
        while pending:
            value = pending.pop()
            node = value.producer()
            sources = [] if node is None else [source for source in _sources(node) if self.broken(source)]
            if not sources and (node is not None or value.const_value is not None or value.name in self.sample.feed):
                roots.append(value)  # the others are inputs of bodies, which are fed back
            for source in sources:
                if source not in met:
                    met.add(source)
                    self.next[source] = value
                    pending.append(source)
        return sorted(roots, key=lambda value: (bool(_given(value)), self.order.get(value, -1)))

    def _held(self, value: ir.Value) -> set[str] | None:
        """Return which of NaN and infinity a value holds; None where it cannot be looked at whole."""
        name = value.name or ""
        if value.producer() is None:
            array = value.const_value.numpy() if value.const_value is not None else self.sample.feed[name]
        elif value.graph is self.graph and value in self.order:
            array = open_tap(self.model, [name], Wanted((), few=True), reductions=False).run(self.sample)[name]
        else:
            return None
        kinds = (("NaN", np.isnan), ("infinity", np.isinf))
        return {kind for kind, test in kinds if any(bool(test(chunk).any()) for chunk in _chunks(array))}

    def _clause(self, root: ir.Value, held: set[str]) -> str:
        """Say what the first value is that holds NaN or infinity, what made it, and what made NaN of infinity."""
        turned = self._turned(root) if held == {"infinity"} else None
        node = root.producer()
        if node is None or _given(root):
            said = f"{_given(root)} {root.name!r} holds {' and '.join(sorted(held))}"
            return said if turned is None else f"{said}, which becomes NaN in {_called(turned)}"
        said = self._inside(node) or f"made by {_called(node)}{self._finite_inputs(node)}"
        return said if turned is None else f"infinity {said} becomes NaN in {_called(turned)}"

    def _finite_inputs(self, node: ir.Node) -> str:
        """Say what a node was given: ``" from finite 'x' (-3 to 1.5) and 'b' (0)"``."""
        told = []
        for value in dict.fromkeys(_sources(node)):
            seen = None if self.broken(value) else self.seen[value]
            if seen is not None and seen.size:
                values = f"{seen.lo:.4g} to {seen.hi:.4g}" if seen.lo < seen.hi else f"all {seen.lo:.4g}"
                told.append(f"{value.name!r} ({values})")
        more = f" and {len(told) - NAMED} more" if len(told) > NAMED else ""
        return f" from finite {', '.join(told[:NAMED])}{more}" if told else ""

    def _turned(self, root: ir.Value) -> ir.Node | None:
        """Return the node that makes NaN of infinity, on the way from a value to an end; None where none does."""
        path = [root]
        while path[-1] in self.next:
            path.append(self.next[path[-1]])
        path = [root, *(value for value in path[1:] if value in self.order and value.graph is self.graph)]
        low, high = 0, len(path) - 1
        if not high or "NaN" not in (self._held(path[high]) or ()):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if "NaN" in (self._held(path[middle]) or ()) else (middle, high)
        return path[high].producer()

    def _inside(self, node: ir.Node) -> str | None:
        """Say what makes NaN or infinity in the bodies of a node; None where that cannot be told."""
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
        told = self.told([value for body in bodies for value in body.outputs]) if inner else UNNAMED
        return None if told == UNNAMED else f"{told} in a body of {_called(node)}"


def _sources(node: ir.Node) -> list[ir.Value]:
    """Return what a node reads, in its bodies too."""
    values = [value for value in node.inputs if value is not None]
    for body in bodies_of(node):
        own = (body, *body.subgraphs())
        read = (value for graph in own for inner in graph for value in inner.inputs if value is not None)
        handed = (value for graph in own for value in graph.outputs)
        values += [value for value in (*read, *handed) if value.graph not in own]
    return values


def _seen(array: Array) -> _Seen:
    """Return what there is to know of an array."""
    if array.dtype.kind != "f" or not array.size:
        return _Seen()
    ends = [(chunk.min(), chunk.max()) for chunk in _chunks(array)]  # NaN is in both
    lo, hi = float(min(low for low, _ in ends)), float(max(high for _, high in ends))
    return _Seen(bool(np.isfinite(ends).all()), lo, hi, array.size)


def _chunks(array: Array) -> Iterator[Array]:
    """Yield the values of an array, some at a time."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK]


def _given(value: ir.Value) -> str:
    """Return what a value is that no node computes, and an empty text for the others."""
    node = value.producer()
    if node is not None:
        return "the constant" if node.op_type == "Constant" else ""
    return "the initializer" if value.const_value is not None else "the input"


def _called(node: ir.Node) -> str:
    """Return how messages call a node: ``"Log 'encoder/log'"``."""
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    if node.name:
        return f"{operator} {node.name!r}"
    return f"the {operator} that gives {next((value.name for value in node.outputs if value.name), '')!r}"

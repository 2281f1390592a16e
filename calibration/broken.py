"""Find the node that computes NaN or infinity from finite values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .bodies import bodies_of, tensors_of
from .samples import Sample
from .session import Array, ModelSource
from .taps import OBSERVABLE, Targets, load_copy, open_tap, types_of

if TYPE_CHECKING:
    import onnx_ir as ir

UNNAMED = "the node that makes it is unknown"
CANDIDATES = 8
"""The most nodes whose whole results are checked."""
NAMED = 3
"""The most inputs of a node that a message shows."""


def first_broken(model: ModelSource, sample: Sample) -> str:
    """Return which node computes NaN or infinity from finite values: ``"made by Log 'l' from finite 'x' (...)"``.

    This is the first node, in the order of the graph, whose NaN or infinity reaches an output of the model. An
    infinity that a later operator removes, such as a mask before Softmax, does not count.

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
        graph, search = _opened(model, sample)
        values = tensors_of(graph)
        ends = {"": list(graph.outputs)} if tensors is None else {name: [values[name]] for name in tensors}
        for name, broken in ends.items():
            if clause := search.clause(broken):
                clauses[name] = clause
    return clauses


@dataclass(frozen=True, slots=True)
class _Search:
    """The values of one run of a model.

    Attributes:
        model: The model.
        sample: The sample.
        extremes: The smallest and the largest element of each float value, NaN if an element is NaN or infinite. The
            results of nodes come first, in the order of the graph; `_broken` adds constants and inputs.
    """

    model: ModelSource
    sample: Sample
    extremes: dict[ir.Value, tuple[float, float]]

    def clause(self, ends: Sequence[ir.Value]) -> str:
        """Return where the NaN or infinity in these values comes from; an empty text if this is unknown."""
        for _ in range(CANDIDATES):
            root = self._root(ends)
            if root is None:
                return ""
            array = self._whole(root)
            if not np.isfinite(array).all():
                return self._text(root)
            self.extremes[root] = float(array.min()), float(array.max())  # the sum of finite values overflowed
        return ""

    def _broken(self, value: ir.Value) -> bool:
        """Return whether a value contains NaN or infinity."""
        if value not in self.extremes and (value.const_value is not None or value.name in self.sample.feed):
            array = self._whole(value)
            if array.dtype.kind == "f" and array.size:
                self.extremes[value] = _checked(float(array.min()), float(array.max()), 0.0)
        return bool(np.isnan(self.extremes.get(value, (0.0, 0.0))).any())

    def _root(self, ends: Sequence[ir.Value]) -> ir.Value | None:
        """Return the first value with NaN or infinity on the way to `ends` whose own sources are all finite."""
        pending, visited = [value for value in ends if self._broken(value)], set(ends)
        roots = set()
        while pending:
            value = pending.pop()
            node = value.producer()
            sources = [] if node is None else [source for source in _sources(node) if self._broken(source)]
            if not sources:
                roots.add(value)
            pending += [source for source in sources if source not in visited]
            visited.update(sources)
        order = [value for value in self.extremes if value in roots]  # inputs and constants come last
        return order[0] if order else None

    def _whole(self, value: ir.Value) -> Array:
        """Return all elements of a value."""
        if value.const_value is not None:
            return np.asarray(value.const_value.numpy())
        name = value.name or ""
        if name in self.sample.feed:
            return self.sample.feed[name]
        return open_tap(self.model, [name], Targets((), few=True), reductions=False).run(self.sample)[name]

    def _text(self, root: ir.Value) -> str:
        """Return a value with NaN or infinity, its node and the finite inputs of the node, as text."""
        node = root.producer()
        if node is None or node.op_type == "Constant":
            noun = "input" if root.name in self.sample.feed else "constant"
            return f"the {noun} {root.name!r} holds NaN or infinity"
        inputs = [(value, *self.extremes[value]) for value in dict.fromkeys(_sources(node)) if value in self.extremes]
        texts = [
            f"{value.name!r} ({f'{lo:.4g} to {hi:.4g}' if lo < hi else f'all {lo:.4g}'})" for value, lo, hi in inputs
        ]
        more = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
        return f"made by {_node_text(node)}" + (f" from finite {', '.join(texts[:NAMED])}{more}" if texts else "")


def _opened(model: ModelSource, sample: Sample) -> tuple[ir.Graph, _Search]:
    """Run a model for the extremes of its float tensors; return a copy of the graph, and the search."""
    copy, folder = load_copy(model)
    outputs = {value.name: value for node in copy.graph for value in node.outputs if value.name}
    types = types_of(copy, folder, outputs, few=True)
    observed = {name: value for name, value in outputs.items() if types[name] in OBSERVABLE}
    tap = open_tap(model, (), Targets(tuple(observed), few=True))
    rows = dict(zip(tap.order, tap.extremes(tap.run(sample)).tolist(), strict=True))
    extremes = {value: _checked(*rows[name][:3]) for name, value in observed.items() if rows[name][3]}
    return copy.graph, _Search(model, sample, extremes)


def _checked(lo: float, hi: float, total: float) -> tuple[float, float]:
    """Return the extremes; NaN if one of them is not finite, or if the sum is NaN."""
    return (lo, hi) if np.isfinite([lo, hi]).all() and not np.isnan(total) else (np.nan, np.nan)


def _sources(node: ir.Node) -> list[ir.Value]:
    """Return the values that a node reads, including those that its bodies read from outer graphs."""
    values = [value for value in node.inputs if value is not None]
    for body in bodies_of(node):
        own = (body, *body.subgraphs())
        read = (value for graph in own for inner in graph for value in inner.inputs if value is not None)
        outputs = (value for graph in own for value in graph.outputs)
        values += [value for value in (*read, *outputs) if value.graph not in own]
    return values


def _node_text(node: ir.Node) -> str:
    """Return a node as text for messages: ``"Log 'encoder/log'"``."""
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    if node.name:
        return f"{operator} {node.name!r}"
    return f"the {operator} that computes {next((value.name for value in node.outputs if value.name), '')!r}"

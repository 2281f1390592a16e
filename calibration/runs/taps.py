"""Copies of a model with inner tensors, or reductions of them, as outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import RequantError
from ..data.samples import Sample
from ..model.bodies import carry_out, free_prefix, tensors_in_bodies, tensors_of
from ..model.copies import OBSERVABLE, infer_types, is_lean, load_copy, open_copy, serialized, types_of
from ..model.session import Array, ModelSource, run_session
from .reductions import Reduced, reduce

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnxruntime import InferenceSession


@dataclass(frozen=True, slots=True)
class Targets:
    """The tensors and statistics to observe.

    Attributes:
        tensors: The tensors whose ranges are observed.
        histogram: Whether tensors of the main graph get histograms.
        channel_axis: Tensor -> channel axis, for tensors whose channels are observed.
        few: Whether there are so few runs that packing large weights takes longer than it saves.
        values: The largest number of values per sample that a histogram counts; None for all.
    """

    tensors: tuple[str, ...]
    histogram: bool = False
    channel_axis: Mapping[str, int] = field(default_factory=dict)
    few: bool = False
    values: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors, each once."""
        return tuple(dict.fromkeys((*self.tensors, *self.channel_axis)))


@dataclass(frozen=True, slots=True)
class Tap:
    """A session that outputs inner tensors and reductions of them.

    Attributes:
        session: The session.
        whole: Tensors that are taken whole, from the session or from the feed.
        reduced: Tensors of which only reductions leave the graph.
        fetched: The outputs that are fetched.
        outputs: The float outputs of the model, whole or reduced. They are checked for NaN and infinity.
        order: The names in `reduced`; tensors without a channel axis come first.
        inside: Whether these tensors are in bodies, (tensors,) bool.
        known: Known min, max, sum and size of the tensors without a channel axis; 0 if unknown, (tensors, 4) float64.
        slots: The flat indices in `known` that scalar outputs fill.
        ends: The names of these outputs.
        planes: For each image reduced by planes: its row in `known`, and the number of values of a plane.
    """

    session: InferenceSession
    whole: tuple[str, ...]
    reduced: Mapping[str, Reduced]
    fetched: tuple[str, ...]
    outputs: frozenset[str]
    order: tuple[str, ...] = field(init=False)
    inside: Array = field(init=False)
    known: Array = field(init=False)
    slots: Array = field(init=False)
    ends: tuple[str, ...] = field(init=False)
    planes: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        """Compute the derived attributes."""
        order = sorted(self.reduced, key=lambda name: self.reduced[name].axis is not None)
        object.__setattr__(self, "order", tuple(order))
        object.__setattr__(self, "inside", np.array([self.reduced[name].inside for name in order], np.bool_))
        rows = [self.reduced[name] for name in order if self.reduced[name].axis is None]
        parts = [part for row in rows for part in (row.lo, row.hi, row.total, row.size)]
        known = [float(part) if isinstance(part, int) else 0.0 for part in parts]
        object.__setattr__(self, "known", np.array(known, np.float64).reshape(-1, 4))
        planes = [(index, row.area) for index, row in enumerate(rows) if row.size is None]
        object.__setattr__(self, "planes", tuple(planes))
        pooled = {index for index, _ in planes}
        slots = [at for at, part in enumerate(parts) if isinstance(part, str) and at // 4 not in pooled]
        object.__setattr__(self, "ends", tuple(parts[at] for at in slots))
        object.__setattr__(self, "slots", np.array(slots, np.intp))

    def run(self, sample: Sample) -> dict[str, Array]:
        """Run one sample and return the fetched tensors, and the whole tensors that the feed contains.

        Raises:
            RequantError: The model fails.
        """
        fed = {name: sample.feed[name] for name in self.whole if name in sample.feed}
        return fed | run_session(self.session, self.fetched, sample.feed, sample.where)

    def extremes(self, results: Mapping[str, Array]) -> Array:
        """Return min, max, sum and size of each tensor that a run reduces to scalars, (tensors, 4) float64."""
        table = self.known.copy()
        table.reshape(-1)[self.slots] = [results[name].item() for name in self.ends]
        if self.planes:
            rows, areas = np.array(self.planes).T
            pooled = [results[self.reduced[self.order[row]].hi].reshape(2, -1) for row in rows.tolist()]
            sizes = np.array([part.shape[1] for part in pooled])
            starts = np.cumsum(sizes) - sizes
            highest, means = np.concatenate(
                [*pooled, np.zeros((2, 1))], axis=1
            )  # an extra element, because a start can be the end
            table[rows, 1], table[rows, 2] = np.maximum.reduceat(highest, starts), np.add.reduceat(means, starts)
            table[rows, 3] = sizes * areas
        return table


def open_tap(
    model: ModelSource,
    whole: Sequence[str],
    targets: Targets,
    *,
    reductions: bool = True,
    skipped: frozenset[str] = frozenset(),
) -> Tap:
    """Open a session of a copy of the model that outputs tensors whole, and reductions of the other observed tensors.

    Args:
        model: A file, or the bytes of one.
        whole: Tensors to take whole. Tensors in bodies are reduced anyway.
        targets: The tensors and statistics to observe.
        reductions: Whether to reduce the other observed tensors and the model's float outputs.
        skipped: Tensors that are not reduced.

    Raises:
        UnknownNameError: The model has no such tensor.
        RequantError: The model cannot be loaded, or a tensor cannot be observed.
    """
    copy, folder = load_copy(model)
    graph = copy.graph
    values = tensors_of(graph)
    reducible = targets.names if reductions else ()
    in_bodies = tensors_in_bodies(graph, (*whole, *reducible))
    if inner := in_bodies.keys() & targets.channel_axis.keys():
        raise RequantError(f"tensor {min(inner)!r} is in a body; channels are observed in the main graph only")
    outputs = [value.name or "" for value in graph.outputs]
    others = [name for name in (*reducible, *(outputs if reductions else ())) if name not in {*in_bodies, *skipped}]
    ways = _ways(copy, folder, [name for name in whole if name not in in_bodies], others, targets)

    fed = {value.name for value in graph.inputs} - set(graph.initializers)
    fetched = [name for name in ways.whole if name not in fed]
    graph.outputs.extend(values[name] for name in fetched if name not in outputs)
    prefix = free_prefix(graph, "requant_tap")
    reduced = _reduce_all(graph, values, ways, prefix)
    for name, (lo, hi, total, size) in carry_out(copy, in_bodies, f"{prefix}_body").items():
        reduced[name] = Reduced(lo, hi, total, size, inside=True)
    ends = [end for row in reduced.values() for end in row.ends]
    watched = frozenset(name for name in outputs if name in reduced or name in ways.whole)
    source, lean = serialized(copy, folder), is_lean(copy, few=targets.few)
    del copy, graph, values, in_bodies  # and their weights, which the runtime copies
    session = open_copy(source, lean, arena=not fetched)
    return Tap(session, ways.whole, reduced, (*fetched, *ends), watched)


@dataclass(frozen=True, slots=True)
class _Ways:
    """How each tensor of a main graph leaves a copy of the model.

    Attributes:
        whole: The tensors that leave whole.
        reduced: The tensors that leave as reductions.
        axes: The channel axes of the tensors that are reduced per channel.
    """

    whole: tuple[str, ...]
    reduced: tuple[str, ...]
    axes: Mapping[str, int]


def _ways(copy: ir.Model, folder: Path | None, whole: Sequence[str], others: Sequence[str], targets: Targets) -> _Ways:
    """Decide how tensors leave a copy of the model. Its missing types and shapes are inferred.

    A tensor without a known rank has no nodes that reduce its channels, so that it leaves whole.

    Raises:
        RequantError: An observed tensor is not float.
    """
    types = _checked_types(copy, folder, whole, others, targets)
    values = tensors_of(copy.graph)
    axes = {name: axis for name, axis in targets.channel_axis.items() if name in others}
    no_opset = copy.graph.opset_imports.get("") is None
    rankless = [name for name in axes if values[name].shape is None or no_opset]
    whole = tuple(dict.fromkeys((*whole, *rankless)))
    reduced = (name for name in dict.fromkeys(others) if name not in whole and types[name] in OBSERVABLE)
    return _Ways(whole, tuple(reduced), axes)


def _reduce_all(graph: ir.Graph, values: Mapping[str, ir.Value], ways: _Ways, prefix: str) -> dict[str, Reduced]:
    """Append nodes that reduce tensors of a main graph; return their outputs by tensor, in the order of `ways.reduced`.

    Args:
        graph: The main graph.
        values: All its tensors by name, in its order.
        ways: The tensors to reduce, and their channel axes.
        prefix: The prefix of the names of all new values; no existing name begins with it.

    Raises:
        RequantError: A tensor has no such axis.
    """
    places = {name: place for place, name in enumerate(values)}
    reduced: dict[str, Reduced] = {}
    # The runtime runs nodes that are appended last as soon as their input exists: while the tensor is in the cache,
    # and before the runtime allocates memory for the others.
    for name in sorted(ways.reduced, key=places.__getitem__, reverse=True):
        reduced[name] = reduce(graph, values[name], f"{prefix}{len(reduced)}", ways.axes.get(name))
    return {name: reduced[name] for name in ways.reduced}


def _checked_types(
    copy: ir.Model, folder: Path | None, whole: Sequence[str], others: Sequence[str], targets: Targets
) -> dict[str, str]:
    """Return the types of tensors of a main graph, after inferring missing types and shapes.

    Raises:
        RequantError: An observed tensor is not float.
    """
    values = tensors_of(copy.graph)
    named = {*targets.names, *whole}
    observed = [name for name in dict.fromkeys((*whole, *others)) if name in named]
    infer_types(copy, observed)
    types = types_of(copy, folder, {name: values[name] for name in (*whole, *others)}, few=targets.few)
    for name in observed:
        if types[name] not in OBSERVABLE:
            raise RequantError(f"tensor {name!r} is a {types[name]}; only float, float16 and double can be observed")
    return types

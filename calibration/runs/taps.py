"""Copies of a model with inner tensors, or reductions of them, as outputs."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import RequantError
from ..data.samples import Sample
from ..model.bodies import carry_out, find, free_prefix, tensors_of
from ..model.session import LARGE, Array, ModelSource, Serialized, describe, open_session, run_session
from .reductions import Reduced, reduce

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnxruntime import InferenceSession

OBSERVABLE = ("tensor(float)", "tensor(float16)", "tensor(double)")
"""The types of tensors that can be observed."""
OVERHEAD = 2**28
"""Bytes of a process without weights and activations."""
SMALL = 2**10
"""Smaller tensors (in bytes) always stay inside the model, because shape inference may need their values."""
SHARED = ("FLOAT", "FLOAT16", "DOUBLE", "INT8", "UINT8", "INT32", "INT64")
"""Types of weights that the runtime accepts as arrays."""
COPIES = 3
"""Copies of the weights in memory while a session opens: as read, as passed to the runtime, and packed."""


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
    inside = find(graph, (*whole, *reducible))
    if inner := inside.keys() & targets.channel_axis.keys():
        raise RequantError(f"tensor {min(inner)!r} is in a body; channels are observed in the main graph only")
    outputs = [value.name or "" for value in graph.outputs]
    whole = [name for name in dict.fromkeys(whole) if name not in inside]
    others = [n for n in (*reducible, *(outputs if reductions else ())) if n not in inside and n not in skipped]
    types = _checked_types(copy, folder, whole, others, targets)
    axes = {name: axis for name, axis in targets.channel_axis.items() if name in others}
    rankless = [name for name in axes if values[name].shape is None or graph.opset_imports.get("") is None]
    whole = list(dict.fromkeys((*whole, *rankless)))
    fed = {value.name for value in graph.inputs} - set(graph.initializers)
    fetched = [name for name in whole if name not in fed]
    graph.outputs.extend(values[name] for name in fetched if name not in outputs)
    prefix = free_prefix(graph, "requant_tap")
    names = [name for name in dict.fromkeys(others) if name not in whole and types[name] in OBSERVABLE]
    reduced = _reduce_all(graph, values, names, axes, prefix)
    for name, (lo, hi, total, size) in carry_out(copy, inside, f"{prefix}_body").items():
        reduced[name] = Reduced(lo, hi, total, size, inside=True)
    ends = [end for row in reduced.values() for end in row.ends]
    watched = frozenset(name for name in outputs if name in reduced or name in whole)
    source, lean = _serialized(copy, folder), _is_lean(copy, few=targets.few)
    del copy, graph, values, inside  # and their weights, which the runtime copies
    session = _open(source, lean, arena=not fetched)
    return Tap(session, tuple(whole), reduced, (*fetched, *ends), watched)


def _reduce_all(
    graph: ir.Graph, values: Mapping[str, ir.Value], names: Sequence[str], axes: Mapping[str, int], prefix: str
) -> dict[str, Reduced]:
    """Append nodes that reduce tensors of a main graph; return their outputs by tensor, in the order of `names`.

    Args:
        graph: The main graph.
        values: All its tensors by name, in its order.
        names: The tensors to reduce.
        axes: The channel axes of the tensors that are reduced per channel.
        prefix: The prefix of the names of all new values; no existing name begins with it.

    Raises:
        RequantError: A tensor has no such axis.
    """
    places = {name: place for place, name in enumerate(values)}
    reduced: dict[str, Reduced] = {}
    # The runtime runs nodes that are appended last as soon as their input exists: while the tensor is in the cache,
    # and before the runtime allocates memory for the others.
    for name in sorted(names, key=places.__getitem__, reverse=True):
        reduced[name] = reduce(graph, values[name], f"{prefix}{len(reduced)}", axes.get(name))
    return {name: reduced[name] for name in names}


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


def load_copy(model: ModelSource) -> tuple[ir.Model, Path | None]:
    """Read a model without its external data. Return the model and the folder of the external data.

    Raises:
        RequantError: The model cannot be read.
    """
    import onnx
    import onnx_ir as ir

    from ..model.onnx_files import read_proto
    from .file_tensor import read_from_files

    try:
        if isinstance(model, bytes):
            model = Serialized(model)
        if isinstance(model, Serialized):
            return ir.from_proto(onnx.load_model_from_string(model.data)), model.folder
        copy, folder = ir.from_proto(read_proto(model)), Path(model).parent
        read_from_files(copy, folder.absolute())
        return copy, folder
    except RequantError:
        raise
    except Exception as error:  # the exceptions of protobuf, onnx_ir and the file system have no common base class
        open_session(model)  # raises the same error as other commands
        raise RequantError(f"{describe(model)}: cannot be read: {' '.join(str(error).split())}") from error


def infer_types(copy: ir.Model, names: Iterable[str], *, bodies: bool = False) -> None:
    """Infer missing types and shapes of named tensors of a main graph.

    Other tensors do not change, because onnx-ir's pass confuses the type of a sequence with that of its tensors. With
    `bodies` the tensors in bodies are inferred too.
    """
    from onnx_ir.passes.common import ShapeInferencePass

    values = tensors_of(copy.graph)
    named = {name: values[name] for name in names}
    if not bodies and all(value.type is not None and value.shape is not None for value in named.values()):
        return
    logger = logging.getLogger("onnx_ir")  # it logs every value that the pass does not change
    level = logger.level
    logger.setLevel(logging.ERROR)
    inferred_copy = copy.clone()
    try:
        # values are not propagated: they decide no type and no rank, and a few nodes can make gigabytes of them
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(inferred_copy)
    finally:
        logger.setLevel(level)
    pairs = [(named, tensors_of(inferred_copy.graph))]
    if bodies:
        inner = zip(copy.graph.subgraphs(), inferred_copy.graph.subgraphs(), strict=True)
        pairs += [(tensors_of(body), tensors_of(other)) for body, other in inner]
    for tensors, inferred in pairs:
        for name, value in tensors.items():
            value.type = value.type or inferred[name].type
            value.shape = value.shape if value.shape is not None else inferred[name].shape


def types_of(copy: ir.Model, folder: Path | None, values: Mapping[str, ir.Value], *, few: bool) -> dict[str, str]:
    """Return the runtime's name of each tensor's type. The runtime infers types that are missing in the model."""
    import onnx_ir as ir

    types = {}
    unknown = []
    for name, value in values.items():
        if value.dtype is None or not isinstance(value.type, ir.TensorType):
            unknown.append(value)
        else:
            types[name] = f"tensor({value.dtype.name.lower()})"
    if unknown:
        outputs = list(copy.graph.outputs)
        copy.graph.outputs.extend(unknown)
        session = _open(_serialized(copy, folder), _is_lean(copy, few=few), optimize=False)
        types |= {value.name: value.type for value in session.get_outputs() if value.name in values}
        copy.graph.outputs.clear()
        copy.graph.outputs.extend(outputs)
    return types


def _is_lean(copy: ir.Model, *, few: bool) -> bool:
    """Return whether a session should compute on the weights in their files."""
    import onnx_ir as ir

    tensors = (value.const_value for graph in copy.graphs() for value in graph.initializers.values())
    return few and sum(tensor.nbytes for tensor in tensors if isinstance(tensor, ir.ExternalTensor)) > LARGE


def _serialized(copy: ir.Model, folder: Path | None) -> Serialized:
    """Serialize a model for the runtime. External data stay in `folder`; large weights are passed as arrays.

    Weights that nothing reads stay inside: the runtime removes them, and then refuses an array for them.
    """
    import onnx_ir as ir

    shared = {}
    for name, value in copy.graph.initializers.items():
        tensor = value.const_value if value.uses() or value.is_graph_output() else None
        inside = tensor is not None and not isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= SMALL
        if tensor is not None and inside and tensor.dtype.name in SHARED:
            shared[name] = tensor
    weights = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in shared.items()}
    for name, tensor in shared.items():
        copy.graph.initializers[name].const_value = ir.ExternalTensor(
            "memory", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(weights[name].shape), name=name
        )
    data = ir.to_proto(copy).SerializeToString()
    for name, tensor in shared.items():
        copy.graph.initializers[name].const_value = tensor
    return Serialized(data, folder, weights=weights)


def _open(source: Serialized, lean: bool, *, optimize: bool = True, arena: bool = True) -> InferenceSession:
    """Open a session with one thread, because the number of threads changes the rounding of the observed values."""
    try:
        return open_session(source, threads=1, optimize=optimize, lean=lean, arena=arena)
    except RequantError:  # an optimization may remove a tensor that is an output
        if not optimize:
            raise
        return open_session(source, threads=1, optimize=False, lean=lean, arena=arena)


@dataclass(frozen=True, slots=True)
class Groups:
    """The tensors that are taken whole, by runs of the model.

    Attributes:
        names: The tensors of each run.
        room: The number of runs of the largest group that fit in memory at a time, at least 1.
    """

    names: tuple[tuple[str, ...], ...] = ((),)
    room: int = 2**16


def groups_of(model: ModelSource, targets: Targets, sample: Sample, limit: int, batch: int) -> Groups:
    """Split the tensors that are taken whole into groups that fit a memory limit, in the order of the graph.

    The model runs once per group, up to the last tensor of the group. Unless activations are huge, there is one group.

    Args:
        model: The model.
        targets: The tensors and statistics to observe.
        sample: A sample of typical size.
        limit: The memory limit of the process in bytes. At least a quarter of it is for the tensors.
        batch: The largest number of stacked samples.

    Raises:
        UnknownNameError: The model has no such tensor.
        RequantError: The model cannot be read, or a tensor cannot be observed.
    """
    if not targets.histogram:
        return Groups()
    copy, _ = load_copy(model)
    values = tensors_of(copy.graph)
    find(copy.graph, targets.names)
    order = {name: index for index, name in enumerate(values)}
    whole = sorted((name for name in targets.tensors if name in values), key=order.__getitem__)
    infer_types(copy, whole)
    sizes = _sizes(copy, {name: values[name] for name in whole}, sample)
    if sizes is None:
        sizes = _measured_sizes(model, whole, sample, few=targets.few)
    constants = (value.const_value for graph in copy.graphs() for value in graph.initializers.values())
    weights = sum(tensor.nbytes for tensor in constants if tensor is not None)
    budget = max(limit - COPIES * weights - OVERHEAD, limit // 4) // batch
    groups: list[list[str]] = [[]]
    group_bytes = [0]
    for name in whole:
        if groups[-1] and group_bytes[-1] + sizes[name] > budget:
            groups.append([])
            group_bytes.append(0)
        groups[-1].append(name)
        group_bytes[-1] += sizes[name]
    return Groups(tuple(map(tuple, groups)), max(1, budget // max(*group_bytes, 1)))


def _sizes(copy: ir.Model, values: Mapping[str, ir.Value], sample: Sample) -> dict[str, int] | None:
    """Return each tensor's bytes for a feed, computed from the model's shapes; None if a shape is unknown."""
    symbols: dict[str, int] = {}
    for graph_input in copy.graph.inputs:
        if graph_input.name in sample.feed and graph_input.shape is not None:
            symbols |= {
                str(axis.value): length
                for axis, length in zip(graph_input.shape, sample.feed[graph_input.name].shape, strict=True)
                if not isinstance(axis, int) and axis.value
            }
    sizes = {}
    for name, value in values.items():
        if value.shape is None or value.dtype is None:
            return None
        axes = [axis if isinstance(axis, int) else symbols.get(str(axis.value)) for axis in value.shape]
        if None in axes:
            return None
        sizes[name] = math.prod(axis for axis in axes if axis is not None) * math.ceil(value.dtype.itemsize)
    return sizes


def _measured_sizes(model: ModelSource, names: Sequence[str], sample: Sample, *, few: bool) -> dict[str, int]:
    """Return each tensor's bytes as float32, measured by a run that keeps no tensor."""
    tap = open_tap(model, (), Targets(tuple(names), few=few))
    counts = dict(zip(tap.order, tap.extremes(tap.run(sample))[:, 3].tolist(), strict=True))
    fed = {name: array.nbytes for name, array in sample.feed.items()}
    return {name: int(counts[name]) * 4 if name in counts else fed.get(name, 0) for name in names}


def activations(model: ModelSource) -> tuple[str, ...]:
    """Return the float tensors of a main graph that depend on the inputs, in the order of the graph.

    Raises:
        RequantError: The model cannot be read.
    """
    import onnx_ir as ir

    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)  # bodies may read any tensor outside
    copy, folder = load_copy(model)
    graph = copy.graph
    infer_types(copy, tensors_of(graph))
    fed = [value for value in graph.inputs if value.name and value.name not in graph.initializers]
    live = set(fed)
    for node in graph:
        nested = any(attribute.type in graphs for attribute in node.attributes.values())
        if nested or live.intersection(node.inputs):
            live.update(node.outputs)
    produced = (value for node in graph for value in node.outputs)
    values = {value.name: value for value in (*fed, *produced) if value.name and value in live}
    types = types_of(copy, folder, values, few=True)
    return tuple(name for name in values if types.get(name) in OBSERVABLE)

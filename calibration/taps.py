"""Copies of a model whose inner tensors, or reductions of them, are outputs."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .. import RequantError
from .bodies import carry_out, find, free_prefix, tensors_of
from .reductions import Reduced, reduce
from .samples import Sample
from .session import LARGE, Array, ModelSource, Serialized, describe, open_session, runtime_message

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnxruntime import InferenceSession

OBSERVABLE = ("tensor(float)", "tensor(float16)", "tensor(double)")
OVERHEAD = 2**28
"""Bytes that a process takes besides weights and activations."""
SMALL = 2**10
"""Bytes of a tensor that shape inference may want to see, and that always stays inside the model."""
SHARED = ("FLOAT", "FLOAT16", "DOUBLE", "INT8", "UINT8", "INT32", "INT64")
"""Types of weights that the runtime takes as arrays."""
COPIES = 3
"""How often weights are in memory while a session opens: as read, as given to the runtime, and packed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be observed.

    Attributes:
        tensors: Whose ranges.
        histogram: Whether as histograms, where they are in the main graph.
        channel_axis: Whose channels, along which axis.
        few: Whether the model is run so rarely that packing large weights does not pay.
        values: How many values of a tensor a histogram counts per sample at most; None for all.
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
    """A session whose inner tensors can be fetched.

    Attributes:
        session: The session.
        whole: The tensors that are taken whole, from the session or from the feed.
        reduced: The tensors of which only reductions leave the graph.
        fetched: The outputs that are fetched for all this.
        outputs: The float outputs of the model, which are watched; fetched or reduced too.
        order: The names in `reduced`, without a channel axis first.
        inside: Whether these live in bodies, (tensors,) bool.
        known: What is known before a run of those without a channel axis: min, max, sum and size, (tensors, 4) float64.
        slots: What scalar outputs tell of these, as flat indices.
        ends: These outputs.
        planes: The images among these, and the values of a plane of each.
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
        """Put the reductions in order."""
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
        """Run one sample and return what was fetched, with the tensors that are fed.

        Raises:
            RequantError: The model fails.
        """
        fed = {name: sample.feed[name] for name in self.whole if name in sample.feed}
        if not self.fetched:
            return fed
        try:
            return fed | dict(zip(self.fetched, self.session.run(list(self.fetched), sample.feed), strict=True))
        except Exception as error:  # the runtime's exceptions share no base class of their own
            raise RequantError(f"{sample.where}: the model fails: {runtime_message(error)}") from error

    def extremes(self, results: Mapping[str, Array]) -> Array:
        """Return min, max, sum and size of each tensor of a run that is reduced to scalars, (tensors, 4) float64."""
        table = self.known.copy()
        table.reshape(-1)[self.slots] = [results[name].item() for name in self.ends]
        if self.planes:
            rows, areas = np.array(self.planes).T
            pooled = [results[self.reduced[self.order[row]].hi].reshape(2, -1) for row in rows.tolist()]
            sizes = np.array([part.shape[1] for part in pooled])
            starts = np.cumsum(sizes) - sizes
            highest, means = np.concatenate([*pooled, np.zeros((2, 1))], axis=1)  # one more, which a start may be
            table[rows, 1], table[rows, 2] = np.maximum.reduceat(highest, starts), np.add.reduceat(means, starts)
            table[rows, 3] = sizes * areas
        return table


def open_tap(
    model: ModelSource,
    whole: Sequence[str],
    wanted: Wanted,
    *,
    reductions: bool = True,
    but: frozenset[str] = frozenset(),
) -> Tap:
    """Open a session of a copy of the model that gives tensors whole, and reductions of the other wanted ones.

    Args:
        model: A file, or the bytes of one.
        whole: Tensors that are taken whole; those in bodies are reduced all the same.
        wanted: What is to be observed.
        reductions: Whether to reduce the wanted tensors that are not taken whole, and the model's float outputs.
        but: Tensors that are not reduced all the same.

    Raises:
        UnknownNameError: The model has no such tensor.
        RequantError: The model cannot be loaded, or a tensor cannot be observed.
    """
    copy, folder = load_copy(model)
    graph = copy.graph
    values = tensors_of(graph)
    reducible = wanted.names if reductions else ()
    inside = find(graph, (*whole, *reducible))
    if inner := inside.keys() & wanted.channel_axis.keys():
        raise RequantError(f"tensor {min(inner)!r} is in a body; channels are observed in the main graph only")
    outputs = [value.name or "" for value in graph.outputs]
    whole = [name for name in dict.fromkeys(whole) if name not in inside]
    others = [n for n in (*reducible, *(outputs if reductions else ())) if n not in inside and n not in but]
    types = _checked_types(copy, folder, whole, others, wanted)
    axes = {name: axis for name, axis in wanted.channel_axis.items() if name in others}
    rankless = [name for name in axes if values[name].shape is None or graph.opset_imports.get("") is None]
    whole = list(dict.fromkeys((*whole, *rankless)))
    fed = {value.name for value in graph.inputs} - set(graph.initializers)
    fetched = [name for name in whole if name not in fed]
    graph.outputs.extend(values[name] for name in fetched if name not in outputs)
    reduced: dict[str, Reduced] = {}
    prefix = free_prefix(graph, "requant_tap")
    places = {name: place for place, name in enumerate(values)}
    # What is appended last is run first, as soon as its tensor is there: while that is in the cache, and before memory
    # is taken for all the others.
    for name in sorted(dict.fromkeys(others), key=places.__getitem__, reverse=True):
        if name not in whole and types[name] in OBSERVABLE:
            reduced[name] = reduce(graph, values[name], f"{prefix}{len(reduced)}", axes.get(name))
    reduced = {name: reduced[name] for name in others if name in reduced}
    for name, (lo, hi, total, size) in carry_out(copy, inside, f"{prefix}_body").items():
        reduced[name] = Reduced(lo, hi, total, size, inside=True)
    ends = [end for row in reduced.values() for end in row.ends]
    watched = frozenset(name for name in outputs if name in reduced or name in whole)
    source, lean = _serialized(copy, folder), _is_lean(copy, few=wanted.few)
    del copy, graph, values, inside  # and with them the weights, of which the runtime makes copies of its own
    session = _open(source, lean, patterns=not fetched)
    return Tap(session, tuple(whole), reduced, (*fetched, *ends), watched)


def _checked_types(
    copy: ir.Model, folder: Path | None, whole: Sequence[str], others: Sequence[str], wanted: Wanted
) -> dict[str, str]:
    """Return the types of tensors of a main graph, and give the graph what can be inferred of types and shapes.

    Raises:
        RequantError: A tensor that is wanted is not float.
    """
    values = tensors_of(copy.graph)
    looked = [name for name in dict.fromkeys((*whole, *others)) if name in wanted.names or name in whole]
    infer_types(copy, looked)
    types = types_of(copy, folder, {name: values[name] for name in (*whole, *others)}, few=wanted.few)
    for name in looked:
        if types[name] not in OBSERVABLE:
            raise RequantError(f"tensor {name!r} is a {types[name]}; only float, float16 and double can be observed")
    return types


def load_copy(model: ModelSource) -> tuple[ir.Model, Path | None]:
    """Read a model, leaving external data where it is, and say relative to what folder that is.

    Raises:
        RequantError: It cannot be read.
    """
    import onnx
    import onnx_ir as ir

    try:
        if isinstance(model, bytes):
            model = Serialized(model)
        if isinstance(model, Serialized):
            return ir.from_proto(onnx.load_model_from_string(model.data)), model.folder
        return ir.load(model), Path(model).parent
    except Exception as error:  # protobuf, onnx_ir and the file system raise nothing in common
        open_session(model)  # says what is wrong in the words of every other command
        raise RequantError(f"{describe(model)}: cannot be read: {' '.join(str(error).split())}") from error


def infer_types(copy: ir.Model, names: Iterable[str], *, bodies: bool = False) -> None:
    """Give named tensors of a main graph the types and shapes that onnx can infer, where they have none.

    Others are left alone: onnx-ir's pass takes the type of a sequence for that of its tensors. With `bodies` the
    tensors in bodies get theirs too.
    """
    from onnx_ir.passes.common import ShapeInferencePass

    values = tensors_of(copy.graph)
    named = {name: values[name] for name in names}
    if not bodies and all(value.type is not None and value.shape is not None for value in named.values()):
        return
    logger = logging.getLogger("onnx_ir")  # which tells of every value that the pass leaves alone
    level = logger.level
    logger.setLevel(logging.ERROR)
    stand_in = copy.clone()
    try:
        ShapeInferencePass(check_type=False, strict_mode=False)(stand_in)
    finally:
        logger.setLevel(level)
    pairs = [(named, tensors_of(stand_in.graph))]
    if bodies:
        inner = zip(copy.graph.subgraphs(), stand_in.graph.subgraphs(), strict=True)
        pairs += [(tensors_of(body), tensors_of(other)) for body, other in inner]
    for given, inferred in pairs:
        for name, value in given.items():
            value.type = value.type or inferred[name].type
            value.shape = value.shape if value.shape is not None else inferred[name].shape


def types_of(copy: ir.Model, folder: Path | None, values: Mapping[str, ir.Value], *, few: bool) -> dict[str, str]:
    """Return the runtime's name of each tensor's type; what the model does not say, the runtime has to infer."""
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
        session = _open_copy(copy, folder, optimize=False, few=few)
        types |= {value.name: value.type for value in session.get_outputs() if value.name in values}
        copy.graph.outputs.clear()
        copy.graph.outputs.extend(outputs)
    return types


def _open_copy(copy: ir.Model, folder: Path | None, *, optimize: bool = True, few: bool) -> InferenceSession:
    """Open a session, of few runs or many, of a model in memory whose external data lies in `folder`."""
    return _open(_serialized(copy, folder), _is_lean(copy, few=few), optimize=optimize)


def _is_lean(copy: ir.Model, *, few: bool) -> bool:
    """Whether a session computes on the weights in their files."""
    import onnx_ir as ir

    tensors = (value.const_value for graph in copy.graphs() for value in graph.initializers.values())
    return few and sum(tensor.nbytes for tensor in tensors if isinstance(tensor, ir.ExternalTensor)) > LARGE


def _serialized(copy: ir.Model, folder: Path | None) -> Serialized:
    """Return a model in memory as the runtime opens it; external data stay in `folder`, large weights in memory."""
    import onnx_ir as ir

    shared = {}
    for name, value in copy.graph.initializers.items():
        tensor = value.const_value
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


def _open(source: Serialized, lean: bool, *, optimize: bool = True, patterns: bool = True) -> InferenceSession:
    """Open a session that computes on one thread: how many there are must not change a bit of what is observed."""
    try:
        return open_session(source, threads=1, optimize=optimize, lean=lean, patterns=patterns)
    except RequantError:  # an optimisation may remove a tensor although it is an output now
        if not optimize:
            raise
        return open_session(source, threads=1, optimize=False, lean=lean, patterns=patterns)


@dataclass(frozen=True, slots=True)
class Groups:
    """The tensors that are taken whole, by runs of the model.

    Attributes:
        names: The tensors of each run.
        room: How many runs of the largest group the memory has room for at a time, at least 1.
    """

    names: tuple[tuple[str, ...], ...] = ((),)
    room: int = 2**16


def groups_of(model: ModelSource, wanted: Wanted, sample: Sample, limit: int, batch: int) -> Groups:
    """Split the tensors that are taken whole into groups, in the order of the graph, that fit a limit of memory.

    The model is run once per group, as far as the group reaches; one group is enough but for huge activations.

    Args:
        model: The model.
        wanted: What is to be observed.
        sample: What is fed, or its like in size.
        limit: Bytes that the process should stay below; at least a quarter of it goes to the tensors.
        batch: How many samples are stacked at most.

    Raises:
        UnknownNameError: The model has no such tensor.
        RequantError: The model cannot be read, or a tensor cannot be observed.
    """
    if not wanted.histogram:
        return Groups()
    copy, _ = load_copy(model)
    values = tensors_of(copy.graph)
    find(copy.graph, wanted.names)
    order = {name: index for index, name in enumerate(values)}
    whole = sorted((name for name in wanted.tensors if name in values), key=order.__getitem__)
    infer_types(copy, whole)
    sizes = _sizes(copy, {name: values[name] for name in whole}, sample)
    if sizes is None:
        sizes = _measured_sizes(model, whole, sample, few=wanted.few)
    constants = (value.const_value for graph in copy.graphs() for value in graph.initializers.values())
    weights = sum(tensor.nbytes for tensor in constants if tensor is not None)
    budget = max(limit - COPIES * weights - OVERHEAD, limit // 4) // batch
    groups: list[list[str]] = [[]]
    taken = [0]
    for name in whole:
        if groups[-1] and taken[-1] + sizes[name] > budget:
            groups.append([])
            taken.append(0)
        groups[-1].append(name)
        taken[-1] += sizes[name]
    return Groups(tuple(map(tuple, groups)), max(1, budget // max(*taken, 1)))


def _sizes(copy: ir.Model, values: Mapping[str, ir.Value], sample: Sample) -> dict[str, int] | None:
    """Return each tensor's bytes as the model's own shapes tell them for a feed; None when they do not."""
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
    """Return each tensor's bytes as a run tells them that keeps none of them, taken as float32."""
    tap = open_tap(model, (), Wanted(tuple(names), few=few))
    counts = dict(zip(tap.order, tap.extremes(tap.run(sample))[:, 3].tolist(), strict=True))
    fed = {name: array.nbytes for name, array in sample.feed.items()}
    return {name: int(counts[name]) * 4 if name in counts else fed.get(name, 0) for name in names}


def activations(model: ModelSource) -> tuple[str, ...]:
    """Return the float tensors of a main graph that depend on what is fed, in the order of the graph.

    Raises:
        RequantError: The model cannot be read.
    """
    import onnx_ir as ir

    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)  # nodes that have some may read anything outside
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

"""Running a model over data: one streaming pass that leaves nothing but statistics behind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from .. import RequantError
from .bodies import carry_out, find, free_prefix, tensors_of
from .observers import ChannelMean, Histogram, MinMax, Statistic, merge
from .samples import DataError, Sample
from .session import FEW, LARGE, Array, ModelSource, Serialized, describe, open_session, runtime_message
from .sources import Source

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnxruntime import InferenceSession

Progress: TypeAlias = Callable[[int, int | None], None]
"""Called after each sample with how many are done, and how many there are when that is known."""

OBSERVABLE = ("tensor(float)", "tensor(float16)", "tensor(double)")
LOG_MARK = "__print__"
"""What the names of logged outputs contain, unless the metadata lists them; the name is the beginning of a line."""


@dataclass(frozen=True, slots=True)
class Observations:
    """What a run has seen.

    Attributes:
        ranges: The statistic of each observed tensor that had values.
        means: The channel means that were asked for, of each tensor that had values.
        samples: How many samples were run.
    """

    ranges: dict[str, Statistic] = field(default_factory=dict)
    means: dict[str, ChannelMean] = field(default_factory=dict)
    samples: int = 0

    def __or__(self, other: Observations) -> Observations:
        """Merge two runs over different data.

        Raises:
            RequantError: A tensor has statistics of different kinds.
        """
        if not isinstance(other, Observations):
            return NotImplemented
        ranges, means = merge(self.ranges, other.ranges), merge(self.means, other.means)
        return Observations(ranges, means, self.samples + other.samples)


def observe(
    model: ModelSource,
    tensors: Sequence[str],
    source: Iterable[Sample],
    *,
    histogram: bool,
    threads: int = 0,
    progress: Progress | None = None,
    channel_axis: Mapping[str, int] | None = None,
) -> Observations:
    """Run a model over data once and reduce the values of inner tensors as they come.

    Memory holds one sample and the tensors it gives rise to, whatever the number of samples. Min and max are
    computed inside the graph, so that only scalars leave it; a tensor whose sum overflows there is fetched whole
    from that sample on, and so are tensors whose histogram or channel means are wanted. Of a tensor in the body of
    an If, a Loop or a Scan only the extremes leave the graph, in whatever branch or iteration it has values: its
    statistic is a `MinMax` even when histograms are wanted, and a rule that needs a histogram takes its extremes.

    Args:
        model: A file, or the bytes of one; it is not changed.
        tensors: Names of float tensors of the main graph or of bodies in it, their inputs and outputs included.
        source: The samples, or batches of them.
        histogram: Whether to build histograms of the tensors of the main graph; otherwise min and max only.
        threads: Threads inside one operator; 0 leaves the choice to the runtime.
        progress: Called after each sample.
        channel_axis: The channel axis of each tensor of the main graph whose channel means are wanted too.

    Raises:
        UnknownNameError: The model has no such tensor.
        DataError: There are no samples, or a tensor is not finite; the message names tensor and sample.
        RequantError: The model cannot be loaded or run; a tensor is not float, or its name stands for several; a
            tensor in a body is out of reach, or its channel means are wanted.
    """
    axes = channel_axis or {}
    reducer = _Reducer(frozenset(tensors), dict(axes), Histogram if histogram else MinMax)
    whole = tuple(dict.fromkeys((*axes, *(tensors if histogram else ()))))
    few = (_length(source) or FEW + 1) <= FEW
    tap = _tap(model, whole, [name for name in dict.fromkeys(tensors) if name not in whole], threads, few=few)
    if inner := tap.inside.intersection(axes):
        raise RequantError(f"tensor {min(inner)!r} is in a body; channel means are taken in the main graph only")
    seen = Observations()
    done = 0
    for done, sample in enumerate(source, 1):
        results = _run(tap.session, tap.fetched, sample)
        if doubtful := tap.doubtful(results):
            if broken := tap.inside.intersection(doubtful):
                raise DataError(f"{sample.where}: tensor {min(broken)!r} holds NaN or infinity")
            reduced = [name for name in tap.scalars if name not in doubtful]
            tap = _tap(model, (*tap.whole, *doubtful), reduced, threads, few=few)
            results = _run(tap.session, tap.fetched, sample)
        seen |= reducer.reduce(tap, results, sample)
        del results  # before those of the next sample come
        if progress is not None:
            progress(done, _length(source))
    if not done:
        raise DataError("nothing to observe: there are no samples")
    return Observations(seen.ranges, seen.means, done)


@dataclass(frozen=True, slots=True)
class _Reducer:
    """How the tensors of one sample become statistics.

    Attributes:
        tensors: Whose ranges are wanted.
        axes: Whose channel means are wanted, and along which axis.
        kind: The statistic of a range.
    """

    tensors: frozenset[str]
    axes: Mapping[str, int]
    kind: type[Histogram | MinMax]

    def reduce(self, tap: _Tap, results: Mapping[str, Array], sample: Sample) -> Observations:
        """Return the statistics of what one run has fetched."""
        seen = Observations()
        for name in tap.whole:
            array = results[name] if name in results else sample.feed[name]
            if array.size == 0:
                continue
            try:
                if name in self.tensors:
                    seen.ranges[name] = self.kind.of(array)
                if name in self.axes:
                    seen.means[name] = ChannelMean.of(array, self.axes[name])
            except ValueError as error:
                raise DataError(f"{sample.where}: tensor {name!r} {error}") from None
        for name, ends in tap.scalars.items():
            lo, hi, _, size = (results[end].item() for end in ends)
            if size:
                seen.ranges[name] = MinMax(lo + 0.0, hi + 0.0, int(size))  # + 0.0: no -0.0, as in MinMax.of
        return seen


@dataclass(frozen=True, slots=True)
class _Tap:
    """A session whose inner tensors can be fetched.

    Attributes:
        session: The session.
        whole: The tensors that are taken whole, from the session or from the feed.
        fetched: The outputs that are fetched for the statistics.
        scalars: For each tensor that is reduced in the graph, its four outputs: min, max, sum, size.
        inside: Those of them that live in bodies, whose sum is finite just when they are.
    """

    session: InferenceSession
    whole: tuple[str, ...]
    fetched: tuple[str, ...]
    scalars: Mapping[str, tuple[str, ...]]
    inside: frozenset[str]

    def doubtful(self, results: Mapping[str, Array]) -> list[str]:
        """Return the tensors that were reduced in the graph and that must be looked at whole.

        The sum is there for NaN, which the runtime's min and max step over. It also overflows where values are
        huge (attention masks), so a sum that is not finite is a reason to look, not to complain.
        """
        return [
            name
            for name, (*ends, size) in self.scalars.items()
            if results[size].item() and not all(math.isfinite(results[end].item()) for end in ends)
        ]


def _tap(model: ModelSource, whole: Sequence[str], reduced: Sequence[str], threads: int, *, few: bool) -> _Tap:
    """Make tensors, or reductions of them, outputs of a copy of the model, which is run a few times or often."""
    copy, folder = _load(model)
    graph = copy.graph
    values = tensors_of(graph)
    inside = find(graph, (*whole, *reduced))
    whole, reduced = ([name for name in names if name not in inside] for names in (whole, reduced))
    outputs = tuple(value.name or "" for value in graph.outputs)
    types = _types(copy, folder, {name: values[name] for name in (*whole, *reduced)})
    for name, kind in types.items():
        if kind not in OBSERVABLE:
            raise RequantError(f"tensor {name!r} is a {kind}; only float, float16 and double can be observed")
    fed = {value.name for value in graph.inputs} - set(graph.initializers)
    fetched = [name for name in whole if name not in fed]
    graph.outputs.extend(values[name] for name in fetched if name not in outputs)
    scalars = {}
    prefix = free_prefix(graph, "requant_tap")
    for index, name in enumerate(reduced):
        added = _reductions(values[name], f"{prefix}{index}")
        graph.extend(added)
        graph.outputs.extend(node.outputs[0] for node in added)
        scalars[name] = tuple(node.outputs[0].name or "" for node in added)
    scalars |= carry_out(copy, inside, f"{prefix}_body")
    session = _open_copy(copy, folder, threads=threads, few=few)
    fetched += [end for ends in scalars.values() for end in ends]
    return _Tap(session, tuple(whole), tuple(fetched), scalars, frozenset(inside))


def _reductions(value: ir.Value, prefix: str) -> list[ir.Node]:
    """Return nodes that give a tensor's min, max, sum and size, each a scalar; they are the same in every opset."""
    import onnx_ir as ir

    nodes = []
    for op in ("ReduceMin", "ReduceMax", "ReduceSum", "Size"):
        node = ir.node(op, [value], {} if op == "Size" else {"keepdims": 0}, name=f"{prefix}_{op}")
        node.outputs[0].name = f"{prefix}_{op}"
        nodes.append(node)
    return nodes


def _load(model: ModelSource) -> tuple[ir.Model, Path | None]:
    """Read a model, leaving external data where it is, and say relative to what folder that is."""
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


def _types(copy: ir.Model, folder: Path | None, values: Mapping[str, ir.Value]) -> dict[str, str]:
    """Return the runtime's name of each tensor's type; what the model does not say, the runtime has to infer."""
    types = {}
    unknown = []
    for name, value in values.items():
        if value.dtype is None:
            unknown.append(value)
        else:
            types[name] = f"tensor({value.dtype.name.lower()})"
    if unknown:
        outputs = list(copy.graph.outputs)
        copy.graph.outputs.extend(unknown)
        session = _open_copy(copy, folder, optimize=False, few=True)
        types |= {value.name: value.type for value in session.get_outputs() if value.name in values}
        copy.graph.outputs.clear()
        copy.graph.outputs.extend(outputs)
    return types


def _open_copy(
    copy: ir.Model, folder: Path | None, *, threads: int = 0, optimize: bool = True, few: bool
) -> InferenceSession:
    """Open a session, of few runs or many, of a model in memory whose external data lies in `folder`."""
    import onnx_ir as ir

    tensors = (value.const_value for graph in copy.graphs() for value in graph.initializers.values())
    outside = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, ir.ExternalTensor))
    source = Serialized(ir.to_proto(copy).SerializeToString(), folder)
    lean = few and outside > LARGE
    try:
        return open_session(source, threads=threads, optimize=optimize, lean=lean)
    except RequantError:  # an optimisation may remove a tensor although it is an output now
        if not optimize:
            raise
        return open_session(source, threads=threads, optimize=False, lean=lean)


def _run(session: InferenceSession, names: Sequence[str], sample: Sample) -> dict[str, Array]:
    """Run one sample."""
    if not names:
        return {}
    try:
        return dict(zip(names, session.run(list(names), sample.feed), strict=True))
    except Exception as error:  # the runtime's exceptions share no base class of their own
        raise RequantError(f"{sample.where}: the model fails: {runtime_message(error)}") from error


def _length(source: Iterable[Sample]) -> int | None:
    """Return how many samples there are, if that is known."""
    if isinstance(source, Source):
        return source.length
    return len(source) if isinstance(source, Sized) else None


def run_logged(
    model: ModelSource,
    source: Iterable[Sample],
    write: Callable[[str], object],
    *,
    threads: int = 0,
    progress: Progress | None = None,
) -> int:
    """Run a logging model and write a line ``<output name>[v][v]...`` per logged output and sample.

    The values are written with the fewest digits that read back as the same float. The model's metadata
    ``requant.log_first_n`` and ``requant.log_summarize`` (JSON objects: output name -> number, negative for no
    limit) bound the lines of an output and the values of its lines.

    Args:
        model: A file, or the bytes of one.
        source: The samples, or batches of them.
        write: Takes each line, with its line feed: the ``write`` of a text file.
        threads: Threads inside one operator; 0 leaves the choice to the runtime.
        progress: Called after each sample.

    Returns:
        How many lines were written.

    Raises:
        DataError: There are no samples.
        RequantError: The model logs nothing, or it cannot be loaded or run.
    """
    session = open_session(model, threads=threads)
    first_n, summarize = (_limits(session, key) for key in ("requant.log_first_n", "requant.log_summarize"))
    names = [output.name for output in session.get_outputs() if LOG_MARK in output.name or output.name in first_n]
    if not names:
        raise RequantError(f"{describe(model)}: logs nothing; apply the transform insert_logging to it first")
    written = dict.fromkeys(names, 0)
    done = 0
    for done, sample in enumerate(source, 1):
        due = [name for name in names if written[name] < first_n.get(name, math.inf)]
        for name, value in _run(session, due, sample).items():
            write(name + "".join(_printed(value, summarize.get(name, math.inf))) + "\n")
            written[name] += 1
        if progress is not None:
            progress(done, _length(source))
    if not done:
        raise DataError("nothing to log: there are no samples")
    return sum(written.values())


def _printed(value: Array, limit: float) -> Iterator[str]:
    """Yield up to `limit` values in brackets."""
    for index, element in enumerate(value.flat):
        if index >= limit:
            return
        yield f"[{element!s}]"  # str keeps float32's shortest digits; without !s they would be float64's


def _limits(session: InferenceSession, key: str) -> dict[str, float]:
    """Read an object of limits from the model's metadata."""
    text = session.get_modelmeta().custom_metadata_map.get(key, "{}")
    try:
        limits = json.loads(text)
        return {str(name): math.inf if int(limit) < 0 else int(limit) for name, limit in limits.items()}
    except (AttributeError, TypeError, ValueError):
        raise RequantError(f"the model's metadata {key!r} must be a JSON object of numbers, not {text!r}") from None

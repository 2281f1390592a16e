"""Running a model over data in one streaming pass that keeps only statistics."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from reprlib import repr as brief
from types import NoneType
from typing import TYPE_CHECKING, TypeAlias

from ... import RequantError
from ...system.given import check_function, check_kind, checked_integer, names_of, or_default
from ...system.log_records import MARK
from ...system.values import decode_json
from ..data.samples import DataError, Sample
from ..data.sources import Source, has_batch_axis
from ..execution import Execution, cpus, quarter_of_memory
from ..model.session import FEW, Array, ModelSource, describe, input_specs, open_session, run_session
from ..range_files.decoding import convert
from ..statistics.observations import Observations
from .checkpoint import Checkpoint
from .executors import width
from .groups import groups_of
from .pieces import Shares, local_pieces, remote_pieces, stored_model
from .pool import Results, run_all
from .taps import Targets
from .work import Setup, Taps, forget

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

Progress: TypeAlias = Callable[[int, int | None], None]
"""Called after each piece of work: the number of finished samples, and the total number or None if unknown."""

MOST_AXES = 64
"""More than any tensor has."""


def axes_of(channel_axis: Mapping[str, int]) -> dict[str, int]:
    """Return channel axes by tensor.

    Raises:
        RequantError: It is no mapping from names to integers.
    """
    check_kind(channel_axis, Mapping, "channel_axis must be a mapping from names of tensors to axes")
    for name in channel_axis:
        check_kind(name, str, "channel_axis must be a mapping from names of tensors to axes")
    return {
        name: checked_integer(axis, f"the channel axis of {name!r}", -MOST_AXES) for name, axis in channel_axis.items()
    }


def observe(
    model: ModelSource,
    tensors: Sequence[str],
    source: Iterable[Sample],
    *,
    histogram: bool,
    channel_axis: Mapping[str, int] | None = None,
    execution: Execution | None = None,
    progress: Progress | None = None,
) -> Observations:
    """Run a model over data once and reduce the values of inner tensors as they arrive.

    Memory holds one batch per worker and its tensors, whatever the number of samples. Extremes are computed inside the
    graph, so that only scalars leave it, or vectors for channels. Tensors with histograms are fetched whole. For a
    tensor in the body of an If, a Loop or a Scan only the extremes leave the graph, over all branches and iterations
    with values. Its statistic is a `MinMax` also if histograms are requested, and a rule that needs a histogram returns
    the extremes.

    Args:
        model: A file, or the bytes of one. It is not changed.
        tensors: Names of float tensors of the main graph or of its bodies, inputs and outputs included.
        source: All samples, also if this run is only a shard of the whole.
        histogram: Whether to build histograms of the tensors of the main graph; otherwise only min and max.
        channel_axis: Tensor of the main graph -> channel axis, for tensors whose channels are observed too.
        execution: Batches, workers, memory, shards and checkpoints.
        progress: Called after each piece of work.

    Raises:
        UnknownNameError: The model has no such tensor.
        DataError: There are no samples, or an output of the model is not finite and the execution is strict; the
            message names sample and node.
        RequantError: The model cannot be loaded or run; a tensor is not float, or its name is ambiguous; a tensor in a
            body cannot be observed, or its channels are requested.
    """
    names = names_of(tensors, "tensors")
    execution = or_default(execution, Execution, "execution")
    if progress is not None:
        check_function(progress, "progress")
    samples = length_of(source)
    few = (samples or FEW + 1) <= FEW
    axes = axes_of(channel_axis or {})
    targets = Targets(tuple(dict.fromkeys(names)), histogram, axes, few, execution.histogram_values)
    first, source = _peeked(source)
    if first is None:
        Taps(Setup(model, targets))  # report errors of the model first
        raise DataError("nothing to observe: there are no samples")
    limit = execution.memory_limit or quarter_of_memory()
    groups = groups_of(model, targets, first, limit, execution.batch)
    stacks = execution.batch > 1 and has_batch_axis(input_specs(open_session(model, lean=True)))
    run = secrets.token_hex(8)
    setup = Setup(model, targets, groups.names, stacks, execution.first, execution.strict, run)
    stride = max(1, execution.batch // _entries(first)) if stacks else 1
    checkpoint = Checkpoint.open(execution, setup, first, source, samples)
    shares = Shares(source, samples, stride, execution.shard, checkpoint.done)
    del first
    with checkpoint:
        if not checkpoint.complete:
            with _results(setup, shares, execution, groups.room) as results:
                for numbers, seen in results:
                    checkpoint.add(numbers, seen)
                    if progress is not None:
                        progress(checkpoint.seen.samples, shares.samples)
    return checkpoint.seen


@contextmanager
def _results(setup: Setup, shares: Shares, execution: Execution, room: int) -> Iterator[Results[Observations]]:
    """Run all batches of this run and yield their results as they arrive."""
    workers = execution.workers or width(execution.executor) or cpus()
    if execution.executor is None:
        workers = min(workers, room)
        pieces = local_pieces(Taps(setup), shares, workers)
        with run_all(pieces, lambda: ThreadPoolExecutor(workers), workers) as results:
            yield results
        return
    try:
        with (
            stored_model(setup, execution.scratch) as remote_setup,
            run_all(remote_pieces(remote_setup, shares, workers), execution.executor, workers) as results,
        ):
            yield results
    finally:
        forget(setup.run)


def _peeked(source: Iterable[Sample]) -> tuple[Sample | None, Iterable[Sample]]:
    """Return the first sample, or None, and an iterable of all samples."""
    if isinstance(source, (str, bytes)):
        raise RequantError("observe takes samples, as open_source returns them, not the name of data")
    check_kind(source, Iterable, "observe takes samples, as open_source returns them")
    first = next(iter(source), None)
    check_kind(first, (Sample, NoneType), "observe takes samples, as open_source returns them")
    if first is not None and isinstance(source, Iterator):
        return first, chain([first], source)
    return first, source


def _entries(sample: Sample) -> int:
    """Return the number of batch entries in a sample."""
    return max((len(array) for array in sample.feed.values() if array.ndim), default=1) or 1


def length_of(source: Iterable[Sample]) -> int | None:
    """Return the number of samples, or None if it is unknown."""
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

    Values are written with the fewest digits that identify the float. The model's metadata ``requant.log_first_n``
    limits the lines per output, and ``requant.log_summarize`` the values per line. Both are JSON objects that map
    output names to numbers; a negative number is no limit.

    Args:
        model: A file, or the bytes of one.
        source: The samples, or batches of them.
        write: Called with each line, line feed included: the ``write`` of a text file.
        threads: Threads inside one operator; 0 is the runtime's choice.
        progress: Called after each sample.

    Returns:
        The number of written lines.

    Raises:
        DataError: There are no samples.
        RequantError: The model has no logged outputs, one has control characters in its name, or the model cannot be
            loaded or run.
    """
    session = open_session(model, threads=threads)
    first_n, summarize = (_limits(session, key) for key in ("requant.log_first_n", "requant.log_summarize"))
    names = [output.name for output in session.get_outputs() if MARK in output.name or output.name in first_n]
    if not names:
        raise RequantError(f"{describe(model)}: has no logged outputs; apply the transform insert_logging first")
    hidden = next((name for name in names if not name.isprintable()), None)
    if hidden is not None:
        raise RequantError(f"{describe(model)}: a log cannot contain the name of output {hidden!r}; rename the tensor")
    written = dict.fromkeys(names, 0)
    done = 0
    for done, sample in enumerate(source, 1):
        due = [name for name in names if written[name] < first_n.get(name, math.inf)]
        for name, value in run_session(session, due, sample.feed, sample.where).items():
            write(name + "".join(_printed(value, summarize.get(name, math.inf))) + "\n")
            written[name] += 1
        if progress is not None:
            progress(done, length_of(source))
    if not done:
        raise DataError("nothing to log: there are no samples")
    return sum(written.values())


def _printed(value: Array, limit: float) -> Iterator[str]:
    """Yield up to `limit` values in brackets."""
    for index, element in enumerate(value.flat):
        if index >= limit:
            return
        yield f"[{element!s}]"  # str writes float32's shortest digits; without !s, format writes float64's


def _limits(session: InferenceSession, key: str) -> dict[str, float]:
    """Read an object of limits from the model's metadata."""
    text = session.get_modelmeta().custom_metadata_map.get(key, "{}")
    try:
        limits = convert(decode_json(text), dict[str, int], key)
        return {name: math.inf if limit < 0 else limit for name, limit in limits.items()}
    except (ValueError, RequantError):
        raise RequantError(
            f"the model's metadata {key!r} must be a JSON object of numbers, not {brief(text)}"
        ) from None

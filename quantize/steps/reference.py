"""The float model that the results are compared with and timed against, and its data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import onnx_ir as ir

from ... import RequantError
from ...calibration.checks.denormals import slow_here
from ...calibration.data.kept import kept
from ...calibration.data.sources import DataSource, Source
from ...calibration.model.newer import lower
from ...calibration.model.session import ModelSource, open_session, run_session
from ..accuracy.labels import check_label
from ..accuracy.randomness import randomness
from ..model.files import Weights, about, serialize
from ..options.options import Options
from ..runtime.inputs import open_for
from ..runtime.loads import COMPARED, Load, loads_of
from ..runtime.progress import silent
from ..runtime.random_inputs import generated_source
from ..runtime.runtimes import STOCK, Runtime, Sessions
from ..runtime.session import Runner
from .simplify import FLUSH, LOAD, WIDEN, simplify

FLUSHED = (
    "{} weight tensors have denormal values (below 1.2e-38){}; they are zero in the written model and in the float "
    "model that it is compared with"
)
SLOW = ", which this CPU computes slowly"
WIDENED = "the runtime has no kernels for bfloat16: the float model is run in float32"
LOADED = "the runtime does not load the float model: its initializers are constants, not inputs"
NOT_JUDGED = "the accuracy of the INT8 model is not judged"
KEPT = 2**28
"""The float model stays open during a run where its weights have at most this number of bytes."""


@dataclass(frozen=True)
class Reference:
    """The float model that the results are compared with and timed against, and its data.

    Attributes:
        model: The float model as the runtime runs it.
        opened: `model` with its open sessions, in ONNX Runtime.
        timed: `model` with its open sessions, in the runtime of the request.
        source: The data; random inputs where none are given, None where the model runs on none.
        loads: What is timed.
        notes: The differences between `model` and the user's model, and remarks on the data.
        random: Whether the outputs are so random that they judge no model.
    """

    model: ModelSource
    opened: Sessions
    timed: Sessions
    source: Source | None
    loads: tuple[Load, ...]
    notes: Sequence[str]
    random: bool = False


def open_reference(
    path: Path, original: ir.Model, folder: Path, data: DataSource | None, options: Options, runtime: Runtime
) -> Reference:
    """Return the float model and its data, after one run of each load in both runtimes.

    Args:
        path: The file of the model.
        original: The model in it.
        folder: A folder for temporary files.
        data: The user's data; None for random inputs.
        options: The samples, the batch sizes, the threads and the memory limit.
        runtime: What runs the INT8 model.

    Raises:
        RequantError: The model or the data cannot be used.
    """
    model, notes = reference_of(path, original, folder)
    weights = Weights.of(original)
    opened = sessions_of(model, weights)
    source, loads, remarks = open_data(opened, data, options, weights)
    timed = opened if runtime is STOCK else tried(sessions_of(model, weights, runtime), loads, options.threads)
    found = Reference(model, opened, timed, source, loads, [*notes, *remarks])
    return found if data is None else _with_randomness(found, original)


def _with_randomness(reference: Reference, original: ir.Model) -> Reference:
    """Return a reference that knows how random its outputs are. A note is logged: long work begins behind this step."""
    found = randomness(original, partial(reference.opened.runner, 1), reference.loads[0].feed)
    if found is None:
        return reference
    note = f"{found.note}; {NOT_JUDGED}" if found.hides_noise else found.note
    logging.getLogger("requant").warning("requant: %s", note)
    return replace(reference, notes=[*reference.notes, note], random=found.hides_noise)


def reference_of(path: Path, original: ir.Model, folder: Path) -> tuple[ModelSource, list[str]]:
    """Return the float model as the runtime runs it, with notes; the file itself if nothing must change.

    Denormal weights are zero in it: a float model that they slow down would make INT8, which has none, look faster than
    it is.
    """
    repair, notes = _repair(path, original)
    with about(path):
        done = simplify(original, silent, pipeline=f"{repair} {FLUSH}")
    flushed = sum(result.change.applied for result in done.applied if result.step.name == FLUSH)
    if flushed:
        notes.append(FLUSHED.format(flushed, SLOW if slow_here() else ""))
    if not notes:
        return path, []
    lower(done.model)
    return serialize(done.model, folder), notes


def _repair(path: Path, original: ir.Model) -> tuple[str, list[str]]:
    """Return the pipeline without which the runtime does not load a model, with a note; both empty if it does.

    ONNX Runtime has few kernels for bfloat16: such a model is compared as float32. It does not load a Resize whose
    empty scales a caller may override: such a model is compared with constants in place of these inputs.
    """
    tensors = (value.dtype for graph in original.graphs() for node in graph for value in node.inputs if value)
    if ir.DataType.BFLOAT16 in tensors:
        pipeline, note = WIDEN, WIDENED
    elif any(value.is_initializer() for value in original.graph.inputs):
        pipeline, note = LOAD, LOADED
    else:
        return "", []
    try:
        open_session(path, lean=True)
    except RequantError:
        return pipeline, [note]
    return "", []


def sessions_of(model: ModelSource, weights: Weights, runtime: Runtime = STOCK) -> Sessions:
    """Return the sessions of a float model in a runtime; small models stay open between uses."""
    return Sessions(model, keep=weights.total <= KEPT, runtime=runtime)


def tried(sessions: Sessions, loads: Sequence[Load], threads: int) -> Sessions:
    """Return the sessions of a float model after one run of each load.

    Raises:
        RequantError: The runtime cannot load the model, or refuses a feed: now, and not after long work.
    """
    for load in loads:
        sessions.runner(threads)(load.feed)
    return sessions


def open_data(
    sessions: Sessions, data: DataSource | None, options: Options, weights: Weights
) -> tuple[Source | None, tuple[Load, ...], list[str]]:
    """Open the data of the float model, and run it once at each batch size.

    Returns:
        The data (random inputs where none are given, None where the model runs on none), what is timed, and notes.

    Raises:
        RequantError: The model or the data cannot be used.
    """
    if data is None:
        source = generated_source(sessions.source)
        return source, () if source is None else loads_of(source, options.batches), []
    run = Runner(sessions.source, lean=True) if weights.large else sessions.runner(1)
    assert isinstance(run, Runner)  # data are read for ONNX Runtime, which calibrates
    source = open_for(run, data, options.samples, options.execution.memory_limit)
    source = replace(source, rows=kept(source.rows))
    loads = loads_of(source, options.batches)
    try:
        for load in loads:
            run(load.feed)
    except RequantError:
        find_refused(run, source)
        raise
    first = next(iter(source))
    note = check_label(run(first.feed), first)
    return source, loads, [note] if note else []


def find_refused(run: Runner, source: Source) -> None:
    """Run the first samples until one fails, so that the error names it; no error if each of them runs alone.

    Raises:
        RequantError: The model fails on a sample.
    """
    for sample in islice(source, COMPARED):
        run_session(run.session, run.outputs, sample.feed, sample.where)

"""Score a model over data with the workers of an executor. Each worker scores a part of the data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from .... import RequantError
from ....calibration.data.samples import DataError
from ....calibration.data.sources import DataSpec, Source, open_source
from ....calibration.execution import Execution, cpus
from ....calibration.model.session import Array, ModelSource, input_specs, open_session
from ....calibration.runs.executors import width
from ....calibration.runs.pieces import Piece
from ....calibration.runs.pool import run_all
from ....system.printable import number_of
from ...runtime.as_file import as_file
from ...runtime.progress import Progress, silent
from ...runtime.runtimes import STOCK, Runtime
from .heads import Heads
from .named import Metric, metric_named, of_probabilities
from .scoring import NothingCountsError, Reference, Score, fitted, join, score

PARTS = 4
"""Parts of the data per worker. More parts end at about the same time, but each part opens the model."""

Scored: TypeAlias = tuple[Array, Array | None, int, tuple[str, ...], Heads]
"""Parts, rows, samples, notes and heads of a `Score`."""


@dataclass(frozen=True, slots=True)
class Part:
    """Samples on which a worker scores a model.

    Attributes:
        metric: The metric's name.
        model: The path of the model.
        reference: The path of the float model; None if the metric needs no reference.
        data: Opens the data.
        picked: The positions of the samples in the data.
        runtime: What runs the model.
        probabilities: The outputs that are compared as probabilities.
    """

    metric: str
    model: str
    reference: str | None
    data: DataSpec
    picked: tuple[int, ...]
    runtime: Runtime = STOCK
    probabilities: frozenset[str] = frozenset()


def score_with(
    execution: Execution,
    metric: Metric,
    model: ModelSource,
    data: Source,
    *,
    reference: ModelSource | None = None,
    progress: Progress = silent,
    runtime: Runtime = STOCK,
) -> Score:
    """Return the same score as `score`, computed by the workers of an executor.

    Args:
        execution: Has the executor (`can_distribute`).
        metric: The metric.
        model: The model.
        data: The data, with labels if the metric needs them.
        reference: The float model, for metrics that compare with it.
        progress: Called with a stage, the part that is done, and the total.
        runtime: What runs the model.

    Raises:
        RequantError: As `score` does, or a worker fails several times.
    """
    assert execution.executor is not None
    assert data.reference is not None
    assert data.length is not None
    count = data.length
    workers = execution.workers or width(execution.executor) or cpus()
    picked = tuple(range(count) if data.picked is None else data.picked)
    with ExitStack() as files:
        paths = [
            None if each is None else os.path.abspath(files.enter_context(as_file(each, execution.scratch)))
            for each in (model, reference if metric.reference else None)
        ]
        part = Part(metric.name, str(paths[0]), paths[1], data.reference, picked, runtime, metric.probabilities)
        by_start: dict[int, Scored] = {}
        done = 0
        with run_all(_pieces(part, PARTS * workers), execution.executor, workers) as results:
            for units, scored in results:
                by_start[units[0]] = scored
                done += scored[2]
                progress(metric.name, done, count)
    scores = [Score(metric, 0.0, *by_start[first]) for first in sorted(by_start) if len(by_start[first][0])]
    if not scores:
        raise NothingCountsError(f"{metric.name}: no item of {number_of(done, 'sample')} has a label that counts")
    return replace(join(scores), samples=done)


def can_distribute(execution: Execution, metric: Metric, data: Source) -> bool:
    """Whether workers can compute a score: there is an executor, and data and metric can be opened by name.

    A metric whose items depend on each other needs all of them at once.
    """
    alone = metric.own is None and metric.decode is None and metric.settle is None and not metric.uneven
    return execution.executor is not None and alone and data.reference is not None and data.length is not None


def _pieces(whole: Part, parts: int) -> Iterator[Piece[Scored]]:
    """Yield consecutive parts of the data with about the same size."""
    size = -(-len(whole.picked) // parts)
    for first in range(0, len(whole.picked), size):
        part = replace(whole, picked=whole.picked[first : first + size])
        yield Piece((first,), partial(score_part, part))


def score_part(part: Part) -> Scored:
    """Open the model and the data, and score the samples of a part.

    Raises:
        RequantError: As `score` raises it.
    """
    try:
        source = open_source(part.data, input_specs(open_session(part.model, threads=1, lean=True)))
        source = replace(source, picked=part.picked)
        metric = of_probabilities(fitted(metric_named(part.metric), next(iter(source))), part.probabilities)
        reference = None if part.reference is None else Reference(metric, part.reference, threads=1, room=0)
        result = score(metric, part.model, source, reference=reference, threads=1, runtime=part.runtime)
    except NothingCountsError:  # other parts may have labels that count
        return np.zeros((0, 2)), None, len(part.picked), (), {}
    except RequantError as error:
        # subclasses with more arguments than a message cannot be pickled
        plain = DataError if isinstance(error, DataError) else RequantError
        raise plain(str(error)) from None
    assert result.parts is not None
    return result.parts, result.rows, result.samples, result.notes, result.heads

"""A model's score over data, found by the workers of an executor, each on a part of the data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from .... import RequantError
from ....calibration.execution import Execution, cpus
from ....calibration.executors import width
from ....calibration.pieces import Piece
from ....calibration.pool import run_all
from ....calibration.samples import DataError
from ....calibration.session import Array, ModelSource, input_specs, open_session
from ....calibration.sources import DataSpec, Source, open_source
from ...runtime.progress import Progress, silent
from .named import Metric, metric_named
from .scoring import NothingCountsError, Reference, Score, as_file, join, score

PARTS = 4
"""Parts of the data per worker: the last ones end about together, and a model is opened for each."""

Found: TypeAlias = tuple[Array, Array | None, int, tuple[str, ...]]
"""Contributions of items, the entries that they are of, samples and notes, as of `Score`."""


@dataclass(frozen=True, slots=True)
class Part:
    """Samples that a model is scored on elsewhere.

    Attributes:
        metric: The metric's name.
        model: Path of the model.
        reference: Path of the float model; None where the metric compares with none.
        data: What opens the data.
        picked: Positions of the samples in all of the data.
    """

    metric: str
    model: str
    reference: str | None
    data: DataSpec
    picked: tuple[int, ...]


def score_with(
    execution: Execution,
    metric: Metric,
    model: ModelSource,
    data: Source,
    *,
    reference: ModelSource | None = None,
    progress: Progress = silent,
) -> Score:
    """Return a model's score over data, the same as `score` does, from the workers of an executor.

    Args:
        execution: Where; with an executor of its own, and data that can be opened there (`can_leave`).
        metric: The metric, by which items add up.
        model: The model.
        data: The data, with labels where the metric wants them.
        reference: The float model, for metrics that compare with it.
        progress: Called with a stage, how much of it is done, and how much there is.

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
        part = Part(metric.name, str(paths[0]), paths[1], data.reference, picked)
        found: dict[int, Found] = {}
        done = 0
        with run_all(_pieces(part, PARTS * workers), execution.executor, workers) as results:
            for units, scored in results:
                found[units[0]] = scored
                done += scored[2]
                progress(metric.name, done, count)
    scores = [Score(metric, 0.0, *found[first]) for first in sorted(found) if len(found[first][0])]
    if not scores:
        raise NothingCountsError(f"{metric.name}: no item of {done} samples has a label that counts")
    return replace(join(scores), samples=done)


def can_leave(execution: Execution, metric: Metric, data: Source) -> bool:
    """Tell whether an executor's workers can score: they open the data by name, and know the metric by name."""
    return (
        execution.executor is not None and metric.own is None and data.reference is not None and data.length is not None
    )


def _pieces(whole: Part, parts: int) -> Iterator[Piece[Found]]:
    """Cut the data into consecutive parts of about the same size."""
    size = -(-len(whole.picked) // parts)
    for first in range(0, len(whole.picked), size):
        part = replace(whole, picked=whole.picked[first : first + size])
        yield Piece((first,), partial(score_part, part))


def score_part(part: Part) -> Found:
    """Open model and data, and score the samples of a part.

    Raises:
        RequantError: As when they are run here.
    """
    try:
        metric = metric_named(part.metric)
        source = open_source(part.data, input_specs(open_session(part.model, threads=1, lean=True)))
        reference = None if part.reference is None else Reference(metric, part.reference, threads=1, room=0)
        found = score(metric, part.model, replace(source, picked=part.picked), reference=reference, threads=1)
    except NothingCountsError:  # the labels that count may be in other parts
        return np.zeros((0, 2)), None, len(part.picked), ()
    except RequantError as error:
        # subclasses are made of more than a message, and do not survive the way between processes
        plain = DataError if isinstance(error, DataError) else RequantError
        raise plain(str(error)) from None
    assert found.parts is not None
    return found.parts, found.rows, found.samples, found.notes

"""Hold out a part of the user's data, to judge models on samples that gave no ranges."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from functools import partial
from itertools import groupby

from ...calibration.data.kept import LIMIT, counted, kept
from ...calibration.data.places import one_of_each_part
from ...calibration.data.sequences import stretches
from ...calibration.data.sources import Source
from ...calibration.model.session import FEW
from ..job import APART, Job
from ..placement.runs import MOST_SAMPLES

PART = 4  # one of so many samples, but at least APART / 2, or one of so many sequences is held out


def hold_out(job: Job) -> Job:
    """Return the job with two sources: one that gives ranges and corrections, and one to judge models on.

    The samples that ``--samples`` leaves out judge the model. Without this option a fourth of the samples judges it,
    but at least half of `APART` and at most `MOST_SAMPLES`. A step of a sequence depends on the steps before it, so
    sequences are held out whole. If the number of samples is unknown, they are counted first.

    The job keeps one source for both purposes if there are fewer than `APART` samples or `PART` sequences, if
    ``--samples`` picks from an unknown number, or if the user gives the ranges.

    Raises:
        DataError: A sample cannot be read.
    """
    source, most = job.source, MOST_SAMPLES
    if source is None or not job.outputs_judge or job.supply.ranges is not None:
        return job
    if source.links:
        source, held = _parted_sequences(source)
        return replace(job, source=source, held=held)
    if source.picked is None:
        rows, size = counted(source.rows, lambda number: job.progress("read data", number, None))
        source = replace(source, rows=rows)
        job = replace(job, source=source)
        if size > LIMIT:  # a reader begins at its first sample each time: those that judge are kept
            most = max(FEW, min(most, LIMIT * (rows.length or 0) // size))
    if source.rows.length is None:
        return job
    every = range(source.rows.length)
    picked = set(every if source.picked is None else source.picked)
    others = [position for position in every if position not in picked]
    if not others and len(picked) >= APART:
        others = one_of_each_part(every, min(max(len(every) // PART, APART // 2), most))
    if not others:
        return job
    judges = others if len(others) <= MOST_SAMPLES else one_of_each_part(others, MOST_SAMPLES)
    rest = sorted(picked.difference(judges))
    judging = replace(source, picked=judges, rows=source.rows if source.rows.random else kept(source.rows, 2 * LIMIT))
    return replace(job, source=replace(source, picked=rest), held=judging)


def _parted_sequences(source: Source) -> tuple[Source, Source | None]:
    """Return the sequences that give ranges, and a fourth of them to judge on: at most `MOST_SAMPLES` first steps.

    All give ranges, and none is apart, if there are fewer than `APART` steps or `PART` sequences.
    """
    assert source.rows.starts is not None  # steps with a state are in sequences
    starts, count = source.rows.starts(None)
    positions = range(count) if source.picked is None else source.picked
    parts = [list(part) for _, part in groupby(positions, key=partial(bisect_right, starts))]
    if len(positions) < APART or len(parts) < PART:
        return source, None
    others = [
        position for index in one_of_each_part(range(len(parts)), len(parts) // PART) for position in parts[index]
    ]
    rest = sorted({*positions}.difference(others))
    return replace(source, picked=rest), replace(source, picked=stretches(starts, others, MOST_SAMPLES))

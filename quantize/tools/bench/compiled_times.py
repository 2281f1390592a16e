"""How fast a compiled model loads and runs beside its original."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ....calibration.model.session import Array
from ...model.files import Weights, is_ort
from ...runtime.clock import Times, race, uncertainty
from ...runtime.configured import GAIN, Values, configured_run, open_configured, threads_of

SECONDS = 2.0  # how long loads are timed, and again runs
LOADS, MOST_LOADS = 5, 25  # the minimum and the maximum number of timed loads


@dataclass(frozen=True, slots=True)
class Change:
    """A time before and after.

    Attributes:
        before_ms: Minimum time with the original.
        after_ms: Minimum time with the compiled model.
        before_median_ms: Median time with the original.
        after_median_ms: Median time with the compiled model.
        count: The number of measurements of each.
        uncertainty: How far the speed-up may be from the truth, as a share of it.
    """

    before_ms: float
    after_ms: float
    before_median_ms: float
    after_median_ms: float
    count: int
    uncertainty: float = 0.0

    @property
    def speedup(self) -> float:
        """Time with the original over time with the compiled model."""
        return self.before_ms / self.after_ms

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "speedup": self.speedup}


@dataclass(frozen=True, slots=True)
class Timed:
    """How fast a compiled model is.

    Attributes:
        settings: The session options with which it is fastest.
        load: Load times of the original, and of the compiled model with `settings`.
        run: Run times of both; None without inputs.
    """

    settings: Values
    load: Change
    run: Change | None


def timed(
    before: tuple[str | os.PathLike[str], Values],
    after: tuple[str | os.PathLike[str], Sequence[Values]],
    feed: Mapping[str, Array] | None,
    weights: Weights,
) -> Timed:
    """Time a model against its original.

    Args:
        before: The original, with its session options.
        after: The compiled model, with the session options to try.
        feed: The inputs of a run; None to time loads alone.
        weights: The size of the weights.
    """
    output, levels = after
    if is_ort(output) or weights.large:
        levels = levels[:1]  # a graph in ORT format is not optimised again
    settings, run = _timed_runs([before, *((output, level) for level in levels)], feed, SECONDS, weights)
    return Timed(settings, _timed_loads(before, (output, settings), SECONDS), run)


def _timed_runs(
    jobs: Sequence[tuple[str | os.PathLike[str], Values]],
    feed: Mapping[str, Array] | None,
    seconds: float,
    weights: Weights,
) -> tuple[Values, Change | None]:
    """Time runs of the original, the first job, and of the compiled model at one or two levels.

    Only one large model is loaded at a time. Returns the settings for the compiled model, the first unless the second
    is at least `GAIN` times as fast, and the times of both.
    """
    if feed is None:
        return jobs[1][1], None
    threads = threads_of(jobs[0][1])
    if weights.large:
        times = [race([configured_run(*job, feed)], seconds=seconds / len(jobs), threads=threads)[0] for job in jobs]
    else:
        times = race([configured_run(*job, feed) for job in jobs], seconds=seconds, threads=threads)
    best = 2 if len(jobs) > 2 and times[1].least >= GAIN * times[2].least else 1
    return jobs[best][1], _change(times[0], times[best])


def _timed_loads(
    before: tuple[str | os.PathLike[str], Values], after: tuple[str | os.PathLike[str], Values], seconds: float
) -> Change:
    """Time the loading of two models in turn, without the end of their sessions."""
    times: tuple[list[float], list[float]] = ([], [])
    for job in (before, after):
        open_configured(*job)  # the files are now in the page cache
    end = time.perf_counter() + seconds
    while len(times[0]) < LOADS or (time.perf_counter() < end and len(times[0]) < MOST_LOADS):
        for place in (0, 1) if len(times[0]) % 2 == 0 else (1, 0):
            start = time.perf_counter()
            session = open_configured(*(before, after)[place])
            times[place].append(time.perf_counter() - start)
            del session
    before_times, after_times = (Times(tuple(each)) for each in times)
    return _change(before_times, after_times)


def _change(before: Times, after: Times) -> Change:
    """Return minima and medians, and how sure their ratio is."""
    return Change(
        1e3 * before.least,
        1e3 * after.least,
        1e3 * before.median,
        1e3 * after.median,
        min(len(before.seconds), len(after.seconds)),
        uncertainty([after, before]),
    )

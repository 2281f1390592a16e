"""How fast a compiled model loads and runs beside its original."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ....calibration.model.session import Array
from ...model.files import Weights, is_ort
from ...runtime.clock import Times, race, uncertainty
from ...runtime.configured import GAIN, Configured, Values, threads_of

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


def timed(before: Configured, after: Sequence[Configured], feed: Mapping[str, Array] | None, weights: Weights) -> Timed:
    """Time a model against its original.

    Args:
        before: The original.
        after: The compiled model with the session options to try; a large one or one in ORT format has the first alone.
        feed: The inputs of a run; None to time loads alone.
        weights: The size of the weights.
    """
    if is_ort(after[0].path) or weights.large:
        after = after[:1]  # a graph in ORT format is not optimised again
    best, run = (after[0], None) if feed is None else _timed_runs(before, after, feed, weights)
    return Timed(best.values, _timed_loads((before, best)), run)


def _timed_runs(
    before: Configured, after: Sequence[Configured], feed: Mapping[str, Array], weights: Weights
) -> tuple[Configured, Change]:
    """Time runs of the original, and of the compiled model with one or two settings.

    Only one large model is loaded at a time. Returns the compiled model with the first settings unless the second are
    at least `GAIN` times as fast, and the times of both models.
    """
    models, threads = (before, *after), threads_of(before.values)
    if weights.large:
        seconds = SECONDS / len(models)
        times = [race([model.run(feed)], seconds=seconds, threads=threads)[0] for model in models]
    else:
        times = race([model.run(feed) for model in models], seconds=SECONDS, threads=threads)
    best = 2 if len(models) > 2 and times[1].least >= GAIN * times[2].least else 1
    return models[best], _change(times[0], times[best])


def _timed_loads(models: tuple[Configured, Configured]) -> Change:
    """Time the loading of two models in turn, without the end of their sessions."""
    times: tuple[list[float], list[float]] = ([], [])
    for model in models:
        model.opened()  # the files are now in the page cache
    end = time.perf_counter() + SECONDS
    while len(times[0]) < LOADS or (time.perf_counter() < end and len(times[0]) < MOST_LOADS):
        for place in (0, 1) if len(times[0]) % 2 == 0 else (1, 0):
            start = time.perf_counter()
            session = models[place].opened()
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

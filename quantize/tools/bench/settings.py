"""Search the session options that run a model fastest on this machine, one option after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from .... import RequantError
from ....calibration.execution import cpus
from ....calibration.model.session import Array
from ...runtime.clock import Times, interleave, uncertainty
from ...runtime.configured import GAIN, Value, Values, configured_run, snippet
from ...runtime.machine import physical_cores
from ...runtime.progress import Progress, silent

Run: TypeAlias = Callable[[], object]

DEFAULTS: Values = {
    "intra_op_num_threads": 0,
    "graph_optimization_level": "all",
    "session.intra_op.allow_spinning": "1",
    "enable_mem_pattern": True,
    "enable_cpu_mem_arena": True,
    "execution_mode": "sequential",
}
"""The runtime's defaults, in the order in which other values are tried."""

CANDIDATES: Mapping[str, tuple[Value, ...]] = {
    "graph_optimization_level": ("extended",),
    "session.intra_op.allow_spinning": ("0",),
    "enable_mem_pattern": (False,),
    "enable_cpu_mem_arena": (False,),
    "execution_mode": ("parallel",),
}
"""Other values by option. Numbers of threads depend on the machine."""

NOTHING: Values = MappingProxyType({})

BLOCK = 0.03
"""Seconds of one session at a time. In shorter turns, the spinning threads of one session slow down the next one; a
block lasts longer than they spin, and a minimum ignores its first runs."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One value, timed against the best values before it.

    Attributes:
        option: Name of the session option or configuration entry.
        value: The value.
        before_ms: Minimum time of a run with the values kept so far; None if the value was not tried.
        ms: Minimum time of a run with this value too; None if it was not tried.
        taken: Whether the value is kept.
        reason: Why the value was not tried.
    """

    option: str
    value: Value
    before_ms: float | None = None
    ms: float | None = None
    taken: bool = False
    reason: str = ""

    @property
    def speedup(self) -> float | None:
        """Time before over time with this value; None if it was not tried."""
        return None if self.before_ms is None or self.ms is None else self.before_ms / self.ms

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "speedup": self.speedup}


@dataclass(frozen=True, slots=True)
class Settings:
    """The session options that `recommend` recommends.

    Attributes:
        model: Path of the model.
        values: The recommended values that are not the runtime's defaults.
        default_ms: Minimum time of a run with the defaults, and with the given number of threads, if any.
        best_ms: Minimum time of a run with `values`, measured in turn with the defaults.
        trials: Every value that was considered.
        uncertainty: How far `speedup` may be from the truth, as a share of it.
    """

    model: str
    values: Values
    default_ms: float
    best_ms: float
    trials: tuple[Trial, ...]
    uncertainty: float = 0.0

    @property
    def speedup(self) -> float:
        """Time with the defaults over time with `values`."""
        return self.default_ms / self.best_ms

    @property
    def snippet(self) -> str:
        """A Python program that loads the model with these settings."""
        return snippet(self.model, self.values)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "values": dict(self.values),
            "default_ms": self.default_ms,
            "best_ms": self.best_ms,
            "speedup": self.speedup,
            "uncertainty": self.uncertainty,
            "trials": [trial.to_json() for trial in self.trials],
            "snippet": self.snippet,
        }


def recommend(
    model: str | os.PathLike[str],
    feed: Mapping[str, Array],
    *,
    threads: int | None = None,
    seconds: float = 10.0,
    needed: Values = NOTHING,
    progress: Progress = silent,
) -> Settings:
    """Find the session options with which a model runs fastest on this machine.

    Each value is timed in turn with the best values so far; combinations are not tried. A value is kept if the fastest
    run becomes at least `GAIN` times as fast. At the end the kept values are measured against the defaults again, and
    dropped if the gain is gone.

    Args:
        model: Path of the model. Up to three sessions of it are in memory.
        feed: The inputs of a run.
        threads: Threads inside one operator; None to search the number.
        seconds: How long the search may take. Values for which no time is left are not tried.
        needed: Options without which the model cannot be loaded.
        progress: Called with a stage, how much of it is done, and how much there is.

    Raises:
        RequantError: The model cannot be loaded or run, or `seconds` is not positive.
    """
    if not seconds > 0:
        raise RequantError(f"seconds must be positive, not {seconds:g}")
    given: Values = {**needed, **({} if threads is None else {"intra_op_num_threads": threads})}
    end = time.perf_counter() + seconds
    candidates = list(_candidates(threads))
    default = best = configured_run(model, given, feed)
    values, trials = given, []
    for index, (option, value) in enumerate(candidates):
        progress("try session options", index, len(candidates))
        reason = _why_untried(option, values, threads, end)
        if reason:
            trials.append(Trial(option, value, reason=reason))
            continue
        changed = {**values, option: value}
        run = configured_run(model, changed, feed)
        share = (end - time.perf_counter()) / (len(candidates) - index + 1)
        before, after = (each.least for each in fastest([best, run], seconds=share, threads=threads))
        trials.append(Trial(option, value, 1e3 * before, 1e3 * after, taken=before >= GAIN * after))
        if trials[-1].taken:
            values, best = changed, run
    if values == given:
        (alone,) = fastest([default], seconds=min(end - time.perf_counter(), 1.0), threads=threads)
        return Settings(os.fspath(model), given, 1e3 * alone.least, 1e3 * alone.least, tuple(trials))
    times = fastest([default, best], seconds=end - time.perf_counter(), threads=threads)
    before, after = (each.least for each in times)
    if before < GAIN * after:
        values, after = given, before
    return Settings(os.fspath(model), values, 1e3 * before, 1e3 * after, tuple(trials), uncertainty(times))


def fastest(runs: Sequence[Run], *, seconds: float, threads: int | None = None) -> list[Times]:
    """Return the times of each run; the runs alternate in blocks of `BLOCK` seconds.

    CPU time counts only where the given number of threads is 1: times of several numbers are compared by wall time.
    """
    return interleave(runs, seconds=seconds, block=BLOCK, threads=threads or 0)


def _candidates(threads: int | None) -> Iterator[tuple[str, Value]]:
    """Yield each option with each value to try, in the order of `DEFAULTS`."""
    counts = dict.fromkeys((1, physical_cores(), cpus())) if threads is None else ()
    yield from (("intra_op_num_threads", count) for count in counts)
    yield from ((option, value) for option in DEFAULTS for value in CANDIDATES.get(option, ()))


def _why_untried(option: str, values: Values, threads: int | None, end: float) -> str:
    """Return why a value is not tried; empty if it is."""
    if option == "session.intra_op.allow_spinning" and values.get("intra_op_num_threads") == 1:
        return "no effect with one thread"
    if option == "execution_mode" and threads is not None:
        return "it would use more threads than given"
    return "no time was left" if time.perf_counter() > end else ""

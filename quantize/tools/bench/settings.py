"""Which session options run a model fastest on this machine: tried one by one, each against the best so far."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .... import RequantError
from ....calibration.session import Array
from ...runtime.configured import GAIN, Block, Value, Values, session_block, snippet
from ...runtime.machine import logical_cores, physical_cores
from ...runtime.progress import Progress, silent
from .timed_process import TimedProcess

DEFAULTS: Values = {
    "intra_op_num_threads": 0,
    "graph_optimization_level": "all",
    "session.intra_op.allow_spinning": "1",
    "enable_mem_pattern": True,
    "enable_cpu_mem_arena": True,
    "execution_mode": "sequential",
    "session.set_denormal_as_zero": "0",
}
"""What the runtime does when it is told nothing, in the order in which other values are tried."""

CANDIDATES: Mapping[str, tuple[Value, ...]] = {
    "graph_optimization_level": ("extended",),
    "session.intra_op.allow_spinning": ("0",),
    "enable_mem_pattern": (False,),
    "enable_cpu_mem_arena": (False,),
    "execution_mode": ("parallel",),
    "session.set_denormal_as_zero": ("1",),
}
"""Other values; those of the threads depend on the machine."""


BLOCK = 0.03  # seconds of one session at a time: the threads of the one before spin for the first few milliseconds
MOST_RUNS, LEAST_BLOCKS = 200, 3  # of a block, and blocks of each session, whatever the time


@dataclass(frozen=True, slots=True)
class Trial:
    """One value against the best ones that were known before it.

    Attributes:
        option: Name of the session option or configuration entry.
        value: The value that was tried.
        before_ms: Least time of a run with the values taken before; None where it was not tried.
        ms: Least time of a run with this value.
        taken: Whether it is kept.
        reason: Why it was not tried.
    """

    option: str
    value: Value
    before_ms: float | None = None
    ms: float | None = None
    taken: bool = False
    reason: str = ""

    @property
    def speedup(self) -> float | None:
        """How many times as fast a run is with this value; None where it was not tried."""
        return None if self.before_ms is None or self.ms is None else self.before_ms / self.ms

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "option": self.option,
            "value": self.value,
            "before_ms": self.before_ms,
            "ms": self.ms,
            "speedup": self.speedup,
            "taken": self.taken,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Settings:
    """What `recommend` found.

    Attributes:
        model: Path of the model.
        values: The recommended values that are not the runtime's defaults.
        default_ms: Least time of a run with the defaults; with the threads that were asked for, if any.
        best_ms: Least time of a run with `values`, measured in turns with the defaults.
        trials: Every value that was considered.
    """

    model: str
    values: Values
    default_ms: float
    best_ms: float
    trials: tuple[Trial, ...]

    @property
    def speedup(self) -> float:
        """How many times as fast a run is as with the defaults."""
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
            "trials": [trial.to_json() for trial in self.trials],
            "snippet": self.snippet,
        }


def recommend(
    model: str | os.PathLike[str],
    feed: Mapping[str, Array],
    *,
    threads: int | None = None,
    seconds: float = 10.0,
    progress: Progress = silent,
) -> Settings:
    """Find the session options with which a model runs fastest on this machine.

    Options are tried one after the other, each value in turns with the best ones so far, not in all combinations. A
    value is taken where the least time of a run falls to 1 / `GAIN`; at the end all that were taken are measured
    against the defaults once more, and dropped where they do not hold that together.

    Args:
        model: Path of the model. Two sessions of it are in memory at a time.
        feed: What it is run on.
        threads: Threads inside one operator, if they are not free to choose.
        seconds: How long all of it may take; what there is no time for is not tried. A trial that was begun ends.
        progress: Called with a stage, how much of it is done, and how much there is.

    Raises:
        RequantError: The model cannot be loaded or run, or no time is given.
    """
    if not seconds > 0:
        raise RequantError(f"seconds must be positive, not {seconds:g}")
    given: Values = {} if threads is None else {"intra_op_num_threads": threads}
    end = time.perf_counter() + seconds
    candidates = list(_candidates(threads))
    values, best = dict(given), session_block(model, given, feed)
    default, trials = best, []
    for index, (option, value) in enumerate(candidates):
        progress("try session options", index, len(candidates))
        trial = Trial(option, value, reason=_idle(option, values, threads))
        if not trial.reason and time.perf_counter() > end:
            trial = Trial(option, value, reason="no time was left")
        if not trial.reason:
            share = (end - time.perf_counter()) / (len(candidates) - index + 1)
            before, after, block = _against(best, model, {**values, option: value}, feed, share)
            trial = Trial(option, value, 1e3 * before, 1e3 * after, taken=before >= GAIN * after)
            if trial.taken:
                values[option], best = value, block
        trials.append(trial)
    kept, default_ms, best_ms = _confirmed(model, feed, given, values, (default, best), end)
    return Settings(os.fspath(model), kept, default_ms, best_ms, tuple(trials))


def _candidates(threads: int | None) -> Iterator[tuple[str, Value]]:
    """Return every option with another value than the default, in the order of `DEFAULTS`."""
    counts = dict.fromkeys((1, physical_cores(), logical_cores())) if threads is None else ()
    yield from (("intra_op_num_threads", count) for count in counts)
    yield from ((option, value) for option in DEFAULTS for value in CANDIDATES.get(option, ()))


def _idle(option: str, values: Values, threads: int | None) -> str:
    """Say why an option would change nothing, or what was not asked for; empty where it is to be tried."""
    if option == "session.intra_op.allow_spinning" and values.get("intra_op_num_threads") == 1:
        return "one thread waits for no other"
    if option == "execution_mode" and threads is not None:
        return "it would take further threads"
    return ""


def _against(
    best: Block, model: str | os.PathLike[str], values: Values, feed: Mapping[str, Array], seconds: float
) -> tuple[float, float, Block]:
    """Time the best session against one with `values`; return the least seconds of each, and the runs of the other."""
    if "session.set_denormal_as_zero" not in values:
        other = session_block(model, values, feed)
        before, after = race([best, other], seconds=seconds)
        return before, after, other
    plain = {option: value for option, value in values.items() if option != "session.set_denormal_as_zero"}
    before, after = _race_apart(model, (plain, values), feed, seconds)
    return before, after, best


def _race_apart(
    model: str | os.PathLike[str], both: Sequence[Values], feed: Mapping[str, Array], seconds: float
) -> list[float]:
    """Time sessions in processes of their own.

    The first session of a process decides for good whether the thread that calls it keeps denormals.
    """
    with TimedProcess(model, both[0], feed) as first, TimedProcess(model, both[1], feed) as second:
        return race([first.block, second.block], seconds=seconds)


def _confirmed(
    model: str | os.PathLike[str],
    feed: Mapping[str, Array],
    given: Values,
    values: Values,
    blocks: tuple[Block, Block],
    end: float,
) -> tuple[Values, float, float]:
    """Measure all that was taken against the defaults; return what holds, with milliseconds of both."""
    seconds = end - time.perf_counter()
    if values == given:
        (default,) = race([blocks[0]], seconds=min(seconds, 1.0))
        return given, 1e3 * default, 1e3 * default
    if "session.set_denormal_as_zero" in values:
        default, best = _race_apart(model, (given, values), feed, seconds)
    else:
        default, best = race(blocks, seconds=seconds)
    return (values, 1e3 * default, 1e3 * best) if default >= GAIN * best else (given, 1e3 * default, 1e3 * default)


def race(blocks: Sequence[Block], *, seconds: float) -> list[float]:
    """Return the least time of a run of each, in seconds; they run in turns, in blocks of `BLOCK` seconds.

    In single turns the spinning threads of one session would take the cores from the next one; a block outlasts them,
    and a minimum does not see its first runs.
    """
    counts = [max(1, min(MOST_RUNS, int(BLOCK / max(1e-6, *block(1), *block(1))))) for block in blocks]
    least = [float("inf")] * len(blocks)
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < LEAST_BLOCKS or time.perf_counter() < end:
        for index in range(len(blocks)) if rounds % 2 == 0 else reversed(range(len(blocks))):
            least[index] = min(least[index], *blocks[index](counts[index]))
        rounds += 1
    return least

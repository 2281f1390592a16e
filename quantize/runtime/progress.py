"""Report the progress of long work, and measure the time of its stages."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

GRACE = 3.0
"""Seconds of work without a line: a short command prints its result only."""
EVERY = 10.0
"""Seconds between two lines about one stage."""
TICK = 1.0
LONG = 10.0
"""Work that will take fewer seconds is not announced."""
OFF = 2.0
"""By this factor an announced time may be wrong before it is corrected."""
SLOWEST = 3  # stages in an announcement
MINUTES = 120.0  # from here on, times are in minutes
CALIBRATE, OBSERVE_MEANS = "calibrate", "observe means"
TRY_TENSORS, TRY_WEIGHTS, CORRECT_WEIGHTS = "try tensors alone", "try weights alone", "correct weights"
MEASURE_COSTS, COMPARE_PLACEMENTS = "measure costs", "compare placements"
COMPARE, TIME = "compare", "time"
"""The stages that take most of the time: a forecast names them."""
CHECK, CHOOSE, WRITE = "check data", "choose ranges", "write model"
"""Stages between those that count: the data are searched for mistakes, the rule gives ranges, and a plan is written
into a model. Of large graphs each takes seconds."""
BRIEFLY = "time briefly"
"""The stage that finds out whether a model is clearly slower than float, before its weights are corrected."""
INSPECT = "inspect"
"""The stage that looks at the chosen model and writes it."""
RELIEF = "units to float"
"""The stage that makes models with more units in float; each goes through other stages."""
UNITS: Mapping[str, str] = {
    CALIBRATE: "samples",
    OBSERVE_MEANS: "samples",
    COMPARE: "samples",
    "log": "samples",
    TRY_TENSORS: "tensors",
    TRY_WEIGHTS: "units",
    CORRECT_WEIGHTS: "units",
    MEASURE_COSTS: "plans",
}
"""What the numbers of a stage count."""

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with a stage, how much of it is done, and how much there is (None: unknown)."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """How long work will take, about.

    Attributes:
        stages: The seconds of each stage that is sure to come, by the name of its group.
        fallback: The seconds of what follows if units must become float; 0 if nothing can follow.
        low_effort: The seconds of the stages with low effort; infinite if the effort is low already.
    """

    stages: Mapping[str, float] = field(default_factory=dict)
    fallback: float = 0.0
    low_effort: float = math.inf

    @property
    def seconds(self) -> float:
        """The seconds of all stages that are sure to come."""
        return math.fsum(self.stages.values())


def silent(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""


class Stopwatch:
    """A `Progress` that measures the time of each stage and passes the calls on."""

    def __init__(self, progress: Progress = silent) -> None:
        self._progress = progress
        self._seconds: dict[str, float] = {}
        self._stage, self._began = "prepare", time.monotonic()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Start the clock of a new stage, and pass the call on."""
        if stage != self._stage:
            self._lap()
            self._stage = stage
        self._progress(stage, done, total)

    def expect(self, forecast: Forecast) -> None:
        """Pass on how long the work will take, about."""
        expect(self._progress, forecast)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage so far, in the order in which the stages began."""
        self._lap()
        return {stage: round(spent, 3) for stage, spent in self._seconds.items()}

    def _lap(self) -> None:
        now = time.monotonic()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._began
        self._began = now


def group(stage: str) -> str:
    """Return the stage without its detail: ``simplify`` of ``simplify: fold_constants``."""
    return stage.partition(": ")[0]


def expect(progress: Progress, forecast: Forecast) -> None:
    """Pass a forecast to a `Progress` that has a method for it."""
    tell = getattr(progress, "expect", None)
    if tell is not None:
        tell(forecast)


class Adding:
    """A `Progress` that shows several runs of one stage, one behind the other, as one: their numbers add up."""

    def __init__(self, progress: Progress) -> None:
        """Begin without a run."""
        self._progress = progress
        self._stage, self._done, self._total, self._before = "", 0, 0, 0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Pass the progress on, behind that of earlier runs of the stage."""
        if stage != self._stage:
            self._stage, self._before = stage, 0
        elif done < self._done:
            self._before += self._total
        self._done, self._total = done, total or 0
        self._progress(stage, self._before + done, None if total is None else self._before + total)

    def expect(self, forecast: Forecast) -> None:
        """Pass on how long the work will take, about."""
        expect(self._progress, forecast)


class Lines:
    """A `Progress` in plain lines, for logs: one for each group of stages, and one whenever `EVERY` seconds passed.

    Work that ends within `GRACE` seconds prints nothing.
    """

    def __init__(self, tell: Callable[[str], None], *, grace: float | None = None, detailed: bool = False) -> None:
        """Print nothing yet.

        Args:
            tell: Prints a line.
            grace: Seconds without a line; None for `GRACE`.
            detailed: Whether each stage gets a line, and not each group of stages only.
        """
        self._tell, self._detailed = tell, detailed
        self._grace = GRACE if grace is None else grace
        self._began = self._last = time.monotonic()
        self._stage, self._since, self._done = "", self._began, 0
        self._total: int | None = None
        self._told: set[str] = set()
        self._spent: dict[str, float] = {}
        self._relief = self._began  # when the first model with more units in float was begun
        self._made, self._made_at = 0, self._began  # how many of them are done, and since when
        self._expected: Mapping[str, float] = {}
        self._whole = 0.0  # the seconds that were announced last
        self._lock = threading.Lock()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Take the progress, and print a new stage."""
        with self._lock:
            now, name = time.monotonic(), stage if self._detailed else group(stage)
            again = name == self._stage and done < self._done  # the time and the rest are those of this round
            if name != self._stage or again:
                self._leave(now)
                self._stage, self._since = name, now
            if name == RELIEF and not done:
                self._relief = now
            if name == RELIEF and done != self._made:
                self._made, self._made_at = done, now
            self._done, self._total = done, total
            self._begin(now)

    def expect(self, forecast: Forecast) -> None:
        """Take how long the work will take, about; print it if that is long."""
        with self._lock:
            spent = self._spent_by(time.monotonic())
            self._expected = {name: took + spent.get(name, 0.0) for name, took in forecast.stages.items()}
            text = announcement(forecast)
            if text:
                self._whole = time.monotonic() - self._began + forecast.seconds
                self._print(text)

    def tick(self) -> None:
        """Print where the work is, if nothing was printed for `EVERY` seconds."""
        with self._lock:
            now = time.monotonic()
            self._begin(now)
            if self._stage in self._told and now - self._last >= EVERY:
                self._print(self._state(now))

    def _begin(self, now: float) -> None:
        """Print the name of a stage when it begins, or when the grace ends."""
        if self._stage and self._stage not in self._told and now - self._began >= self._grace:
            self._told.add(self._stage)
            self._print(self._state(now))

    def _leave(self, now: float) -> None:
        """Add the time of the stage that ends."""
        self._spent[self._stage] = self._spent.get(self._stage, 0.0) + now - self._since

    def _print(self, text: str) -> None:
        """Print a line with the seconds since the begin."""
        self._last = time.monotonic()
        self._tell(f"{self._last - self._began:8.2f} s  {text}")

    def _state(self, now: float) -> str:
        """Return the stage, what is done of it, its time and the rest, and a correction of the announced time."""
        spent, total = now - self._since, self._total
        parts = [f"{self._done} of {total} {UNITS.get(self._stage, '')}".rstrip()] if total else []
        left = self._left(spent) if self._stage != RELIEF else None
        if spent >= 1:
            parts.append(duration(spent))
            parts += [f"about {duration(left)} left"] if left is not None else []
            parts += self._of_relief(now) if self._stage == RELIEF else []
        text = f"{self._stage}: {', '.join(parts)}" if parts else self._stage
        return text + self._corrected(now, left)

    def _of_relief(self, now: float) -> list[str]:
        """Return what the models with more units in float will still take, as text; empty if nothing is known of it.

        The models that are made tell it: all of them are seldom needed. Before the first one the forecast does.
        """
        if self._total and self._made:
            each, rest = (self._made_at - self._relief) / self._made, self._total - self._made
            left = max(each * rest - (now - self._made_at), each * (rest - 1))
            return [f"at most about {duration(left)} left"]
        left = math.fsum(self._rest(now).values())
        return [f"about {duration(left)} left"] if left >= 1 else []

    def _spent_by(self, now: float) -> dict[str, float]:
        """Return the seconds of each stage, with those of the stage that is not done."""
        return {**self._spent, self._stage: self._spent.get(self._stage, 0.0) + now - self._since}

    def _rest(self, now: float) -> dict[str, float]:
        """Return what is left of the expected seconds of each stage."""
        spent = self._spent_by(now)
        return {name: max(took - spent.get(name, 0.0), 0.0) for name, took in self._expected.items()}

    def _left(self, spent: float) -> float | None:
        """Return the seconds that the stage will still take; None if nothing is known of them."""
        if self._total and self._done and spent >= 1:
            return spent * max(self._total - self._done, 0) / self._done
        return None

    def _corrected(self, now: float, left: float | None) -> str:
        """Return what the whole work takes, if that is twice or half of what was announced last; else nothing."""
        if not self._whole or now - self._began < EVERY:
            return ""
        rest = self._rest(now)
        if left is not None:
            rest[self._stage] = left
        whole = now - self._began + math.fsum(rest.values())
        if self._whole / OFF < whole < self._whole * OFF:
            return ""
        before, self._whole = self._whole, whole
        return f" (about {duration(whole)} in all, not {duration(before)})"


def announcement(forecast: Forecast) -> str:
    """Return how long work will take, about, with the slowest stages; empty if that is not `LONG`.

    It says how long the work may take if units must become float. Of minutes, it says how long low effort takes, if
    that is less than half.
    """
    stages, whole, low = forecast.stages, forecast.seconds, forecast.low_effort
    if whole < LONG:
        return ""
    slowest = sorted(stages, key=stages.__getitem__, reverse=True)[:SLOWEST]
    most = f", up to {duration(whole + forecast.fallback)} if units must become float" if forecast.fallback else ""
    text = f"about {duration(whole)} to go{most}: {', '.join(f'{name} {duration(stages[name])}' for name in slowest)}"
    return f"{text}; about {duration(low)} with low effort" if whole >= MINUTES and 2 * low < whole else text


def duration(seconds: float) -> str:
    """Return seconds as text.

    >>> duration(76.4), duration(3000)
    ('76 s', '50 min')
    """
    return f"{seconds:.0f} s" if seconds < MINUTES else f"{seconds / 60:.0f} min"


@contextmanager
def ticking(lines: Lines) -> Iterator[Lines]:
    """Let a thread call `Lines.tick` while the block runs."""
    done = threading.Event()

    def run() -> None:
        with suppress(OSError, ValueError):  # nobody reads stderr, or it is closed
            while not done.wait(TICK):
                lines.tick()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        done.set()
        thread.join()

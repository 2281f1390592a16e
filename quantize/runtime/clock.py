"""Time functions in turns, and say how sure the ratios of their times are.

One thread is timed by its CPU time: the runtime computes in the thread that calls it, and processes beside it make it
wait, but hardly compute longer. Two processors that ran four more processes made a run of 9.6 ms last 47 ms, the least
of 60; its least CPU time was 10.2 ms. Runs with several threads are timed by wall time: their CPU time includes the
time for which threads wait for each other.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

Run: TypeAlias = Callable[[], object]
Clock: TypeAlias = Literal["cpu", "wall"]

WARM_UP = 3
TURN, LEAST_TURN, TURN_SECONDS = 4, 2, 0.03
"""The runs of a turn: four, or only two if these take longer than `TURN_SECONDS`. A model that is served runs after
itself, and finds its weights in the caches; behind a larger model its first runs are slower. With one run in a turn and
the order reversed every round, of several models only the first and the last one would run after themselves."""
MOST_ROUNDS = 75
SLOW = 0.5  # seconds: a run this long needs one warm-up run and few rounds
LEAST_ROUNDS, FEW_ROUNDS = 5, 3  # the minimum of rounds, and the minimum for slow runs
MOST_RUNS = 200  # of one block
PARTS = 4  # parts of the runs of a measurement; each part alone gives a ratio
BUSY = 0.1
"""The share of their wall time for which runs of one thread wait for a processor, above which the machine is busy."""
SHARED = 0.1
"""The least uncertainty of ratios of CPU times on a busy machine. Processes share caches, and slow one model down more
than another: beside four processes, the speed-up of a ResNet-20 changed by 10 % though its parts agreed to 5 %."""
SURE = 0.05
"""The greatest uncertainty of a measurement that is not repeated, and that needs no remark."""
UNKNOWN = 9.99  # the greatest uncertainty
AGAIN = 2  # more measurements, each as long as the first, of what is unsure


@dataclass(frozen=True, slots=True)
class Times:
    """The times of the runs of one function.

    Attributes:
        seconds: The time of each run in seconds, in order.
        clock: What `seconds` counts: CPU time of the thread, or wall time.
        wall: The wall time of all runs together, in seconds; 0 if only `seconds` is known.
    """

    seconds: tuple[float, ...]
    clock: Clock = "wall"
    wall: float = 0.0

    @property
    def least(self) -> float:
        """The minimum in seconds."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The median in seconds."""
        return statistics.median(self.seconds)

    @property
    def waited(self) -> float:
        """The share of the wall time for which a thread that is timed by its CPU time did not run, 0..1."""
        return max(1 - math.fsum(self.seconds) / self.wall, 0.0) if self.clock == "cpu" and self.wall else 0.0

    def and_more(self, other: Times) -> Times:
        """Return these runs and those of another measurement of the same function."""
        return Times(self.seconds + other.seconds, self.clock, self.wall + other.wall)

    def parts(self) -> list[float]:
        """Return the minimum of each of `PARTS` parts of the runs; of each run, if there are fewer runs."""
        count = min(PARTS, len(self.seconds))
        ends = [round(len(self.seconds) * part / count) for part in range(count + 1)]
        return [min(self.seconds[start:end]) for start, end in pairwise(ends)]


def clock_of(threads: int) -> Clock:
    """Return the clock for runs with a number of threads; 0 is the runtime's choice.

    Windows counts the CPU time of a thread in steps of 16 ms.
    """
    return "cpu" if threads == 1 and sys.platform != "win32" else "wall"


def time_run(run: Run, *, seconds: float, threads: int = 0) -> Times:
    """Call a function until `seconds` have passed, at least `FEW_ROUNDS` times, and return the times.

    A function that takes longer than `SLOW` is called once.

    Args:
        run: The function to time.
        seconds: How long it is timed; 0 for one turn.
        threads: Threads inside one operator. With one thread CPU time counts, else wall time.
    """
    clock = clock_of(threads)
    now = time.thread_time if clock == "cpu" else time.perf_counter
    times = _block(run, 0.0, now, 1)
    if seconds and times[0][1] <= SLOW:
        times += _block(run, seconds, now, FEW_ROUNDS)
    return Times(tuple(spent for spent, _ in times), clock, math.fsum(wall for _, wall in times))


def interleave(runs: Sequence[Run], *, seconds: float = 2.0, block: float = 0.0, threads: int = 0) -> list[Times]:
    """Call each of `runs` in turn, up to `TURN` times, until `seconds` have passed, and return the times of each.

    The order is reversed in every second round, because a run finds caches that the function before it warmed.

    Args:
        runs: The functions to time.
        seconds: How long all of them are timed, without the runs that warm up.
        block: The seconds for which one function is called before the next one has its turn; 0 for `TURN` calls.
        threads: Threads inside one operator. With one thread CPU time counts, else wall time.
    """
    clock = clock_of(threads)
    now = time.thread_time if clock == "cpu" else time.perf_counter
    times: list[list[tuple[float, float]]] = [[] for _ in runs]
    slow = False
    for run in runs:
        start = time.perf_counter()
        for _ in range(WARM_UP):
            run()
            slow = slow or time.perf_counter() - start > SLOW
            if slow:
                break
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < (FEW_ROUNDS if slow else LEAST_ROUNDS) or (time.perf_counter() < end and rounds < MOST_ROUNDS):
        order = range(len(runs)) if rounds % 2 == 0 else reversed(range(len(runs)))
        for index in order:
            times[index] += _block(runs[index], block, now, 1 if slow else LEAST_TURN)
        rounds += 1
    return [Times(tuple(spent for spent, _ in each), clock, math.fsum(wall for _, wall in each)) for each in times]


def _block(run: Run, seconds: float, now: Callable[[], float], least: int) -> list[tuple[float, float]]:
    """Call a function until `seconds` have passed, `least` times at least; return each time by `now` and wall time.

    Without seconds it is called `TURN` times, but no more after `TURN_SECONDS`.
    """
    times: list[tuple[float, float]] = []
    length, most = (seconds, MOST_RUNS) if seconds else (TURN_SECONDS, TURN)
    begin = time.perf_counter()
    while len(times) < least or (time.perf_counter() - begin < length and len(times) < most):
        began, start = time.perf_counter(), now()
        run()
        spent, wall = now() - start, time.perf_counter() - began
        times.append((spent or wall, wall))  # the clock of a thread may stand still for a run of some microseconds
    return times


def race(runs: Sequence[Run], *, seconds: float = 2.0, threads: int = 0, settle: bool = False) -> list[Times]:
    """Time functions in turn as `interleave` does, and again, up to `AGAIN` times, until their ratios are sure.

    Args:
        runs: The functions.
        seconds: The time for all of them together.
        threads: Threads inside one operator.
        settle: Whether they are also timed again while the second one is faster than all others, but by less than the
            uncertainty of the ratios.
    """
    found = interleave(runs, seconds=seconds, threads=threads)
    for _ in range(AGAIN):
        if uncertainty(found) <= SURE and not (settle and _is_open(found)):
            break
        more = interleave(runs, seconds=seconds, threads=threads)
        found = [one.and_more(two) for one, two in zip(found, more, strict=True)]
    return found


def _is_open(times: Sequence[Times]) -> bool:
    """Return whether the second of several functions is the fastest, but by no more than the uncertainty."""
    first, second, *others = times
    gain = ratio(min(each.least for each in (first, *others)), second.least)
    return 1 < gain <= 1 + uncertainty(times)


def uncertainty(times: Sequence[Times]) -> float:
    """Return how far the ratios of least times may be from the truth: 0.05 for 5 % more or less.

    Each function is compared with the first one. A single one is compared with itself: its least time may be too long.

    The runs in each of four parts of the measurement give a ratio of their own. The uncertainty is half the distance
    between the least and the greatest of them, on a logarithmic scale. Of wall times, the ratio of the medians must be
    the ratio of the minima, too: where a long run never has a processor to itself, but a short one does, all parts
    agree on a wrong ratio. Ratios of CPU times are unsure by `SHARED` at least on a busy machine.
    """
    first, *others = times
    if not others:
        return _distance(first.parts())
    return max(_of_ratio(first, other) for other in others)


def doubt(uncertainty: float) -> str:
    """Return ``"machine busy, +-8 %"`` for an uncertainty above `SURE`, else an empty text."""
    return f"machine busy, +-{100 * uncertainty:.0f} %" if uncertainty > SURE else ""


def _of_ratio(one: Times, other: Times) -> float:
    """Return the uncertainty of a ratio of least times."""
    count = min(len(one.parts()), len(other.parts()))
    ratios = [ratio(a, b) for a, b in zip(one.parts()[:count], other.parts()[:count], strict=True)]
    found = _distance(ratios)
    if "cpu" in (one.clock, other.clock):
        return max(found, SHARED) if max(one.waited, other.waited) > BUSY else found
    return max(found, _distance([ratio(one.least, other.least), ratio(one.median, other.median)]))


def _distance(values: Sequence[float]) -> float:
    """Return how many times greater than their geometric middle the greatest value is, minus 1; at most `UNKNOWN`."""
    return min(math.sqrt(ratio(max(values), min(values))) - 1, UNKNOWN)


def ratio(time: float, least: float) -> float:
    """Return how many times a least time a time is; two times of 0 are equal."""
    return time / least if least else math.inf if time else 1.0

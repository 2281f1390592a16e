"""Latency of two models as a ratio. Their runs alternate, so a change of the machine's speed affects both."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WARM_UP = 3
MOST_ROUNDS = 300
SLOW = 0.5  # seconds: a run this long needs one warm-up run and few rounds
LEAST_ROUNDS, FEW_ROUNDS = 5, 3  # the minimum of rounds, and the minimum for slow runs
MOST_RUNS = 200  # of one block


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one run of each of two models.

    Attributes:
        float_ms: Minimum time of the float model.
        int8_ms: Minimum time of the INT8 model.
        float_median_ms: Median time of the float model.
        int8_median_ms: Median time of the INT8 model.
        runs: Runs of each.
        batch: Items per run.
    """

    float_ms: float
    int8_ms: float
    float_median_ms: float
    int8_median_ms: float
    runs: int
    batch: int = 1

    @property
    def speedup(self) -> float:
        """Time of the float model over time of the INT8 model, both minima."""
        return self.float_ms / self.int8_ms

    @property
    def float_rate(self) -> float:
        """Items per second of the float model."""
        return 1e3 * self.batch / self.float_ms

    @property
    def int8_rate(self) -> float:
        """Items per second of the INT8 model."""
        return 1e3 * self.batch / self.int8_ms


def interleave(
    runs: Sequence[Callable[[], object]],
    *,
    seconds: float = 2.0,
    block: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Call each of `runs` in turn until `seconds` have passed, and return the times of each in seconds.

    The order is reversed in every second round, because the second run finds caches that the first one warmed.

    Args:
        runs: The functions to time.
        seconds: How long all of them are timed, without the runs that warm up.
        block: The seconds for which one function is called before the next one has its turn; 0 for a single call.
        clock: The clock of the times; ``time.thread_time`` counts the CPU seconds of runs with one thread.
    """
    times: list[list[float]] = [[] for _ in runs]
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
            times[index] += _block(runs[index], block, clock)
        rounds += 1
    return times


def _block(run: Callable[[], object], seconds: float, clock: Callable[[], float]) -> list[float]:
    """Call a function until `seconds` have passed, at least once, and return the times in seconds."""
    times: list[float] = []
    begin = time.perf_counter()
    while not times or (time.perf_counter() - begin < seconds and len(times) < MOST_RUNS):
        start = clock()
        run()
        times.append(clock() - start)
    return times


def latency(
    run_float: Callable[[], object], run_int8: Callable[[], object], *, batch: int = 1, seconds: float = 2.0
) -> Latency:
    """Time a float run and an INT8 run in turn."""
    first, second = interleave([run_float, run_int8], seconds=seconds)
    return summary(first, second, batch=batch)


def summary(first: Sequence[float], second: Sequence[float], *, batch: int) -> Latency:
    """Return minima and medians of the times of a float and of an INT8 run, given in seconds."""
    return Latency(
        float_ms=1e3 * min(first),
        int8_ms=1e3 * min(second),
        float_median_ms=1e3 * statistics.median(first),
        int8_median_ms=1e3 * statistics.median(second),
        runs=min(len(first), len(second)),
        batch=batch,
    )


def ratio(time: float, least: float) -> float:
    """Return how many times a least time a time is; two times of 0 are equal."""
    return time / least if least else math.inf if time else 1.0


def latency_json(latency: Latency) -> dict[str, Any]:
    """Return a latency with its speed-up and throughput as plain JSON values."""
    return {
        "float_ms": latency.float_ms,
        "int8_ms": latency.int8_ms,
        "speedup": latency.speedup,
        "float_median_ms": latency.float_median_ms,
        "int8_median_ms": latency.int8_median_ms,
        "batch": latency.batch,
        "runs": latency.runs,
        "float_items_per_second": latency.float_rate,
        "int8_items_per_second": latency.int8_rate,
    }

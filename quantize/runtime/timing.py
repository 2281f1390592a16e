"""Latency of two models as a ratio. Their runs alternate, so a change of the machine's speed affects both."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

WARM_UP = 3
MOST_ROUNDS = 300
SLOW = 0.5  # seconds: a run this long needs one warm-up run and few rounds
LEAST_ROUNDS, FEW_ROUNDS = 5, 3  # the minimum of rounds, and the minimum for slow runs
MOST_RUNS = 200  # of one block


@dataclass(frozen=True, slots=True)
class Regime:
    """How a decoder runs: a prompt of many tokens with an empty cache, or one token with the tokens before it.

    Attributes:
        name: ``prefill`` or ``step``.
        tokens: The number of new tokens of an item.
        past: The number of tokens in the cache.
    """

    name: str
    tokens: int
    past: int

    def __str__(self) -> str:
        """Return ``"prefill of 128 tokens"`` or ``"step after 128 tokens"``."""
        return f"{self.name} after {self.past} tokens" if self.past else f"{self.name} of {self.tokens} tokens"


def load_name(batch: int, regime: Regime | None) -> str:
    """Return the name of what is timed: ``"batch 4"``, or the regime, with the batch if it is not 1."""
    if regime is None:
        return f"batch {batch}"
    return f"{regime}, batch {batch}" if batch > 1 else str(regime)


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
        simple_ms: Minimum time of the simplified float model; None if it was not timed.
        regime: The regime of a decoder; None for other models.
    """

    float_ms: float
    int8_ms: float
    float_median_ms: float
    int8_median_ms: float
    runs: int
    batch: int = 1
    simple_ms: float | None = None
    regime: Regime | None = None

    @property
    def name(self) -> str:
        """What was timed: ``"batch 4"``, or the regime."""
        return load_name(self.batch, self.regime)

    @property
    def items(self) -> int:
        """Items per run; of a decoder, new tokens."""
        return self.batch * (self.regime.tokens if self.regime else 1)

    @property
    def speedup(self) -> float:
        """Time of the float model over time of the INT8 model, both minima."""
        return self.float_ms / self.int8_ms

    @property
    def gain(self) -> float:
        """Time of the faster float model, simplified or not, over time of the INT8 model."""
        return min(self.float_ms, self.simple_ms or math.inf) / self.int8_ms

    @property
    def float_rate(self) -> float:
        """Items per second of the float model; of a decoder, tokens."""
        return 1e3 * self.items / self.float_ms

    @property
    def int8_rate(self) -> float:
        """Items per second of the INT8 model; of a decoder, tokens."""
        return 1e3 * self.items / self.int8_ms


def interleave(
    runs: Sequence[Callable[[], object]],
    *,
    seconds: float = 2.0,
    block: float = 0.0,
    clock: Callable[[], float] | None = None,
) -> list[list[float]]:
    """Call each of `runs` in turn until `seconds` have passed, and return the times of each in seconds.

    The order is reversed in every second round, because the second run finds caches that the first one warmed.

    Args:
        runs: The functions to time.
        seconds: How long all of them are timed, without the runs that warm up.
        block: The seconds for which one function is called before the next one has its turn; 0 for a single call.
        clock: The clock of the times, ``time.perf_counter`` if None; ``time.thread_time`` counts the CPU seconds of
            runs with one thread.
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
            times[index] += _block(runs[index], block, clock or time.perf_counter)
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


def latency(runs: Sequence[Callable[[], object]], *, batch: int = 1, seconds: float = 2.0) -> Latency:
    """Time a float run, an INT8 run and, if it is given, a run of the simplified float model in turn."""
    return summary(*interleave(runs, seconds=seconds), batch=batch)


def summary(
    first: Sequence[float], second: Sequence[float], plain: Sequence[float] | None = None, *, batch: int
) -> Latency:
    """Return minima and medians of the times of a float, an INT8 and a simplified float run, given in seconds."""
    return Latency(
        float_ms=1e3 * min(first),
        int8_ms=1e3 * min(second),
        float_median_ms=1e3 * statistics.median(first),
        int8_median_ms=1e3 * statistics.median(second),
        runs=min(len(first), len(second)),
        batch=batch,
        simple_ms=None if plain is None else 1e3 * min(plain),
    )


def ratio(time: float, least: float) -> float:
    """Return how many times a least time a time is; two times of 0 are equal."""
    return time / least if least else math.inf if time else 1.0


def latency_json(latency: Latency) -> dict[str, Any]:
    """Return a latency with its speed-up and throughput as plain JSON values; only decoders have a regime."""
    return {
        "float_ms": latency.float_ms,
        "int8_ms": latency.int8_ms,
        "speedup": latency.speedup,
        "simplified_float_ms": latency.simple_ms,
        "float_median_ms": latency.float_median_ms,
        "int8_median_ms": latency.int8_median_ms,
        "batch": latency.batch,
        "runs": latency.runs,
        "float_items_per_second": latency.float_rate,
        "int8_items_per_second": latency.int8_rate,
        **({} if latency.regime is None else {"regime": asdict(latency.regime)}),
    }

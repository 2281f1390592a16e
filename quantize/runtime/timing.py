"""Latency of two models as a ratio. Their runs alternate, so a change of the machine's speed affects both."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from .clock import Clock, Times, doubt, uncertainty


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


def load_name(batch: int | None, regime: Regime | None) -> str:
    """Return the name of what is timed: ``"batch 4"``, or the regime, with the batch if it is not 1.

    It is ``"one sample"`` where the number of items is not known.
    """
    if regime is None:
        return "one sample" if batch is None else f"batch {batch}"
    return f"{regime}, batch {batch}" if batch is not None and batch > 1 else str(regime)


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one run of each of two models.

    Attributes:
        float_ms: Minimum time of the float model.
        int8_ms: Minimum time of the INT8 model.
        float_median_ms: Median time of the float model.
        int8_median_ms: Median time of the INT8 model.
        runs: Runs of each.
        batch: Items per run; None where inputs have different numbers of rows, so that it is not known.
        simple_ms: Minimum time of the simplified float model; None if it was not timed.
        regime: The regime of a decoder; None for other models.
        uncertainty: How far the speed-up may be from the truth, as a share of it: 0.05 for 5 % more or less.
        clock: What the times are: CPU time of one thread, or wall time.
        shapes: The shapes of the inputs whose sizes the model leaves open; empty without any.
        sample: The sample and why it was timed, if that was not the usual one.
    """

    float_ms: float
    int8_ms: float
    float_median_ms: float
    int8_median_ms: float
    runs: int
    batch: int | None = 1
    simple_ms: float | None = None
    regime: Regime | None = None
    uncertainty: float = 0.0
    clock: Clock = "wall"
    shapes: str = ""
    sample: str = ""

    @property
    def name(self) -> str:
        """What was timed: ``"batch 4"``, or the regime."""
        return load_name(self.batch, self.regime)

    @property
    def items(self) -> int | None:
        """Items per run; of a decoder, new tokens; None if they are not known."""
        return None if self.batch is None else self.batch * (self.regime.tokens if self.regime else 1)

    @property
    def speedup(self) -> float:
        """Time of the float model over time of the INT8 model, both minima."""
        return self.float_ms / self.int8_ms

    @property
    def gain(self) -> float:
        """Time of the faster float model, simplified or not, over time of the INT8 model."""
        return min(self.float_ms, self.simple_ms or math.inf) / self.int8_ms

    @property
    def doubt(self) -> str:
        """``"machine busy, +-8 %"``; empty if the speed-up is sure."""
        return doubt(self.uncertainty)

    @property
    def float_rate(self) -> float | None:
        """Items per second of the float model; of a decoder, tokens; None if they are not known."""
        return None if self.items is None else 1e3 * self.items / self.float_ms

    @property
    def int8_rate(self) -> float | None:
        """Items per second of the INT8 model; of a decoder, tokens; None if they are not known."""
        return None if self.items is None else 1e3 * self.items / self.int8_ms


def summary(float_times: Times, int8_times: Times, simple: Times | None = None, *, batch: int | None) -> Latency:
    """Return minima and medians of the times of a float, an INT8 and a simplified float run."""
    return Latency(
        float_ms=1e3 * float_times.least,
        int8_ms=1e3 * int8_times.least,
        float_median_ms=1e3 * float_times.median,
        int8_median_ms=1e3 * int8_times.median,
        runs=min(len(float_times.seconds), len(int8_times.seconds)),
        batch=batch,
        simple_ms=None if simple is None else 1e3 * simple.least,
        uncertainty=uncertainty([each for each in (int8_times, float_times, simple) if each is not None]),
        clock=float_times.clock,
    )


def latency_json(latency: Latency) -> dict[str, Any]:
    """Return a latency with its speed-up as plain JSON values; regime, shapes and sample only where there are any."""
    return {
        "float_ms": latency.float_ms,
        "int8_ms": latency.int8_ms,
        "speedup": latency.speedup,
        "simplified_float_ms": latency.simple_ms,
        "float_median_ms": latency.float_median_ms,
        "int8_median_ms": latency.int8_median_ms,
        "batch": latency.batch,
        "runs": latency.runs,
        "clock": latency.clock,
        "uncertainty": latency.uncertainty,
        "float_items_per_second": latency.float_rate,
        "int8_items_per_second": latency.int8_rate,
        **({} if latency.regime is None else {"regime": asdict(latency.regime)}),
        **({"shapes": latency.shapes} if latency.shapes else {}),
        **({"sample": latency.sample} if latency.sample else {}),
    }

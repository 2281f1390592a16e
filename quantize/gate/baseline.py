"""The baseline of a pair of models: what was measured once, and how much of it may be lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ... import RequantError, UnknownNameError
from ..accuracy.drop import Allowance, parse_drop
from ..accuracy.metrics import Metric, Score
from ..runtime.machine import Machine

DEFAULTS: Mapping[str, str] = {"share": "0.005", "dB": "0.5", "": "1%"}
"""What may be lost of a metric, by its unit, where nothing is said."""


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How much worse than the baseline a model may be.

    Attributes:
        drops: The greatest drop of each metric, against the baseline's INT8 model.
        latency: Of the ratio of float to INT8 time, as a share, 0..1.
        mac_share: Of the share of multiply-accumulates in integer kernels, 0..1.
        size: Of the bytes of the file, as a share, 0..10.
        inputs: By how much of its standard deviation the mean or the deviation of an input may differ, 0..1.
        speedup: The least ratio of float to INT8 time on any machine; None for none.
    """

    drops: Mapping[str, Allowance] = field(default_factory=dict)
    latency: float = 0.15
    mac_share: float = 0.01
    size: float = 0.05
    inputs: float = 0.01
    speedup: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return them by name, as they are written."""
        plain = {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}
        return {**{name: str(drop) for name, drop in self.drops.items()}, **plain}


LIMITS: Mapping[str, float] = {"latency": 1.0, "mac_share": 1.0, "size": 10.0, "inputs": 1.0, "speedup": 1000.0}
"""The tolerances that are not of metrics, with the greatest value of each."""


def tolerances(given: Mapping[str, object], metrics: Iterable[Metric]) -> Tolerances:
    """Read tolerances by name; what is not named is at its default.

    Args:
        given: By name of a metric or key of `LIMITS`: a number, or a text as `parse_drop` reads it.
        metrics: The metrics that are judged.

    Raises:
        RequantError: A name is unknown, or a value is out of range.
    """
    known = {metric.name: metric for metric in metrics}
    for name in given:
        if name not in known and name not in LIMITS:
            raise UnknownNameError("tolerance", name, (*known, *LIMITS))
    drops = {
        name: _drop(name, given.get(name, DEFAULTS[metric.unit]), metric.unit == "share")
        for name, metric in known.items()
    }
    plain = {name: _limit(name, given[name], most) for name, most in LIMITS.items() if name in given}
    return Tolerances(drops, **plain)


def _drop(name: str, value: object, is_share: bool) -> Allowance:
    """Read how much of a metric may be lost."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RequantError(f'tolerance {name!r}: {value!r} is no drop; write 0.005 or "0.5%"')
    try:
        found = parse_drop(value if isinstance(value, str) else repr(value))
    except RequantError as error:
        raise RequantError(f"tolerance {name!r}: {error}") from error
    if (found.relative or is_share) and found.amount > 1:
        raise RequantError(f"tolerance {name!r}: {found} is out of range; more than all cannot be lost")
    return found


def _limit(name: str, value: object, most: float) -> float:
    """Read a tolerance that is a number, or a text of one: ``0.1`` or ``10%``."""
    number = _number(value)
    if number is None or not 0 <= number <= most:
        raise RequantError(f"tolerance {name!r}: {value!r} is out of range; it is a number from 0 to {most:g}")
    return number


def _number(value: object) -> float | None:
    """Return a number, or that which a text says, in percent too; None where there is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, str):
        return None
    percent = value.strip().endswith("%")
    try:
        return float(value.strip().removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------- what is measured


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a pair in a metric.

    Attributes:
        metric: The metric.
        before: The score of the float model.
        after: The score of the INT8 model, with what its items contribute.
        drop: How much worse the second is.
        interval: The 95 % confidence interval of the drop, paired by items; None where none is known.
    """

    metric: Metric
    before: float
    after: Score
    drop: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the values of an input are like.

    Attributes:
        mean: Their mean.
        std: Their standard deviation.
        least: The least of them.
        most: The greatest of them.
        channels: The mean of each channel, where there are a few.
    """

    mean: float
    std: float
    least: float
    most: float
    channels: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """What the data are.

    Attributes:
        description: In words.
        samples: How many samples were run.
        inputs: A digest of all inputs.
        labels: A digest of all labels; empty where there are none.
        statistics: By name of an input.
    """

    description: str
    samples: int
    inputs: str
    labels: str
    statistics: Mapping[str, Statistics]


@dataclass(frozen=True, slots=True)
class Speed:
    """How many times as fast as float INT8 is, in several rounds of runs in turns.

    Attributes:
        rounds: The ratio of least times of each round.
        float_ms: The least time of the float model.
        int8_ms: The least time of the INT8 model.
        batch: Items per run.
        machine: What was timed on.
    """

    rounds: tuple[float, ...]
    float_ms: float
    int8_ms: float
    batch: int
    machine: Machine

    @property
    def ratio(self) -> float:
        """The median of the rounds."""
        return float(np.median(self.rounds))


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant that a layer computes with.

    Attributes:
        dtype: The type in which it is stored.
        digest: Of its bytes.
        norm: The root of the sum of squares of what it stands for; of a scale, the mean.
        dead: How many output channels of it are zero throughout.
    """

    dtype: str
    digest: str
    norm: float
    dead: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """A node, and the constants that decide what it computes.

    Attributes:
        op: Its operator.
        constants: By role: ``weight``, ``weight scale``, ``bias``, ``output scale``, ...
        after: The layers whose results it reads; not kept in a lock file.
    """

    op: str
    constants: Mapping[str, Constant] = field(default_factory=dict)
    after: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of a pair of models.

    Attributes:
        float_model: The fingerprint of the float model.
        int8_model: The fingerprint of the INT8 model.
        scores: By name of a metric.
        data: What the data were.
        speed: How fast INT8 is; None where it was not asked for.
        mac_share: The share of multiply-accumulates in integer kernels, 0..1.
        kernels: By operator that ran: how many, and their microseconds.
        size: Bytes of the INT8 model with its external data.
        opset: The version of the standard operators of the INT8 model.
        stored: By name, the bytes of the constants that are not small.
        layers: By name of a node.
        noise: By name of a node, the signal to noise ratio in dB of its result on a few samples, as far as it is known.
    """

    float_model: str
    int8_model: str
    scores: Mapping[str, Scored]
    data: Seen
    speed: Speed | None
    mac_share: float
    kernels: Mapping[str, tuple[int, float]]
    size: int
    opset: int
    stored: Mapping[str, int] = field(default_factory=dict)
    layers: Mapping[str, Layer] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a pair is judged by.

    Attributes:
        measured: What was measured of it before.
        tolerances: How much of that may be lost.
        samples: How many samples were asked for; None for all.
        path: Where it was read, for messages.
    """

    measured: Measured
    tolerances: Tolerances
    samples: int | None = None
    path: str = "the baseline"

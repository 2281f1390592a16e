"""The baseline of a pair of models: its measurements, and the tolerances of each."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as brief
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from ... import RequantError, UnknownNameError
from ...system.numbers import decimal
from ..accuracy.drop import Allowance, parse_drop
from ..accuracy.metrics import Metric, Score
from ..runtime.machine import Machine
from ..runtime.runtimes import PLAIN, Setting

DEFAULTS: Mapping[str, str] = {"share": "0.005", "dB": "0.5", "": "1%"}
"""The default tolerance of a metric, by its unit."""
UPDATE = "--update (in Python: update=True)"
"""What makes a new baseline."""


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How much worse than the baseline a model may be.

    Attributes:
        drops: The greatest drop of each metric, compared with the baseline's INT8 model.
        latency: The greatest drop of the speed-up, relative to the baseline's, 0..1.
        mac_share: The greatest drop of the share of multiply-accumulates in integer kernels, 0..1.
        size: The greatest growth of the file, relative to the baseline's, 0..10.
        inputs: The greatest change of the mean or the standard deviation of an input, in standard deviations, 0..1.
        speedup: The least ratio of float to INT8 time on any machine; None for no limit.
    """

    drops: Mapping[str, Allowance] = field(default_factory=dict)
    latency: float = 0.15
    mac_share: float = 0.01
    size: float = 0.05
    inputs: float = 0.01
    speedup: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the tolerances by name, as the lock file has them."""
        plain = {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}
        return {**{name: str(drop) for name, drop in self.drops.items()}, **plain}


LIMITS: Mapping[str, float] = {"latency": 1.0, "mac_share": 1.0, "size": 10.0, "inputs": 1.0, "speedup": 1000.0}
"""The greatest value of each tolerance that is not for a metric."""


def tolerances(given: Mapping[str, object], metrics: Iterable[Metric]) -> Tolerances:
    """Return tolerances from values by name; missing names get their defaults.

    Args:
        given: By name of a metric or key of `LIMITS`, a number or a text for `parse_drop`.
        metrics: The metrics of the baseline.

    Raises:
        RequantError: A name is unknown, or a value is out of range.
    """
    known = {metric.name: metric for metric in metrics}
    for name in given:
        if name not in known and name not in LIMITS:
            raise UnknownNameError("tolerance", name, (*known, *LIMITS))
    drops = {name: _drop(metric, given.get(name, DEFAULTS[metric.unit])) for name, metric in known.items()}
    plain = {name: _limit(name, given[name], most) for name, most in LIMITS.items() if name in given}
    return Tolerances(drops, **plain)


def _drop(metric: Metric, value: object) -> Allowance:
    """Return the tolerance of a metric."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RequantError(f'tolerance {metric.name!r}: {brief(value)} is not a drop; write 0.005 or "0.5%"')
    try:
        drop = parse_drop(value if isinstance(value, str) else repr(value))
        drop.check_range(metric)
    except RequantError as error:
        raise RequantError(f"tolerance {metric.name!r}: {error}") from error
    return drop


def _limit(name: str, value: object, most: float) -> float:
    """Return a tolerance from a number or its text: ``0.1`` or ``10%``."""
    number = _number(value)
    if number is None or not 0 <= number <= most:
        raise RequantError(f"tolerance {name!r}: {brief(value)} is out of range; it is a number from 0 to {most:g}")
    return number


def _number(value: object) -> float | None:
    """Return a number from a number or its text, which may be in percent; None if the value is neither."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, str):
        return None
    percent = value.strip().endswith("%")
    number = decimal(value.strip().removesuffix("%"))
    return None if number is None else number / (100 if percent else 1)


# ------------------------------------------------------------------------------------------------- measurements


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a pair in a metric.

    Attributes:
        metric: The metric.
        before: The score of the float model.
        after: The score of the INT8 model, with the contribution of each item.
        drop: How much worse the INT8 model is.
        drop_interval: The 95 % confidence interval of the drop, paired by items; None if it is unknown.
    """

    metric: Metric
    before: float
    after: Score
    drop: float
    drop_interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of the values of an input.

    Attributes:
        mean: The mean.
        std: The standard deviation.
        least: The least value.
        most: The greatest value.
        channels: The mean of each channel, if there are only a few.
    """

    mean: float
    std: float
    least: float
    most: float
    channels: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DataSummary:
    """The data on which a pair of models was measured.

    Attributes:
        description: The data source in words.
        samples: Number of samples.
        inputs: A digest of all inputs.
        labels: A digest of all labels; empty without labels.
        statistics: Statistics by name of an input.
    """

    description: str
    samples: int
    inputs: str
    labels: str
    statistics: Mapping[str, Statistics]


Ratio: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed-up of INT8 over float. In each of several rounds, the two models run alternately.

    Attributes:
        rounds: The ratio of the least times of float and INT8 in each round.
        float_ms: The least time of the float model, in milliseconds.
        int8_ms: The least time of the INT8 model, in milliseconds.
        batch: Items per run.
        machine: The machine.
    """

    rounds: Annotated[tuple[Ratio, ...], msgspec.Meta(min_length=1)]
    float_ms: Ratio
    int8_ms: Ratio
    batch: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    machine: Machine

    @property
    def ratio(self) -> float:
        """The median ratio."""
        return float(np.median(self.rounds))


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant input of a layer.

    Attributes:
        dtype: The element type in the file.
        digest: A digest of its bytes.
        norm: The root of the sum of squares of the real values; for scales and zero points, the mean.
        dead: Number of output channels with only zeros.
    """

    dtype: str
    digest: str
    norm: float
    dead: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """A node with its constants.

    Attributes:
        op: The operator.
        constants: By role: ``weight``, ``weight scale``, ``bias``, ``output scale``, ...
        after: The layers whose outputs it reads; not in the lock file.
    """

    op: str
    constants: Mapping[str, Constant] = field(default_factory=dict)
    after: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of a pair of models.

    Attributes:
        float_model: The fingerprint of the float model.
        int8_model: The fingerprint of the INT8 model.
        scores: The scores by name of a metric.
        data: The data.
        speed: The speed-up of INT8; None if it was not measured.
        mac_share: The share of multiply-accumulates in integer kernels, 0..1.
        kernels: By operator, the number of executed kernels and their time in microseconds.
        size: Bytes of the INT8 model with its external data.
        opset: The opset of the INT8 model.
        stored: Bytes of each large constant by name.
        layers: The layers by name of a node.
        noise: The SQNR in dB of the output of a node on a few samples, by name of the node; some may be missing.
        setting: What ran the models.
        runtime: Its name and version, and the type of its float operators.
    """

    float_model: str
    int8_model: str
    scores: Mapping[str, Scored]
    data: DataSummary
    speed: Speed | None
    mac_share: float
    kernels: Mapping[str, tuple[int, float]]
    size: int
    opset: int
    stored: Mapping[str, int] = field(default_factory=dict)
    layers: Mapping[str, Layer] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    setting: Setting = PLAIN
    runtime: str = ""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The measurements that a pair is compared with.

    Attributes:
        measured: The measurements.
        tolerances: How much worse a model may be.
        samples: The number of samples that was requested; None for all.
        path: Path of the lock file, for messages.
    """

    measured: Measured
    tolerances: Tolerances
    samples: int | None = None
    path: str = "the baseline"

"""What came of a quantization, as a value and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..calibration.checks import Finding
from .accuracy.outputs import Accuracy, accuracy_json
from .job import Placement
from .options.efforts import CORRECTIONS, EFFORTS
from .runtime.timing import Latency, latency_json


@dataclass(frozen=True, slots=True)
class FloatNode:
    """A node that stayed float, and why."""

    name: str
    operator: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `quantize_model` did and measured.

    Attributes:
        output: Path of the model that was written.
        format: ``qdq`` or ``qoperator``.
        calibration: The range rule; ``log`` where a log gave the ranges.
        ranges: The file that the ranges are from, and what data it is of; empty where they are from the data.
        data: What the data were.
        int8_nodes: Nodes that compute or pass on integers, absorbed ones included.
        forms: Units of each form of int8, by implementation: ``u8->u8``, ``dynamic``, ``weight-only``, ...
        mac_share_int8: Share of the executed multiply-accumulates in integer kernels, 0..1.
        kernels: Executed kernels with multiply-accumulates, by operator.
        float_nodes: Nodes that stayed float.
        relieved: By unit, output channels whose weights lost range so that the target's 16-bit sums cannot saturate.
        accuracy: Float against INT8 on the calibration data; of no samples where nothing could be run.
        latency: Float against INT8, interleaved; None where nothing could be run.
        float_bytes: Size of the float model with its external data.
        int8_bytes: Size of the output with its external data.
        pipeline: What rewrote the model, in order: transforms in canonical form, and ``insert_qdq``, the emitter of
            the plan.
        notes: What went otherwise than asked or planned, a sentence each.
        verdict: Why the output is not what was asked for; empty when it is.
        rejected: Accuracy and latency of the INT8 model that was not kept, if any.
        findings: What the data that gave the ranges are found to be, warnings first.
        placement: How it was decided what is int8.
        search: The models that were tried for the sake of a metric; None where none was asked for.
        effort: How much was done for accuracy.
        corrections: What was corrected, by name.
        seconds: How long each stage took.
    """

    output: str
    format: str
    calibration: str
    ranges: str
    data: str
    int8_nodes: int
    forms: Mapping[str, int]
    mac_share_int8: float
    kernels: Mapping[str, int]
    float_nodes: tuple[FloatNode, ...]
    relieved: Mapping[str, int]
    accuracy: Accuracy
    latency: Latency | None
    float_bytes: int
    int8_bytes: int
    pipeline: str
    notes: tuple[str, ...] = ()
    verdict: str = ""
    rejected: tuple[Accuracy, Latency] | None = None
    findings: tuple[Finding, ...] = ()
    placement: Placement = field(default_factory=Placement)
    search: Frontier | None = None
    effort: str = ""
    corrections: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def predicted_ms(self) -> float | None:
        """The sum of the costs of the plan, in milliseconds; None where nothing was measured."""
        return self.placement.predicted_ms

    @property
    def speedup(self) -> float:
        """How many times faster the output is than the float model; NaN where nothing could be run."""
        return math.nan if self.latency is None else self.latency.speedup

    @property
    def samples(self) -> int:
        """Samples on which the two models were compared."""
        return self.accuracy.samples

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values; an infinite SQNR is null."""
        return {
            "output": self.output,
            "format": self.format,
            "verdict": self.verdict,
            "notes": list(self.notes),
            "findings": [finding.to_json() for finding in self.findings],
            "int8_nodes": self.int8_nodes,
            "forms": dict(self.forms),
            "mac_share_int8": self.mac_share_int8,
            "kernels": dict(self.kernels),
            "float_nodes": [{"name": n.name, "operator": n.operator, "reason": n.reason} for n in self.float_nodes],
            "relieved_channels": dict(self.relieved),
            **accuracy_json(self.accuracy),
            "latency": self.latency and latency_json(self.latency),
            "size": {"float_bytes": self.float_bytes, "int8_bytes": self.int8_bytes},
            "samples": self.samples,
            "calibration": self.calibration,
            "ranges": self.ranges,
            "data": self.data,
            "pipeline": self.pipeline,
            "placement": self.placement.to_json(),
            "effort": {
                "name": self.effort,
                "summary": EFFORTS[self.effort].summary if self.effort else "",
                "corrections": {name: CORRECTIONS[name].summary for name in self.corrections},
            },
            "seconds": dict(self.seconds),
            "search": self.search and self.search.to_json(),
            "rejected": self.rejected
            and {**accuracy_json(self.rejected[0]), "latency": latency_json(self.rejected[1])},
        }


@dataclass(frozen=True, slots=True)
class Point:
    """A model on the way.

    Attributes:
        price: What all noise was worth, as a share of the float model's run time.
        value: The score.
        speedup: How many times faster than the float model.
        int8_units: Units that compute in integers.
        kept: Whether it keeps the bar.
        digest: Of what its units become; equal plans are tried once.
    """

    price: float
    value: float
    speedup: float
    int8_units: int
    kept: bool
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return the point as plain JSON values; what is not finite is null."""
        return {name: None if value in (math.inf, -math.inf) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Frontier:
    """What a search found.

    Attributes:
        metric: The name of the metric.
        higher_is_better: Whether more of it is.
        before: The float model's score.
        bar: What had to be kept.
        points: Every model that was tried, the fastest first.
        best: The fastest one that keeps the bar; None where only the float model does.
        seconds: How long it took.
        done: Whether it ended by itself, not by the clock.
        same_data: The share of the evaluation data that is calibration data too, 0..1.
        interrupted: Whether the user ended it.
    """

    metric: str
    higher_is_better: bool
    before: float
    bar: float
    points: tuple[Point, ...] = ()
    best: Point | None = None
    seconds: float = 0.0
    done: bool = True
    same_data: float = 0.0
    interrupted: bool = False

    @property
    def frontier(self) -> tuple[Point, ...]:
        """The points than which no other is both faster and better, the fastest first."""
        return undominated(self.points, higher=self.higher_is_better)

    @property
    def most_accurate(self) -> Point | None:
        """The point with the best score; None where nothing was tried."""
        return max(self.points, key=lambda point: point.value if self.higher_is_better else -point.value, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the search as plain JSON values."""
        return {
            "metric": self.metric,
            "float": self.before if math.isfinite(self.before) else None,
            "bar": self.bar if math.isfinite(self.bar) else None,
            "reached": self.best is not None,
            "best": self.best and self.best.to_json(),
            "frontier": [point.to_json() for point in self.frontier],
            "tried": [point.to_json() for point in self.points],
            "seconds": self.seconds,
            "done": self.done,
            "same_data": self.same_data,
        }


def undominated(points: Sequence[Point], *, higher: bool) -> tuple[Point, ...]:
    """Return the points than which no other is at least as fast and as good, and more of one; the fastest first."""
    found: list[Point] = []
    sign = 1.0 if higher else -1.0
    for point in sorted(points, key=lambda each: (-each.speedup, -sign * each.value)):
        if not found or sign * point.value > sign * found[-1].value:
            found.append(point)
    return tuple(found)

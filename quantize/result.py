"""What came of a quantization, as a value and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..calibration.checks import Finding
from ..calibration.files import RangeFile
from .accuracy.outputs import Accuracy
from .figures import finite
from .options.efforts import CORRECTIONS, EFFORTS
from .placement import Placement
from .runtime.timing import Latency
from .steps.search import Frontier


@dataclass(frozen=True, slots=True)
class FloatNode:
    """A node that stayed float, and why."""

    name: str
    operator: str
    reason: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `calibrate_model` observed.

    Attributes:
        file: The ranges with what was seen, as `save_ranges` writes it and `Options` takes it.
        findings: What the data are found to be, warnings first.
    """

    file: RangeFile
    findings: tuple[Finding, ...] = ()


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


def accuracy_json(accuracy: Accuracy) -> dict[str, Any]:
    """Return agreement, what follows from it, and counts against labels, null where there are none; and SQNR."""
    labelled, agreed = accuracy.labelled, accuracy.agreement_interval
    return {
        "agreement": accuracy.agreement,
        "agreement_interval": agreed and list(agreed),
        "predicted_drop": accuracy.predicted_drop,
        "items": labelled and labelled.items,
        "float_accuracy": labelled and labelled.float_accuracy,
        "int8_accuracy": labelled and labelled.int8_accuracy,
        "broken": labelled and labelled.broken,
        "fixed": labelled and labelled.fixed,
        "p_value": labelled and labelled.p_value,
        "drop_interval": labelled and list(labelled.drop_interval),
        "sqnr_db": finite(accuracy.worst_sqnr_db),
        "sqnr_db_by_output": {name: finite(value) for name, value in accuracy.sqnr_db.items()},
    }


def latency_json(latency: Latency) -> dict[str, Any]:
    """Return a latency with its speed-up and throughput."""
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

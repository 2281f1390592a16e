"""What the stages of `quantize_model` hand to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..calibration.ranges import parse_rule
from ..calibration.session import ModelSource
from ..calibration.sources import Source
from ..transforms import StepResult
from ..transforms.plan import Plan
from ..transforms.qparams import QParams, Scheme
from .accuracy.outputs import Accuracy
from .model.files import Weights
from .options.efforts import EFFORTS, chosen
from .options.given_ranges import GivenRanges
from .options.options import Options
from .options.policy import Policy
from .options.selection import Selection
from .runtime.progress import Progress
from .runtime.timing import Latency


@dataclass(frozen=True)
class Job:
    """What all stages work on.

    Attributes:
        path: The float model's file.
        reference: The float model as the runtime runs it.
        folder: Where files of this run go; gone when it ends.
        simple: The simplified float model.
        float_source: The same as the runtime opens it.
        weights: How large its weights are.
        types: Operator types by node name before it was simplified.
        selection: What the user allows, by the names in `simple`.
        all_int8_plan: The plan with everything in int8 that might be; any later plan takes units away from it.
        steps: What each transform did that simplified the model.
        model_qparams: Parameters that pairs in the user's model gave to tensors.
        no_saturation: Whether the target adds products of 8 bits exactly.
        policy: What decides which units become int8.
        notes: What could not be done as asked so far.
        supply: What the user supplies instead of data, or on top of them.
        source: Data to calibrate and compare with; None when there are none at all.
        judged: Whether the data are the user's, so that they can tell a good model from a ruined one.
        options: What was asked.
        progress: Whom to tell.
    """

    path: Path
    reference: ModelSource
    folder: Path
    simple: ir.Model
    float_source: ModelSource
    weights: Weights
    types: Mapping[str, str]
    selection: Selection
    all_int8_plan: Plan
    steps: tuple[StepResult, ...]
    model_qparams: Mapping[str, QParams]
    no_saturation: bool
    policy: Policy
    notes: tuple[str, ...]
    supply: GivenRanges
    source: Source | None
    judged: bool
    options: Options
    progress: Progress

    @property
    def scheme(self) -> Scheme:
        """The integer types."""
        return self.options.scheme

    @property
    def corrections(self) -> frozenset[str]:
        """What makes the INT8 model more accurate, by name."""
        return chosen(self.options.effort, self.options.corrections)

    @property
    def static(self) -> bool:
        """Whether ranges are given, or can be taken from the data."""
        return self.judged or self.supply.ranges is not None

    @property
    def reserved(self) -> frozenset[str]:
        """Tensors of which the user says something, by ranges or by pairs in the model."""
        return frozenset({*self.model_qparams, *self.supply.overrides.tensors})

    def asked(self) -> dict[str, Any]:
        """Return what shapes the model, as plain JSON values, without what is at its default."""
        asked, calibration = self.options.to_json(), self.supply.calibration
        if calibration != str(parse_rule(EFFORTS[self.options.effort].rule)):
            asked["calibration"] = calibration
        overrides = self.supply.overrides.to_json()
        return {**asked, "overrides": overrides} if overrides else asked


@dataclass(frozen=True, slots=True)
class Evidence:
    """What each tensor alone does to the outputs in uint8.

    Attributes:
        kept_float: Tensors that must not be uint8, with the reason.
        noise: By tensor, the power of the noise at the worst output over that of the output; empty where nobody looked.
    """

    kept_float: Mapping[str, str] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """How a plan was found.

    Attributes:
        how: ``rules``, ``estimated``, ``measured``, ``all`` or ``plan``.
        predicted_ms: The sum of the costs of the plan, in milliseconds; None where nothing was measured.
        tried: Milliseconds of each plan that was timed, by name.
    """

    how: str = "rules"
    predicted_ms: float | None = None
    tried: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {"how": self.how, "predicted_ms": self.predicted_ms, "tried_ms": dict(self.tried)}


@dataclass(frozen=True)
class Candidate:
    """An emitted model with the plan behind it.

    Attributes:
        model: The model.
        plan: What of it is int8.
        qparams: Scale and zero point by tensor.
        source: The model as the runtime opens it.
        relieved: By unit, output channels whose weights lost range for the target's sake.
        placement: How the plan was found.
        evidence: What was known of the tensors when it was.
    """

    model: ir.Model
    plan: Plan
    qparams: Mapping[str, QParams]
    source: ModelSource
    relieved: Mapping[str, int] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    evidence: Evidence = field(default_factory=Evidence)


@dataclass(frozen=True)
class Trial:
    """A candidate with what was measured of it; None where nothing could be."""

    candidate: Candidate
    accuracy: Accuracy
    latency: Latency | None

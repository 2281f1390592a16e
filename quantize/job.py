"""The values that the steps of `quantize_model` pass to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from ..calibration.data.sources import Source
from ..calibration.model.session import Feed, ModelSource
from ..calibration.rules.ranges import parse_rule
from ..system.printable import number_of
from ..transforms import StepResult
from ..transforms.graphs.inference import inferred
from ..transforms.graphs.queries import Shape, plain_shape
from ..transforms.int8.plan import Impl, Plan
from ..transforms.int8.qparams import QParams, Scheme
from ..transforms.spell_slow_functions import spell_slow_functions
from .accuracy.outputs import Accuracy
from .accuracy.verdict import SIMPLE, WEIGHTS
from .model.files import Weights, serialize
from .model.shapes import fed_shapes
from .options.efforts import EFFORTS, chosen
from .options.given_ranges import GivenRanges
from .options.options import Options
from .options.policy import Policy
from .options.selection import Selection
from .runtime.clock import doubt, ratio
from .runtime.loads import Load
from .runtime.progress import Progress
from .runtime.runtimes import STOCK, Runtime, Sessions
from .runtime.timing import Latency, Regime, load_name

Purpose: TypeAlias = Literal["measure", "learn", "deliver"]
"""What a plan is written into a model for.

- ``measure``: every unit has its own kernel, which can be timed and corrected.
- ``learn``: corrections are learned on the model. It has QDQ pairs whatever the format, also in place of native
  operators, but none at which a native operator does not round.
- ``deliver``: two convolutions are one if only their sum is read, a native convolution is one with the function behind
  it, and normalizations and softmaxes beside native operators are native too.
"""


@dataclass(frozen=True)
class Job:
    """The request, the float model and the data: the input of all steps.

    Attributes:
        path: The float model's file.
        identity: Its `fingerprint`.
        reference: The model with the outputs that INT8 is compared with: the float model as the runtime runs it. Where
            the user's model computes its ranges at run time, the one with float weights, whose activations nothing
            rounds.
        opened: `reference` with its open sessions, in ONNX Runtime.
        timed: The user's model, that INT8 is timed against, with its open sessions in `runtime`.
        folder: A folder for files of this run; it is removed when the run ends.
        simple: The simplified float model.
        float_source: `simple`, serialized for the runtime.
        weights: The size of its weights.
        types: Operator types by node name in the original model.
        selection: The units that may be int8, by the names in `simple`.
        all_int8_plan: The plan with every unit in int8 that can be; later plans have fewer int8 units.
        steps: The result of each transform that simplified the model.
        restored: By the transform that did it, a note on what is in integers in the user's model and float in `simple`.
        model_qparams: Scale and zero point of tensors that the user's model quantizes itself.
        no_saturation: Whether the target adds 8-bit products without saturation.
        policy: What decides which units become int8.
        notes: Warnings so far.
        supply: Ranges, overrides and the range rule that the user gives.
        source: Data that give ranges and corrections; None without data.
        held: Data that give nothing, so that the model can be judged on them; None if all data are in `source`.
        runtime: What runs the INT8 model, and both models where they are timed.
        scaled: The corrections that scaled channels of `simple`.
        unscaled: The job with channels as they were, which is written where float is; None if that is this job.
        judged: Whether the data are the user's: random inputs are no evidence for or against a model.
        random: Whether the outputs of the float model are so random that they judge no model.
        loads: The runs for timing and profiles, at each of `options.batches`; see `loads_of`. Empty without data.
        options: The user's options.
        progress: Called with the progress of each step.
    """

    path: Path
    identity: str
    reference: ModelSource
    opened: Sessions
    timed: Sessions
    folder: Path
    simple: ir.Model
    float_source: ModelSource
    weights: Weights
    types: Mapping[str, str]
    selection: Selection
    all_int8_plan: Plan
    steps: tuple[StepResult, ...]
    restored: Mapping[str, str]
    model_qparams: Mapping[str, QParams]
    no_saturation: bool
    policy: Policy
    notes: tuple[str, ...]
    supply: GivenRanges
    source: Source | None
    judged: bool
    loads: tuple[Load, ...]
    options: Options
    progress: Progress
    held: Source | None = None
    random: bool = False
    runtime: Runtime = STOCK
    scaled: frozenset[str] = frozenset()
    unscaled: Job | None = None

    @property
    def judging(self) -> Source | None:
        """The data on which models are compared."""
        return self.source if self.held is None else self.held

    @property
    def held_out(self) -> bool:
        """Whether the samples that judge gave no ranges."""
        return self.held is not None or self.supply.ranges is not None

    @cached_property
    def spelled(self) -> ir.Model:
        """`simple` with slow functions in fast operators, as an INT8 model has its float units; `simple` without any.

        Names of tensors inside a function may be missing.
        """
        model = self.simple.clone()
        return model if not self.policy.portable and spell_slow_functions(model).applied else self.simple

    @cached_property
    def spelled_source(self) -> ModelSource:
        """`spelled`, serialized for the runtime."""
        return self.float_source if self.spelled is self.simple else serialize(self.spelled, self.folder)

    @cached_property
    def plain(self) -> Sessions:
        """`spelled_source` with its open sessions."""
        return Sessions(self.spelled_source, keep=self.opened.keeps, runtime=self.runtime)

    @property
    def feed(self) -> Feed | None:
        """The feed of the first run; None without data."""
        return self.loads[0].feed if self.loads else None

    @cached_property
    def fed_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors of the simplified model by name, for `feed`; empty without data.

        They are inferred once: each trial of a search for a plan asks for them.
        """
        return {} if self.feed is None else fed_shapes(self.simple, self.feed)

    @property
    def scheme(self) -> Scheme:
        """The integer types."""
        return self.options.scheme

    @property
    def corrections(self) -> frozenset[str]:
        """The names of the corrections that the effort and the options choose."""
        return chosen(self.options.effort, self.options.corrections)

    @property
    def opponent(self) -> str:
        """The model that INT8 is compared with, in words."""
        return "the given model" if self.restored else "float"

    @property
    def simple_name(self) -> str:
        """The simplified model, in words."""
        return WEIGHTS if self.restored else SIMPLE

    @property
    def outputs_judge(self) -> bool:
        """Whether outputs can judge the INT8 model: the data are the user's, and the outputs are not random."""
        return self.judged and not self.random

    @property
    def static(self) -> bool:
        """Whether there are ranges, from the user or from the data."""
        return self.supply.known(judged=self.judged)

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of the float tensors of the simplified model by name; a tensor of unknown type counts as float."""
        values = inferred(self.simple).items()
        found = {name: plain_shape(value) for name, value in values if value.dtype in (None, ir.DataType.FLOAT)}
        return {name: shape for name, shape in found.items() if shape is not None}

    @property
    def reserved(self) -> frozenset[str]:
        """Tensors whose range the user sets, by overrides or by quantization in the model."""
        return frozenset({*self.model_qparams, *self.supply.overrides.tensors})

    def asked(self) -> dict[str, Any]:
        """Return the options that change the model and differ from their defaults, as plain JSON values."""
        asked, calibration = self.options.to_json(), self.supply.calibration
        if calibration != str(parse_rule(EFFORTS[self.options.effort].rule)):
            asked["calibration"] = calibration
        overrides = self.supply.overrides.to_json()
        return {**asked, "overrides": overrides} if overrides else asked


@dataclass(frozen=True, slots=True)
class Evidence:
    """The error at the outputs when one tensor alone is uint8, or the weights of one unit are int8.

    Attributes:
        kept_float: Tensors that must not be uint8, with the reason.
        noise: By tensor, noise power over signal power at the worst output; empty where this was not measured.
        noise_of: The same for the inputs of matrix products from float to float, by form.
        harmed_by: By such a form, the inputs that ruin an output, with the reason.
        noise_of_weights: By unit, noise power over signal power with its weights alone in int8.
        limit: The time limit of each kind of trial, in seconds by built-in costs; 0 if nothing was tried.
    """

    kept_float: Mapping[str, str] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    noise_of: Mapping[Impl, Mapping[str, float]] = field(default_factory=dict)
    harmed_by: Mapping[Impl, Mapping[str, str]] = field(default_factory=dict)
    noise_of_weights: Mapping[str, float] = field(default_factory=dict)
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """A plan for several batch sizes or regimes at one of them.

    Attributes:
        batch: Items per run; None where that is not known.
        predicted_ms: The sum of the costs of the plan, in milliseconds; None without measured costs.
        tried: Milliseconds of each plan that was compared, by name.
        chosen: The name of the plan.
        own: The name of the plan that this batch size alone would get.
        regime: The regime of a decoder; None for other models.
    """

    batch: int | None
    predicted_ms: float | None
    tried: Mapping[str, float]
    chosen: str
    own: str
    regime: Regime | None = None

    @property
    def name(self) -> str:
        """The batch size or the regime: ``"batch 4"``."""
        return load_name(self.batch, self.regime)

    @property
    def slower(self) -> float:
        """How much longer a run takes than with the plan of its own, as a share of that time: 0.04 is 4 %."""
        return self.excess(self.chosen, self.own)

    def excess(self, one: str, other: str) -> float:
        """Return how much longer a run takes with one plan than with another, as a share of the time with the other."""
        return ratio(self.tried[one], self.tried[other]) - 1

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "batch": self.batch,
            "predicted_ms": self.predicted_ms,
            "tried_ms": dict(self.tried),
            "plan": self.chosen,
            "own_plan": self.own,
            "slower_than_own_plan": self.slower,
            **({} if self.regime is None else {"regime": asdict(self.regime)}),
        }


ROUGH = "machine busy: kernels waited for a processor while the costs of units were measured, so the costs are rough"


APART = 32
"""The number of samples from which a part is held out to judge; with fewer, each is needed for the ranges."""
NEXT = 3
"""The number of slower plans that the table names, and of plans that are as fast; the JSON has all."""
EQUAL = 0.99
"""The share of a plan's time from which another plan is as fast: the clock tells less."""
OTHER_RACE = "timed in another race, and a clock differs between them"


@dataclass(frozen=True, slots=True)
class Placement:
    """How the plan was chosen.

    Attributes:
        how: ``rules``, ``estimated``, ``measured``, ``all``, ``plan`` or ``search``.
        predicted_ms: The sum of the costs of the plan, in milliseconds, at the first batch size; None without measured
            costs.
        tried: Milliseconds of each timed plan, by name, at the first batch size.
        served: The plan at each batch size; empty if it serves only one.
        missed: How the model of the plan missed the promise of accuracy, where more units became float later; else
            empty.
        uncertainty: How far the ratios of the times of the plans may be from the truth, as a share of them.
        sure: Whether the costs of units were measured without waiting for a processor.
        chosen: The name of the plan among those that were timed; empty without any.
        passed: Why plans that took less time were not chosen, by name.
        why: Why rules decided where costs were to; empty otherwise.
        costs: The costs of units that were measured for it, in microseconds by signature and implementation. They are
            also those that the cache does not keep because kernels waited for a processor.
        stock: The names of timed plans with the runtime's operators in place of native ones.
    """

    how: str = "rules"
    predicted_ms: float | None = None
    tried: Mapping[str, float] = field(default_factory=dict)
    served: tuple[Served, ...] = ()
    missed: str = ""
    uncertainty: float = 0.0
    sure: bool = True
    chosen: str = ""
    passed: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    stock: frozenset[str] = frozenset()

    @property
    def doubts(self) -> list[str]:
        """Sentences on what a busy machine did to the choice of the plan; none if its times are sure."""
        unsure = doubt(self.uncertainty)
        times = [f"{unsure}, of the times by which the plan was chosen"] if unsure else []
        return times if self.sure else [ROUGH, *times]

    def rows(self, written_ms: float | None = None) -> Iterator[tuple[str, str]]:
        """Yield its rows in the table of a result: the method, the plans that were timed, and the predicted time.

        Args:
            written_ms: Milliseconds of the written model at the first batch size, which is not that of the plan where
                the plan missed the promise; None if it was not timed.
        """
        how, missed = self.how, ""
        if self.missed:
            how += ", before more units became float"
            took = "" if written_ms is None else f", and the written model takes {written_ms:.3f} ms"
            missed = f"; its model missed the promise ({self.missed}), so that more units are float{took}"
        if not self.served:
            predicted = "" if self.predicted_ms is None else f"; sum of costs {self.predicted_ms:.3f} ms"
            why = f": {self.why}" if self.why else ""
            yield "placement", f"{how}{why}{self._timed}{predicted}{missed}"
            return
        first = self.served[0]
        yield "placement", f"{how}: {first.chosen}, of {number_of(len(first.tried), 'plan')}{missed}"
        for each in self.served:
            own = f"; with its own plan, {each.own}: {each.tried[each.own]:.3f} ms" if each.own != each.chosen else ""
            yield f"placement, {each.name}", f"{each.tried[each.chosen]:.3f} ms{own}"

    @property
    def _timed(self) -> str:
        """The chosen plan, its time, the plans that are as fast, the next ones, and why faster ones were not taken.

        Empty without timed plans.
        """
        if not self.chosen:
            return ""
        took = self.tried[self.chosen]
        others = sorted((ms, name) for name, ms in self.tried.items() if name != self.chosen)
        slower = [f"{name!r} {ms:.3f}" for ms, name in others if EQUAL * ms > took]
        equal = [f"{name!r} {ms:.3f}" for ms, name in others if ms >= EQUAL * took and EQUAL * ms <= took]
        faster: dict[str, list[str]] = {}
        for ms, name in others[: len(others) - len(slower) - len(equal)]:
            faster.setdefault(self.passed.get(name, OTHER_RACE), []).append(f"{name!r} {ms:.3f}")
        counted = f", of {len(self.tried)} plans" if others else ""
        beside = [f"{kind}: {_first(names)}" for kind, names in (("as fast", equal), ("next", slower)) if names]
        passed = "".join(f"; {', '.join(names)}: {why}" for why, names in faster.items())
        told = f" ({'; '.join(beside)})" if beside else ""
        return f": {self.chosen!r}, {took:.3f} ms{counted}{told}{passed}"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values; `served` only for several batch sizes."""
        found = {
            "how": self.how,
            "why": self.why,
            "predicted_ms": self.predicted_ms,
            "tried_ms": dict(self.tried),
            "chosen": self.chosen,
            "passed": dict(self.passed),
            "relieved": bool(self.missed),
            "missed": self.missed,
            "uncertainty": self.uncertainty,
            "costs_sure": self.sure,
        }
        return {**found, "served": [each.to_json() for each in self.served]} if self.served else found


def _first(plans: Sequence[str]) -> str:
    """Return the first `NEXT` plans as text, and how many more there are."""
    more = f" and {len(plans) - NEXT} more" if len(plans) > NEXT else ""
    return ", ".join(plans[:NEXT]) + more


@dataclass(frozen=True)
class Candidate:
    """An emitted model and its plan.

    Attributes:
        model: The model.
        plan: The implementation of each unit.
        qparams: Scale and zero point by tensor.
        source: The model, serialized for the runtime.
        relieved: By unit, output channels with a smaller weight range, so that 16-bit sums cannot saturate.
        placement: How the plan was chosen.
        evidence: The measured noise of tensors that the plan takes into account.
        runtime: What runs it.
        corrected: The corrections that changed it, by name.
    """

    model: ir.Model
    plan: Plan
    qparams: Mapping[str, QParams]
    source: ModelSource
    relieved: Mapping[str, int] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    evidence: Evidence = field(default_factory=Evidence)
    runtime: Runtime = STOCK
    corrected: frozenset[str] = frozenset()

    @property
    def native(self) -> bool:
        """Whether any unit is a native operator."""
        return any(choice.impl.native for choice in self.plan.choices.values())

    @cached_property
    def sessions(self) -> Sessions:
        """The model with its open sessions."""
        return Sessions(self.source, runtime=self.runtime)


@dataclass(frozen=True)
class Trial:
    """A candidate with its measured accuracy, and its latency at each batch size; not timed if there is none."""

    candidate: Candidate
    accuracy: Accuracy
    latencies: tuple[Latency, ...] = ()

    @property
    def latency(self) -> Latency | None:
        """The latency at the first batch size; None where it was not measured."""
        return self.latencies[0] if self.latencies else None

"""Where integers hurt: every unit and every tensor of a plan is tried alone, and the model's outputs tell."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeVar

import onnx_ir as ir

from ... import RequantError
from ...calibration.files import Data, RangeFile
from ...calibration.observations import Observations
from ...calibration.ranges import parse_rule
from ...calibration.runner import observe
from ...calibration.samples import Sample
from ...calibration.session import LARGE
from ...calibration.sources import DataSource, Source
from ...transforms.graph import inferred, nodes_by_name
from ...transforms.plan import Plan
from ..accuracy.outputs import decibels
from ..accuracy.selected_outputs import selected_from, showing
from ..job import Evidence, Job
from ..model.files import staging
from ..options.efforts import EFFORTS
from ..options.given_ranges import precision_of
from ..options.options import Options
from ..placement.plan_file import read_plan
from ..placement.rules import all_int8_plan
from ..runtime.machine import Machine
from ..runtime.machine import folder as cache_folder
from ..runtime.progress import Progress, silent
from ..sensitivity.cache import PREFIX, Trials, digest, forget_old, trials_of
from ..sensitivity.integer_constants import integer_constants
from ..sensitivity.switch_graph import Switch
from ..sensitivity.switch_model import Switchboard, noises, switchboard
from ..sensitivity.verdicts import Traits, traits, unit_verdict
from ..steps.emit import plan_by_rules
from ..steps.prepare import prepare
from ..steps.ranges import TensorRanges, channels_of, find_ranges

SCHEMA = 1
KINDS = ("units", "tensors")
TRIED = 4  # samples of each trial
ROOM = LARGE // 2  # bytes of weights above which they stay in float: the runtime packs three copies of them
NEGLIGIBLE = 0.01  # of the noise of everything: what adds less can, left in float, gain about 0.04 dB

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRow:
    """What a unit does to the outputs.

    Noise is the power of what changes at an output over the power of the output, at the output where that is most:
    0 for none, infinite where nothing can be compared.

    Attributes:
        name: The unit, called after its first operator.
        operator: That operator, or ``gate``.
        implementation: What it is in integers, as plans call it.
        inputs: The tensors that it reads.
        noise: With nothing but this unit in integers: what it reads in uint8, its weights in int8.
        output: At which output.
        weights_noise: With nothing but its weights in int8; None where it has none, or where its noise is `NEGLIGIBLE`.
        rest_noise: With everything but this unit in integers; None where its noise is `NEGLIGIBLE`.
        verdict: Where its noise comes from, as far as that can be told.
    """

    name: str
    operator: str
    implementation: str
    inputs: tuple[str, ...]
    noise: float
    output: str
    weights_noise: float | None
    rest_noise: float | None
    verdict: str = ""

    @property
    def sqnr_db(self) -> float:
        """The SQNR of the worst output with nothing but this unit in integers."""
        return _db(self.noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """What a tensor does to the outputs, and what was seen of its values.

    Attributes:
        name: The tensor.
        operator: The operator that makes it; ``input`` for an input of the model.
        noise: The noise, as of `UnitRow`, with nothing but this tensor in uint8.
        output: At which output.
        rounding: Power of its own error in uint8 over that of its values; None where no histogram could be made.
        lo: Lower end of the range of its integers.
        hi: Upper end.
        least: The least value seen.
        most: The greatest value seen.
        clipped: Share of the values beyond the range, 0..1.
        growth: Share of its width that the range has gained in the last doubling of the samples, 0..1.
        verdict: What stands out of its values.
    """

    name: str
    operator: str
    noise: float
    output: str
    rounding: float | None
    lo: float
    hi: float
    least: float
    most: float
    clipped: float
    growth: float
    verdict: str = ""

    @property
    def sqnr_db(self) -> float:
        """The SQNR of the worst output with nothing but this tensor in uint8."""
        return _db(self.noise)

    @property
    def own_sqnr_db(self) -> float | None:
        """The SQNR of the tensor itself in uint8."""
        return None if self.rounding is None else _db(self.rounding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What `measure_sensitivity` found.

    Attributes:
        model: Path of the float model.
        data: What the data were.
        calibration: The range rule.
        calibrated: Samples that gave the ranges.
        samples: Samples that each trial was run on.
        runtime: Version of the runtime.
        outputs: The outputs that were compared.
        noise: The noise, as of `UnitRow`, with everything in integers.
        units: Units, worst first; none where they were not asked for.
        tensors: Tensors, worst first; none where they were not asked for.
        trials: How many trials there were.
        recalled: How many of them were kept from before.
        seconds: How long it took.
        notes: What went otherwise than asked, a sentence each.
    """

    model: str
    data: str
    calibration: str
    calibrated: int
    samples: int
    runtime: str
    outputs: tuple[str, ...]
    noise: float
    units: tuple[UnitRow, ...]
    tensors: tuple[TensorRow, ...]
    trials: int
    recalled: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def sqnr_db(self) -> float:
        """The SQNR of the worst output with everything in integers."""
        return _db(self.noise)

    def gain_db(self, unit: UnitRow) -> float | None:
        """By how much the SQNR of the worst output rises where a unit alone is left in float; None where not tried."""
        if unit.rest_noise is None:
            return None
        return 0.0 if unit.rest_noise == self.noise else _db(unit.rest_noise) - self.sqnr_db

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain JSON values; an infinite noise and an infinite or undefined SQNR are null."""
        found = asdict(self)
        found["units"] = [
            {**_finite(asdict(row)), "sqnr_db": _or_none(row.sqnr_db), "gain_db": _or_none(self.gain_db(row))}
            for row in self.units
        ]
        found["tensors"] = [
            {**_finite(asdict(row)), "sqnr_db": _or_none(row.sqnr_db), "own_sqnr_db": _or_none(row.own_sqnr_db)}
            for row in self.tensors
        ]
        return {"schema": SCHEMA, **_finite(found), "sqnr_db": _or_none(self.sqnr_db)}

    @classmethod
    def from_json(cls, found: Any, where: str = "the evidence") -> Sensitivity:
        """Read what `to_json` made.

        Raises:
            RequantError: It is none.
        """
        try:
            if found["schema"] != SCHEMA:
                raise RequantError(f"{where}: evidence of schema {found['schema']!r}; this version reads {SCHEMA}")
            units = tuple(_row(UnitRow, row, ("noise",)) for row in found["units"])
            tensors = tuple(_row(TensorRow, row, ("noise",)) for row in found["tensors"])
            return replace(_row(cls, {**found, "units": (), "tensors": ()}, ("noise",)), units=units, tensors=tensors)
        except (TypeError, KeyError, ValueError) as error:
            raise RequantError(f"{where}: no evidence: {type(error).__name__}: {error}") from error


def measure_sensitivity(
    model: str | os.PathLike[str],
    data: DataSource,
    options: Options | None = None,
    *,
    samples: int = TRIED,
    kinds: Collection[str] = KINDS,
    fresh: bool = False,
    progress: Progress = silent,
) -> Sensitivity:
    """Measure what every unit and every tensor that can be integers does to the outputs.

    One session serves all trials (`switchboard`). Trials are kept in the user's cache folder as they are made, so that
    a run that was interrupted goes on where it stopped, and one that is the same has little to do.

    Args:
        model: Path of the float model.
        data: A data source, as `quantize_model` takes it.
        options: See `Options`. With the placement ``rules`` or a plan, those units are tried that it has in integers;
            with any other one, all that can be.
        samples: Samples that each trial is run on, picked evenly.
        kinds: What to try, of `KINDS`.
        fresh: Whether to make all trials anew.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: The model or the data cannot be used, or nothing of it can be integers.
    """
    began = time.monotonic()
    if samples < 1:
        raise RequantError(f"samples must be at least 1, not {samples}")
    if not kinds or not set(kinds) <= set(KINDS):
        raise RequantError(f"what to try is some of {', '.join(KINDS)}, not {', '.join(kinds) or 'nothing'}")
    forget_old()
    with staging(None) as folder, _resumable():
        job = prepare(model, data, options or Options(), folder, progress)
        if job.source is None or not job.all_int8_plan.quantized:
            raise RequantError(f"{model}: no tensor of this model could become uint8; there is nothing to try")
        seen = _observed(job, job.source, fresh=fresh)
        found = _ranges(job, job.source, seen)
        tried = list(islice(iter(job.source.samples(samples)), samples))
        board, notes = _board(job, found, tried)
        with trials_of(board, tried, fresh=fresh) as trials:
            evidence = _Evidence(job, board, seen, found, trials)
            made, recalled = _try_all(evidence, tried, kinds)
    noise, _ = evidence.worst(board.everything)
    return Sensitivity(
        model=os.fspath(model),
        data=job.source.description,
        calibration=job.supply.calibration,
        calibrated=seen.samples,
        samples=len(tried),
        runtime=Machine.here(1).runtime,
        outputs=board.outputs,
        noise=noise,
        units=tuple(_unit_rows(evidence)) if "units" in kinds else (),
        tensors=tuple(_tensor_rows(evidence)) if "tensors" in kinds else (),
        trials=made,
        recalled=recalled,
        seconds=round(time.monotonic() - began, 3),
        notes=(*job.notes, *notes),
    )


@dataclass(frozen=True)
class _Evidence:
    """What the trials are of, and what came of them."""

    job: Job
    board: Switchboard
    seen: Observations
    found: TensorRanges
    trials: Trials

    @property
    def plan(self) -> Plan:
        """The plan that is tried."""
        return self.board.plan

    @cached_property
    def units(self) -> dict[str, frozenset[Switch]]:
        """The switches of each unit that has some."""
        names = (unit.name for unit in self.plan.units if self.plan.impl(unit).int8)
        return {name: on for name in names if (on := self.board.unit(name))}

    @cached_property
    def tensors(self) -> dict[str, frozenset[Switch]]:
        """The switches of each tensor that has a scale of its own."""
        return {name: on for name in self.plan.observed if (on := self.board.tensor(name))}

    def worst(self, on: frozenset[Switch]) -> tuple[float, str]:
        """Return the most noise at any output of a trial that was made, and at which."""
        outputs = self.trials.known[digest(on)]
        return max(((_ratio(signal, noise), name) for name, (signal, noise) in outputs.items()), default=(0.0, ""))

    def noise(self, on: frozenset[Switch]) -> float | None:
        """Return the most noise at any output of a trial, None of one that was not made or has nothing on."""
        return self.worst(on)[0] if on and digest(on) in self.trials.known else None

    def matters(self, unit: str) -> bool:
        """Whether a unit alone makes more than a `NEGLIGIBLE` part of the noise of everything."""
        return self.worst(self.units[unit])[0] > NEGLIGIBLE * self.worst(self.board.everything)[0]

    @cached_property
    def traits(self) -> dict[str, Traits]:
        """What was seen of each tensor with a scale of its own."""
        makers = {str(value.name): node for node in nodes_by_name(self.job.simple).values() for value in node.outputs}
        found = {}
        for name in self.plan.observed:
            if name not in self.seen.ranges:
                continue
            node = makers.get(name)
            joined = [str(v.name) for v in node.inputs if v is not None] if node and node.op_type == "Concat" else []
            precision = precision_of(self.job.scheme)
            found[name] = traits(name, self.found.ranges[name], self.seen, joined, precision)
        return found


def _try_all(evidence: _Evidence, samples: Sequence[Sample], kinds: Collection[str]) -> tuple[int, int]:
    """Make the trials that are not there yet; return how many there are, and how many there were."""
    board, trials = evidence.board, evidence.trials
    before = frozenset(trials.known)
    units = evidence.units if "units" in kinds else {}
    tensors = evidence.tensors if "tensors" in kinds else {}
    # many a unit reads one tensor and nothing else does
    alone = list(dict.fromkeys([board.everything, *units.values(), *tensors.values()]))
    _try(evidence, alone, samples, "try units and tensors alone")
    noisy = [name for name in units if evidence.matters(name)]
    closer = [on for name in noisy for on in (board.constants(name), board.everything - units[name]) if on]
    _try(evidence, closer, samples, "try without the worst units")
    made = {digest(on) for on in (*alone, *closer)}
    return len(made), len(made & before)


def _try(evidence: _Evidence, planned: Sequence[frozenset[Switch]], samples: Sequence[Sample], stage: str) -> None:
    """Make those of some trials that are not there yet."""
    trials, total = evidence.trials, len(planned)
    missing = [on for on in planned if digest(on) not in trials.known]
    results = noises(evidence.board, missing, samples)
    for done, (on, powers) in enumerate(zip(missing, results, strict=True), total - len(missing) + 1):
        trials.add(digest(on), powers)
        evidence.job.progress(stage, done, total)


def _unit_rows(evidence: _Evidence) -> list[UnitRow]:
    """Return what units do, the worst first."""
    board, plan, known = evidence.board, evidence.plan, {unit.name: unit for unit in evidence.plan.units}
    alone = {
        name: evidence.worst(on)[0] for name, on in evidence.tensors.items() if digest(on) in evidence.trials.known
    }
    rows = []
    for name, on in evidence.units.items():
        unit, matters = known[name], evidence.matters(name)
        noise, output = evidence.worst(on)
        weights = evidence.noise(board.constants(name)) if matters else None
        roots = [plan.root(tensor) for tensor in unit.inputs]
        read = {t: (alone.get(t, 0.0), evidence.traits[t].verdict) for t in roots if t in evidence.traits}
        rows.append(
            UnitRow(
                name=name,
                operator=unit.op,
                implementation=plan.impl(unit).value,
                inputs=unit.inputs,
                noise=noise,
                output=output,
                weights_noise=weights,
                rest_noise=_rest(evidence, on) if matters else None,
                verdict=unit_verdict(noise, weights, read),
            )
        )
    return sorted(rows, key=lambda row: -row.noise)


def _rest(evidence: _Evidence, on: frozenset[Switch]) -> float | None:
    """Return the noise of everything but some switches."""
    rest = evidence.board.everything - on
    return evidence.noise(rest) if rest else 0.0


def _tensor_rows(evidence: _Evidence) -> list[TensorRow]:
    """Return what tensors do, the worst first."""
    nodes = nodes_by_name(evidence.job.simple)
    makers = {str(value.name): node.op_type for node in nodes.values() for value in node.outputs}
    rows = []
    for name, on in evidence.tensors.items():
        noise, output = evidence.worst(on)
        lo, hi = evidence.found.ranges[name]
        about = evidence.traits.get(name) or Traits((lo, hi), math.inf, 0.0, 0.0, "")
        rows.append(
            TensorRow(
                name=name,
                operator=makers.get(name, "input"),
                noise=noise,
                output=output,
                rounding=about.rounding if math.isfinite(about.rounding) else None,
                lo=lo,
                hi=hi,
                least=about.seen[0],
                most=about.seen[1],
                clipped=about.clipped,
                growth=about.growth,
                verdict=about.verdict,
            )
        )
    return sorted(rows, key=lambda row: -row.noise)


def _observed(job: Job, source: Source, *, fresh: bool) -> Observations:
    """Observe all that may become uint8, with histograms, and channels where there are any.

    What was seen of data that are files, by the same model, is kept beside the trials.
    """
    axes = {
        name: axis for name, axis in _axes(job.simple).items() if name in job.all_int8_plan.quantized
    } | channels_of(job)
    execution = replace(job.options.execution, strict=False)
    if source.reference is not None and execution.checkpoint is None:  # Python objects might be others the next time
        with suppress(OSError):
            cache_folder().mkdir(parents=True, exist_ok=True)
            execution = replace(execution, checkpoint=cache_folder() / f"{PREFIX}ranges", kept=lambda path: None)
            if fresh:
                _forget_ranges()
    return observe(
        job.float_source,
        job.all_int8_plan.quantized,
        source,
        histogram=True,
        channel_axis=axes,
        execution=execution,
        progress=partial(job.progress, "calibrate"),
    )


def _axes(model: ir.Model) -> dict[str, int]:
    """Return the axis of the channels of each tensor of the main graph that has some: the last one, or of maps 1."""
    ranks = {name: len(value.shape) for name, value in inferred(model).items() if value.shape is not None}
    return {name: 1 if rank > 3 else -1 for name, rank in ranks.items() if rank > 1}


def _ranges(job: Job, source: Source, seen: Observations) -> TensorRanges:
    """Choose ranges as `quantize_model` does, of what was seen."""
    if job.supply.ranges is not None:
        return find_ranges(job)
    rule = job.supply.rule or parse_rule(EFFORTS[job.options.effort].rule)
    file = RangeFile.of(
        seen, rule, model="", data=Data(source.description), digests={}, precision=precision_of(job.scheme)
    )
    supply = replace(job.supply, ranges=file.overridden(job.supply.overrides))
    found = find_ranges(replace(job, supply=supply))
    return replace(found, means={name: mean for name, mean in found.means.items() if name in channels_of(job)})


def _board(job: Job, found: TensorRanges, samples: Sequence[Sample]) -> tuple[Switchboard, list[str]]:
    """Open the model with its switches, and say what could not be done.

    Where outputs are selected by scores, and come out in another number, what they are selected from is compared.

    Raises:
        RequantError: There is nothing to try, or nothing to compare.
    """
    plan = _plan(job, found)
    if not any(plan.impl(unit).int8 for unit in plan.units):
        raise RequantError(f"{job.path}: no unit of this model can become int8; there is nothing to try")
    qparams = {name: job.scheme.activation_params(*found.ranges[name]) for name in plan.observed}
    notes = ["weights are left in float: there are too many for a second copy in memory"]
    constants = None
    if job.weights.total <= ROOM:
        means = found.means if "means" in job.corrections else {}
        constants = integer_constants(
            job.simple, plan, qparams, scheme=job.scheme, means=means, exact=job.no_saturation
        )
        notes = []
    opened = partial(switchboard, optimize=not job.model_qparams, folder=job.folder)
    board = opened(job.simple, plan, qparams, constants)
    if not board.outputs:
        raise RequantError(f"{job.path}: has no float output to compare")
    sources = selected_from(job.simple)
    unlike = _selected(board, samples) if sources else []
    if unlike:
        notes.append(f"what {', '.join(map(repr, unlike))} are selected from is compared instead")
        board = opened(showing(job.simple, sources, unlike), plan, qparams, constants)
    return board, notes


def _selected(board: Switchboard, samples: Sequence[Sample]) -> list[str]:
    """Return the outputs of which there are others on other samples of one shape, or in integers."""
    shapes: dict[tuple[object, ...], set[tuple[int, ...]]] = {}
    for sample in samples:
        fed = tuple(sorted((name, array.shape) for name, array in sample.feed.items()))
        for name, value in board.run(sample.feed).items():
            shapes.setdefault((name, fed), set()).add(value.shape)
    several = {str(name) for (name, _), found in shapes.items() if len(found) > 1}
    (powers,) = noises(board, [board.everything], samples)
    return [name for name, sums in powers.items() if name in several or decibels(*sums) == -math.inf]


def _plan(job: Job, found: TensorRanges) -> Plan:
    """Return the plan whose integers are tried."""
    facts, rules, _ = plan_by_rules(job, found, Evidence())
    if job.policy.plan is not None:
        return read_plan(job.policy.plan, facts, rules, strict=False)
    return all_int8_plan(facts, rules) if job.policy.all_int8 else rules


@contextmanager
def _resumable() -> Iterator[None]:
    """Tell who interrupts a run that what was done so far is kept."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on where it stopped") from None


def _forget_ranges() -> None:
    """Remove what was seen of any data."""
    for path in cache_folder().glob(f"{PREFIX}ranges-*"):
        path.unlink(missing_ok=True)


def _ratio(signal: float, noise: float) -> float:
    """Return noise over signal; infinite where nothing of the signal is left, or nothing can be compared."""
    if noise == 0:
        return 0.0
    return noise / signal if signal > 0 and math.isfinite(noise) else math.inf


def _db(noise: float) -> float:
    """Return an SQNR in dB."""
    return math.inf if noise == 0 else -math.inf if math.isinf(noise) else -10 * math.log10(noise)


def _or_none(value: float | None) -> float | None:
    """Return a number, or None where JSON has none for it."""
    return value if value is not None and math.isfinite(value) else None


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with null for numbers that JSON does not have."""
    return {name: _or_none(value) if isinstance(value, float) else value for name, value in row.items()}


def _row(kind: type[T], found: Mapping[str, Any], infinite: Collection[str]) -> T:
    """Read a dataclass from what `to_json` made of it; null is infinite for some of the fields."""
    values: dict[str, Any] = {}
    for each in fields(kind):  # type: ignore[arg-type]
        value = found[each.name]
        value = math.inf if value is None and each.name in infinite else value
        values[each.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)

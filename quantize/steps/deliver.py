"""The last step of `quantize_model`: choose between INT8 and float, write the model, and fill in the result."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx_ir as ir

from ... import RequantError
from ...system.scratch import exclusive
from ...transforms import METADATA_KEY
from ...transforms.graph import constant, nodes_by_name
from ...transforms.int8.existing import is_finished
from ...transforms.int8.plan import Impl, Plan
from ...transforms.int8.reasons import ALREADY, INTEGER, other
from ...transforms.tensors import tensors
from ..accuracy.choices import GIVEN_NOTE, was_given
from ..accuracy.float_nodes import FloatNode
from ..accuracy.frontier import Frontier
from ..accuracy.selected_outputs import replaced_notes
from ..job import Candidate, Job, Trial
from ..model.files import Weights, load_model, size_on_disk
from ..model.metadata import Written, describe_origin
from ..model.writing import save_model
from ..options.efforts import CORRECTIONS
from ..placement.batches import compromises
from ..placement.plan_file import plan_path, save_plan
from ..placement.reasons import EXCLUDED, KEPT_FLOAT, NO_RANGES
from ..result import Result
from ..runtime.attribution import Owners
from ..runtime.profile import KernelRun, integer_share
from ..runtime.progress import INSPECT, expect
from ..runtime.timing import Latency
from ..sensitivity.each_tensor import RUIN_DB
from .emit import emit
from .evidence import RETRY_SECONDS, evidence_of, gather_evidence, widest
from .fall_back import fall_back_to_float
from .forecast import forecast_second_placement
from .judge import UNMEASURED, beside_given, if_it_runs, is_slower, judge, measure_accuracy, promised
from .native_use import native_use
from .prepare import as_given
from .ranges import TensorRanges
from .written import as_written

NOTHING_LEFT = (
    "nothing left to quantize: requant wrote this model in integers; for other options start from the float model"
)
MEANWHILE = "another run has written the output meanwhile, and this one has replaced it"
LARGER = (
    "the output is larger because the given file stores its weights in fewer bits than float32 already: int8 adds "
    "scales, zero points and nodes"
)
COMPUTED = "the output is larger because it stores weights that the given file computes from fewer numbers"
LOSES = "int8 loses too much accuracy, judged by"
ADVICE = (
    "to lose less: {}'requant sensitivity' names the tensors that lose most; a search (--max-drop, in Python: "
    "search_model) judges by what the model is for"
)
OWN_WORDS = frozenset({EXCLUDED.code, KEPT_FLOAT.code, "other"})  # their texts say different things
WORTHWHILE = 1.02  # a smaller speed-up is within the timing noise, and not worth a loss of accuracy
LEAST_GIVEN_DB = 8.0  # the least SQNR of a dynamically quantized model that is kept: noise of a sixth of the power
MOST_DOUBT = 0.1  # a larger gain is believed, however unsure the times of a busy machine are
INTEGER_ALREADY = frozenset({ALREADY.code, INTEGER.code})  # reasons of float units that compute in integers already
FLOAT_BYTES = 4
SHORT = 0.75  # a file of at most this share of its weights in float32 stores them in another form
PROFILED_MS = 100.0  # total time of the profiled runs, with at least and at most this number of runs:
LEAST_RUNS, MOST_RUNS = 3, 10


@dataclass(frozen=True)
class Run:
    """All that a run of `quantize_model` or `search_model` has computed, while its files still exist.

    Attributes:
        job: The request, the float model and the data.
        ranges: The ranges, with the statistics behind them.
        trial: The written model with its plan, accuracy and latency.
        kernels: The kernels that ran in the written model; empty where it was not run.
        result: The result so far.
        rejected: The INT8 model that was not worth writing; None without one.
    """

    job: Job
    ranges: TensorRanges
    trial: Trial
    kernels: tuple[KernelRun, ...]
    result: Result
    rejected: Trial | None = None


def deliver(job: Job, ranges: TensorRanges, output: str | os.PathLike[str]) -> Run:
    """Emit and judge the INT8 model, and write it or the simplified float model.

    Raises:
        RequantError: The output cannot be written.
    """
    if is_finished(job.simple):
        return _unchanged(job, ranges, output)
    candidate = emit(job, ranges, gather_evidence(job, ranges))
    try:
        trial = judge(job, candidate)
    except RequantError as error:
        reason = f"the int8 model does not run: {error}"
        return _keep_float(job, ranges, Trial(candidate, UNMEASURED), output, reason)
    slow = is_slower(job, trial.latencies)
    if job.judged and not slow and not candidate.evidence.noise and trial.accuracy.worst_sqnr_db < RUIN_DB:
        trial = _with_ruinous_tensors_in_float(job, ranges, trial)
    if job.judged and not slow and not job.options.force_int8:
        trial = fall_back_to_float(job, ranges, trial)
    reason = _why_not(job, trial)
    if reason and not job.options.force_int8:
        run = _keep_float(job, ranges, trial, output, reason)
        more = "" if job.options.effort == "high" else "the effort high tries more; "
        advice = (ADVICE.format(more),) if reason.startswith(LOSES) else ()
        return replace(run, result=replace(run.result, notes=(*run.result.notes, *advice)))
    run = _finish(job, ranges, trial, output)
    if not reason:
        return run
    return replace(run, result=replace(run.result, notes=(*run.result.notes, f"written although {reason}")))


def _unchanged(job: Job, ranges: TensorRanges, output: str | os.PathLike[str]) -> Run:
    """Write an already quantized model unchanged, without the native operators that are not wanted."""
    changed = any(step.change.applied for step in job.steps)
    model = job.simple.clone() if changed else load_model(job.path)
    candidate = Candidate(model, job.all_int8_plan, {}, job.float_source, runtime=job.runtime)
    run = _finish(job, ranges, judge(job, candidate), output, None)
    return replace(run, result=replace(run.result, notes=(NOTHING_LEFT, *run.result.notes)))


def deliver_searched(
    job: Job, ranges: TensorRanges, candidate: Candidate | None, frontier: Frontier, output: str | os.PathLike[str]
) -> Run:
    """Write the model that a search has chosen, or the float model where INT8 is not faster."""
    if is_finished(job.simple):
        return _unchanged(job, ranges, output)
    if candidate is None:
        nothing = "nothing in this model can become int8"
        if frontier.points:
            nothing = f"no int8 model of the search runs and has a score in {frontier.metric}"
        reason = nothing if frontier.done else "the time limit ended the search before a model was tried"
        candidate = Candidate(job.simple.clone(), job.all_int8_plan, {}, job.float_source, runtime=job.runtime)
        return _keep_float(job, ranges, Trial(candidate, UNMEASURED), output, reason)
    best = judge(job, candidate)
    slow = _too_slow(job, best) if frontier.best is not None and not job.options.force_int8 else ""
    return _keep_float(job, ranges, best, output, slow) if slow else _finish(job, ranges, best, output)


def _with_ruinous_tensors_in_float(job: Job, ranges: TensorRanges, trial: Trial) -> Trial:
    """Emit the model again, with each tensor in float that alone ruins the outputs; return the better of both models.

    Each tensor is tried alone in uint8. If that takes more than `RETRY_SECONDS`, none is tried, and the given model
    is returned. The returned model has the evidence of the trials.
    """
    expect(job.progress, forecast_second_placement(job))
    tried = trial.candidate if job.policy.plan is not None else widest(job, ranges)
    evidence = evidence_of(job, ranges, tried, trial.accuracy, RETRY_SECONDS, RUIN_DB)
    known = replace(trial, candidate=replace(trial.candidate, evidence=evidence))
    if not evidence.kept_float and not any(evidence.harmed_by.values()):
        return known
    candidate = emit(job, ranges, evidence, trial.candidate.placement)
    accuracy = if_it_runs(partial(measure_accuracy, job, candidate))
    if accuracy is not None and accuracy.worst_sqnr_db > trial.accuracy.worst_sqnr_db:
        return if_it_runs(partial(judge, job, candidate, accuracy)) or known
    return known


def _why_not(job: Job, trial: Trial) -> str:
    """Return why the INT8 model is not worth writing; empty when it is."""
    plan = trial.candidate.plan
    if not plan.has_int8:
        more = any(plan.choices[unit.name].reason.code in INTEGER_ALREADY for unit in plan.units)
        if trial.candidate.placement.how != "rules":
            others = "what is not in integers yet" if more else "every unit"
            return f"the placement keeps {others} in float"
        return f"nothing {'more ' if more else ''}in this model can become int8"
    if not job.judged:  # random inputs are no evidence against a model
        return ""
    judged = promised(job, trial.accuracy)
    by_speed = judged.kept or is_slower(job, trial.latencies)  # of a slow model, no weights were corrected
    return _too_slow(job, trial) if by_speed else f"{LOSES} {judged}"


def _too_slow(job: Job, trial: Trial) -> str:
    """Return why an INT8 model is too slow; empty when it is fast enough, or its time does not count.

    A loss of accuracy needs a gain: with a relative error of 5 %, INT8 must be 1.05 times as fast as the faster float
    model. With several batch sizes, INT8 is too slow if at one of them it loses as much as it gains at any of them: the
    worst ratio to the faster model decides, as between plans. A gain within the uncertainty of the times is none.
    """
    if not job.policy.timed or not trial.latencies:
        return ""
    gains = [latency.gain for latency in trial.latencies]
    gain = max(gains) / max(1.0, 1 / min(gains))
    needed = max(WORTHWHILE, 1 + promised(job, trial.accuracy).error) if job.judged else WORTHWHILE
    unsure = min(max(each.uncertainty for each in trial.latencies), MOST_DOUBT)
    if gain >= max(needed, 1 + unsure):
        return ""
    first = trial.latencies[0]
    plain = "" if first.gain == first.speedup else f", {first.gain:.2f}x the speed of {job.simple_name}"
    price = f"; an error of {100 * (needed - 1):.0f} % needs {needed:.2f}x" if WORTHWHILE <= gain < needed else ""
    price = f"; the times are unsure by {100 * unsure:.0f} %, which is more" if gain >= needed else price
    return f"int8 gains too little here: {_speeds(job, trial.latencies)}{plain}{price}"


def _speeds(job: Job, latencies: Sequence[Latency]) -> str:
    """Return speed-ups as text, with the batch sizes if there are several."""
    of = f" the speed of {job.opponent}"
    doubts = [f" ({each.doubt})" if each.doubt else "" for each in latencies]
    if len(latencies) == 1:
        return f"{latencies[0].speedup:.2f}x{of}{doubts[0]}"
    first, *others = (
        f"{each.speedup:.2f}x{{}} at {each.name}{told}" for each, told in zip(latencies, doubts, strict=True)
    )
    return ", ".join([first.format(of), *(text.format("") for text in others)])


def _kind(latencies: Sequence[Latency]) -> str:
    """Return what differs between latencies."""
    return "batch size" if latencies[0].regime is None else "regime"


def _over_batches(job: Job, trial: Trial) -> list[str]:
    """Return notes on an INT8 model for several batch sizes: which size pays for which, and where INT8 is too slow."""
    plan, latencies = trial.candidate.plan, trial.latencies
    if len(latencies) < 2 or not plan.has_int8:
        return []
    notes = compromises(trial.candidate.placement.served)
    slow = [each for each in latencies if each.speedup < WORTHWHILE]
    if slow and job.policy.timed and not _too_slow(job, trial):
        notes.append(f"not every {_kind(latencies)} gains: {_speeds(job, latencies)}")
    return notes


def _keep_float(job: Job, ranges: TensorRanges, trial: Trial, output: str | os.PathLike[str], reason: str) -> Run:
    """Write a float model instead of the INT8 model, with the reason as `Result.why_not`.

    The output is the simplified float model, with two exceptions. If the user's model computes its ranges at run time,
    its operators keep doing so, unless float is faster or they ruin the outputs. If simplification makes the float
    model slower, the output is the model that the user gave.
    """
    job = job.unscaled or job
    plan = trial.candidate.plan
    written: Written = "float"
    untried = not plan.has_int8  # the judged and timed model is the float model
    kept = _float_candidate(job, trial.candidate, plan, reason)
    judged = replace(trial, candidate=kept) if untried else judge(job, kept)
    if job.restored and not (judged.latencies and all(each.speedup >= WORTHWHILE for each in judged.latencies)):
        given = as_given(job)
        tried = judge(given, _float_candidate(given, trial.candidate, given.all_int8_plan, reason))
        if tried.accuracy.worst_sqnr_db < LEAST_GIVEN_DB:
            reason += f"; the given model leaves only {tried.accuracy.worst_sqnr_db:.1f} dB"
        else:
            job, plan, judged, written = given, given.all_int8_plan, tried, "given"
    before = any(choice.reason.code in INTEGER_ALREADY for choice in plan.choices.values())
    what = f"the simplified {'' if before else 'float '}model"
    faster = _given_if_faster(job, trial.candidate, judged, reason)
    if faster is not None:
        times = " instead of ".join(f"{each.latencies[0].int8_ms:.3g}" for each in (judged, faster[1]))
        what = f"the given model, because simplification makes it slower here ({times} ms)"
        (job, judged), written = faster, "unsimplified"
    why_not = f"{reason}: the output is {what}"
    run = _finish(job, ranges, judged, output, written)
    if untried:
        return replace(run, result=replace(run.result, why_not=why_not))
    measured = None if trial.latency is None else (trial.accuracy, trial.latency)
    result = replace(run.result, why_not=why_not, rejected=measured, rejected_latencies=trial.latencies)
    return replace(run, result=result, rejected=trial if measured else None)


def _given_if_faster(job: Job, candidate: Candidate, simple: Trial, reason: str) -> tuple[Job, Trial] | None:
    """Return the given float model, with a job that does not simplify, if it is clearly faster than the simplified one.

    Return None if it is not clearly faster, if the simplified model was not timed, or if operators of the given model
    that compute their ranges at run time became float (`Job.restored`).

    Args:
        job: The job.
        candidate: The INT8 model that is not written.
        simple: The simplified float model, timed against the given one.
        reason: Why the INT8 model is not written.
    """
    slack = WORTHWHILE * (1 + min(max((each.uncertainty for each in simple.latencies), default=0.0), MOST_DOUBT))
    if job.restored or not simple.latencies or _speed(simple.latencies) * slack >= 1:
        return None
    given = as_given(job, simplified=False)
    tried = judge(given, _float_candidate(given, candidate, given.all_int8_plan, reason))
    return (given, tried) if _speed(tried.latencies) >= WORTHWHILE * _speed(simple.latencies) else None


def _speed(latencies: Sequence[Latency]) -> float:
    """Return the speed-up of a float model over the given one: the geometric mean of the best and the worst load."""
    speeds = [latency.speedup for latency in latencies]
    return math.sqrt(max(speeds) * min(speeds))


def _float_candidate(job: Job, candidate: Candidate, plan: Plan, reason: str) -> Candidate:
    """Return a candidate whose model is the simplified float model.

    Args:
        job: The job.
        candidate: The candidate that it replaces.
        plan: The plan of the new candidate. All its units become float; their reasons stay.
        reason: The reason of the units that have none.
    """
    told = {name: choice.reason for name, choice in plan.choices.items()}
    if job.source is not None:  # there are data: missing ranges are not the reason
        told = {name: own for name, own in told.items() if own != NO_RANGES}
    choices = {
        u.name: replace(plan.choices[u.name], impl=Impl.FLOAT, reason=told.get(u.name) or other(reason))
        for u in plan.units
    }
    model = job.simple.clone()
    describe_origin(model, (), {}, job.asked())
    in_float, source = plan.with_choices(choices), job.float_source
    return replace(candidate, model=model, plan=in_float, qparams={}, source=source, relieved={})


def _finish(
    job: Job,
    ranges: TensorRanges,
    trial: Trial,
    output: str | os.PathLike[str],
    written: Written | None = "int8",
) -> Run:
    """Write the model and its plan, as the last step that can fail, and fill in the result.

    Args:
        job: The job.
        ranges: The ranges.
        trial: The model to write.
        output: The file to write.
        written: What the model is; None for a model that requant has made before.
    """
    job.progress(INSPECT, 0, None)
    kernels = _executed(job, trial)
    plan = trial.candidate.plan
    model = trial.candidate.model
    if written is not None:
        model = as_written(model, job, ranges, plan, written)
    # another run with the same output waits, so that model and plan are of one run
    with exclusive(Path(os.path.realpath(output)).parent), save_plan(plan, plan_path(output)):
        meanwhile = os.path.lexists(output) and not job.options.force  # it was not there when the run began
        size = save_model(model, output, external=job.options.external_data)
    result = _result(job, trial, kernels, os.fspath(output), size)
    if meanwhile:
        result = replace(result, notes=(MEANWHILE, *result.notes))
    return Run(job, ranges, trial, kernels, result)


def _executed(job: Job, trial: Trial) -> tuple[KernelRun, ...]:
    """Run the model under the profiler; empty without data."""
    plan = trial.candidate.plan
    float_only = not plan.has_int8
    # the runtime cannot write the optimised graph of a large float model
    if job.feed is None or (float_only and job.weights.large):
        return ()
    times = profiled_runs(None if trial.latency is None else trial.latency.int8_ms)
    return job.runtime.profile(trial.candidate.source, job.feed, threads=job.options.threads, times=times).runs


def profiled_runs(milliseconds: float | None) -> int:
    """Return how often a model runs under the profiler, from the time of one run."""
    return LEAST_RUNS if not milliseconds else min(max(int(PROFILED_MS / milliseconds), LEAST_RUNS), MOST_RUNS)


def _result(job: Job, trial: Trial, kernels: tuple[KernelRun, ...], output: str, size: int) -> Result:
    """Return the result of a run, without the values that are known only at its end."""
    candidate, plan = trial.candidate, trial.candidate.plan
    floats = [u for u in plan.units if not plan.impl(u).int8]
    return Result(
        output=output,
        format=job.options.format,
        calibration=job.supply.calibration if job.static else "",
        ranges=job.supply.description,
        data="" if job.judging is None else job.judging.description,
        int8_nodes=sum(len(u.nodes) for u in plan.units) - sum(len(u.nodes) for u in floats),
        forms=_forms(plan),
        mac_share_int8=integer_share(kernels),
        kernels=_kernels(kernels),
        float_nodes=_float_nodes(job, plan, kernels),
        relieved=candidate.relieved,
        accuracy=trial.accuracy,
        latencies=trial.latencies,
        float_bytes=size_on_disk(job.path),
        int8_bytes=size,
        pipeline=candidate.model.metadata_props.get(METADATA_KEY, ""),
        placement=candidate.placement,
        effort=job.options.effort,
        corrections=tuple(name for name in CORRECTIONS if name in candidate.corrected),
        native=native_use(job, trial),
        opponent=job.opponent,
        simple=job.simple_name,
        given=beside_given(job, candidate),
        runtime=str(job.runtime.identity),
        promise=promised(job, trial.accuracy) if job.judged and trial.accuracy.samples else None,
        notes=(
            *job.notes,
            *([GIVEN_NOTE] if was_given(trial.accuracy.sqnr_db) else []),
            *replaced_notes(job.simple, trial.accuracy),
            *_larger(job, size),
            *_over_batches(job, trial),
            *_unused(job, plan),
            *_deviations(job, plan, kernels),
        ),
    )


def _float_nodes(job: Job, plan: Plan, kernels: Sequence[KernelRun]) -> tuple[FloatNode, ...]:
    """Return the nodes that stay float; the time of a unit is that of its first node."""
    types = {name: node.op_type for name, node in nodes_by_name(job.simple).items()}
    spent, found = Owners(job.simple, plan.units).spent(kernels).units, []
    for unit in (each for each in plan.units if not plan.impl(each).int8):
        reason = plan.choices[unit.name].reason
        kind = "" if reason.code in OWN_WORDS else reason.code
        for index, name in enumerate(unit.nodes):
            took = (0.0 if index else spent.get(unit.name, 0.0)) if kernels else None
            found.append(FloatNode(name, types[name], reason.text, kind, took))
    return tuple(found)


def _larger(job: Job, size: int) -> list[str]:
    """Return a note that says why an output of `size` bytes is larger than the given file, where this is known."""
    given = size_on_disk(job.path)
    if size <= given or given > SHORT * Weights.of(job.simple).total:
        return []
    values = sum(tensor.size for tensor in tensors(load_model(job.path)))
    return [LARGER if given <= SHORT * FLOAT_BYTES * values else COMPUTED]


def _forms(plan: Plan) -> dict[str, int]:
    """Count the units of each int8 implementation."""
    impls = [plan.impl(unit) for unit in plan.units]
    return {impl.value: impls.count(impl) for impl in Impl if impl.int8 and impl in impls}


def _unused(job: Job, plan: Plan) -> list[str]:
    """Return a note for each range of the user that the plan does not use."""
    own = job.supply.overrides
    values = {value for unit in plan.units for value in (*unit.inputs, *unit.outputs)}
    known = ir.convenience.create_value_mapping(job.simple.graph) if own.tensors else {}
    notes = []
    for name, override in own.tensors.items():
        if override.keep_float or name in plan.observed or name not in known:
            continue
        root = plan.root(name)
        why = f"it has the scale of {root!r}" if root != name else "it stays float"
        if name not in values:
            why = "it lies inside a unit" if constant(known[name]) is None else "it is a constant"
        notes.append(f"{own.source}: the range of tensor {name!r} is not used: {why}")
    return notes


def _deviations(job: Job, plan: Plan, runs: tuple[KernelRun, ...]) -> list[str]:
    """Return a note for each unit with another kernel than planned."""
    # a model for another runtime has other kernels, and one that requant wrote has its integers already
    if not job.policy.timed or is_finished(job.simple):
        return []
    owners, planned = Owners(job.simple, plan.units), {u.name for u in plan.units if plan.impl(u).reads_u8}
    floats = {owners.owner(run): run for run in runs if run.macs and not run.integer}
    integer = {owners.owner(run): run.op for run in runs if run.integer}
    against = [
        f"planned int8, but the runtime ran {name!r} as {run.op} in float, {run.microseconds:.0f} us"
        for name, run in floats.items()
        if name in planned
    ]
    return against + [
        f"planned float, but the runtime ran {unit.name!r} as {integer[unit.name]}"
        for unit in plan.units
        if plan.impl(unit) is Impl.FLOAT and plan.choices[unit.name].reason.code not in INTEGER_ALREADY
        if unit.name in integer
    ]


def _kernels(runs: tuple[KernelRun, ...]) -> dict[str, int]:
    """Count the kernels with multiply-accumulates, by operator; by its type too, if one operator has several."""
    counts: dict[str, int] = {}
    for run in runs:
        if run.macs:
            counts[run.title] = counts.get(run.title, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))

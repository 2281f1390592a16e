"""The last step of `quantize_model`: choose between INT8 and float, and write the model."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ... import RequantError
from ...calibration.model.session import Array, ModelSource
from ...system.scratch import exclusive
from ...transforms.int8.existing import is_finished
from ...transforms.int8.plan import Impl, Plan
from ..accuracy.frontier import Frontier
from ..job import Candidate, Job, Trial
from ..model.files import load_model
from ..model.metadata import Written, describe_origin
from ..model.writing import save_model
from ..options.efforts import EFFORTS
from ..placement.measuring import least_kernels, settled
from ..placement.plan_file import plan_path, save_plan
from ..placement.reasons import NO_RANGES, NOT_WRITTEN
from ..result import Rejected, Result
from ..runtime.profile import KernelRun, Profile
from ..runtime.progress import INSPECT, expect
from ..runtime.timing import Latency
from ..sensitivity.each_tensor import RUIN_DB
from .emit import emit
from .evidence import all_int8_candidate, evidence_of, gather_evidence
from .fall_back import fall_back_to_float
from .fill import result_of
from .forecast import forecast_second_placement
from .judge import UNMEASURED, if_it_runs, is_slower, judge, measure_accuracy
from .notes import MEANWHILE, NOTHING_LEFT, advice
from .prepare import as_given
from .ranges import TensorRanges
from .worth import INTEGER_ALREADY, MOST_DOUBT, WORTHWHILE, WhyNot, too_slow, why_not
from .written import as_written

LEAST_GIVEN_DB = 8.0  # the least SQNR of a dynamically quantized model that is kept: noise of a sixth of the power
PROFILED_MS = 100.0  # total time of the profiled runs, with at least and at most this number of runs:
LEAST_RUNS, MOST_RUNS = 3, 10
MORE_PROFILES = 2  # of a model whose kernels had to wait for a processor


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
        cause: Why it was not, in a few words; empty without one.
    """

    job: Job
    ranges: TensorRanges
    trial: Trial
    kernels: tuple[KernelRun, ...]
    result: Result
    rejected: Trial | None = None
    cause: str = ""


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
        fails = WhyNot(nothing=f"the int8 model does not run: {error}")
        return _keep_float(job, ranges, Trial(candidate, UNMEASURED), output, fails)
    slow = is_slower(job, trial.latencies)
    if job.outputs_judge and not slow and not candidate.evidence.noise and trial.accuracy.worst_sqnr_db < RUIN_DB:
        trial = _with_ruinous_tensors_in_float(job, ranges, trial)
    if job.outputs_judge and not slow and not job.options.force_int8:
        trial = fall_back_to_float(job, ranges, trial)
    reason = why_not(job, trial)
    if reason and not job.options.force_int8:
        run = _keep_float(job, ranges, trial, output, reason)
        return replace(run, result=replace(run.result, notes=(*run.result.notes, *advice(job, reason))))
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
        return _keep_float(job, ranges, Trial(candidate, UNMEASURED), output, WhyNot(nothing=reason))
    best = judge(job, candidate)
    slow = too_slow(job, best) if frontier.best is not None and not job.options.force_int8 else ""
    return _keep_float(job, ranges, best, output, WhyNot(slow=slow)) if slow else _finish(job, ranges, best, output)


def _with_ruinous_tensors_in_float(job: Job, ranges: TensorRanges, trial: Trial) -> Trial:
    """Emit the model again, with each tensor in float that alone ruins the outputs; return the better of both models.

    Each tensor is tried alone in uint8. If that takes longer than `Effort.retry`, none is tried, and the given model
    is returned. The returned model has the evidence of the trials.
    """
    expect(job.progress, forecast_second_placement(job))
    tried = trial.candidate if job.policy.plan is not None else all_int8_candidate(job, ranges)
    evidence = evidence_of(job, ranges, tried, trial.accuracy, EFFORTS[job.options.effort].retry, RUIN_DB)
    known = replace(trial, candidate=replace(trial.candidate, evidence=evidence))
    if not evidence.kept_float and not any(evidence.harmed_by.values()):
        return known
    candidate = emit(job, ranges, evidence, trial.candidate.placement)
    accuracy = if_it_runs(partial(measure_accuracy, job, candidate))
    if accuracy is not None and accuracy.worst_sqnr_db > trial.accuracy.worst_sqnr_db:
        return if_it_runs(partial(judge, job, candidate, accuracy)) or known
    return known


def _keep_float(job: Job, ranges: TensorRanges, trial: Trial, output: str | os.PathLike[str], reason: WhyNot) -> Run:
    """Write a float model instead of the INT8 model, with the reason as `Result.why_not`."""
    chosen = _best_float(job.unscaled or job, trial, str(reason))
    run = _finish(chosen.job, ranges, chosen.trial, output, chosen.written)
    told = f"{chosen.reason}: the output is {chosen.what}"
    if not trial.latencies or not trial.candidate.plan.has_int8:  # it was not timed, or is the float model itself
        return replace(run, result=replace(run.result, why_not=told))
    result = replace(run.result, why_not=told, rejected=Rejected(trial.accuracy, trial.latencies))
    return replace(run, result=result, rejected=trial, cause=reason.cause)


@dataclass(frozen=True, slots=True)
class _FloatModel:
    """A float model that may be written instead of the INT8 model.

    Attributes:
        job: The job whose float model it is.
        trial: The model, judged and timed.
        written: What it is, for its metadata.
        reason: Why the INT8 model is not written.
        what: What it is, in words.
    """

    job: Job
    trial: Trial
    written: Written
    reason: str
    what: str


def _best_float(job: Job, rejected: Trial, reason: str) -> _FloatModel:
    """Return the float model to write: the simplified one, with two exceptions.

    If the user's model computes its ranges at run time, its operators keep doing so, unless float is faster or they
    ruin the outputs. If simplification makes the float model slower, it is the model that the user gave.

    Args:
        job: The job.
        rejected: The INT8 model that is not written.
        reason: Why it is not written.
    """
    found = _simplified_or_restored(job, rejected, reason)
    faster = _given_if_faster(found.job, rejected.candidate, found.trial, found.reason)
    if faster is None:
        return found
    given, tried = faster
    times = " instead of ".join(f"{each.latencies[0].int8_ms:.3g}" for each in (found.trial, tried))
    what = f"the given model, because simplification makes it slower here ({times} ms)"
    return _FloatModel(given, tried, "unsimplified", found.reason, what)


def _simplified_or_restored(job: Job, rejected: Trial, reason: str) -> _FloatModel:
    """Return the simplified float model, or the simplified model whose operators compute their ranges at run time.

    The second one exists if the user gave such a model (`Job.restored`). It is returned unless the float model is
    faster, or it leaves less than `LEAST_GIVEN_DB`; `_FloatModel.reason` says so then.

    Args:
        job: The job.
        rejected: The INT8 model that is not written.
        reason: Why it is not written.
    """
    plan = _plan_of(job, rejected.candidate.plan)
    in_float = _float_candidate(job, rejected.candidate, plan, reason)
    simple = judge(job, in_float) if plan.has_int8 else replace(rejected, candidate=in_float)
    faster = bool(simple.latencies) and all(each.speedup >= WORTHWHILE for each in simple.latencies)
    if job.restored and not faster:
        given = as_given(job)
        tried = judge(given, _float_candidate(given, rejected.candidate, given.all_int8_plan, reason))
        if tried.accuracy.worst_sqnr_db >= LEAST_GIVEN_DB:
            return _FloatModel(given, tried, "given", reason, _simplified_text(given.all_int8_plan))
        reason += f"; the given model leaves only {tried.accuracy.worst_sqnr_db:.1f} dB"
    return _FloatModel(job, simple, "float", reason, _simplified_text(plan))


def _plan_of(job: Job, plan: Plan) -> Plan:
    """Return a plan for the operators of a job, with the choices of one that may have operators of a correction too."""
    own = job.all_int8_plan
    if own.units == plan.units:
        return plan
    return own.with_choices({unit.name: plan.choices[unit.name] for unit in own.units if unit.name in plan.choices})


def _simplified_text(plan: Plan) -> str:
    """Return what a simplified model is, in words: it is no float model if units computed in integers before."""
    before = any(choice.reason.code in INTEGER_ALREADY for choice in plan.choices.values())
    return f"the simplified {'' if before else 'float '}model"


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
    tried = judge(given, _float_candidate(given, candidate, given.all_int8_plan, reason, as_it_is=True))
    return (given, tried) if _speed(tried.latencies) >= WORTHWHILE * _speed(simple.latencies) else None


def _speed(latencies: Sequence[Latency]) -> float:
    """Return the speed-up of a float model over the given one: the geometric mean of the best and the worst load."""
    speeds = [latency.speedup for latency in latencies]
    return math.sqrt(max(speeds) * min(speeds))


def _float_candidate(job: Job, candidate: Candidate, plan: Plan, reason: str, *, as_it_is: bool = False) -> Candidate:
    """Return a candidate whose model is the simplified float model, with slow functions in fast operators.

    Args:
        job: The job.
        candidate: The candidate that it replaces.
        plan: The plan of the new candidate. All its units become float; their reasons stay.
        reason: The reason of the units that have none.
        as_it_is: Whether the functions stay.
    """
    told = {name: choice.reason for name, choice in plan.choices.items()}
    if job.source is not None:  # there are data: missing ranges are not the reason
        told = {name: own for name, own in told.items() if own != NO_RANGES}
    choices = {
        u.name: replace(plan.choices[u.name], impl=Impl.FLOAT, reason=told.get(u.name) or NOT_WRITTEN.about(reason))
        for u in plan.units
    }
    model = (job.simple if as_it_is else job.spelled).clone()
    describe_origin(model, (), {}, job.asked())
    in_float, source = plan.with_choices(choices), job.float_source if as_it_is else job.spelled_source
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
    result = result_of(job, trial, kernels, os.fspath(output), size)
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
    milliseconds = None if trial.latency is None else trial.latency.int8_ms
    return profiled_kernels(job, trial.candidate.source, job.feed, milliseconds)


def profiled_kernels(
    job: Job, model: ModelSource, feed: Mapping[str, Array], milliseconds: float | None
) -> tuple[KernelRun, ...]:
    """Run a model under the profiler; return its kernels with times that contain no waiting, as far as that is known.

    Where the kernels had to wait for a processor it is profiled again. What still waits, and what the profiler itself
    takes, is taken off all times in proportion, so that they add up to the time of a run at most.

    Args:
        job: The job.
        model: The model.
        feed: The inputs.
        milliseconds: The time of a run; None if it is not known.

    Raises:
        RequantError: The model cannot be run.
    """
    times, profiles = _profiled_runs(milliseconds), list[Profile]()
    while not profiles or (len(profiles) <= MORE_PROFILES and not settled(profiles)):
        profiles.append(job.runtime.profile(model, feed, threads=job.options.threads, times=times))
    kernels = least_kernels(profiles)
    total = math.fsum(run.microseconds for run in kernels)
    share = 1.0 if milliseconds is None or not total else min(1e3 * milliseconds / total, 1.0)
    return tuple(replace(run, microseconds=share * run.microseconds) for run in kernels)


def _profiled_runs(milliseconds: float | None) -> int:
    """Return how often a model runs under the profiler, from the time of one run."""
    return LEAST_RUNS if not milliseconds else min(max(int(PROFILED_MS / milliseconds), LEAST_RUNS), MOST_RUNS)

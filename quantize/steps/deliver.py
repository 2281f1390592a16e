"""The last step of `quantize_model`: choose between INT8 and float, write the model, fill in the result."""

from __future__ import annotations

import os
from dataclasses import replace

from ... import RequantError
from ...transforms import METADATA_KEY
from ...transforms.graph import nodes_by_name
from ...transforms.plan import Impl
from ...transforms.reasons import INTEGER, other
from ..job import Candidate, Evidence, Job, Trial
from ..model.files import save_model, size_on_disk
from ..model.metadata import describe_origin
from ..options.efforts import CORRECTIONS
from ..placement.plan_file import plan_path, save_plan
from ..placement.reasons import ALREADY
from ..result import FloatNode, Frontier, Result
from ..runtime.attribution import Owners
from ..runtime.profile import KernelRun, executed, integer_share
from ..sensitivity.each_tensor import RUIN_DB, ruinous
from .emit import emit
from .evidence import each_alone, gather_evidence
from .judge import UNMEASURED, first_feed, judge, measure_accuracy
from .ranges import TensorRanges

LEAST_DB = 8.0  # an INT8 model whose noise has a sixth of the power of an output is no model of the same thing


WORTHWHILE = 1.02  # an INT8 model that gains less than this gives up accuracy for the noise of the clock


EXPECTED = frozenset({ALREADY.code, INTEGER.code})  # why units of which the plan makes nothing compute in integers


def deliver_searched(job: Job, candidate: Candidate | None, found: Frontier, output: str | os.PathLike[str]) -> Result:
    """Write what a search has found, or the float model where that is at least as fast and keeps the bar anyway."""
    if candidate is None:
        tried = "nothing in this model can become int8" if found.done else "the time was up before a model was tried"
        candidate = Candidate(job.simple.clone(), job.all_int8_plan, {}, job.float_source)
        return _keep_float(job, Trial(candidate, UNMEASURED, None), output, tried)
    best = judge(job, candidate)
    slow = _too_slow(job, best) if found.best is not None and not job.options.force_int8 else ""
    return _keep_float(job, best, output, slow) if slow else _finish(job, best, output)


def deliver(job: Job, ranges: TensorRanges, output: str | os.PathLike[str]) -> Result:
    """Emit, judge, and write what is worth having.

    Raises:
        RequantError: The output cannot be written.
    """
    candidate = emit(job, ranges, gather_evidence(job, ranges))
    try:
        found = judge(job, candidate)
    except RequantError as error:
        return _keep_float(job, Trial(candidate, UNMEASURED, None), output, f"the int8 model does not run: {error}")
    looked = candidate.evidence.noise
    if job.judged and not looked and found.accuracy.worst_sqnr_db < RUIN_DB:
        found = _mended(job, ranges, found)
    reason = _why_not(job, found)
    if reason and not job.options.force_int8:
        return _keep_float(job, found, output, reason)
    result = _finish(job, found, output)
    return replace(result, notes=(*result.notes, f"written all the same: {reason}")) if reason else result


def _mended(job: Job, ranges: TensorRanges, found: Trial) -> Trial:
    """Leave the tensors in float that alone ruin the outputs, where that helps; else return what there is."""
    kept = ruinous(each_alone(job, found.candidate, found.accuracy))
    if not kept:
        return found
    mended = emit(job, ranges, Evidence(kept))
    accuracy = measure_accuracy(job, mended)
    return found if accuracy.worst_sqnr_db <= found.accuracy.worst_sqnr_db else judge(job, mended, accuracy)


def _why_not(job: Job, found: Trial) -> str:
    """Say why the INT8 model is not worth having; empty when it is."""
    plan = found.candidate.plan
    if not any(plan.impl(unit).int8 for unit in plan.units):
        if found.candidate.placement.how != "rules":
            return "the placement leaves everything in float"
        more = any(plan.choices[unit.name].reason.code in EXPECTED for unit in plan.units)
        return f"nothing {'more ' if more else ''}in this model can become int8"
    if not job.judged:  # random inputs are no evidence against a model
        return ""
    if not found.accuracy.worst_sqnr_db >= LEAST_DB:
        return f"int8 leaves only {found.accuracy.worst_sqnr_db:.1f} dB at an output"
    return _too_slow(job, found)


def _too_slow(job: Job, found: Trial) -> str:
    """Say that an INT8 model is too slow to be worth it; empty when it is fast enough, or portable."""
    if job.policy.portable or found.latency is None or found.latency.speedup >= WORTHWHILE:
        return ""
    return f"int8 gains too little here: {found.latency.speedup:.2f}x the speed of float"


def _keep_float(job: Job, found: Trial, output: str | os.PathLike[str], reason: str) -> Result:
    """Write the simplified float model instead of the INT8 one, and say why."""
    plan = found.candidate.plan
    choices = {
        u.name: replace(plan.choices[u.name], impl=Impl.FLOAT, reason=plan.choices[u.name].reason or other(reason))
        for u in plan.units
    }
    model = job.simple.clone()
    describe_origin(model, (), {}, job.asked())
    kept = Candidate(model, plan.with_choices(choices), {}, job.float_source, placement=found.candidate.placement)
    before = any(choice.reason.code in EXPECTED for choice in plan.choices.values())
    verdict = f"{reason}: the output is the simplified {'' if before else 'float '}model"
    if not any(plan.impl(unit).int8 for unit in plan.units):  # what was judged and timed is this very model
        return replace(_finish(job, replace(found, candidate=kept), output), verdict=verdict)
    result = _finish(job, judge(job, kept), output)
    rejected = None if found.latency is None else (found.accuracy, found.latency)
    return replace(result, verdict=verdict, rejected=rejected)


def _finish(job: Job, found: Trial, output: str | os.PathLike[str]) -> Result:
    """Write the model, as the last thing that can fail, and gather what the user is told."""
    job.progress("inspect", 0, None)
    candidate, plan = found.candidate, found.candidate.plan
    feed = first_feed(job)
    float_only = not any(plan.impl(unit).int8 for unit in plan.units)
    if feed is None or (float_only and job.weights.large):  # of which the runtime cannot write what it made
        runs: tuple[KernelRun, ...] = ()
    else:
        runs = executed(candidate.source, feed, threads=job.options.threads)
    save_plan(plan, plan_path(output))
    try:
        size = save_model(candidate.model, output, external=job.options.external_data)
    except BaseException:
        plan_path(output).unlink(missing_ok=True)
        raise
    floats = [u for u in plan.units if not plan.impl(u).int8]
    types = {name: node.op_type for name, node in nodes_by_name(job.simple).items()}
    return Result(
        output=os.fspath(output),
        format=job.options.format,
        calibration=job.supply.calibration if job.static else "",
        ranges=job.supply.description,
        data="" if job.source is None else job.source.description,
        int8_nodes=sum(len(u.nodes) for u in plan.units) - sum(len(u.nodes) for u in floats),
        forms=_forms(found),
        mac_share_int8=integer_share(runs),
        kernels=_kernels(runs),
        float_nodes=tuple(
            FloatNode(name, types[name], plan.choices[u.name].reason.text) for u in floats for name in u.nodes
        ),
        relieved=candidate.relieved,
        accuracy=found.accuracy,
        latency=found.latency,
        float_bytes=size_on_disk(job.path),
        int8_bytes=size,
        pipeline=candidate.model.metadata_props[METADATA_KEY],
        placement=candidate.placement,
        effort=job.options.effort,
        corrections=tuple(name for name in CORRECTIONS if name in job.corrections),
        notes=(*job.notes, *_unused(job, found), *_deviations(job, found, runs)),
    )


def _forms(found: Trial) -> dict[str, int]:
    """Count the units of each implementation that is int8."""
    plan = found.candidate.plan
    impls = [plan.impl(unit) for unit in plan.units]
    return {impl.value: impls.count(impl) for impl in Impl if impl.int8 and impl in impls}


def _unused(job: Job, found: Trial) -> list[str]:
    """Say which ranges that the user has set for tensors of the model decide nothing."""
    plan, own = found.candidate.plan, job.supply.overrides
    values = {value for unit in plan.units for value in (*unit.inputs, *unit.outputs)}
    notes = []
    for name, override in own.tensors.items():
        if override.keep_float or name in plan.observed or name not in values:
            continue
        root = plan.root(name)
        why = f"it has the scale of {root!r}" if root != name else "it stays float"
        notes.append(f"{own.source}: the range of tensor {name!r} is not used: {why}")
    return notes


def _deviations(job: Job, found: Trial, runs: tuple[KernelRun, ...]) -> list[str]:
    """Say which units the runtime computed otherwise than planned."""
    plan = found.candidate.plan
    if plan.portable:  # written for no kernels of this runtime
        return []
    integer = {run.node.split("_token_")[0]: run.op for run in runs if run.integer}
    owners, planned = Owners(job.simple, plan.units), {u.name for u in plan.units if plan.impl(u).reads_u8}
    floats = {owners.of(run.node): run for run in runs if run.macs and not run.integer}
    against = [
        f"planned int8, but the runtime ran {name!r} as {run.op} in float, {run.microseconds:.0f} us"
        for name, run in floats.items()
        if name in planned
    ]
    return against + [
        f"planned float, but the runtime ran {unit.name!r} as {integer[name]}"
        for unit in plan.units
        if plan.impl(unit) is Impl.FLOAT and plan.choices[unit.name].reason.code not in EXPECTED
        for name in unit.nodes
        if name in integer
    ]


def _kernels(runs: tuple[KernelRun, ...]) -> dict[str, int]:
    """Count the kernels that did multiply-accumulates, by operator."""
    counts: dict[str, int] = {}
    for run in runs:
        if run.macs:
            counts[run.op] = counts.get(run.op, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))

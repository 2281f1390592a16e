"""`quantize_model`: a float model and sample data in, a measured INT8 model out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from .. import RequantError
from ..calibration.sources import DataSource
from ..transforms import METADATA_KEY
from ..transforms.graph import nodes_by_name
from ..transforms.plan import Impl
from ..transforms.reasons import INTEGER, other
from .corrections import CORRECTIONS
from .emit import choices, each_alone, emit, gathered, scaled
from .evidence import RUIN_DB, ruinous
from .files import check_output, save_model, size_on_disk, staging
from .frontier import Frontier, Goal, opened, search
from .job import Candidate, Evidence, Job, Trial
from .metadata import describe_origin
from .options import Options
from .placement.attribution import Owners
from .placement.costs import Costs
from .placement.files import plan_path, write_plan
from .placement.search import measured_costs
from .planner import ALREADY
from .prepare import prepare
from .progress import Progress, Stopwatch, silent
from .ranges import Found, find_ranges
from .result import FloatNode, Result
from .runtime.execution import KernelRun, executed, integer_share
from .selection import Strategy
from .trial import UNMEASURED, first_feed, judge, trial

LEAST_DB = 8.0  # an INT8 model whose noise has a sixth of the power of an output is no model of the same thing
WORTHWHILE = 1.02  # an INT8 model that gains less than this gives up accuracy for the noise of the clock
EXPECTED = frozenset({ALREADY.code, INTEGER.code})  # why units of which the plan makes nothing compute in integers

Look: TypeAlias = Callable[[Job, Found, Result], None]
"""Told the job, the ranges and what came of it."""


def quantize_model(
    model: str | os.PathLike[str],
    data: DataSource | None,
    output: str | os.PathLike[str],
    options: Options | None = None,
    progress: Progress = silent,
    look: Look | None = None,
) -> Result:
    """Quantize a float ONNX model and measure what came of it.

    The model is simplified, observed on the data, planned, emitted and compared with the original on the same data.
    Where INT8 is not faster than float on this machine (`WORTHWHILE`) or is far from it (`LEAST_DB`), the simplified
    float model is written and the result says so, unless ``force_int8`` is set.

    Args:
        model: Path of the float model.
        data: A data source: a path or ``FILE.npz:SPLIT`` or ``FILE.py:NAME``, an iterable of feeds, or a callable.
            None where ranges are given, or with the strategy ``dynamic`` or ``weight-only``, which need none: the model
            is then tried on random inputs, if it runs on any.
        output: Path of the model to write; it appears whole or not at all.
        options: See `Options`.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).
        look: Called when the model is written, while all that it was made from is still there.

    Raises:
        RequantError: The request cannot be met; nothing was written.
    """
    options = options or Options()
    check_output(output, model, force=options.force, external=options.external_data)
    check_output(plan_path(output), model, force=options.force)
    if options.plan is not None and os.path.realpath(options.plan) == os.path.realpath(plan_path(output)):
        raise RequantError(f"{options.plan}: is where the plan of {output} goes; give the edited one another name")
    if data is None:
        _check_without_data(model, options)
    watch = Stopwatch(progress)
    with staging(output) as folder:
        job = scaled(prepare(model, data, options, folder, watch))
        ranges = find_ranges(job)
        result = replace(_proven(job, ranges, output), findings=ranges.findings, seconds=watch.seconds())
        if look is not None:
            look(job, ranges, result)
        return result


def search_model(
    model: str | os.PathLike[str],
    data: DataSource,
    output: str | os.PathLike[str],
    goal: Goal,
    options: Options | None = None,
    progress: Progress = silent,
    look: Look | None = None,
) -> Result:
    """Find the fastest INT8 model that keeps a metric, and write it.

    The best model found is always written: where none keeps the bar, the one with the best score, and where the fastest
    that keeps it is not faster than float (`WORTHWHILE`), the simplified float model, and the result says so.
    `Result.search` has everything that was tried. An interrupted search goes on when it is asked for again.

    Args:
        model: Path of the float model.
        data: The data that give the ranges and corrections, as `quantize_model` takes them.
        output: Path of the model to write; what was tried is kept beside it until the search is done.
        goal: The metric, how much of it may be lost, and the data to judge by.
        options: See `Options`.
        progress: As for `quantize_model`.
        look: As for `quantize_model`.

    Raises:
        RequantError: The request cannot be met; nothing was written.
    """
    options = options or Options()
    check_output(output, model, force=options.force, external=options.external_data)
    check_output(plan_path(output), model, force=options.force)
    if options.plan is not None or options.noise_weight:
        raise RequantError("a search decides what becomes int8: it takes no plan and no price of noise")
    state, watch = Path(f"{os.fspath(output)}.search.json"), Stopwatch(progress)
    with staging(output) as folder:
        job = scaled(prepare(model, data, options, folder, watch))
        source = opened(job, goal)
        ranges = find_ranges(job)
        candidate, found = search(job, ranges, goal, source, state)
        result = _searched(job, candidate, found, output)
        if look is not None:
            look(job, ranges, result)
    result = replace(result, search=found, findings=ranges.findings, seconds=watch.seconds())
    if found.interrupted:
        raise KeyboardInterrupt(f"{os.fspath(output)} is the best model so far; the same command goes on with --force")
    if found.done:
        state.unlink(missing_ok=True)
    if found.best is None and found.most_accurate is not None:
        best = found.most_accurate.value
        return replace(
            result, verdict=f"no int8 model keeps {found.metric} at {found.bar:.6g}: the output has {best:.6g}"
        )
    return result


def _searched(job: Job, candidate: Candidate | None, found: Frontier, output: str | os.PathLike[str]) -> Result:
    """Write what a search has found, or the float model where that is at least as fast and keeps the bar anyway."""
    if candidate is None:
        tried = "nothing in this model can become int8" if found.done else "the time was up before a model was tried"
        candidate = Candidate(job.simple.clone(), job.widest, {}, job.float_source)
        return _keep_float(job, Trial(candidate, UNMEASURED, None), output, tried)
    best = trial(job, candidate)
    slow = _too_slow(job, best) if found.best is not None and not job.options.force_int8 else ""
    return _keep_float(job, best, output, slow) if slow else _finish(job, best, output)


def measure_costs(
    model: str | os.PathLike[str], data: DataSource, options: Options | None = None, progress: Progress = silent
) -> Costs:
    """Measure what the units of a model take on this machine, in float and in integers, whatever is kept of before.

    Args:
        model: Path of the float model.
        data: A data source, as `quantize_model` takes it.
        options: See `Options`; where the model is placed is of no matter.
        progress: As for `quantize_model`.

    Raises:
        RequantError: The model or the data cannot be used, or there is nothing to measure.
    """
    options = replace(options or Options(), place="measured", costs=None, plan=None)
    with staging(None) as folder:
        job = prepare(model, data, options, folder, progress)
        facts, rules, write = choices(job, find_ranges(job), Evidence())
        return measured_costs(job, facts, rules, write, first_feed(job))


def _proven(job: Job, ranges: Found, output: str | os.PathLike[str]) -> Result:
    """Emit, judge, and write what is worth having.

    Raises:
        RequantError: The output cannot be written.
    """
    candidate = emit(job, ranges, gathered(job, ranges))
    try:
        found = trial(job, candidate)
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


def _check_without_data(model: str | os.PathLike[str], options: Options) -> None:
    """Refuse what needs ranges, or would do nothing.

    Raises:
        RequantError: The strategy needs ranges, or an option is about them.
    """
    if options.ranges is not None:
        if options.samples is not None:
            raise RequantError(f"{model}: no data, so that samples would do nothing")
        return
    if options.selection.strategy not in (Strategy.DYNAMIC, Strategy.WEIGHT):
        raise RequantError(
            f"{model}: no data: give a sample of the model's inputs, or ranges, or choose the strategy dynamic or "
            "weight-only"
        )
    plain = Options()
    idle = {
        "samples": options.samples != plain.samples,
        "calibration": options.calibration != plain.calibration,
        "overrides": options.overrides is not None,
        "activation": options.scheme.activation != plain.scheme.activation,
        "symmetric": options.scheme.symmetric,
    }
    if any(idle.values()):
        asked = ", ".join(name for name, given in idle.items() if given)
        raise RequantError(f"{model}: no data, so that there are no ranges, and {asked} would do nothing")


def _mended(job: Job, ranges: Found, found: Trial) -> Trial:
    """Leave the tensors in float that alone ruin the outputs, where that helps; else return what there is."""
    kept = ruinous(each_alone(job, found.candidate, found.accuracy))
    if not kept:
        return found
    mended = emit(job, ranges, Evidence(kept))
    accuracy = judge(job, mended)
    return found if accuracy.worst_sqnr_db <= found.accuracy.worst_sqnr_db else trial(job, mended, accuracy)


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
    if job.options.portable or found.latency is None or found.latency.speedup >= WORTHWHILE:
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
    result = _finish(job, trial(job, kept), output)
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
    write_plan(plan, plan_path(output))
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

"""`quantize_model`: a float model and sample data in, a measured INT8 model out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import onnx_ir as ir

from .. import RequantError
from ..calibration.files import write_atomically
from ..calibration.ranges import parse_rule
from ..calibration.runner import Observations, observe
from ..calibration.sources import DataSource, Source
from ..transforms import METADATA_KEY, signature, verify
from ..transforms.bias_correction import mean_axis
from ..transforms.fuse_silu import fuse_silu
from ..transforms.insert_qdq import insert_qdq
from ..transforms.ops import OPS
from ..transforms.plan import Impl, Plan
from ..transforms.qdq_to_qoperator import qdq_to_qoperator
from ..transforms.qparams import QParams, asymmetric_u8
from ..transforms.units import node_name
from .accuracy import Accuracy, measure
from .data import open_data, stacked
from .evidence import RUIN_DB, alone, ruinous
from .files import about, check_output, load_model, size_on_disk, to_bytes
from .planner import ALREADY, Selection, choose
from .progress import Progress, silent
from .result import FloatNode, Result
from .runtime.execution import KernelRun, executed, integer_share
from .runtime.session import Runner
from .runtime.timing import Latency, latency
from .simplify import simplify

FORMATS = ("qdq", "qoperator")
JUDGED = 64  # samples on which the emitted model is compared: enough to tell a ruined model from a good one
LEAST_DB = 8.0  # an INT8 model whose noise has a sixth of the power of an output is no model of the same thing
WORTHWHILE = 1.02  # an INT8 model that gains less than this gives up accuracy for the noise of the clock
EVIDENCE = 4  # samples for each tensor tried alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be asked of `quantize_model`.

    Attributes:
        samples: How many samples calibrate, picked evenly; None for all.
        batch: Items per run while the latency is measured.
        calibration: Range rule: ``minmax`` or ``percentile(99.99)``.
        format: ``qdq``, or ``qoperator`` for the fused operators.
        selection: Which nodes and operators may become int8.
        threads: Threads inside one operator for the latency; 0 leaves the choice to the runtime.
        force: Overwrite an existing output.
        seconds: How long the latency of the two models is measured.
    """

    samples: int | None = None
    batch: int = 1
    calibration: str = "minmax"
    format: str = "qdq"
    selection: Selection = field(default_factory=Selection)
    threads: int = 1
    force: bool = False
    seconds: float = 3.0

    def __post_init__(self) -> None:
        """Refuse what cannot be done.

        Raises:
            RequantError: An unknown format or rule, or a number out of range.
        """
        if self.format not in FORMATS:
            raise RequantError(f"no format {self.format!r}; there are: {', '.join(FORMATS)}")
        for name, number in (("samples", self.samples), ("batch", self.batch)):
            if number is not None and number < 1:
                raise RequantError(f"{name} must be at least 1, not {number}")
        if self.threads < 0:
            raise RequantError(f"threads must be 0 (the runtime's choice) or more, not {self.threads}")
        parse_rule(self.calibration)


def quantize_model(
    model: str | os.PathLike[str],
    data: DataSource,
    output: str | os.PathLike[str],
    options: Options | None = None,
    progress: Progress = silent,
) -> Result:
    """Quantize a float ONNX model and measure what came of it.

    The model is simplified, observed on the data, planned, emitted and compared with the original on the same data.
    Where INT8 is not faster than float on this machine (`WORTHWHILE`) or is far from it (`LEAST_DB`), the simplified
    float model is written and the result says so.

    Args:
        model: Path of the float model.
        data: A data source: a path or ``FILE.npz:SPLIT`` or ``FILE.py:NAME``, an iterable of feeds, or a callable.
        output: Path of the model to write; it appears whole or not at all.
        options: See `Options`.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: The request cannot be met; nothing was written.
    """
    options = options or Options()
    check_output(output, model, force=options.force)
    job = _prepare(model, data, options, progress)
    observations = _observe(job)
    candidate = _emit(job, observations, {})
    accuracy = _judge(job, candidate)
    speed = _time(job, candidate)
    if accuracy.worst_sqnr_db < RUIN_DB:
        candidate, accuracy, speed = _mended(job, observations, (candidate, accuracy, speed))
    reason = _why_not(candidate, accuracy, speed)
    if reason:
        return _keep_float(job, candidate, accuracy, speed, output, reason)
    return _finish(job, candidate, accuracy, speed, output)


@dataclass(frozen=True)
class _Job:
    """What all stages work on.

    Attributes:
        path: The float model's file.
        simple: The simplified float model.
        types: Operator types by node name before it was simplified.
        widest: The plan with everything in int8 that might be; any later plan takes units away from it.
        notes: What could not be done as asked so far.
        source: Calibration data.
        options: What was asked.
        progress: Whom to tell.
    """

    path: Path
    simple: ir.Model
    types: Mapping[str, str]
    widest: Plan
    notes: tuple[str, ...]
    source: Source
    options: Options
    progress: Progress


@dataclass(frozen=True)
class _Candidate:
    """An emitted model with the plan behind it."""

    model: ir.Model
    plan: Plan
    qparams: Mapping[str, QParams]
    data: bytes


def _prepare(path: str | os.PathLike[str], data: DataSource, options: Options, progress: Progress) -> _Job:
    """Load, check everything that can be refused, and simplify."""
    original = load_model(path)
    options.selection.check(original)
    source = open_data(path, data, options.samples)
    Runner(Path(path))((next(iter(source)) if options.batch == 1 else stacked(source, options.batch)).feed)
    types = {node_name(node): node.op_type for node in original.graph}
    with about(path):
        simplified = simplify(original, progress)
    notes = [f"{result.step}: {result.error}" for result in simplified.applied if result.error]
    gone = set(types) - {node_name(node) for node in simplified.model.graph}
    for name in sorted(gone):
        if name in options.selection.exclude_nodes or types[name] in options.selection.exclude_ops:
            notes.append(f"{types[name]} {name!r} is excluded, but was folded into its neighbours before anything else")
    widest = choose(simplified.model, options.selection, types=types)
    return _Job(Path(path), simplified.model, types, widest, tuple(notes), source, options, progress)


def _observe(job: _Job) -> Observations:
    """Collect the statistics that any plan for this model may need."""
    plan = job.widest
    nodes = {node_name(node): node for node in job.simple.graph}
    corrected = [u for u in plan.units if plan.impl(u) is not Impl.FLOAT and OPS[u.op].bias is not None]
    rule = parse_rule(job.options.calibration)
    return observe(
        to_bytes(job.simple),
        plan.quantized,  # not only those that give their scale to others now: a later plan may split a group
        job.source,
        histogram=rule.needs_histogram,
        progress=partial(job.progress, "calibrate"),
        channel_axis={u.inputs[0]: mean_axis(nodes[u.nodes[0]]) for u in corrected},
    )


def _emit(job: _Job, seen: Observations, kept_float: Mapping[str, str]) -> _Candidate:
    """Choose ranges, place and write."""
    rule = parse_rule(job.options.calibration)
    ranges = {name: rule(statistic) for name, statistic in seen.ranges.items()}
    empty = {name: "has no values in the calibration data" for name in job.widest.quantized if name not in ranges}
    plan = choose(job.simple, job.options.selection, ranges=ranges, kept_float={**empty, **kept_float}, types=job.types)
    qparams = {name: asymmetric_u8(*ranges[name]) for name in plan.observed}
    model = job.simple.clone()
    steps = ["insert_qdq"]
    grouped = {tensor for unit in plan.units if unit.op == "group" for tensor in unit.inputs}
    if plan.produced_u8 & grouped and fuse_silu(model).applied:
        steps.insert(0, "fuse_silu")
    insert_qdq(model, plan=plan, qparams=qparams, means={name: mean.mean for name, mean in seen.means.items()})
    if job.options.format == "qoperator":
        qdq_to_qoperator(model)
        steps.append("qdq_to_qoperator")
    model.metadata_props[METADATA_KEY] = " ".join([model.metadata_props[METADATA_KEY], *steps])
    verify(model, like=signature(job.simple))
    return _Candidate(model, plan, qparams, to_bytes(model))


def _judge(job: _Job, candidate: _Candidate) -> Accuracy:
    """Compare the outputs of the candidate with those of the float model."""
    total = min(JUDGED, job.source.length or JUDGED)
    # labels may be of a kind that only the caller understands; `compare_models` is there to judge by them
    samples = (replace(sample, label=None) for sample in job.source.samples(JUDGED))
    before, after = Runner(job.path), Runner(candidate.data)
    return measure(before, after, samples, lambda done: job.progress("compare", done, total))


def _time(job: _Job, candidate: _Candidate) -> Latency:
    """Time the candidate against the float model on the first sample."""
    job.progress("time", 0, None)
    batch = job.options.batch
    feed = (next(iter(job.source)) if batch == 1 else stacked(job.source, batch)).feed
    before, after = (Runner(m, threads=job.options.threads) for m in (job.path, candidate.data))
    return latency(partial(before, feed), partial(after, feed), batch=batch, seconds=job.options.seconds)


def _mended(
    job: _Job, seen: Observations, current: tuple[_Candidate, Accuracy, Latency]
) -> tuple[_Candidate, Accuracy, Latency]:
    """Leave the tensors in float that alone ruin the outputs, where that helps; else return what there is."""
    candidate = current[0]
    samples = list(islice(iter(job.source.samples(EVIDENCE)), EVIDENCE))
    found = alone(job.simple, candidate.qparams, samples, progress=partial(job.progress, "look for ruinous tensors"))
    kept = ruinous(found)
    if not kept:
        return current
    mended = _emit(job, seen, kept)
    accuracy = _judge(job, mended)
    if accuracy.worst_sqnr_db <= current[1].worst_sqnr_db:
        return current
    return mended, accuracy, _time(job, mended)


def _why_not(candidate: _Candidate, accuracy: Accuracy, speed: Latency) -> str:
    """Say why the INT8 model is not worth having; empty when it is."""
    if not candidate.plan.quantized:
        return "nothing in this model can become int8"
    if not accuracy.worst_sqnr_db >= LEAST_DB:
        return f"int8 leaves only {accuracy.worst_sqnr_db:.1f} dB at an output"
    if speed.speedup < WORTHWHILE:
        return f"int8 gains too little here: {speed.speedup:.2f}x the speed of float"
    return ""


def _keep_float(
    job: _Job, candidate: _Candidate, accuracy: Accuracy, speed: Latency, output: str | os.PathLike[str], reason: str
) -> Result:
    """Write the simplified float model instead of the INT8 one, and say why."""
    plan = candidate.plan
    choices = {
        u.name: replace(plan.choices[u.name], impl=Impl.FLOAT, reason=plan.choices[u.name].reason or reason)
        for u in plan.units
    }
    kept = _Candidate(job.simple, plan.with_choices(choices), {}, to_bytes(job.simple))
    verdict = f"{reason}: the output is the simplified float model"
    if not plan.quantized:  # what was judged and timed is this very model
        return replace(_finish(job, kept, accuracy, speed, output), verdict=verdict)
    result = _finish(job, kept, _judge(job, kept), _time(job, kept), output)
    return replace(result, verdict=verdict, rejected=(accuracy, speed))


def _finish(
    job: _Job, candidate: _Candidate, accuracy: Accuracy, speed: Latency, output: str | os.PathLike[str]
) -> Result:
    """Write the model, as the last thing that can fail, and gather what the user is told."""
    job.progress("inspect", 0, None)
    runs = executed(candidate.data, next(iter(job.source)).feed, threads=job.options.threads)
    write_atomically(output, candidate.data)
    plan = candidate.plan
    floats = [u for u in plan.units if plan.impl(u) is Impl.FLOAT]
    types = {node_name(node): node.op_type for node in job.simple.graph}
    return Result(
        output=os.fspath(output),
        format=job.options.format,
        calibration=job.options.calibration,
        data=job.source.description,
        int8_nodes=sum(len(u.nodes) for u in plan.units) - sum(len(u.nodes) for u in floats),
        mac_share_int8=integer_share(runs),
        kernels=_kernels(runs),
        float_nodes=tuple(
            FloatNode(name, types[name], plan.choices[u.name].reason) for u in floats for name in u.nodes
        ),
        accuracy=accuracy,
        latency=speed,
        float_bytes=size_on_disk(job.path),
        int8_bytes=size_on_disk(output),
        pipeline=candidate.model.metadata_props[METADATA_KEY],
        notes=(*job.notes, *_deviations(plan, runs)),
    )


def _deviations(plan: Plan, runs: tuple[KernelRun, ...]) -> list[str]:
    """Say which units the runtime computed in integers against the plan."""
    integer = {run.node.split("_token_")[0]: run.op for run in runs if run.integer}
    return [
        f"planned float, but the runtime ran {unit.name!r} as {integer[name]}"
        for unit in plan.units
        if plan.impl(unit) is Impl.FLOAT and plan.choices[unit.name].reason != ALREADY
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

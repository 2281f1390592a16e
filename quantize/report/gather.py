"""Collect the record of a run from the values that the run has computed."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from ...calibration.model.session import ModelSource
from ...transforms.graphs.queries import QDQ
from ...transforms.int8.plan import Plan
from ..accuracy.sqnr import finite
from ..job import Job
from ..placement.reasons import FLOAT_FASTER
from ..result import Result
from ..runtime.attribution import LAYOUTS, Owners, Spent
from ..runtime.executed import SHORT
from ..runtime.isa import resolve
from ..runtime.machine import Machine
from ..runtime.profile import KernelRun
from ..steps.deliver import Run, profiled_kernels
from .graph import graph_of
from .record import CONVERSION_ROW, LAYOUT_ROW, REST_ROW, Headline, OpTime, Point, Record, Search, Step, Unit
from .samples import judged_of
from .tensors import alone_of, tensors_of, weights_of

LIBRARIES = ("requant", "onnxruntime", "onnx", "onnx-ir", "numpy")

T = TypeVar("T")


def collect(run: Run, command: str = "") -> Record:
    """Return the record of a run. A part that fails is left out, and a remark says why.

    Args:
        run: The run, while its files exist.
        command: The command line that repeats it.
    """
    job, result, plan = run.job, run.result, run.trial.candidate.plan
    remarks: list[str] = []

    def tried(what: str, part: Callable[[], T], otherwise: T) -> T:
        job.progress(f"report: {what}", 0, None)
        try:
            return part()
        except Exception as error:  # noqa: BLE001 - the model is written: a report without a part is better than none
            remarks.append(f"{what}: not gathered: {' '.join(str(error).split())}")
            return otherwise

    if job.weights.large:
        remarks.append("the model is large: the report has no kernels, tensors and histograms")
    no_kernels = Kernels()
    none: tuple[Any, ...] = ()
    unknown: dict[str, float] = {}
    kernels = tried("kernels", lambda: _profiles(run), no_kernels)
    tensors = tried("tensors", lambda: tensors_of(run), none)
    alone_db = tried("tensors alone", lambda: alone_of(run), unknown)
    tensors = tuple(replace(row, alone_db=alone_db.get(row.name)) for row in tensors)
    no_facts: dict[str, str] = {}
    return Record(
        name=Path(result.output).stem,
        model=os.fspath(job.path),
        output=result.output,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        headline=headline_of(result, job.options.threads),
        graph=graph_of(job.simple),
        units=tried("units", lambda: _units(run, kernels), none),
        tensors=tensors,
        weights=tried("weights", lambda: weights_of(job.simple), none) if not job.weights.large else (),
        times=tried("times", lambda: _times(job, plan, kernels), none),
        judged=tried("samples", lambda: judged_of(job, run.trial), None),
        pipeline=tried("transforms", lambda: _steps(job, result), none),
        environment=tried("environment", lambda: _environment(job), no_facts),
        remarks=tuple(remarks),
    )


def finished(record: Record, result: Result) -> Record:
    """Return a record with the parts of the result that are known only at the end."""
    return replace(
        record,
        headline=headline_of(result, record.headline.threads),
        findings=result.findings,
        search=_search(result),
        stages=dict(result.seconds),
    )


# ----------------------------------------------------------------------------------------------------------- headline


def headline_of(result: Result, threads: int) -> Headline:
    """Return the main numbers of a run."""
    latency, rejected = result.latency, result.rejected
    return Headline(
        verdict=result.verdict,
        why_not=result.why_not,
        notes=result.notes,
        float_ms=latency.float_ms if latency else None,
        int8_ms=latency.int8_ms if latency else None,
        float_median_ms=latency.float_median_ms if latency else None,
        int8_median_ms=latency.int8_median_ms if latency else None,
        uncertainty=latency.uncertainty if latency else None,
        runs=latency.runs if latency else 0,
        batch=(latency.batch if latency else None) or 1,
        threads=threads,
        float_bytes=result.float_bytes,
        int8_bytes=result.int8_bytes,
        samples=result.samples,
        agreement=result.accuracy.agreement,
        predictions=result.accuracy.predictions,
        sqnr_db=finite(result.accuracy.worst_sqnr_db),
        sqnr_db_by_output={name: finite(value) for name, value in result.accuracy.places_db.items()},
        mac_share_int8=result.mac_share_int8,
        int8_nodes=result.int8_nodes,
        float_nodes=len(result.float_nodes),
        calibration=result.calibration,
        ranges=result.ranges,
        data=result.data,
        format=result.format,
        placement=result.placement.how,
        predicted_ms=None if result.predicted_ms is None else finite(result.predicted_ms),
        effort=result.effort,
        corrections=result.corrections,
        rejected_sqnr_db=None if rejected is None else finite(rejected.accuracy.worst_sqnr_db),
        rejected_speedup=None if rejected is None else rejected.latencies[0].speedup,
    )


def _search(result: Result) -> Search | None:
    """Return the search for a metric."""
    found = result.search
    if found is None:
        return None

    def point(each: Any) -> Point:
        return Point(
            price=each.price,
            value=finite(each.value),
            speedup=each.speedup,
            int8_units=each.int8_units,
            kept=bool(each.kept),
        )

    return Search(
        metric=found.metric,
        before=finite(found.before),
        bar=finite(found.bar),
        points=tuple(map(point, found.points)),
        frontier=tuple(map(point, found.frontier)),
        best=None if found.best is None else point(found.best),
        seconds=found.seconds,
    )


# ------------------------------------------------------------------------------------------------------------ kernels

Runs = Sequence[KernelRun]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels that ran: in the simplified float model, in the output, in the INT8 model that was rejected."""

    before: Runs = ()
    after: Runs = ()
    tried: Runs = ()


def _profiles(run: Run) -> Kernels:
    """Profile the simplified float model, and the rejected INT8 model if there is one.

    Raises:
        RequantError: A model cannot be run.
    """
    job, feed = run.job, run.job.feed
    if feed is None or job.weights.large:
        return Kernels()

    def profile(model: ModelSource, milliseconds: float | None) -> Runs:
        return profiled_kernels(job, model, feed, milliseconds)

    latency, rejected = run.trial.latency, run.rejected
    before = profile(job.spelled_source, None if latency is None else latency.simple_ms or latency.float_ms)
    if rejected is None or rejected.latency is None:
        return Kernels(before, run.kernels)
    return Kernels(before, run.kernels, profile(rejected.candidate.source, rejected.latency.int8_ms))


def _units(run: Run, kernels: Kernels) -> tuple[Unit, ...]:
    """Return the implementation, the kernels and the times of each unit."""
    job, plan = run.job, run.trial.candidate.plan
    owners = Owners(job.simple, plan.units)
    before, after, tried = (owners.spent(part).units for part in (kernels.before, kernels.after, kernels.tried))
    first, second = (_kernels(owners, part) for part in (kernels.before, kernels.after))
    choices = {} if run.rejected is None else run.rejected.candidate.plan.choices
    units = []
    for unit in plan.units:
        name, choice = unit.name, choices.get(unit.name)
        row = Unit(
            name=name,
            op=unit.op,
            nodes=unit.nodes,
            outputs=unit.outputs,
            implementation=plan.impl(unit),
            reason=plan.choices[name].reason.text,
            float_us=before.get(name),
            int8_us=after.get(name),
            float_kernels=tuple(first.get(name, ())),
            int8_kernels=tuple(second.get(name, ())),
            relieved=run.result.relieved.get(name, 0),
            tried=None if choice is None else choice.impl,
            tried_us=tried.get(name),
        )
        rejected = choice is not None and choice.impl.int8
        units.append(replace(row, reason=_rejected(row, run.cause)) if rejected else row)
    return tuple(units)


def _rejected(unit: Unit, cause: str) -> str:
    """Return why a unit is in float that was in integers in the rejected model: its times there, if they are known.

    Args:
        unit: The unit, with its times.
        cause: Why the model was rejected, in a few words.
    """
    if unit.float_us is None or unit.tried_us is None:
        return f"the INT8 model was rejected as a whole: {cause}"
    if unit.tried_us >= unit.float_us:
        return FLOAT_FASTER.about(unit.float_us, unit.tried_us).text
    return f"int8 saves {unit.float_us - unit.tried_us:.0f} us, but the whole model was rejected: {cause}"


def _kernels(owners: Owners, runs: Runs) -> dict[str, list[str]]:
    """Return the kernels of each unit as text: operator, layout and types."""
    found: dict[str, list[str]] = {}
    for run in runs:
        owner = owners.owner(run)
        inserted = run.op in (*QDQ, *LAYOUTS) and not owners.knows(run)
        if owner is not None and not inserted:
            types = [SHORT.get(name, name) for name in (*run.reads[:1], *run.writes[:1])]
            layout = " NCHWc" if run.domain == "com.microsoft.nchwc" else ""
            found.setdefault(owner, []).append(f"{run.op}{layout} {'→'.join(types)}".strip())
    return found


def _times(job: Job, plan: Plan, kernels: Kernels) -> tuple[OpTime, ...]:
    """Return the total time of each operator, the slowest first, then the time that belongs to no operator."""
    owners = Owners(job.simple, plan.units)
    before, after = owners.spent(kernels.before), owners.spent(kernels.after)
    tried = owners.spent(kernels.tried) if kernels.tried else None
    rows = []
    for op in dict.fromkeys(unit.op for unit in plan.units):
        units = [unit for unit in plan.units if unit.op == op]
        spent = [_total(part, [unit.name for unit in units]) for part in (before, after, tried)]
        rows.append(_row(op, spent, len(units), sum(plan.impl(unit).int8 for unit in units)))
    rows.sort(key=lambda row: -max(row.float_us, row.int8_us))
    spent_by = (before, after, tried)
    rows.append(_row(CONVERSION_ROW, [None if each is None else each.conversions for each in spent_by]))
    rows.append(_row(LAYOUT_ROW, [None if each is None else each.layouts for each in spent_by]))
    rows.append(_row(REST_ROW, [None if each is None else each.rest for each in spent_by]))
    return tuple(row for row in rows if row.float_us or row.int8_us or row.tried_us)


def _total(spent: Spent | None, units: Sequence[str]) -> float | None:
    """Return the time of some units."""
    return None if spent is None else math.fsum(spent.units.get(name, 0.0) for name in units)


def _row(op: str, spent: Sequence[float | None], units: int = 0, int8: int = 0) -> OpTime:
    """Return the times of one kind of work in the float model, in the output and in the rejected model."""
    before, after, tried = spent
    return OpTime(op=op, float_us=before or 0.0, int8_us=after or 0.0, units=units, int8=int8, tried_us=tried)


# ----------------------------------------------------------------------------------------- transforms and environment


def _steps(job: Job, result: Result) -> tuple[Step, ...]:
    """Return the result of each transform."""
    steps = [
        Step(
            step=str(each.step), applied=each.change.applied, skipped=dict(each.change.skipped), error=each.error or ""
        )
        for each in job.steps
    ]
    known = {each.step.partition("(")[0] for each in steps}
    own = [name for name in result.pipeline.split() if name.partition("(")[0] in ("insert_qdq", "qdq_to_qoperator")]
    units = sum(result.forms.values())
    return (*steps, *(Step(step=name, applied=units) for name in own if name not in known))


def _environment(job: Job) -> dict[str, str]:
    """Return versions, the machine and the options."""
    threads = job.options.threads
    return {
        **{name: version(name) for name in LIBRARIES},
        "Python": platform.python_version(),
        "system": platform.platform(terse=True),
        "runtime": str(job.runtime.identity),
        "CPU": Machine.here(threads).cpu,
        "threads": str(threads or "the runtime's choice"),
        "target": resolve(job.options.isa).value,
        "options": json.dumps(job.asked(), sort_keys=True, ensure_ascii=False),
    }

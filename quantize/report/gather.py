"""Collect the record of a run from the values that the run has computed."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from ...transforms.plan import Plan
from ..accuracy.outputs import finite
from ..job import Job
from ..result import Result
from ..runtime.attribution import CONVERSIONS as TYPES
from ..runtime.attribution import COUNTED, LAYOUTS, Owners, Spent
from ..runtime.executed import SHORT
from ..runtime.isa import resolve
from ..runtime.machine import Machine
from ..runtime.profile import KernelRun, executed
from ..steps.deliver import Run, profiled_runs
from .graph import graph_of
from .record import Headline, OpTime, Point, Record, Search, Step, Unit
from .samples import judged_of
from .tensors import alone_of, tensors_of, weights_of

LIBRARIES = ("requant", "onnxruntime", "onnx", "onnx-ir", "numpy")
CONVERSIONS, LAYOUT, REST = "quantize and dequantize", "changes of layout", "other"

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
    no_kernels: tuple[Runs, Runs] = ((), ())
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
        units=tried("units", lambda: _units(job, plan, kernels, result.relieved), none),
        tensors=tensors,
        weights=tried("weights", lambda: weights_of(job.simple), none) if not job.weights.large else (),
        times=tried("times", lambda: _times(job, plan, kernels), none),
        judged=tried("samples", lambda: judged_of(job, run.trial.candidate), None),
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
        notes=result.notes,
        float_ms=latency.float_ms if latency else None,
        int8_ms=latency.int8_ms if latency else None,
        float_median_ms=latency.float_median_ms if latency else None,
        int8_median_ms=latency.int8_median_ms if latency else None,
        uncertainty=latency.uncertainty if latency else None,
        runs=latency.runs if latency else 0,
        batch=latency.batch if latency else 1,
        threads=threads,
        float_bytes=result.float_bytes,
        int8_bytes=result.int8_bytes,
        samples=result.samples,
        agreement=result.accuracy.agreement,
        predictions=result.accuracy.predictions,
        sqnr_db=finite(result.accuracy.worst_sqnr_db),
        sqnr_db_by_output={name: finite(value) for name, value in result.accuracy.sqnr_db.items()},
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
        rejected_sqnr_db=None if rejected is None else finite(rejected[0].worst_sqnr_db),
        rejected_speedup=None if rejected is None else rejected[1].speedup,
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


def _profiles(run: Run) -> tuple[Runs, Runs]:
    """Profile the simplified float model; return its kernels and the kernels of the output.

    Raises:
        RequantError: The float model cannot be run.
    """
    job, latency = run.job, run.trial.latency
    if job.feed is None or job.weights.large:
        return (), ()
    times = profiled_runs(None if latency is None else latency.float_ms)
    return executed(job.float_source, job.feed, threads=job.options.threads, times=times), run.kernels


def _units(job: Job, plan: Plan, runs: tuple[Runs, Runs], relieved: Mapping[str, int]) -> tuple[Unit, ...]:
    """Return the implementation, the kernels and the times of each unit."""
    owners = Owners(job.simple, plan.units)
    before, after = (owners.spent(part).units for part in runs)
    first, second = (_kernels(owners, part) for part in runs)
    return tuple(
        Unit(
            name=unit.name,
            op=unit.op,
            nodes=unit.nodes,
            outputs=unit.outputs,
            implementation=plan.impl(unit),
            reason=plan.choices[unit.name].reason.text,
            float_us=before.get(unit.name),
            int8_us=after.get(unit.name),
            float_kernels=tuple(first.get(unit.name, ())),
            int8_kernels=tuple(second.get(unit.name, ())),
            relieved=relieved.get(unit.name, 0),
        )
        for unit in plan.units
    )


def _kernels(owners: Owners, runs: Runs) -> dict[str, list[str]]:
    """Return the kernels of each unit as text: operator, layout and types."""
    found: dict[str, list[str]] = {}
    for run in runs:
        owner = owners.of(run.node)
        inserted = run.op in (*TYPES, *LAYOUTS) and COUNTED.sub("", run.node) not in owners.by_node
        if owner is not None and not inserted:
            types = [SHORT.get(name, name) for name in (*run.reads[:1], *run.writes[:1])]
            layout = " NCHWc" if run.domain == "com.microsoft.nchwc" else ""
            found.setdefault(owner, []).append(f"{run.op}{layout} {'→'.join(types)}".strip())
    return found


def _times(job: Job, plan: Plan, runs: tuple[Runs, Runs]) -> tuple[OpTime, ...]:
    """Return the total time of each operator, the slowest first, then the time that belongs to no operator."""
    if not any(runs):
        return ()
    owners = Owners(job.simple, plan.units)
    before, after = (owners.spent(part) for part in runs)
    ops = dict.fromkeys(unit.op for unit in plan.units)
    rows = []
    for op in ops:
        units = [unit for unit in plan.units if unit.op == op]
        spent = [math.fsum(part.units.get(unit.name, 0.0) for unit in units) for part in (before, after)]
        int8 = sum(plan.impl(unit).int8 for unit in units)
        rows.append(OpTime(op=op, float_us=spent[0], int8_us=spent[1], units=len(units), int8=int8))
    rows.sort(key=lambda row: -max(row.float_us, row.int8_us))
    rest = [_rest(CONVERSIONS, "conversions"), _rest(LAYOUT, "layouts"), _rest(REST, "rest")]
    rows += [row for made in rest if (row := made(before, after)).float_us or row.int8_us]
    return tuple(row for row in rows if row.float_us or row.int8_us)


def _rest(name: str, part: str) -> Callable[[Spent, Spent], OpTime]:
    """Return a function that adds up one kind of time that belongs to no operator."""
    return lambda before, after: OpTime(op=name, float_us=getattr(before, part), int8_us=getattr(after, part))


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
        "CPU": Machine.here(threads).cpu,
        "threads": str(threads or "the runtime's choice"),
        "target": resolve(job.options.isa).value,
        "options": json.dumps(job.asked(), sort_keys=True, ensure_ascii=False),
    }

"""Fill in the `Result` of a run from the written model and the kernels that ran in it."""

from __future__ import annotations

from collections.abc import Sequence

from ...transforms import METADATA_KEY
from ...transforms.graphs.queries import nodes_by_name
from ...transforms.int8.plan import Impl, Plan
from ..accuracy.float_nodes import FloatNode
from ..job import Job, Trial
from ..model.files import size_on_disk
from ..options.efforts import CORRECTIONS
from ..placement.reasons import EXCLUDED, KEPT_FLOAT, NOT_WRITTEN
from ..result import Result
from ..runtime.attribution import Owners
from ..runtime.profile import KernelRun, integer_share
from .judge import beside_given, promise_of
from .native_use import native_use
from .notes import notes_on

OWN_WORDS = frozenset({EXCLUDED.code, KEPT_FLOAT.code, "other"})  # their texts say different things


def result_of(job: Job, trial: Trial, kernels: tuple[KernelRun, ...], output: str, size: int) -> Result:
    """Return the result of a run, without the values that are known only at its end."""
    candidate, plan = trial.candidate, trial.candidate.plan
    floats = [u for u in plan.units if not plan.impl(u).int8]
    return Result(
        output=output,
        format=job.options.format,
        calibration=job.supply.calibration if job.static else "",
        ranges=job.supply.description,
        data=_data(job, trial.accuracy.samples),
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
        runtime=job.runtime.identity,
        promise=promise_of(job, trial.accuracy) if job.outputs_judge and trial.accuracy.samples else None,
        notes=notes_on(job, trial, kernels, size),
    )


def _data(job: Job, judged: int) -> str:
    """Return the name of the data on which models are compared, with their number of samples if fewer are judged."""
    source = job.judging
    if source is None:
        return ""
    fewer = source.picked is None and source.length is not None and 0 < judged < source.length
    return f"{source.description} ({source.length} samples)" if fewer else source.description


def _float_nodes(job: Job, plan: Plan, kernels: Sequence[KernelRun]) -> tuple[FloatNode, ...]:
    """Return the nodes that stay float; the first node of a unit has the time of the unit."""
    types = {name: node.op_type for name, node in nodes_by_name(job.simple).items()}
    spent, found = Owners(job.simple, plan.units).spent(kernels).units, []
    for unit in (each for each in plan.units if not plan.impl(each).int8):
        reason = plan.choices[unit.name].reason
        kind = "" if reason.code in OWN_WORDS else reason.code
        for index, name in enumerate(unit.nodes):
            took = (0.0 if index else spent.get(unit.name, 0.0)) if kernels else None
            found.append(FloatNode(name, types[name], reason.text, kind, took, reason.code == NOT_WRITTEN.code))
    return tuple(found)


def _forms(plan: Plan) -> dict[str, int]:
    """Count the units of each int8 implementation."""
    impls = [plan.impl(unit) for unit in plan.units]
    return {impl.value: impls.count(impl) for impl in Impl if impl.int8 and impl in impls}


def _kernels(runs: tuple[KernelRun, ...]) -> dict[str, int]:
    """Count the kernels with multiply-accumulates, by operator; by its type too, if one operator has several."""
    counts: dict[str, int] = {}
    for run in runs:
        if run.macs:
            counts[run.title] = counts.get(run.title, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))

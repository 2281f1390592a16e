"""Word the notes on a written model: what its user would not expect, a sentence each."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ...transforms.graphs.queries import constant
from ...transforms.graphs.tensors import tensors
from ...transforms.int8.existing import is_finished
from ...transforms.int8.plan import Impl, Plan
from ..accuracy.choices import GIVEN_NOTE, was_given
from ..accuracy.selected_outputs import replaced_notes
from ..job import Job, Trial
from ..model.files import Weights, load_model, size_on_disk
from ..placement.batches import compromises
from ..runtime.attribution import Owners
from ..runtime.profile import KernelRun
from ..runtime.timing import Latency
from .worth import INTEGER_ALREADY, WORTHWHILE, WhyNot, speeds_text, too_slow

NOTHING_LEFT = (
    "nothing left to quantize: requant wrote this model in integers; for other options start from the float model"
)
MEANWHILE = "another run has written the output meanwhile, and this one has replaced it"
LARGER = (
    "the output is larger because the given file stores its weights in fewer bits than float32 already: int8 adds "
    "scales, zero points and nodes"
)
COMPUTED = "the output is larger because it stores weights that the given file computes from fewer numbers"
ADVICE = (
    "to lose less: {}'requant sensitivity' names the tensors that lose most; a search (--max-drop, in Python: "
    "search_model) judges by what the model is for"
)
MORE = {
    "low": "the effort medium tries single tensors and corrects weights and biases, which may be enough; ",
    "medium": "the effort high tries more; ",
    "high": "",
}
"""What a higher effort does beyond each effort, in words."""
FLOAT_BYTES = 4
SHORT = 0.75  # a file of at most this share of its weights in float32 stores them in another form


def notes_on(job: Job, trial: Trial, kernels: tuple[KernelRun, ...], size: int) -> tuple[str, ...]:
    """Return all notes on a model that was written: the notes of the job come first.

    Args:
        job: The job.
        trial: The written model.
        kernels: The kernels that ran in it; empty where it was not run.
        size: Its size in bytes.
    """
    plan = trial.candidate.plan
    return (
        *job.notes,
        *([GIVEN_NOTE] if was_given(trial.accuracy.sqnr_db) else []),
        *replaced_notes(job.simple, trial.accuracy),
        *_larger(job, size),
        *_over_batches(job, trial),
        *_unused(job, plan),
        *_deviations(job, plan, kernels),
    )


def advice(job: Job, reason: WhyNot) -> tuple[str, ...]:
    """Return a note on how to lose less accuracy, if this is the only reason for which INT8 is not written."""
    if not reason.loses or reason.slow:
        return ()
    return (ADVICE.format(MORE[job.options.effort]),)


def _larger(job: Job, size: int) -> list[str]:
    """Return a note that says why an output of `size` bytes is larger than the given file, where this is known."""
    given = size_on_disk(job.path)
    if size <= given or given > SHORT * Weights.of(job.simple).total:
        return []
    values = sum(tensor.size for tensor in tensors(load_model(job.path)))
    return [LARGER if given <= SHORT * FLOAT_BYTES * values else COMPUTED]


def _over_batches(job: Job, trial: Trial) -> list[str]:
    """Return notes on an INT8 model for several batch sizes: which size pays for which, and where INT8 is too slow."""
    plan, latencies = trial.candidate.plan, trial.latencies
    if len(latencies) < 2 or not plan.has_int8:
        return []
    notes = compromises(trial.candidate.placement.served)
    slow = [each for each in latencies if each.speedup < WORTHWHILE]
    if slow and job.policy.timed and not too_slow(job, trial):
        notes.append(f"not every {_kind(latencies)} gains: {speeds_text(job, latencies)}")
    return notes


def _kind(latencies: Sequence[Latency]) -> str:
    """Return what differs between latencies."""
    return "batch size" if latencies[0].regime is None else "regime"


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

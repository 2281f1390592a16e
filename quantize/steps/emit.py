"""From what is known of a model and its data to a candidate: evidence, placement, emission, corrections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ...transforms import signature, verify
from ...transforms.existing import drop_round_trips
from ...transforms.fuse_silu import fuse_silus
from ...transforms.insert_qdq import insert_qdq
from ...transforms.int8_weights import Adjustment
from ...transforms.joined_convs import join_convs
from ...transforms.ops import GATE
from ...transforms.plan import Plan
from ...transforms.qdq_to_qoperator import qdq_to_qoperator
from ...transforms.qparams import QParams
from ..corrections.adjust import find_adjustments
from ..corrections.equalization import equalized
from ..job import Candidate, Evidence, Job, Placement
from ..model.files import serialize
from ..model.metadata import describe_origin
from ..options.efforts import ADJUSTING
from ..placement.facts import Facts, facts_of
from ..placement.joined_convs import sums_of, with_common_scales
from ..placement.measuring import Write
from ..placement.plan_file import read_plan
from ..placement.rules import choose_by
from ..placement.search import place
from .judge import first_feed
from .ranges import TensorRanges


def equalize(job: Job) -> Job:
    """Return a job whose simplified model is equalized, where that is asked for."""
    return equalized(job) if "equalize" in job.corrections else job


def plan_by_rules(job: Job, found: TensorRanges, evidence: Evidence) -> tuple[Facts, Plan, Write]:
    """Return what may be decided, the plan by rules, and what writes a plan."""
    facts = replace(
        facts_of(job.simple, job.selection, job.types, job.scheme.activation),
        static=job.static,
        ranges=found.ranges,
        kept_float={**found.without, **evidence.kept_float},
        zero_points=job.policy.zero_points,
        portable=job.policy.portable,
    )
    return facts, choose_by(facts, job.simple), partial(apply_plan, job, found)


def emit(job: Job, found: TensorRanges, evidence: Evidence) -> Candidate:
    """Place, write and correct."""
    facts, rules, write = plan_by_rules(job, found, evidence)
    if job.policy.plan is not None:
        candidate = write(read_plan(job.policy.plan, facts, rules, strict=False))
        placement = Placement("plan")
    else:
        candidate, placement = place(job, facts, rules, write, first_feed(job), evidence.noise)
    return replace(correct(job, found, candidate), placement=placement, evidence=evidence)


def correct(job: Job, found: TensorRanges, candidate: Candidate) -> Candidate:
    """Correct what the corrections that are asked for find to be wrong, and join convolutions that are only added."""
    adjusted: Mapping[str, Adjustment] = {}
    if job.corrections & ADJUSTING and job.judged and not job.weights.large:
        plain = candidate if job.options.format == "qdq" else apply_plan(job, found, candidate.plan, form="qdq")
        adjusted = find_adjustments(job, plain)
    if not adjusted and not sums_of(job, candidate.plan):
        return candidate
    return apply_plan(job, found, candidate.plan, adjusted, join=True)


def apply_plan(
    job: Job,
    found: TensorRanges,
    plan: Plan,
    adjusted: Mapping[str, Adjustment] | None = None,
    form: str = "",
    *,
    join: bool = False,
) -> Candidate:
    """Write a plan into a model.

    Args:
        job: The job.
        found: The ranges.
        plan: What becomes int8.
        adjusted: What was found on data for the weights of units.
        form: The format, if not that of the job.
        join: Whether convolutions of which only the sum is read become one. Before that, every unit has a kernel of
            its own, which may be timed and corrected.
    """
    ranges = found.ranges
    dtype = job.scheme.activation_params(0.0, 1.0).zero_point.dtype
    given = {name: params for name, params in job.model_qparams.items() if params.zero_point.dtype == dtype}
    qparams = {
        name: given[name]
        if name in given and name not in found.overridden and _covers(given[name], ranges.get(name))
        else job.scheme.activation_params(*ranges[name])
        for name in plan.observed
    }
    model = job.simple.clone()
    steps = ["insert_qdq"]
    floats = {u.name for u in plan.units if u.op == GATE and not plan.impl(u).int8 and plan.produced_u8 & {*u.inputs}}
    if floats and fuse_silus(model, floats).applied:
        steps.insert(0, "fuse_silu")
    means = found.means if "means" in job.corrections else {}
    adjusted = with_common_scales(job, plan, qparams, adjusted or {})
    written = insert_qdq(
        model, plan=plan, qparams=qparams, means=means, adjusted=adjusted, scheme=job.scheme, exact=job.no_saturation
    )
    if join:
        join_convs(model, sums_of(job, plan), job.scheme)
    if job.model_qparams:
        drop_round_trips(model)
    if (form or job.options.format) == "qoperator":
        qdq_to_qoperator(model)
        steps.append("qdq_to_qoperator")
    describe_origin(model, steps, qparams, job.asked())
    verify(model, like=signature(job.simple))
    return Candidate(model, plan, qparams, serialize(model, job.folder), written.relieved)


def _covers(params: QParams, span: tuple[float, float] | None) -> bool:
    """Whether a tensor of this range keeps its values with these parameters: a pair may clip for some readers only."""
    if span is None:
        return True
    (least, most), step = params.range, float(params.scale)
    return least - step <= span[0] and span[1] <= most + step

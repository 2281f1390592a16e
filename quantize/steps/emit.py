"""Emit a candidate: place the plan, write it into the model, correct weights and biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from ...calibration.model.session import Serialized
from ...transforms import signature, verify
from ...transforms.fuse_silu import fuse_silus
from ...transforms.int8.existing import drop_round_trips
from ...transforms.int8.insert_qdq import insert_qdq
from ...transforms.int8.joined_convs import Joined, join_convs, with_joined
from ...transforms.int8.ops import GATE, OPS
from ...transforms.int8.plan import NATIVE_PRODUCTS, Impl, Plan
from ...transforms.int8.qparams import DTYPES, QParams
from ...transforms.int8.weights import Adjustment
from ...transforms.qdq_to_qoperator import qdq_to_qoperator
from ...transforms.spell_slow_functions import spell_slow_functions
from ..corrections.adjust import find_adjustments
from ..corrections.concat_scales import scale_joined_parts
from ..corrections.equalization import equalize_channels
from ..corrections.norm_scales import scale_before_norms
from ..job import Candidate, Evidence, Job, Placement, Purpose
from ..kernels.attentions import wrap_attentions
from ..kernels.caches import wrap_caches
from ..kernels.normalizations import wrap_normalizations
from ..kernels.pixels import wrap_pixels
from ..kernels.products import wrap_products
from ..kernels.recurrent import wrap_recurrent
from ..kernels.rotaries import wrap_rotaries
from ..kernels.softmaxes import wrap_softmaxes
from ..kernels.wrap import drop_inner_rounding, wrap_units
from ..model.files import message_of
from ..model.metadata import describe_origin
from ..options.efforts import ADJUSTING
from ..placement.facts import Facts, asked_facts
from ..placement.forms import observed_plan
from ..placement.joined_convs import sums_of, with_common_scales
from ..placement.measuring import Write
from ..placement.plan_file import read_plan
from ..placement.rules import choose_by
from ..placement.search import check_costs_know_units, place
from ..runtime.progress import BRIEFLY, WRITE
from .judge import if_it_runs, is_slower, measured_error, timed_briefly
from .ranges import TensorRanges


def scale_channels(job: Job) -> Job:
    """Return the job with channels scaled as the corrections say: in front of norms, and between layers."""
    job = scale_before_norms(job) if "norms" in job.corrections else job
    job = _with_plan(scale_joined_parts(job), job) if "parts" in job.corrections else job
    return equalize_channels(job) if "equalize" in job.corrections else job


def _with_plan(job: Job, before: Job) -> Job:
    """Return a job with the plan of its simplified model, which may have other nodes than the model before."""
    if job.simple is before.simple:
        return job
    facts, rules, _ = plan_by_rules(job, TensorRanges(), Evidence())
    plan = observed_plan(facts, rules, all_int8=job.policy.all_int8, native=job.options.wants_native)
    return replace(job, all_int8_plan=plan)


def plan_by_rules(job: Job, ranges: TensorRanges, evidence: Evidence) -> tuple[Facts, Plan, Write]:
    """Return the facts for placement, the plan by rules, and a function that applies a plan."""
    facts = replace(
        asked_facts(job.simple, job.selection, job.types, job.options, job.policy),
        static=job.static,
        ranges=ranges.ranges,
        kept_float={**ranges.without, **evidence.kept_float},
        noise_of=evidence.noise_of,
        harmed_by=evidence.harmed_by,
        noise_of_weights=evidence.noise_of_weights,
    )
    return facts, choose_by(facts, job.simple), partial(apply_plan, job, ranges)


def check_given_costs(job: Job) -> None:
    """Refuse a file of costs of another model before ranges are observed.

    Raises:
        RequantError: No unit of the model is in the file.
    """
    if job.policy.costs is not None:
        facts, rules, _ = plan_by_rules(job, TensorRanges(), Evidence())
        check_costs_know_units(job, facts, rules)


def emit(job: Job, ranges: TensorRanges, evidence: Evidence, before: Placement | None = None) -> Candidate:
    """Place the plan, apply it, and correct the model unless it is clearly slower than float.

    Args:
        job: The job.
        ranges: The ranges.
        evidence: The noise that is known.
        before: The placement of an earlier model of the job, whose costs are not measured again; None without one.
    """
    job.progress(WRITE, 0, None)
    facts, rules, write = plan_by_rules(job, ranges, evidence)
    if job.policy.plan is not None:
        candidate = write(read_plan(job.policy.plan, facts, rules, strict=False))
        placement = Placement("plan")
    else:
        error = partial(measured_error, job) if job.outputs_judge else None
        candidate, placement = place(job, facts, rules, write, evidence.noise, error, before)
    made = _slow(job, ranges, candidate) or correct(job, ranges, candidate)
    return replace(made, placement=placement, evidence=evidence)


def _slow(job: Job, ranges: TensorRanges, candidate: Candidate) -> Candidate | None:
    """Return the model of a candidate without corrections if it is clearly slower than float; else None."""
    if not _adjusts(job) or not candidate.plan.has_int8 or not _seems_slower(job, candidate):
        return None
    job.progress(WRITE, 0, None)
    final = apply_plan(job, ranges, candidate.plan, purpose="deliver")  # with fewer kernels than the candidate
    return final if _seems_slower(job, final) else None


def _seems_slower(job: Job, candidate: Candidate) -> bool:
    """Whether a model is clearly slower than float in a short measurement.

    False if the model does not run: `judge` reports that.
    """
    job.progress(BRIEFLY, 0, None)
    return is_slower(job, if_it_runs(partial(timed_briefly, job, candidate)) or ())


def _adjusts(job: Job) -> bool:
    """Whether weights and biases are adjusted to data."""
    return bool(job.corrections & ADJUSTING) and job.outputs_judge and not job.weights.large


def correct(job: Job, ranges: TensorRanges, candidate: Candidate) -> Candidate:
    """Adjust weights and biases by the chosen corrections, and join convolutions whose results are only added."""
    adjusted: Mapping[str, Adjustment] = {}
    if _adjusts(job):
        job.progress(WRITE, 0, None)
        pairs = job.options.format == "qdq" and not candidate.native
        adjusted = find_adjustments(
            job, candidate if pairs else apply_plan(job, ranges, candidate.plan, purpose="learn")
        )
    if not adjusted and not candidate.native and not sums_of(job, candidate.plan):
        return candidate
    job.progress(WRITE, 0, None)
    return apply_plan(job, ranges, candidate.plan, adjusted, purpose="deliver")


def apply_plan(
    job: Job,
    ranges: TensorRanges,
    plan: Plan,
    adjusted: Mapping[str, Adjustment] | None = None,
    *,
    purpose: Purpose = "measure",
) -> Candidate:
    """Apply a plan to a copy of the simplified model.

    Args:
        job: The job.
        ranges: The ranges.
        plan: The implementation of each unit.
        adjusted: Corrected weights and biases, by unit.
        purpose: What the model is for.
    """
    dtype = DTYPES[job.scheme.activation]
    given = {name: params for name, params in job.model_qparams.items() if params.zero_point.dtype == dtype}
    qparams = {
        name: given[name]
        if name in given and name not in ranges.overridden and _covers(given[name], ranges.ranges.get(name))
        else job.scheme.activation_params(*ranges.ranges[name])
        for name in plan.observed
    }
    model = job.simple.clone()
    steps = ["insert_qdq"]
    floats = {u.name for u in plan.units if u.op == GATE and not plan.impl(u).int8 and plan.produced_u8 & {*u.inputs}}
    if floats and fuse_silus(model, floats).applied:
        steps.insert(0, "fuse_silu")
    means = ranges.means if "means" in job.corrections else {}
    adjusted = with_common_scales(job, plan, qparams, adjusted or {})
    written = insert_qdq(
        model, plan=plan, qparams=qparams, means=means, adjusted=adjusted, scheme=job.scheme, exact=job.no_saturation
    )
    joined = join_convs(model, sums_of(job, plan), job.scheme) if purpose == "deliver" else []
    if job.model_qparams:
        drop_round_trips(model)
    if job.options.format == "qoperator" and purpose != "learn":
        qdq_to_qoperator(model)
        steps.append("qdq_to_qoperator")
    _call_native(job, model, plan, joined, purpose)
    if purpose != "learn" and not job.policy.portable and spell_slow_functions(model).applied:
        steps.append("spell_slow_functions")
    describe_origin(model, steps, qparams, job.asked())
    done = _corrections(job, ranges, plan, adjusted)
    source = _verified(job, model)
    return Candidate(model, plan, qparams, source, written.relieved, runtime=job.runtime, corrected=done)


def _verified(job: Job, model: ir.Model) -> Serialized:
    """Return a model for the runtime, serialized once: the check takes the same message, which is much of its time.

    Raises:
        VerifyError: The model is not valid.
    """
    message, home = message_of(model, job.folder)
    verify(model, like=signature(job.simple), message=message)
    return Serialized(message.SerializeToString(), home)


def _corrections(job: Job, ranges: TensorRanges, plan: Plan, adjusted: Mapping[str, Adjustment]) -> frozenset[str]:
    """Return the corrections that change the model of a plan; the arguments are as for `apply_plan`."""
    shifted = {name for name, each in adjusted.items() if each.shift is not None}
    biased = {u.name for u in plan.units if plan.impl(u).reads_u8 and u.op in OPS and OPS[u.op].bias is not None}
    with_means = {u.name for u in plan.units if u.name in biased and u.inputs[0] in ranges.means}
    rounded = any(each.stored is not None or each.blocked is not None for each in adjusted.values())
    found = {
        "results": not ranges.by_results.isdisjoint(plan.observed),
        "norms": "norms" in job.scaled and bool(plan.observed),
        "parts": "parts" in job.scaled and bool(plan.observed),
        "equalize": "equalize" in job.scaled and bool(plan.observed),
        "means": bool(with_means - shifted),
        "bias": bool(shifted),
        "rounding": rounded,
    }
    return frozenset(name for name, did in found.items() if did and name in job.corrections)


def _call_native(job: Job, model: ir.Model, plan: Plan, joined: Sequence[Joined], purpose: Purpose) -> None:
    """Put the units that native operators compute into functions; the arguments are as for `apply_plan`."""
    units, shapes = with_joined([u for u in plan.units if plan.impl(u) is Impl.U8_NATIVE], job.shapes, joined)
    exact, last = job.options.kernels == "exact", purpose == "deliver"
    if purpose == "learn":
        if units and not exact:
            drop_inner_rounding(model, units, shapes)
        return
    if units:
        wrap_units(model, units, shapes, join=last, exact=exact)
    products = [unit for unit in plan.units if plan.impl(unit) in NATIVE_PRODUCTS.values()]
    # attention first: a product must not take the sum with the mask for a residual
    wrap_attentions(model, products, job.shapes, join=last)
    wrap_caches(model, products)
    wrap_products(model, products, job.shapes, join=last)
    wrap_recurrent(model, products)
    if last and units:
        wrap_pixels(model, job.shapes)
    if last and not exact and (units or products):
        wrap_normalizations(model, job.shapes)
        wrap_rotaries(model, job.shapes)
        wrap_softmaxes(model, job.shapes)


def _covers(params: QParams, span: tuple[float, float] | None) -> bool:
    """Return whether the parameters represent the whole range; parameters of a user's model may clip."""
    if span is None:
        return True
    (least, most), step = params.range, float(params.scale)
    return least - step <= span[0] and span[1] <= most + step

"""Fall back to float: move units to float until the INT8 model keeps the promise of accuracy.

The words of this module:

- The noise of a model is the power of its error over the power of the outputs.
- The noise of a plan is an estimate of it: the sum of the noises of its tensors and weights, each measured alone. It
  tells which units are noisy, and little of the noise of all together.
- The excess of a model is the factor by which its noise must fall so that it keeps the promise; below 1 if the noise
  may rise.

`fall_back_to_float` does these steps:

1. Measure the noise of each tensor alone, where it is not known (`_noise_evidence`).
2. Make models of plans, at most `ROUNDS` (`_try_models`). Until one keeps the promise, each has less noise than the one
   before (`_next_quieter`). Then each is faster than the one that keeps it, and has more noise (`_next_faster`). What
   the models missed the promise by tells which units add more noise together than alone (`_learned`).
3. Make one more model, between the best one and the last one that missed the promise (`_with_plan_between`).
4. Put the runtime's operators in place of a few native ones that gain nothing (`_without_few_native`).
5. Judge and time the best model.

A model that does not run counts as one that misses the promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...transforms.int8.plan import Plan
from ..accuracy.outputs import Accuracy
from ..job import Candidate, Evidence, Job, Trial
from ..options.efforts import EFFORTS
from ..placement.absorbers import absorbers_of
from ..placement.forms import possible_forms, stock_plan
from ..placement.noise import Noises
from ..placement.plans_by_cost import is_same
from ..placement.priced_plans import PricedPlans, plans_by_price
from ..placement.quiet_plans import FASTER, HALVINGS, fastest_within, least_noise_as_fast
from ..runtime.progress import RELIEF, expect
from .emit import correct, plan_by_rules
from .evidence import all_int8_candidate, evidence_of
from .forecast import BETWEEN, ROUNDS, forecast_fall_back
from .judge import if_it_runs, judge, measure_accuracy, promise_of
from .ranges import TensorRanges

MARGIN = 0.8  # noise to aim for, over the noise that is allowed: the sum of the tensors' noises is an estimate
STEP = 10.0  # the most by which the noise falls from model to model: the excess of a few samples is mostly chance
NEAR = 2.0  # a plan that misses the promise with at most this many times the noise of one that keeps it ends the search
ENOUGH = 0.7  # of the noise that is allowed: a plan that has as much ends the search
LEAST_SHARE = 1e-6  # of the float model's time: what a unit takes at least, where the plan with it is not slower
FEW = 4  # native units that are timed against the runtime's operators; more of them gain together


def fall_back_to_float(job: Job, ranges: TensorRanges, trial: Trial) -> Trial:
    """Return a trial that keeps the promise with more units in float; the given trial if none does.

    The given trial is also returned if it keeps the promise itself, if the user decides what becomes int8, and if the
    noise of single tensors cannot be measured.

    Args:
        job: The job, with data of the user.
        ranges: The ranges.
        trial: The model that placement chose, with its accuracy.
    """
    if job.policy.how in ("all", "plan") or promise_of(job, trial.accuracy).kept:
        return trial
    job.progress(RELIEF, 0, ROUNDS + BETWEEN)  # says why tensors are tried now
    expect(job.progress, forecast_fall_back(job, tries=_can_try_tensors(job, trial)))
    evidence = _noise_evidence(job, ranges, trial)
    if not evidence.noise:
        return trial
    job.progress(RELIEF, 0, ROUNDS + BETWEEN)  # planning may take seconds
    facts, rules, write = plan_by_rules(job, ranges, evidence)
    plans = plans_by_price(job, facts, rules, write, evidence.noise, trial.candidate.placement)
    absorbers = absorbers_of(facts, rules, possible_forms(facts, rules))
    noises = Noises.of(rules, evidence.noise, evidence.noise_of, absorbers, evidence.noise_of_weights)
    build = partial(_build_candidate, job, ranges, write, trial, evidence)
    first = _Missed(trial.candidate.plan, min(promise_of(job, trial.accuracy).excess, STEP))
    tried = _try_models(job, noises, build, _Tried(plans, (first,)))
    if tried.best is None:
        return trial
    best = _with_plan_between(job, noises, build, tried, tried.best)
    best = _without_few_native(job, tried.plans, best, build)
    return if_it_runs(partial(judge, job, best.candidate, best.accuracy)) or trial


# ---------------------------------------------------------------------------------------------- the noise of tensors


def _noise_evidence(job: Job, ranges: TensorRanges, trial: Trial) -> Evidence:
    """Return the noise of each tensor alone, measured now if it is not known."""
    known = trial.candidate.evidence
    if not _can_try_tensors(job, trial):
        return known
    effort = EFFORTS[job.options.effort]
    found = evidence_of(job, ranges, all_int8_candidate(job, ranges), trial.accuracy, effort.retry, effort.least_db)
    return replace(found, kept_float={**known.kept_float, **found.kept_float})


def _can_try_tensors(job: Job, trial: Trial) -> bool:
    """Whether the noise of each tensor alone is unknown, can be measured, and was not tried within the same limit."""
    known = trial.candidate.evidence
    if known.noise or job.weights.large or not trial.candidate.qparams:
        return False
    return known.limit < EFFORTS[job.options.effort].retry


# ----------------------------------------------------------------------------------------------- models that are tried


@dataclass(frozen=True, slots=True, eq=False)
class _Accepted:
    """A model that keeps the promise.

    Attributes:
        candidate: The model.
        accuracy: Its accuracy.
        excess: Its noise over the noise that the promise allows, at least 1 / `STEP`.
    """

    candidate: Candidate
    accuracy: Accuracy
    excess: float


@dataclass(frozen=True, slots=True)
class _Missed:
    """A plan whose model misses the promise or does not run.

    Attributes:
        plan: The plan.
        excess: The noise of its model over the noise that the promise allows, at most `STEP`.
    """

    plan: Plan
    excess: float


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    """What is known after some models were tried.

    Attributes:
        plans: The plans by price of noise, with all costs that were measured.
        missed: The plans whose models miss the promise, in the order in which they were tried; at least one.
        best: The fastest model that keeps the promise; None without one.
    """

    plans: PricedPlans
    missed: tuple[_Missed, ...]
    best: _Accepted | None = None


def _try_models(job: Job, noises: Noises, build: Callable[[Plan], Candidate], tried: _Tried) -> _Tried:
    """Search for the fastest model that keeps the promise, in at most `ROUNDS` models.

    Args:
        job: The job.
        noises: The noises of tensors and weights alone.
        build: Returns the model of a plan.
        tried: The model of the placement, which misses the promise.
    """
    for number in range(ROUNDS):
        job.progress(RELIEF, number, ROUNDS + BETWEEN)
        plans, plan = _next_plan(noises, tried)
        tried = replace(tried, plans=plans)
        if plan is None or not plan.has_int8:
            break
        tried = _with_model(job, tried, plan, build(plan))
        if _is_near_enough(tried):
            break
    return tried


def _next_plan(noises: Noises, tried: _Tried) -> tuple[PricedPlans, Plan | None]:
    """Return the plans with all measured costs, and the plan to try next; None without one."""
    if tried.best is None:
        return _next_quieter(tried.plans, noises.of_plan, tried.missed[-1])
    learned = _learned(noises, tried.best, tried.missed)
    return _next_faster(tried.plans.with_noises(learned), learned, tried.best, tried.missed)


def _with_model(job: Job, tried: _Tried, plan: Plan, candidate: Candidate) -> _Tried:
    """Measure the accuracy of the model of a plan; return what is known with it.

    A model that does not run has the excess of the last one that missed the promise.
    """
    accuracy = if_it_runs(partial(measure_accuracy, job, candidate))
    if accuracy is None:
        return replace(tried, missed=(*tried.missed, _Missed(plan, tried.missed[-1].excess)))
    judged = promise_of(job, accuracy)
    if judged.kept:
        return replace(tried, best=_Accepted(candidate, accuracy, max(judged.excess, 1 / STEP)))
    return replace(tried, missed=(*tried.missed, _Missed(plan, min(judged.excess, STEP))))


def _is_near_enough(tried: _Tried) -> bool:
    """Return whether the best model has about as much noise as is allowed, or as the last one that missed."""
    if tried.best is None:
        return False
    return tried.best.excess >= ENOUGH or tried.missed[-1].excess <= NEAR * tried.best.excess


# ---------------------------------------------------------------------------------------------- what models teach


def _allowed(noises: Noises, best: _Accepted) -> float:
    """Return the noise that the promise allows, on the scale of `noises`; a little noise is the sum of its parts."""
    return noises.of_plan(best.candidate.plan) / best.excess


def _learned(noises: Noises, best: _Accepted, missed: Sequence[_Missed]) -> Noises:
    """Return noises that explain how much the models missed the promise by.

    Errors of layer upon layer may add up to much more than the sum of the noises alone. The models count in the order
    of their excess, the least first. A model has units in int8 that no model before it has. The noise of these units is
    raised until the noise of the plan is the measured one.

    Args:
        noises: The noises of tensors and weights alone.
        best: A model that keeps the promise.
        missed: The plans whose models miss it.
    """
    allowed, quiet = _allowed(noises, best), [best.candidate.plan]
    for each in sorted(missed, key=lambda row: row.excess):
        noises = noises.raised_to(each.excess * allowed, each.plan, quiet)
        quiet.append(each.plan)
    return noises


# ------------------------------------------------------------------------------------------------------- the next plan


def _next_quieter(
    plans: PricedPlans, noise: Callable[[Plan], float], missed: _Missed
) -> tuple[PricedPlans, Plan | None]:
    """Return the fastest INT8 plan that may keep the promise, as `fastest_within` does.

    The limit of its noise is the noise of the plan that misses the promise, over its excess. If only the float model is
    within the limit, the limit rises halfway to that noise on a logarithmic scale: by how much a few samples miss the
    promise is mostly chance, so that fewer units in float may be enough.

    Args:
        plans: The plans by price.
        noise: Returns the noise of a plan.
        missed: The last plan whose model misses the promise.
    """
    missed_noise = noise(missed.plan)
    limit = MARGIN / missed.excess * missed_noise
    plans, found = fastest_within(plans, noise, limit)
    if found is not None and found.has_int8:
        return plans, found
    return fastest_within(plans, noise, _halfway(limit, missed_noise))


def _next_faster(
    plans: PricedPlans, noises: Noises, best: _Accepted, missed: Sequence[_Missed]
) -> tuple[PricedPlans, Plan | None]:
    """Return the plans with all measured costs, and a plan that is faster than the best model; None without one.

    The limit of its noise is what the promise allows. While no plan is faster, the limit rises towards the noise of the
    last plan that misses the promise. A plan that is not cheaper by its costs is not measured.

    Args:
        plans: The plans by price, with `noises`.
        noises: The noises that the models have taught.
        best: The fastest model that keeps the promise.
        missed: The plans whose models miss it.
    """
    kept = best.candidate.plan
    seen = [kept, *(each.plan for each in missed)]
    for limit in _limits(noises, best, missed[-1].plan):
        cheap = least_noise_as_fast(plans, noises.of_plan, limit)
        if cheap is None or 0 < plans.share(kept) <= plans.share(cheap):  # costs are 0 if unknown
            continue
        plans, found = fastest_within(plans, noises.of_plan, limit)
        if found is None or any(is_same(found, each) for each in seen):
            continue
        if plans.ratio(found, best.candidate) <= FASTER:
            return plans, found
        seen.append(found)
    return plans, None


def _limits(noises: Noises, best: _Accepted, missed: Plan) -> Iterator[float]:
    """Yield limits of noise for a plan with more noise than the best one has, each nearer to a plan that missed.

    The first limit is what the promise allows. Where that is not between the noises of both plans, it is halfway.
    """
    least, most = noises.of_plan(best.candidate.plan), noises.of_plan(missed)
    allowed = MARGIN * _allowed(noises, best)
    limit = allowed if least < allowed < most else _halfway(least, most)
    for _ in range(HALVINGS):
        yield limit
        limit = _halfway(limit, most)


def _halfway(low: float, high: float) -> float:
    """Return the noise between two noises on a logarithmic scale: their geometric mean."""
    return math.sqrt(low * high)


# ----------------------------------------------------------------------------------------- a plan between two others


def _with_plan_between(
    job: Job, noises: Noises, build: Callable[[Plan], Candidate], tried: _Tried, best: _Accepted
) -> _Accepted:
    """Return a model between the best one and the last that missed, if it is faster and keeps the promise; else `best`.

    Args:
        job: The job.
        noises: The noises of tensors and weights alone.
        build: Returns the model of a plan.
        tried: The models that were tried.
        best: The fastest of them that keeps the promise.
    """
    job.progress(RELIEF, ROUNDS, ROUNDS + BETWEEN)
    plan = _plan_between(noises, tried, best)
    candidate = None if plan is None else if_it_runs(partial(build, plan))
    accuracy = None if candidate is None else if_it_runs(partial(measure_accuracy, job, candidate))
    if candidate is None or accuracy is None or not promise_of(job, accuracy).kept:
        return best
    return replace(best, candidate=candidate, accuracy=accuracy)


def _plan_between(noises: Noises, tried: _Tried, best: _Accepted) -> Plan | None:
    """Return a plan between the best one and the last that missed that is faster than the best model; None without one.

    If noises allow plans between them, it is the fastest of those. If not, it is the plan in the middle. Where that is
    not faster, the plan in the middle of the noisier half is taken, and so on.
    """
    plans, kept = tried.plans, best.candidate
    path = _plans_on_the_way(plans.with_noises(noises), noises.of_plan, tried.missed[-1].plan, kept.plan)
    learned, limit = _learned(noises, best, tried.missed), MARGIN * _allowed(noises, best)
    allowed = [plan for plan in path if learned.of_plan(plan) <= limit]
    if allowed:
        fastest = min(allowed, key=plans.share)
        return fastest if _is_faster(plans, fastest, kept) else None
    while path:
        middle = len(path) // 2
        if _is_faster(plans, path[middle], kept):
            return path[middle]
        path = path[:middle]
    return None


def _plans_on_the_way(plans: PricedPlans, noise: Callable[[Plan], float], start: Plan, end: Plan) -> list[Plan]:
    """Return the plans between two others: one unit after the other gets its implementation in `end`.

    The unit that takes away the most noise for the least time changes first. No price of noise may lead to these plans:
    prices find only plans on the convex hull of time and noise, and units of the same noise for the same time change
    together.

    Args:
        plans: The plans by price, which know the time of a plan.
        noise: Returns the noise of a plan.
        start: The plan to start from, with more noise.
        end: The other plan, of the same units.
    """
    before, spent = noise(start), plans.share(start)

    def worth(name: str) -> float:
        plan = start.with_choices({name: end.choices[name]})
        return (before - noise(plan)) / max(plans.share(plan) - spent, LEAST_SHARE)

    changed = [unit.name for unit in start.units if start.impl(unit) is not end.impl(unit)]
    found, plan = [], start
    for name in sorted(changed, key=worth, reverse=True)[:-1]:  # with the last one, it is `end`
        plan = plan.with_choices({name: end.choices[name]})
        found.append(plan)
    return found


def _is_faster(plans: PricedPlans, plan: Plan, other: Candidate) -> bool:
    """Return whether a plan is clearly faster than a model: by the costs, and then by timing both."""
    return plans.share(plan) <= FASTER * plans.share(other.plan) and plans.ratio(plan, other) <= FASTER


# ---------------------------------------------------------------------------------------------------- native operators


def _without_few_native(job: Job, plans: PricedPlans, best: _Accepted, build: Callable[[Plan], Candidate]) -> _Accepted:
    """Return the model with the runtime's operators in place of at most `FEW` native ones that gain nothing.

    The given model is returned if they gain, or if the other model misses the promise. Placement has compared both only
    for a plan with more units in int8. The native library is one more file to deploy.

    Args:
        job: The job.
        plans: The plans, which time models.
        best: A model that keeps the promise.
        build: Returns the model of a plan.
    """
    plan = best.candidate.plan
    stock, count = stock_plan(plan), sum(plan.impl(unit).native for unit in plan.units)
    if job.options.wants_native or not 0 < count <= FEW or not stock.has_int8:
        return best
    if not 0 < plans.ratio(stock, best.candidate) <= 1 / FASTER:  # 0 where costs are not measured
        return best
    candidate = build(stock)
    accuracy = measure_accuracy(job, candidate)
    return replace(best, candidate=candidate, accuracy=accuracy) if promise_of(job, accuracy).kept else best


def _build_candidate(
    job: Job, ranges: TensorRanges, write: Callable[[Plan], Candidate], trial: Trial, evidence: Evidence, plan: Plan
) -> Candidate:
    """Return the model of a plan with corrections, with the placement of the trial and what the trial missed."""
    missed = str(promise_of(job, trial.accuracy))
    placement = replace(trial.candidate.placement, predicted_ms=None, missed=missed)
    return replace(correct(job, ranges, write(plan)), placement=placement, evidence=evidence)

"""Move units to float until an INT8 model keeps the promise of accuracy, the most noise for the least time first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from ...transforms.int8.plan import Plan
from ..accuracy.outputs import Accuracy
from ..job import Candidate, Evidence, Job, Trial
from ..options.efforts import EFFORTS
from ..placement.absorbers import absorbers_of
from ..placement.forms import possible_forms, stock_plan
from ..placement.noise import Noises
from ..placement.plans_by_cost import is_same
from ..placement.priced_plans import PricedPlans, plans_by_price
from ..runtime.progress import RELIEF, expect
from .emit import correct, plan_by_rules
from .evidence import all_int8_candidate, evidence_of
from .forecast import BETWEEN, ROUNDS, forecast_fall_back
from .judge import if_it_runs, judge, measure_accuracy, promise_of
from .ranges import TensorRanges

CHEAPEST, STEPS = 0.02, 24  # the least price of all noise, as a share of the float model's time; each step doubles it
HALVINGS = 5  # of a range of prices or noises, on a logarithmic scale
PROFILES = 3  # plans of a round that are profiled at most; each gives costs for the next one
MARGIN = 0.8  # noise to aim for, over the noise that is allowed: the sum of the tensors' noises is an estimate
STEP = 10.0  # the most by which the noise falls from model to model: the excess of a few samples is mostly chance
NEAR = 2.0  # a plan that misses the promise with at most this many times the noise of one that keeps it ends the search
ENOUGH = 0.7  # of the noise that is allowed: a plan that has as much ends the search
FASTER = 0.97  # the most that a plan takes of the time of one with less noise, else that one is better
LEAST_SHARE = 1e-6  # of the float model's time: what a unit takes at least, where the plan with it is not slower
FEW = 4  # native units that are timed against the runtime's operators; more of them gain together


def fall_back_to_float(job: Job, ranges: TensorRanges, trial: Trial) -> Trial:
    """Return a trial that keeps the promise with more units in float; the given trial if none does.

    The placement gives the cheapest plan for each price of noise. The price rises until the estimated noise of the plan
    is low enough. The estimate is the measured noise of the last model times the ratio of the plans' noises, each the
    sum of the noises of its tensors and weights alone. Such sums tell which units are noisy, and little of the noise of
    all together. If a model keeps the promise, faster ones are tried: `_learned` tells from the models that missed it
    which units add more noise together than alone. Where no price gives a plan with as much noise as is allowed, one
    more model is made, with some of the units in float in which the last two models differ. A model that does not run
    counts as one that misses the promise.

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
    plans, best, missed = _fastest_accepted(job, plans, noises, build, trial)
    if best is None:
        return trial
    best = _with_plan_between(job, plans, noises, best, missed, build)
    best = _without_few_native(job, plans, best, build)
    return if_it_runs(partial(judge, job, best.candidate, best.accuracy)) or trial


@dataclass(frozen=True, slots=True, eq=False)
class _Accepted:
    """A model that keeps the promise.

    Attributes:
        candidate: The model.
        accuracy: Its accuracy.
        excess: The power of its noise over what the promise allows, at least 1 / `STEP`.
    """

    candidate: Candidate
    accuracy: Accuracy
    excess: float


@dataclass(frozen=True, slots=True)
class _Missed:
    """A plan whose model misses the promise or does not run.

    Attributes:
        plan: The plan.
        excess: The power of its noise over what the promise allows, at most `STEP`.
    """

    plan: Plan
    excess: float


def _fastest_accepted(
    job: Job, plans: PricedPlans, noises: Noises, build: Callable[[Plan], Candidate], trial: Trial
) -> tuple[PricedPlans, _Accepted | None, tuple[_Missed, ...]]:
    """Search for the fastest model that keeps the promise, in at most `ROUNDS` models.

    Args:
        job: The job.
        plans: The plans by price.
        noises: The noises of tensors and weights alone.
        build: Returns the model of a plan.
        trial: The model that misses the promise.

    Returns:
        The plans with all costs that were measured; the fastest model that keeps the promise, None without one; and the
        plans whose models miss it, in the order of time.
    """
    best: _Accepted | None = None
    missed: tuple[_Missed, ...] = (_Missed(trial.candidate.plan, min(promise_of(job, trial.accuracy).excess, STEP)),)
    for number in range(ROUNDS):
        job.progress(RELIEF, number, ROUNDS + BETWEEN)
        if best is None:
            plans, found = _fastest_or_noisier(plans, noises.of_plan, missed[-1])
        else:
            learned = _learned(noises, best, missed)
            plans, found = _next_faster(plans.with_noises(learned), learned, best, missed)
        if found is None or not found.has_int8:
            break
        candidate = build(found)
        tried = if_it_runs(partial(measure_accuracy, job, candidate))
        excess = missed[-1].excess if tried is None else promise_of(job, tried).excess
        if tried is not None and promise_of(job, tried).kept:
            best = _Accepted(candidate, tried, max(excess, 1 / STEP))
        else:
            missed = (*missed, _Missed(found, min(excess, STEP)))
        if best and (best.excess >= ENOUGH or missed[-1].excess <= NEAR * best.excess):
            break
    return plans, best, missed


def _allowed(noises: Noises, best: _Accepted) -> float:
    """Return the noise that the promise allows, on the scale of `noises`; a little noise is the sum of its parts."""
    return noises.of_plan(best.candidate.plan) / best.excess


def _learned(noises: Noises, best: _Accepted, missed: Sequence[_Missed]) -> Noises:
    """Return noises that explain how much the models missed the promise by.

    Errors of layer upon layer may add up to much more than the sum of the noises alone. The models are taken from the
    one with the least excess on. What a model rounds, and those before it do not, counts as often as its measured noise
    needs.

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


def _plans_between(plans: PricedPlans, noise: Callable[[Plan], float], start: Plan, end: Plan) -> list[Plan]:
    """Return plans between two others: one unit after the other gets its implementation in `end`.

    The one that takes away the most noise for the least time is first. No price of noise may lead to a plan between:
    prices find only those on the convex hull of time and noise, and units of the same noise for the same time change
    together.
    """
    before, spent = noise(start), plans.share(start)

    def worth(name: str) -> float:
        plan = start.with_choices({name: end.choices[name]})
        return (before - noise(plan)) / max(plans.share(plan) - spent, LEAST_SHARE)

    changed = [unit.name for unit in start.units if start.impl(unit) is not end.impl(unit)]
    found, plan = [], start
    for name in sorted(changed, key=worth, reverse=True)[:-1]:
        plan = plan.with_choices({name: end.choices[name]})
        found.append(plan)
    return found


def _with_plan_between(
    job: Job,
    plans: PricedPlans,
    noises: Noises,
    best: _Accepted,
    missed: Sequence[_Missed],
    build: Callable[[Plan], Candidate],
) -> _Accepted:
    """Return a model between one that keeps the promise and the last that misses it, if it is faster and keeps it too.

    Its plan is the one with the least time whose noise is allowed. Without one it is the plan in the middle; where that
    is not faster, the one in the middle before it is tried, and so on.

    Args:
        job: The job.
        plans: The plans, which time models.
        noises: The noises of tensors and weights alone.
        best: A model that keeps the promise. It is returned if no other is better.
        missed: The plans whose models miss it.
        build: Returns the model of a plan.
    """
    job.progress(RELIEF, ROUNDS, ROUNDS + BETWEEN)
    path = _plans_between(plans.with_noises(noises), noises.of_plan, missed[-1].plan, best.candidate.plan)
    learned, limit = _learned(noises, best, missed), MARGIN * _allowed(noises, best)
    allowed = [plan for plan in path if learned.of_plan(plan) <= limit]
    path = [min(allowed, key=plans.share)] if allowed else path
    at = len(path) // 2
    while path and not _is_faster(plans, path[at], best.candidate):
        path = path[:at]
        at //= 2
    candidate = if_it_runs(partial(build, path[at])) if path else None
    tried = None if candidate is None else if_it_runs(partial(measure_accuracy, job, candidate))
    if candidate is None or tried is None or not promise_of(job, tried).kept:
        return best
    return replace(best, candidate=candidate, accuracy=tried)


def _is_faster(plans: PricedPlans, plan: Plan, other: Candidate) -> bool:
    """Return whether a plan is clearly faster than a model: by the costs, and then by timing both."""
    return plans.share(plan) <= FASTER * plans.share(other.plan) and plans.ratio(plan, other) <= FASTER


def _fastest_or_noisier(
    plans: PricedPlans, noise: Callable[[Plan], float], missed: _Missed
) -> tuple[PricedPlans, Plan | None]:
    """Return the fastest INT8 plan within a limit of noise, else within a higher one, as `_fastest_within` does.

    The limit is the noise of a plan that misses the promise, over its excess. The higher limit is the geometric mean of
    both. By how much a few samples miss the promise is mostly chance, so that fewer units in float may be enough.
    """
    missed_noise = noise(missed.plan)
    limit = MARGIN / missed.excess * missed_noise
    plans, found = _fastest_within(plans, noise, limit)
    if found is not None and found.has_int8:
        return plans, found
    return _fastest_within(plans, noise, math.sqrt(limit * missed_noise))


def _next_faster(
    plans: PricedPlans, noises: Noises, best: _Accepted, missed: Sequence[_Missed]
) -> tuple[PricedPlans, Plan | None]:
    """Return the plans with all measured costs, and a plan that is faster than a model that keeps the promise.

    The noise of the plan is what the promise allows, else between this and the noise of the last plan that misses it.
    The plan is None if there is no such plan. A plan is not measured if it is not cheaper by its costs.
    """
    noise, kept = noises.of_plan, best.candidate.plan
    least, most, tried = noise(kept), noise(missed[-1].plan), [kept, *(each.plan for each in missed)]
    limit = MARGIN * _allowed(noises, best)
    limit = limit if least < limit < most else math.sqrt(least * most)
    for _ in range(HALVINGS):
        cheap = _least_noise_as_fast(plans, noise, limit)
        if cheap is not None and not 0 < plans.share(kept) <= plans.share(cheap):  # costs are 0 if unknown
            plans, found = _fastest_within(plans, noise, limit)
            if found is not None and not any(is_same(found, each) for each in tried):
                if plans.ratio(found, best.candidate) <= FASTER:
                    return plans, found
                tried.append(found)
        limit = math.sqrt(limit * most)
    return plans, None


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


def _fastest_within(
    plans: PricedPlans, noise: Callable[[Plan], float], limit: float
) -> tuple[PricedPlans, Plan | None]:
    """Return the plans with all measured costs, and the fastest plan with at most `limit` noise; None without one.

    The model of the cheapest plan is profiled. Its costs may make another plan the cheapest, which is profiled next, at
    most `PROFILES` times.
    """
    tried: list[tuple[float, Plan]] = []
    for _ in range(PROFILES):
        plan = _least_noise_as_fast(plans, noise, limit)
        if plan is None or any(is_same(plan, before) for _, before in tried):
            break
        plans, took = plans.measured(plan)
        tried.append((took, plan))
    _, best = min(tried, key=lambda row: row[0], default=(0.0, None))
    return plans, best


def _least_noise_as_fast(plans: PricedPlans, noise: Callable[[Plan], float], limit: float) -> Plan | None:
    """Return the plan with the least noise among those that take at most 1 / `FASTER` of the time of one plan.

    This one has the least price at which the noise is at most `limit`. Return None if no price gives such a plan.
    """
    found = _cheapest_within(plans, noise, limit)
    if found is None:
        return None
    price, plan = found
    most = plans.share(plan) / FASTER
    dearer = (plans(price * 2 ** (step / HALVINGS)) for step in range(1, HALVINGS + 1))
    *_, quietest = (plan, *takewhile(lambda each: 0 < plans.share(each) <= most, dearer))
    return quietest


def _cheapest_within(
    plan_at: Callable[[float], Plan], noise: Callable[[Plan], float], limit: float
) -> tuple[float, Plan] | None:
    """Return the least price at which the noise of the plan is at most `limit`, and the plan; None if there is none."""
    prices = (CHEAPEST * 2**step for step in range(STEPS))
    found = next(((price, plan) for price in prices if noise(plan := plan_at(price)) <= limit), None)
    if found is None:
        return None
    (most, best), least = found, found[0] / 2
    for _ in range(HALVINGS):
        price = math.sqrt(least * most)
        if noise(plan := plan_at(price)) <= limit:
            most, best = price, plan
        else:
            least = price
    return most, best


def _build_candidate(
    job: Job, ranges: TensorRanges, write: Callable[[Plan], Candidate], trial: Trial, evidence: Evidence, plan: Plan
) -> Candidate:
    """Return the model of a plan with corrections, with the placement of the trial and what the trial missed."""
    missed = str(promise_of(job, trial.accuracy))
    placement = replace(trial.candidate.placement, predicted_ms=None, missed=missed)
    return replace(correct(job, ranges, write(plan)), placement=placement, evidence=evidence)

"""Place by costs: compute cheapest plans, time them, and choose the fastest."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from ... import RequantError
from ...transforms.int8.plan import Impl, Plan
from ..job import ROUGH, Candidate, Job, Placement
from ..options.efforts import EFFORTS
from . import costs as store
from .batches import BY_RULES, CLEAR, MEASURED_NOISE, NOISE, fairest, served
from .bodies import faster_with_bodies, integers_in_bodies
from .costs import Costs
from .facts import Facts
from .measuring import Bench, Measured, Write, measure_plan, measure_units, profile_float
from .plans_by_cost import cheapest_plan, common_plan, tuned_plan, without_idle
from .pricing import (
    OTHER_FORMS,
    Prices,
    Space,
    float_time,
    has_unmeasured,
    lacks_float,
    plan_milliseconds,
    with_absorbed,
    with_noise_price,
)
from .racing import Size, fastest, worth_of
from .rules import all_int8_plan, native_plan, native_products_plan, possible_forms, stock_plan

FORMS = 3 + len(OTHER_FORMS)  # plans that give the costs: float, u8, each other form, and the rules
ROUNDS = 4  # number of measured plans; each uses the costs that the plan before it gave
LEAST_MS = 0.02  # of shorter runs, a profile in whole microseconds says little
QUICKER = 0.95  # share of the time of the chosen plan below which the error of a plan with more noise is measured
REFUSED = 2  # number of such plans
STRETCHES = (1.0, 2.0, 0.5)  # factors on the cost of conversions, tried until the cut gives a new plan

ErrorOf: TypeAlias = Callable[[Candidate], float]
"""Measures the error of a model at its outputs: the amplitude of the noise over the amplitude of the signal. It is
infinite for a model that does not run, or loses too much."""


def place(
    job: Job,
    facts: Facts,
    rules: Plan,
    write: Write,
    noise: Mapping[str, float] | None = None,
    error: ErrorOf | None = None,
    before: Placement | None = None,
) -> tuple[Candidate, Placement]:
    """Return the model with the placement that the policy selects, for all batch sizes of the job.

    Args:
        job: The job; models are timed on its feeds.
        facts: The input of the rules.
        rules: The plan by rules.
        write: Writes a plan into a model.
        noise: The noise at the outputs that each uint8 tensor adds, as far as known.
        error: Measures the error of a model; None where only estimates count.
        before: As for `sizes_of`.
    """
    how = job.policy.how
    asked = partial(as_asked, job, facts)
    if how == "all":
        return write(asked(all_int8_plan(facts, rules))), Placement("all")
    free = any(len(forms) > 1 for forms in possible_forms(facts, rules).values())
    if not free or not costs_decide(job):
        why = _why_rules_decide(job) if free else ""
        if how != "measured" or not _is_timed(job) or not integers_in_bodies(job):
            return write(asked(rules)), Placement("rules", why=why)
        return faster_with_bodies(sizes_of(job, facts, rules, write, noise or {}, before), asked(rules), why)
    sizes = sizes_of(job, facts, rules, write, noise or {}, before)
    if how == "estimated":
        plan, placement = _estimated_placement(sizes)
        return write(asked(plan)), placement
    return _measured_placement(sizes, error)


def as_asked(job: Job, facts: Facts, plan: Plan) -> Plan:
    """Return a plan, with a native operator for each unit that has one if the user wants that."""
    return native_plan(facts, plan) if job.options.wants_native else plan


def sizes_of(
    job: Job,
    facts: Facts,
    rules: Plan,
    write: Write,
    noise: Mapping[str, float],
    before: Placement | None = None,
) -> list[Size]:
    """Return the batch sizes with the costs that are known before anything is measured; one size without data.

    Args:
        job: The job; models are timed on its feeds.
        facts: The input of the rules.
        rules: The plan by rules.
        write: Writes a plan into a model.
        noise: The noise at the outputs that each uint8 tensor adds.
        before: A placement of the same job. What was measured for it is not measured again, also where kernels had to
            wait for a processor, so that no cache keeps it; None without one.
    """
    before = before or Placement()
    costs = _known_costs(job).with_rows(before.costs)
    found, keys = [], set[str]()
    for load in job.loads or (None,):
        batch, feed, regime = (1, None, None) if load is None else (load.batch, load.feed, load.regime)
        space = Space.of(job, facts, rules, feed)
        keys.update(space.keys.values())
        prices = with_absorbed(Prices.of(space, costs, noise))
        known = Measured.of(prices, before.costs, sure=before.sure)
        found.append(Size(batch, Bench.of(job, space, write, feed), known, regime=regime))
    if job.policy.costs is not None:
        priced = _with_costs(job, costs, keys)
        if len(priced) < len(keys):
            few = f"{len(priced)} of {len(keys)} kinds of units have costs in {job.policy.costs}; others are estimated"
            logging.getLogger("requant").warning("requant: %s", few)
    return found


def check_costs_know_units(job: Job, facts: Facts, rules: Plan) -> None:
    """Refuse a file of costs of another model before ranges are observed.

    Args:
        job: The job.
        facts: The input of the rules without ranges: ranges only take units away.
        rules: The plan by rules.

    Raises:
        RequantError: No unit of the model is in the file.
    """
    if not costs_decide(job) or job.runtime.fuses:  # what follows a unit depends on ranges
        return
    spaces = [Space.of(job, facts, rules, None if load is None else load.feed) for load in job.loads or (None,)]
    keys = {key for space in spaces for key in space.keys.values()}
    _with_costs(job, _known_costs(job), keys)


def _with_costs(job: Job, costs: Costs, keys: Collection[str]) -> set[str]:
    """Return the signatures of the units that have costs in the file that the user gives.

    Args:
        job: The job.
        costs: The costs of the file.
        keys: The signatures of the units that may become int8.

    Raises:
        RequantError: No unit of the model is in the file.
    """
    known = {key for key in keys if Impl.FLOAT.value in costs.rows.get(key, {})}
    if keys and not known:
        raise RequantError(
            f"{job.policy.costs}: has costs of no unit of {job.path}; measure them with "
            "'requant costs measure' (in Python: measure_costs)"
        )
    return known


def measured_costs(job: Job, facts: Facts, rules: Plan, write: Write) -> Costs:
    """Return the costs of the units of a model at each batch size, measured without the cache.

    Raises:
        RequantError: There is no feed, the model does not run, or no unit can become int8.
    """
    costs = fresh = Costs(job.runtime.machine(job.options.threads))
    sure = True
    for load in job.loads:
        space = Space.of(job, facts, rules, load.feed)
        if not space.keys:
            raise RequantError(f"{job.path}: no unit of it can become int8")
        known = Measured(Prices.of(space, costs, {}), fresh)
        known = measure_units(Bench.of(job, space, write, load.feed), known)
        fresh, sure = known.fresh, sure and known.sure
    if not job.loads:
        raise RequantError(f"{job.path}: no data to run it on")
    if not sure:
        logging.getLogger("requant").warning("requant: %s", ROUGH)
    if not fresh.rows:
        raise RequantError(f"{job.path}: the runtime does not run it under its profiler")
    return fresh


def keep(known: Measured) -> None:
    """Add the costs to the cache, unless kernels had to wait for a processor while they were measured."""
    if known.sure:
        store.keep(known.fresh)


def costs_decide(job: Job) -> bool:
    """Return whether costs decide: never if `integers_in_bodies`; measured costs only with a feed."""
    how = job.policy.how
    return not integers_in_bodies(job) and (how == "estimated" or (how == "measured" and _is_timed(job)))


def _is_timed(job: Job) -> bool:
    """Return whether there is something to time models on, and the model is not too large for that."""
    return job.feed is not None and not job.weights.large


def _why_rules_decide(job: Job) -> str:
    """Return why costs do not decide though they were asked for; empty if they were not."""
    if job.policy.how not in ("measured", "estimated"):
        return ""
    if integers_in_bodies(job):
        return "operators in the control flow of the model may be int8, and their costs are not known"
    return "the model is too large to time many plans" if job.weights.large else "no data to time plans on"


def _known_costs(job: Job) -> Costs:
    """Return the costs that are known before anything is measured: from a file, from the cache, or none."""
    if job.policy.costs is not None:
        return store.read(job.policy.costs)
    machine = job.runtime.machine(job.options.threads)
    return store.load(machine) if job.policy.how == "measured" else Costs(machine)


# ------------------------------------------------------------------------------------------------------------ try


def _estimated_placement(sizes: Sequence[Size]) -> tuple[Plan, Placement]:
    """Return the cheapest plan; for several batch sizes, the plan whose worst ratio to the cheapest one is least."""
    job = sizes[0].bench.job
    every = [with_noise_price(size.known.prices, job, float_time(size.known.prices)) for size in sizes]
    plans = {f"cut{_tag(size, sizes)}": cheapest_plan(prices) for size, prices in zip(sizes, every, strict=True)}
    if len(sizes) > 1:
        plans["cut for all"] = common_plan(every)
    tried = [{name: plan_milliseconds(prices, plan) for name, plan in plans.items()} for prices in every]
    worth = worth_of(every, tried, plans)
    best, own = fairest(worth), [fairest([each]) for each in worth]
    predicted = [times[best] for times in tried]
    return plans[best], Placement(
        "estimated",
        predicted[0],
        served=served([(size.batch, size.regime) for size in sizes], best, own, tried, predicted),
    )


def _measured_placement(sizes: Sequence[Size], error: ErrorOf | None) -> tuple[Candidate, Placement]:
    """Measure units, try the plans that the costs give, and return the model that serves all batch sizes best."""
    bench, space = sizes[0].bench, sizes[0].known.prices.space
    candidates = {BY_RULES: bench.candidate(space.rules)}
    sizes = [_with_float(size) for size in sizes]
    long = [index for index, size in enumerate(sizes) if not size.brief]
    if not long:
        return bench.candidate(as_asked(bench.job, space.facts, space.rules)), Placement("rules")
    tell = partial(_tell, bench.job, 1 + (FORMS + ROUNDS) * len(long))
    tell(1)
    for position, index in enumerate(long):
        sizes[index] = _with_units(sizes[index], candidates, partial(tell, 1 + FORMS * position))
    for position, index in enumerate(long):
        done = partial(tell, 1 + FORMS * len(long) + ROUNDS * position)
        sizes[index] = _with_cuts(sizes[index], candidates, _tag(sizes[index], sizes), done)
    if len(long) > 1:
        plan = _untried([sizes[index].known.prices for index in long], candidates)
        candidates |= {} if plan is None else {"cut for all": bench.candidate(plan)}
    for index in long:
        keep(sizes[index].known)
    if bench.job.options.wants_native:
        everywhere = {name: native_plan(space.facts, candidate.plan) for name, candidate in candidates.items()}
        candidates |= {f"{name}, native": bench.candidate(plan) for name, plan in everywhere.items()}
        candidates = {name: candidate for name, candidate in candidates.items() if candidate.native} or candidates
        return fastest(sizes, candidates)
    last = next(reversed(candidates))  # the cheapest plan by the costs that are known at last
    joined = {  # joined operators take less than the sum of their costs
        "all, native": native_plan(space.facts, candidates["all"].plan),
        f"{last}, products": native_products_plan(space.forms, candidates[last].plan),
        f"{last}, dynamic": without_idle(native_products_plan(space.forms, candidates[last].plan, every=True)),
    }
    for name, plan in joined.items():
        if not _is_tried(plan, candidates):
            candidates[name] = bench.candidate(plan)
    best, placement = _best(sizes, candidates)
    if not best.plan.has_int8:
        return _despite_noise(sizes, candidates, best, placement)
    return (best, placement) if error is None else _by_error(sizes, candidates, best, placement, error)


def _best(sizes: Sequence[Size], candidates: Mapping[str, Candidate]) -> tuple[Candidate, Placement]:
    """Return the fastest candidate, without native operators if they gain too little."""
    best, placement = fastest(sizes, candidates)
    return _native_or_stock(sizes, candidates, best, placement) if best.native else (best, placement)


def _despite_noise(
    sizes: Sequence[Size], candidates: Mapping[str, Candidate], best: Candidate, placement: Placement
) -> tuple[Candidate, Placement]:
    """Return the fastest INT8 model if the best one is a float model only because noise has a price; else the best one.

    The price is that of the sum of all tensors' noises. All tensors together may add far less noise. The accuracy of
    the INT8 model is judged later; units become float then if it loses too much.
    """
    quick = {name: each for name, each in candidates.items() if each.plan.has_int8}
    least = min((placement.tried[name] for name in quick if name in placement.tried), default=math.inf)
    if least >= CLEAR * placement.tried.get(placement.chosen, 0.0):
        return best, placement
    return _best(_without_price(sizes), quick)


def _by_error(
    sizes: Sequence[Size],
    candidates: Mapping[str, Candidate],
    best: Candidate,
    placement: Placement,
    error: ErrorOf,
) -> tuple[Candidate, Placement]:
    """Return a faster model instead of the best one if its time and the price of its measured error add up to less.

    The faster models were refused because of their estimated noise. The estimate is the sum of the noises of single
    tensors. All tensors together may add far less noise.
    """
    job, tried = sizes[0].bench.job, placement.tried
    most = QUICKER * tried.get(placement.chosen, 0.0)
    passed = [name for name, why in placement.passed.items() if why == NOISE and name in candidates]  # no stock twin
    refused = [name for name in passed if tried[name] <= most]
    before = error(best) if refused and not job.options.noise_weight else math.inf
    if not math.isfinite(before):
        return best, placement
    price = EFFORTS[job.options.effort].exchange * float_time(sizes[0].known.prices) / 1e3
    errors = {name: error(candidates[name]) for name in sorted(refused, key=tried.__getitem__)[:REFUSED]}
    worth = {name: tried[name] + price * each for name, each in errors.items()}
    name = min(worth, key=worth.__getitem__)
    if worth[name] >= tried[placement.chosen] + price * before:
        return best, replace(placement, passed={**placement.passed, **dict.fromkeys(errors, MEASURED_NOISE)})
    found, last = _best(_without_price(sizes), {name: candidates[name]})
    faster = (each for each, ms in tried.items() if ms < last.tried[last.chosen])
    reasons = {each: MEASURED_NOISE if each in errors else placement.passed.get(each, NOISE) for each in faster}
    return found, replace(last, tried={**tried, **last.tried}, passed={**reasons, **last.passed})


def _without_price(sizes: Sequence[Size]) -> list[Size]:
    """Return batch sizes at which noise costs nothing, unless the user gives its price."""
    price = sizes[0].bench.job.options.noise_weight
    known = (replace(size.known, prices=replace(size.known.prices, noise_price=price)) for size in sizes)
    return [replace(size, known=each) for size, each in zip(sizes, known, strict=True)]


def _native_or_stock(
    sizes: Sequence[Size], candidates: Mapping[str, Candidate], best: Candidate, placement: Placement
) -> tuple[Candidate, Placement]:
    """Return the best candidate, or the same plan without native operators if they gain too little.

    The best of many plans is the best one by chance too; these two are timed in turns again.
    """
    name = next(name for name, candidate in candidates.items() if candidate is best)
    other = f"{name}, stock"
    found, last = fastest(sizes, {name: best, other: sizes[0].bench.candidate(stock_plan(best.plan))})
    if not last.tried:
        return best, placement
    rows = zip(placement.served, last.served, strict=True)
    served_now = tuple(replace(row, tried={**row.tried, **more.tried}) for row, more in rows)
    why = {**placement.passed, **last.passed}
    placement = replace(placement, tried={**placement.tried, **last.tried}, served=served_now, passed=why)
    if found is best:
        return best, placement
    rows_of_other = tuple(
        replace(row, chosen=other, predicted_ms=more.predicted_ms)
        for row, more in zip(served_now, last.served, strict=True)
    )
    return found, replace(placement, predicted_ms=last.predicted_ms, served=rows_of_other, chosen=other)


def _tell(job: Job, total: int, before: int, done: int = 0) -> None:
    """Report the progress of the measurements: `before` plans, and `done` more, of `total` are measured."""
    job.progress("measure costs", before + done, total)


def _tag(size: Size, sizes: Sequence[Size]) -> str:
    """Return what ends the name of a plan that was made from the costs of one batch size; empty for a single size."""
    return f" for {size.name}" if len(sizes) > 1 else ""


def _with_float(size: Size) -> Size:
    """Profile the float model at a batch size; return the size with the price of noise and the absorbed units.

    The price is a share of the time of the float model. Absorbed units are those without a kernel of their own.
    """
    float_profile, known = profile_float(size.bench, size.known)
    if float_profile is None:
        return replace(size, known=known, brief=True)
    job, keys = size.bench.job, known.prices.space.keys
    prices = with_noise_price(known.prices, job, float_profile.total)
    prices = replace(prices, absorbed=frozenset(keys.keys() - float_profile.units.keys()))
    return replace(size, known=replace(known, prices=prices), brief=float_profile.total < 1e3 * LEAST_MS)


def _with_units(size: Size, candidates: dict[str, Candidate], tell: Callable[[int], None]) -> Size:
    """Return a batch size with the costs of its units, and add the plan ``all`` to the candidates.

    Args:
        size: The batch size.
        candidates: The candidates so far.
        tell: Called with the number of plans, of `FORMS`, that were measured.
    """
    known, space = size.known, size.known.prices.space
    missing = any(lacks_float(known.prices, name) for name in space.keys.keys() - known.prices.absorbed)
    if missing or has_unmeasured(known.prices):
        known = measure_units(size.bench, known, tell)
    if "all" not in candidates:
        candidates["all"] = size.bench.candidate(all_int8_plan(space.facts, space.rules))
    tell(FORMS - 1)
    # the plans that follow are near the rules, and a kernel's time depends on its neighbours
    return replace(size, known=measure_plan(size.bench, known, candidates["rules"]))


def _with_cuts(size: Size, candidates: dict[str, Candidate], tag: str, tell: Callable[[int], None]) -> Size:
    """Add the tuned plans and the cheapest plans at one batch size to the candidates; return the size with its costs.

    Args:
        size: The batch size.
        candidates: The candidates so far.
        tag: The end of the names of the plans.
        tell: Called with the number of plans that were measured.
    """
    known = size.known
    for name, tuned in (("all", "all, tuned"), ("rules", "rules, tuned")):
        plan = tuned_plan(known.prices, candidates[name].plan)
        if plan is not None and not (tag and _is_tried(plan, candidates)):
            candidates[f"{tuned}{tag}"] = size.bench.candidate(plan)
    for index in range(ROUNDS):
        plan = _untried([known.prices], candidates)
        if plan is None:
            break
        candidate = candidates[f"cut {index + 1}{tag}"] = size.bench.candidate(plan)
        known = measure_plan(size.bench, known, candidate)
        tell(index)
    return replace(size, known=known)


def _untried(every: Sequence[Prices], candidates: Mapping[str, Candidate]) -> Plan | None:
    """Return the cheapest plan that is not a candidate yet, for one of the `STRETCHES` of conversions; else None.

    The cost of conversions is the least certain one. A plan without int8 is no candidate: the whole INT8 model is
    compared with the float model later.
    """
    plans = (common_plan(every, factor) for factor in STRETCHES)
    return next((p for p in plans if not _is_tried(p, candidates) and any(impl.int8 for impl in _impls(p))), None)


def _is_tried(plan: Plan, candidates: Mapping[str, Candidate]) -> bool:
    """Return whether a candidate has the implementations of a plan."""
    return _impls(plan) in [_impls(candidate.plan) for candidate in candidates.values()]


def _impls(plan: Plan) -> list[Impl]:
    """Return the implementations of the units of a plan."""
    return [plan.impl(unit) for unit in plan.units]

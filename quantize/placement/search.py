"""Place by costs: compute cheapest plans, time them, and choose the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ... import RequantError
from ...calibration.session import Array
from ...transforms.ops import OPS
from ...transforms.plan import Choice, Impl, Plan, Unit
from ..job import Candidate, Job, Placement
from ..options.efforts import EFFORTS
from ..runtime.configured import GAIN
from ..runtime.machine import Machine
from ..runtime.session import Runner
from ..runtime.timing import interleave
from . import costs as store
from .costs import Costs
from .estimates import estimate
from .facts import Facts
from .measuring import Bench, Measured, Write, measure_plan, measure_units, profile, profile_float
from .min_cut import Item, Problem, cheapest
from .pricing import (
    OTHER_FORMS,
    Prices,
    Space,
    dequantize_cost,
    float_time,
    has_unmeasured,
    lacks_float,
    measured,
    measured_int8,
    noise_cost,
    plan_milliseconds,
    plan_noise_cost,
    quantize_cost,
    unit_cost,
    with_noise_price,
)
from .reasons import CONVERSIONS_COST_MORE, FLOAT_FASTER, NOISE_COSTS_MORE, NOTHING_COMPUTES, TOO_NOISY
from .rules import able, all_int8_plan, native_plan

ROUNDS = 4  # number of measured plans; each uses the costs that the plan before it gave
LEAST_MS = 0.5  # shorter runs time too noisily
CLEAR = 0.99  # share of the time of the plan by rules below which another plan wins
SHARE = 1.0  # time for comparing plans, as a share of the time for the latency
STRETCHES = (1.0, 2.0, 0.5)  # factors on the cost of conversions, tried until the cut gives a new plan


def place(
    job: Job,
    facts: Facts,
    rules: Plan,
    write: Write,
    feed: Mapping[str, Array] | None,
    noise: Mapping[str, float] | None = None,
) -> tuple[Candidate, Placement]:
    """Return the model with the placement that the policy selects.

    Args:
        job: The job.
        facts: The input of the rules.
        rules: The plan by rules.
        write: Writes a plan into a model.
        feed: The inputs on which models are timed; None without data.
        noise: The noise at the outputs that each uint8 tensor adds, as far as known.
    """
    how = job.policy.how
    wanted = partial(native_plan, facts) if job.policy.kernels in ("native", "exact") else _as_it_is
    if how == "all":
        return write(wanted(all_int8_plan(facts, rules))), Placement("all")
    free = any(len(forms) > 1 for forms in able(facts, rules).values())
    if not free or not _costs_decide(job, facts, feed):
        return write(wanted(rules)), Placement("rules")
    prices = Prices.of(Space.of(job, facts, rules, feed), _known_costs(job), noise or {})
    if how == "estimated":
        prices = with_noise_price(prices, job, float_time(prices), EFFORTS[job.options.effort].exchange)
        plan = cheapest_plan(prices)
        return write(wanted(plan)), Placement("estimated", plan_milliseconds(prices, plan))
    return _measured_placement(Bench.of(job, rules, write, feed), Measured.of(prices))


def _as_it_is(plan: Plan) -> Plan:
    """Return the plan."""
    return plan


def plans_by_price(
    job: Job,
    facts: Facts,
    rules: Plan,
    write: Write,
    feed: Mapping[str, Array] | None,
    noise: Mapping[str, float],
) -> Callable[[float], Plan]:
    """Return a function from a price of noise to the cheapest plan. The price is a share of the float model's time.

    The costs are the costs of `place`; costs that the cache lacks are measured now, and cached. If costs do not decide,
    for instance in models with control flow, or if no noise is known, units become float, the noisiest first.

    Args:
        job: The job.
        facts: The input of the rules.
        rules: The plan by rules.
        write: Writes a plan into a model.
        feed: The inputs on which models are timed; None without data.
        noise: The noise at the outputs that each uint8 tensor adds.
    """
    how = job.policy.how
    if not noise or not _costs_decide(job, facts, feed):
        return partial(_without_noisy, all_int8_plan(facts, rules) if how == "all" else rules, noise)
    known = Measured.of(Prices.of(Space.of(job, facts, rules, feed), _known_costs(job), noise))
    if how == "measured":
        bench = Bench.of(job, rules, write, feed)
        _, known = profile_float(bench, known)
        if has_unmeasured(known.prices):
            _, known = measure_units(bench, known)
            store.keep(known.fresh)
    prices = known.prices
    absorbed = {n for n in prices.space.keys if lacks_float(prices, n) and measured_int8(prices, n) is not None}
    prices = replace(prices, absorbed=frozenset(absorbed))
    return partial(_plan_at_price, job, prices, float_time(prices))


def measured_costs(job: Job, facts: Facts, rules: Plan, write: Write, feed: Mapping[str, Array] | None) -> Costs:
    """Return the costs of the units of a model, measured without the cache.

    Raises:
        RequantError: There is no feed, the model does not run, or no unit can become int8.
    """
    space = Space.of(job, facts, rules, feed)
    if feed is None or not space.keys:
        raise RequantError(f"{job.path}: {'no data to run it on' if feed is None else 'no unit of it can become int8'}")
    known = Measured.of(Prices.of(space, Costs(Machine.here(job.options.threads)), {}))
    _, known = measure_units(Bench.of(job, rules, write, feed), known)
    if not known.fresh.rows:
        raise RequantError(f"{job.path}: the runtime does not run it under its profiler")
    return known.fresh


def _costs_decide(job: Job, facts: Facts, feed: Mapping[str, Array] | None) -> bool:
    """Return whether costs decide: never in models with control flow; measured costs only with a feed."""
    looped = any(node.graph is not job.simple.graph for node in facts.nodes.values())
    timed = feed is not None and not job.weights.large
    return not looped and (job.policy.how == "estimated" or (job.policy.how == "measured" and timed))


def _known_costs(job: Job) -> Costs:
    """Return the costs that are known before anything is measured: from a file, from the cache, or none."""
    if job.policy.costs is not None:
        return store.read(job.policy.costs)
    machine = Machine.here(job.options.threads)
    return store.load(machine) if job.policy.how == "measured" else Costs(machine)


# ------------------------------------------------------------------------------------------------------------ cut


def cheapest_plan(prices: Prices, factor: float = 1.0) -> Plan:
    """Return the plan with the least cost.

    Args:
        prices: The costs.
        factor: Multiplies the cost of conversions.
    """
    space = prices.space
    units = space.rules.units
    tensors = {tensor for unit in units for tensor in (*unit.inputs, *unit.outputs)}
    stretch = factor * prices.stretch
    quantize = {tensor: stretch * quantize_cost(prices, tensor) for tensor in tensors}
    dequantize = {tensor: stretch * dequantize_cost(prices, tensor) for tensor in tensors}
    for unit in units:  # behind an integer kernel, a unit that float absorbs has a kernel of its own
        if unit.name in prices.absorbed:
            dequantize[unit.inputs[0]] += estimate(unit, space.facts.nodes, prices.sizes, Impl.FLOAT)
    items = [_item(prices, unit) for unit in units]
    chosen = cheapest(Problem(items, quantize, dequantize, space.outputs & tensors))
    return _without_idle(
        space.rules.with_choices(
            {unit.name: _choice(prices, unit, chosen[unit.name]) for unit in units if unit.name in space.keys}
        )
    )


def _item(prices: Prices, unit: Unit) -> Item:
    """Return a unit with the cost of each of its implementations; 0 where there is no choice."""
    forms = prices.space.forms[unit.name]
    if len(forms) == 1:
        return Item(unit.name, unit.inputs, unit.outputs, {forms[0]: 0.0})
    noise = noise_cost(prices, unit)
    known = [form for form in forms if form not in OTHER_FORMS or measured(prices, unit.name, form) is not None]
    costs = {form: unit_cost(prices, unit, form) + (noise if form.reads_u8 else 0.0) for form in known}
    return Item(unit.name, unit.inputs, unit.outputs, costs)


def _choice(prices: Prices, unit: Unit, impl: Impl) -> Choice:
    """Return the choice of an implementation for a unit with several; float with the reason."""
    if impl.int8:
        return Choice(impl)
    in_float, in_int8 = (unit_cost(prices, unit, form) for form in prices.space.forms[unit.name][:2])
    if in_float <= in_int8:
        return Choice(Impl.FLOAT, FLOAT_FASTER.about(in_float, in_int8))
    gain = in_float - in_int8
    reason = NOISE_COSTS_MORE if noise_cost(prices, unit) > gain else CONVERSIONS_COST_MORE
    return Choice(Impl.FLOAT, reason.about(gain))


def _plan_at_price(job: Job, prices: Prices, microseconds: float, exchange: float) -> Plan:
    """Return the cheapest plan where all noise costs a share of some time."""
    return cheapest_plan(with_noise_price(prices, job, microseconds, exchange))


def _without_noisy(plan: Plan, noise: Mapping[str, float], exchange: float) -> Plan:
    """Return a plan without the units whose tensors have more noise than ``1 / exchange`` times the mean of all."""
    known = [noise[tensor] for tensor in plan.quantized if tensor in noise]
    if not known or exchange <= 0:
        return plan
    limit = math.fsum(known) / len(known) / exchange
    noisy = {tensor for tensor in plan.quantized if noise.get(tensor, 0.0) > limit}
    changed = {
        unit.name: Choice(Impl.FLOAT, TOO_NOISY)
        for unit in plan.units
        if plan.impl(unit).reads_u8 and noisy.intersection((*unit.inputs, *unit.outputs))
    }
    return _without_idle(plan.with_choices(changed))


def _without_idle(plan: Plan) -> Plan:
    """Return a plan with every unit in float if no unit computes on uint8 and the int8 units would only move it."""
    if any(OPS[u.op].kind == "compute" and plan.impl(u).reads_u8 for u in plan.units if u.op in OPS):
        return plan
    return plan.with_choices(
        {u.name: Choice(Impl.FLOAT, NOTHING_COMPUTES) for u in plan.units if plan.impl(u).reads_u8}
    )


# ------------------------------------------------------------------------------------------------------------ try


def _measured_placement(bench: Bench, known: Measured) -> tuple[Candidate, Placement]:
    """Measure units, try the plans that the costs give, and return the fastest model."""
    job, space = bench.job, known.prices.space
    by_rules = bench.write(space.rules)
    tell, steps = partial(job.progress, "measure costs"), 3 + ROUNDS
    whole, known = profile_float(bench, known)
    if whole is None or whole.total < 1e3 * LEAST_MS:
        return by_rules, Placement("rules")
    tell(1, steps)
    prices = with_noise_price(known.prices, job, whole.total, EFFORTS[job.options.effort].exchange)
    prices = replace(prices, absorbed=frozenset(space.keys.keys() - whole.units.keys()))
    known = replace(known, prices=prices)
    missing = any(lacks_float(prices, name) for name in space.keys.keys() - prices.absorbed)
    if missing or has_unmeasured(prices):
        all_int8, known = measure_units(bench, known)
    else:
        all_int8 = bench.write(all_int8_plan(space.facts, space.rules))
    candidates = {"rules": by_rules, "all": all_int8}
    tell(2, steps)
    for name, tuned in (("all", "all"), ("rules", "rules, tuned")):
        plan = tuned_plan(known.prices, candidates[name].plan)
        if plan is not None:
            candidates[tuned] = bench.write(plan)
    for index in range(ROUNDS):
        plan = _untried(known.prices, candidates)
        if plan is None:
            break
        candidate = candidates[f"cut {index + 1}"] = bench.write(plan)
        known = measure_plan(bench, known, candidate)
        tell(3 + index, steps)
    store.keep(known.fresh)
    if job.policy.kernels in ("native", "exact"):
        everywhere = {name: native_plan(space.facts, candidate.plan) for name, candidate in candidates.items()}
        candidates |= {f"{name}, native": bench.write(plan) for name, plan in everywhere.items()}
        candidates = {name: candidate for name, candidate in candidates.items() if candidate.native} or candidates
    return fastest(bench, known, candidates)


def tuned_plan(prices: Prices, plan: Plan) -> Plan | None:
    """Return a plan with the fastest kernel for each unit from uint8 to uint8; None if that changes nothing."""
    faster = {}
    for unit in plan.units:
        if plan.impl(unit) is not Impl.U8:
            continue
        others = {
            impl: measured(prices, unit.name, impl) for impl in OTHER_FORMS if impl in prices.space.forms[unit.name]
        }
        costs = {
            Impl.U8: unit_cost(prices, unit, Impl.U8),
            **{k: cost for k, cost in others.items() if cost is not None},
        }
        best = min(costs, key=costs.__getitem__)
        if best is not Impl.U8:
            faster[unit.name] = Choice(best)
    return plan.with_choices(faster) if faster else None


def _untried(prices: Prices, candidates: Mapping[str, Candidate]) -> Plan | None:
    """Return the cheapest plan that is not a candidate yet, for one of the `STRETCHES` of conversions; else None.

    The cost of conversions is the least certain one. A plan without int8 is no candidate: the whole INT8 model is
    compared with the float model later.
    """
    tried = [_impls(candidate.plan) for candidate in candidates.values()]
    plans = (cheapest_plan(prices, factor) for factor in STRETCHES)
    return next((p for p in plans if _impls(p) not in tried and any(impl.int8 for impl in _impls(p))), None)


def _impls(plan: Plan) -> list[Impl]:
    """Return the implementations of the units of a plan."""
    return [plan.impl(unit) for unit in plan.units]


# -------------------------------------------------------------------------------------------------------- fastest


def fastest(bench: Bench, known: Measured, candidates: Mapping[str, Candidate]) -> tuple[Candidate, Placement]:
    """Time candidates in turns and return the fastest one, with the sum of its kernel times.

    The price of a candidate's noise adds to its time. A candidate that the runtime does not run is left out.
    """
    job = bench.job
    runners = {}
    for name, candidate in candidates.items():
        try:
            runner = Runner(candidate.source, threads=job.options.threads)
            runner(bench.feed)
        except RequantError:
            continue
        runners[name] = partial(runner, bench.feed)
    if not runners:
        return candidates["rules"], Placement("rules")
    job.progress("compare placements", 0, None)
    seconds = max(1.0, job.options.seconds * SHARE)
    times = dict(zip(runners, interleave(list(runners.values()), seconds=seconds), strict=True))
    tried = {name: 1e3 * min(each) for name, each in times.items()}
    worth = {name: each + plan_noise_cost(known.prices, candidates[name].plan) / 1e3 for name, each in tried.items()}
    best = min(worth, key=worth.__getitem__)
    if "rules" in tried and worth[best] > CLEAR * worth["rules"]:
        best = "rules"
    stock = [name for name in worth if not candidates[name].native]
    if stock and candidates[best].native:
        other = min(stock, key=worth.__getitem__)
        best = other if worth[other] < GAIN * worth[best] else best
    (spent,), _ = profile(bench, known, [candidates[best].source])
    predicted = spent.total / 1e3 if spent is not None else None
    return candidates[best], Placement("measured", predicted, tried)

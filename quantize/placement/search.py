"""Choose the plan of a model: by rules, by estimated costs, or the plan whose model is the fastest one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ... import RequantError
from ...transforms.int8.plan import Impl, Plan
from ..job import ROUGH, Candidate, Job, Placement
from . import costs as store
from .batches import fairest, served
from .bodies import faster_with_bodies, integers_in_bodies
from .choosing import ErrorOf, choose_model
from .costs import Costs
from .facts import Facts
from .forms import all_int8_plan, native_plan, possible_forms
from .measuring import Bench, Measured, Write, measure_units
from .plans_by_cost import cheapest_plan, common_plan
from .pricing import Prices, Space, float_time, plan_milliseconds, with_absorbed, with_noise_price
from .racing import Size, fastest, suffix_of, worth_of
from .tried_plans import begin_with_rules, native_models, with_cheapest_plans, with_joined_operators


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
        feed = None if load is None else load.feed
        space = Space.of(job, facts, rules, feed)
        keys.update(space.keys.values())
        prices = with_absorbed(Prices.of(space, costs, noise))
        known = Measured.of(prices, before.costs, sure=before.sure)
        size = Size(1, Bench.of(job, space, write, feed), known)
        found.append(size if load is None else replace(size, batch=load.batch, regime=load.regime, asked=load.asked))
    if job.policy.costs is not None:
        priced = _keys_with_costs(job, costs, keys)
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
    _keys_with_costs(job, _known_costs(job), keys)


def _keys_with_costs(job: Job, costs: Costs, keys: Collection[str]) -> set[str]:
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
            "'requant costs measure' (in Python: measure_costs) at the same batch size"
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


# ------------------------------------------------------------------------------------------------------- by costs


def _estimated_placement(sizes: Sequence[Size]) -> tuple[Plan, Placement]:
    """Return the cheapest plan; for several batch sizes, the plan whose worst ratio to the cheapest one is least."""
    job = sizes[0].bench.job
    every = [with_noise_price(size.known.prices, job, float_time(size.known.prices)) for size in sizes]
    plans = {f"cut{suffix_of(size, sizes)}": cheapest_plan(prices) for size, prices in zip(sizes, every, strict=True)}
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
    """Measure units, try the plans that their costs give, and return the model that serves all batch sizes best."""
    bench, space = sizes[0].bench, sizes[0].known.prices.space
    found = begin_with_rules(sizes)
    if not found.long:
        return bench.candidate(as_asked(bench.job, space.facts, space.rules)), Placement("rules")
    found = with_cheapest_plans(found)
    if bench.job.options.wants_native:
        return fastest(found.sizes, native_models(found))
    return choose_model(with_joined_operators(found), error)

"""Make the plans whose models are timed: by rules, all in int8, tuned, and the cheapest ones by the measured costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...transforms.int8.plan import Plan
from ..job import Candidate, Job
from ..runtime.progress import MEASURE_COSTS
from .batches import BY_RULES
from .forms import all_int8_plan, native_plan, native_products_plan
from .measuring import Measured, keep, measure_plan, measure_units, profile_float
from .plans_by_cost import common_plan, is_same, tuned_plan, without_idle
from .pricing import OTHER_FORMS, Prices, has_unmeasured, lacks_float, with_noise_price
from .racing import Size, suffix_of

ALL = "all"  # the name of the plan with every unit in int8 that can be
FORMS = 3 + len(OTHER_FORMS)  # plans that give the costs: float, u8, each other form, and the rules
ROUNDS = 4  # number of measured plans; each uses the costs that the plan before it gave
LEAST_MS = 0.02  # of shorter runs, a profile in whole microseconds says little
STRETCHES = (1.0, 2.0, 0.5)  # factors on the cost of conversions, tried until the cut gives a new plan


@dataclass(frozen=True, slots=True)
class TriedPlans:
    """The plans that were made for a model so far, and the costs that their profiles gave.

    Attributes:
        sizes: The batch sizes with the costs that are known.
        models: The model of each plan, by the name of the plan, in the order in which they were made.
    """

    sizes: tuple[Size, ...]
    models: Mapping[str, Candidate]

    @property
    def long(self) -> list[int]:
        """The indices of the batch sizes whose runs are long enough for a profile; only these give plans."""
        return [index for index, size in enumerate(self.sizes) if not size.brief]

    def has(self, plan: Plan) -> bool:
        """Return whether a plan with the same implementations is among them."""
        return any(is_same(plan, model.plan) for model in self.models.values())

    def with_plan(self, name: str, plan: Plan) -> TriedPlans:
        """Return them with the model of one more plan."""
        return replace(self, models={**self.models, name: self.sizes[0].bench.candidate(plan)})

    def with_costs(self, index: int, known: Measured) -> TriedPlans:
        """Return them with the costs that are known at one batch size."""
        sized = replace(self.sizes[index], known=known)
        return replace(self, sizes=(*self.sizes[:index], sized, *self.sizes[index + 1 :]))


def begin_with_rules(sizes: Sequence[Size]) -> TriedPlans:
    """Profile the float model at each batch size; return the plan by rules as the only plan."""
    rules = sizes[0].bench.candidate(sizes[0].known.prices.space.rules)
    return TriedPlans(tuple(_with_float(size) for size in sizes), {BY_RULES: rules})


def with_cheapest_plans(found: TriedPlans) -> TriedPlans:
    """Measure the costs of units at each long batch size, and add the plans that these costs give.

    The measured costs go into the cache.
    """
    long = found.long
    tell = partial(_tell, found.sizes[0].bench.job, 1 + (FORMS + ROUNDS) * len(long))
    tell(1)
    for position, index in enumerate(long):
        found = _with_units(found, index, partial(tell, 1 + FORMS * position))
    for position, index in enumerate(long):
        found = _with_cuts(_with_tuned(found, index), index, partial(tell, 1 + FORMS * len(long) + ROUNDS * position))
    common = _untried(found, [found.sizes[index].known.prices for index in long]) if len(long) > 1 else None
    if common is not None:
        found = found.with_plan("cut for all", common)
    for index in long:
        keep(found.sizes[index].known)
    return found


def native_models(found: TriedPlans) -> Mapping[str, Candidate]:
    """Return the models with native operators, each plan also with native operators wherever it can have them.

    Return all models if none has a native operator.
    """
    facts = found.sizes[0].known.prices.space.facts
    for name, model in found.models.items():
        found = found.with_plan(f"{name}, native", native_plan(facts, model.plan))
    return {name: model for name, model in found.models.items() if model.native} or found.models


def with_joined_operators(found: TriedPlans) -> TriedPlans:
    """Add plans with more native operators: joined operators take less than the sum of their costs."""
    space, last = found.sizes[0].known.prices.space, [*found.models][-1]
    cheapest = found.models[last].plan  # by the costs that are known at last
    joined = {
        f"{ALL}, native": native_plan(space.facts, found.models[ALL].plan),
        f"{last}, products": native_products_plan(space.forms, cheapest),
        f"{last}, dynamic": without_idle(native_products_plan(space.forms, cheapest, every=True)),
    }
    for name, plan in joined.items():
        if not found.has(plan):
            found = found.with_plan(name, plan)
    return found


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


def _with_units(found: TriedPlans, index: int, tell: Callable[[int], None]) -> TriedPlans:
    """Measure the costs of units at a batch size where costs are missing, and add the plan `ALL`.

    Args:
        found: The plans so far.
        index: The index of the batch size.
        tell: Called with the number of plans, of `FORMS`, that were measured.
    """
    size = found.sizes[index]
    known, space = size.known, size.known.prices.space
    missing = any(lacks_float(known.prices, name) for name in space.keys.keys() - known.prices.absorbed)
    if missing or has_unmeasured(known.prices):
        known = measure_units(size.bench, known, tell)
    if ALL not in found.models:
        found = found.with_plan(ALL, all_int8_plan(space.facts, space.rules))
    tell(FORMS - 1)
    # the plans that follow are near the rules, and a kernel's time depends on its neighbours
    return found.with_costs(index, measure_plan(size.bench, known, found.models[BY_RULES]))


def _with_tuned(found: TriedPlans, index: int) -> TriedPlans:
    """Add the plan `ALL` and the plan by rules, each with the fastest kernels at a batch size."""
    size = found.sizes[index]
    suffix = suffix_of(size, found.sizes)
    for name in (ALL, BY_RULES):
        plan = tuned_plan(size.known.prices, found.models[name].plan)
        if plan is not None and not (suffix and found.has(plan)):
            found = found.with_plan(f"{name}, tuned{suffix}", plan)
    return found


def _with_cuts(found: TriedPlans, index: int, tell: Callable[[int], None]) -> TriedPlans:
    """Add the cheapest plans at a batch size: measure each plan, and compute the next one from the costs it gives.

    Args:
        found: The plans so far.
        index: The index of the batch size.
        tell: Called with the number of plans that were measured.
    """
    for number in range(ROUNDS):
        size = found.sizes[index]
        plan = _untried(found, [size.known.prices])
        if plan is None:
            break
        name = f"cut {number + 1}{suffix_of(size, found.sizes)}"
        found = found.with_plan(name, plan)
        found = found.with_costs(index, measure_plan(size.bench, size.known, found.models[name]))
        tell(number)
    return found


def _untried(found: TriedPlans, every: Sequence[Prices]) -> Plan | None:
    """Return the cheapest plan that was not made yet, for one of the `STRETCHES` of conversions; None without one.

    The cost of conversions is the least certain one. A plan without int8 does not count: the whole INT8 model is
    compared with the float model later.

    Args:
        found: The plans so far.
        every: The costs at each batch size that counts.
    """
    plans = (common_plan(every, factor) for factor in STRETCHES)
    return next((plan for plan in plans if plan.has_int8 and not found.has(plan)), None)


def _tell(job: Job, total: int, before: int, done: int = 0) -> None:
    """Report the progress of the measurements: `before` plans, and `done` more, of `total` are measured."""
    job.progress(MEASURE_COSTS, before + done, total)

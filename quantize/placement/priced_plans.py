"""The cheapest plan for each price of noise, for those who look for a plan that keeps a promise or a score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...transforms.int8.plan import Plan
from ..job import Candidate, Job, Placement
from .facts import Facts
from .forms import all_int8_plan
from .measuring import Write, keep, measure_units, profile, profile_float, with_profile
from .noise import Noises
from .plans_by_cost import common_plan, is_same, without_noisy
from .pricing import float_time, has_unmeasured, plan_milliseconds, usual_share, with_absorbed, with_noise_price
from .racing import Size, least_milliseconds, runners_of
from .search import as_asked, costs_decide, sizes_of


@dataclass(frozen=True, slots=True)
class PricedPlans:
    """The cheapest plan for each price of noise. The price is a share of the float model's time.

    Attributes:
        job: The job.
        facts: The input of the rules.
        rules: The plan where costs do not decide.
        noise: The noise at the outputs that each uint8 tensor adds.
        sizes: The batch sizes with their costs; empty where costs do not decide.
        timed: The plans that were profiled, with the times of their models.
    """

    job: Job
    facts: Facts
    rules: Plan
    noise: Mapping[str, float]
    sizes: tuple[Size, ...] = ()
    timed: tuple[tuple[Plan, float], ...] = ()

    def __call__(self, price: float) -> Plan:
        """Return the cheapest plan at a price of noise."""
        if not self.sizes:
            return as_asked(self.job, self.facts, without_noisy(self.rules, self.noise, price))
        every = (size.known.prices for size in self.sizes)
        priced = [with_noise_price(prices, self.job, float_time(prices), price) for prices in every]
        return as_asked(self.job, self.facts, common_plan(priced))

    def with_noises(self, noises: Noises) -> PricedPlans:
        """Return the plans by other noises of tensors, weights and forms."""

        def with_them(size: Size) -> Size:
            prices = size.known.prices
            known = replace(prices.noises, tensors=noises.tensors, forms=noises.forms, weights=noises.weights)
            return replace(size, known=replace(size.known, prices=replace(prices, noises=known)))

        return replace(self, noise=noises.tensors, sizes=tuple(map(with_them, self.sizes)))

    @property
    def usual_price(self) -> float:
        """The price by the exchange of the effort, at which `place` looks for a plan; 0 where costs do not decide."""
        noises = (size.known.prices.noises for size in self.sizes)
        return max((usual_share(self.job, each.total) for each in noises), default=0.0)

    def share(self, plan: Plan) -> float:
        """Return the time of a plan by its costs, as a share of the float model's time, at the worst batch size.

        It is 0 where costs do not decide.
        """
        every = [size.known.prices for size in self.sizes]
        return max((1e3 * plan_milliseconds(prices, plan) / float_time(prices) for prices in every), default=0.0)

    def ratio(self, plan: Plan, other: Candidate) -> float:
        """Return the time of the model of a plan over the time of another model, in turns, at the worst batch size.

        It is 0 where costs are not measured, and infinite if the runtime does not run both.
        """
        if self.job.policy.how != "measured" or not self.sizes:
            return 0.0
        bench = self.sizes[0].bench
        runners = runners_of(self.sizes, {"plan": bench.candidate(plan), "other": other})
        if len(runners) < 2:
            return math.inf
        times, _ = least_milliseconds(self.sizes, runners, max(1.0, self.job.options.seconds))
        return max(each["plan"] / each["other"] for each in times)

    def measured(self, plan: Plan) -> tuple[PricedPlans, float]:
        """Profile the model of a plan, and return the plans by the costs that this gives, and the time of the model.

        A unit may take much longer between other neighbours: a pooling in float that no longer follows a convolution in
        float does not run in its layout. The time is a share of the float model's time, at the worst batch size. It is
        0 where costs are not measured. A plan that was profiled before is not profiled again.
        """
        if self.job.policy.how != "measured":
            return self, 0.0
        took = next((took for each, took in self.timed if is_same(each, plan)), None)
        if took is not None:
            return self, took
        sizes, shares = [], [0.0]
        for size in self.sizes:
            (spent,), known = profile(size.bench, size.known, [size.bench.candidate(plan).source])
            shares.append(math.inf if spent is None else spent.total / float_time(known.prices))
            known = with_profile(known, plan, spent)
            keep(known)
            sizes.append(replace(size, known=known))
        return replace(self, sizes=tuple(sizes), timed=(*self.timed, (plan, max(shares)))), max(shares)


def plans_by_price(
    job: Job, facts: Facts, rules: Plan, write: Write, noise: Mapping[str, float], before: Placement | None = None
) -> PricedPlans:
    """Return the cheapest plan for each price of noise.

    The costs are the costs of `place`; costs that the cache lacks are measured now, and cached. If costs do not decide,
    for instance in models with control flow, or if no noise is known, units become float, the noisiest first.

    Args:
        job: The job; models are timed on its feeds.
        facts: The input of the rules.
        rules: The plan by rules.
        write: Writes a plan into a model.
        noise: The noise at the outputs that each uint8 tensor adds.
        before: As for `sizes_of`.
    """
    how = job.policy.how
    if not noise or not costs_decide(job):
        return PricedPlans(job, facts, all_int8_plan(facts, rules) if how == "all" else rules, noise)
    sizes = []
    for size in sizes_of(job, facts, rules, write, noise, before):
        known = size.known
        if how == "measured":
            _, known = profile_float(size.bench, known)
            if has_unmeasured(known.prices):
                known = measure_units(size.bench, known)
                keep(known)
        sizes.append(replace(size, known=replace(known, prices=with_absorbed(known.prices))))
    return PricedPlans(job, facts, rules, noise, tuple(sizes))

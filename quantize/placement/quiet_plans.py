"""The fastest plan whose noise is within a limit, found through the price of noise.

A price of noise is what noise costs in time: a dear plan has more units in float, takes longer, and has less noise. The
steps, from the inner one to the outer one:

1. Look for the least price at which the noise of the cheapest plan is within the limit (`_cheapest_within`).
2. Of the plans that take about as long as this one, take the one with the least noise (`least_noise_as_fast`).
3. Profile its model. The times may make another plan the cheapest: repeat (`fastest_within`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import takewhile

from ...transforms.int8.plan import Plan
from .plans_by_cost import is_same
from .priced_plans import PricedPlans

CHEAPEST, STEPS = 0.02, 24  # the least price of all noise, as a share of the float model's time; each step doubles it
HALVINGS = 5  # of a range of prices or noises, on a logarithmic scale
PROFILES = 3  # plans that are profiled at most; each gives costs for the next one
FASTER = 0.97  # the most that a plan takes of the time of one with less noise, else that one is better


def fastest_within(plans: PricedPlans, noise: Callable[[Plan], float], limit: float) -> tuple[PricedPlans, Plan | None]:
    """Return the plans with all measured costs, and the fastest plan with at most `limit` noise; None without one.

    The model of the cheapest plan is profiled. Its costs may make another plan the cheapest, which is profiled next, at
    most `PROFILES` times.

    Args:
        plans: The plans by price.
        noise: Returns the noise of a plan.
        limit: The most noise, in the unit of `noise`.
    """
    profiled: list[tuple[float, Plan]] = []
    for _ in range(PROFILES):
        plan = least_noise_as_fast(plans, noise, limit)
        if plan is None or any(is_same(plan, before) for _, before in profiled):
            break
        plans, took = plans.measured(plan)
        profiled.append((took, plan))
    _, fastest = min(profiled, key=lambda row: row[0], default=(0.0, None))
    return plans, fastest


def least_noise_as_fast(plans: PricedPlans, noise: Callable[[Plan], float], limit: float) -> Plan | None:
    """Return the plan with the least noise among those that are about as fast as the cheapest one within a limit.

    About as fast is a plan that takes at most 1 / `FASTER` of the time by its costs. Return None if no price gives a
    plan within the limit.

    Args:
        plans: The plans by price.
        noise: Returns the noise of a plan.
        limit: The most noise, in the unit of `noise`.
    """
    found = _cheapest_within(plans, noise, limit)
    if found is None:
        return None
    price, plan = found
    most = plans.share(plan) / FASTER
    dearer = (plans(price * 2 ** (step / HALVINGS)) for step in range(1, HALVINGS + 1))
    as_fast = takewhile(lambda each: 0 < plans.share(each) <= most, dearer)
    *_, quietest = (plan, *as_fast)  # the noise falls from price to price
    return quietest


def _cheapest_within(
    plan_at: Callable[[float], Plan], noise: Callable[[Plan], float], limit: float
) -> tuple[float, Plan] | None:
    """Return the least price at which the noise of the plan is at most `limit`, and the plan; None if there is none.

    The price doubles until the noise is within the limit. Then the last doubling is halved, `HALVINGS` times.
    """
    prices = (CHEAPEST * 2**step for step in range(STEPS))
    found = next(((price, plan) for price in prices if noise(plan := plan_at(price)) <= limit), None)
    if found is None:
        return None
    (enough, best), too_little = found, found[0] / 2
    for _ in range(HALVINGS):
        price = math.sqrt(too_little * enough)
        if noise(plan := plan_at(price)) <= limit:
            enough, best = price, plan
        else:
            too_little = price
    return enough, best

"""One plan for several batch sizes: the plan whose worst loss at any of them is least."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from ..job import Served
from ..runtime.clock import ratio
from ..runtime.configured import GAIN
from ..runtime.timing import Regime

CLEAR = 0.99  # share of the time of the plan by rules below which another plan wins
WITHIN = 1.02  # a plan that takes at most this many times the best time of every batch size serves them all
BY_RULES = "rules"  # the name of the plan by rules, which is preferred
FINALISTS = 3  # number of plans for all batch sizes, and for each size, that are timed again

NOISE = "gains less time than its noise is worth"
MEASURED_NOISE = "gains less time than its error, measured, is worth"
NATIVE = f"gains less than {GAIN - 1:.0%}, too little for native operators"
RULES = f"gains less than {1 - CLEAR:.0%} over the plan by rules"
CLOCK = "gains less than the error of the clock, and has more noise"
"""Why a plan with less time is not chosen."""

PRICED = ", with the price of its noise"
"""The end of a reason where noise has a price: with it, the gain is less than the difference of the shown times."""
CLOCK_PRICED = f"gains less than the error of the clock{PRICED}"

Times = Mapping[str, float]
"""The time of each plan at one batch size, by name."""


def fairest(times: Sequence[Times], native: Collection[str] = ()) -> str:
    """Return the plan whose worst ratio to the best plan of each batch size is least.

    The plan by rules is taken if no other plan is clearly better, and a plan without native operators if native
    operators gain little; but neither where it is the reason that a batch size loses more than `WITHIN`.

    Args:
        times: The times at each batch size, all of the same plans.
        native: The plans with native operators.
    """
    # with one batch size, the times are compared as they are: the preferred plans lose little by definition
    worst, limit = (worst_ratios(times), WITHIN) if len(times) > 1 else (times[0], math.inf)
    best = min(worst, key=worst.__getitem__)
    if BY_RULES in worst and worst[best] > CLEAR * worst[BY_RULES] and not worst[best] <= limit < worst[BY_RULES]:
        best = BY_RULES
    stock = [name for name in worst if name not in native]
    if not stock or best not in native:
        return best
    other = min(stock, key=worst.__getitem__)
    return other if worst[other] < GAIN * worst[best] and not worst[best] <= limit < worst[other] else best


def least_noisy(
    times: Sequence[Times], best: str, noise: Mapping[str, float], native: Collection[str], within: float
) -> str:
    """Return the plan with the least noise among those that take as long as the best one, within a share of its time.

    Other work on the machine makes small differences of time. They should not decide about the accuracy of the model.

    Args:
        times: The times at each batch size.
        best: The best plan. If it has no native operators, the returned plan has none.
        noise: The noise of each plan, in any unit.
        native: The plans with native operators.
        within: Two times are equal if they differ by at most this share.
    """
    worst = worst_ratios(times)
    equal = [n for n in worst if worst[n] <= (1 + within) * worst[best] and (best in native or n not in native)]
    return min(equal, key=lambda name: (noise[name], name != best, worst[name]))


def passed(tried: Times, worth: Times, chosen: str, native: Collection[str] = ()) -> dict[str, str]:
    """Return why plans that took less time than the chosen one were not chosen, by name.

    Args:
        tried: The time of each plan at the one batch size.
        worth: The same times with the price of the noise.
        chosen: The plan that `fairest` and `least_noisy` chose.
        native: The plans with native operators.
    """

    def reason(name: str) -> str:
        if worth[name] >= worth[chosen]:
            return NOISE
        costs = tried[chosen] * worth[name] > tried[name] * worth[chosen]
        if name in native and chosen not in native and worth[chosen] < GAIN * worth[name]:
            return f"{NATIVE}{PRICED if costs else ''}"
        if chosen == BY_RULES and worth[name] > CLEAR * worth[BY_RULES]:
            return f"{RULES}{PRICED if costs else ''}"
        return CLOCK_PRICED if costs else CLOCK

    return {name: reason(name) for name, ms in tried.items() if ms < tried[chosen]}


def worst_ratios(times: Sequence[Times]) -> dict[str, float]:
    """Return the greatest ratio of each plan's time to the least time of the same batch size."""
    least = [min(each.values()) for each in times]
    return {name: max(ratio(each[name], best) for each, best in zip(times, least, strict=True)) for name in times[0]}


def finalists(times: Sequence[Times], native: Collection[str] = ()) -> list[str]:
    """Return the plans to time again: the best ones for all batch sizes and for each, and those that `fairest` prefers.

    Args:
        times: As for `fairest`.
        native: As for `fairest`.
    """
    worst = worst_ratios(times)
    best = {name for each in (worst, *times) for name in sorted(each, key=each.__getitem__)[:FINALISTS]}
    stock = min((name for name in worst if name not in native), key=worst.__getitem__, default=BY_RULES)
    return [name for name in worst if name in {*best, stock, BY_RULES}]


def served(
    loads: Sequence[tuple[int | None, Regime | None]],
    chosen: str,
    own: Sequence[str],
    tried: Sequence[Times],
    predicted: Sequence[float | None],
) -> tuple[Served, ...]:
    """Return the chosen plan at each batch size; empty for one size.

    Args:
        loads: The batch sizes, with the regimes of a decoder.
        chosen: The name of the chosen plan.
        own: For each batch size, the plan that it alone would get.
        tried: For each batch size, milliseconds by plan.
        predicted: For each batch size, the sum of the costs of the chosen plan, in milliseconds.
    """
    if len(loads) == 1:
        return ()
    rows = zip(loads, predicted, tried, own, strict=True)
    return tuple(Served(batch, cost, times, chosen, name, regime) for (batch, regime), cost, times, name in rows)


def compromises(rows: Sequence[Served]) -> list[str]:
    """Return a sentence for each batch size that loses more than 2 %, with the size that gains most from the loss."""
    found = []
    for row in (row for row in rows if row.slower > WITHIN - 1):
        text = f"{row.name} is {100 * row.slower:.0f} % slower than with a plan of its own"
        losses = {each.name: 100 * each.excess(row.own, each.chosen) for each in rows}
        gaining = max(losses, key=losses.__getitem__)
        if losses[gaining] >= 1:
            text += f", which would make {gaining} {losses[gaining]:.0f} % slower"
        found.append(text)
    return found

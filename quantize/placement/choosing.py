"""Choose among the models of several plans: the fastest, unless noise or native operators speak against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..job import Candidate, Placement
from ..options.efforts import EFFORTS
from .batches import CLEAR, MEASURED_NOISE, NOISE
from .forms import stock_plan
from .pricing import float_time
from .racing import Size, fastest
from .tried_plans import TriedPlans

QUICKER = 0.95  # share of the time of the chosen plan below which the error of a plan with more noise is measured
REFUSED = 2  # number of such plans

ErrorOf: TypeAlias = Callable[[Candidate], float]
"""Measures the error of a model at its outputs: the amplitude of the noise over the amplitude of the signal. It is
infinite for a model that does not run, or loses too much."""


def choose_model(found: TriedPlans, error: ErrorOf | None) -> tuple[Candidate, Placement]:
    """Time the models of plans, and return the best one, with its placement.

    Args:
        found: The plans.
        error: Measures the error of a model; None where only estimates count.
    """
    sizes, candidates = found.sizes, found.models
    best, placement = _best(sizes, candidates)
    if not best.plan.has_int8:
        return despite_noise(sizes, candidates, best, placement)
    return (best, placement) if error is None else by_measured_error(sizes, candidates, best, placement, error)


def _best(sizes: Sequence[Size], candidates: Mapping[str, Candidate]) -> tuple[Candidate, Placement]:
    """Return the fastest candidate, without native operators if they gain too little."""
    best, placement = fastest(sizes, candidates)
    return native_or_stock(sizes, candidates, best, placement) if best.native else (best, placement)


def despite_noise(
    sizes: Sequence[Size], candidates: Mapping[str, Candidate], best: Candidate, placement: Placement
) -> tuple[Candidate, Placement]:
    """Return the fastest INT8 model if the best one is a float model only because noise has a price; else the best one.

    The price counts the sum of the noises of all tensors. All tensors together may add far less noise. The accuracy of
    the INT8 model is judged later; units become float then if it loses too much.
    """
    in_int8 = {name: each for name, each in candidates.items() if each.plan.has_int8}
    least = min((placement.tried[name] for name in in_int8 if name in placement.tried), default=math.inf)
    if least >= CLEAR * placement.tried.get(placement.chosen, 0.0):
        return best, placement
    return _best(_without_price(sizes), in_int8)


# ---------------------------------------------------------------------------------------------------- measured error


def by_measured_error(
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
    tried = placement.tried
    refused = [] if sizes[0].bench.job.options.noise_weight else _refused_for_noise(candidates, placement)
    least_error = error(best) if refused else math.inf
    if not math.isfinite(least_error):
        return best, placement
    price = _milliseconds_of_error(sizes[0])
    errors = {name: error(candidates[name]) for name in refused}
    cost = {name: tried[name] + price * each for name, each in errors.items()}
    cheapest = min(cost, key=cost.__getitem__)
    if cost[cheapest] >= tried[placement.chosen] + price * least_error:
        return best, replace(placement, passed={**placement.passed, **dict.fromkeys(errors, MEASURED_NOISE)})
    found, last = _best(_without_price(sizes), {cheapest: candidates[cheapest]})
    faster = (name for name, ms in tried.items() if ms < last.tried[last.chosen])
    reasons = {name: MEASURED_NOISE if name in errors else placement.passed.get(name, NOISE) for name in faster}
    stock = placement.stock | last.stock
    return found, replace(last, tried={**tried, **last.tried}, stock=stock, passed={**reasons, **last.passed})


def _refused_for_noise(candidates: Mapping[str, Candidate], placement: Placement) -> list[str]:
    """Return at most `REFUSED` candidates that are clearly faster than the chosen one, but have more noise.

    The fastest one is first. The placement also names plans that are no candidates: see `native_or_stock`.
    """
    tried = placement.tried
    most = QUICKER * tried.get(placement.chosen, 0.0)
    noisy = [name for name, why in placement.passed.items() if why == NOISE and name in candidates]
    return sorted((name for name in noisy if tried[name] <= most), key=tried.__getitem__)[:REFUSED]


def _milliseconds_of_error(size: Size) -> float:
    """Return the time, in milliseconds, that an error of 1 is worth at a batch size."""
    return EFFORTS[size.bench.job.options.effort].exchange * float_time(size.known.prices) / 1e3


def _without_price(sizes: Sequence[Size]) -> list[Size]:
    """Return batch sizes at which noise costs nothing, unless the user gives its price."""
    price = sizes[0].bench.job.options.noise_weight
    known = (replace(size.known, prices=replace(size.known.prices, noise_price=price)) for size in sizes)
    return [replace(size, known=each) for size, each in zip(sizes, known, strict=True)]


# -------------------------------------------------------------------------------------------------- native operators


def native_or_stock(
    sizes: Sequence[Size], candidates: Mapping[str, Candidate], best: Candidate, placement: Placement
) -> tuple[Candidate, Placement]:
    """Return the best candidate, or the same plan without native operators if they gain too little.

    A model is the fastest of many partly by chance, so that these two are timed in turns again.
    """
    name = next(name for name, candidate in candidates.items() if candidate is best)
    stock = f"{name}, stock"
    found, last = fastest(sizes, {name: best, stock: sizes[0].bench.candidate(stock_plan(best.plan))})
    if not last.tried:
        return best, placement
    placement = replace(_with_times_of(placement, last), stock=placement.stock | {stock})
    return found, placement if found is best else _with_choice_of(placement, last, stock)


def _with_times_of(placement: Placement, last: Placement) -> Placement:
    """Return a placement with the times of a later comparison, and with its reasons."""
    rows = zip(placement.served, last.served, strict=True)
    return replace(
        placement,
        tried={**placement.tried, **last.tried},
        served=tuple(replace(row, tried={**row.tried, **later.tried}) for row, later in rows),
        passed={**placement.passed, **last.passed},
    )


def _with_choice_of(placement: Placement, last: Placement, chosen: str) -> Placement:
    """Return a placement with the choice of a later comparison, and the times that its costs predict."""
    rows = zip(placement.served, last.served, strict=True)
    served = tuple(replace(row, chosen=chosen, predicted_ms=later.predicted_ms) for row, later in rows)
    return replace(placement, predicted_ms=last.predicted_ms, served=served, chosen=chosen)

"""Profile models, and take the costs of their units from the profiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from ...calibration.model.session import Array, ModelSource
from ...transforms.int8.plan import Choice, Impl, Plan
from ..job import Candidate, Job, Purpose
from ..runtime.attribution import Owners, Spent
from ..runtime.profile import KernelRun, Profile
from . import costs as store
from .costs import Costs, Rows
from .forms import all_int8_plan
from .layouts import layout_costs
from .pricing import OTHER_FORMS, Prices, Space, conversion_costs, measured, unit_cost

PROFILED = 3e5  # microseconds that one profile takes, in LEAST_RUNS to MOST_RUNS runs
LEAST_RUNS, MOST_RUNS = 3, 30
TURNS = 2  # profiles of each model, in turns with the other models
MORE_TURNS = 4  # further profiles of a model whose kernels had to wait for a processor
AGREE = 1.1  # two profiles of several threads agree if their sums differ by at most this factor
LEAST_STRETCH, MOST_STRETCH = 0.1, 3.0
"""Limits of the ratio of measured to estimated time of conversions. OpenVINO computes most of them in other kernels."""
SLOWED_SHARE = 0.01  # ignore units below this share of the model's time
SLOWED = 2.0  # a unit that takes more than this many times its cost is slowed down by its neighbours


class Write(Protocol):
    """Writes a plan into a model."""

    def __call__(self, plan: Plan, *, purpose: Purpose = "measure") -> Candidate:
        """Return the model."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The models of a job and the feed on which they are profiled.

    Attributes:
        job: The job.
        write: Writes a plan into a model.
        feed: The inputs of each run.
        owners: Maps kernels to units.
    """

    job: Job
    write: Write
    feed: Mapping[str, Array]
    owners: Owners

    @classmethod
    def of(cls, job: Job, space: Space, write: Write, feed: Mapping[str, Array] | None) -> Bench:
        """Return the bench of a job."""
        leads = {name: product.name for name, product in space.followers.items()}
        return cls(job, write, feed or {}, Owners(job.simple, space.rules.units, leads))

    def candidate(self, plan: Plan) -> Candidate:
        """Return the model of a plan, with its native operators joined, as they will be delivered."""
        native = any(choice.impl.native for choice in plan.choices.values())
        return self.write(plan, purpose="deliver" if native else "measure")


@dataclass(frozen=True, slots=True)
class Measured:
    """All that is known of the costs of a model at one point of the search.

    Attributes:
        prices: The prices.
        fresh: The costs that were measured in this search; the cache keeps them.
        runs: Runs of the next profile.
        sure: Whether all profiles had kernel times without waiting; the cache keeps no other costs.
    """

    prices: Prices
    fresh: Costs
    runs: int = LEAST_RUNS
    sure: bool = True

    @classmethod
    def of(cls, prices: Prices, rows: Rows | None = None, *, sure: bool = True) -> Measured:
        """Return the state at the start of a search: the prices may contain costs that were measured before.

        Args:
            prices: The prices.
            rows: Costs that were measured in this search; None without any.
            sure: Whether they were measured without waiting.
        """
        return cls(prices, Costs(prices.costs.machine, rows or {}), sure=sure)


def keep(known: Measured) -> None:
    """Add the costs to the cache, unless kernels had to wait for a processor while they were measured."""
    if known.sure:
        store.keep(known.fresh)


def profile(
    bench: Bench, known: Measured, sources: Sequence[ModelSource], turns: int = TURNS
) -> tuple[list[Spent | None], Measured]:
    """Return the time of each model by unit, None for a model that the runtime does not run, and the new state.

    A model is profiled again, up to `MORE_TURNS` times, while its kernel times are not `settled`.

    Args:
        bench: The bench.
        known: The state; the number of runs in it adapts to the time of the models.
        sources: The models.
        turns: Profiles of each model, in turns with the others; each kernel counts with its least time.
    """
    found: list[list[Profile]] = [[] for _ in sources]
    runtime, runs = bench.job.runtime, known.runs
    for turn in range(turns + MORE_TURNS):
        for source, profiles in zip(sources, found, strict=True):
            if turn >= turns and settled(profiles):
                continue
            # the runtime's exceptions share no base class; another plan may run
            with suppress(Exception):
                profiles.append(runtime.profile(source, bench.feed, threads=bench.job.options.threads, times=runs))
                took = profiles[-1].cpu or profiles[-1].microseconds
                runs = min(max(int(PROFILED / took), LEAST_RUNS), MOST_RUNS)
    sure = known.sure and all(map(settled, found))
    spent = [bench.owners.spent(least_kernels(each)) if each else None for each in found]
    return spent, replace(known, runs=runs, sure=sure)


def profile_float(bench: Bench, known: Measured) -> tuple[Spent | None, Measured]:
    """Return the time of the float model, None if the runtime does not run it, and a state with its layout costs."""
    (float_profile,), known = profile(bench, known, [bench.job.spelled_source], turns=1)
    if float_profile is None:
        return None, known
    space = known.prices.space
    layouts = layout_costs(space.rules.units, space.shapes, float_profile)
    return float_profile, replace(known, prices=replace(known.prices, layouts=layouts))


def no_progress(done: int) -> None:
    """Ignore the number of measured plans."""


def measure_units(bench: Bench, known: Measured, tell: Callable[[int], None] = no_progress) -> Measured:
    """Return the state with the costs of every unit in float and in each integer form, within whole models.

    Args:
        bench: The bench.
        known: The state.
        tell: Called with the number of plans that were measured.
    """
    space = known.prices.space
    wide = bench.write(all_int8_plan(space.facts, space.rules))
    (in_float, in_int8), known = profile(bench, known, [bench.job.spelled_source, wide.source])
    known = _with_costs(known, in_float, dict.fromkeys(space.forms, Impl.FLOAT))
    known = with_profile(known, wide.plan, in_int8)
    for done, impl in enumerate(OTHER_FORMS, 2):
        tell(done)
        plan = wide.plan.with_choices({name: Choice(impl) for name, forms in space.forms.items() if impl in forms})
        if plan.choices == wide.plan.choices:
            continue
        (spent,), known = profile(bench, known, [bench.write(plan).source])
        known = _with_costs(known, spent, {unit.name: plan.impl(unit) for unit in plan.units})
        if impl is Impl.U8_NATIVE and space.absorbers:
            (spent,), known = profile(bench, known, [bench.write(plan, purpose="deliver").source])
            known = _with_joined(known, spent)
    return known


def measure_plan(bench: Bench, known: Measured, candidate: Candidate) -> Measured:
    """Return the state with the costs that a profile of a candidate gives."""
    (spent,), known = profile(bench, known, [candidate.source])
    return with_profile(known, candidate.plan, spent)


def with_profile(known: Measured, plan: Plan, spent: Spent | None) -> Measured:
    """Return a state with the costs of a plan's units, its slowed units, and the time of its conversions.

    Args:
        known: The state.
        plan: The plan.
        spent: The profile of its model; None if the runtime does not run it.
    """
    if spent is None:
        return known
    known = _with_costs(known, spent, {unit.name: plan.impl(unit) for unit in plan.units})
    prices = known.prices
    plain = replace(prices, slowed={})
    slowed = dict(prices.slowed)
    for unit in plan.units:
        impl, took = plan.impl(unit), spent.units.get(unit.name, 0.0)
        slowed.pop((unit.name, impl), None)  # a unit is slowed down by its neighbours in the last plan
        if took > max(SLOWED * unit_cost(plain, unit, impl), SLOWED_SHARE * spent.total):
            slowed[unit.name, impl] = took
    stretch, expected = prices.stretch, math.fsum(conversion_costs(prices, plan))
    if expected > 0:
        included = math.fsum(prices.layouts.of(unit) for unit in plan.units if not plan.impl(unit).int8)
        actual = spent.conversions + max(spent.layouts - included, 0.0)
        stretch = min(max(actual / expected, LEAST_STRETCH), MOST_STRETCH)
    return replace(known, prices=replace(prices, slowed=slowed, stretch=stretch))


def _with_costs(known: Measured, spent: Spent | None, impls: Mapping[str, Impl]) -> Measured:
    """Return a state with the costs and the sizes of tensors that a profile gives."""
    if spent is None:
        return known
    prices = known.prices
    space = prices.space
    shown = {u.outputs[0]: spent.sizes[u.name] for u in space.rules.units if u.name in spent.sizes and u.outputs}
    times = [(key, impls[name], spent.units[name]) for name, key in space.keys.items() if name in spent.units]
    prices = replace(prices, costs=prices.costs.with_times(times), sizes={**shown, **prices.sizes})
    return replace(known, prices=prices, fresh=known.fresh.with_times(times))


def _with_joined(known: Measured, spent: Spent | None) -> Measured:
    """Return a state with the costs of units that native convolutions absorb: the time by which these take longer.

    Args:
        known: The state, with the costs of each unit alone.
        spent: The profile of a model with joined operators.
    """
    if spent is None:
        return known
    prices, took = known.prices, spent.units
    keys, times = prices.space.keys, []
    for name, convolution in prices.space.absorbers.items():
        alone = measured(prices, convolution.name, Impl.U8_NATIVE)
        if alone is not None and name in keys and name not in took and convolution.name in took:
            times.append((keys[name], Impl.U8_NATIVE, max(took[convolution.name] - alone, 0.0)))
    prices = replace(prices, costs=prices.costs.with_times(times))
    return replace(known, prices=prices, fresh=known.fresh.with_times(times))


def settled(profiles: Sequence[Profile]) -> bool:
    """Return whether the kernel times of one model contain no waiting, as far as its profiles tell; true without any.

    A kernel is timed by wall time, and waits where other processes take its processor. With one thread, the least
    times of all kernels together are at most the CPU time of a run. With several threads, the two profiles with the
    least sums agree.
    """
    if not profiles:
        return True
    cpu = _cpu(profiles)
    if cpu is not None:
        return _total(_fastest(profiles)) <= cpu
    totals = sorted(_total(each.runs) for each in profiles)
    return len(totals) > 1 and totals[1] <= AGREE * totals[0]


def least_kernels(profiles: Sequence[Profile]) -> list[KernelRun]:
    """Return the kernels of several profiles of one model, each with its least time.

    If their sum is more than the CPU time of a run, the rest is waiting: all times become shorter in proportion.
    """
    kernels, cpu = _fastest(profiles), _cpu(profiles)
    share = 1.0 if cpu is None else min(cpu / (_total(kernels) or cpu), 1.0)
    return [replace(run, microseconds=share * run.microseconds) for run in kernels]


def _fastest(profiles: Sequence[Profile]) -> list[KernelRun]:
    """Return each kernel of several profiles with its least time."""
    by_name: dict[str, KernelRun] = {}
    for run in (run for profile in profiles for run in profile.runs):
        before = by_name.get(run.node, run)
        by_name[run.node] = run if run.microseconds < before.microseconds else before
    return list(by_name.values())


def _cpu(profiles: Sequence[Profile]) -> float | None:
    """Return the least CPU time of a run in microseconds; None with several threads."""
    return min((each.cpu for each in profiles if each.cpu is not None), default=None)


def _total(kernels: Sequence[KernelRun]) -> float:
    """Return the sum of kernel times in microseconds."""
    return math.fsum(run.microseconds for run in kernels)

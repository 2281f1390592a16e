"""Race: time the models of several plans in turns, and choose the one that serves all batch sizes best.

`fastest` does these steps:

1. Open each candidate and run it once at each batch size. Candidates that do not run, or are far too slow, are left out
   (`runners_of`).
2. Take inputs for which all candidates do about the same work (`on_agreeing_samples`).
3. Time the candidates in turns at each batch size (`least_milliseconds`). Their times get the price of their noise
   (`worth_of`).
4. For several batch sizes, time the best candidates again.
5. Choose the candidate whose worst batch size is best (`batches.fairest`). Among candidates that are equally fast, take
   the one with the least noise (`batches.least_noisy`).
6. Profile the kernels of the chosen candidate, and tell how it was chosen (`Placement`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce

from ... import RequantError
from ...transforms.int8.plan import Plan
from ..job import Candidate, Placement
from ..runtime.agreement import agreeing, work_depends_on_data
from ..runtime.clock import SLOW, SURE, race, time_run, uncertainty
from ..runtime.loads import Load
from ..runtime.progress import COMPARE_PLACEMENTS
from ..runtime.runtimes import LoadedModel
from ..runtime.timing import Regime, load_name
from .batches import CLEAR, fairest, finalists, least_noisy, passed, served
from .costs import Costs
from .measuring import Bench, Measured, profile
from .pricing import Prices, plan_noise_cost

FAR = 1.5  # a slow candidate that takes so many times as long as the fastest one is not timed in turns


@dataclass(frozen=True, slots=True)
class Size:
    """A batch size that the plan serves, or a regime of a decoder.

    Attributes:
        batch: Items per run; None where that is not known.
        bench: Profiles models on a feed of this size.
        known: What is known of the costs at this size.
        brief: Whether the float model runs for less than `LEAST_MS`: such a size gives no plans, but whole models are
            timed at it.
        regime: The regime of a decoder; None for other models.
        asked: The batch size that was asked for, as `Load.asked`.
    """

    batch: int | None
    bench: Bench
    known: Measured
    brief: bool = False
    regime: Regime | None = None
    asked: int = 1

    @property
    def name(self) -> str:
        """The batch size or the regime: ``"batch 4"``."""
        return load_name(self.batch, self.regime)


def suffix_of(size: Size, sizes: Sequence[Size]) -> str:
    """Return the end of the name of a plan by the costs of one size: ``" for batch 4"``; empty for a single size."""
    return f" for {size.name}" if len(sizes) > 1 else ""


def fastest(sizes: Sequence[Size], candidates: Mapping[str, Candidate]) -> tuple[Candidate, Placement]:
    """Return the candidate that serves all batch sizes best, and how it was chosen.

    A candidate that the runtime does not run takes no part. If the runtime runs none of them, the first one is
    returned.

    Args:
        sizes: The batch sizes, the first one for the numbers of the placement.
        candidates: The candidates by name; the plan by rules has the name `batches.BY_RULES`.
    """
    sizes[0].bench.job.progress(COMPARE_PLACEMENTS, 0, None)
    runners = runners_of(sizes, candidates, FAR)
    if not runners:
        return next(iter(candidates.values())), Placement("rules")
    raced = _raced(sizes, runners, {name: candidates[name] for name in runners})
    best = _best_of(raced, raced.worth)
    return candidates[best], _placement(sizes, raced, candidates[best], best)


@dataclass(frozen=True, slots=True)
class _Raced:
    """Candidates that were timed in turns.

    Attributes:
        prices: The prices of noise at each batch size.
        plans: The plans of the candidates by name.
        native: The names of the candidates with native operators.
        tried: The milliseconds of all candidates at each batch size.
        worth: The milliseconds plus the price of the noise at each batch size. It has only the candidates of the last
            race: one of them is chosen.
        unsure: The uncertainty of the times of the last race, as a share of them.
    """

    prices: Sequence[Prices]
    plans: Mapping[str, Plan]
    native: Collection[str]
    tried: Sequence[Mapping[str, float]]
    worth: Sequence[Mapping[str, float]]
    unsure: float


def _raced(sizes: Sequence[Size], runners: Mapping[str, LoadedModel], candidates: Mapping[str, Candidate]) -> _Raced:
    """Time candidates in turns at each batch size: once for one size, and the best ones again for several sizes.

    Args:
        sizes: The batch sizes.
        runners: The loaded models of the candidates by name.
        candidates: The same candidates.
    """
    sizes = on_agreeing_samples(sizes, runners)
    prices = [size.known.prices for size in sizes]
    plans = {name: each.plan for name, each in candidates.items()}
    native = {name for name, each in candidates.items() if each.native}
    seconds = max(1.0, sizes[0].bench.job.options.seconds)
    tried, unsure = least_milliseconds(sizes, runners, seconds)
    raced = _Raced(prices, plans, native, tried, worth_of(prices, tried, plans), unsure)
    return raced if len(sizes) == 1 else _best_raced_again(sizes, runners, raced, seconds)


def _best_raced_again(
    sizes: Sequence[Size], runners: Mapping[str, LoadedModel], raced: _Raced, seconds: float
) -> _Raced:
    """Time the best candidates again; each keeps the lesser of its two times.

    With several batch sizes, more candidates share the seconds of a race, and several minima decide.

    Args:
        sizes: The batch sizes.
        runners: The loaded models of all candidates by name.
        raced: The first race.
        seconds: How long the candidates are timed at each batch size.
    """
    best = {name: runners[name] for name in finalists(raced.worth, raced.native)}
    again, unsure = least_milliseconds(sizes, best, seconds)
    least = [
        {name: min(ms, before[name]) for name, ms in now.items()}
        for before, now in zip(raced.tried, again, strict=True)
    ]
    tried = [{**before, **now} for before, now in zip(raced.tried, least, strict=True)]
    return replace(raced, tried=tried, worth=worth_of(raced.prices, least, raced.plans), unsure=unsure)


def _best_of(raced: _Raced, worth: Sequence[Mapping[str, float]]) -> str:
    """Return the name of the `fairest` candidate, or of one that is as fast within the uncertainty and has less noise.

    Args:
        raced: The candidates.
        worth: As `_Raced.worth`, at the batch sizes that decide.
    """
    noise = {name: plan_noise_cost(raced.prices[0], raced.plans[name]) for name in worth[0]}
    equal = min(max(raced.unsure, 1 - CLEAR), SURE)
    return least_noisy(worth, fairest(worth, raced.native), noise, raced.native, equal)


def _placement(sizes: Sequence[Size], raced: _Raced, candidate: Candidate, best: str) -> Placement:
    """Return how the best candidate was chosen, with the sum of its kernel times.

    Args:
        sizes: The batch sizes, with the feeds on which kernels are profiled.
        raced: The candidates.
        candidate: The best one.
        best: Its name.
    """
    spent = [profile(size.bench, size.known, [candidate.source])[0][0] for size in sizes]
    predicted = [None if each is None else each.total / 1e3 for each in spent]
    best_of_each = [_best_of(raced, [each]) for each in raced.worth]
    rows = served([(size.batch, size.regime) for size in sizes], best, best_of_each, raced.tried, predicted)
    measured = (size.known.fresh.rows for size in sizes)
    return Placement(
        "measured",
        predicted[0],
        raced.tried[0],
        rows,
        uncertainty=raced.unsure,
        sure=all(size.known.sure for size in sizes),
        chosen=best,
        passed={} if rows else passed(raced.tried[0], raced.worth[0], best, raced.native),
        costs=reduce(Costs.with_rows, measured, Costs(raced.prices[0].costs.machine)).rows,
    )


def runners_of(
    sizes: Sequence[Size], candidates: Mapping[str, Candidate], most: float = math.inf
) -> dict[str, LoadedModel]:
    """Return the candidates that the runtime runs, after one run at each batch size.

    Args:
        sizes: The batch sizes.
        candidates: The candidates by name.
        most: Where a run takes longer than `SLOW`, a candidate that takes so many times as long as the fastest one is
            left out: timing it takes minutes, and large tensors stay in memory as long as its session is open.
    """
    threads = sizes[0].bench.job.options.threads
    runners: dict[str, LoadedModel] = {}
    took: dict[str, float] = {}
    for name, candidate in candidates.items():
        with suppress(RequantError):
            runner = candidate.sessions.fresh(threads=threads)
            runs = (partial(runner, size.bench.feed) for size in sizes)
            took[name] = math.fsum(time_run(run, seconds=0, threads=threads).least for run in runs)
            runners[name] = runner
        least = min(took.values(), default=0.0)
        runners = {each: runner for each, runner in runners.items() if least <= SLOW or took[each] <= most * least}
    return runners


def on_agreeing_samples(sizes: Sequence[Size], runners: Mapping[str, LoadedModel]) -> Sequence[Size]:
    """Return the batch sizes with feeds for which all candidates do about the same work as the float model."""
    job = sizes[0].bench.job
    if job.source is None or not job.judged or not work_depends_on_data(job.simple):
        return sizes
    models = [job.timed.runner(job.options.threads), *runners.values()]
    usual = [Load(size.batch, size.bench.feed, size.regime, asked=size.asked) for size in sizes]
    loads = [agreeing(load, job.source, models) for load in usual]
    return [replace(size, bench=replace(size.bench, feed=load.feed)) for size, load in zip(sizes, loads, strict=True)]


def least_milliseconds(
    sizes: Sequence[Size], runners: Mapping[str, LoadedModel], seconds: float
) -> tuple[list[dict[str, float]], float]:
    """Return the least time of each model at each batch size, timed in turns, and their greatest uncertainty.

    Args:
        sizes: The batch sizes.
        runners: The models by name.
        seconds: How long all models are timed at each batch size.
    """
    found, unsure = [], 0.0
    for size in sizes:
        runs = [partial(runner, size.bench.feed) for runner in runners.values()]
        times = race(runs, seconds=seconds, threads=size.bench.job.options.threads)
        found.append({name: 1e3 * each.least for name, each in zip(runners, times, strict=True)})
        unsure = max(unsure, uncertainty(times))
    return found, unsure


def worth_of(
    every: Sequence[Prices], tried: Sequence[Mapping[str, float]], plans: Mapping[str, Plan]
) -> list[dict[str, float]]:
    """Return milliseconds by plan with the price of the noise, at each batch size."""
    return [
        {name: ms + plan_noise_cost(prices, plans[name]) / 1e3 for name, ms in times.items()}
        for prices, times in zip(every, tried, strict=True)
    ]

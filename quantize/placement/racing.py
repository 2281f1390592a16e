"""Time the models of several plans in turns, and choose the one that serves all batch sizes best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce

from ... import RequantError
from ...transforms.int8.plan import Plan
from ..job import Candidate, Placement
from ..runtime.agreement import agreeing, work_depends_on_data
from ..runtime.clock import SLOW, SURE, race, time_run, uncertainty
from ..runtime.loads import Load
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
        batch: Items per run.
        bench: Profiles models on a feed of this size.
        known: What is known of the costs at this size.
        brief: Whether the float model runs for less than `LEAST_MS`: such a size gives no plans, but whole models are
            timed at it.
        regime: The regime of a decoder; None for other models.
    """

    batch: int
    bench: Bench
    known: Measured
    brief: bool = False
    regime: Regime | None = None

    @property
    def name(self) -> str:
        """The batch size or the regime: ``"batch 4"``."""
        return load_name(self.batch, self.regime)


def suffix_of(size: Size, sizes: Sequence[Size]) -> str:
    """Return the end of the name of a plan by the costs of one size: ``" for batch 4"``; empty for a single size."""
    return f" for {size.name}" if len(sizes) > 1 else ""


def fastest(sizes: Sequence[Size], candidates: Mapping[str, Candidate]) -> tuple[Candidate, Placement]:
    """Time candidates in turns at each batch size; return the `fairest` one, with the sum of its kernel times.

    The price of a candidate's noise adds to its time. A candidate that the runtime does not run is left out; if it runs
    none of them, the first one is returned.
    """
    job = sizes[0].bench.job
    job.progress("compare placements", 0, None)
    runners = runners_of(sizes, candidates, FAR)
    if not runners:
        return next(iter(candidates.values())), Placement("rules")
    seconds = max(1.0, job.options.seconds)
    every = [size.known.prices for size in sizes]
    plans = {name: candidates[name].plan for name in runners}
    native = {name for name in runners if candidates[name].native}
    timed = on_agreeing_samples(sizes, runners)
    tried, unsure = least_milliseconds(timed, runners, seconds)
    worth = worth_of(every, tried, plans)
    if len(sizes) > 1:  # more plans share the time, and several minima decide: time the best ones again
        again, unsure = least_milliseconds(timed, {name: runners[name] for name in finalists(worth, native)}, seconds)
        final = [
            {name: min(ms, first[name]) for name, ms in more.items()} for first, more in zip(tried, again, strict=True)
        ]
        tried = [{**first, **more} for first, more in zip(tried, final, strict=True)]
        worth = worth_of(every, final, plans)
    noise = {name: plan_noise_cost(every[0], plans[name]) for name in worth[0]}
    within = min(max(unsure, 1 - CLEAR), SURE)
    best, *own = (
        least_noisy(times, fairest(times, native), noise, native, within)
        for times in (worth, *([each] for each in worth))
    )
    spent = [profile(size.bench, size.known, [candidates[best].source])[0][0] for size in sizes]
    predicted = [None if each is None else each.total / 1e3 for each in spent]
    rows = served([(size.batch, size.regime) for size in sizes], best, own, tried, predicted)
    sure = all(size.known.sure for size in sizes)
    costs = reduce(Costs.with_rows, (size.known.fresh.rows for size in sizes), Costs(every[0].costs.machine)).rows
    why = {} if rows else passed(tried[0], worth[0], best, native)
    placement = Placement(
        "measured", predicted[0], tried[0], rows, uncertainty=unsure, sure=sure, chosen=best, passed=why, costs=costs
    )
    return candidates[best], placement


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
    loads = [agreeing(Load(size.batch, size.bench.feed, size.regime), job.source, models) for size in sizes]
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

"""Search the fastest model that keeps a score: try prices of noise, with one cheapest placement for each price."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ... import RequantError
from ...calibration.data.kept import kept
from ...calibration.data.sources import DataSource, Source
from ...calibration.model.session import ModelSource
from ...calibration.runs.stamps import data_stamp
from ...system.given import check_kind
from ...transforms.int8.plan import Plan
from ..accuracy.drop import Allowance, reaches, same_data
from ..accuracy.frontier import Frontier, Point
from ..accuracy.metrics import Metric, Reference, can_distribute, fitted, of_probabilities, score, score_with
from ..accuracy.pair import time_models
from ..accuracy.probabilities import probability_outputs
from ..job import Candidate, Evidence, Job, Placement
from ..placement.measuring import Write
from ..placement.priced_plans import PricedPlans, plans_by_price
from ..placement.search import place
from ..runtime.inputs import open_data
from ..runtime.session import Runner
from .emit import correct, plan_by_rules
from .evidence import gather_evidence
from .judge import with_agreeing_sample
from .prices import next_price
from .ranges import TensorRanges
from .tried import load_tried, plan_key, save_tried

TIMED = 1.0
"""Seconds for which a candidate is timed against float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The score that a model must keep.

    Attributes:
        metric: The metric.
        allowance: The permitted drop.
        data: The data for the metric, with labels where it needs them.
        seconds: No candidate is started after this time.
    """

    metric: Metric
    allowance: Allowance
    data: DataSource
    seconds: float = 600.0

    def __post_init__(self) -> None:
        """Check the types, the drop and the time budget.

        Raises:
            RequantError: An attribute is of another type, the drop is out of range, or the budget is not positive.
        """
        check_kind(self.metric, Metric, "the metric must be a Metric, such as metric_named('top1')")
        check_kind(self.allowance, Allowance, "the allowance must be an Allowance, such as parse_drop('0.5%')")
        check_kind(self.seconds, (int, float), "seconds must be a number")
        try:
            self.allowance.check_range(self.metric)
        except RequantError as error:
            raise RequantError(f"the allowed drop of {self.metric.name}: {error}") from error
        if not self.seconds > 0:
            raise RequantError(f"the time budget must be more than 0 seconds, not {self.seconds:g}")


@dataclass(frozen=True, slots=True)
class _Search:
    """What a search works with.

    Attributes:
        job: The job.
        ranges: The ranges.
        goal: The score that must be kept.
        evidence: The noise of tensors and weights.
        plan_at: Gives the cheapest plan at a price of noise.
        write: Writes a plan into a model.
        source: The data of the metric.
        reference: The metric with the outputs of the float model.
        start: When the search began, by the monotonic clock.
    """

    job: Job
    ranges: TensorRanges
    goal: Goal
    evidence: Evidence
    plan_at: PricedPlans
    write: Write
    source: Source
    reference: Reference
    start: float

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() - self.start >= self.goal.seconds


@dataclass(frozen=True, slots=True)
class _Found:
    """What a search has found so far.

    Attributes:
        frontier: The models that were tried.
        kept: By price of noise that was tried, whether its model keeps the bar.
        candidates: The models that were emitted in this process, by the digest of their plan.
    """

    frontier: Frontier
    kept: Mapping[float, bool] = field(default_factory=dict)
    candidates: Mapping[str, Candidate] = field(default_factory=dict)


def open_goal(job: Job, goal: Goal) -> tuple[Source, Goal]:
    """Open the data for the metric and try the metric on the first sample; return them with the metric for these data.

    Raises:
        RequantError: The data cannot be read, or do not fit the metric, or the drop does not.
    """
    source = open_data(job.reference, goal.data)
    source = replace(source, rows=kept(source.rows))
    first = next(iter(source.samples(1)), None)
    if first is None:
        return source, goal
    metric = fitted(goal.metric, first, Runner(job.reference, lean=True)(first.feed))
    metric = of_probabilities(metric, probability_outputs(job.simple))
    goal.allowance.check(metric)
    return source, replace(goal, metric=metric)


def search(
    job: Job, ranges: TensorRanges, goal: Goal, source: Source, state: str | os.PathLike[str]
) -> tuple[Candidate | None, Frontier]:
    """Search for the fastest model that keeps the bar: its score is as good as the goal demands, or better.

    The first model has the placement that `quantize` chooses without a goal. Then the price of noise is raised where
    the bar is missed and lowered where it is kept; each price has one cheapest placement. `state` keeps the models that
    were tried, so that an interrupted search can continue.

    Args:
        job: The job.
        ranges: The ranges.
        goal: The score that must be kept.
        source: Its data, from `open_goal`.
        state: The file with the models tried so far.

    Returns:
        The fastest model that keeps the bar, else the model with the best score; None where nothing can become int8.
        And all models that were tried.

    Raises:
        RequantError: The metric or its data cannot be used.
    """
    run, frontier = _begin(job, ranges, goal, source)
    state, before = Path(state), frontier.before
    found = begun = _Found(_with_points(frontier, _recalled(run, frontier, state)))
    done = interrupted = False
    try:
        for found in _states(run, begun):
            save_tried(state, _key(run, before), found.frontier)
        done = next_price(found.kept) is None
    except KeyboardInterrupt:
        if not found.frontier.points:
            raise
        interrupted = True
    seconds = time.monotonic() - run.start
    frontier = replace(found.frontier, seconds=seconds, done=done, interrupted=interrupted)
    best = frontier.best or frontier.most_accurate
    if best is None:
        return None, frontier
    known = found.candidates.get(best.digest)  # None if an earlier run has found it
    return known or _emit(run, run.plan_at(best.price)), frontier


def _begin(job: Job, ranges: TensorRanges, goal: Goal, source: Source) -> tuple[_Search, Frontier]:
    """Score the float model and find the noise and the costs; return the search, and its frontier without models."""
    start = time.monotonic()
    metric, reference = goal.metric, Reference(goal.metric, job.reference)
    before = _scored(job, job.reference, source, reference)
    bar = goal.allowance.bar(metric, before)
    overlap = same_data(job.source, source) if job.source is not None else 0.0
    frontier = Frontier(metric.name, metric.higher_is_better, before, bar, same_data=overlap, unit=metric.unit)
    evidence = gather_evidence(job, ranges)
    facts, rules, write = plan_by_rules(job, ranges, evidence)
    plan_at = plans_by_price(job, facts, rules, write, evidence.noise)
    return _Search(job, ranges, goal, evidence, plan_at, write, source, reference, start), frontier


def _recalled(run: _Search, frontier: Frontier, state: Path) -> list[Point]:
    """Return the models that an interrupted search has tried, judged by the bar of this one.

    Nothing tells whether Python objects are the same data as before, so that a search with them begins anew.
    """
    if not os.path.lexists(state) or run.source.reference is None:
        return []
    tried = load_tried(state, partial(_key, run, frontier.before), run.plan_at)
    return [replace(point, kept=reaches(run.goal.metric, point.value, frontier.bar)) for point in tried]


def _states(run: _Search, found: _Found) -> Iterator[_Found]:
    """Try one model after another, and yield what is found after each; end at the last price, or when time is up."""
    plans = run.plan_at
    # a measured placement tries several plans for a price, and times whole models
    if run.job.policy.how == "measured" and not run.late:
        usual = place(run.job, plans.facts, plans.rules, run.write, plans.noise)[0].plan
        found, _ = _try_plan(run, found, plans.usual_price, usual)
        yield found
    while (price := next_price(found.kept)) is not None and not run.late:
        found, point = _try_plan(run, found, price, plans(price))
        found = replace(found, kept={**found.kept, price: point.kept})
        yield found


def _try_plan(run: _Search, found: _Found, price: float, plan: Plan) -> tuple[_Found, Point]:
    """Emit, judge and time the model of a plan at a price of noise, unless it was tried before."""
    key, frontier = plan_key(plan), found.frontier
    known = next((point for point in frontier.points if point.digest == key), None)
    if known is not None:
        return found, known
    run.job.progress(_progress_text(frontier), len(frontier.points), None)
    candidate = _emit(run, plan)
    value, speedup = _measured(run, candidate)
    units = sum(plan.impl(unit).int8 for unit in plan.units)
    is_kept = speedup > 0 and reaches(run.goal.metric, value, frontier.bar)
    point = Point(price, value, speedup, units, is_kept, key)
    frontier = _with_points(frontier, sorted((*frontier.points, point), key=lambda each: -each.speedup))
    return replace(found, frontier=frontier, candidates={**found.candidates, key: candidate}), point


def _with_points(frontier: Frontier, points: Sequence[Point]) -> Frontier:
    """Return a frontier with these points, the fastest first; the first INT8 model that is kept is the best."""
    best = next((each for each in points if each.kept and each.int8_units), None)
    return replace(frontier, points=tuple(points), best=best)


def _measured(run: _Search, candidate: Candidate) -> tuple[float, float]:
    """Return the score and the speed-up of a candidate; the worst score and 0 if it does not run, or the metric fails.

    The metric has scored the float model, so that the candidate is the cause: it may return NaN. The search goes on,
    because an error would lose the models that were tried before.
    """
    try:
        return _scored(run.job, candidate.source, run.source, run.reference), _speedup(run, candidate)
    except RequantError as error:
        logging.getLogger("requant").warning("requant: a model of the search is left out: %s", error)
        return -math.inf if run.goal.metric.higher_is_better else math.inf, 0.0


def _scored(job: Job, model: ModelSource, source: Source, reference: Reference) -> float:
    """Return the score of a model, computed by the chosen executor."""
    execution, metric = job.options.execution, reference.metric
    if can_distribute(execution, metric, source):
        found = score_with(
            execution, metric, model, source, reference=job.reference, progress=job.progress, runtime=job.runtime
        )
    else:
        found = score(metric, model, source, reference=reference, progress=job.progress, runtime=job.runtime)
    return found.value


def _emit(run: _Search, plan: Plan) -> Candidate:
    """Return the corrected model of a plan."""
    made = correct(run.job, run.ranges, run.write(plan))
    return replace(made, placement=Placement("search"), evidence=run.evidence)


def _speedup(run: _Search, candidate: Candidate) -> float:
    """Return how many times faster than float a candidate is, at the batch size that gains least; 1 without data."""
    job, options = run.job, run.job.options
    latencies = [
        time_models(
            (job.timed, candidate.sessions),
            load.feed,
            weights=job.weights,
            threads=options.threads,
            batch=load.batch,
            seconds=min(TIMED, options.seconds),
        )
        for load in (with_agreeing_sample(job, candidate, usual) for usual in job.loads)
    ]
    return min((latency.speedup for latency in latencies), default=1.0)


def _progress_text(frontier: Frontier) -> str:
    """Return the progress of the search as text."""
    best = frontier.best
    found = "no model keeps the bar yet" if best is None else f"{best.speedup:.2f}x at {best.value:.4g}"
    return f"search: {found}"


def _key(run: _Search, before: float) -> str:
    """Return a digest of the model, the machine with its threads and runtime, the data, the metric and the options.

    Data count by the size and time of their files.

    Args:
        run: The search.
        before: The float model's score.
    """
    goal, job = run.goal, run.job
    tensors = sorted((name, tuple(map(float, span))) for name, span in run.ranges.ranges.items())
    asked = [
        job.identity,
        job.runtime.machine(job.options.threads).key,
        job.asked(),
        job.options.batches,
        goal.metric.name,
        before,
        data_stamp(run.source, run.source.length),
        tensors,
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()

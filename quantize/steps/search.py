"""Search the fastest model that keeps a score: try prices of noise, with one cheapest placement for each price."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ... import RequantError
from ...calibration.decoding import Finite, Natural, Number, convert, load_json, plain_number
from ...calibration.files import write_atomically
from ...calibration.kept import kept
from ...calibration.session import ModelSource
from ...calibration.sources import DataSource, Source
from ...calibration.stamps import data_stamp
from ...system.given import check_kind
from ...transforms.int8.plan import Plan
from ..accuracy.drop import Allowance, reaches, same_data
from ..accuracy.frontier import Frontier, Point
from ..accuracy.metrics import Metric, Reference, can_distribute, fitted, of_probabilities, score, score_with
from ..accuracy.pair import time_models
from ..accuracy.probabilities import probability_outputs
from ..job import Candidate, Evidence, Job, Placement
from ..placement.measuring import Write
from ..placement.priced_plans import plans_by_price
from ..placement.search import place
from ..runtime.inputs import open_data
from ..runtime.session import Runner
from .emit import correct, plan_by_rules
from .evidence import gather_evidence
from .ranges import TensorRanges

PRICES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""Prices of all noise, as a share of the float model's run time; the search refines between two of them."""
FIRST = 2
"""The index of the first price: by the exchange of medium effort, that of a relative error of 5 %."""
FINER = 4
"""Prices to try between two neighbours."""
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
class _Row:
    """A `Point` in the file."""

    price: Finite
    value: Number
    speedup: Finite
    int8_units: Natural
    kept: bool
    digest: str


@dataclass(frozen=True, slots=True)
class _State:
    """The file with the models that a search has tried, for the search whose digest is `key`."""

    key: str
    points: tuple[_Row, ...]


@dataclass
class _Walk:
    """A search. It keeps its state, so that an interrupted one has what it found.

    Attributes:
        job: The job.
        ranges: The ranges.
        goal: The score that must be kept.
        evidence: The noise of tensors and weights.
        plan_at: Gives the cheapest plan at a price of noise.
        write: Writes a plan into a model.
        source: The data of the metric.
        reference: The metric with the outputs of the float model.
        state: The file with the models tried so far.
        frontier: These models.
        start: When the search began, by the monotonic clock.
        candidates: The models that were emitted in this process, by the digest of their plan.
    """

    job: Job
    ranges: TensorRanges
    goal: Goal
    evidence: Evidence
    plan_at: Callable[[float], Plan]
    write: Write
    source: Source
    reference: Reference
    state: Path
    frontier: Frontier
    start: float
    candidates: dict[str, Candidate] = field(default_factory=dict)

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() - self.start >= self.goal.seconds


def opened(job: Job, goal: Goal) -> tuple[Source, Goal]:
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
    """Find the fastest model that keeps the bar.

    The first model has the placement that `quantize` chooses without a goal. Then the price of noise is raised where
    the bar is missed and lowered where it is kept; each price has one cheapest placement. `state` keeps the models that
    were tried, so that an interrupted search can continue.

    Args:
        job: The job.
        ranges: The ranges.
        goal: The score that must be kept.
        source: Its data, from `opened`.
        state: The file with the models tried so far.

    Returns:
        The fastest model that keeps the bar, else the model with the best score; None where nothing can become int8.
        And all models that were tried.

    Raises:
        RequantError: The metric or its data cannot be used.
    """
    start = time.monotonic()
    reference = Reference(goal.metric, job.reference)
    before = _scored(job, job.reference, source, reference)
    bar = goal.allowance.bar(goal.metric, before)
    overlap = same_data(job.source, source) if job.source is not None else 0.0
    metric = goal.metric
    frontier = Frontier(metric.name, metric.higher_is_better, before, bar, same_data=overlap, unit=metric.unit)
    evidence = gather_evidence(job, ranges)
    facts, rules, write = plan_by_rules(job, ranges, evidence)
    plan_at = plans_by_price(job, facts, rules, write, evidence.noise)
    walk = _Walk(job, ranges, goal, evidence, plan_at, write, source, reference, Path(state), frontier, start)
    _recall(walk)
    done = interrupted = False
    try:
        if (
            job.policy.how == "measured" and not walk.late
        ):  # it tries more plans than one for each price, and times whole models
            _try(walk, plan_at.usual_price, place(job, facts, rules, write, evidence.noise)[0].plan)
        done = _bisect(walk)
    except KeyboardInterrupt:
        if not walk.frontier.points:
            raise
        interrupted = True
    seconds = time.monotonic() - start
    walk.frontier = replace(walk.frontier, seconds=seconds, done=done, interrupted=interrupted)
    best = walk.frontier.best or walk.frontier.most_accurate
    if best is None:
        return None, walk.frontier
    if best.digest not in walk.candidates:  # found by an earlier run
        _emitted(walk, walk.plan_at(best.price))
    return walk.candidates[best.digest], walk.frontier


def _bisect(walk: _Walk) -> bool:
    """Find the least price that keeps the bar, among `PRICES`, then between two; return whether there was time."""
    low, high = -1, len(PRICES)  # the highest that misses, the least that keeps
    middle = FIRST
    while high - low > 1:
        if walk.late:
            return False
        low, high = (low, middle) if _try(walk, PRICES[middle]).kept else (middle, high)
        middle = (low + high) // 2
    if low < 0 or high == len(PRICES):
        return True
    least, most = PRICES[low], PRICES[high]
    for _ in range(FINER):
        if walk.late:
            return False
        between = math.sqrt(least * most) if least else most / 2
        least, most = (least, between) if _try(walk, between).kept else (between, most)
    return True


def _try(walk: _Walk, price: float, plan: Plan | None = None) -> Point:
    """Emit, judge and time the model of a plan, unless it was tried before.

    Args:
        walk: The search.
        price: The price of noise.
        plan: The plan; None for the cheapest one at this price.
    """
    plan = walk.plan_at(price) if plan is None else plan
    digest = _digest(plan)
    known = next((point for point in walk.frontier.points if point.digest == digest), None)
    if known is not None:
        return known
    walk.job.progress(_so_far(walk), len(walk.frontier.points), None)
    candidate = _emitted(walk, plan)
    value, speedup = _measured(walk, candidate)
    units = sum(plan.impl(unit).int8 for unit in plan.units)
    is_kept = speedup > 0 and reaches(walk.goal.metric, value, walk.frontier.bar)
    point = Point(price, value, speedup, units, is_kept, digest)
    points = tuple(sorted((*walk.frontier.points, point), key=lambda each: -each.speedup))
    best = next((each for each in points if each.kept and each.int8_units), None)
    walk.frontier = replace(walk.frontier, points=points, best=best)
    _remember(walk)
    return point


def _measured(walk: _Walk, candidate: Candidate) -> tuple[float, float]:
    """Return the score and the speed-up of a candidate; the worst score and 0 if it does not run, or the metric fails.

    The metric has scored the float model, so that the candidate is the cause: it may return NaN. The search goes on,
    because an error would lose the models that were tried before.
    """
    try:
        return _scored(walk.job, candidate.source, walk.source, walk.reference), _speedup(walk, candidate)
    except RequantError as error:
        logging.getLogger("requant").warning("requant: a model of the search is left out: %s", error)
        return -math.inf if walk.goal.metric.higher_is_better else math.inf, 0.0


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


def _emitted(walk: _Walk, plan: Plan) -> Candidate:
    """Return the corrected model of a plan; each plan is emitted once."""
    digest = _digest(plan)
    if digest not in walk.candidates:
        made = correct(walk.job, walk.ranges, walk.write(plan))
        walk.candidates[digest] = replace(made, placement=Placement("search"), evidence=walk.evidence)
    return walk.candidates[digest]


def _digest(plan: Plan) -> str:
    """Return a digest of the implementations of a plan."""
    text = json.dumps([[unit.name, plan.impl(unit).value] for unit in plan.units])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _speedup(walk: _Walk, candidate: Candidate) -> float:
    """Return how many times faster than float a candidate is, at the batch size that gains least; 1 without data."""
    job, options = walk.job, walk.job.options
    latencies = [
        time_models(
            (job.timed, candidate.sessions),
            load.feed,
            weights=job.weights,
            threads=options.threads,
            batch=load.batch,
            seconds=min(TIMED, options.seconds),
        )
        for load in job.loads
    ]
    return min((latency.speedup for latency in latencies), default=1.0)


def _so_far(walk: _Walk) -> str:
    """Return the progress of the search as text."""
    best = walk.frontier.best
    found = "no model keeps the bar yet" if best is None else f"{best.speedup:.2f}x at {best.value:.4g}"
    return f"search: {found}"


def _key(walk: _Walk) -> str:
    """Return a digest of the model, the machine with its threads and runtime, the data, the metric and the options.

    Data count by the size and time of their files.
    """
    goal, frontier, job = walk.goal, walk.frontier, walk.job
    tensors = sorted((name, tuple(map(float, span))) for name, span in walk.ranges.ranges.items())
    asked = [
        job.identity,
        job.runtime.machine(job.options.threads).key,
        job.asked(),
        job.options.batches,
        goal.metric.name,
        frontier.before,
        data_stamp(walk.source, walk.source.length),
        tensors,
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def _remember(walk: _Walk) -> None:
    """Save the models that were tried."""
    if walk.state.is_symlink():  # writing would replace the file that it names
        return
    # the next run tries models without a score again
    rows = [{**asdict(point), "value": plain_number(point.value)} for point in walk.frontier.scored]
    write_atomically(walk.state, json.dumps({"key": _key(walk), "points": rows}).encode(), output=False)


def _recall(walk: _Walk) -> None:
    """Load the models that an interrupted search of the same model, data and goal has tried.

    Costs are measured again, so a price may give another plan now; then its model is tried again. Nothing tells whether
    Python objects are the same data as before, so that a search with them begins anew.
    """
    if not os.path.lexists(walk.state) or walk.source.reference is None:
        return
    try:
        found = convert(
            load_json(walk.state, "state of a search"), _State, f"{walk.state}: malformed state of a search"
        )
    except RequantError as error:
        logging.getLogger("requant").warning("requant: %s; the search begins anew", error)
        return
    rows = found.points if found.key == _key(walk) else ()
    same = (row for row in rows if _digest(walk.plan_at(row.price)) == row.digest)
    bar, metric = walk.frontier.bar, walk.goal.metric
    tried = (Point(**{**asdict(row), "value": float(row.value)}) for row in same)
    points = [replace(point, kept=reaches(metric, point.value, bar)) for point in tried]
    best = next((each for each in points if each.kept and each.int8_units), None)
    walk.frontier = replace(walk.frontier, points=tuple(points), best=best)

"""Search the fastest model that keeps a score: try prices of noise, with one cheapest placement for each price."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
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
class _Search:
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
    run = _Search(job, ranges, goal, evidence, plan_at, write, source, reference, Path(state), frontier, start)
    _load_tried(run)
    done = interrupted = False
    try:
        # a measured placement tries several plans for a price, and times whole models
        if job.policy.how == "measured" and not run.late:
            _try_plan(run, plan_at.usual_price, place(job, facts, rules, write, evidence.noise)[0].plan)
        done = _bisect(run)
    except KeyboardInterrupt:
        if not run.frontier.points:
            raise
        interrupted = True
    seconds = time.monotonic() - start
    run.frontier = replace(run.frontier, seconds=seconds, done=done, interrupted=interrupted)
    best = run.frontier.best or run.frontier.most_accurate
    if best is None:
        return None, run.frontier
    if best.digest not in run.candidates:  # found by an earlier run
        _emit_once(run, run.plan_at(best.price))
    return run.candidates[best.digest], run.frontier


def _bisect(run: _Search) -> bool:
    """Find the least price that keeps the bar, among `PRICES`, then between two; return whether there was time."""
    low, high = -1, len(PRICES)  # the highest that misses, the least that keeps
    middle = FIRST
    while high - low > 1:
        if run.late:
            return False
        low, high = (low, middle) if _try_plan(run, PRICES[middle]).kept else (middle, high)
        middle = (low + high) // 2
    if low < 0 or high == len(PRICES):
        return True
    least, most = PRICES[low], PRICES[high]
    for _ in range(FINER):
        if run.late:
            return False
        between = math.sqrt(least * most) if least else most / 2
        least, most = (least, between) if _try_plan(run, between).kept else (between, most)
    return True


def _try_plan(run: _Search, price: float, plan: Plan | None = None) -> Point:
    """Emit, judge and time the model of a plan, unless it was tried before.

    Args:
        run: The search.
        price: The price of noise.
        plan: The plan; None for the cheapest one at this price.
    """
    plan = run.plan_at(price) if plan is None else plan
    digest = _digest(plan)
    known = next((point for point in run.frontier.points if point.digest == digest), None)
    if known is not None:
        return known
    run.job.progress(_progress_text(run), len(run.frontier.points), None)
    candidate = _emit_once(run, plan)
    value, speedup = _measured(run, candidate)
    units = sum(plan.impl(unit).int8 for unit in plan.units)
    is_kept = speedup > 0 and reaches(run.goal.metric, value, run.frontier.bar)
    point = Point(price, value, speedup, units, is_kept, digest)
    run.frontier = _with_points(run.frontier, sorted((*run.frontier.points, point), key=lambda each: -each.speedup))
    _save_tried(run)
    return point


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


def _emit_once(run: _Search, plan: Plan) -> Candidate:
    """Return the corrected model of a plan; each plan is emitted once."""
    digest = _digest(plan)
    if digest not in run.candidates:
        made = correct(run.job, run.ranges, run.write(plan))
        run.candidates[digest] = replace(made, placement=Placement("search"), evidence=run.evidence)
    return run.candidates[digest]


def _digest(plan: Plan) -> str:
    """Return a digest of the implementations of a plan."""
    text = json.dumps([[unit.name, plan.impl(unit).value] for unit in plan.units])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
        for load in job.loads
    ]
    return min((latency.speedup for latency in latencies), default=1.0)


def _progress_text(run: _Search) -> str:
    """Return the progress of the search as text."""
    best = run.frontier.best
    found = "no model keeps the bar yet" if best is None else f"{best.speedup:.2f}x at {best.value:.4g}"
    return f"search: {found}"


def _key(run: _Search) -> str:
    """Return a digest of the model, the machine with its threads and runtime, the data, the metric and the options.

    Data count by the size and time of their files.
    """
    goal, frontier, job = run.goal, run.frontier, run.job
    tensors = sorted((name, tuple(map(float, span))) for name, span in run.ranges.ranges.items())
    asked = [
        job.identity,
        job.runtime.machine(job.options.threads).key,
        job.asked(),
        job.options.batches,
        goal.metric.name,
        frontier.before,
        data_stamp(run.source, run.source.length),
        tensors,
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def _save_tried(run: _Search) -> None:
    """Save the models that were tried."""
    if run.state.is_symlink():  # writing would replace the file that it names
        return
    # the next run tries models without a score again
    rows = [{**asdict(point), "value": plain_number(point.value)} for point in run.frontier.scored]
    write_atomically(run.state, json.dumps({"key": _key(run), "points": rows}).encode(), output=False)


def _load_tried(run: _Search) -> None:
    """Load the models that an interrupted search of the same model, data and goal has tried.

    Costs are measured again, so a price may give another plan now; then its model is tried again. Nothing tells whether
    Python objects are the same data as before, so that a search with them begins anew.
    """
    if not os.path.lexists(run.state) or run.source.reference is None:
        return
    try:
        found = convert(load_json(run.state, "state of a search"), _State, f"{run.state}: malformed state of a search")
    except RequantError as error:
        logging.getLogger("requant").warning("requant: %s; the search begins anew", error)
        return
    rows = found.points if found.key == _key(run) else ()
    same = (row for row in rows if _digest(run.plan_at(row.price)) == row.digest)
    bar, metric = run.frontier.bar, run.goal.metric
    tried = (Point(**{**asdict(row), "value": float(row.value)}) for row in same)
    run.frontier = _with_points(
        run.frontier, [replace(point, kept=reaches(metric, point.value, bar)) for point in tried]
    )

"""How long the steps of `quantize_model` will take, before they begin: an estimate for people who wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from ...calibration.model.session import Array
from ...transforms.int8.ops import OPS
from ..corrections.rounding import ROWS, SPARSE, columns_of, multiplications
from ..corrections.samples import correcting_samples, walked_layers
from ..job import Evidence, Job
from ..options.efforts import ADJUSTING, EFFORTS
from ..placement.forms import possible_forms
from ..placement.measuring import LEAST_RUNS, MOST_RUNS, PROFILED, TURNS
from ..placement.runs import runs_for, runs_within, samples_for, shapes_for
from ..placement.search import costs_decide
from ..placement.tried_plans import LEAST_MS
from ..runtime.clock import (
    FEW_ROUNDS,
    LEAST_ROUNDS,
    LEAST_TURN,
    MOST_ROUNDS,
    SLOW,
    TURN,
    TURN_SECONDS,
    WARM_UP,
    time_run,
)
from ..runtime.progress import (
    CALIBRATE,
    COMPARE,
    COMPARE_PLACEMENTS,
    CORRECT_WEIGHTS,
    MEASURE_COSTS,
    RELIEF,
    TIME,
    TRY_TENSORS,
    TRY_WEIGHTS,
    Forecast,
)
from .emit import plan_by_rules
from .evidence import TRIAL_SAMPLES, only_rest_is_left
from .ranges import TensorRanges

ELEMENT = 4e-9  # seconds for one element of an observed tensor; more for a histogram
BINNED = 3.0
TRIED = 0.01  # seconds for a tensor beside the runs: building its part of the model
ADJUSTED = 0.15  # seconds for a layer beside the multiplications and runs
PRODUCT = 5e-11  # seconds for one multiplication of learned rounding
LOADED = 0.002  # seconds for one unit of a plan: writing, loading and reading its profile
PROFILES = 9  # plans that are profiled: float, each integer form, rules, and the plans by costs
PLANS = 8  # plans that are timed in turns; then the best one beside the same without native operators
IN_INTEGERS = 0.6  # the time of a run of a plan, over the time of a run of the float model
PROBED = 0.03  # seconds for which runs are timed for the forecast
LEAST_SHARE = 0.05  # of a processor; a smaller measured share counts as this one, because the machine has paused
REPEATED = 1.5  # measurements until the times are sure, the first one included
ROUNDS = 4  # models with more units in float that are emitted at most
BETWEEN = 1  # models that are emitted between the fastest one that keeps the promise and one that misses it
FALLBACK_MODELS = 3  # models that `fall_back_to_float` makes, about: one keeps the promise, then faster ones are tried
PRICED = 3  # plans that are profiled for each of them
LEARNED = frozenset({TRY_TENSORS, TRY_WEIGHTS, CORRECT_WEIGHTS})
"""The stages that low effort leaves out, unless the user names a correction."""
AGAIN = 0.6  # plans that are profiled for a second placement, over the plans that are profiled for the first one


def forecast(job: Job) -> Forecast:
    """Return how long `quantize_model` will take, about; nothing is known without data.

    The seconds follow from the time of one run, the number of samples, tensors and layers, the effort, and the share of
    a processor that the process gets. `calibrate` is missing if the number of samples is unknown. The constants are
    from a dozen small models, of which most stages took between half and twice the estimate. The fallback counts all
    models that may be made where the first one misses the promise of accuracy.
    """
    if job.feed is None or job.source is None:
        return Forecast()
    run, slowdown = _run_seconds_and_slowdown(job, job.feed)
    found, fallback, low = _stage_seconds(job, job.feed, run), 0.0, math.inf
    if EFFORTS[job.options.effort].seconds:
        low = math.fsum(took for stage, took in found.items() if stage not in LEARNED)
    if job.outputs_judge and not job.options.force_int8 and job.policy.how not in ("all", "plan"):
        tries = not EFFORTS[job.options.effort].seconds and not job.weights.large
        more = _second_placement_seconds(job, job.feed, run, found) if tries else {}
        fallback = math.fsum((*more.values(), *_fall_back_seconds(job, run, found, ROUNDS + BETWEEN).values()))
    return _slowed(Forecast(found, fallback, low), slowdown)


def _slowed(found: Forecast, slowdown: float) -> Forecast:
    """Return a forecast for a process that gets a part of a processor; stages that take no time are left out."""
    stages = {stage: slowdown * seconds for stage, seconds in found.stages.items() if seconds}
    return Forecast(stages, slowdown * found.fallback, slowdown * found.low_effort)


def _stage_seconds(job: Job, feed: Mapping[str, Array], run: float) -> dict[str, float]:
    """Return the seconds of the stages from the seconds of one run, for a process that has a processor for itself."""
    sizes = {n: math.prod(s) for n, s in shapes_for(job, feed).items()}
    effort, tensors = EFFORTS[job.options.effort], job.all_int8_plan.quantized
    found = {COMPARE: samples_for(job) * run * (2 if effort.seconds else 1)} if job.outputs_judge else {}
    if job.static and job.source is not None and job.source.length is not None:
        elements = sum(sizes.get(name, 0) for name in tensors)
        rule = job.supply.rule
        passes = BINNED if rule is not None and rule.needs_histogram else 1.0
        found[CALIBRATE] = job.source.length * (run + passes * ELEMENT * elements)
    corrected = job.judged and not job.weights.large
    if effort.seconds and corrected and job.policy.plan is None and not only_rest_is_left(job.all_int8_plan):
        found |= _trial_seconds(job, feed, run, effort.seconds)
    if job.corrections & ADJUSTING and corrected:
        found[CORRECT_WEIGHTS] = _correction_seconds(job, run)
    found[TIME] = _race_seconds(run, 3, job.options.seconds) * len(job.loads)
    if job.policy.how == "measured" and costs_decide(job) and 1e3 * run >= LEAST_MS and _has_choices(job):
        load = LOADED * len(job.all_int8_plan.units)
        profiled = min(max(PROFILED / 1e6, LEAST_RUNS * run), MOST_RUNS * run)
        found[MEASURE_COSTS] = PROFILES * TURNS * (load + profiled) * len(job.loads)
        races = (PLANS * load + _race_seconds(IN_INTEGERS * run, n, job.options.seconds) for n in (PLANS, 2))
        found[COMPARE_PLACEMENTS] = math.fsum(races) * len(job.loads)
    return found


def _has_choices(job: Job) -> bool:
    """Return whether a unit may have several forms, between which costs decide; ranges only take forms away."""
    facts, rules, _ = plan_by_rules(job, TensorRanges(), Evidence())
    return any(len(forms) > 1 for forms in possible_forms(facts, rules).values())


def forecast_fall_back(job: Job, *, tries: bool) -> Forecast:
    """Return how long `fall_back_to_float` will take, as `forecast` does.

    Args:
        job: The job.
        tries: Whether it begins with trials of single tensors.
    """
    if job.feed is None or job.source is None:
        return Forecast()
    run, slowdown = _run_seconds_and_slowdown(job, job.feed)
    found = _fall_back_seconds(job, run, _stage_seconds(job, job.feed, run), FALLBACK_MODELS)
    if tries:
        found |= _trial_seconds(job, job.feed, run, EFFORTS[job.options.effort].retry)
    return _slowed(Forecast(found), slowdown)


def forecast_second_placement(job: Job) -> Forecast:
    """Return how long the stages will take, as `forecast` does, where tensors are tried that alone ruin the outputs.

    The model is placed again then.
    """
    if job.feed is None or job.source is None:
        return Forecast()
    run, slowdown = _run_seconds_and_slowdown(job, job.feed)
    found = _second_placement_seconds(job, job.feed, run, _stage_seconds(job, job.feed, run))
    return _slowed(Forecast(found), slowdown)


def _second_placement_seconds(
    job: Job, feed: Mapping[str, Array], run: float, every: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds of trials of all tensors and of a second placement, from the seconds of the first one."""
    placed = (CORRECT_WEIGHTS, COMPARE_PLACEMENTS, COMPARE, TIME)
    found = _trial_seconds(job, feed, run, EFFORTS[job.options.effort].retry)
    found |= {stage: every[stage] for stage in placed if stage in every}
    return found | {MEASURE_COSTS: AGAIN * every[MEASURE_COSTS]} if MEASURE_COSTS in every else found


def _fall_back_seconds(job: Job, run: float, every: Mapping[str, float], models: int) -> dict[str, float]:
    """Return the seconds of the stages in which `fall_back_to_float` makes some models.

    For each model plans are profiled, and the fastest one is timed beside another.

    Args:
        job: The job.
        run: The seconds of one run.
        every: The seconds of all stages of the first model, from `_stage_seconds`.
        models: The number of models.
    """
    compared = every.get(COMPARE, 0.0) / (2 if EFFORTS[job.options.effort].seconds else 1)
    found = {CORRECT_WEIGHTS: every.get(CORRECT_WEIGHTS, 0.0), COMPARE: compared}
    if MEASURE_COSTS in every:
        raced = _race_seconds(IN_INTEGERS * run, 2, job.options.seconds) * len(job.loads)
        found[RELIEF] = every[MEASURE_COSTS] * PRICED / PROFILES + raced
    return {stage: models * seconds for stage, seconds in found.items()} | {TIME: every.get(TIME, 0.0)}


def _trial_seconds(job: Job, feed: Mapping[str, Array], run: float, seconds: float) -> dict[str, float]:
    """Return the seconds of the trials of single tensors, each kind with a limit, from the seconds of one run.

    A kind of which one sample takes longer than the limit is left out.
    """
    runs = runs_within(job, feed, seconds, run)
    products = sum(OPS[unit.op].weight is not None for unit in job.all_int8_plan.units if unit.op in OPS)
    counts = ((TRY_TENSORS, len(job.all_int8_plan.quantized), 0.5), (TRY_WEIGHTS, products, 1.0))
    return {stage: min(n * TRIAL_SAMPLES * share, runs) * run + TRIED * n for stage, n, share in counts if n <= runs}


def _race_seconds(run: float, models: int, seconds: float) -> float:
    """Return the seconds for which `race` times some models, each of them as slow as `run` seconds."""
    slow = WARM_UP * run > SLOW
    turn = models * run * (1 if slow else TURN if TURN * run <= TURN_SECONDS else LEAST_TURN)
    least = turn * (FEW_ROUNDS if slow else LEAST_ROUNDS)
    warm_up = models * run * (1 if slow else WARM_UP)
    return REPEATED * (warm_up + max(least, min(seconds, MOST_ROUNDS * turn)))


def _run_seconds_and_slowdown(job: Job, feed: Mapping[str, Array]) -> tuple[float, float]:
    """Return the CPU seconds of one run, and by which factor its wall time is longer, at least 1.

    The seconds are the least of several runs. The factor is the wall time of all runs over their CPU time: other
    processes may use the same processor. A large model is not run: its time follows from built-in costs, and the factor
    is 1.
    """
    if job.weights.large:
        return 1 / runs_for(job, feed, 1.0), 1.0
    times = time_run(partial(job.opened.runner(1), feed), seconds=PROBED, threads=1)
    return times.least, 1 / max(1 - times.waited, LEAST_SHARE)


def _correction_seconds(job: Job, run: float) -> float:
    """Return the seconds of the corrections that go through the model layer by layer.

    Learned rounding leaves out layers with few positions per column, such as fully connected ones.
    """
    products, layers = 0.0, [*walked_layers(job, job.all_int8_plan)]
    samples = correcting_samples(job, layers)
    for layer in layers:
        positions = samples * layer.positions
        if positions >= SPARSE * columns_of(layer.node, layer.shape):
            products += multiplications(layer.node, layer.shape) * min(1.0, positions / ROWS)
    limit = EFFORTS[job.options.effort].operations or math.inf
    learned = min(products, limit) if "rounding" in job.corrections else 0.0
    return len(layers) * ADJUSTED + 2 * samples * run + PRODUCT * learned

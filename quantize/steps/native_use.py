"""What the native operators of a model are, and what the model is without their library: how fast, and how accurate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...calibration.model.session import native_library
from ..accuracy.promise import Promise
from ..job import Candidate, Job, Trial
from ..kernels.wrap import native_calls
from ..result import NativeUse
from ..runtime.clock import race
from ..runtime.progress import INSPECT
from ..runtime.runtimes import BODIES
from .judge import measure_accuracy, promise_of

SECONDS = 1.0  # how long the model is timed with and without the library


def native_use(job: Job, trial: Trial) -> NativeUse | None:
    """Return the native operators of a model; None for a model without them."""
    plan, calls = trial.candidate.plan, native_calls(trial.candidate.model)
    if not calls:
        return None
    library, units = native_library(), [unit for unit in plan.units if plan.impl(unit).native]
    named = {name for unit in units for name in unit.nodes}
    joined = len(units) - sum(call.name in named for call in calls)  # normalizations are no such units
    if library is None:
        return NativeUse(len(units), joined, "")
    stock = replace(trial.candidate, runtime=BODIES)
    milliseconds, judged = _stock_ms(job, trial, stock), _stock_promise(job, trial, stock)
    job.progress(INSPECT, 0, None)  # the comparison is done
    return NativeUse(len(units), joined, library, milliseconds, judged)


def _stock_ms(job: Job, trial: Trial, stock: Candidate) -> float | None:
    """Return the minimum time of a run without the library; None if nothing was timed.

    Args:
        job: The job.
        trial: The model with its latency.
        stock: The model as a runtime without the library runs it.
    """
    if job.feed is None or trial.latency is None:
        return None
    threads = job.options.threads
    runs = [partial(each.sessions.runner(threads), job.feed) for each in (trial.candidate, stock)]
    with_library, without = race(runs, seconds=min(SECONDS, job.options.seconds), threads=threads)
    # the clock rate may have changed since the latency was measured
    return trial.latency.int8_ms * without.least / with_library.least


def _stock_promise(job: Job, trial: Trial, stock: Candidate) -> Promise | None:
    """Judge the model without the library: bodies round where native operators do not.

    The arguments are as for `_stock_ms`. Return None if nothing judged the model, or if it is large: timing it takes
    minutes.
    """
    if not job.outputs_judge or not trial.accuracy.samples or job.weights.large or job.options.kernels == "exact":
        return None
    return promise_of(job, measure_accuracy(replace(job, runtime=BODIES), stock))

"""What the native operators of a model are, and how fast the model is without their library."""

from __future__ import annotations

from functools import partial

from ...calibration.session import describe, native_library, open_without_library
from ..job import Job, Trial
from ..kernels.wrap import native_calls
from ..result import NativeUse
from ..runtime.clock import race
from ..runtime.session import Runner

SECONDS = 1.0  # how long the model is timed with and without the library


def native_use(job: Job, trial: Trial) -> NativeUse | None:
    """Return the native operators of a model; None for a model without them."""
    plan, calls = trial.candidate.plan, native_calls(trial.candidate.model)
    if not calls:
        return None
    library, units = native_library(), [unit for unit in plan.units if plan.impl(unit).native]
    named = {name for unit in units for name in unit.nodes}
    joined = len(units) - sum(call.name in named for call in calls)  # normalizations are no such units
    return NativeUse(len(units), joined, library or "", None if library is None else _stock_ms(job, trial))


def _stock_ms(job: Job, trial: Trial) -> float | None:
    """Return the minimum time of a run without the library; None if nothing was timed."""
    source = trial.candidate.source
    if job.feed is None or trial.latency is None:
        return None
    threads = job.options.threads
    stock = Runner.over(open_without_library(source, threads=threads), describe(source))
    runs = [partial(run, job.feed) for run in (trial.candidate.sessions.runner(threads), stock)]
    with_library, without = race(runs, seconds=min(SECONDS, job.options.seconds), threads=threads)
    # the clock rate may have changed since the latency was measured
    return trial.latency.int8_ms * without.least / with_library.least

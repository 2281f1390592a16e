"""A candidate against the float model: accuracy on the data, latency run by run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ...calibration.samples import Sample
from ...calibration.session import FEW, Array, ModelSource
from ..accuracy.outputs import Accuracy, Outputs
from ..accuracy.pair import judge_pair, time_pair
from ..accuracy.selected_outputs import selected_from, showing, unlike
from ..job import Candidate, Job, Trial
from ..model.files import serialize
from ..runtime.inputs import stacked
from ..runtime.timing import Latency

JUDGED = 64  # samples on which the emitted model is compared: enough to tell a ruined model from a good one
UNMEASURED = Accuracy(0, None, {})


def judge(job: Job, candidate: Candidate, accuracy: Accuracy | None = None) -> Trial:
    """Judge a candidate, unless it was judged before, and time it."""
    return Trial(candidate, accuracy or measure_accuracy(job, candidate), _timed(job, candidate))


def measure_accuracy(job: Job, candidate: Candidate) -> Accuracy:
    """Compare the outputs of the candidate with those of the float model.

    Where outputs are selected by scores, and come out in another number, what they are selected from is compared.
    """
    accuracy = _judged(job, job.reference, candidate.source)
    different = unlike(accuracy)
    sources = selected_from(job.simple) if different else []
    if not sources:
        return accuracy
    shown = (showing(model, sources, different) for model in (job.simple, candidate.model))
    before, after = (serialize(model, job.folder) for model in shown)
    return _judged(job, before, after)


def _judged(job: Job, before: ModelSource, after: ModelSource) -> Accuracy:
    """Compare two models on the samples."""
    if job.source is None:
        return UNMEASURED
    most = FEW if job.weights.large else JUDGED
    total = min(most, job.source.length or most)
    told = partial(_tell, job, total)
    return judge_pair(before, after, job.source.samples(most), told, weights=job.weights, watch=_ignore)


def _ignore(before: Outputs, after: Outputs, sample: Sample) -> None:
    """Take labels that do not fit the predictions for ones that only the caller understands."""


def _tell(job: Job, total: int, done: int) -> None:
    """Say how far the comparison is."""
    job.progress("compare", done, total)


def _timed(job: Job, candidate: Candidate) -> Latency | None:
    """Time the candidate against the float model on the first sample."""
    feed = first_feed(job)
    if feed is None:
        return None
    job.progress("time", 0, None)
    options = job.options
    return time_pair(
        job.float_source
        if job.weights.large
        else job.reference,  # of which the runtime need not fold constants in memory
        candidate.source,
        feed,
        weights=job.weights,
        threads=options.threads,
        batch=options.batch,
        seconds=options.seconds,
    )


def first_feed(job: Job) -> Mapping[str, Array] | None:
    """Return the feed that is timed and profiled, of as many items as were asked for."""
    if job.source is None:
        return None
    batch = job.options.batch
    return (next(iter(job.source)) if batch == 1 else stacked(job.source, batch)).feed

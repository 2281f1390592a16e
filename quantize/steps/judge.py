"""Compare a candidate with the float model: accuracy on the samples that judge, latency at each batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ... import RequantError
from ...calibration.data.sources import Source
from ...calibration.model.session import FEW
from ..accuracy.choices import Reader
from ..accuracy.given_choices import readers_of, with_choices
from ..accuracy.logits import logits_of, with_logits
from ..accuracy.output_kinds import with_kinds_of
from ..accuracy.outputs import Accuracy
from ..accuracy.pair import Model, judge_pair, time_models
from ..accuracy.probabilities import probability_outputs
from ..accuracy.promise import LEAST_DB, Promise, amplitude, promise
from ..accuracy.selected_outputs import (
    chosen_outputs,
    has_readers,
    outputs_without_signal,
    replacements_for,
    with_tensors_as_outputs,
)
from ..accuracy.terms import Terms
from ..job import Candidate, Job, Trial
from ..model.files import serialize
from ..placement.runs import samples_for
from ..result import Given
from ..runtime.agreement import agreeing, work_depends_on_data
from ..runtime.loads import Load
from ..runtime.progress import COMPARE, TIME
from ..runtime.runtimes import Sessions
from ..runtime.timing import Latency, load_name
from .simplify import RESTORE

T = TypeVar("T")

JUDGED_STEPS = 256  # of sequences: errors need steps to accumulate
UNMEASURED = Accuracy(0, None, {})
SLOWER = 0.9  # a model with at most this share of the speed of float is not written, whatever its accuracy is
BRIEF = 0.2  # the share of the measurement's duration that shows a model that slow


def judge(job: Job, candidate: Candidate, accuracy: Accuracy | None = None) -> Trial:
    """Measure the latency of a candidate, and its accuracy if it is not known yet."""
    return Trial(candidate, accuracy or measure_accuracy(job, candidate), _timed(job, candidate))


def if_it_runs(measure: Callable[[], T]) -> T | None:
    """Return what a function measures of a candidate; None if the candidate does not run, so that it is not taken.

    The model that is chosen at last is judged without this: there the error is the reason to write float.
    """
    with suppress(RequantError):
        return measure()
    return None


def measure_accuracy(job: Job, candidate: Candidate) -> Accuracy:
    """Compare the outputs of a candidate with the outputs of the float model on the samples that judge.

    Random inputs judge nothing: they lie outside of the ranges, and class scores for them are near chance. Nor do
    random outputs.
    """
    if job.judging is None or not job.outputs_judge:
        return UNMEASURED
    samples = judging_samples(job, job.judging)
    total, terms = samples.length, Terms("skip", probability_outputs(job.simple))

    def told(done: int) -> None:
        job.progress(COMPARE, done, total)

    def compare(before: Sessions, after: Sessions) -> Accuracy:
        told(0)  # the first sample waits for the sessions
        return judge_pair(before, after, samples, told, weights=job.weights, terms=terms)

    found = with_kinds_of(job.simple, with_selected_outputs(job, candidate, compare))
    return _with_logits(job, candidate, compare, found)


def beside_given(job: Job, candidate: Candidate) -> Given | None:
    """Compare a given model that computes its ranges at run time with an INT8 model, and with its float weights.

    The accuracy of the INT8 model is judged against the float weights. Its user replaces the given model, whose outputs
    differ from both. None of a model whose activations are float, and where the samples judge nothing.
    """
    if RESTORE not in job.restored or job.judging is None or not job.outputs_judge or not candidate.plan.has_int8:
        return None
    samples, terms = judging_samples(job, job.judging), Terms("skip", probability_outputs(job.simple))
    compare = partial(judge_pair, samples=samples, weights=job.weights, terms=terms)
    found = if_it_runs(lambda: [compare(job.timed, candidate.sessions), compare(job.opened, job.timed)])
    return None if found is None else Given(*(with_kinds_of(job.simple, each) for each in found))


def measured_error(job: Job, candidate: Candidate) -> float:
    """Return the error of a model at its worst output: the amplitude of the noise over the amplitude of the signal.

    It is infinite for a model that does not run, or does not keep the promise of accuracy.
    """
    found = if_it_runs(partial(measure_accuracy, job, candidate))
    return amplitude(found.worst_sqnr_db) if found is not None and promise_of(job, found).kept else math.inf


def is_slower(job: Job, latencies: Sequence[Latency]) -> bool:
    """Whether a model is clearly slower than the faster float model at each batch size, and the user did not force it.

    Corrections of weights and more units in float do not make it fast enough, so that neither is tried.
    """
    if not job.policy.timed or job.options.force_int8 or not latencies:
        return False
    return all(each.gain * (1 + each.uncertainty) <= SLOWER for each in latencies)


def timed_briefly(job: Job, candidate: Candidate) -> tuple[Latency, ...]:
    """Time a candidate as `judge` does, for a short time."""
    return tuple(_timed_at(job, candidate, load, BRIEF) for load in job.loads)


def judging_samples(job: Job, source: Source) -> Source:
    """Return the samples of a source that judge the models of a job; with large weights few samples must do."""
    return source.stretches(FEW if job.weights.large else JUDGED_STEPS if source.links else samples_for(job))


def promise_of(job: Job, accuracy: Accuracy) -> Promise:
    """Judge the accuracy of a model of a job."""
    return promise(accuracy, held_out=job.held_out)


def with_selected_outputs(
    job: Job, candidate: Candidate, compare: Callable[[Sessions, Sessions], Accuracy]
) -> Accuracy:
    """Compare two models; in place of outputs that a model selects by its scores, compare what it selects from.

    An operator such as NonMaxSuppression may select another number of entries in the INT8 model. A TopK may put them in
    another order: its inputs count only where the outputs seem to lose too much. Integers, such as the result of an
    ArgMax, have no SQNR at all. Where layers read what was chosen, the INT8 model is given the float model's choice.

    Args:
        job: The job.
        candidate: The INT8 model.
        compare: Compares the float model with the INT8 model.
    """
    carried = {link.output for link in job.source.links} if job.source is not None else set()  # read by the next step
    outputs = [each for each in job.simple.graph.outputs if str(each.name) not in carried]
    integers = [str(each.name) for each in outputs if each.dtype is not None and each.dtype.is_integer()]
    chosen = chosen_outputs(job.simple)
    replacements = {name: chosen[name] for name in integers if name in chosen}
    accuracy = _compare_replacements(job, candidate, compare, replacements)
    if accuracy is None:
        replacements, accuracy = {}, compare(job.opened, candidate.sessions)
    lost = {name for name in accuracy.sqnr_db if accuracy.least_db(name) < LEAST_DB} - carried
    gone, small = lost.intersection(outputs_without_signal(accuracy)), not job.weights.large
    more, given = replacements_for(job.simple, lost, gone, integers, gives=small)
    found = _compare_replacements(job, candidate, compare, {**replacements, **more}, given) if more or given else None
    if found is not None:
        replacements = {**replacements, **more}
    own = {name: accuracy.sqnr_db.get(name, math.nan) for name in replacements}
    return replace(found or accuracy, replaced=own)


def _compare_replacements(
    job: Job,
    candidate: Candidate,
    compare: Callable[[Sessions, Sessions], Accuracy],
    replacements: Mapping[str, Sequence[Reader]],
    given: Sequence[str] = (),
) -> Accuracy | None:
    """Compare two models with tensors in place of some outputs; None without any, or if the INT8 model lacks them.

    Args:
        job: The job.
        candidate: The INT8 model.
        compare: As for `with_selected_outputs`.
        replacements: By output, the tensors that are compared in its place.
        given: The nodes whose choice the INT8 model takes from the float model.
    """
    readers = (*readers_of(job.simple, given), *(reader for found in replacements.values() for reader in found))
    sources = {label: (name, index, label) for name, index, label in readers}.values()
    if not sources or not has_readers(candidate.model, sources):
        return None
    models = (job.simple, with_choices(candidate.model, job.simple, given))
    before, after = (serialize(with_tensors_as_outputs(model, sources, replacements), job.folder) for model in models)
    with suppress(RequantError):  # a tensor may be of bytes in the INT8 model
        return compare(Sessions(before), Sessions(after, runtime=job.runtime))
    return None


def _with_logits(
    job: Job, candidate: Candidate, compare: Callable[[Sessions, Sessions], Accuracy], accuracy: Accuracy
) -> Accuracy:
    """Return a comparison with the logits in place of saturated probabilities, where the INT8 model has them.

    Args:
        job: The job.
        candidate: The INT8 model.
        compare: As for `with_selected_outputs`.
        accuracy: The comparison of the outputs.
    """
    hidden = accuracy.saturated.intersection(accuracy.sqnr_db)
    logits = logits_of(job.simple) if hidden else {}
    readers = {
        name: [logits[name]] for name in hidden if name in logits and has_readers(candidate.model, [logits[name]])
    }
    found = _compare_replacements(job, candidate, compare, readers)
    if found is None:
        return accuracy
    return with_logits(accuracy, {name: label for name, ((_, _, label),) in readers.items()}, found)


def _timed(job: Job, candidate: Candidate) -> tuple[Latency, ...]:
    """Time the candidate against the float model at each batch size; empty without data."""
    found = []
    for load in job.loads:
        job.progress(TIME if len(job.loads) == 1 else f"{TIME} {load_name(load.batch, load.regime)}", 0, None)
        found.append(_timed_at(job, candidate, load))
    return tuple(found)


def _timed_at(job: Job, candidate: Candidate, load: Load, share: float = 1.0) -> Latency:
    """Time the candidate against the float model on one feed; an INT8 model against the simplified float model too.

    Args:
        job: The job.
        candidate: The model.
        load: The feed.
        share: The share of the usual duration.
    """
    load = with_agreeing_sample(job, candidate, load)
    # a simplified model needs no constants folded in memory
    simplified = job.weights.large and not job.restored
    models: list[Model] = [job.float_source if simplified else job.timed, candidate.sessions]
    if candidate.plan.has_int8:
        models.append(job.plain)
    found = time_models(
        models,
        load.feed,
        weights=job.weights,
        threads=job.options.threads,
        batch=load.batch,
        seconds=job.options.seconds * share,
        settle=share == 1.0 and candidate.plan.has_int8,
    )
    return replace(found, regime=load.regime, shapes=load.shapes, sample=load.sample)


def with_agreeing_sample(job: Job, candidate: Candidate, load: Load) -> Load:
    """Return a load for which a candidate and the float model do about the same work; large models keep their load."""
    if job.source is None or job.weights.large or not job.judged or not work_depends_on_data(job.simple):
        return load
    runners = [each.runner(job.options.threads) for each in (job.timed, candidate.sessions)]
    return agreeing(load, job.source, runners)

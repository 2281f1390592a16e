"""Compare, score and time a float and an INT8 model. Large models are loaded one after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TypeAlias

from ...calibration.data.samples import Sample
from ...calibration.data.sources import Source
from ...calibration.model.session import FEW, Array, ModelSource
from ..model.files import Weights
from ..runtime.clock import race
from ..runtime.own_state import OwnState
from ..runtime.runtimes import LoadedModel, Sessions
from ..runtime.timing import Latency, summary
from .classes import Outputs
from .metrics import Metric, Score, Scorer, of_reference, score
from .outputs import Accuracy, Watch, compare_outputs, measure
from .terms import USUAL, Terms

Model: TypeAlias = ModelSource | Sessions
"""A model in ONNX Runtime, or in the runtime of its sessions."""

ROOM = 2**28  # bytes of samples and outputs to keep until the other model runs


def judge_pair(
    before: Model,
    after: Model,
    samples: Iterable[Sample],
    progress: Callable[[int], None] | None = None,
    *,
    weights: Weights,
    watch: Watch | None = None,
    terms: Terms = USUAL,
) -> Accuracy:
    """Run two models over samples and compare them.

    Only one large model is loaded at any time: the float model runs over as many samples as fit into `ROOM`
    with their outputs, then the INT8 model over the same samples, and so on.

    Args:
        before: The float model.
        after: The INT8 model.
        samples: The samples, with or without labels.
        progress: Called with the number of samples so far.
        weights: The size of the float model.
        watch: Called with the outputs of both for each sample.
        terms: What is known beside the outputs.

    Raises:
        RequantError: A model cannot be loaded or run, or the labels of a sample do not fit the predictions.
    """
    if not weights.large:
        return measure(_opened(before, 1), _opened(after, 1), samples, progress, watch, terms=terms)
    gc.collect()  # unused models are in reference cycles
    rest = iter(samples)
    head = list(islice(rest, FEW + 1))
    lean = len(head) <= FEW or weights.lumpy
    return compare_outputs(
        _in_turns(partial(_sessions(before).fresh, lean=lean), _sessions(after).fresh, chain(head, rest)),
        progress,
        watch,
        terms=terms,
    )


class PairScorer:
    """Scores two models in a metric; `add` is a `Watch` of `judge_pair`."""

    def __init__(self, metric: Metric) -> None:
        """Begin without a sample."""
        self.metric = metric
        self._before, self._after = Scorer(metric), Scorer(metric)

    def add(self, before: Outputs, after: Outputs, sample: Sample) -> None:
        """Add the outputs for a sample.

        Raises:
            RequantError: The label does not fit, or the metric fails.
        """
        if self.metric.runs_models:
            return
        if self.metric.reference:
            self._after.add(after, sample, self.metric.kept(before, sample))
        else:
            self._before.add(before, sample)
            self._after.add(after, sample)

    def result(self, models: Sequence[Path], source: Source) -> tuple[Score, Score]:
        """Return the scores, after all samples were added.

        Args:
            models: The float model and the INT8 model.
            source: The data.

        Raises:
            RequantError: No sample was added, or the metric fails.
        """
        if self.metric.runs_models:
            before, after = (score(self.metric, model, source) for model in models)
            return before, after
        after = self._after.result()
        return of_reference(after) if self.metric.reference else self._before.result(), after


def _in_turns(
    load_before: Callable[[], LoadedModel], load_after: Callable[[], LoadedModel], samples: Iterable[Sample]
) -> Iterator[tuple[Outputs, Outputs, Sample]]:
    """Yield the outputs of both models for each sample; only one model is in memory."""
    rest = iter(samples)
    before, after = OwnState(), OwnState()
    while recorded := _record(load_before, rest, before):
        run = load_after()
        yield from ((outputs, after.run(run, sample), sample) for sample, outputs in recorded)
        del run


def _record(load: Callable[[], LoadedModel], samples: Iterator[Sample], own: OwnState) -> list[tuple[Sample, Outputs]]:
    """Return the next samples with the outputs of a model: at least one, and as many as fit into `ROOM`."""
    first = next(samples, None)
    if first is None:
        return []
    run = load()
    recorded: list[tuple[Sample, Outputs]] = []
    size = 0
    for sample in chain([first], samples):
        outputs = own.run(run, sample)
        recorded.append((sample, outputs))
        size += sum(getattr(value, "nbytes", 0) for value in (*sample.feed.values(), *outputs.values()))
        if size > ROOM:
            break
    return recorded


def time_models(
    models: Sequence[Model],
    feed: Mapping[str, Array],
    *,
    weights: Weights,
    threads: int,
    batch: int | None,
    seconds: float = 2.0,
    settle: bool = False,
) -> Latency:
    """Time models on one feed, in turns. Large models run one after the other.

    The sessions pack their weights, as in production, except a float model that is `Weights.lumpy`.

    Args:
        models: The float model, the INT8 model and, if it is to be timed too, the simplified float model. Large models
            are timed without the third one.
        feed: The inputs.
        weights: The size of the float model.
        threads: Threads inside one operator; 0 leaves the choice to the runtime.
        batch: Items in the feed; None if they are not known.
        seconds: The time for two models together; a third one takes half as much more. On a busy machine they are
            timed up to three times as long.
        settle: Whether they are timed as long too where INT8 is faster by less than the uncertainty; see `race`.

    Raises:
        RequantError: A model cannot be loaded or run.
    """
    if not weights.large:
        runs = [partial(_opened(model, threads), feed) for model in models]
        return summary(*race(runs, seconds=seconds * len(models) / 2, threads=threads, settle=settle), batch=batch)
    gc.collect()
    before, after = (_sessions(model) for model in models[:2])
    loads = (partial(before.fresh, lean=weights.lumpy), after.fresh)
    first, second = (
        race([partial(load(threads=threads), feed)], seconds=seconds / 2, threads=threads)[0] for load in loads
    )
    return summary(first, second, batch=batch)


def _opened(model: Model, threads: int) -> LoadedModel:
    """Return a model in its runtime: the open session where there is one."""
    return _sessions(model).runner(threads)


def _sessions(model: Model) -> Sessions:
    """Return the sessions of a model; of one without, new ones in ONNX Runtime that stay closed between uses."""
    return model if isinstance(model, Sessions) else Sessions(model, keep=False)


def timing_note(weights: Weights) -> str | None:
    """Return how the timing of large models differs from the usual timing; None if it does not."""
    if weights.lumpy:
        return (
            "float was timed on weights that are not packed, because one of them is more than a fifth of the model: "
            "on several rows at once it may be faster"
        )
    return "float and int8 were timed one after the other: together they are too large" if weights.large else None

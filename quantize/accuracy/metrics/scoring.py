"""A model's score in a metric over data, with the contributions of the items, which allow paired comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from .... import RequantError
from ....calibration.data.samples import DataError, Sample
from ....calibration.data.sources import Source
from ....calibration.model.session import Array, ModelSource
from ....system.printable import number_of
from ...runtime.as_file import as_file
from ...runtime.own_state import OwnState
from ...runtime.progress import Progress, silent
from ...runtime.runtimes import STOCK, LoadedModel, Runtime
from ...runtime.session import Runner
from ..classes import Outputs
from .heads import Heads, common_heads, head_note, heads_for
from .named import Metric, own_value

ROOM = 2**29  # bytes of the reference's outputs to keep for the next model
MOST = 2**22  # with more items, the items of one entry are added up
NOTHING: Mapping[str, Array] = {}
NO_LABELS = "without labels, the next tokens of the input count, with padding that no attention_mask masks"


@dataclass(frozen=True, slots=True)
class Score:
    """A model's score in a metric over data.

    Attributes:
        metric: The metric.
        value: The score, in the metric's unit.
        parts: float64 (k, c), the contribution of each item; None if unknown.
        rows: int64 (k,), the entry of the data that each item belongs to, counted from 0, ascending; None if each item
            is an entry.
        samples: The number of samples; 0 if the metric ran the model.
        notes: Remarks, a sentence each.
        heads: Of a model with several heads of classes, the contributions and the rows of each one that the labels fit.
    """

    metric: Metric
    value: float
    parts: Array | None = None
    rows: Array | None = None
    samples: int = 0
    notes: tuple[str, ...] = ()
    heads: Heads = field(default_factory=dict)

    @property
    def items(self) -> Array | None:
        """The score of each item, float64 (k,); None if the metric is no mean over items."""
        if self.parts is None or not self.metric.mean:
            return None
        return np.asarray(self.parts[:, 0] / self.parts[:, 1])


class NothingCountsError(RequantError):
    """No item has a label that counts."""


class Scorer:
    """Computes a metric sample by sample."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._parts: list[Array] = []
        self._rows: list[Array] = []
        self._outputs: list[Outputs] = []
        self._labels: list[Array | int | None] = []
        self._labelled = False
        self._items = self._entries = self._samples = 0
        self._heads: dict[str, Scorer] = {}

    def add(self, outputs: Outputs, sample: Sample, reference: Outputs = NOTHING) -> None:
        """Add a sample.

        Args:
            outputs: The outputs of the model.
            sample: The sample, with its label.
            reference: The result of `Metric.kept` for the float model's outputs.

        Raises:
            RequantError: The labels or outputs do not fit the metric.
        """
        check_label(self._metric, sample)
        if self._add_to_heads(outputs, sample):
            return
        self._samples += 1
        self._labelled = self._labelled or sample.label is not None
        if self._metric.items is None:
            self._outputs.append(outputs)
            self._labels.append(sample.label)
            return
        items = self._metric.contributions(outputs, sample, reference)
        self._parts.append(items.parts)
        self._rows.append(items.rows + self._entries)
        self._entries += int(items.rows.max(initial=0)) + 1
        self._items += len(items.parts)
        if self._items > MOST and self._metric.sums:
            self._parts, self._rows = ([part] for part in by_row(*self._joined()))
            self._items = len(self._parts[0])

    def _add_to_heads(self, outputs: Outputs, sample: Sample) -> bool:
        """Add a sample to each head that its labels fit; return False if the outputs have no such choice.

        Raises:
            RequantError: The labels fit no head that the labels before fit.
        """
        first = self._samples == 0 and not self._heads
        if first:
            alone = replace(self._metric, heads=False)
            self._heads = {name: Scorer(alone) for name in heads_for(self._metric, outputs)}
        fitting, errors = {}, []
        for name, scorer in self._heads.items():
            try:
                scorer.add({name: outputs[name]} if name in outputs else {}, sample)
            except RequantError as error:
                errors.append(error)
            else:
                fitting[name] = scorer
        if errors and not fitting and not first:
            raise errors[0]
        self._heads = fitting
        return bool(fitting)

    def _joined(self) -> tuple[Array, Array]:
        """Return the contributions so far, padded to the same number of columns, and their entries."""
        width = max((part.shape[1] for part in self._parts), default=2)
        parts = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in self._parts]
        return np.concatenate(parts), np.concatenate(self._rows)

    def result(self) -> Score:
        """Return the score of the samples so far.

        Raises:
            RequantError: No sample counts, or the user's function fails.
        """
        metric = self._metric
        if self._heads:
            scores = {name: scorer.result() for name, scorer in self._heads.items()}
            return _of_heads(metric, scores)
        if metric.items is None:
            value, parts = own_value(metric, self._outputs, self._labels)
            return Score(metric, value, parts, samples=self._samples)
        parts, rows = self._joined() if self._parts else (np.zeros((0, 2)), np.zeros(0, np.int64))
        if metric.settle is not None:
            parts = metric.settle(parts)
            parts, rows = parts[parts[:, 1] > 0], rows[parts[:, 1] > 0]
        if len(parts) == 0:
            raise NothingCountsError(
                f"{metric.name}: no item of {number_of(self._samples, 'sample')} has a label that counts"
            )
        notes: tuple[str, ...] = ()
        if metric.labels == "used" and not self._labelled:
            notes = (f"{metric.name}: {NO_LABELS}",)
        own = len(np.unique(rows)) == len(rows)
        return Score(metric, metric.of(parts), parts, None if own else rows, self._samples, notes)


def _of_heads(metric: Metric, scores: Mapping[str, Score]) -> Score:
    """Return the score of the first of several heads, which tells that it is judged, with the contributions of all."""
    first = next(iter(scores.values()))
    heads = {name: (each.parts, each.rows) for name, each in scores.items() if each.parts is not None}
    return replace(first, metric=metric, notes=(head_note(metric, [*heads]),), heads=heads)


def by_row(parts: Array, rows: Array) -> tuple[Array, Array]:
    """Return the sums of the contributions of each entry, and the entries."""
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    return np.add.reduceat(parts, starts, axis=0), rows[starts]


def check_label(metric: Metric, sample: Sample) -> None:
    """Check that a sample has a label if the metric needs one.

    Raises:
        DataError: The label is missing.
    """
    if sample.label is None and metric.needs_labels():
        raise DataError(f"{sample.where}: no label, but {metric.name} needs one; agreement and sqnr need none")


def fitted(metric: Metric, first: Sample, outputs: Outputs | None = None) -> Metric:
    """Return the metric for data with this first sample: some metrics compare with the float model without labels.

    Args:
        metric: The metric.
        first: The first sample.
        outputs: The float model's outputs for it, so that a metric that does not fit is refused at once.

    Raises:
        DataError: The label is missing.
        RequantError: The outputs or the label do not fit the metric.
    """
    check_label(metric, first)
    chosen = metric.for_sample(first)
    if outputs is not None and chosen.items is not None:
        Scorer(chosen).add(outputs, first, chosen.kept(outputs, first) if chosen.reference else NOTHING)
    return chosen


class Reference:
    """The part of the float model's outputs that a metric needs, cached up to a number of bytes.

    Several models can be scored on samples of the same data with one reference.
    """

    def __init__(self, metric: Metric, model: ModelSource, *, threads: int = 0, room: int = ROOM) -> None:
        """Prepare the reference; the first call loads the model.

        Args:
            metric: The metric.
            model: The float model.
            threads: Threads inside one operator; 0 leaves the choice to the runtime.
            room: Bytes to keep; other outputs are computed again.
        """
        self._load: Callable[[], Runner] = lambda: Runner(model, threads=threads)
        self._state = OwnState()
        self._run: Runner | None = None
        self.metric = metric
        self._room = room
        self._kept: dict[str, Outputs] = {}

    def __call__(self, sample: Sample) -> Outputs:
        """Return the result of `Metric.kept` for the outputs of a sample.

        Raises:
            RequantError: The model cannot be loaded or run.
        """
        if sample.where in self._kept:
            return self._kept[sample.where]
        self._run = self._run or self._load()
        needed = self.metric.kept(self._state.run(self._run, sample), sample)
        size = sum(getattr(value, "nbytes", 0) for value in needed.values())
        if size <= self._room:
            self._kept[sample.where] = needed
            self._room -= size
        return needed


Against: TypeAlias = "Reference | ModelSource | None"


def score(
    metric: Metric,
    model: ModelSource,
    data: Source,
    *,
    reference: Against = None,
    progress: Progress = silent,
    threads: int = 0,
    runtime: Runtime = STOCK,
) -> Score:
    """Run a model over data once, sample by sample, and return its score. Over sequences it carries its own state.

    Only a user's function gets all outputs at once; for other metrics they are not kept.

    Args:
        metric: The metric, from `metric_named`.
        model: The model.
        data: The data, with labels if the metric needs them.
        reference: The float model, or a `Reference` that keeps its outputs for the next call; for metrics that compare
            with the float model.
        progress: Called with a stage, the part that is done, and the total (None: unknown).
        threads: Threads inside one operator; 0 leaves the choice to the runtime.
        runtime: What runs the model; the reference runs in ONNX Runtime.

    Raises:
        RequantError: The model cannot be loaded or run, labels are missing or do not fit, or the metric fails; the
            message names the sample.
    """
    if metric.runs_models:
        with as_file(model) as path:
            value, parts = own_value(metric, path)
        return Score(metric, value, parts)
    scorer, against, state = Scorer(metric), _reference(metric, reference), OwnState()
    run: LoadedModel | None = None
    for count, sample in enumerate(data, 1):
        check_label(metric, sample)  # before the first run
        if run is None:
            metric = fitted(metric, sample)
            scorer, against = Scorer(metric), _reference(metric, reference)
            run = runtime.open(model, threads=threads)
        expected = NOTHING if against is None else against(sample)
        scorer.add(state.run(run, sample), sample, expected)
        progress(metric.name, count, data.length)
    return scorer.result()


def _reference(metric: Metric, given: Against) -> Reference | None:
    """Return the reference of a metric; None if the metric needs none.

    Raises:
        RequantError: The metric needs a reference, and there is none.
    """
    if not metric.reference:
        return None
    if given is None:
        raise RequantError(f"{metric.name} compares outputs with the outputs of the float model; give a float model")
    return given if isinstance(given, Reference) else Reference(metric, given, room=0)  # used once


def of_reference(scored: Score) -> Score:
    """Return the float model's own score in a metric that compares with the float model, on the same items.

    Raises:
        RequantError: The metric has no reference.
    """
    perfect = scored.metric.perfect
    if perfect is None or scored.parts is None:
        raise RequantError(f"{scored.metric.name} does not compare with the float model")
    parts = perfect(scored.parts)
    return replace(scored, value=scored.metric.of(parts), parts=parts)


def _has_items(score: Score) -> bool:
    """Return whether a score has the scores of at least one item."""
    return score.parts is not None and len(score.parts) > 0


def join(scores: Sequence[Score]) -> Score:
    """Return the score over consecutive pieces of data, from the scores on the pieces.

    Raises:
        RequantError: There are no scores, they are in several metrics, or a piece has no items.
    """
    if not scores or any(not _has_items(each) or each.metric.name != scores[0].metric.name for each in scores):
        raise RequantError("only scores in one metric, with the scores of items, can be joined")
    if any(each.heads for each in scores):
        return _join_heads(scores)
    rows, first = [], 0
    for each in scores:
        assert each.parts is not None
        own = np.arange(len(each.parts)) if each.rows is None else each.rows
        rows.append(own + first)
        first = int(rows[-1][-1]) + 1
    width = max(each.parts.shape[1] for each in scores if each.parts is not None)
    padded = [np.pad(s.parts, ((0, 0), (0, width - s.parts.shape[1]))) for s in scores if s.parts is not None]
    parts, entries = np.concatenate(padded), np.concatenate(rows)
    own_rows = all(each.rows is None for each in scores)
    notes = tuple(dict.fromkeys(note for each in scores for note in each.notes))
    samples = sum(each.samples for each in scores)
    metric = scores[0].metric
    return Score(metric, metric.of(parts), parts, None if own_rows else entries, samples, notes)


def _join_heads(scores: Sequence[Score]) -> Score:
    """Return `join` of scores of a model with several heads: of each head that the labels of all pieces fit.

    Raises:
        RequantError: The labels of all pieces together fit no head.
    """
    metric, names = scores[0].metric, common_heads([each.heads for each in scores])
    if not names:
        raise RequantError(f"{metric.name}: no output has classes that fit the labels of all samples")
    joined = {}
    for name in names:
        pieces = [(each, *each.heads[name]) for each in scores]
        joined[name] = join([replace(each, parts=part, rows=rows, heads={}) for each, part, rows in pieces])
    return _of_heads(metric, joined)

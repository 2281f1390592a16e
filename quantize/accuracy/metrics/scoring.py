"""A model's score in a metric over data, with what its items contribute, so that two models can be paired."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from .... import RequantError
from ....calibration.samples import DataError, Sample
from ....calibration.session import Array, ModelSource, Serialized
from ....calibration.sources import Source
from ...runtime.progress import Progress, silent
from ...runtime.session import Runner
from ..outputs import Outputs
from .named import Metric, ideal, own_value

ROOM = 2**29  # bytes of the reference's outputs that are kept for the next model
MOST = 2**22  # items, above which those of one entry are added up
NOTHING: Mapping[str, Array] = {}


@dataclass(frozen=True, slots=True)
class Score:
    """A model's score in a metric over data.

    Attributes:
        metric: The metric.
        value: The score, in the metric's unit.
        parts: float64 (k, c), what each item contributes; None where that is not known.
        rows: int64 (k,), the entry of the data, counted from 0, that each item is of, ascending; None where each item
            is an entry of its own.
        samples: How many samples were run; 0 where the metric ran the model itself.
        notes: What should be known of it, a sentence each.
    """

    metric: Metric
    value: float
    parts: Array | None = None
    rows: Array | None = None
    samples: int = 0
    notes: tuple[str, ...] = ()

    @property
    def items(self) -> Array | None:
        """The score of each item, float64 (k,); None where the metric is not the mean of scores of items."""
        if self.parts is None or not self.metric.mean:
            return None
        return np.asarray(self.parts[:, 0] / self.parts[:, 1])


class NothingCountsError(RequantError):
    """No item has a label that counts."""


class Scorer:
    """Adds up a metric sample by sample."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._parts: list[Array] = []
        self._rows: list[Array] = []
        self._outputs: list[Outputs] = []
        self._labels: list[Array | int | None] = []
        self._labelled = False
        self._items = self._entries = self._samples = 0

    def add(self, outputs: Outputs, sample: Sample, reference: Outputs = NOTHING) -> None:
        """Take a sample into account.

        Args:
            outputs: What the model gave for it.
            sample: The sample, with its label.
            reference: What `Metric.keep` left of the float model's outputs.

        Raises:
            RequantError: The labels or outputs are not what the metric wants.
        """
        check_label(self._metric, sample)
        self._samples += 1
        self._labelled = self._labelled or sample.label is not None
        if self._metric.items is None:
            self._outputs.append(outputs)
            self._labels.append(sample.label)
            return
        found = self._metric.items(outputs, sample, reference)
        self._parts.append(found.parts)
        self._rows.append(found.rows + self._entries)
        self._entries += int(found.rows.max(initial=0)) + 1
        self._items += len(found.parts)
        if self._items > MOST and self._metric.sums:
            self._parts, self._rows = ([part] for part in by_row(*self._joined()))
            self._items = len(self._parts[0])

    def _joined(self) -> tuple[Array, Array]:
        """Return the items so far, with as many columns as the widest of them has."""
        width = max((part.shape[1] for part in self._parts), default=2)
        parts = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in self._parts]
        return np.concatenate(parts), np.concatenate(self._rows)

    def result(self) -> Score:
        """Return the score of the samples so far.

        Raises:
            RequantError: There were none that count, or the user's function fails.
        """
        metric = self._metric
        if metric.items is None:
            value, parts = own_value(metric, self._outputs, self._labels)
            return Score(metric, value, parts, samples=self._samples)
        parts, rows = self._joined() if self._parts else (np.zeros((0, 2)), np.zeros(0, np.int64))
        if len(parts) == 0:
            raise NothingCountsError(f"{metric.name}: no item of {self._samples} samples has a label that counts")
        notes: tuple[str, ...] = ()
        if metric.labels == "used" and not self._labelled:
            notes = (f"{metric.name}: without labels, the tokens of the input, padding included, are what is foretold",)
        own = len(np.unique(rows)) == len(rows)
        return Score(metric, metric.of(parts), parts, None if own else rows, self._samples, notes)


def by_row(parts: Array, rows: Array) -> tuple[Array, Array]:
    """Return the sums of contributions that are of the same entry, and the entries."""
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    return np.add.reduceat(parts, starts, axis=0), rows[starts]


def check_label(metric: Metric, sample: Sample) -> None:
    """Refuse a sample without the label that a metric wants.

    Raises:
        DataError: It has none.
    """
    if sample.label is None and metric.needs_labels():
        raise DataError(f"{sample.where}: no label, which {metric.name} wants; agreement and sqnr need none")


class Reference:
    """What a metric wants of the float model's outputs, kept as far as there is room.

    It serves any number of models that are scored on samples of the same data.
    """

    def __init__(self, metric: Metric, model: ModelSource, *, threads: int = 0, room: int = ROOM) -> None:
        """Load the model when it is wanted first.

        Args:
            metric: The metric.
            model: The float model.
            threads: Threads inside one operator; 0 leaves the choice to the runtime.
            room: Bytes that may be kept; what does not fit is computed again.
        """
        self._load: Callable[[], Runner] = lambda: Runner(model, threads=threads)
        self._run: Runner | None = None
        self.metric = metric
        self._room = room
        self._kept: dict[str, Outputs] = {}

    def __call__(self, sample: Sample) -> Outputs:
        """Return what `Metric.keep` leaves of the outputs for a sample.

        Raises:
            RequantError: The model cannot be loaded or run.
        """
        if sample.where in self._kept:
            return self._kept[sample.where]
        self._run = self._run or self._load()
        found = self.metric.keep(self._run(sample.feed), sample.where)
        size = sum(getattr(value, "nbytes", 0) for value in found.values())
        if size <= self._room:
            self._kept[sample.where] = found
            self._room -= size
        return found


Against: TypeAlias = "Reference | ModelSource | None"


def score(
    metric: Metric,
    model: ModelSource,
    data: Source,
    *,
    reference: Against = None,
    progress: Progress = silent,
    threads: int = 0,
) -> Score:
    """Run a model over data once, sample by sample, and return its score.

    Outputs are kept for a user's function only, which is called with all of them.

    Args:
        metric: The metric, from `metric_named`.
        model: The model.
        data: The data, with labels where the metric wants them.
        reference: The float model, or a `Reference` to it that keeps its outputs for the next call; for metrics that
            compare with it.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).
        threads: Threads inside one operator; 0 leaves the choice to the runtime.

    Raises:
        RequantError: The model cannot be loaded or run, labels are missing or do not fit, or the metric fails; the
            message names the sample.
    """
    if metric.own is not None and metric.own.takes_model:
        with as_file(model) as path:
            value, parts = own_value(metric, path)
        return Score(metric, value, parts)
    against = _reference(metric, reference)
    scorer, run = Scorer(metric), None
    for count, sample in enumerate(data, 1):
        check_label(metric, sample)  # before the first run
        run = run or Runner(model, threads=threads)
        expected = NOTHING if against is None else against(sample)
        scorer.add(run(sample.feed), sample, expected)
        progress(metric.name, count, data.length)
    return scorer.result()


def _reference(metric: Metric, given: Against) -> Reference | None:
    """Return the outputs that a metric compares with; None where it compares with none.

    Raises:
        RequantError: It compares, and there is nothing to compare with.
    """
    if not metric.reference:
        return None
    if given is None:
        raise RequantError(f"{metric.name} compares outputs with those of the float model, which is not given")
    return given if isinstance(given, Reference) else Reference(metric, given, room=0)  # wanted once


def of_reference(found: Score) -> Score:
    """Return what the float model has in a metric of which it is the reference, on the same items.

    Raises:
        RequantError: The metric has no reference.
    """
    best = ideal(found.metric)
    if best is None or found.parts is None:
        raise RequantError(f"{found.metric.name} is of one model alone")
    parts = found.parts.copy()
    parts[:, (1 if found.metric.unit == "dB" else 0) :: 2] = 0.0
    if found.metric.unit != "dB":
        parts[:, 0] = parts[:, 1]
    return replace(found, value=best, parts=parts)


def join(scores: Sequence[Score]) -> Score:
    """Return the score over consecutive pieces of data, from the scores of a model on each.

    Raises:
        RequantError: There are none, they are of several metrics, or a piece has no items.
    """
    if not scores or any(found.parts is None or found.metric.name != scores[0].metric.name for found in scores):
        raise RequantError("only scores of one metric that is made of items can be joined")
    rows, first = [], 0
    for found in scores:
        assert found.parts is not None
        own = np.arange(len(found.parts)) if found.rows is None else found.rows
        rows.append(own + first)
        first = int(rows[-1][-1]) + 1
    width = max(found.parts.shape[1] for found in scores if found.parts is not None)
    padded = [np.pad(s.parts, ((0, 0), (0, width - s.parts.shape[1]))) for s in scores if s.parts is not None]
    parts, each = np.concatenate(padded), np.concatenate(rows)
    own_rows = all(found.rows is None for found in scores)
    notes = tuple(dict.fromkeys(note for found in scores for note in found.notes))
    samples = sum(found.samples for found in scores)
    metric = scores[0].metric
    return Score(metric, metric.of(parts), parts, None if own_rows else each, samples, notes)


@contextmanager
def as_file(model: ModelSource, folder: Path | None = None) -> Iterator[str]:
    """Return the path of a model; one in memory is written for a while, into a folder of `folder`.

    Raises:
        RequantError: There is no such file.
    """
    if not isinstance(model, (bytes, Serialized)):
        if not Path(model).is_file():
            raise RequantError(f"{os.fspath(model)}: no such file")
        yield os.fspath(model)
        return
    with tempfile.TemporaryDirectory(prefix="requant-", dir=folder) as scratch:
        path = os.path.join(scratch, "model.onnx")
        if isinstance(model, bytes) or (model.folder is None and not model.weights):
            Path(path).write_bytes(model if isinstance(model, bytes) else model.data)
        else:
            _write(model, path)
        yield path


def _write(model: Serialized, path: str) -> None:
    """Write a model with its weights beside it."""
    import onnx
    from onnx import external_data_helper, numpy_helper

    proto = onnx.load_model_from_string(model.data)
    for tensor in proto.graph.initializer:
        if tensor.name in model.weights:
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(model.weights[tensor.name]), tensor.name))
    if model.folder is not None:
        external_data_helper.load_external_data_for_model(proto, os.fspath(model.folder))
    onnx.save_model(proto, path, save_as_external_data=True)

"""`compare_models`: what an INT8 model costs in accuracy and gains in time, item by item and run by run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ... import RequantError
from ...calibration.samples import Sample
from ...calibration.session import InputSpec, input_specs, open_session
from ...calibration.sources import DataSource, Source, open_source
from ..model.files import Weights, load_model
from ..runtime.inputs import stacked
from ..runtime.progress import Progress, silent
from ..runtime.timing import Latency, latency_json
from .drop import Versus, versus
from .metrics import Metric, Scorer, check_label, metric_named, of_reference, score
from .outputs import Accuracy, Outputs, accuracy_json
from .pair import judge_pair, time_pair

Model = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Float against INT8 on data.

    Attributes:
        accuracy: Agreement, broken and fixed items, SQNR.
        latencies: At batch 1 and, if asked for, at a larger batch.
        metric: Float against INT8 in the metric that was asked for; None without.
    """

    accuracy: Accuracy
    latencies: tuple[Latency, ...]
    metric: Versus | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; what needs labels is null without them."""
        return {
            **accuracy_json(self.accuracy),
            "samples": self.accuracy.samples,
            "metric": self.metric and self.metric.to_json(),
            "latency": latency_json(self.latencies[0]),
            "latency_at_batch": latency_json(self.latencies[1]) if len(self.latencies) > 1 else None,
        }


def compare_models(
    float_model: Model,
    int8_model: Model,
    data: DataSource,
    *,
    batch: int = 1,
    threads: int = 1,
    progress: Progress = silent,
    metric: str | Metric | None = None,
) -> Comparison:
    """Compare two models of the same inputs and outputs on the same data.

    Args:
        float_model: Path of the original.
        int8_model: Path of the quantized model.
        data: A data source; with labels, broken and fixed items are counted.
        batch: Items per run for a second measurement of latency; 1 for none.
        threads: Threads inside one operator for the latency; 0 leaves the choice to the runtime.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).
        metric: What both are scored in besides; see `requant.quantize.accuracy.metrics.metric_named`.

    Raises:
        RequantError: A model cannot be loaded, the two do not belong together, or the data do not fit.
    """
    if batch < 1:
        raise RequantError(f"batch must be at least 1, not {batch}")
    chosen = metric_named(metric) if isinstance(metric, str) else metric
    source = common_source(float_model, int8_model, data)
    first = next(iter(source))
    if chosen is not None:
        check_label(chosen, first)
    feeds = [(1, first), *([(batch, stacked(source, batch))] if batch > 1 else [])]
    models, weights = (Path(float_model), Path(int8_model)), Weights.of(load_model(float_model))
    told, pair = partial(_tell, progress, source), None if chosen is None else _Pair(chosen)
    watch = None if pair is None else pair.add
    accuracy = judge_pair(*models, source, told, weights=weights, watch=watch)
    compared = None if pair is None else pair.result(models, source)
    found = []
    for size, sample in feeds:
        progress(f"time at batch {size}", 0, None)
        found.append(time_pair(*models, sample.feed, weights=weights, threads=threads, batch=size))
    return Comparison(accuracy, tuple(found), compared)


def _tell(progress: Progress, source: Source, done: int) -> None:
    """Say how far the comparison is."""
    progress("compare", done, source.length)


class _Pair:
    """Scores two models in a metric while they are compared."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._before, self._after = Scorer(metric), Scorer(metric)

    def add(self, before: Outputs, after: Outputs, sample: Sample) -> None:
        """Take the outputs for a sample into account."""
        metric = self._metric
        if metric.own is not None and metric.own.takes_model:
            return
        if metric.reference:
            self._after.add(after, sample, metric.keep(before, sample.where))
        else:
            self._before.add(before, sample)
            self._after.add(after, sample)

    def result(self, models: Sequence[Path], source: Source) -> Versus:
        """Return how the two compare, when all samples were added."""
        metric = self._metric
        if metric.own is not None and metric.own.takes_model:
            before, after = (score(metric, model, source) for model in models)
        else:
            after = self._after.result()
            before = of_reference(after) if metric.reference else self._before.result()
        return versus(before, after)


def common_source(float_model: Model, int8_model: Model, data: DataSource) -> Source:
    """Open the data for two models that take the same inputs and give the same outputs."""
    return open_source(data, common_inputs(float_model, int8_model))


def common_inputs(float_model: Model, int8_model: Model) -> tuple[InputSpec, ...]:
    """Return the inputs of two models that take the same inputs and give the same outputs.

    Raises:
        RequantError: A model cannot be loaded, or the two do not belong together.
    """
    for model in (float_model, int8_model):
        load_model(model)  # what is wrong with a file is told in the same words by every command
    sessions = [open_session(Path(model), lean=True) for model in (float_model, int8_model)]
    inputs = [input_specs(session) for session in sessions]
    names = [{(spec.name, str(spec.dtype)) for spec in specs} for specs in inputs]
    outputs = [{output.name for output in session.get_outputs()} for session in sessions]
    for kind, (left, right) in (("inputs", names), ("outputs", outputs)):
        if left != right:
            differing = ", ".join(sorted(map(str, left ^ right)))
            raise RequantError(f"{int8_model}: has other {kind} than {float_model}: {differing}")
    return inputs[0]

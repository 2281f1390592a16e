"""`compare_models`: what an INT8 model costs in accuracy and gains in time, item by item and run by run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import RequantError
from ..calibration.session import input_specs, open_session
from ..calibration.sources import DataSource, Source, open_source
from .accuracy import Accuracy
from .data import stacked
from .files import Weights, load_model
from .progress import Progress, silent
from .result import accuracy_json, latency_json
from .runtime.pair import judge_pair, time_pair
from .runtime.timing import Latency

Model = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Float against INT8 on data.

    Attributes:
        accuracy: Agreement, broken and fixed items, SQNR.
        latencies: At batch 1 and, if asked for, at a larger batch.
    """

    accuracy: Accuracy
    latencies: tuple[Latency, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; what needs labels is null without them."""
        labelled = self.accuracy.labelled
        return {
            **accuracy_json(self.accuracy),
            "samples": self.accuracy.samples,
            "items": labelled and labelled.items,
            "float_accuracy": labelled and labelled.float_accuracy,
            "int8_accuracy": labelled and labelled.int8_accuracy,
            "broken": labelled and labelled.broken,
            "fixed": labelled and labelled.fixed,
            "p_value": labelled and labelled.p_value,
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
) -> Comparison:
    """Compare two models of the same inputs and outputs on the same data.

    Args:
        float_model: Path of the original.
        int8_model: Path of the quantized model.
        data: A data source; with labels, broken and fixed items are counted.
        batch: Items per run for a second measurement of latency; 1 for none.
        threads: Threads inside one operator for the latency; 0 leaves the choice to the runtime.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: A model cannot be loaded, the two do not belong together, or the data do not fit.
    """
    if batch < 1:
        raise RequantError(f"batch must be at least 1, not {batch}")
    source = _common_source(float_model, int8_model, data)
    first = next(iter(source))
    feeds = [(1, first), *([(batch, stacked(source, batch))] if batch > 1 else [])]
    models, weights = (Path(float_model), Path(int8_model)), Weights.of(load_model(float_model))
    accuracy = judge_pair(*models, source, lambda done: progress("compare", done, source.length), weights=weights)
    found = []
    for size, sample in feeds:
        progress(f"time at batch {size}", 0, None)
        found.append(time_pair(*models, sample.feed, weights=weights, threads=threads, batch=size))
    return Comparison(accuracy, tuple(found))


def _common_source(float_model: Model, int8_model: Model, data: DataSource) -> Source:
    """Open the data for two models that take the same inputs and give the same outputs."""
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
    return open_source(data, inputs[0])

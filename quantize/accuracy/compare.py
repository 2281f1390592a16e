"""`compare_models`: the accuracy that an INT8 model loses, and the time that it saves."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ... import RequantError
from ...calibration.data.sources import DataSource, Source, open_source
from ...calibration.model.session import InputSpec, input_specs, open_session
from ...calibration.model.state import Link, summary
from ...system.given import MOST_ITEMS, check_function, check_kind, check_path, checked_integer
from ...transforms.graphs.inference import outputs_of
from ...transforms.remove_dynamic_quantization import count_at_run_time
from ..model.files import Weights, load_model, size_on_disk
from ..model.state import passed_on, possible_state
from ..runtime.agreement import agreeing
from ..runtime.loads import Load, loads_of
from ..runtime.progress import COMPARE, Progress, silent
from ..runtime.runtimes import PLAIN, Identity, Sessions, Setting
from ..runtime.timing import Latency, latency_json, load_name
from .drop import Versus, versus
from .given_choices import layered_choices, outputs_behind
from .metrics import Metric, fitted, metric_named, of_probabilities
from .output_kinds import with_kinds_of
from .outputs import Accuracy, accuracy_json
from .pair import PairScorer, judge_pair, time_models
from .probabilities import probability_outputs
from .promise import LEAST_DB
from .randomness import randomness
from .selected_outputs import chosen_outputs
from .shown import as_html, as_text
from .terms import Terms
from .verdict import (
    Row,
    accuracy_rows,
    answers_lost,
    data_row,
    latency_rows,
    metric_rows,
    runtime_rows,
    size_row,
    verdict,
    versus_lost,
)

Model = str | os.PathLike[str]
OWN_ERROR = (
    "the first model computes ranges at run time in {} of its operators and rounds its own activations: its error is "
    "part of the difference; requant quantize compares with its float weights instead"
)
ORDER = (
    "the model chooses {!r} by its own scores, and the last bit of a score changes the order: its SQNR says little; "
    "give a metric, such as map"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Float against INT8 on data.

    Attributes:
        accuracy: Agreement, broken and fixed items, SQNR.
        latencies: At batch 1 and, if requested, at a larger batch; of a decoder, in both regimes.
        metric: The comparison in the requested metric; None without one.
        state: The state that each model carried from sample to sample.
        data: A description of the data.
        float_bytes: Size of the float model with its external data.
        int8_bytes: Size of the INT8 model with its external data.
        runtime: What ran the INT8 model and timed both, with its version.
        notes: What must be known of the numbers.
    """

    accuracy: Accuracy
    latencies: tuple[Latency, ...]
    metric: Versus | None = None
    state: tuple[Link, ...] = ()
    data: str = ""
    float_bytes: int = 0
    int8_bytes: int = 0
    runtime: Identity | None = None
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The comparison in one sentence."""
        where = self.measured_on
        lost = answers_lost(self.accuracy, where) if self.metric is None else versus_lost(self.metric, where)
        return verdict(self.latencies, (self.float_bytes, self.int8_bytes), lost)

    @property
    def measured_on(self) -> str:
        """The data in a few words, without their folder."""
        return self.data.rpartition("/")[2] or self.data

    def rows(self) -> list[Row]:
        """Return the table: a name and a value in each row."""
        where = self.measured_on
        metric = () if self.metric is None else metric_rows(self.metric, where)
        shown = "" if self.metric is None else self.metric.metric.name
        rows = [*runtime_rows(self.runtime), data_row(self.accuracy.samples, self.data), *metric]
        rows += accuracy_rows(self.accuracy, where, shown)
        rows += (row for timed in self.latencies for row in latency_rows(timed))
        rows.append(size_row(self.float_bytes, self.int8_bytes))
        rows += [("state", ", ".join(summary(self.state)))] if self.state else []
        return rows + [("note", note) for note in self.notes]

    def __str__(self) -> str:
        """Return the verdict and the table, as plain text."""
        return as_text(self.verdict, self.rows())

    def _repr_html_(self) -> str:
        """Return the verdict, a plot of the latencies and the table, for a notebook."""
        return as_html(self.verdict, self.rows(), self.latencies)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; values that need labels are null without labels."""
        return {
            "verdict": self.verdict,
            "data": self.data,
            "runtime": "" if self.runtime is None else str(self.runtime),
            **accuracy_json(self.accuracy),
            "samples": self.accuracy.samples,
            "state": list(map(str, self.state)),
            "metric": self.metric and self.metric.to_json(),
            "notes": list(self.notes),
            "size": {"float_bytes": self.float_bytes, "int8_bytes": self.int8_bytes},
            "latency": latency_json(self.latencies[0]),
            "latency_at_batch": next(map(latency_json, _at_larger_batch(self.latencies)), None),
            **(
                {}
                if self.latencies[0].regime is None
                else {"latencies": [latency_json(each) for each in self.latencies]}
            ),
        }


def compare_models(
    float_model: Model,
    int8_model: Model,
    data: DataSource,
    *,
    batch: int = 1,
    setting: Setting = PLAIN,
    progress: Progress = silent,
    metric: str | Metric | None = None,
) -> Comparison:
    """Compare two models with the same inputs and outputs on the same data.

    Args:
        float_model: The path of the float model.
        int8_model: The path of the INT8 model.
        data: A data source; with labels, broken and fixed items are counted.
        batch: Items per run for a second measurement of latency; 1 for none.
        setting: How the models run. The outputs are compared with the outputs of the float model in ONNX Runtime.
        progress: Called with a stage, the part that is done, and the total (None: unknown).
        metric: A metric for both models; see `requant.quantize.accuracy.metrics.metric_named`.

    Raises:
        RequantError: A model cannot be loaded, their inputs or outputs differ, or the data do not fit.
    """
    _check_arguments(float_model, int8_model, setting, progress, metric)
    batch = checked_integer(batch, "batch", 1, MOST_ITEMS)
    chosen = metric_named(metric) if isinstance(metric, str) else metric
    source = common_source(float_model, int8_model, data)
    first = next(iter(source))
    if chosen is not None:
        chosen = fitted(chosen, first)
    loads = loads_of(source, (1, batch) if batch > 1 else (1,))
    models, loaded = (Path(float_model), Path(int8_model)), load_model(float_model)
    weights = Weights.of(loaded)
    runtime = setting.opened()
    timed = tuple(Sessions(model, keep=False, runtime=runtime) for model in models)
    probable = probability_outputs(loaded)
    scorer = None if chosen is None else PairScorer(of_probabilities(chosen, probable))
    accuracy = judge_pair(
        models[0],
        timed[1],
        source,
        partial(_report, progress, source),
        weights=weights,
        watch=None if scorer is None else scorer.add,
        terms=Terms("refuse" if scorer is None else "skip", probable),  # a metric has labels of its own
    )
    accuracy = with_kinds_of(loaded, accuracy, outputs_of(loaded))
    if accuracy.other_lengths and not weights.large:
        runners = [each.runner(setting.threads) for each in timed]
        loads = tuple(agreeing(load, source, runners) for load in loads)
    drawn = randomness(loaded, partial(timed[0].runner, 1), first.feed)
    compared = None if scorer is None else versus(*scorer.result(models, source))
    return Comparison(
        accuracy,
        tuple(_times(timed, loads, weights, setting, progress)),
        compared,
        source.links,
        source.description,
        float_bytes=size_on_disk(models[0]),
        int8_bytes=size_on_disk(models[1]),
        runtime=runtime.identity,
        notes=tuple(filter(None, [drawn.note if drawn else "", *_notes(loaded, source, accuracy)])),
    )


def _check_arguments(
    float_model: Model, int8_model: Model, setting: Setting, progress: Progress, metric: str | Metric | None
) -> None:
    """Check the types of the arguments of `compare_models`.

    Raises:
        RequantError: One is of another type.
    """
    for each, what in ((float_model, "the float model"), (int8_model, "the INT8 model")):
        check_path(each, what)
    if metric is not None:
        check_kind(metric, (str, Metric), "the metric must be a name, FILE.py:NAME or a Metric")
    check_kind(setting, Setting, "the setting must be a Setting")
    check_function(progress, "progress")


def _at_larger_batch(latencies: Sequence[Latency]) -> Sequence[Latency]:
    """Return the latencies at the batch size that was asked for, behind those of a sample; a decoder has two each."""
    return latencies[1 if latencies[0].regime is None else 2 :]


def _times(
    models: Sequence[Sessions], loads: Sequence[Load], weights: Weights, setting: Setting, progress: Progress
) -> Iterator[Latency]:
    """Time the float model against the INT8 model on each load."""
    for load in loads:
        progress(f"time at {load_name(load.batch, load.regime)}", 0, None)
        found = time_models(models, load.feed, weights=weights, threads=setting.threads, batch=load.batch)
        yield replace(found, regime=load.regime, shapes=load.shapes, sample=load.sample)


def _notes(model: ir.Model, source: Source, accuracy: Accuracy) -> Iterator[str]:
    """Say what must be known of the numbers.

    Args:
        model: The float model.
        source: The data.
        accuracy: The comparison of the outputs.
    """
    at_run_time = count_at_run_time(model)
    if at_run_time:
        yield OWN_ERROR.format(at_run_time)
    by_choice = {*chosen_outputs(model), *outputs_behind(model, layered_choices(model))}
    for name, value in accuracy.sqnr_db.items():
        if name in by_choice and value < LEAST_DB:
            yield ORDER.format(name)
    yield from possible_state(source, passed_on(model))


def _report(progress: Progress, source: Source, done: int) -> None:
    """Report the number of samples so far."""
    progress(COMPARE, done, source.length)


def common_source(float_model: Model, int8_model: Model, data: DataSource) -> Source:
    """Open the data for two models with the same inputs and outputs."""
    inputs = common_inputs(float_model, int8_model)
    large = Weights.of(load_model(float_model)).large
    return open_source(data, inputs, open_session(Path(float_model), lean=True) if large else Path(float_model))


def _shown(port: str | tuple[str, str]) -> str:
    """Return an output, or an input with its type, as text."""
    return repr(port) if isinstance(port, str) else f"{port[0]!r} ({port[1]})"


def common_inputs(float_model: Model, int8_model: Model) -> tuple[InputSpec, ...]:
    """Return the inputs of two models with the same inputs and outputs.

    Raises:
        RequantError: A model cannot be loaded, or the inputs or outputs differ.
    """
    for model in (float_model, int8_model):
        load_model(model)  # every command reports a bad file in the same words
    sessions = [open_session(Path(model), lean=True) for model in (float_model, int8_model)]
    inputs = [input_specs(session) for session in sessions]
    names = [{(spec.name, str(spec.dtype)) for spec in specs} for specs in inputs]
    outputs = [{output.name for output in session.get_outputs()} for session in sessions]
    for kind, (left, right) in (("inputs", names), ("outputs", outputs)):
        if left != right:
            words = [
                f"{verb} {', '.join(sorted(map(_shown, ports)))}"
                for verb, ports in (("it has", right - left), ("it lacks", left - right))
                if ports
            ]
            raise RequantError(f"{int8_model}: has other {kind} than {float_model}: {'; '.join(words)}")
    return inputs[0]

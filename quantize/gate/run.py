"""`check`: compare a pair of models with its baseline, and name the layers that explain a loss."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ... import RequantError
from ...calibration.data.samples import Sample
from ...calibration.data.sources import DataSource, Source
from ...calibration.model.identity import fingerprint
from ...calibration.model.state import Link
from ...system.apart import PathLike
from ...system.given import MOST_ITEMS, check_function, check_kind, checked_integer, normalise_fields, or_default
from ...system.printable import printable
from ...system.regular import check_file
from ...transforms.graphs.inference import outputs_of
from ..accuracy.classes import open_rows
from ..accuracy.compare import common_inputs
from ..accuracy.metrics import Metric, fitted, metric_named, of_probabilities
from ..accuracy.probabilities import probability_outputs
from ..model.files import load_model
from ..runtime.inputs import open_data
from ..runtime.machine import Machine
from ..runtime.progress import Progress, silent
from ..runtime.runtimes import PLAIN, Setting
from ..runtime.session import Runner
from .baseline import UPDATE, Baseline, Measured, Tolerances, tolerances
from .blame import changed_layers, explained
from .judge import Line, Status, floor_of, judge
from .layers import layers_of, stored_bytes, tensor_noise
from .lock import check_writable, is_baseline, load_baseline, save_baseline
from .measure import Pair, Timing, measure_pair, usual_metrics, why_incomparable


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of `check`.

    Attributes:
        metrics: Names of metrics, see `metric_named`. Empty: the metrics of the baseline; without a baseline,
            agreement, SQNR, and top-1 if the data have labels.
        lower: Lower values of metrics that are functions are better.
        tolerances: Tolerances by name of a metric or key of `LIMITS`; the baseline gives the others.
        samples: Number of samples, evenly spaced in the data; None: as in the baseline, or all.
        batch: Items per run while the latency is measured; None: as in the baseline, or 1.
        threads: Threads inside one operator while the latency is measured; with 0 the runtime chooses; None: as in
            the baseline, or 1.
        runtime: What runs the INT8 model, and both models while the latency is measured, see `Setting`; None: as in the
            baseline, or ONNX Runtime.
        precision: The type of its float operators, see `Setting`; None: as in the baseline, or its default.
        seconds: Duration of the latency measurement; 0 for none.
    """

    metrics: Sequence[str] = ()
    lower: bool = False
    tolerances: Mapping[str, object] = field(default_factory=dict)
    samples: int | None = None
    batch: int | None = None
    threads: int | None = None
    runtime: str | None = None
    precision: str | None = None
    seconds: float = 2.0

    def __post_init__(self) -> None:
        """Refuse values of another type, and numbers out of range.

        Raises:
            RequantError: There is one.
        """
        normalise_fields(self)
        if isinstance(self.metrics, str):
            raise RequantError(f"metrics must be a sequence of names, not the text {self.metrics!r}")
        for metric in self.metrics or ():
            check_kind(metric, (str, Metric), "a metric must be a name, FILE.py:NAME or a Metric")
        for name, number in (("samples", self.samples), ("batch", self.batch)):
            if number is not None:
                checked_integer(number, name, 1, MOST_ITEMS if name == "batch" else None)
        for name, least in (("threads", self.threads), ("seconds", self.seconds)):
            if least is not None and not 0 <= least < math.inf:
                raise RequantError(f"{name} must be 0 or more, not {least}")
        if self.seconds == 0 and self.tolerances.get("speedup") is not None:
            raise RequantError("a required speedup needs a timing, but seconds is 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of a check.

    Attributes:
        float_model: Path of the float model.
        int8_model: Path of the INT8 model.
        baseline: Path of the baseline.
        lines: The comparisons.
        measured: The measurements.
        updated: Whether the baseline was written; nothing can fail then.
        quantized: `Result.to_json` of the quantization, if the check quantized the model.
        state: The state that each model carried from sample to sample.
    """

    float_model: str
    int8_model: str
    baseline: str
    lines: tuple[Line, ...]
    measured: Measured = field(repr=False)
    updated: bool = False
    quantized: Mapping[str, Any] | None = field(default=None, repr=False)
    state: tuple[Link, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no line fails."""
        return not self.findings

    @property
    def findings(self) -> tuple[Line, ...]:
        """The lines that fail."""
        return tuple(line for line in self.lines if line.status is Status.FAIL)

    def __str__(self) -> str:
        """Return a printable line of text for each finding, or the verdict without findings."""
        texts = [
            printable(f"{line.name}: {line.baseline} -> {line.measured}: {'; '.join((line.reason, *line.layers))}")
            for line in self.findings
        ]
        return "\n".join(texts) or printable(f"{self.int8_model}: as good as {self.baseline}")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "ok": self.ok,
            "float": self.float_model,
            "model": self.int8_model,
            "baseline": self.baseline,
            "updated": self.updated,
            "lines": [line.to_json() for line in self.lines],
            "quantize": None if self.quantized is None else dict(self.quantized),
            "state": list(map(str, self.state)),
        }


def check(
    float_model: PathLike,
    int8_model: PathLike,
    data: DataSource,
    baseline: PathLike = "requant.lock.json",
    *,
    update: bool = False,
    options: CheckOptions | None = None,
    progress: Progress = silent,
) -> Check:
    """Measure a pair of models and compare it with its baseline, or write the baseline.

    Args:
        float_model: Path of the float model.
        int8_model: Path of the INT8 model of this float model.
        data: A data source, with labels if a metric needs them. Do not use the calibration data.
        baseline: Path of the lock file.
        update: Write the baseline. It keeps its metrics and tolerances unless others are given.
        options: See `CheckOptions`.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: A model, the data or the baseline cannot be used, the baseline is for another float model, or a
            metric fails.
    """
    check_function(progress, "progress")
    check_file(int8_model)
    return judged(ready(float_model, data, baseline, update=update, options=options), int8_model, progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A check before there is an INT8 model; everything else is loaded and validated.

    Attributes:
        float_path: Path of the float model.
        float_model: The float model.
        source: The data.
        first: The first sample.
        baseline: Path of the lock file.
        old: The baseline in the lock file; None if there is no file yet.
        metrics: The metrics.
        allowed: The tolerances.
        samples: Number of samples; None for all.
        update: Whether the baseline is written.
        options: The options of the check.
    """

    float_path: Path
    float_model: ir.Model
    source: Source
    first: Sample
    baseline: Path
    old: Baseline | None
    metrics: tuple[Metric, ...]
    allowed: Tolerances
    samples: int | None
    update: bool
    options: CheckOptions

    @property
    def timing(self) -> Timing:
        """How the speed is measured."""
        before = None if self.old is None else self.old.measured.speed
        batch, threads = (1, 1) if before is None else (before.batch, before.machine.threads)
        own = self.options
        setting = replace(self.setting, threads=threads if own.threads is None else own.threads)
        return Timing(own.seconds, batch if own.batch is None else own.batch, setting)

    @property
    def setting(self) -> Setting:
        """What runs the models."""
        return _setting_of(self.options, self.old)


def ready(
    float_model: PathLike,
    data: DataSource,
    baseline: PathLike,
    *,
    update: bool = False,
    options: CheckOptions | None = None,
) -> Ready:
    """Load and validate everything except the INT8 model; see `check`.

    Raises:
        RequantError: The float model, the data, the baseline, a metric or a tolerance cannot be used.
    """
    options = or_default(options, CheckOptions)
    check_kind(update, bool, "update must be True or False")
    old = _baseline_to_replace(baseline) if update else load_baseline(baseline)
    if update:
        check_writable(Path(baseline))
    model = load_model(float_model)
    binding = None if update else old  # an update may be of another model, and in another runtime
    _check_float_model(float_model, model, binding)
    _check_setting(_setting_of(options, old), binding)
    samples = options.samples if options.samples is not None or old is None else old.samples
    source = open_data(float_model, data, samples)
    first = next(iter(source))
    metrics = _chosen_metrics(options, old, update=update)
    if metrics is None:
        metrics = usual_metrics(Path(float_model), first, open_rows(outputs_of(model)))
    kept = {} if old is None else _tolerances_in_use(old.tolerances.to_json(), old, metrics)
    allowed = tolerances({**kept, **options.tolerances}, metrics)
    outputs = Runner(Path(float_model), lean=True)(first.feed)
    probable = probability_outputs(model)
    metrics = [of_probabilities(fitted(metric, first, outputs), probable) for metric in metrics]
    return Ready(
        float_path=Path(float_model),
        float_model=model,
        source=source,
        first=first,
        baseline=Path(baseline),
        old=old,
        metrics=tuple(metrics),
        allowed=allowed,
        samples=samples,
        update=update,
        options=options,
    )


def _baseline_to_replace(baseline: PathLike) -> Baseline | None:
    """Return the baseline that an update replaces; None without one, or if it is damaged or of another version.

    Raises:
        RequantError: The file is no baseline, so that it is not overwritten.
    """
    if not os.path.lexists(baseline):
        return None
    try:
        return load_baseline(baseline)
    except RequantError as error:
        if not is_baseline(baseline):
            raise
        logging.getLogger("requant").warning("requant: %s; it is written anew", error)
        return None


def _check_float_model(path: PathLike, model: ir.Model, baseline: Baseline | None) -> None:
    """Refuse a float model that is not the one of the baseline.

    Raises:
        RequantError: The model is refused.
    """
    if baseline is not None and fingerprint(model) != baseline.measured.float_model:
        raise RequantError(
            f"{baseline.path}: the baseline of another float model than {os.fspath(path)}; {UPDATE} replaces it"
        )


def _check_setting(setting: Setting, baseline: Baseline | None) -> None:
    """Refuse a runtime that is not here, or is not the one of the baseline.

    Raises:
        RequantError: The runtime is refused.
    """
    setting.opened()
    if baseline is not None and setting != baseline.measured.setting:
        before = baseline.measured.setting
        raise RequantError(f"{baseline.path}: measured in {before}, not in {setting}; {UPDATE} measures anew")


def _setting_of(options: CheckOptions, old: Baseline | None) -> Setting:
    """Return what runs the models of a check: as asked for, else as in the baseline, else ONNX Runtime."""
    before = PLAIN if old is None else old.measured.setting
    if options.runtime is not None and options.runtime != before.runtime:
        before = PLAIN
    return Setting(runtime=options.runtime or before.runtime, precision=options.precision or before.precision)


def judged(prepared: Ready, int8_model: PathLike, progress: Progress = silent) -> Check:
    """Measure the INT8 model and compare it with the baseline, or write the baseline; see `check`.

    Raises:
        RequantError: The INT8 model cannot be loaded, fails, or has other inputs; or a metric fails.
    """
    pair = Pair(
        float_path=prepared.float_path,
        int8_path=Path(int8_model),
        float_model=prepared.float_model,
        int8_model=load_model(int8_model),
        source=prepared.source,
        first=prepared.first,
    )
    common_inputs(prepared.float_path, int8_model)
    if prepared.update or prepared.old is None:
        now = _with_layers(pair, measure_pair(pair, prepared.metrics, prepared.timing, progress), progress)
        baseline = Baseline(now, prepared.allowed, prepared.samples, os.fspath(prepared.baseline))
        save_baseline(prepared.baseline, baseline)
        lines = judge(now, baseline)
    else:
        old = prepared.old.measured
        before = replace(old, scores={metric.name: old.scores[metric.name] for metric in prepared.metrics})
        by = replace(prepared.old, measured=before, tolerances=prepared.allowed)
        timing = replace(prepared.timing, floor=_floor(by, prepared.timing))
        now, lines = _compared(pair, measure_pair(pair, prepared.metrics, timing, progress), by, progress)
    return Check(
        float_model=os.fspath(prepared.float_path),
        int8_model=os.fspath(int8_model),
        baseline=os.fspath(prepared.baseline),
        lines=tuple(lines),
        measured=now,
        updated=prepared.update,
        state=prepared.source.links,
    )


def _chosen_metrics(options: CheckOptions, old: Baseline | None, *, update: bool) -> list[Metric] | None:
    """Return the metrics of a check; None for the usual ones of the model and its data.

    Raises:
        RequantError: A metric does not exist, or the baseline has no score in it.
    """
    if options.lower and not any(":" in name for name in options.metrics):
        raise RequantError("lower needs a metric FILE.py:NAME")
    if not options.metrics:
        return None if old is None else [row.metric for row in old.measured.scores.values()]
    metrics = [metric_named(name, lower=options.lower and ":" in name) for name in dict.fromkeys(options.metrics)]
    if not update and old is not None:
        missing = next((metric.name for metric in metrics if metric.name not in old.measured.scores), None)
        if missing is not None:
            has = ", ".join(old.measured.scores)
            raise RequantError(f"{old.path}: has scores in {has}, not in {missing}; {UPDATE} measures it")
    return metrics


def _tolerances_in_use(values: Mapping[str, object], old: Baseline, metrics: Sequence[Metric]) -> dict[str, object]:
    """Return the tolerances, except for metrics that this check does not use."""
    names = {metric.name for metric in metrics}
    return {name: value for name, value in values.items() if name not in old.measured.scores or name in names}


def _floor(baseline: Baseline, timing: Timing) -> float:
    """Return the speed-up below which the speed is measured again."""
    speed, here = baseline.measured.speed, Machine.here(timing.setting.threads)
    if speed is not None and why_incomparable(speed, here, timing.batch):
        speed = None
    return floor_of(speed, baseline.tolerances)


def _compared(pair: Pair, now: Measured, baseline: Baseline, progress: Progress) -> tuple[Measured, list[Line]]:
    """Compare measurements with the baseline; if a line fails, find the layers that changed."""
    same = now.int8_model == baseline.measured.int8_model
    now = replace(now, layers=layers_of(pair.int8_model), stored=stored_bytes(pair.int8_model)) if not same else now
    lines = judge(now, baseline)
    if all(line.status is not Status.FAIL for line in lines):
        return now, lines
    now = _with_layers(pair, now, progress)
    changed = changed_layers(now, baseline.measured)
    return now, [explained(line, now, baseline.measured, changed) for line in lines]


def _with_layers(pair: Pair, now: Measured, progress: Progress) -> Measured:
    """Return the measurements with the layers and their SQNR."""
    progress("layers", 0, None)
    noise: Mapping[str, float] = {}
    with suppress(RequantError):  # a tensor cannot be an output: the layers have no SQNR
        noise = tensor_noise(pair.float_path, pair.int8_path, pair.source)
    return replace(now, stored=stored_bytes(pair.int8_model), layers=layers_of(pair.int8_model), noise=noise)

"""`check`: a pair of models against its baseline, with the layers that explain what was lost."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ... import RequantError
from ...calibration.identity import fingerprint
from ...calibration.samples import Sample
from ...calibration.sources import DataSource, Source
from ..accuracy.compare import common_inputs
from ..accuracy.metrics import Metric, check_label, metric_named
from ..model.files import load_model
from ..runtime.inputs import open_data
from ..runtime.machine import Machine
from ..runtime.progress import Progress, silent
from .baseline import Baseline, Measured, Tolerances, tolerances
from .blame import changed_layers, explained
from .judge import Line, Status, floor_of, judge
from .layers import layers_of, stored_bytes, tensor_noise
from .lock import check_writable, load_baseline, save_baseline
from .measure import Pair, Timing, machines_differ, measure_pair, usual_metrics

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What may be asked of `check`.

    Attributes:
        metrics: What both models are scored in: names, see `metric_named`. None given, those
            of the baseline; without one, agreement, SQNR, and top-1 where there are labels.
        lower: Of functions among the metrics a lower number is better.
        tolerances: How much may be lost, by name of a metric or key of `LIMITS`; what is not named is as in the
            baseline.
        samples: How many samples are run, picked evenly; None for as many as for the baseline, or all.
        batch: Items per run while the latency is measured; None for as many as for the baseline, or 1.
        threads: Threads inside one operator for the latency; 0 leaves the choice to the runtime, None for as many as
            for the baseline, or 1.
        seconds: How long the latency is measured; 0 for not at all.
    """

    metrics: Sequence[str] = ()
    lower: bool = False
    tolerances: Mapping[str, object] = field(default_factory=dict)
    samples: int | None = None
    batch: int | None = None
    threads: int | None = None
    seconds: float = 2.0

    def __post_init__(self) -> None:
        """Refuse what cannot be done.

        Raises:
            RequantError: A number is out of range.
        """
        if isinstance(self.metrics, str):
            raise RequantError(f"metrics are a sequence of names, not the text {self.metrics!r}")
        for name, number in (("samples", self.samples), ("batch", self.batch)):
            if number is not None and number < 1:
                raise RequantError(f"{name} must be at least 1, not {number}")
        for name, least in (("threads", self.threads), ("seconds", self.seconds)):
            if least is not None and not 0 <= least < math.inf:
                raise RequantError(f"{name} must be 0 or more, not {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What came of a check.

    Attributes:
        float_model: Path of the float model.
        int8_model: Path of the INT8 model.
        baseline: Path of the baseline.
        lines: What was judged.
        measured: What was measured.
        updated: Whether the baseline was written instead of judged by.
        quantized: What `requant quantize --json` said, where quantizing was a part of it.
    """

    float_model: str
    int8_model: str
    baseline: str
    lines: tuple[Line, ...]
    measured: Measured = field(repr=False)
    updated: bool = False
    quantized: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """Whether nothing fails."""
        return not self.findings

    @property
    def findings(self) -> tuple[Line, ...]:
        """The lines that fail."""
        return tuple(line for line in self.lines if line.status is Status.FAIL)

    def __str__(self) -> str:
        """Return a line of text for each finding, or that there is none."""
        told = [
            f"{line.name}: {line.baseline} -> {line.measured}: {'; '.join((line.reason, *line.layers))}"
            for line in self.findings
        ]
        return "\n".join(told) or f"{self.int8_model}: as good as {self.baseline} says"

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
    """Measure a pair of models and judge it by its baseline, or write that.

    Args:
        float_model: Path of the float model.
        int8_model: Path of the INT8 model that was made of it.
        data: A data source, with labels where a metric wants them; other than what gave the ranges.
        baseline: Path of the lock file.
        update: Write the baseline; its tolerances and metrics stay where no others are given.
        options: See `CheckOptions`.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: A model, the data or the baseline cannot be used, the baseline is of another float model, or a
            metric fails.
    """
    return judged(ready(float_model, data, baseline, update=update, options=options), int8_model, progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A check of which all that needs no INT8 model is known to be right.

    Attributes:
        float_path: Path of the float model.
        float_model: The float model.
        source: The data.
        first: Their first sample.
        baseline: Path of the lock file.
        old: What is in it; None where it is to be written for the first time.
        metrics: What both models are scored in.
        allowed: How much may be lost.
        samples: How many samples were asked for; None for all.
        update: Whether the baseline is written.
        asked: What else was asked for.
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
    asked: CheckOptions

    @property
    def timing(self) -> Timing:
        """How the speed is measured."""
        before = None if self.old is None else self.old.measured.speed
        batch, threads = (1, 1) if before is None else (before.batch, before.machine.threads)
        own = (self.asked.batch, self.asked.threads)
        return Timing(self.asked.seconds, batch if own[0] is None else own[0], threads if own[1] is None else own[1])


def ready(
    float_model: PathLike,
    data: DataSource,
    baseline: PathLike,
    *,
    update: bool = False,
    options: CheckOptions | None = None,
) -> Ready:
    """Refuse what can be refused before there is an INT8 model; see `check`.

    Raises:
        RequantError: The float model, the data, the baseline, a metric or a tolerance cannot be used.
    """
    asked = options or CheckOptions()
    old = None if update and not Path(baseline).exists() else load_baseline(baseline)
    if update:
        check_writable(Path(baseline))
    model = load_model(float_model)
    if old is not None and not update and fingerprint(model) != old.measured.float_model:
        raise RequantError(
            f"{old.path}: the baseline of another float model than {os.fspath(float_model)}; --update writes one of it"
        )
    samples = asked.samples if asked.samples is not None or old is None else old.samples
    source = open_data(float_model, data, samples)
    first = next(iter(source))
    metrics = _metrics(asked, old, Path(float_model), first, update=update)
    kept = {} if old is None else _known(old.tolerances.to_json(), old, metrics)
    allowed = tolerances({**kept, **asked.tolerances}, metrics)
    for metric in metrics:
        check_label(metric, first)
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
        asked=asked,
    )


def judged(found: Ready, int8_model: PathLike, progress: Progress = silent) -> Check:
    """Measure an INT8 model and judge it, or write the baseline; see `check`.

    Raises:
        RequantError: The INT8 model cannot be loaded or run, is not of the float model, or a metric fails.
    """
    pair = Pair(
        float_path=found.float_path,
        int8_path=Path(int8_model),
        float_model=found.float_model,
        int8_model=load_model(int8_model),
        source=found.source,
        first=found.first,
    )
    common_inputs(found.float_path, int8_model)
    if found.update or found.old is None:
        now = _whole(pair, measure_pair(pair, found.metrics, found.timing, progress), progress)
        made = Baseline(now, found.allowed, found.samples, os.fspath(found.baseline))
        save_baseline(found.baseline, made)
        lines = judge(now, made)
    else:
        old = found.old.measured
        before = replace(old, scores={metric.name: old.scores[metric.name] for metric in found.metrics})
        by = replace(found.old, measured=before, tolerances=found.allowed)
        timing = replace(found.timing, floor=_floor(by, found.timing))
        now, lines = _lines(pair, measure_pair(pair, found.metrics, timing, progress), by, progress)
    return Check(
        float_model=os.fspath(found.float_path),
        int8_model=os.fspath(int8_model),
        baseline=os.fspath(found.baseline),
        lines=tuple(lines),
        measured=now,
        updated=found.update,
    )


def _metrics(asked: CheckOptions, old: Baseline | None, model: Path, first: Sample, *, update: bool) -> list[Metric]:
    """Return what both models are scored in.

    Raises:
        RequantError: There is no such metric, or the baseline has no score in it.
    """
    if asked.lower and not any(":" in name for name in asked.metrics):
        raise RequantError("lower is of a metric FILE.py:NAME, which is not given")
    if not asked.metrics:
        return usual_metrics(model, first) if old is None else [row.metric for row in old.measured.scores.values()]
    found = [metric_named(name, lower=asked.lower and ":" in name) for name in dict.fromkeys(asked.metrics)]
    if not update and old is not None:
        missing = next((metric.name for metric in found if metric.name not in old.measured.scores), None)
        if missing is not None:
            has = ", ".join(old.measured.scores)
            raise RequantError(f"{old.path}: has no score in {missing}, but in {has}; --update --metric {missing}")
    return found


def _known(given: Mapping[str, object], old: Baseline, metrics: Sequence[Metric]) -> dict[str, object]:
    """Return tolerances without those of metrics that are not judged now."""
    names = {metric.name for metric in metrics}
    return {name: value for name, value in given.items() if name not in old.measured.scores or name in names}


def _floor(baseline: Baseline, timing: Timing) -> float:
    """Return the ratio below which a measurement of the speed is made again."""
    speed = baseline.measured.speed
    unlike = "" if speed is None else machines_differ(speed.machine, Machine.here(timing.threads))
    if speed is not None and speed.batch != timing.batch:
        unlike = "batch"
    return floor_of(speed, baseline.tolerances, unlike)


def _lines(pair: Pair, now: Measured, baseline: Baseline, progress: Progress) -> tuple[Measured, list[Line]]:
    """Judge what was measured; where something fails, look which layers are others."""
    same = now.int8_model == baseline.measured.int8_model
    now = replace(now, layers=layers_of(pair.int8_model), stored=stored_bytes(pair.int8_model)) if not same else now
    lines = judge(now, baseline)
    if all(line.status is not Status.FAIL for line in lines):
        return now, lines
    now = _whole(pair, now, progress)
    changed = changed_layers(now, baseline.measured)
    return now, [explained(line, now, baseline.measured, changed) for line in lines]


def _whole(pair: Pair, now: Measured, progress: Progress) -> Measured:
    """Return what was measured with what is known of the layers."""
    progress("layers", 0, None)
    noise: Mapping[str, float] = {}
    with suppress(RequantError):  # a tensor that cannot be an output; the layers are told without their noise
        noise = tensor_noise(pair.float_path, pair.int8_path, pair.source)
    return replace(now, stored=stored_bytes(pair.int8_model), layers=layers_of(pair.int8_model), noise=noise)

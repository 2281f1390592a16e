"""Measure a pair of models for the gate: scores, data, speed, kernels, size."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...calibration.data.samples import Sample
from ...calibration.data.sources import Source
from ...calibration.model.identity import fingerprint
from ...calibration.model.session import Array
from ..accuracy.classes import Outputs, evident_scores, is_float
from ..accuracy.drop import versus
from ..accuracy.metrics import METRICS, Metric, Score, by_row
from ..accuracy.pair import PairScorer, judge_pair, time_models
from ..accuracy.terms import Terms
from ..model.files import Weights, serialize, size_on_disk
from ..runtime.clock import interleave
from ..runtime.inputs import stacked
from ..runtime.machine import Machine
from ..runtime.profile import RUNS, KernelRun, integer_share
from ..runtime.progress import COMPARE, TIME, Progress
from ..runtime.runtimes import PLAIN, Runtime, Sessions, Setting
from ..runtime.session import Runner
from .baseline import DataSummary, Measured, Scored, Speed, Statistics
from .layers import opset_of

ROUNDS = 5
AGAIN = 2
"""How often a failing speed is measured again."""
KEPT = 2**18
"""The most numbers of a metric's items in a lock file; more items are summed in blocks."""
BLOCKS = 4096
"""The most blocks of summed items."""
CHANNELS = 16
"""The most channels of an input whose means are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two loaded models and their data.

    Attributes:
        float_path: Path of the float model.
        int8_path: Path of the INT8 model.
        float_model: The float model.
        int8_model: The INT8 model.
        source: The data.
        first: The first sample.
    """

    float_path: Path
    int8_path: Path
    float_model: ir.Model
    int8_model: ir.Model
    source: Source
    first: Sample

    @property
    def weights(self) -> Weights:
        """The weights of the float model."""
        return Weights.of(self.float_model)


@dataclass(frozen=True, slots=True)
class Timing:
    """How the speed is measured.

    Attributes:
        seconds: Duration of one measurement; 0 for no measurement.
        batch: Items per run.
        setting: What runs the models, and on how many threads.
        floor: The least acceptable speed-up. If all rounds are below it, the speed is measured again.
    """

    seconds: float
    batch: int
    setting: Setting
    floor: float = 0.0


def usual_metrics(model: Path, first: Sample, frames: Collection[str] = ()) -> list[Metric]:
    """Return the default metrics of a model and its data: agreement, SQNR, and top-1 with labels.

    Args:
        model: The float model.
        first: The first sample.
        frames: Outputs that hold no scores per class without labels, see `open_rows`.

    Raises:
        RequantError: The float model does not run on the first sample.
    """
    outputs = Runner(model, lean=True)(first.feed)
    names = ["sqnr"] if any(is_float(value) for value in outputs.values()) else []
    found = evident_scores(outputs, first)
    if found is not None and (first.label is not None or found[0] not in frames):
        names.insert(0, "agreement")
        label = first.label
        labels = np.zeros(0) if label is None else np.asarray(label)
        if labels.dtype.kind in "iu" and labels.size == np.prod(found[1].shape[:-1]):
            names.insert(0, "top1")
    return [METRICS[name] for name in names]


def measure_pair(pair: Pair, metrics: Sequence[Metric], timing: Timing, progress: Progress) -> Measured:
    """Measure a pair of models.

    Args:
        pair: The models and the data.
        metrics: The metrics.
        timing: How the speed is measured.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: A model fails, the labels do not fit, or a metric fails.
    """
    runtime = timing.setting.opened()
    scores, data = _scores(pair, metrics, runtime, progress)
    progress("inspect", 0, None)
    threads = timing.setting.threads
    runs = runtime.profile(serialize(pair.int8_model), pair.first.feed, threads=threads, times=RUNS).runs
    speed = speed_of(pair, timing, progress) if timing.seconds > 0 else None
    return Measured(
        float_model=fingerprint(pair.float_model),
        int8_model=fingerprint(pair.int8_model),
        scores=scores,
        data=data,
        speed=speed,
        mac_share=integer_share(runs),
        kernels=_kernels(runs),
        size=size_on_disk(pair.int8_path),
        opset=opset_of(pair.int8_model),
        setting=replace(timing.setting, threads=PLAIN.threads),
        runtime=str(runtime.identity),
    )


def _kernels(runs: Sequence[KernelRun]) -> dict[str, tuple[int, float]]:
    """Return the number of executed kernels and their microseconds by operator, slowest first."""
    kernels: dict[str, tuple[int, float]] = {}
    for run in runs:
        count, spent = kernels.get(run.op, (0, 0.0))
        kernels[run.op] = (count + 1, round(spent + run.microseconds, 1))
    return dict(sorted(kernels.items(), key=lambda row: -row[1][1]))


# ------------------------------------------------------------------------------------------------------- accuracy


def _scores(
    pair: Pair, metrics: Sequence[Metric], runtime: Runtime, progress: Progress
) -> tuple[dict[str, Scored], DataSummary]:
    """Score both models in one pass over the data; return the scores and a description of the data."""
    scorers = [PairScorer(metric) for metric in metrics]
    summarizer = _Summarizer()

    def watch(before: Outputs, after: Outputs, sample: Sample) -> None:
        for scorer in scorers:
            scorer.add(before, after, sample)

    def tell(done: int) -> None:
        progress(COMPARE, done, pair.source.length)

    samples = summarizer.passing(pair.source)
    int8 = Sessions(pair.int8_path, keep=False, runtime=runtime)
    judge_pair(pair.float_path, int8, samples, tell, weights=pair.weights, watch=watch, terms=Terms("skip"))
    scores = {}
    for scorer in scorers:
        if scorer.metric.runs_models:
            progress(scorer.metric.name, 0, None)
        scores[scorer.metric.name] = scored(*scorer.result((pair.float_path, pair.int8_path), pair.source))
    return scores, summarizer.result(pair.source.description)


def scored(before: Score, after: Score) -> Scored:
    """Return the scores of a pair.

    Raises:
        RequantError: The scores are of different metrics or data.
    """
    drop = versus(before, after)
    return Scored(drop.metric, before.value, bounded(after), drop.drop, drop.drop_interval)


def bounded(result: Score) -> Score:
    """Return a score with at most `KEPT` numbers; more items are summed in blocks, or dropped."""
    if result.parts is None or result.parts.size <= KEPT:
        return result
    if not result.metric.sums:
        return replace(result, parts=None, rows=None)
    parts = result.parts if result.rows is None else by_row(result.parts, result.rows)[0]
    count = min(BLOCKS, len(parts), max(1, KEPT // parts.shape[1]))
    starts = np.arange(count) * len(parts) // count
    return replace(result, parts=np.add.reduceat(parts, starts, axis=0), rows=None)


# ------------------------------------------------------------------------------------------------------- the data


@dataclass
class _Sums:
    """Sums over the values of an input."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    least: float = np.inf
    most: float = -np.inf
    channels: Array = field(default_factory=lambda: np.zeros(0))
    each: int = 0

    def add(self, values: Array) -> None:
        """Add an array."""
        wide = values.astype(np.float64)
        self.count += wide.size
        self.total += float(wide.sum())
        self.squares += float(np.vdot(wide, wide))
        self.least, self.most = min(self.least, float(wide.min())), max(self.most, float(wide.max()))
        axis = next((i for i in (1, -1) if wide.ndim > 2 and 1 < wide.shape[i] <= CHANNELS), None)
        if axis is not None:
            sums = wide.sum(axis=tuple(i for i in range(wide.ndim) if i != axis % wide.ndim))
            if len(self.channels) in (0, len(sums)):
                self.channels = sums + (self.channels if len(self.channels) else 0.0)
                self.each += wide.size // len(sums)

    def result(self) -> Statistics:
        """Return the statistics."""
        mean = self.total / self.count
        std = float(np.sqrt(max(0.0, self.squares / self.count - mean * mean)))
        channels = tuple(float(total / self.each) for total in self.channels)
        return Statistics(mean, std, self.least, self.most, channels)


class _Summarizer:
    """Digests and statistics of the samples that `passing` yields."""

    def __init__(self) -> None:
        self._inputs, self._labels = (hashlib.blake2b(digest_size=16) for _ in range(2))
        self._sums: dict[str, _Sums] = defaultdict(_Sums)
        self._samples = 0
        self._labelled = False

    def passing(self, samples: Source) -> Iterator[Sample]:
        """Yield the samples."""
        for sample in samples:
            self._samples += 1
            for name, array in sorted(sample.feed.items()):
                _add(self._inputs, name, array)
                if array.dtype.kind in "biuf" and array.size:
                    self._sums[name].add(array)
            if sample.label is not None:
                self._labelled = True
                _add(self._labels, "", np.asarray(sample.label).reshape(-1))
            yield sample

    def result(self, description: str) -> DataSummary:
        """Return the description of the data."""
        labels = self._labels.hexdigest() if self._labelled else ""
        statistics = {name: sums.result() for name, sums in self._sums.items()}
        return DataSummary(description, self._samples, self._inputs.hexdigest(), labels, statistics)


def _add(digest: hashlib.blake2b, name: str, array: Array) -> None:
    """Add an array to a digest; the width of integers does not change the digest."""
    kind = array.dtype.kind
    digest.update(f"{name} {kind} {array.shape} ".encode())
    if kind not in "biuf":
        digest.update(repr(array.tolist()).encode())
    else:
        digest.update(np.ascontiguousarray(array.astype(np.int64) if kind in "biu" else array).tobytes())


# ------------------------------------------------------------------------------------------------------- the speed


def speed_of(pair: Pair, timing: Timing, progress: Progress) -> Speed:
    """Return the speed-up of INT8 over float, in rounds of alternating runs.

    If all rounds are below the floor, further rounds are measured, up to `AGAIN` times. All rounds count: another
    program slows both models, but not equally in every round.

    Raises:
        RequantError: A model fails, or does not accept this batch.
    """
    sample = pair.first if timing.batch == 1 else stacked(pair.source, timing.batch)
    run = _rounds(pair, timing, sample)
    rounds: list[tuple[float, float]] = []
    for attempt in range(1 + AGAIN):
        progress(TIME if attempt == 0 else f"{TIME} again", attempt, 1 + AGAIN)
        rounds += [run() for _ in range(ROUNDS)]
        if max(before / after for before, after in rounds) >= timing.floor:
            break
    before, after = (min(times) for times in zip(*rounds, strict=True))
    ratios = tuple(round(one / two, 4) for one, two in rounds)
    machine = timing.setting.opened().machine(timing.setting.threads)
    return Speed(ratios, 1e3 * before, 1e3 * after, timing.batch, machine)


def _rounds(pair: Pair, timing: Timing, sample: Sample) -> Callable[[], tuple[float, float]]:
    """Return a function that times one round: the least seconds of each model."""
    seconds = timing.seconds / ROUNDS
    threads, runtime = timing.setting.threads, timing.setting.opened()
    models = [Sessions(path, keep=False, runtime=runtime) for path in (pair.float_path, pair.int8_path)]
    if pair.weights.large:  # the models do not fit in memory together

        def alone() -> tuple[float, float]:
            found = time_models(
                models, sample.feed, weights=pair.weights, threads=threads, batch=timing.batch, seconds=seconds
            )
            return found.float_ms / 1e3, found.int8_ms / 1e3

        return alone
    runs = [partial(model.fresh(threads=threads), sample.feed) for model in models]

    def together() -> tuple[float, float]:
        first, second = interleave(runs, seconds=seconds, threads=threads)
        return first.least, second.least

    return together


def why_incomparable(before: Speed, here: Machine, batch: int) -> str:
    """Return why a speed-up of this machine and batch is not comparable with a measured one; empty if it is.

    The runtime may differ.
    """
    there = before.machine
    pairs: Mapping[str, tuple[object, object]] = {
        "CPU": (there.cpu, here.cpu),
        "threads": (there.threads, here.threads),
        "batch": (before.batch, batch),
    }
    return ", ".join(f"{name} {a}, here {b}" for name, (a, b) in pairs.items() if a != b)

"""`bench_model`: the latency of a model, alone or against another one, and where in the model the time goes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from .... import RequantError
from ....calibration.session import LARGE, Array, input_specs, open_session
from ....calibration.sources import DataSource
from ...model.files import load_model, size_on_disk
from ...model.shapes import Lengths, open_axes, resolve
from ...runtime.compiled_for import refuse_foreign
from ...runtime.inputs import open_data, stacked
from ...runtime.progress import Progress, silent
from ...runtime.random_inputs import source_of_shapes
from ...runtime.session import Runner
from ...runtime.timing import interleave
from .profile import BenchProfile, profile_model
from .settings import Settings, recommend


@dataclass(frozen=True, slots=True)
class Timed:
    """How long a model takes, nothing but the runs being measured.

    Attributes:
        model: Its path.
        load_ms: Time to load it, which optimises the graph.
        first_ms: Time of the first run, in which memory is taken.
        milliseconds: Least time of a run after some that do not count.
        median_ms: Median time of these runs.
        runs: How many were timed.
    """

    model: str
    load_ms: float
    first_ms: float
    milliseconds: float
    median_ms: float
    runs: int

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "model": self.model,
            "load_ms": self.load_ms,
            "first_ms": self.first_ms,
            "ms": self.milliseconds,
            "median_ms": self.median_ms,
            "runs": self.runs,
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """The latency of a model.

    Attributes:
        timed: Its times.
        data: What it was run on.
        shapes: The shapes of its inputs.
        batch: Items per run.
        threads: Threads inside one operator; 0 left the choice to the runtime.
        other: Those of the model that it was compared with, in runs that alternated with its own.
        profile: Where the time goes; None where that was not asked for or cannot be told.
        settings: What `recommend` found, if it was asked.
        notes: What a reader should know.
    """

    timed: Timed
    data: str
    shapes: Mapping[str, tuple[int, ...]]
    batch: int
    threads: int
    other: Timed | None = None
    profile: BenchProfile | None = None
    settings: Settings | None = None
    notes: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Items per second, of the least time."""
        return 1e3 * self.batch / self.timed.milliseconds

    @property
    def ratio(self) -> float | None:
        """How many times faster the model is than the other one, minimum against minimum."""
        return None if self.other is None else self.other.milliseconds / self.timed.milliseconds

    @property
    def median_ratio(self) -> float | None:
        """How many times faster it is, median against median."""
        return None if self.other is None else self.other.median_ms / self.timed.median_ms

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        compared = self.other and {**self.other.to_json(), "ratio": self.ratio, "median_ratio": self.median_ratio}
        return {
            **self.timed.to_json(),
            "data": self.data,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "batch": self.batch,
            "threads": self.threads,
            "items_per_second": self.rate,
            "compare": compared,
            "profile": self.profile and self.profile.to_json(),
            "settings": self.settings and self.settings.to_json(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Search:
    """How session settings are looked for.

    Attributes:
        seconds: How long it may take.
        threads: Threads inside one operator, None where they are free to choose.
    """

    seconds: float = 10.0
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What a model is timed on.

    Attributes:
        batch: Items per run.
        threads: Threads inside one operator; 0 leaves the choice to the runtime.
        seconds: How long it is timed.
        lengths: Lengths of the inputs' free axes; the first axis is that of the items unless they say otherwise.
        profile: Whether to tell where the time goes.
    """

    batch: int = 1
    threads: int = 1
    seconds: float = 2.0
    lengths: Lengths = field(default_factory=Lengths)
    profile: bool = True


def bench_model(
    path: str | os.PathLike[str],
    data: DataSource | None = None,
    load: Load | None = None,
    *,
    other: str | os.PathLike[str] | None = None,
    search: Search | None = None,
    progress: Progress = silent,
) -> Bench:
    """Time a model, tell where the time goes, and look for better session settings if asked to.

    Args:
        path: Path of the model: ONNX or ORT format, float or quantized.
        data: A data source whose first sample is run; None for random inputs.
        load: Batch, threads, shapes and time.
        other: Path of a model to compare with, which is fed the same: the runs of both alternate.
        search: How to look for settings; None for not at all.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: A model cannot be loaded or run, or was compiled for another machine; the data do not fit; or a
            length is not known: nothing is guessed.
    """
    load = load or Load()
    if load.batch < 1:
        raise RequantError(f"batch must be at least 1, not {load.batch}")
    models = [Path(path), *([Path(other)] if other is not None else [])]
    for model in models:
        _check(model)
    described, feed, batch = _feed(Path(path), data, load)
    progress("time", 0, None)
    timed, notes = _timed(models, feed, load)
    profile = None
    if load.profile and models[0].suffix.lower() == ".ort":
        notes += ("where the time goes can be told of ONNX files only",)
    elif load.profile:
        progress("profile", 0, None)
        profile = profile_model(models[0], feed, threads=load.threads, milliseconds=timed[0].milliseconds)
    found = Bench(
        timed=timed[0],
        data=described,
        shapes={name: tuple(array.shape) for name, array in feed.items()},
        batch=batch,
        threads=load.threads,
        other=timed[1] if other is not None else None,
        profile=profile,
        notes=notes,
    )
    if search is None:
        return found
    return replace(
        found,
        settings=recommend(models[0], feed, threads=search.threads, seconds=search.seconds, progress=progress),
    )


def _check(model: Path) -> None:
    """Refuse what is no model, or is one for another machine."""
    if model.suffix.lower() == ".ort":
        refuse_foreign(model, open_session(model, optimize=False).get_modelmeta().custom_metadata_map)
    else:
        load_model(model)


def _feed(path: Path, data: DataSource | None, load: Load) -> tuple[str, Mapping[str, Array], int]:
    """Return what is run, in words and as arrays, and how many items it holds."""
    if data is not None:
        if load.lengths:
            raise RequantError("lengths of axes are given and to be taken from data; give one of the two")
        source = open_data(path, data)
        feed = (next(iter(source)) if load.batch == 1 else stacked(source, load.batch)).feed
        return source.description, feed, load.batch
    axes = {spec.name: spec.shape for spec in input_specs(open_session(path, lean=True))}
    found, _ = resolve(axes, load.lengths)
    shapes = {name: shape or () for name, shape in found.items()}
    firsts = {name for name, shape in axes.items() if shape and not isinstance(shape[0], int)}
    given = {int(shapes[name][0] or 0) for name in firsts if isinstance(shapes[name][0], int)}
    if len(given) > 1 or (given and load.batch not in (1, *given)):
        told = ", ".join(map(str, sorted({load.batch, *given} - ({1} if load.batch == 1 else set()))))
        raise RequantError(f"{path}: the inputs' first axes are of different lengths: {told}")
    if load.batch > 1 and not firsts:
        raise RequantError(f"{path}: its inputs' first axes are fixed, so that no batch of {load.batch} can be fed")
    batch = given.pop() if given else load.batch
    whole = {name: (batch, *shape[1:]) if name in firsts else shape for name, shape in shapes.items()}
    if unknown := open_axes(whole):
        raise RequantError(
            f"{path}: the shapes of its inputs depend on {', '.join(unknown)}; give --dim, --shape or --data"
        )
    drawn = source_of_shapes(path, {name: tuple(int(n or 0) for n in shape) for name, shape in whole.items()})
    if drawn is None:
        raise RequantError(f"{path}: does not run on random inputs of these shapes; give --data SRC")
    return drawn.description, next(iter(drawn)).feed, batch


def _timed(models: Sequence[Path], feed: Mapping[str, Array], load: Load) -> tuple[list[Timed], tuple[str, ...]]:
    """Time models in turns; one after the other where they are too large to be in memory at once."""
    apart = len(models) > 1 and sum(map(size_on_disk, models)) > LARGE
    if not apart:
        return _in_turns(models, feed, load, load.seconds), ()
    found = [each for model in models for each in _in_turns([model], feed, load, load.seconds / len(models))]
    return found, ("the models were timed one after the other: together they are too large",)


def _in_turns(models: Sequence[Path], feed: Mapping[str, Array], load: Load, seconds: float) -> list[Timed]:
    """Load models, run each for the first time, and time them in turns."""
    runs, before = [], []
    for model in models:
        start = time.perf_counter()
        run = Runner(model, threads=load.threads)
        loaded = time.perf_counter()
        run(feed)
        before.append((loaded - start, time.perf_counter() - loaded))
        runs.append(partial(run, feed))
    return [
        Timed(os.fspath(model), 1e3 * opened, 1e3 * first, 1e3 * min(times), 1e3 * statistics.median(times), len(times))
        for model, (opened, first), times in zip(models, before, interleave(runs, seconds=seconds), strict=True)
    ]

"""`bench_model`: the latency of a model, alone or against another one, and the times of its nodes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from .... import RequantError
from ....calibration.data.sources import DataSource
from ....calibration.model.session import LARGE, Array, input_specs, open_session
from ....system.given import MOST_ITEMS, check_function, check_path, checked_integer, normalise_fields, or_default
from ...model.files import is_ort, load_model, size_on_disk
from ...model.shapes import Lengths, open_axes, resolve
from ...runtime.clock import Clock, Times, doubt, race, uncertainty
from ...runtime.compiled_for import refuse_foreign
from ...runtime.inputs import open_data, stacked
from ...runtime.loads import load_of
from ...runtime.progress import TIME, Progress, silent
from ...runtime.random_inputs import source_of_shapes
from ...runtime.runtimes import PLAIN, STOCK, Identity, Setting
from .native import needed_library
from .profile import BenchProfile, profile_model
from .settings import Settings, recommend


@dataclass(frozen=True, slots=True)
class Timed:
    """The times of a model without a profiler.

    Attributes:
        model: Its path.
        load_ms: Time to load it, including graph optimization.
        first_ms: Time of the first run, which allocates memory.
        milliseconds: Minimum time of the timed runs, after warm-up runs.
        median_ms: Median time of the timed runs.
        runs: The number of timed runs.
        clock: What the times of runs are: CPU time of one thread, or wall time.
    """

    model: str
    load_ms: float
    first_ms: float
    milliseconds: float
    median_ms: float
    runs: int
    clock: Clock = "wall"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "model": self.model,
            "load_ms": self.load_ms,
            "first_ms": self.first_ms,
            "ms": self.milliseconds,
            "median_ms": self.median_ms,
            "runs": self.runs,
            "clock": self.clock,
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """The latency of a model.

    Attributes:
        timed: Its times.
        data: A text for the inputs of the runs.
        shapes: The shapes of its inputs.
        batch: Items per run; None where inputs have different numbers of rows, so that it is not known.
        threads: Threads inside one operator; 0 is the runtime's choice.
        runtime: The runtime with its version.
        other: The times of the model to compare with; the runs of both alternate.
        profile: The times of its nodes; None without a profile.
        settings: The recommended session options; None without a search.
        notes: Remarks for the reader.
        uncertainty: How far the time, or the ratio of the times of two models, may be from the truth, as a share of it.
    """

    timed: Timed
    data: str
    shapes: Mapping[str, tuple[int, ...]]
    batch: int | None
    threads: int
    runtime: Identity
    other: Timed | None = None
    profile: BenchProfile | None = None
    settings: Settings | None = None
    notes: tuple[str, ...] = ()
    uncertainty: float = 0.0

    @property
    def rate(self) -> float | None:
        """Items per second at the minimum time; None if the items are not known."""
        return None if self.batch is None else 1e3 * self.batch / self.timed.milliseconds

    @property
    def doubt(self) -> str:
        """``"machine busy, +-8 %"``; empty if the time, or the ratio of the two times, is sure."""
        return doubt(self.uncertainty)

    @property
    def ratio(self) -> float | None:
        """Minimum time of the other model over minimum time of this one."""
        return None if self.other is None else self.other.milliseconds / self.timed.milliseconds

    @property
    def median_ratio(self) -> float | None:
        """Median time of the other model over median time of this one."""
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
            "runtime": str(self.runtime),
            "uncertainty": self.uncertainty,
            "items_per_second": self.rate,
            "compare": compared,
            "profile": self.profile and self.profile.to_json(),
            "settings": self.settings and self.settings.to_json(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Search:
    """The search of session options.

    Attributes:
        seconds: How long it may take.
        threads: Threads inside one operator; None to search the number.
    """

    seconds: float = 10.0
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse values of another type.

        Raises:
            RequantError: There is one.
        """
        normalise_fields(self)


@dataclass(frozen=True, slots=True)
class Load:
    """The inputs and the duration of a measurement.

    Attributes:
        batch: Items per run.
        setting: The runtime, and its threads.
        seconds: How long the model is timed.
        lengths: Lengths of the inputs' free axes; a free first axis without a length has the length of the batch.
        profile: Whether to profile the model.
    """

    batch: int = 1
    setting: Setting = PLAIN
    seconds: float = 2.0
    lengths: Lengths = field(default_factory=Lengths)
    profile: bool = True

    def __post_init__(self) -> None:
        """Refuse values of another type, and numbers out of range.

        Raises:
            RequantError: There is one.
        """
        normalise_fields(self)
        checked_integer(self.batch, "batch", 1, MOST_ITEMS)
        if not 0 <= self.seconds < math.inf:
            raise RequantError(f"seconds must be 0 or more, not {self.seconds:g}")


def bench_model(
    path: str | os.PathLike[str],
    data: DataSource | None = None,
    load: Load | None = None,
    *,
    other: str | os.PathLike[str] | None = None,
    search: Search | None = None,
    progress: Progress = silent,
) -> Bench:
    """Time a model, profile it, and search better session options.

    Args:
        path: Path of the model: ONNX or ORT format, float or quantized.
        data: A data source whose first sample is run; None for random inputs.
        load: Batch, runtime, threads, shapes and time.
        other: Path of a model to compare with on the same inputs; the runs of both alternate.
        search: How to search session options; None for no search.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: A model cannot be loaded or run, or was compiled for another machine; the data do not fit; or a
            length is unknown; or what only ONNX Runtime has is asked of another runtime.
    """
    load = or_default(load, Load, "load")
    search = None if search is None else or_default(search, Search, "search")
    check_function(progress, "progress")
    for each in (path, *([other] if other is not None else [])):
        check_path(each, "a model")
    models = [Path(path), *([Path(other)] if other is not None else [])]
    runtime = load.setting.opened()
    if runtime is not STOCK:
        _refuse_elsewhere(models, runtime.identity, search)
    for model in models:
        _check(model)
    described, feed, batch = _feed(Path(path), data, load)
    progress(TIME, 0, None)
    timed, unsure, notes = _timed(models, feed, load)
    profile, unprofiled = _profiled(models[0], feed, load, timed[0], progress)
    return Bench(
        timed=timed[0],
        data=described,
        shapes={name: tuple(array.shape) for name, array in feed.items()},
        batch=batch,
        threads=load.setting.threads,
        runtime=runtime.identity,
        other=timed[1] if other is not None else None,
        profile=profile,
        settings=None if search is None else _searched(models[0], feed, search, progress),
        notes=(*notes, *unprofiled),
        uncertainty=unsure,
    )


def _check(model: Path) -> None:
    """Refuse a file that is no model, and a model that was compiled for another machine."""
    if is_ort(model):
        refuse_foreign(model, open_session(model, optimize=False).get_modelmeta().custom_metadata_map)
    else:
        load_model(model)


def _refuse_elsewhere(models: Sequence[Path], runtime: Identity, search: Search | None) -> None:
    """Refuse what only ONNX Runtime has: a search of session options, and models in its format."""
    if search is not None:
        raise RequantError(f"the search for settings is of session options of ONNX Runtime, not of {runtime.title}")
    for model in models:
        if is_ort(model):
            raise RequantError(
                f"{model}: only ONNX Runtime loads files in its format; {runtime.title} needs an ONNX file"
            )


def _feed(path: Path, data: DataSource | None, load: Load) -> tuple[str, Mapping[str, Array], int | None]:
    """Return the inputs of a run as text and as arrays, and the number of items; None if it is not known."""
    if data is not None:
        if load.lengths:
            raise RequantError("lengths of axes are given twice, as options and by data; give one of the two")
        source = open_data(path, data)
        feed = (next(iter(source)) if load.batch == 1 else stacked(source, load.batch)).feed
        return source.description, feed, load_of(source, feed, load.batch).batch
    axes = {spec.name: spec.shape for spec in input_specs(open_session(path, lean=True))}
    found, _ = resolve(axes, load.lengths)
    shapes = {name: shape or () for name, shape in found.items()}
    firsts = {name for name, shape in axes.items() if shape and not isinstance(shape[0], int)}
    given = {int(shapes[name][0] or 0) for name in firsts if isinstance(shapes[name][0], int)}
    if len(given) > 1 or (given and load.batch not in (1, *given)):
        lengths = ", ".join(map(str, sorted({load.batch, *given} - ({1} if load.batch == 1 else set()))))
        raise RequantError(f"{path}: the first axes of the inputs have different lengths: {lengths}")
    if load.batch > 1 and not firsts:
        raise RequantError(
            f"{path}: the first axes of the inputs are fixed, so the model takes no batch of {load.batch}"
        )
    batch = given.pop() if given else load.batch
    batched = {name: (batch, *shape[1:]) if name in firsts else shape for name, shape in shapes.items()}
    if unknown := open_axes(batched):
        raise RequantError(
            f"{path}: the shapes of the inputs depend on {', '.join(unknown)}; give --dim, --shape (in Python: "
            "lengths) or data"
        )
    drawn = source_of_shapes(path, {name: tuple(int(n or 0) for n in shape) for name, shape in batched.items()})
    feed = next(iter(drawn)).feed
    return drawn.description, feed, batch if firsts else load_of(drawn, feed, 1).batch


def _timed(models: Sequence[Path], feed: Mapping[str, Array], load: Load) -> tuple[list[Timed], float, tuple[str, ...]]:
    """Time models in turn, or one after the other if they are too large to be in memory together.

    Returns:
        The times, the uncertainty of a single time or of their ratio, and remarks.
    """
    notes: tuple[str, ...] = ()
    if len(models) > 1 and sum(map(size_on_disk, models)) > LARGE:
        found = [each for model in models for each in _in_turns([model], feed, load, load.seconds / len(models))]
        notes = ("the models were timed one after the other, because together they are too large for the memory",)
    else:
        found = _in_turns(models, feed, load, load.seconds)
    unsure = uncertainty([times for _, times in found])
    return [timed for timed, _ in found], unsure, notes


def _profiled(
    model: Path, feed: Mapping[str, Array], load: Load, timed: Timed, progress: Progress
) -> tuple[BenchProfile | None, tuple[str, ...]]:
    """Return the times of the nodes of a model, None without a profile; and a remark if there can be none."""
    if not load.profile:
        return None, ()
    if is_ort(model):
        return None, ("only ONNX files can be profiled",)
    progress("profile", 0, None)
    return profile_model(model, feed, load.setting, timed.milliseconds), ()


def _searched(model: Path, feed: Mapping[str, Array], search: Search, progress: Progress) -> Settings:
    """Search the session options with which a model is fastest."""
    needed = {} if is_ort(model) else needed_library(load_model(model))
    return recommend(model, feed, threads=search.threads, seconds=search.seconds, needed=needed, progress=progress)


def _in_turns(
    models: Sequence[Path], feed: Mapping[str, Array], load: Load, seconds: float
) -> list[tuple[Timed, Times]]:
    """Load models, run each once, and time them in turn."""
    runs, before, runtime, threads = [], [], load.setting.opened(), load.setting.threads
    for model in models:
        start = time.perf_counter()
        run = runtime.open(model, threads=threads)
        loaded = time.perf_counter()
        run(feed)
        before.append((1e3 * (loaded - start), 1e3 * (time.perf_counter() - loaded)))
        runs.append(partial(run, feed))
    found = []
    for model, took, times in zip(models, before, race(runs, seconds=seconds, threads=threads), strict=True):
        count = len(times.seconds)
        found.append((Timed(os.fspath(model), *took, 1e3 * times.least, 1e3 * times.median, count, times.clock), times))
    return found

"""`bench_model`: the latency of one model, and the session settings with which it runs fastest."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .. import RequantError
from ..calibration.session import open_session
from ..calibration.sources import DataSource
from .data import open_data, stacked
from .files import load_model
from .generated import generated_source
from .progress import Progress, silent
from .runtime.guard import refuse_foreign
from .runtime.session import Runner
from .runtime.settings import Settings, recommend
from .runtime.timing import interleave


@dataclass(frozen=True, slots=True)
class Bench:
    """The latency of a model.

    Attributes:
        model: Its path.
        data: What it was run on.
        batch: Items per run.
        threads: Threads inside one operator; 0 left the choice to the runtime.
        milliseconds: Least time of a run.
        median_ms: Median time of a run.
        runs: How many were timed.
        settings: What `recommend` found, if it was asked.
    """

    model: str
    data: str
    batch: int
    threads: int
    milliseconds: float
    median_ms: float
    runs: int
    settings: Settings | None = None

    @property
    def rate(self) -> float:
        """Items per second, of the least time."""
        return 1e3 * self.batch / self.milliseconds

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "model": self.model,
            "data": self.data,
            "batch": self.batch,
            "threads": self.threads,
            "ms": self.milliseconds,
            "median_ms": self.median_ms,
            "items_per_second": self.rate,
            "runs": self.runs,
            "settings": self.settings and self.settings.to_json(),
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


def bench_model(
    path: str | os.PathLike[str],
    data: DataSource | None = None,
    *,
    batch: int = 1,
    threads: int = 1,
    seconds: float = 2.0,
    search: Search | None = None,
    progress: Progress = silent,
) -> Bench:
    """Time a model, and look for better session settings if asked to.

    Args:
        path: Path of the model: ONNX or ORT format, float or quantized.
        data: A data source whose first sample is run; None for random inputs.
        batch: Items per run.
        threads: Threads inside one operator; 0 leaves the choice to the runtime.
        seconds: How long it is timed.
        search: How to look for settings; None for not at all.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: The model cannot be loaded or run, was compiled for another machine, or the data do not fit.
    """
    if batch < 1:
        raise RequantError(f"batch must be at least 1, not {batch}")
    model = Path(path)
    if model.suffix.lower() == ".ort":
        refuse_foreign(path, open_session(model, optimize=False).get_modelmeta().custom_metadata_map)
    else:
        load_model(model)
    source = generated_source(model) if data is None else open_data(model, data)
    if source is None:
        raise RequantError(f"{path}: no lengths of the inputs' free axes are found that it runs on; give data")
    feed = (next(iter(source)) if batch == 1 else stacked(source, batch)).feed
    progress("time", 0, None)
    (times,) = interleave([partial(Runner(model, threads=threads), feed)], seconds=seconds)
    found = None
    if search is not None:
        found = recommend(model, feed, threads=search.threads, seconds=search.seconds, progress=progress)
    least, median = min(times), statistics.median(times)
    return Bench(os.fspath(path), source.description, batch, threads, 1e3 * least, 1e3 * median, len(times), found)

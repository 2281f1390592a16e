"""Calibration by itself: range files of float models, and the log of a logging model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from io import StringIO
from pathlib import Path

from .. import RequantError
from ..calibration.files import RangeFile, fingerprint, load_ranges, write_atomically
from ..calibration.ranges import parse_rule
from ..calibration.runner import observe, run_logged
from ..calibration.sources import DataSource
from .data import open_data
from .files import about, load_model, serialize, staging
from .planner import choose
from .progress import Progress, silent
from .simplify import simplify

Path_ = str | os.PathLike[str]


def calibrate_model(
    model: Path_,
    data: DataSource,
    *,
    rule: str = "minmax",
    samples: int | None = None,
    progress: Progress = silent,
) -> RangeFile:
    """Observe the tensors of a float model that could become uint8, after what `quantize_model` does first.

    Raises:
        RequantError: The model, the data or the rule are not what they must be, or nothing could become uint8.
    """
    chosen = parse_rule(rule)
    loaded = load_model(model)
    with about(model):
        simple = simplify(loaded, progress).model
    tensors = choose(simple).quantized
    if not tensors:
        raise RequantError(f"{model}: no tensor of this model could become uint8; there is nothing to calibrate")
    source = open_data(model, data, samples)
    with staging() as folder:
        seen = observe(
            serialize(simple, folder),
            tensors,
            source,
            histogram=chosen.needs_histogram,
            progress=partial(progress, "calibrate"),
        )
    return RangeFile.choose(
        seen.ranges, chosen, model=fingerprint(loaded), source=source.description, samples=seen.samples
    )


def log_model(
    model: Path_,
    data: DataSource,
    log: Path_,
    *,
    samples: int | None = None,
    progress: Progress = silent,
) -> int:
    """Run a logging model over data and write its min/max log; return the number of lines.

    Raises:
        RequantError: The model logs nothing, or the data do not fit; no log is written.
    """
    load_model(model)  # what is wrong with a file is told in the same words by every command
    lines = StringIO()
    written = run_logged(Path(model), open_data(model, data, samples), lines.write, progress=partial(progress, "log"))
    write_atomically(log, lines.getvalue().encode())
    return written


def merge_ranges(paths: Sequence[Path_]) -> RangeFile:
    """Merge range files of the same model; the result is that of one run over all the data.

    Raises:
        RequantError: A file cannot be read, or they are of different models or rules.
    """
    merged = load_ranges(paths[0])
    for path in paths[1:]:
        merged |= load_ranges(path)
    return merged

"""Calibrate without quantizing: write range files and logs of float models, and the log of a logging model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path

from ... import RequantError
from ...calibration.checks.findings import Finding
from ...calibration.data.sources import DataSource, named_files
from ...calibration.model.state import Link
from ...calibration.range_files.log import check_names, log_text
from ...calibration.range_files.range_file import RangeFile, load_ranges, merge_files
from ...calibration.runs.runner import run_logged
from ...system.apart import PathLike, check_apart
from ...system.given import check_function, check_path, kind_of, or_default
from ...system.log_records import MARK
from ...system.writing import write_atomically
from ..model.files import check_output, load_model, staging
from ..model.state import passed_on, possible_state
from ..options.options import Options
from ..runtime.inputs import open_data
from ..runtime.progress import Progress, silent
from .prepare import prepare
from .ranges import causes_of, inspect_data, inspect_file, observe_plan


def calibrate_model(
    model: PathLike,
    data: DataSource,
    options: Options | None = None,
    *,
    log: PathLike | None = None,
    progress: Progress = silent,
) -> Calibration:
    """Observe the tensors that `quantize_model` observes with these options, and choose the same ranges.

    Args:
        model: Path of the float model.
        data: A data source, as `quantize_model` takes it.
        options: See `Options`.
        log: A min/max log to write too, with the extremes of each tensor.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: The model, the data or the options cannot be used, or no tensor could become uint8.
    """
    options = or_default(options, Options)
    check_function(progress, "progress")
    if options.ranges is not None:
        raise RequantError(f"{model}: calibration computes ranges; give existing ranges to quantize")
    scratch = options.execution.scratch
    with staging(None if scratch is None else scratch / "model") as folder:  # all workers can read this folder
        job = prepare(model, data, options, folder, progress)
        if not job.all_int8_plan.quantized:
            raise RequantError(f"{model}: no tensor of this model could become uint8; there is nothing to calibrate")
        if log is not None:
            check_names(job.all_int8_plan.quantized)
        file = observe_plan(job, for_file=True)
        found = inspect_data(job, file.seen, causes_of(job, file.seen))
    if log is not None:
        write_atomically(log, log_text(file.seen.ranges).encode())
    if job.source is None:
        return Calibration(file, found)
    return Calibration(file, found, job.source.links, tuple(possible_state(job.source, passed_on(job.simple))))


def is_logging(model: PathLike) -> bool:
    """Return whether `insert_logging` wrote the model.

    Raises:
        RequantError: It cannot be read.
    """
    loaded = load_model(model)
    return "requant.log_first_n" in loaded.metadata_props or any(
        MARK in str(value.name) for value in loaded.graph.outputs
    )


def log_model(
    model: PathLike,
    data: DataSource,
    log: PathLike,
    *,
    samples: int | None = None,
    progress: Progress = silent,
) -> int:
    """Run a logging model over data and write its min/max log; return the number of lines.

    Raises:
        RequantError: The model logs nothing, the data do not fit the model, or the log cannot be written or is the
            file of the model or of the data; no log is written.
    """
    check_function(progress, "progress")
    check_path(model, "a model")
    check_path(log, "a log")
    check_apart({"the log": log}, [model, *named_files(data)])
    check_output(log, model, force=True)
    load_model(model)  # for the error messages of a broken file
    lines = StringIO()
    written = run_logged(Path(model), open_data(model, data, samples), lines.write, progress=partial(progress, "log"))
    write_atomically(log, lines.getvalue().encode())
    return written


def merge_ranges(paths: Sequence[PathLike]) -> Calibration:
    """Merge range files of one model, at least one; the result equals one run over all the data.

    Only findings that need no data are returned.

    Raises:
        RequantError: A file cannot be read, the files are of different models or settings, or they share data.
    """
    if isinstance(paths, (str, os.PathLike)) or not isinstance(paths, Iterable):
        raise RequantError(f"paths must be a sequence of range files, not {kind_of(paths)}")
    file = merge_files([load_ranges(path) for path in paths])
    return Calibration(file, inspect_file(file))


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of `calibrate_model`.

    Attributes:
        file: The ranges with their statistics, for `save_ranges` and `Options`.
        findings: Warnings and notes about the data, warnings first.
        state: The state that was carried from sample to sample.
        notes: A line that names the outputs that may be a state by their shapes alone.
    """

    file: RangeFile
    findings: tuple[Finding, ...] = ()
    state: tuple[Link, ...] = ()
    notes: tuple[str, ...] = ()

"""`requant calibrate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .app import PATH, Talking, flag, is_given, print_json, shown_progress
from .options import (
    EXECUTION,
    SOURCES,
    execution_options,
    force_option,
    json_option,
    overrides_option,
    reading_options,
    rule_option,
    samples_option,
)

if TYPE_CHECKING:
    from ...calibration import DataSpec
    from .. import Calibration
    from .options import Begin


@click.command(cls=Talking)
@click.argument("files", metavar="MODEL", type=PATH, nargs=-1)
@click.option("--data", metavar="SRC", help=SOURCES)
@reading_options
@click.option("-o", "--output", type=PATH, help="The range file to write.")
@click.option("--log", type=PATH, help="The min/max log to write, of a float model or one made by insert_logging.")
@click.option("--merge", is_flag=True, help="Merge range files, given in the place of MODEL, instead of a run.")
@rule_option
@click.option("--symmetric", is_flag=True, help="Choose ranges for zero points in the middle of the type.")
@overrides_option
@samples_option
@execution_options
@json_option
@force_option
def calibrate(
    files: tuple[Path, ...],
    data: str | DataSpec | None,
    output: Path | None,
    log: Path | None,
    merge: bool,
    calibration: str | None,
    symmetric: bool,
    overrides: Path | None,
    samples: int | None,
    batch: int,
    shard: tuple[int, int],
    begin: Begin,
    as_json: bool,
    force: bool,
) -> None:
    """Run MODEL over data and write what passed through it.

    \b
    requant calibrate model.onnx --data calib.npz -o ranges.json
    requant calibrate model.onnx --data calib.npz -o ranges.json --log min_max.log
    requant calibrate model.onnx --data calib.npz -o a.json --shard 1/2
    requant calibrate --merge a.json b.json -o ranges.json
    requant calibrate model.onnx --data calib.npz -o ranges.json --executor dask --scheduler tcp://host:8786

    A run that was interrupted goes on where it stopped when the same command is given again.
    """
    from ...calibration import save_ranges
    from .. import Options, Scheme, calibrate_model
    from ..model.files import check_output
    from ..steps.calibrate import is_logging

    targets = [target for target in (output, log) if target is not None]
    if not targets:
        raise click.UsageError("give -o RANGES.json, --log FILE, or both")
    if merge:
        _check_merge(files, data, log)
        _merge(files, targets[0], force, as_json)
        return
    if len(files) != 1 or data is None:
        raise click.UsageError("give one MODEL and --data SRC, or --merge and range files")
    if output is not None and log is not None and output.absolute() == log.absolute():
        raise click.UsageError("give -o and --log different paths")
    for target in targets:
        check_output(target, files[0], force=force)
    if log is not None and is_logging(files[0]):
        _write_log(files[0], data, output, log, samples, as_json)
        return
    if output is None and (calibration is not None or symmetric or overrides is not None):
        raise click.UsageError(
            "--calibration, --symmetric and --overrides are for a range file; a log holds what was seen"
        )
    options = Options(
        samples=samples,
        calibration=calibration,
        overrides=overrides,
        scheme=Scheme(symmetric=symmetric),
    )
    checkpoint = targets[0].with_name(f".{targets[0].name}.checkpoint")
    kept: list[Path] = []
    execution = begin(targets[0], batch=batch, shard=shard, checkpoint=checkpoint, kept=kept.append)
    with _resumable(checkpoint):
        with shown_progress() as progress:
            found = calibrate_model(files[0], data, replace(options, execution=execution), log=log, progress=progress)
        if output is not None:
            save_ranges(output, found.file)
        for path in kept:
            path.unlink(missing_ok=True)
    _tell_ranges(found, output, log, as_json)


def _check_merge(files: tuple[Path, ...], data: object, log: Path | None) -> None:
    """Refuse what does not go with ``--merge``."""
    idle = ("calibration", "samples", "symmetric", "overrides", *EXECUTION)
    if data is not None or log is not None or any(map(is_given, idle)):
        raise click.UsageError("give --merge A B ... and -o RANGES.json alone: nothing is run")
    if len(files) < 2:
        raise click.UsageError("give --merge two range files or more")


def _merge(files: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> None:
    """Merge range files."""
    from ...calibration import save_ranges
    from .. import merge_ranges
    from ..model.files import check_output

    for part in files:
        check_output(output, part, force=force)
    found = merge_ranges(files)
    save_ranges(output, found.file)
    _tell_ranges(found, output, None, as_json)


@contextmanager
def _resumable(checkpoint: Path) -> Iterator[None]:
    """Tell who interrupts a run that its checkpoint stands; that of another run with this output is none of its own."""
    before = _written(checkpoint)
    try:
        yield
    except KeyboardInterrupt:
        if _written(checkpoint) - before:
            raise KeyboardInterrupt("the same command goes on where it stopped") from None
        raise


def _written(checkpoint: Path) -> set[tuple[str, int]]:
    """Return the checkpoints of runs with an output, with the time of each."""
    found = set()
    for path in checkpoint.parent.iterdir():
        if path.name.startswith(f"{checkpoint.name}-"):
            with suppress(FileNotFoundError):  # another run may end meanwhile
                found.add((path.name, path.stat().st_mtime_ns))
    return found


def _write_log(
    model: Path, data: str | DataSpec, output: Path | None, log: Path, samples: int | None, as_json: bool
) -> None:
    """Run a logging model."""
    from .. import log_model

    if output is not None:
        raise click.UsageError(f"give -o RANGES.json or --log FILE, not both: {model} is a logging model")
    idle = next((name for name in ("calibration", "symmetric", "overrides", *EXECUTION) if is_given(name)), None)
    if idle is not None:
        raise click.UsageError(f"{flag(idle)} would do nothing: {model} is a logging model")
    with shown_progress() as progress:
        lines = log_model(model, data, log, samples=samples, progress=progress)
    click.echo(f"{log}: {lines} lines", err=True)
    if as_json:
        print_json({"log": str(log), "lines": lines})


def _tell_ranges(found: Calibration, output: Path | None, log: Path | None, as_json: bool) -> None:
    """Say what was written, and what the data are found to be."""
    ranges = found.file
    for target in (output, log):
        if target is not None:
            click.echo(f"{target}: {len(ranges.ranges)} tensors, {ranges.samples} samples", err=True)
    if as_json:
        print_json(
            {
                "output": None if output is None else str(output),
                "log": None if log is None else str(log),
                "data": ranges.data.description,
                "shards": [f"{part}/{parts}" for part, parts in ranges.data.shards],
                "samples": ranges.samples,
                "rule": str(ranges.rule),
                "tensors": {name: {"lo": lo, "hi": hi} for name, (lo, hi) in ranges.ranges.items()},
                "broken": {name: place.where for name, place in ranges.seen.broken.items()},
                "findings": [finding.to_json() for finding in found.findings],
            }
        )
    else:
        from ..console.quantized import print_findings

        print_findings(found.findings)

"""`requant calibrate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ... import RequantError
from ...system.printable import number_of
from ..options.declared import BATCH, SYMMETRIC, WORKERS
from .app import PATH, ToolCommand, flag, is_given, option
from .options import (
    click_option,
    force_option,
    given_options,
    json_option,
    overrides_option,
    parse_shard,
    rule_option,
    samples_option,
    source_options,
)
from .printing import print_json, print_line
from .progress import shown_progress

if TYPE_CHECKING:
    from ...calibration import DataSpec
    from .. import Calibration, Options

UNUSED = ("calibration", "symmetric", "overrides", "batch", "shard", *(row.name for row in WORKERS))
"""Options without effect on a logging model and on a merge."""


@click.command(cls=ToolCommand, section="quantize")
@click.argument("files", metavar="MODEL", type=PATH, nargs=-1)
@source_options()
@option("-o", "--output", type=PATH, help="The range file to write.")
@option("--log", type=PATH, help="The min/max log to write, of a float model or one made by insert_logging.")
@option("--merge", group="data", is_flag=True, help="Merge range files, given instead of MODEL; no model is run.")
@rule_option
@click_option(SYMMETRIC)
@overrides_option
@samples_option
@click_option(BATCH, group="data", help="Samples per run.")
@option(
    "--shard",
    group="data",
    default="1/1",
    callback=parse_shard,
    metavar="I/N",
    help="Run only part I of N of the data; see --merge.",
)
@given_options(WORKERS, into="workers")
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
    overrides: str | None,
    samples: int | None,
    batch: int,
    shard: tuple[int, int],
    workers: dict[str, Any],
    as_json: bool,
    force: bool,
) -> None:
    """Run MODEL over data and write the ranges of its tensors.

    \b
    requant calibrate model.onnx --data calib.npz -o ranges.json

    To resume an interrupted run, give the same command again. See docs/calibration.md.
    """
    from .. import Options, Scheme
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
    _check_targets(files[0], targets, force)
    if log is not None and is_logging(files[0]):
        _write_log(files[0], data, output, log, samples, as_json)
        return
    if output is None and (calibration is not None or symmetric or overrides is not None):
        raise click.UsageError("--calibration, --symmetric and --overrides need -o; a log holds observed ranges alone")
    options = Options(samples=samples, calibration=calibration, overrides=overrides, scheme=Scheme(symmetric=symmetric))
    settings = {**workers, "batch": batch, "shard": shard}
    result = _calibrated(files[0], data, options, settings, (output, log))
    _print_ranges(result, output, log, as_json)


def _check_targets(model: Path, targets: list[Path], force: bool) -> None:
    """Refuse outputs that exist, or that cannot be written."""
    from ..model.files import check_output

    for target in targets:
        check_output(target, model, force=force)


def _calibrated(
    model: Path,
    data: str | DataSpec,
    options: Options,
    settings: dict[str, Any],
    targets: tuple[Path | None, Path | None],
) -> Calibration:
    """Run a model over data and write the outputs.

    Args:
        model: The model.
        data: The data.
        options: The rule, the samples and the overrides.
        settings: The given options `WORKERS`, the batch and the shard.
        targets: The range file and the log to write; one of them may be None.
    """
    from ...calibration import save_ranges
    from .. import calibrate_model
    from ..options.build import open_execution

    output, log = targets
    first = next(target for target in targets if target is not None)
    checkpoint = first.with_name(f".{first.name}.checkpoint")
    kept: list[Path] = []
    plain = {name: settings[name] for name in ("batch", "shard")}
    with (
        open_execution(settings, first, **plain, checkpoint=checkpoint, kept=kept.append) as execution,
        _resumable(checkpoint),
    ):
        with shown_progress() as progress:
            result = calibrate_model(model, data, replace(options, execution=execution), log=log, progress=progress)
        if output is not None:
            save_ranges(output, result.file)
        for path in kept:
            path.unlink(missing_ok=True)
    return result


def _check_merge(files: tuple[Path, ...], data: object, log: Path | None) -> None:
    """Refuse options that ``--merge`` does not use."""
    if data is not None or log is not None or any(map(is_given, ("samples", *UNUSED))):
        raise click.UsageError("give --merge A B ... and -o RANGES.json alone: no model is run")
    if len(files) < 2:
        raise click.UsageError("give --merge two range files or more")


def _merge(files: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> None:
    """Merge range files."""
    from ...calibration import save_ranges
    from .. import merge_ranges
    from ..model.files import check_output

    for part in files:
        check_output(output, part, force=force)
    result = merge_ranges(files)
    save_ranges(output, result.file)
    _print_ranges(result, output, None, as_json)


@contextmanager
def _resumable(checkpoint: Path) -> Iterator[None]:
    """Tell the user how to resume a run that did not end; checkpoints of other runs of this output do not count."""
    before, advice = _written(checkpoint), "the same command goes on where it stopped"
    try:
        yield
    except KeyboardInterrupt:
        if _written(checkpoint) - before:
            raise KeyboardInterrupt(advice) from None
        raise
    except RequantError as error:  # the disk is full
        if _written(checkpoint) - before:
            raise RequantError(f"{error}; {advice}") from error
        raise


def _written(checkpoint: Path) -> set[tuple[str, int]]:
    """Return the names of all checkpoints of an output, with the time of the last change of each."""
    checkpoints = set()
    for path in checkpoint.parent.iterdir():
        if path.name.startswith(f"{checkpoint.name}-"):
            with suppress(OSError):  # another run may remove its checkpoint meanwhile
                checkpoints.add((path.name, path.stat().st_mtime_ns))
    return checkpoints


def _write_log(
    model: Path, data: str | DataSpec, output: Path | None, log: Path, samples: int | None, as_json: bool
) -> None:
    """Run a logging model and write its log."""
    from .. import log_model

    if output is not None:
        raise click.UsageError(f"give -o RANGES.json or --log FILE, not both: {model} is a logging model")
    unused = next(filter(is_given, UNUSED), None)
    if unused is not None:
        raise click.UsageError(f"{flag(unused)} would do nothing: {model} is a logging model")
    with shown_progress() as progress:
        lines = log_model(model, data, log, samples=samples, progress=progress)
    print_line(f"{log}: {number_of(lines, 'line')}", err=True)
    if as_json:
        print_json({"log": str(log), "lines": lines})


def _print_ranges(result: Calibration, output: Path | None, log: Path | None, as_json: bool) -> None:
    """Print the written files and the findings about the data."""
    ranges = result.file
    for target in (output, log):
        if target is not None:
            print_line(
                f"{target}: {number_of(len(ranges.ranges), 'tensor')}, {number_of(ranges.samples, 'sample')}", err=True
            )
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
                "findings": [finding.to_json() for finding in result.findings],
                "state": list(map(str, result.state)),
                "notes": list(result.notes),
            }
        )
    else:
        from ..console.quantized import print_findings, print_notes, print_state

        print_state(result.state)
        print_notes(result.notes)
        print_findings(result.findings)

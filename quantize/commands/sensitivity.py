"""`requant sensitivity`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...system.printable import number_of
from .app import PATH, ToolCommand, option, shows_tables
from .options import (
    WholeNumber,
    force_option,
    json_option,
    rule_option,
    source_options,
)
from .printing import print_json, print_line
from .progress import shown_progress

if TYPE_CHECKING:
    from ...calibration import DataSpec


@click.command(cls=ToolCommand, section="quantize")
@click.argument("model", type=PATH)
@source_options(required=True)
@option(
    "--samples",
    group="data",
    type=WholeNumber(1),
    default=4,
    show_default=True,
    metavar="N",
    help="Samples of each trial, evenly spaced.",
)
@option(
    "--calibration-samples",
    group="data",
    type=WholeNumber(1),
    metavar="N",
    help="Samples for the ranges. [default: all]",
)
@rule_option
@option("--units", "only_units", group="advanced", is_flag=True, help="Try units only.")
@option("--tensors", "only_tensors", group="advanced", is_flag=True, help="Try tensors only.")
@option("--all", "everything", is_flag=True, help="Show all rows, not only the worst.")
@option("--fresh", group="advanced", is_flag=True, help="Ignore cached trials.")
@option("-o", "--output", type=PATH, metavar="FILE", help="A JSON file to write.")
@json_option
@force_option
def sensitivity(
    model: Path,
    data: str | DataSpec,
    samples: int,
    calibration_samples: int | None,
    calibration: str | None,
    only_units: bool,
    only_tensors: bool,
    everything: bool,
    fresh: bool,
    output: Path | None,
    as_json: bool,
    force: bool,
) -> None:
    """Show which units and tensors lose most accuracy in int8.

    \b
    requant sensitivity model.onnx --data calib.npz

    Each is tried alone. Trials are cached in the user's cache folder, so an interrupted run can be resumed; see
    docs/sensitivity.md.
    """
    from .. import Options, measure_sensitivity
    from ..model.files import check_output

    if only_units and only_tensors:
        raise click.UsageError("give only one of --units and --tensors; none of them means both")
    if as_json and everything:
        raise click.UsageError("--all has no effect with --json, which has every row")
    if output is not None:
        check_output(output, model, force=force)
    kinds = [kind for kind, only in (("units", only_units), ("tensors", only_tensors)) if only]
    options = Options(samples=calibration_samples, calibration=calibration)
    with shown_progress() as progress:
        result = measure_sensitivity(
            model, data, options, samples=samples, kinds=kinds or ("units", "tensors"), fresh=fresh, progress=progress
        )
    if output is not None:
        from ...system.writing import write_atomically

        write_atomically(output, (json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n").encode())
        print_line(
            f"{output}: {number_of(len(result.units), 'unit')}, {number_of(len(result.tensors), 'tensor')}", err=True
        )
    if as_json:
        print_json(result.to_json())
    elif shows_tables():
        from ..console.sensitivity import print_sensitivity

        print_sensitivity(result, everything=everything)

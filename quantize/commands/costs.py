"""`requant costs show`, `measure` and `clear`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...system.printable import number_of
from ..options.declared import BATCHES
from .app import PATH, Commands, option, shows_tables
from .options import (
    click_option,
    force_option,
    json_option,
    samples_option,
    setting_options,
    source_options,
)
from .printing import print_json, print_line
from .progress import shown_progress

if TYPE_CHECKING:
    from ...calibration import DataSpec
    from ..runtime.runtimes import Setting


@click.group(cls=Commands, section="quantize")
def costs() -> None:
    """Show, measure or remove the costs of units on this machine.

    \b
    requant costs show
    requant costs measure model.onnx --data calib.npz -o server.json
    requant costs clear
    """


@costs.command("show")
@json_option
def show_costs(as_json: bool) -> None:
    """Show the cached costs by runtime, CPU and threads.

    \b
    requant costs show --json
    """
    from ..placement.costs import kept

    cached = kept()
    if as_json:
        print_json({"costs": [each.to_json() for each in cached]})
    elif shows_tables():
        from ..console.quantized import print_costs

        print_costs(cached)


@costs.command("clear")
def clear_costs() -> None:
    """Remove the cached costs.

    \b
    requant costs clear
    """
    from ..placement.costs import clear

    print_line(f"{number_of(clear(), 'file')} removed", err=True)


@costs.command("measure")
@click.argument("model", type=PATH)
@source_options(required=True)
@option("-o", "--output", type=PATH, required=True, help="The file of costs to write.")
@samples_option
@click_option(BATCHES, help="Items per run; costs of several sizes go into one file.")
@setting_options
@force_option
def measure_costs(
    model: Path,
    data: str | DataSpec,
    output: Path,
    samples: int | None,
    batch: tuple[int, ...] | None,
    setting: Setting,
    force: bool,
) -> None:
    """Measure the latency of each unit of MODEL in float and in integers, for --costs on another machine.

    \b
    requant costs measure model.onnx --data calib.npz -o server.json
    requant costs measure model.onnx --data calib.npz -o server.json --batch 1,16
    """
    from .. import Options, measure_costs
    from ..model.files import check_output
    from ..placement.costs import save

    check_output(output, model, force=force)
    with shown_progress() as progress:
        options = Options(samples=samples, batch=batch or 1, **asdict(setting))
        measured = measure_costs(model, data, options, progress)
    save(measured, output)
    print_line(f"{output}: {number_of(len(measured.rows), 'unit')} on {measured.machine.cpu}", err=True)

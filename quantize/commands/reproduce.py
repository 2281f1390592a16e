"""`requant reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..options.declared import DATA
from .app import PATH, ToolCommand, option
from .options import force_option, json_option, source_options
from .printing import print_json, print_line
from .progress import shown_progress

if TYPE_CHECKING:
    from ...calibration import DataSpec


@click.command(cls=ToolCommand, section="continuous integration")
@click.argument("model", type=PATH)
@option(
    "--model",
    "source",
    group="data",
    type=PATH,
    metavar="FLOAT",
    help="The float model. [default: the recorded name, beside MODEL]",
)
@source_options(f"The data that MODEL was made with. {DATA.help}")
@option("--ranges", group="data", type=PATH, metavar="FILE", help="The range file or log that MODEL was made with.")
@option("--plan", group="data", type=PATH, metavar="FILE", help="The plan of MODEL. [default: the plan file beside it]")
@option("-o", "--output", type=PATH, help="Where to write the remade model.")
@option("--all", "everything", is_flag=True, help="Show every difference, not only the first of each kind.")
@json_option
@force_option
def reproduce(
    model: Path,
    source: Path | None,
    data: str | DataSpec | None,
    ranges: Path | None,
    plan: Path | None,
    output: Path | None,
    everything: bool,
    as_json: bool,
    force: bool,
) -> None:
    """Make MODEL again, and compare the bytes.

    \b
    requant reproduce model_int8.onnx --data calib.npz

    Exit code 0: equal; 1: different. MODEL was written by 'requant quantize' or 'requant transform'; its metadata and
    plan say how. Nothing is timed; see docs/tools.md.
    """
    from ..console.differences import difference_lines
    from ..tools.reproduce import Inputs, reproduce_model

    inputs = Inputs(source=source, data=data, ranges=ranges, plan=plan)
    with shown_progress() as progress:
        found = reproduce_model(model, inputs, output=output, force=force, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        print_line(found.verdict)
        for line in difference_lines(found.differences, everything=everything) if found.differences else ():
            print_line(line)
    if not found.same:
        click.get_current_context().exit(1)

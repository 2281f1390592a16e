"""`requant check` and `requant init`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ..options.declared import CHECK, JSON
from .app import PATH, ToolCommand, option, shows_tables
from .options import force_option, given_options, json_option
from .printing import print_exact, print_json, print_line
from .progress import shown_progress


@click.command(cls=ToolCommand, section="continuous integration")
@click.argument("project", type=PATH, required=False)
@option("--float", "float", group="data", metavar="FLOAT", help="The float model.")
@option("--model", group="data", metavar="INT8", help="The INT8 model that was made from it.")
@option("--update", is_flag=True, help="Write the baseline instead of comparing with it.")
@given_options((row for row in CHECK if row is not JSON), into="values")
@json_option
def check(
    project: Path | None, float: str | None, model: str | None, update: bool, values: dict[str, Any], as_json: bool
) -> None:
    """Check an INT8 model against its baseline; exit code 1: worse.

    \b
    requant check --float model.onnx --model model_int8.onnx --data test.npz --update

    Accuracy, speed, the share of integer kernels and size are compared. PROJECT is a requant.toml, see 'requant init';
    with it the model is quantized first. See docs/ci.md.
    """
    from ..console.checked import print_check
    from ..gate.outputs import check_summary, github_lines, write_outputs
    from ..project.check import check_project
    from ..project.file import requested_project

    models = {name: path for name, path in (("float", float), ("model", model)) if path is not None}
    requested = requested_project(project, {**models, **values})
    read = (requested.model, requested.output, requested.baseline, *map(requested.check.get, ("data", "labels")))
    check_summary(os.environ, [requested.folder / str(each) for each in read if each])
    as_json = as_json or requested.check.get("json", False)
    made = requested.folder / requested.output
    again = requested.quantize is not None and made.exists()
    with shown_progress() as progress:
        result = check_project(requested, update=update, progress=progress)
    if again:
        print_line(f"{made}: written again; without the table [quantize] the file is checked as it is", err=True)
    if shows_tables():
        print_check(result, err=as_json)
    write_outputs(result, requested.file("junit"), requested.file("markdown"), os.environ)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in github_lines(result):
            print_exact(line, err=as_json)  # GitHub reads both streams; stdout is for the JSON
    if as_json:
        print_json(result.to_json())
    if not result.ok:
        click.get_current_context().exit(1)


@click.command(cls=ToolCommand, section="continuous integration")
@click.argument("model", type=PATH)
@option("-o", "--output", type=PATH, default="requant.toml", show_default=True, help="The project to write.")
@force_option
def init(model: Path, output: Path, force: bool) -> None:
    """Write a commented requant.toml for MODEL, for 'requant check'.

    \b
    requant init model.onnx
    """
    from ...system.writing import write_atomically
    from ..model.files import check_output
    from ..project.template import template

    check_output(output, model, force=force)
    write_atomically(output, template(model, output).encode())
    print_line(f"{output}: written; edit the data sources in it, then: requant check {output} --update", err=True)

"""`requant check` and `requant init`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from .app import PATH, Talking, is_given, print_json, shown_progress
from .options import METRICS, OF_DATA, SOURCES, force_option, json_option, pairs, reading_options, samples_option


@click.command(cls=Talking)
@click.argument("project", type=PATH, required=False)
@click.option("--float", "float", metavar="FLOAT", help="The float model.")
@click.option("--model", metavar="INT8", help="The INT8 model that was made of it.")
@click.option("--data", metavar="SRC", help=f"What both are measured on. {SOURCES}")
@reading_options
@click.option("--baseline", metavar="FILE", help="The lock file. [default: requant.lock.json]")
@click.option("--update", is_flag=True, help="Write the baseline instead of judging by it.")
@click.option("--metric", multiple=True, metavar="M", help=f"May be repeated. {METRICS} [default: as in the baseline]")
@click.option("--lower", is_flag=True, help="Of a --metric FILE.py:NAME a lower number is better.")
@click.option(
    "--tolerance",
    multiple=True,
    callback=pairs,
    metavar="NAME=X",
    help="What may be lost of a metric, of latency, mac_share, size, inputs; or the least speedup. May be repeated.",
)
@samples_option
@click.option("--batch", type=click.IntRange(1), help="Items per run while timing. [default: as in the baseline, or 1]")
@click.option(
    "--threads",
    type=click.IntRange(0),
    help="Threads while timing; 0: the runtime's choice. [default: as in the baseline, or 1]",
)
@click.option(
    "--seconds", type=click.FloatRange(0), default=2.0, show_default=True, help="How long is timed; 0: not at all."
)
@click.option("--junit", metavar="FILE", help="A JUnit XML file to write.")
@click.option("--markdown", metavar="FILE", help="A Markdown file to write; a job's summary on GitHub gets it anyway.")
@json_option
def check(project: Path | None, update: bool, as_json: bool, **given: Any) -> None:
    """Judge an INT8 model by its baseline: accuracy, speed, integer share, size; exit code 1 where one is worse.

    PROJECT is a requant.toml, which 'requant init' writes: the model is then quantized too. See docs/ci.md.

    \b
    requant check --float model.onnx --model model_int8.onnx --data test.npz --update
    requant check --float model.onnx --model model_int8.onnx --data test.npz
    requant check --float model.onnx --model model_int8.onnx --data test.npz --metric top1 --tolerance top1=0.3%
    requant check requant.toml --junit requant.xml --json
    """
    from ..console.checked import print_check
    from ..gate.outputs import github_lines, write_outputs
    from ..gate.project import asked_project, check_project

    found = asked_project(project, {name: value for name, value in _flat(given).items() if is_given(name)})
    as_json = as_json or found.check.get("json", False)
    with shown_progress() as progress:
        result = check_project(found, update=update, progress=progress)
    print_check(result)
    write_outputs(result, found.file("junit"), found.file("markdown"), os.environ)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in github_lines(result):
            click.echo(line, err=as_json)  # read from either; stdout has the JSON
    if as_json:
        print_json(result.to_json())
    if not result.ok:
        click.get_current_context().exit(1)


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    """Return options by name; what was said of data is again an option of its own."""
    data = given.pop("data")
    if data is None or isinstance(data, str):
        return {**given, "data": data}
    return {**given, **{name: getattr(data, name) for name in OF_DATA}, "data": data.text}


@click.command(cls=Talking)
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=PATH, default="requant.toml", show_default=True, help="The project to write.")
@force_option
def init(model: Path, output: Path, force: bool) -> None:
    """Write a commented requant.toml for MODEL: what 'requant check requant.toml' quantizes and checks.

    \b
    requant init model.onnx
    requant init models/model.onnx -o models/requant.toml --force
    """
    from ...calibration.files import write_atomically
    from ..gate.project import template
    from ..model.files import check_output

    check_output(output, model, force=force)
    write_atomically(output, template(model, output).encode())
    click.echo(f"{output}: written; see what it says of data, then: requant check {output} --update", err=True)

"""`requant quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..options.declared import QUANTIZE
from .app import PATH, TYPED, ToolCommand, option, shows_tables
from .options import (
    given_options,
    json_option,
)
from .printing import print_json
from .progress import shown_progress


@click.command(cls=ToolCommand, section="quantize")
@click.argument("model", type=PATH)
@option("-o", "--output", type=PATH, required=True, help="The INT8 model to write.")
@given_options(QUANTIZE, into="values")
@json_option
def quantize(model: Path, output: Path, values: dict[str, Any], as_json: bool) -> None:
    """Quantize MODEL, measure the result, and write it.

    \b
    requant quantize model.onnx --data calib.npz -o model_int8.onnx

    If INT8 is not faster on this machine, or ruins the outputs, the simplified float model is written and the exit
    code is 1. INT8 is written whatever its time with --portable, because the time on other runtimes is unknown, and
    without data (--dynamic), because the lengths of random inputs are invented.
    """
    from ..project.request import Request

    request = Request(
        model=model, output=output, values=values, command=click.get_current_context().meta.get(TYPED, "")
    )
    with shown_progress() as progress:
        result = request.run(progress)
    if as_json:
        print_json(result.to_json())
    elif shows_tables():
        from ..console.quantized import print_quantized

        print_quantized(result)
    if result.why_not and not values.get("force_int8"):
        click.get_current_context().exit(1)

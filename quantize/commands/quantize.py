"""`requant quantize`, `report`, `compare`, `sensitivity`, `costs` and `ops`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...system.printable import number_of
from ..options.declared import BATCH, BATCHES, METRICS, QUANTIZE
from .app import PATH, TYPED, Commands, ToolCommand, option, shows_tables
from .options import (
    Whole,
    click_option,
    force_option,
    given_options,
    json_option,
    lower_option,
    rule_option,
    samples_option,
    setting_options,
    source_options,
)
from .printing import print_json, print_line
from .progress import shown_progress

if TYPE_CHECKING:
    from ...calibration import DataSpec
    from ..runtime.runtimes import Setting


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
    code is 1. Without data (--dynamic), INT8 is written whatever its time: the lengths of random inputs are invented.
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


@click.command(cls=ToolCommand, section="look at models")
@click.argument("records", type=PATH, nargs=-1, required=True)
@option("-o", "--output", type=PATH, required=True, help="The .html page to write.")
@force_option
def report(records: tuple[Path, ...], output: Path, force: bool) -> None:
    """Make a page of RECORDS that 'quantize --report' wrote.

    \b
    requant report minmax.json auto.json -o compared.html

    Several records are shown side by side.
    """
    from ..report import report_runs

    runs = report_runs(records, output, force=force)
    print_line(f"{output}: {', '.join(record.name for record in runs)}", err=True)


@click.command(cls=ToolCommand, section="measure")
@click.argument("float_model", metavar="FLOAT", type=PATH)
@click.argument("int8_model", metavar="INT8", type=PATH)
@source_options(required=True)
@option("--metric", group="accuracy", metavar="M", help=METRICS)
@lower_option
@click_option(BATCH, help="Also time runs of N items.")
@setting_options
@json_option
def compare(
    float_model: Path,
    int8_model: Path,
    data: str | DataSpec,
    metric: str | None,
    lower: bool,
    batch: int,
    setting: Setting,
    as_json: bool,
) -> None:
    """Compare INT8 with FLOAT: accuracy, noise and latency.

    \b
    requant compare model.onnx model_int8.onnx --data test.npz

    The outputs are compared with those of FLOAT in ONNX Runtime, and the latency with that of FLOAT in --runtime.
    """
    from .. import compare_models
    from ..accuracy.metrics import metric_named

    if lower and metric is None:
        raise click.UsageError("--lower needs --metric")
    chosen = None if metric is None else metric_named(metric, lower=lower)
    with shown_progress() as progress:
        comparison = compare_models(
            float_model,
            int8_model,
            data,
            batch=batch,
            setting=setting,
            progress=progress,
            metric=chosen,
        )
    if as_json:
        print_json(comparison.to_json())
    elif shows_tables():
        from ..console.quantized import print_comparison

        print_comparison(comparison)


@click.command(cls=ToolCommand, section="look at models")
@click.argument("name", required=False)
@json_option
def ops(name: str | None, as_json: bool) -> None:
    """Show what each operator becomes in int8, and why.

    \b
    requant ops MatMul

    Without NAME all operators are listed. The kernels are those of the installed runtime.
    """
    from ..tools.inspect.operators import operators

    rows = operators(name)
    if as_json:
        print_json({facts.name: facts.to_json() for facts in rows})
    elif shows_tables():
        from ..console.quantized import print_operators

        print_operators(rows)


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


@click.command(cls=ToolCommand, section="quantize")
@click.argument("model", type=PATH)
@source_options(required=True)
@option(
    "--samples",
    group="data",
    type=Whole(1),
    default=4,
    show_default=True,
    metavar="N",
    help="Samples of each trial, evenly spaced.",
)
@option(
    "--calibration-samples",
    group="data",
    type=Whole(1),
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
        from ...calibration.files import write_atomically

        write_atomically(output, (json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n").encode())
        print_line(
            f"{output}: {number_of(len(result.units), 'unit')}, {number_of(len(result.tensors), 'tensor')}", err=True
        )
    if as_json:
        print_json(result.to_json())
    elif shows_tables():
        from ..console.sensitivity import print_sensitivity

        print_sensitivity(result, everything=everything)

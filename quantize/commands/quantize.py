"""`requant quantize`, `report`, `compare`, `sensitivity`, `costs` and `ops`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .app import PATH, TYPED, Commands, Talking, flag, is_given, print_json, shown_progress
from .options import (
    METRICS,
    SOURCES,
    WORKERS,
    data_option,
    force_option,
    int8_options,
    json_option,
    reading_options,
    rule_option,
    samples_option,
    search_options,
    threads_option,
    worker_options,
)

if TYPE_CHECKING:
    from ...calibration import DataSpec
    from .. import Goal, Options
    from ..report import Recorder
    from .options import Begin


@click.command(cls=Talking)
@click.argument("model", type=PATH)
@click.option("--data", metavar="SRC", help=f"{SOURCES} None for --ranges or --dynamic.")
@reading_options
@click.option("-o", "--output", type=PATH, required=True, help="The INT8 model to write.")
@int8_options
@search_options
@click.option(
    "--report",
    "reports",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="An .html page of the run, or a .json record for 'requant report'; may be repeated. See docs/report.md.",
)
@worker_options
@json_option
def quantize(
    model: Path,
    data: str | DataSpec | None,
    output: Path,
    options: Options,
    goal: Goal | None,
    reports: tuple[Path, ...],
    begin: Begin,
    as_json: bool,
) -> None:
    """Quantize MODEL with the ranges of sample data, measure what came of it, and write it.

    \b
    requant quantize resnet.onnx --data calib.npz -o resnet_int8.onnx
    requant quantize model.onnx --data folder/ -o out.onnx --exclude-ops Add --samples 200
    requant quantize model.onnx --data reader.py:feeds -o out.onnx --calibration 'percentile(99.99)' --json
    requant quantize model.onnx --ranges ranges.json -o out.onnx --overrides mine.toml
    requant quantize bert.onnx --dynamic -o bert_int8.onnx
    requant quantize model.onnx --data reader.py:feeds -o out.onnx --executor processes --workers 8
    requant quantize model.onnx --data calib.npz -o out.onnx --effort high
    requant quantize model.onnx --data calib.npz -o out.onnx --report out.html --report out.json
    requant quantize model.onnx --data calib.npz -o out.onnx --max-drop 0.5% --metric top1 --eval-data test.npz
    requant quantize model.onnx --data calib.npz -o out.onnx --plan edited.plan.json --force
    requant quantize model.onnx --data calib.npz -o out.onnx --strategy static-float,/head/MatMul=weight-only

    Where INT8 is not faster here, or ruins the outputs, the simplified float model is written and the exit code is 1.
    """
    from .. import quantize_model, search_model
    from ..model.files import check_output

    if data is None and options.ranges is None and options.selection.strategy not in ("dynamic", "weight-only"):
        raise click.UsageError("give --data SRC, a sample of the model's inputs; only --ranges and --dynamic need none")
    observing = data is not None and options.ranges is None
    if not observing and (idle := next(filter(is_given, WORKERS), None)):
        raise click.UsageError(f"{flag(idle)} would do nothing: no ranges are observed")
    if observing:
        check_output(output, model, force=options.force, external=options.external_data)
        options = replace(options, execution=begin(output))
    recorder = _recorder(reports, model, output, options.force)
    look = recorder.look if recorder is not None else None
    with shown_progress() as progress:
        if goal is None:
            result = quantize_model(model, data, output, options, progress, look)
        elif data is None:
            raise click.UsageError("a search wants --data SRC, which give the ranges and what is corrected by them")
        else:
            result = search_model(model, data, output, goal, options, progress, look)
    if recorder is not None:
        recorder.write(result)
    if as_json:
        print_json(result.to_json())
    else:
        from ..console.quantized import print_quantized

        print_quantized(result)
    if result.verdict and not options.force_int8:
        click.get_current_context().exit(1)


def _recorder(reports: tuple[Path, ...], model: Path, output: Path, force: bool) -> Recorder | None:
    """Return what takes down a run for its reports; None where none is asked for."""
    if not reports:
        return None
    from ..placement.plan_file import plan_path
    from ..report import Recorder, check_reports

    check_reports(reports, (output, plan_path(output)), model, force=force)
    return Recorder(reports, click.get_current_context().meta.get(TYPED, ""))


@click.command(cls=Talking)
@click.argument("records", type=PATH, nargs=-1, required=True)
@click.option("-o", "--output", type=PATH, required=True, help="The .html page to write.")
@force_option
def report(records: tuple[Path, ...], output: Path, force: bool) -> None:
    """Make a page of a run RECORD that 'requant quantize --report RUN.json' wrote, or of several side by side.

    \b
    requant report run.json -o run.html
    requant report minmax.json auto.json high.json -o compared.html --force
    """
    from ..report import report_runs

    found = report_runs(records, output, force=force)
    click.echo(f"{output}: {', '.join(record.name for record in found)}", err=True)


@click.command(cls=Talking)
@click.argument("float_model", metavar="FLOAT", type=PATH)
@click.argument("int8_model", metavar="INT8", type=PATH)
@data_option
@reading_options
@click.option("--metric", metavar="M", help=METRICS)
@click.option("--lower", is_flag=True, help="Of a --metric FILE.py:NAME a lower number is better.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Time runs of this many items too.")
@threads_option
@json_option
def compare(
    float_model: Path,
    int8_model: Path,
    data: str | DataSpec,
    metric: str | None,
    lower: bool,
    batch: int,
    threads: int,
    as_json: bool,
) -> None:
    """Compare INT8 with FLOAT: agreement, broken and fixed items, SQNR, latency.

    \b
    requant compare model.onnx model_int8.onnx --data test.npz --batch 128
    requant compare model.onnx model_int8.onnx --data test.py:samples --json
    requant compare model.onnx model_int8.onnx --data test.npz --metric perplexity
    requant compare model.onnx model_int8.onnx --data test.npz --metric mine.py:error --lower
    """
    from .. import compare_models
    from ..accuracy.metrics import metric_named

    if lower and metric is None:
        raise click.UsageError("--lower is of a --metric")
    chosen = None if metric is None else metric_named(metric, lower=lower)
    with shown_progress() as progress:
        found = compare_models(
            float_model, int8_model, data, batch=batch, threads=threads, progress=progress, metric=chosen
        )
    if as_json:
        print_json(found.to_json())
    else:
        from ..console.quantized import print_comparison

        print_comparison(found)


@click.command(cls=Talking)
@click.argument("name", required=False)
@json_option
def ops(name: str | None, as_json: bool) -> None:
    """Tell what becomes of each operator, or of NAME, on the installed runtime, and why.

    \b
    requant ops
    requant ops MatMul
    requant ops --json
    """
    from ..tools.inspect.operators import operators

    found = operators(name)
    if as_json:
        print_json({facts.name: facts.to_json() for facts in found})
    else:
        from ..console.quantized import print_operators

        print_operators(found)


@click.group(cls=Commands)
def costs() -> None:
    """Show, measure or forget what units cost on this machine.

    \b
    requant costs show
    requant costs measure model.onnx --data calib.npz -o server.json
    requant costs clear
    """


@costs.command("show")
@json_option
def show_costs(as_json: bool) -> None:
    """Show the costs that were kept, by runtime, CPU and threads.

    \b
    requant costs show --json
    """
    from ..placement.costs import kept

    found = kept()
    if as_json:
        print_json({"costs": [each.to_json() for each in found]})
    else:
        from ..console.quantized import print_costs

        print_costs(found)


@costs.command("clear")
def clear_costs() -> None:
    """Forget them.

    \b
    requant costs clear
    """
    from ..placement.costs import clear

    click.echo(f"{clear()} files removed", err=True)


@costs.command("measure")
@click.argument("model", type=PATH)
@data_option
@reading_options
@click.option("-o", "--output", type=PATH, required=True, help="The file of costs to write.")
@samples_option
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Items per run.")
@threads_option
@force_option
def measure_costs(
    model: Path,
    data: str | DataSpec,
    output: Path,
    samples: int | None,
    batch: int,
    threads: int,
    force: bool,
) -> None:
    """Measure what the units of MODEL take here, in float and in integers, for --costs on another machine.

    \b
    requant costs measure model.onnx --data calib.npz -o server.json
    """
    from .. import Options, measure_costs
    from ..model.files import check_output
    from ..placement.costs import save

    check_output(output, model, force=force)
    with shown_progress() as progress:
        found = measure_costs(model, data, Options(samples=samples, batch=batch, threads=threads), progress)
    save(found, output)
    click.echo(f"{output}: {len(found.rows)} units on {found.machine.cpu}", err=True)


@click.command(cls=Talking)
@click.argument("model", type=PATH)
@data_option
@reading_options
@click.option(
    "--samples", type=click.IntRange(1), default=4, show_default=True, help="Samples of each trial, picked evenly."
)
@click.option(
    "--calibration-samples", type=click.IntRange(1), metavar="N", help="Samples that give the ranges. [default: all]"
)
@rule_option
@click.option("--units", "only_units", is_flag=True, help="Try units only.")
@click.option("--tensors", "only_tensors", is_flag=True, help="Try tensors only.")
@click.option("--all", "everything", is_flag=True, help="Every row, instead of the worst.")
@click.option("--fresh", is_flag=True, help="Make all trials anew.")
@click.option("-o", "--output", type=PATH, metavar="FILE", help="A JSON file to write too.")
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
    """Tell which units and tensors of MODEL lose most in integers, each tried alone, and why.

    \b
    requant sensitivity model.onnx --data calib.npz
    requant sensitivity model.onnx --data folder/ --samples 8 --tensors --all
    requant sensitivity model.onnx --data calib.npz -o evidence.json --json

    What was tried is kept in the user's cache folder: a run that was interrupted goes on; see docs/sensitivity.md.
    """
    from .. import Options, measure_sensitivity
    from ..model.files import check_output

    if only_units and only_tensors:
        raise click.UsageError("--units and --tensors each leave the other out; give one, or none for both")
    if as_json and everything:
        raise click.UsageError("--all is of the tables; --json has every row")
    if output is not None:
        check_output(output, model, force=force)
    kinds = [kind for kind, asked in (("units", only_units), ("tensors", only_tensors)) if asked]
    options = Options(samples=calibration_samples, calibration=calibration)
    with shown_progress() as progress:
        found = measure_sensitivity(
            model,
            data,
            options,
            samples=samples,
            kinds=kinds or ("units", "tensors"),
            fresh=fresh,
            progress=progress,
        )
    if output is not None:
        from ...calibration.files import write_atomically

        write_atomically(output, (json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n").encode())
        click.echo(f"{output}: {len(found.units)} units, {len(found.tensors)} tensors", err=True)
    if as_json:
        print_json(found.to_json())
    else:
        from ..console.sensitivity import print_sensitivity

        print_sensitivity(found, everything=everything)

"""The command line: parse, call, print, exit code. Heavy imports wait until a command runs."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from requant import RequantError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Callable

    from requant.calibration import DataSpec, Execution
    from requant.quantize import Calibration, Goal, Options
    from requant.quantize.model.shapes import Lengths
    from requant.quantize.report import Recorder

    Command = Callable[..., Any]
    Begin = Callable[..., Execution]

PATH = click.Path(path_type=Path)
TYPED = "requant.typed"  # under which a context keeps the command line
STRATEGIES = ("auto", "static", "static-float", "dynamic", "weight-only")


class Refusal(click.ClickException):
    """One clear line on stderr and exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the message."""
        click.echo(f"requant: {self.format_message()}", err=True, file=file)


QUIET, VERBOSE = "requant.quiet", "requant.verbose"  # under which a context keeps what was asked for


def _remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Keep a switch for the whole of the command line; it may stand before a command or behind it."""
    key = f"requant.{param.name}"
    ctx.meta[key] = ctx.meta.get(key, False) or value


def talk_options() -> list[click.Parameter]:
    """Return the switches that every command has: how much is said on stderr."""
    say: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": _remember}
    return [
        click.Option(["-q", "--quiet"], help="Say nothing on stderr but what is wrong.", **say),
        click.Option(["-v", "--verbose"], help="Tell stages as they begin, and of an error where it arose.", **say),
    ]


class Talking(click.Command):
    """A command with `talk_options`."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, those of every command among them."""
        *own, helping = super().get_params(ctx)
        return [*own, *talk_options(), helping]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it refuses is said when stderr is there again."""
        if not ctx.meta.get(QUIET):
            return super().invoke(ctx)
        with open(os.devnull, "w", encoding="utf-8") as silence, redirect_stderr(silence):
            return super().invoke(ctx)


class Commands(click.Group):
    """A group whose commands turn a `RequantError` or a wrong command line into a `Refusal`."""

    command_class = Talking

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, those of every command among them."""
        *own, helping = super().get_params(ctx)
        return [*own, *talk_options(), helping]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and remember what was typed: a report tells it."""
        ctx.meta.setdefault(TYPED, shlex.join(["requant", *args]))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RequantError as error:
            if ctx.meta.get(VERBOSE):
                traceback.print_exception(error)
            raise Refusal(str(error)) from error
        except click.UsageError as error:  # click would print three lines
            command = error.ctx.command_path if error.ctx is not None else "requant"
            raise Refusal(f"{error.format_message()} (see '{command} --help')") from error
        except KeyboardInterrupt as interrupt:
            click.echo("; ".join(("requant: interrupted", *interrupt.args)), err=True)
            ctx.exit(130)  # as a shell says it; 1 would say that a goal was missed


def _names(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Split names at commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _optional_names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Split names at commas, where any are given; an empty string is none of them."""
    return None if value is None else _names(ctx, param, value)


def names_option(flag: str, text: str) -> Callable[[Command], Command]:
    """Declare an option of names separated by commas."""
    return click.option(flag, default="", callback=_names, metavar="A,B", help=text)


SOURCES = "FILE.npz[:SPLIT], a folder, FILE.csv, FILE.jsonl or FILE.py:NAME; see docs/data.md."
METRICS = "top1, top5, agreement, sqnr, psnr, perplexity, miou, auroc, or FILE.py:NAME; see docs/metrics.md."
data_option = click.option("--data", required=True, metavar="SRC", help=SOURCES)


def reading_options(command: Command) -> Command:
    """Declare how ``--data`` is read; the command gets a `DataSpec` as its `data` where something is said of that."""

    @click.option(
        "--preprocess",
        metavar="'...'",
        help="Of images, .wav files or texts: 'resize=256 crop=224 scale=255', 'rate=16000', 'column=text'.",
    )
    @click.option("--tokenizer", metavar="FN", help="FILE.py:NAME, called with each text of a .csv or .jsonl file.")
    @click.option("--labels", metavar="FILE", help="A .csv file of files and labels; else sub-folders are classes.")
    @functools.wraps(command)
    def reading(
        *, data: str | None, preprocess: str | None, tokenizer: str | None, labels: str | None, **others: Any
    ) -> Any:
        given = {"preprocess": preprocess, "tokenizer": tokenizer, "labels": labels}
        if all(value is None for value in given.values()):
            return command(data=data, **others)
        if data is None:
            option = next(name for name, value in given.items() if value is not None)
            raise click.UsageError(f"--{option} says how data are read; give --data SRC")
        from requant.calibration import DataSpec

        return command(data=DataSpec(data, **given), **others)

    return reading


BYTES = {"": 0, "B": 0, "K": 1, "KB": 1, "M": 2, "MB": 2, "G": 3, "GB": 3, "T": 4, "TB": 4}


def _bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Read a number of bytes: ``2GB``, ``512 MiB`` or ``1000000``."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    unit = match[2].upper() if match else ""
    base, unit = (1024, unit.replace("IB", "B")) if unit.endswith("IB") else (1000, unit)
    if match is None or unit not in BYTES:
        raise click.BadParameter(f"{value!r} is no number of bytes; write for instance 2GB", ctx, param)
    return int(float(match[1]) * base ** BYTES[unit])


def _shard(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int]:
    """Read a part of a whole: ``2/3``."""
    match = re.fullmatch(r"([1-9][0-9]*)/([1-9][0-9]*)", "1/1" if value is None else value)
    if match is None or int(match[1]) > int(match[2]):
        raise click.BadParameter(f"{value!r} is no part of a whole; write i/n, for instance 2/3", ctx, param)
    return int(match[1]), int(match[2])


OF_DATA = ("preprocess", "tokenizer", "labels")


def _pairs(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    """Read pairs of a name and a value: ``top1=0.5%``."""
    found = {}
    for item in value:
        name, equals, text = item.rpartition("=")
        if not (name and equals and text):
            raise click.BadParameter(f"{item!r} is no pair; write for instance top1=0.5%", ctx, param)
        found[name] = text
    return found


WORKERS = ("workers", "memory_limit", "executor", "scheduler")
EXECUTION = ("batch", "shard", *WORKERS)


def execution_options(command: Command) -> Command:
    """Declare how data are cut into runs, and `worker_options`."""
    batch = click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Samples per run.")
    shard = click.option(
        "--shard", callback=_shard, metavar="I/N", help="Only the i-th of n parts of the data; see --merge."
    )
    return batch(shard(worker_options(command)))


def worker_options(command: Command) -> Command:
    """Declare where and how a model is run over data.

    The command gets a function `begin`, to be called with the output, and with what else there is to say of an
    `Execution`, when all that costs little is checked: it starts the workers, which end with the command.
    """

    @click.option("--workers", type=click.IntRange(1), help="Runs at a time. [default: one per CPU]")
    @click.option(
        "--memory-limit",
        callback=_bytes,
        metavar="SIZE",
        help="What the process should stay below: 2GB. [default: a quarter of the machine]",
    )
    @click.option(
        "--executor",
        type=click.Choice(["threads", "processes", "dask"]),
        default="threads",
        show_default=True,
        help="Where the runs happen; processes where reading data in Python takes the time.",
    )
    @click.option(
        "--scheduler", metavar="URL", help="Of a Dask cluster: tcp://host:8786; else --executor dask starts one here."
    )
    @functools.wraps(command)
    def running(
        *, workers: int | None, memory_limit: int | None, executor: str, scheduler: str | None, **others: Any
    ) -> Any:
        context = click.get_current_context()
        name = "dask" if scheduler is not None and not _given("executor") else executor
        if scheduler is not None and name != "dask":
            raise click.UsageError(f"--scheduler is of a Dask cluster, which --executor {name} does not use")

        def begin(output: Path, **more: Any) -> Execution:
            from requant.calibration import Execution, executor_named

            made = context.with_resource(executor_named(name, workers, scheduler))
            scratch = output.absolute().parent  # a model that is in memory alone goes where all workers likely see it
            return Execution(executor=made, workers=workers, memory_limit=memory_limit, scratch=scratch, **more)

        return command(begin=begin, **others)

    return running


def lengths_options(command: Command) -> Command:
    """Declare how long the free axes of inputs are; the command gets `Lengths`."""

    @click.option("--shape", "shapes", multiple=True, metavar="NAME=1,3,224,224", help="Shape of an input; repeatable.")
    @click.option("--dim", "dims", multiple=True, metavar="AXIS=1", help="Length of a named axis; may be repeated.")
    @functools.wraps(command)
    def measured(*, shapes: tuple[str, ...], dims: tuple[str, ...], **others: Any) -> Any:
        from requant.quantize.model.shapes import parse_lengths

        return command(lengths=parse_lengths(shapes, dims), **others)

    return measured


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
force_option = click.option("--force", is_flag=True, help="Overwrite an existing output.")
external_option = click.option("--external-data", is_flag=True, help="Write the weights to one file beside OUT.")
rule_option = click.option(
    "--calibration",
    metavar="RULE",
    help="minmax, percentile(99.99), mean_minmax, mse, aciq, entropy or auto. [default: auto]",
)
overrides_option = click.option(
    "--overrides", type=PATH, metavar="FILE", help="Your own ranges of single tensors, TOML or JSON, which win."
)
samples_option = click.option("--samples", type=click.IntRange(1), help="Use N samples, picked evenly. [default: all]")
threads_option = click.option(
    "--threads",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Threads while timing; 0: the runtime's choice.",
)


SELECTED = ("exclude_nodes", "exclude_ops", "include_ops")
INTEGERS = ("activation", "weight", "symmetric")


def int8_options(command: Command) -> Command:
    """Declare what the INT8 model is to be; the command gets it as its `options`."""

    @click.option(
        "--dynamic", is_flag=True, help="MatMul, Gemm and LSTM find their ranges at run time: --strategy dynamic."
    )
    @samples_option
    @click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Items per run while timing.")
    @click.option(
        "--ranges",
        type=PATH,
        metavar="FILE",
        help="A range file or a min/max log; --data then only measures the result.",
    )
    @overrides_option
    @rule_option
    @click.option("--format", "format_", type=click.Choice(["qdq", "qoperator"]), default="qdq", show_default=True)
    @names_option("--exclude-nodes", "Nodes that stay float.")
    @names_option("--exclude-ops", "Operator types that stay float.")
    @names_option("--include-ops", "The only operator types that may become int8.")
    @names_option("--strategy", f"{', '.join(STRATEGIES)}; or NODE=STRATEGY for one node. [default: auto]")
    @click.option("--activation", type=click.Choice(["u8", "s8"]), default="u8", show_default=True)
    @click.option("--weight", type=click.Choice(["s8", "u8"]), default="s8", show_default=True)
    @click.option("--symmetric", is_flag=True, help="Zero points of activations in the middle of the type.")
    @click.option(
        "--isa", type=click.Choice(["auto", "vnni", "avx2"]), default="auto", show_default=True, help="The target."
    )
    @click.option(
        "--portable", is_flag=True, help="For OpenVINO and others too: standard operators, no speed of ONNX Runtime."
    )
    @click.option(
        "--place",
        type=click.Choice(["measured", "estimated", "rules", "all"]),
        default="measured",
        show_default=True,
        help="What decides where int8 pays.",
    )
    @click.option(
        "--costs", type=PATH, metavar="FILE", help="Place by costs of another machine: 'requant costs measure'."
    )
    @click.option("--plan", type=PATH, metavar="FILE", help="What single units become: an edited OUT.plan.json.")
    @click.option(
        "--lambda",
        "noise_weight",
        type=click.FloatRange(0),
        default=0.0,
        metavar="US",
        help="Microseconds per unit of noise.",
    )
    @click.option(
        "--effort",
        type=click.Choice(["low", "medium", "high"]),
        default="medium",
        show_default=True,
        help="How much is done for accuracy; low also has --calibration minmax. See docs/accuracy.md.",
    )
    @click.option(
        "--corrections", callback=_optional_names, metavar="A,B", help="Only: results, equalize, means, bias, rounding."
    )
    @external_option
    @click.option("--force-int8", is_flag=True, help="Write the INT8 model even where it is not worth it: exit code 0.")
    @threads_option
    @force_option
    @functools.wraps(command)
    def choosing(*, dynamic: bool, strategy: tuple[str, ...], format_: str, place: str, **given: Any) -> Any:
        from requant.quantize import Options, Scheme, Selection

        overall, by_node = _strategies((*strategy, "dynamic") if dynamic else strategy)
        selected = {name: frozenset(given.pop(name)) for name in SELECTED}
        integers = {name: given.pop(name) for name in INTEGERS}
        plain = {field.name: given.pop(field.name) for field in fields(Options) if field.name in given}
        options = Options(
            selection=Selection(strategy=overall, strategies=by_node, **selected),
            scheme=Scheme(**integers),
            format=format_,
            place="estimated" if plain["costs"] is not None and not _given("place") else place,
            **plain,
        )
        return command(options=options, **given)

    return choosing


def search_options(command: Command) -> Command:
    """Declare what a search must keep; the command gets it as its `goal`, None where no search is asked for."""

    @click.option(
        "--max-drop", metavar="D", help="Search the fastest model that loses at most D of --metric: 0.003 or 0.5%."
    )
    @click.option("--metric", metavar="M", help=f"For --max-drop: {METRICS}")
    @click.option("--lower", is_flag=True, help="Of a --metric FILE.py:NAME a lower number is better.")
    @click.option("--eval-data", metavar="SRC", help="For --max-drop: the data to judge by; other than --data.")
    @click.option(
        "--time-budget",
        type=click.FloatRange(min=0, min_open=True),
        metavar="S",
        help="For --max-drop: seconds after which no further model is tried. [default: 600]",
    )
    @functools.wraps(command)
    def searching(
        *,
        max_drop: str | None,
        metric: str | None,
        lower: bool,
        eval_data: str | None,
        time_budget: float | None,
        **others: Any,
    ) -> Any:
        return command(goal=_goal(max_drop, metric, lower, eval_data, time_budget), **others)

    return searching


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="requant", message="%(prog)s %(version)s")
def main() -> None:
    """Turn a float ONNX model and a sample of its data into a measured INT8 model.

    \b
    requant quantize model.onnx --data calib.npz -o model_int8.onnx
    requant compare model.onnx model_int8.onnx --data test.npz
    """


@main.command()
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
    from requant.quantize import quantize_model, search_model
    from requant.quantize.model.files import check_output

    if data is None and options.ranges is None and options.selection.strategy not in ("dynamic", "weight-only"):
        raise click.UsageError("give --data SRC, a sample of the model's inputs; only --ranges and --dynamic need none")
    observing = data is not None and options.ranges is None
    if not observing and (idle := next(filter(_given, WORKERS), None)):
        raise click.UsageError(f"{_flag(idle)} would do nothing: no ranges are observed")
    if observing:
        check_output(output, model, force=options.force, external=options.external_data)
        options = replace(options, execution=begin(output))
    recorder = _recorder(reports, model, output, options.force)
    look = recorder.look if recorder is not None else None
    with _progress() as progress:
        if goal is None:
            result = quantize_model(model, data, output, options, progress, look)
        elif data is None:
            raise click.UsageError("a search wants --data SRC, which give the ranges and what is corrected by them")
        else:
            result = search_model(model, data, output, goal, options, progress, look)
    if recorder is not None:
        recorder.write(result)
    if as_json:
        _print_json(result.to_json())
    else:
        from requant.quantize.console.quantized import print_quantized

        print_quantized(result)
    if result.verdict and not options.force_int8:
        click.get_current_context().exit(1)


def _recorder(reports: tuple[Path, ...], model: Path, output: Path, force: bool) -> Recorder | None:
    """Return what takes down a run for its reports; None where none is asked for."""
    if not reports:
        return None
    from requant.quantize.placement.plan_file import plan_path
    from requant.quantize.report import Recorder, check_reports

    check_reports(reports, (output, plan_path(output)), model, force=force)
    return Recorder(reports, click.get_current_context().meta.get(TYPED, ""))


@main.command()
@click.argument("records", type=PATH, nargs=-1, required=True)
@click.option("-o", "--output", type=PATH, required=True, help="The .html page to write.")
@force_option
def report(records: tuple[Path, ...], output: Path, force: bool) -> None:
    """Make a page of a run RECORD that 'requant quantize --report RUN.json' wrote, or of several side by side.

    \b
    requant report run.json -o run.html
    requant report minmax.json auto.json high.json -o compared.html --force
    """
    from requant.quantize.report import report_runs

    found = report_runs(records, output, force=force)
    click.echo(f"{output}: {', '.join(record.name for record in found)}", err=True)


@main.command()
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=PATH, required=True, help="The .html page to write.")
@click.option("--open", "opened", is_flag=True, help="Open the page in the browser.")
@force_option
def view(model: Path, output: Path, opened: bool, force: bool) -> None:
    """Make a page of the graph of MODEL, any ONNX model, float or quantized by whatever tool.

    \b
    requant view model.onnx -o model.html
    requant view model_int8.onnx -o graph.html --force --open
    """
    from requant.quantize.report import view_model

    nodes = view_model(model, output, force=force)
    click.echo(f"{output}: {nodes} nodes", err=True)
    if opened:
        click.launch(output.resolve().as_uri())


def _goal(
    max_drop: str | None, metric: str | None, lower: bool, eval_data: str | None, time_budget: float | None
) -> Goal | None:
    """Return what a search must keep; None where none is asked for."""
    given = {"--metric": metric, "--eval-data": eval_data, "--lower": lower or None, "--time-budget": time_budget}
    if max_drop is None:
        if idle := next((name for name, value in given.items() if value is not None), None):
            raise click.UsageError(f"{idle} is of a search, which --max-drop asks for")
        return None
    if metric is None or eval_data is None:
        missing = "--metric M" if metric is None else "--eval-data SRC"
        raise click.UsageError(f"--max-drop searches for a model: give {missing}")
    from requant.quantize import Goal
    from requant.quantize.accuracy.drop import parse_drop
    from requant.quantize.accuracy.metrics import metric_named

    return Goal(
        metric=metric_named(metric, lower=lower),
        allowance=parse_drop(max_drop),
        data=eval_data,
        seconds=600.0 if time_budget is None else time_budget,
    )


@main.command()
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
    from requant.quantize import compare_models
    from requant.quantize.accuracy.metrics import metric_named

    if lower and metric is None:
        raise click.UsageError("--lower is of a --metric")
    chosen = None if metric is None else metric_named(metric, lower=lower)
    with _progress() as progress:
        found = compare_models(
            float_model, int8_model, data, batch=batch, threads=threads, progress=progress, metric=chosen
        )
    if as_json:
        _print_json(found.to_json())
    else:
        from requant.quantize.console.quantized import print_comparison

        print_comparison(found)


@main.command()
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
    from requant.calibration import save_ranges
    from requant.quantize import Options, Scheme, calibrate_model
    from requant.quantize.model.files import check_output
    from requant.quantize.steps.calibrate import is_logging

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
        with _progress() as progress:
            found = calibrate_model(files[0], data, replace(options, execution=execution), log=log, progress=progress)
        if output is not None:
            save_ranges(output, found.file)
        for path in kept:
            path.unlink(missing_ok=True)
    _tell_ranges(found, output, log, as_json)


def _check_merge(files: tuple[Path, ...], data: object, log: Path | None) -> None:
    """Refuse what does not go with ``--merge``."""
    idle = ("calibration", "samples", "symmetric", "overrides", *EXECUTION)
    if data is not None or log is not None or any(map(_given, idle)):
        raise click.UsageError("give --merge A B ... and -o RANGES.json alone: nothing is run")
    if len(files) < 2:
        raise click.UsageError("give --merge two range files or more")


def _merge(files: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> None:
    """Merge range files."""
    from requant.calibration import save_ranges
    from requant.quantize import merge_ranges
    from requant.quantize.model.files import check_output

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
    from requant.quantize import log_model

    if output is not None:
        raise click.UsageError(f"give -o RANGES.json or --log FILE, not both: {model} is a logging model")
    idle = next((name for name in ("calibration", "symmetric", "overrides", *EXECUTION) if _given(name)), None)
    if idle is not None:
        raise click.UsageError(f"{_flag(idle)} would do nothing: {model} is a logging model")
    with _progress() as progress:
        lines = log_model(model, data, log, samples=samples, progress=progress)
    click.echo(f"{log}: {lines} lines", err=True)
    if as_json:
        _print_json({"log": str(log), "lines": lines})


def _tell_ranges(found: Calibration, output: Path | None, log: Path | None, as_json: bool) -> None:
    """Say what was written, and what the data are found to be."""
    ranges = found.file
    for target in (output, log):
        if target is not None:
            click.echo(f"{target}: {len(ranges.ranges)} tensors, {ranges.samples} samples", err=True)
    if as_json:
        _print_json(
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
        from requant.quantize.console.quantized import print_findings

        print_findings(found.findings)


@main.command()
@click.argument("source", metavar="IN", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@click.option("--transforms", "pipeline", metavar="'...'", help="What to do, in order.")
@click.option(
    "--group", "group", metavar="'...'", help="Groups instead: simplify, 'freeze(min_max_log_file=a.log) fuse'."
)
@names_option("--inputs", "Where strip_unused_nodes cuts the graph off.")
@names_option("--outputs", "What strip_unused_nodes keeps.")
@click.option(
    "--dump-dir", type=PATH, metavar="DIR", help="Write the model after each step: DIR/01_fold_constants.onnx."
)
@external_option
@json_option
@force_option
def transform(
    source: Path,
    target: Path,
    pipeline: str | None,
    group: str | None,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    dump_dir: Path | None,
    external_data: bool,
    as_json: bool,
    force: bool,
) -> None:
    """Rewrite the model IN by named transforms, or by groups of them, and write it to OUT.

    \b
    requant transform in.onnx out.onnx --transforms 'fold_constants fold_batch_norms'
    requant transform in.onnx out.onnx --transforms 'remove_nodes(op=Identity, op=Dropout)'
    requant transform in.onnx out.onnx --transforms 'strip_unused_nodes' --outputs features
    requant transform in.onnx out.onnx --group simplify --dump-dir steps
    """
    from requant.quantize.model.dumps import begin_dumps
    from requant.quantize.model.files import about, check_output, load_model, save_model
    from requant.transforms import load_plugins, parse, parse_groups, run

    load_plugins()
    if (pipeline is None) == (group is None):
        raise click.UsageError("give --transforms '...' or --group NAME" + (", not both" if pipeline else ""))
    steps = parse(pipeline) if pipeline is not None else parse_groups(group or "")
    external_data = external_data or any(step.name == "externalize_weights" for step in steps.steps)
    check_output(target, source, force=force, external=external_data)
    model = load_model(source, in_place=True)
    keep = None if dump_dir is None else begin_dumps(dump_dir, steps, source, target, force=force)
    count = itertools.count()
    with _progress() as progress, about(source):
        result = run(
            steps,
            model,
            inputs=inputs,
            outputs=outputs,
            progress=lambda step: progress(f"{source.name}: {step.name}", next(count), len(steps.steps)),
            keep=keep,
        )
    save_model(result.model, target, external=external_data)
    for step in result.applied:
        for notice in step.notices:
            click.echo(f"note: {notice}", err=True)
        click.echo(f"{step.step}: {step.error or step.change}", err=True)
    if as_json:
        steps_json = [
            {"step": str(s.step), "applied": s.change.applied, "skipped": dict(s.change.skipped), "error": s.error}
            for s in result.applied
        ]
        _print_json({"output": str(target), "pipeline": str(steps), "steps": steps_json})


@main.command()
@click.argument("name", required=False)
@click.option("--groups", is_flag=True, help="The groups, each with the pipeline that it stands for.")
@click.option("--markdown", is_flag=True, help="All pages as one Markdown document, which docs/transforms.md is.")
@json_option
def transforms(name: str | None, groups: bool, markdown: bool, as_json: bool) -> None:
    """List the transforms, or describe the one called NAME.

    \b
    requant transforms
    requant transforms fold_batch_norms
    requant transforms --groups
    requant transforms --json
    """
    from requant.transforms import GROUPS, REGISTRY, load_plugins, lookup, parse_groups
    from requant.transforms.describe import describe, describe_group, page, reference

    load_plugins()
    if sum((name is not None, groups, markdown)) > 1 or (markdown and as_json):
        raise click.UsageError("NAME, --groups and --markdown each ask for something else; give one")
    found = [lookup(name)] if name else [REGISTRY[key] for key in sorted(REGISTRY)]
    if groups and as_json:
        _print_json({group: describe_group(group) for group in sorted(GROUPS)})
    elif groups:
        for group in sorted(GROUPS):
            click.echo(f"{group}: {parse_groups(group)}")
    elif markdown:
        click.echo(reference(found), nl=False)
    elif as_json:
        _print_json({transform.name: describe(transform) for transform in found})
    elif name:
        click.echo(page(found[0]))
    else:
        width = max(len(transform.name) for transform in found)
        for transform in found:
            click.echo(f"{transform.name:{width}}  {transform.doc.splitlines()[0]}")


@main.command()
@click.argument("name", required=False)
@json_option
def ops(name: str | None, as_json: bool) -> None:
    """Tell what becomes of each operator, or of NAME, on the installed runtime, and why.

    \b
    requant ops
    requant ops MatMul
    requant ops --json
    """
    from requant.quantize.tools.inspect.operators import operators

    found = operators(name)
    if as_json:
        _print_json({facts.name: facts.to_json() for facts in found})
    else:
        from requant.quantize.console.quantized import print_operators

        print_operators(found)


@main.command()
@click.argument("model", type=PATH)
@lengths_options
@click.option("--data", metavar="SRC", help=f"Its first sample says how long free axes are. {SOURCES}")
@reading_options
@click.option("--nodes", is_flag=True, help="Every node with its multiply-accumulates and bytes; wants lengths.")
@click.option("--print-structure", "structure", is_flag=True, help="Every node with what it reads and gives, instead.")
@click.option("--dot", is_flag=True, help="The graph in the DOT language of Graphviz, instead.")
@json_option
def inspect(
    model: Path,
    lengths: Lengths,
    data: str | DataSpec | None,
    nodes: bool,
    structure: bool,
    dot: bool,
    as_json: bool,
) -> None:
    """Tell what MODEL is made of: inputs, operators, parameters, multiply-accumulates, memory, what is in int8.

    \b
    requant inspect model.onnx
    requant inspect model.onnx --dim batch=1 --nodes
    requant inspect bert.onnx --shape input_ids=1,128 --json
    requant inspect model_int8.onnx --print-structure
    requant inspect model_int8.onnx --dot > model.dot

    Nothing is run. What depends on lengths that the model leaves open is counted when they are given.
    """
    from requant.quantize.console.inspected import dot_lines, print_inspection, structure_lines
    from requant.quantize.tools.inspect.inspect import inspect_model

    if sum((structure, dot, as_json)) > 1:
        raise click.UsageError("--print-structure, --dot and --json are forms of one answer; choose one")
    found = inspect_model(model, lengths, data=data)
    if nodes and (found.macs is None or found.peak_bytes is None):
        hint = "; give --shape, --dim or --data" if found.depends else ""
        raise RequantError(f"{model}: what a node costs {found.why_unknown()}{hint}")
    if as_json:
        _print_json(found.to_json())
    elif structure or dot:
        for line in structure_lines(found) if structure else dot_lines(found):
            click.echo(line)
    else:
        print_inspection(found, nodes=nodes)


@main.command()
@click.argument("first", metavar="A", type=PATH)
@click.argument("second", metavar="B", type=PATH)
@click.option("--ignore-names", is_flag=True, help="Names of nodes, inner tensors and free axes.")
@click.option("--ignore-order", is_flag=True, help="The order of nodes.")
@click.option("--ignore-metadata", is_flag=True, help="Metadata, producer and documentation.")
@click.option("--ignore-versions", is_flag=True, help="Versions of the format and of operator sets.")
@click.option("--all", "everything", is_flag=True, help="Every difference, instead of the first of each kind.")
@json_option
def diff(
    first: Path,
    second: Path,
    ignore_names: bool,
    ignore_order: bool,
    ignore_metadata: bool,
    ignore_versions: bool,
    everything: bool,
    as_json: bool,
) -> None:
    """Tell in what the models A and B differ. Exit code 0: they are equal; 1: they differ; 2: one is no model.

    \b
    requant diff before.onnx after.onnx
    requant diff before.onnx after.onnx --ignore-names --ignore-order --ignore-metadata
    requant diff model.onnx model.onnx --json

    Lines begin with - for what only A has, + for what only B has, ~ for what differs.
    """
    from requant.quantize.console.differences import difference_lines
    from requant.quantize.tools.inspect.diff import Ignored, diff_models

    if as_json and everything:
        raise click.UsageError("--all is of the lines; --json has every difference")
    ignored = Ignored(ignore_names, ignore_order, ignore_metadata, ignore_versions)
    found = diff_models(first, second, ignored)
    if as_json:
        _print_json(found.to_json())
    else:
        for line in difference_lines(found, everything=everything):
            click.echo(line)
    if not found.equal:
        click.get_current_context().exit(1)


@main.group(cls=Commands)
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
    from requant.quantize.placement.costs import kept

    found = kept()
    if as_json:
        _print_json({"costs": [each.to_json() for each in found]})
    else:
        from requant.quantize.console.quantized import print_costs

        print_costs(found)


@costs.command("clear")
def clear_costs() -> None:
    """Forget them.

    \b
    requant costs clear
    """
    from requant.quantize.placement.costs import clear

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
    from requant.quantize import Options, measure_costs
    from requant.quantize.model.files import check_output
    from requant.quantize.placement.costs import save

    check_output(output, model, force=force)
    with _progress() as progress:
        found = measure_costs(model, data, Options(samples=samples, batch=batch, threads=threads), progress)
    save(found, output)
    click.echo(f"{output}: {len(found.rows)} units on {found.machine.cpu}", err=True)


@main.command("compile")
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=PATH, required=True, help="The model to write: .onnx, or .ort for ORT format.")
@click.option("--data", metavar="SRC", help=f"What to compare outputs on. {SOURCES} [default: random inputs]")
@reading_options
@threads_option
@json_option
@force_option
def compile_(model: Path, output: Path, data: str | DataSpec | None, threads: int, as_json: bool, force: bool) -> None:
    """Write what ONNX Runtime makes of MODEL on this CPU: it loads faster, and computes the same.

    \b
    requant compile model_int8.onnx -o model_here.onnx
    requant compile model_int8.onnx -o model_here.ort --data test.npz --json

    On a machine that differs the output is refused; see docs/deploy.md.
    """
    from requant.quantize import compile_model

    with _progress() as progress:
        found = compile_model(model, output, data, threads=threads, force=force, progress=progress)
    if as_json:
        _print_json(found.to_json())
    else:
        from requant.quantize.console.timed import print_compiled

        print_compiled(found)


@main.command()
@click.argument("model", type=PATH)
@click.option("--compare", "other", type=PATH, metavar="OTHER", help="A model to run in turns with it, on the same.")
@click.option("--data", metavar="SRC", help=f"Its first sample is run. {SOURCES} [default: random inputs]")
@reading_options
@lengths_options
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Items per run.")
@threads_option
@click.option("--no-profile", is_flag=True, help="Do not tell where the time goes.")
@click.option("--settings", is_flag=True, help="Look for the session options with which it runs fastest.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True, help="For --settings."
)
@json_option
def bench(
    model: Path,
    other: Path | None,
    data: str | DataSpec | None,
    lengths: Lengths,
    batch: int,
    threads: int,
    no_profile: bool,
    settings: bool,
    seconds: float,
    as_json: bool,
) -> None:
    """Time MODEL on this machine; then, with the profiler on, tell where the time goes.

    \b
    requant bench model.onnx --data test.npz --batch 16
    requant bench model_int8.onnx --compare model.onnx --threads 2
    requant bench bert.onnx --dim sequence=128 --batch 4
    requant bench model.onnx --settings --json
    requant bench model.onnx --settings --threads 1

    Lengths that the model leaves open, but that of the batch, are to be given or taken from data.
    With --settings, --threads says how many threads there are to be; else that is one of the settings.
    """
    from requant.quantize.tools.bench.bench import Load, Search, bench_model

    if _given("seconds") and not settings:
        raise click.UsageError("--seconds is for --settings, which is not given")
    search = Search(seconds, threads if _given("threads") else None) if settings else None
    load = Load(batch=batch, threads=threads, lengths=lengths, profile=not no_profile)
    with _progress() as progress:
        found = bench_model(model, data, load, other=other, search=search, progress=progress)
    if as_json:
        _print_json(found.to_json())
    else:
        from requant.quantize.console.timed import print_bench

        print_bench(found)


@main.command()
@click.argument("model", type=PATH)
@click.option("--data", metavar="SRC", help=f"{SOURCES} The first sample is run. [default: random inputs]")
@reading_options
@threads_option
@click.option("--all", "everything", is_flag=True, help="Every kernel, instead of the most expensive.")
@click.option(
    "--verbose-format",
    type=click.Choice(["table", "onednn"]),
    default="table",
    show_default=True,
    help="onednn: one line per executed kernel, in the form of oneDNN's verbose output.",
)
@json_option
def explain(
    model: Path,
    data: str | DataSpec | None,
    threads: int,
    everything: bool,
    verbose_format: str,
    as_json: bool,
) -> None:
    """Tell which kernels MODEL runs here, what each costs, and why it is not faster.

    MODEL is float, or quantized by whatever tool; see docs/explain.md.

    \b
    requant explain model_int8.onnx --data test.npz
    requant explain theirs.onnx --threads 2 --all
    requant explain model.onnx --verbose-format onednn
    requant explain model_int8.onnx --json
    """
    from requant.quantize.tools.explain.explain import explain_model

    lines = verbose_format == "onednn"
    if as_json and lines:
        raise click.UsageError("--json and --verbose-format onednn are two forms of one answer; choose one")
    with _progress() as progress:
        found = explain_model(model, data, threads=threads, whole=not lines, progress=progress)
    if as_json:
        _print_json(found.to_json())
    elif lines:
        from requant.quantize.runtime.onednn_lines import verbose_lines

        for line in verbose_lines(found.kernels, found.flags):
            click.echo(line)
    else:
        from requant.quantize.console.explained import print_explanation

        print_explanation(found, everything=everything)


@main.command()
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
    from requant.quantize import Options, measure_sensitivity
    from requant.quantize.model.files import check_output

    if only_units and only_tensors:
        raise click.UsageError("--units and --tensors each leave the other out; give one, or none for both")
    if as_json and everything:
        raise click.UsageError("--all is of the tables; --json has every row")
    if output is not None:
        check_output(output, model, force=force)
    kinds = [kind for kind, asked in (("units", only_units), ("tensors", only_tensors)) if asked]
    options = Options(samples=calibration_samples, calibration=calibration)
    with _progress() as progress:
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
        from requant.calibration.files import write_atomically

        write_atomically(output, (json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n").encode())
        click.echo(f"{output}: {len(found.units)} units, {len(found.tensors)} tensors", err=True)
    if as_json:
        _print_json(found.to_json())
    else:
        from requant.quantize.console.sensitivity import print_sensitivity

        print_sensitivity(found, everything=everything)


@main.command()
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
    callback=_pairs,
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
    from requant.quantize.gate.outputs import github_lines, print_check, write_outputs
    from requant.quantize.gate.project import asked_project, check_project

    found = asked_project(project, {name: value for name, value in _flat(given).items() if _given(name)})
    as_json = as_json or found.check.get("json", False)
    with _progress() as progress:
        result = check_project(found, update=update, progress=progress)
    print_check(result)
    write_outputs(result, found.file("junit"), found.file("markdown"), os.environ)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in github_lines(result):
            click.echo(line, err=as_json)  # read from either; stdout has the JSON
    if as_json:
        _print_json(result.to_json())
    if not result.ok:
        click.get_current_context().exit(1)


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    """Return options by name; what was said of data is again an option of its own."""
    data = given.pop("data")
    if data is None or isinstance(data, str):
        return {**given, "data": data}
    return {**given, **{name: getattr(data, name) for name in OF_DATA}, "data": data.text}


@main.command()
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=PATH, default="requant.toml", show_default=True, help="The project to write.")
@force_option
def init(model: Path, output: Path, force: bool) -> None:
    """Write a commented requant.toml for MODEL: what 'requant check requant.toml' quantizes and checks.

    \b
    requant init model.onnx
    requant init models/model.onnx -o models/requant.toml --force
    """
    from requant.calibration.files import write_atomically
    from requant.quantize.gate.project import template
    from requant.quantize.model.files import check_output

    check_output(output, model, force=force)
    write_atomically(output, template(model, output).encode())
    click.echo(f"{output}: written; see what it says of data, then: requant check {output} --update", err=True)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what completes commands and options in SHELL.

    \b
    eval "$(requant completion bash)"       # in ~/.bashrc
    eval "$(requant completion zsh)"        # in ~/.zshrc
    requant completion fish > ~/.config/fish/completions/requant.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(main, {}, "requant", "_REQUANT_COMPLETE").source())


def _strategies(given: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """Split ``STRATEGY`` and ``NODE=STRATEGY``; a node's name may contain ``=``."""
    from requant.quantize import Strategy

    overall, by_node = set(), {}
    for item in given:
        node, equals, name = item.rpartition("=")
        if name not in STRATEGIES:
            raise UnknownNameError("strategy", name, STRATEGIES)
        if equals:
            by_node[node] = Strategy(name)
        else:
            overall.add(Strategy(name))
    if len(overall) > 1:
        raise click.UsageError(f"one strategy for all, not {len(overall)}: {', '.join(sorted(overall))}")
    return (overall.pop() if overall else Strategy.AUTO), by_node


def _given(name: str) -> bool:
    """Whether an option of the running command stands on the command line."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _flag(name: str) -> str:
    """Return how an option is written."""
    return f"--{name.replace('_', '-')}"


def _print_json(value: object) -> None:
    """Print one JSON object on stdout."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def _stages() -> Callable[[str, int, int | None], None]:
    """Return what says on stderr which stage begins, and after how long."""
    began, seen = time.monotonic(), set[str]()

    def tell(stage: str, done: int, total: int | None) -> None:
        if stage not in seen:
            seen.add(stage)
            click.echo(f"{time.monotonic() - began:8.2f} s  {stage}", err=True)

    return tell


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar on stderr where that is a terminal, the stages where they are asked for, or nothing."""
    if not sys.stderr.isatty():
        yield _stages() if click.get_current_context().meta.get(VERBOSE) else lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        shown = {"load": bar.add_task("load", total=None)}

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in shown:  # a task of its own: rich does not take a total back
                bar.remove_task(shown.popitem()[1])
                shown[stage] = bar.add_task(stage, total=total)
            bar.update(shown[stage], completed=done, total=total)

        yield show


if __name__ == "__main__":
    main()

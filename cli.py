"""The command line: parse, call, print, exit code. Heavy imports wait until a command runs."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from requant import RequantError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Callable

    Command = Callable[..., Any]

PATH = click.Path(path_type=Path)
STRATEGIES = ("auto", "static", "static-float", "dynamic", "weight-only")


class Refusal(click.ClickException):
    """One clear line on stderr and exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the message."""
        click.echo(f"requant: {self.format_message()}", err=True, file=file)


class Commands(click.Group):
    """A group whose commands turn a `RequantError` or a wrong command line into a `Refusal`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RequantError as error:
            raise Refusal(str(error)) from error
        except click.UsageError as error:  # click would print three lines
            command = error.ctx.command_path if error.ctx is not None else "requant"
            raise Refusal(f"{error.format_message()} (see '{command} --help')") from error
        except KeyboardInterrupt:
            click.echo("requant: interrupted", err=True)
            ctx.exit(130)  # as a shell says it; 1 would say that a goal was missed


def _names(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Split names at commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def names_option(flag: str, text: str) -> Callable[[Command], Command]:
    """Declare an option of names separated by commas."""
    return click.option(flag, default="", callback=_names, metavar="A,B", help=text)


data_option = click.option("--data", required=True, metavar="SRC", help="FILE.npz[:SPLIT], a folder, or FILE.py:NAME.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
force_option = click.option("--force", is_flag=True, help="Overwrite an existing output.")
external_option = click.option("--external-data", is_flag=True, help="Write the weights to one file beside OUT.")
samples_option = click.option("--samples", type=click.IntRange(1), help="Use N samples, picked evenly. [default: all]")
threads_option = click.option(
    "--threads",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Threads while timing; 0: the runtime's choice.",
)


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
@click.option("--data", metavar="SRC", help="FILE.npz[:SPLIT], a folder, or FILE.py:NAME; none for --dynamic.")
@click.option("-o", "--output", type=PATH, required=True, help="The INT8 model to write.")
@click.option(
    "--dynamic", is_flag=True, help="MatMul, Gemm and LSTM find their ranges at run time: --strategy dynamic."
)
@samples_option
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Items per run while timing.")
@click.option("--calibration", default="minmax", show_default=True, metavar="RULE", help="minmax or percentile(99.99).")
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
@external_option
@click.option("--force-int8", is_flag=True, help="Write the INT8 model even where it is not worth having.")
@threads_option
@json_option
@force_option
def quantize(
    model: Path,
    data: str | None,
    output: Path,
    dynamic: bool,
    samples: int | None,
    batch: int,
    calibration: str,
    format_: str,
    exclude_nodes: tuple[str, ...],
    exclude_ops: tuple[str, ...],
    include_ops: tuple[str, ...],
    strategy: tuple[str, ...],
    activation: str,
    weight: str,
    symmetric: bool,
    isa: str,
    external_data: bool,
    force_int8: bool,
    threads: int,
    as_json: bool,
    force: bool,
) -> None:
    """Quantize MODEL with the ranges of sample data, measure what came of it, and write it.

    \b
    requant quantize resnet.onnx --data calib.npz -o resnet_int8.onnx
    requant quantize model.onnx --data folder/ -o out.onnx --exclude-ops Add --samples 200
    requant quantize model.onnx --data reader.py:feeds -o out.onnx --calibration 'percentile(99.99)' --json
    requant quantize bert.onnx --dynamic -o bert_int8.onnx
    requant quantize model.onnx --data calib.npz -o out.onnx --strategy static-float,/head/MatMul=weight-only
    """
    from requant.quantize import Options, Selection, quantize_model
    from requant.transforms.qparams import Scheme

    overall, by_node = _strategies((*strategy, "dynamic") if dynamic else strategy)
    selection = Selection(frozenset(exclude_nodes), frozenset(exclude_ops), frozenset(include_ops), overall, by_node)
    if data is None and overall not in ("dynamic", "weight-only"):
        raise click.UsageError("give --data SRC, a sample of the model's inputs; only --dynamic needs none")
    options = Options(
        samples=samples,
        batch=batch,
        calibration=calibration,
        format=format_,
        selection=selection,
        scheme=Scheme(activation, weight, symmetric),
        isa=isa,
        external_data=external_data,
        force_int8=force_int8,
        threads=threads,
        force=force,
    )
    with _progress() as progress:
        result = quantize_model(model, data, output, options, progress)
    if as_json:
        _print_json(result.to_json())
    else:
        from requant.quantize.tables import print_result

        print_result(result)


@main.command()
@click.argument("float_model", metavar="FLOAT", type=PATH)
@click.argument("int8_model", metavar="INT8", type=PATH)
@data_option
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Time runs of this many items too.")
@threads_option
@json_option
def compare(float_model: Path, int8_model: Path, data: str, batch: int, threads: int, as_json: bool) -> None:
    """Compare INT8 with FLOAT: agreement, broken and fixed items, SQNR, latency.

    \b
    requant compare model.onnx model_int8.onnx --data test.npz --batch 128
    requant compare model.onnx model_int8.onnx --data test.py:samples --json
    """
    from requant.quantize import compare_models

    with _progress() as progress:
        found = compare_models(float_model, int8_model, data, batch=batch, threads=threads, progress=progress)
    if as_json:
        _print_json(found.to_json())
    else:
        from requant.quantize.tables import print_comparison

        print_comparison(found)


@main.command()
@click.argument("model", type=PATH, required=False)
@click.option("--data", metavar="SRC", help="FILE.npz[:SPLIT], a folder, or FILE.py:NAME.")
@click.option("-o", "--output", type=PATH, help="The range file to write, of a float model.")
@click.option("--log", type=PATH, help="The min/max log to write, of a model made by insert_logging.")
@click.option("--merge", type=PATH, nargs=2, help="Two range files to merge into one, instead of a run.")
@click.option("--calibration", default="minmax", show_default=True, metavar="RULE", help="minmax or percentile(99.99).")
@samples_option
@force_option
def calibrate(
    model: Path | None,
    data: str | None,
    output: Path | None,
    log: Path | None,
    merge: tuple[Path, Path] | None,
    calibration: str,
    samples: int | None,
    force: bool,
) -> None:
    """Run MODEL over data and write what passed through it.

    \b
    requant calibrate model.onnx --data calib.npz -o ranges.json
    requant calibrate logged.onnx --data calib.npz --log min_max.log
    requant calibrate --merge a.json b.json -o ranges.json
    """
    from requant.calibration import save_ranges
    from requant.quantize import calibrate_model, log_model, merge_ranges
    from requant.quantize.files import check_output

    target = log or output
    if target is None or (log is not None and output is not None):
        raise click.UsageError("give either -o RANGES.json or --log FILE")
    if merge is not None:
        if model is not None or data is not None or log is not None or _given("calibration") or _given("samples"):
            raise click.UsageError("give --merge A B and -o RANGES.json alone: nothing is run")
        for part in merge:
            check_output(target, part, force=force)
        save_ranges(target, merge_ranges(merge))
        return
    if model is None or data is None:
        raise click.UsageError("give MODEL and --data SRC, or --merge A B")
    if log is not None and _given("calibration"):
        raise click.UsageError("--calibration chooses the ranges of a range file; a log holds what was seen")
    check_output(target, model, force=force)
    with _progress() as progress:
        if log is not None:
            lines = log_model(model, data, log, samples=samples, progress=progress)
            click.echo(f"{log}: {lines} lines", err=True)
        else:
            ranges = calibrate_model(model, data, rule=calibration, samples=samples, progress=progress)
            save_ranges(target, ranges)
            click.echo(f"{target}: {len(ranges.ranges)} tensors, {ranges.samples} samples", err=True)


@main.command()
@click.argument("source", metavar="IN", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@click.option("--transforms", "pipeline", required=True, metavar="'...'", help="What to do, in order.")
@names_option("--inputs", "Where strip_unused_nodes cuts the graph off.")
@names_option("--outputs", "What strip_unused_nodes keeps.")
@external_option
@json_option
@force_option
def transform(
    source: Path,
    target: Path,
    pipeline: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    external_data: bool,
    as_json: bool,
    force: bool,
) -> None:
    """Rewrite the model IN by named transforms and write it to OUT.

    \b
    requant transform in.onnx out.onnx --transforms 'fold_constants fold_batch_norms'
    requant transform in.onnx out.onnx --transforms 'remove_nodes(op=Identity, op=Dropout)'
    requant transform in.onnx out.onnx --transforms 'strip_unused_nodes' --outputs features
    """
    from requant.quantize.files import about, check_output, load_model, save_model
    from requant.transforms import load_plugins, parse, run

    load_plugins()
    check_output(target, source, force=force, external=external_data)
    steps = parse(pipeline)
    model = load_model(source)
    count = itertools.count()
    with _progress() as progress, about(source):
        result = run(
            steps,
            model,
            inputs=inputs,
            outputs=outputs,
            progress=lambda step: progress(f"{source.name}: {step.name}", next(count), len(steps.steps)),
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
@json_option
def transforms(name: str | None, as_json: bool) -> None:
    """List the transforms, or describe the one called NAME.

    \b
    requant transforms
    requant transforms fold_batch_norms
    """
    from requant.transforms import REGISTRY, load_plugins, lookup
    from requant.transforms.describe import describe, page

    load_plugins()
    found = [lookup(name)] if name else [REGISTRY[key] for key in sorted(REGISTRY)]
    if as_json:
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
    from requant.quantize.operators import operators

    found = operators(name)
    if as_json:
        _print_json({facts.name: facts.to_json() for facts in found})
    else:
        from requant.quantize.tables import print_operators

        print_operators(found)


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


def _print_json(value: object) -> None:
    """Print one JSON object on stdout."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar on stderr where that is a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
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

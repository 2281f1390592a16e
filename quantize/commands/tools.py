"""`requant inspect`, `diff`, `view`, `compile`, `bench` and `explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ... import RequantError
from .app import PATH, Talking, is_given, print_json, shown_progress
from .options import SOURCES, force_option, json_option, lengths_options, reading_options, threads_option

if TYPE_CHECKING:
    from ...calibration import DataSpec
    from ..model.shapes import Lengths


@click.command(cls=Talking)
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
    from ..report import view_model

    nodes = view_model(model, output, force=force)
    click.echo(f"{output}: {nodes} nodes", err=True)
    if opened:
        click.launch(output.resolve().as_uri())


@click.command(cls=Talking)
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
    from ..console.inspected import dot_lines, print_inspection, structure_lines
    from ..tools.inspect.inspect import inspect_model

    if sum((structure, dot, as_json)) > 1:
        raise click.UsageError("--print-structure, --dot and --json are forms of one answer; choose one")
    found = inspect_model(model, lengths, data=data)
    if nodes and (found.macs is None or found.peak_bytes is None):
        hint = "; give --shape, --dim or --data" if found.depends else ""
        raise RequantError(f"{model}: what a node costs {found.why_unknown()}{hint}")
    if as_json:
        print_json(found.to_json())
    elif structure or dot:
        for line in structure_lines(found) if structure else dot_lines(found):
            click.echo(line)
    else:
        print_inspection(found, nodes=nodes)


@click.command(cls=Talking)
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
    from ..console.differences import difference_lines
    from ..tools.inspect.diff import diff_models
    from ..tools.inspect.diff_graphs import Ignored

    if as_json and everything:
        raise click.UsageError("--all is of the lines; --json has every difference")
    ignored = Ignored(ignore_names, ignore_order, ignore_metadata, ignore_versions)
    found = diff_models(first, second, ignored)
    if as_json:
        print_json(found.to_json())
    else:
        for line in difference_lines(found, everything=everything):
            click.echo(line)
    if not found.equal:
        click.get_current_context().exit(1)


@click.command("compile", cls=Talking)
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
    from .. import compile_model

    with shown_progress() as progress:
        found = compile_model(model, output, data, threads=threads, force=force, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        from ..console.timed import print_compiled

        print_compiled(found)


@click.command(cls=Talking)
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
    from ..tools.bench.bench import Load, Search, bench_model

    if is_given("seconds") and not settings:
        raise click.UsageError("--seconds is for --settings, which is not given")
    search = Search(seconds, threads if is_given("threads") else None) if settings else None
    load = Load(batch=batch, threads=threads, lengths=lengths, profile=not no_profile)
    with shown_progress() as progress:
        found = bench_model(model, data, load, other=other, search=search, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        from ..console.timed import print_bench

        print_bench(found)


@click.command(cls=Talking)
@click.argument("model", type=PATH)
@click.option("--data", metavar="SRC", help=f"{SOURCES} The first sample is run. [default: random inputs]")
@reading_options
@threads_option
@click.option("--all", "everything", is_flag=True, help="Every kernel, instead of the most expensive.")
@json_option
def explain(
    model: Path,
    data: str | DataSpec | None,
    threads: int,
    everything: bool,
    as_json: bool,
) -> None:
    """Tell which kernels MODEL runs here, what each costs, and why it is not faster.

    MODEL is float, or quantized by whatever tool; see docs/explain.md.

    \b
    requant explain model_int8.onnx --data test.npz
    requant explain theirs.onnx --threads 2 --all
    requant explain model_int8.onnx --json
    """
    from ..tools.explain.explain import explain_model

    with shown_progress() as progress:
        found = explain_model(model, data, threads=threads, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        from ..console.explained import print_explanation

        print_explanation(found, everything=everything)

"""`requant inspect`, `diff`, `view`, `compile`, `kernels`, `bench` and `explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ... import RequantError
from ...system.printable import number_of
from ..options.declared import BATCH, SOURCES
from .app import PATH, ToolCommand, is_given, option, shows_tables
from .options import (
    Decimal,
    click_option,
    force_option,
    json_option,
    lengths_options,
    setting_options,
    source_options,
    threads_option,
)
from .printing import print_json, print_line
from .progress import shown_progress

if TYPE_CHECKING:
    from ...calibration import DataSpec
    from ..model.shapes import Lengths
    from ..runtime.runtimes import Setting


@click.command(cls=ToolCommand, section="look at models")
@click.argument("model", type=PATH)
@option("-o", "--output", type=PATH, required=True, help="The .html page to write.")
@option("--open", "opened", is_flag=True, help="Open the page in the browser.")
@force_option
def view(model: Path, output: Path, opened: bool, force: bool) -> None:
    """Write a page with the graph of MODEL.

    \b
    requant view model.onnx -o model.html --open
    """
    from ..report import view_model

    nodes = view_model(model, output, force=force)
    print_line(f"{output}: {number_of(nodes, 'node')}", err=True)
    if opened:
        click.launch(output.resolve().as_uri())


@click.command(cls=ToolCommand, section="look at models")
@click.argument("model", type=PATH)
@lengths_options
@source_options(f"The first sample gives the lengths of free axes. {SOURCES}")
@option("--nodes", is_flag=True, help="List all nodes with multiply-accumulates and bytes. Needs all lengths.")
@option("--print-structure", "structure", is_flag=True, help="List all nodes with inputs and outputs instead.")
@option("--dot", is_flag=True, help="Print the graph in the DOT language of Graphviz instead.")
@json_option
def inspect(
    model: Path, lengths: Lengths, data: str | DataSpec | None, nodes: bool, structure: bool, dot: bool, as_json: bool
) -> None:
    """Show inputs, operators, size, cost and int8 share of MODEL.

    \b
    requant inspect model.onnx --nodes

    The model is not run. Counts that depend on free axes need their lengths: --shape, --dim or --data.
    """
    from ..console.inspected import dot_lines, print_inspection, structure_lines
    from ..tools.inspect.inspect import inspect_model

    if sum((structure, dot, as_json)) > 1:
        raise click.UsageError("give only one of --print-structure, --dot and --json")
    inspection = inspect_model(model, lengths, data=data)
    if nodes and (inspection.macs is None or inspection.peak_bytes is None):
        hint = "; give --shape, --dim or --data" if inspection.depends else ""
        why = f"is unknown: {inspection.unknown[0]}" if inspection.unknown else inspection.why_unknown()
        raise RequantError(f"{model}: the cost of a node {why}{hint}")
    if as_json:
        print_json(inspection.to_json())
    elif structure or dot:
        for line in structure_lines(inspection) if structure else dot_lines(inspection):
            print_line(line)
    elif shows_tables():
        print_inspection(inspection, nodes=nodes)


@click.command(cls=ToolCommand, section="look at models")
@click.argument("first", metavar="A", type=PATH)
@click.argument("second", metavar="B", type=PATH)
@option("--ignore-names", is_flag=True, help="Ignore names of nodes, inner tensors and free axes.")
@option("--ignore-order", is_flag=True, help="Ignore the order of nodes.")
@option("--ignore-metadata", is_flag=True, help="Ignore metadata, producer and documentation.")
@option("--ignore-versions", is_flag=True, help="Ignore versions of the format and of operator sets.")
@option("--all", "everything", is_flag=True, help="Show every difference, not only the first of each kind.")
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
    """Show the differences of the models A and B.

    \b
    requant diff before.onnx after.onnx --ignore-names

    Exit code 0: equal; 1: different; 2: one is not a model. A line begins with - if only A has the part, with + if
    only B has it, and with ~ if the part differs.
    """
    from ..console.differences import difference_lines
    from ..tools.inspect.diff import diff_models
    from ..tools.inspect.diff_graphs import Ignored

    if as_json and everything:
        raise click.UsageError("--all has no effect with --json, which has every difference")
    ignored = Ignored(ignore_names, ignore_order, ignore_metadata, ignore_versions)
    differences = diff_models(first, second, ignored)
    if as_json:
        print_json(differences.to_json())
    else:
        for line in difference_lines(differences, everything=everything):
            print_line(line)
    if not differences.equal:
        click.get_current_context().exit(1)


@click.command("compile", cls=ToolCommand, section="measure")
@click.argument("model", type=PATH)
@option("-o", "--output", type=PATH, required=True, help="The model to write: .onnx, or .ort for ORT format.")
@source_options(f"Outputs are compared on these data. {SOURCES} [default: random inputs]")
@threads_option
@option(
    "--kernels",
    group="speed",
    type=click.Choice(("auto", "native", "stock")),
    default="auto",
    show_default=True,
    help="Operators: the runtime's own (stock), those of ai.requant (native), or the faster ones (auto).",
)
@json_option
@force_option
def compile_(
    model: Path, output: Path, data: str | DataSpec | None, threads: int, kernels: str, as_json: bool, force: bool
) -> None:
    """Write MODEL as ONNX Runtime optimizes it on this CPU.

    \b
    requant compile model_int8.onnx -o model_here.onnx

    The output loads faster and computes the same. Another kind of machine refuses to load it; see docs/deploy.md.
    """
    from .. import compile_model

    with shown_progress() as progress:
        compiled = compile_model(model, output, data, threads=threads, kernels=kernels, force=force, progress=progress)
    if as_json:
        print_json(compiled.to_json())
    elif shows_tables():
        from ..console.timed import print_compiled

        print_compiled(compiled)


@click.command(cls=ToolCommand, section="measure")
@json_option
def kernels(as_json: bool) -> None:
    """Show the native operators of this machine.

    \b
    requant kernels

    The lines that load them into a program are shown too.
    """
    from ..kernels.library import Kernels
    from ..kernels.library import kernels as installed

    found = installed()
    if not isinstance(found, Kernels):
        raise RequantError(found)
    if as_json:
        print_json(found.to_json())
        return
    from ..console.timed import print_kernels

    print_kernels(found)


@click.command(cls=ToolCommand, section="measure")
@click.argument("model", type=PATH)
@option(
    "--compare",
    "other",
    group="data",
    type=PATH,
    metavar="OTHER",
    help="A second model, run alternately on the same inputs.",
)
@source_options(f"The first sample is run. {SOURCES} [default: random inputs]")
@lengths_options
@click_option(BATCH, help="Items per run.")
@setting_options
@option("--no-profile", group="speed", is_flag=True, help="Do not profile the nodes.")
@option("--settings", group="speed", is_flag=True, help="Search the fastest session options.")
@option(
    "--seconds",
    group="speed",
    type=Decimal(0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Time for --settings.",
)
@json_option
def bench(
    model: Path,
    other: Path | None,
    data: str | DataSpec | None,
    lengths: Lengths,
    batch: int,
    setting: Setting,
    no_profile: bool,
    settings: bool,
    seconds: float,
    as_json: bool,
) -> None:
    """Time MODEL on this machine, then profile its nodes.

    \b
    requant bench model_int8.onnx --compare model.onnx

    Free axes other than the batch need lengths: --shape, --dim or --data. With --settings, --threads fixes the number
    of threads; without it, the number of threads is one of the settings.
    """
    from ..tools.bench.bench import Load, Search, bench_model

    if is_given("seconds") and not settings:
        raise click.UsageError("--seconds needs --settings")
    search = Search(seconds, setting.threads if is_given("threads") else None) if settings else None
    load = Load(batch=batch, setting=setting, lengths=lengths, profile=not no_profile)
    with shown_progress() as progress:
        result = bench_model(model, data, load, other=other, search=search, progress=progress)
    if as_json:
        print_json(result.to_json())
    elif shows_tables():
        from ..console.timed import print_bench

        print_bench(result)


@click.command(cls=ToolCommand, section="measure")
@click.argument("model", type=PATH)
@source_options(f"The first sample is run. {SOURCES} [default: random inputs]")
@setting_options
@option("--all", "everything", is_flag=True, help="Show every kernel, not only the slowest ones.")
@json_option
def explain(
    model: Path,
    data: str | DataSpec | None,
    setting: Setting,
    everything: bool,
    as_json: bool,
) -> None:
    """Show the kernels that MODEL runs here, and why it is slow.

    \b
    requant explain model_int8.onnx --data test.npz

    MODEL may be float, or quantized by any tool; see docs/explain.md.
    """
    from ..tools.explain.explain import explain_model

    with shown_progress() as progress:
        found = explain_model(model, data, setting=setting, progress=progress)
    if as_json:
        print_json(found.to_json())
    elif shows_tables():
        from ..console.explained import print_explanation

        print_explanation(found, everything=everything)

"""Commands that show models and the records of runs: `requant diff`, `inspect`, `ops`, `report` and `view`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ... import RequantError
from ...system.printable import number_of
from ..options.declared import SOURCES
from .app import PATH, ToolCommand, option, shows_tables
from .options import force_option, json_option, lengths_options, source_options
from .printing import print_json, print_line

if TYPE_CHECKING:
    from ...calibration import DataSpec
    from ..model.shapes import Lengths


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


@click.command(cls=ToolCommand, section="look at models")
@click.argument("model", type=PATH)
@lengths_options
@source_options(f"The first sample gives the lengths of free axes, and shapes that follow from values. {SOURCES}")
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
@click.argument("name", required=False)
@json_option
def ops(name: str | None, as_json: bool) -> None:
    """Show what each operator becomes in int8, and why.

    \b
    requant ops MatMul

    Without NAME all operators are listed. The kernels are the ones that the installed runtime has.
    """
    from ..tools.inspect.operators import operators

    rows = operators(name)
    if as_json:
        print_json({facts.name: facts.to_json() for facts in rows})
    elif shows_tables():
        from ..console.quantized import print_operators

        print_operators(rows)


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

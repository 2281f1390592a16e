"""`requant transform` and `requant transforms`."""

from __future__ import annotations

from pathlib import Path

import click

from ..options.option import Kind, Option
from .app import PATH, ToolCommand, option
from .options import click_option, external_option, force_option, json_option
from .printing import print_json, print_line, print_lines
from .progress import shown_progress

INPUTS = Option("inputs", Kind.NAMES, "Tensors where strip_unused_nodes cuts the graph.", default="", metavar="A,B")
OUTPUTS = Option("outputs", Kind.NAMES, "Tensors that strip_unused_nodes keeps.", default="", metavar="A,B")


@click.command(cls=ToolCommand, section="rewrite models")
@click.argument("source", metavar="IN", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@option("--transforms", "pipeline", metavar="'...'", help="The transforms, in order.")
@option(
    "--group", "group", metavar="'...'", help="Groups of them instead: simplify, 'freeze(min_max_log_file=a.log) fuse'."
)
@click_option(INPUTS, show_default=False)
@click_option(OUTPUTS, show_default=False)
@option("--dump-dir", type=PATH, metavar="DIR", help="Write the model after each step: DIR/01_fold_constants.onnx.")
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
    """Apply transforms to the model IN and write OUT.

    \b
    requant transform in.onnx out.onnx --transforms 'fold_constants remove_nodes(op=Identity)'

    'requant transforms' lists them.
    """
    from ...transforms import load_plugins, parse_groups
    from ..tools.transform import TransformOptions, transform_model

    load_plugins()
    if (pipeline is None) == (group is None):
        raise click.UsageError("give --transforms '...' or --group NAME" + (", not both" if pipeline else ""))
    asked = pipeline if pipeline is not None else parse_groups(group or "")
    options = TransformOptions(
        inputs=inputs, outputs=outputs, dump_dir=dump_dir, external_data=external_data, force=force
    )
    with shown_progress() as progress:
        result = transform_model(source, target, asked, options, progress)
    for line in result.lines():
        print_line(line, err=True)
    if as_json:
        print_json(result.to_json())


@click.command(cls=ToolCommand, section="rewrite models")
@click.argument("name", required=False)
@option("--groups", is_flag=True, help="List the groups with their pipelines.")
@option("--markdown", is_flag=True, help="Print all pages as one Markdown document: docs/transforms.md.")
@json_option
def transforms(name: str | None, groups: bool, markdown: bool, as_json: bool) -> None:
    """List the transforms, or describe the one called NAME.

    \b
    requant transforms fold_batch_norms
    """
    from ...transforms import GROUPS, REGISTRY, load_plugins, lookup, parse_groups
    from ...transforms.pipelines.describe import describe, describe_group, page, reference

    load_plugins()
    if sum((name is not None, groups, markdown)) > 1 or (markdown and as_json):
        raise click.UsageError("give only one of NAME, --groups and --markdown")
    listed = [lookup(name)] if name else [REGISTRY[key] for key in sorted(REGISTRY)]
    if groups and as_json:
        print_json({group: describe_group(group) for group in sorted(GROUPS)})
    elif groups:
        for group in sorted(GROUPS):
            print_line(f"{group}: {parse_groups(group)}")
    elif markdown:
        print_lines(reference(listed))
    elif as_json:
        print_json({transform.name: describe(transform) for transform in listed})
    elif name:
        print_lines(page(listed[0]))
    else:
        width = max(len(transform.name) for transform in listed)
        for transform in listed:
            print_line(f"{transform.name:{width}}  {transform.doc.splitlines()[0]}")

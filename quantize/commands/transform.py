"""`requant transform` and `requant transforms`."""

from __future__ import annotations

import itertools
from pathlib import Path

import click

from ..options.declared import Kind, Option
from .app import PATH, Talking, shown_progress
from .options import click_option, external_option, force_option, json_option
from .talk import print_json, say, say_lines

CUTS = (
    Option("inputs", Kind.NAMES, "Tensors where strip_unused_nodes cuts the graph.", default="", metavar="A,B"),
    Option("outputs", Kind.NAMES, "Tensors that strip_unused_nodes keeps.", default="", metavar="A,B"),
)


@click.command(cls=Talking)
@click.argument("source", metavar="IN", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@click.option("--transforms", "pipeline", metavar="'...'", help="The transforms, in order.")
@click.option(
    "--group", "group", metavar="'...'", help="Groups of them instead: simplify, 'freeze(min_max_log_file=a.log) fuse'."
)
@click_option(CUTS[0], show_default=False)
@click_option(CUTS[1], show_default=False)
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
    """Apply transforms, or groups of them, to the model IN and write the result to OUT.

    \b
    requant transform in.onnx out.onnx --transforms 'fold_constants fold_batch_norms'
    requant transform in.onnx out.onnx --transforms 'remove_nodes(op=Identity, op=Dropout)'
    requant transform in.onnx out.onnx --transforms 'strip_unused_nodes' --outputs features
    requant transform in.onnx out.onnx --group simplify --dump-dir steps
    """
    from ...transforms import load_plugins, parse, parse_groups, run
    from ..model.dumps import begin_dumps
    from ..model.files import about, check_output, load_model
    from ..model.writing import save_model

    load_plugins()
    if (pipeline is None) == (group is None):
        raise click.UsageError("give --transforms '...' or --group NAME" + (", not both" if pipeline else ""))
    steps = parse(pipeline) if pipeline is not None else parse_groups(group or "")
    external_data = external_data or any(step.name == "externalize_weights" for step in steps.steps)
    check_output(target, source, force=force, external=external_data)
    model = load_model(source, in_place=True)
    keep = None if dump_dir is None else begin_dumps(dump_dir, steps, source, target, force=force)
    count = itertools.count()
    with shown_progress() as progress, about(source):
        result = run(
            steps,
            model,
            inputs=inputs,
            outputs=outputs,
            progress=lambda step: progress(f"transform {source.name}: {step.name}", next(count), len(steps.steps)),
            keep=keep,
        )
    save_model(result.model, target, external=external_data)
    for step in result.applied:
        for notice in step.notices:
            say(f"note: {notice}", err=True)
        say(f"{step.step}: {step.error or step.change}", err=True)
    if as_json:
        steps_json = [
            {"step": str(s.step), "applied": s.change.applied, "skipped": dict(s.change.skipped), "error": s.error}
            for s in result.applied
        ]
        print_json({"output": str(target), "pipeline": str(steps), "steps": steps_json})


@click.command(cls=Talking)
@click.argument("name", required=False)
@click.option("--groups", is_flag=True, help="List the groups with their pipelines.")
@click.option("--markdown", is_flag=True, help="Print all pages as one Markdown document: docs/transforms.md.")
@json_option
def transforms(name: str | None, groups: bool, markdown: bool, as_json: bool) -> None:
    """List the transforms, or describe the one called NAME.

    \b
    requant transforms
    requant transforms fold_batch_norms
    requant transforms --groups
    requant transforms --json
    """
    from ...transforms import GROUPS, REGISTRY, load_plugins, lookup, parse_groups
    from ...transforms.describe import describe, describe_group, page, reference

    load_plugins()
    if sum((name is not None, groups, markdown)) > 1 or (markdown and as_json):
        raise click.UsageError("give only one of NAME, --groups and --markdown")
    listed = [lookup(name)] if name else [REGISTRY[key] for key in sorted(REGISTRY)]
    if groups and as_json:
        print_json({group: describe_group(group) for group in sorted(GROUPS)})
    elif groups:
        for group in sorted(GROUPS):
            say(f"{group}: {parse_groups(group)}")
    elif markdown:
        say_lines(reference(listed))
    elif as_json:
        print_json({transform.name: describe(transform) for transform in listed})
    elif name:
        say_lines(page(listed[0]))
    else:
        width = max(len(transform.name) for transform in listed)
        for transform in listed:
            say(f"{transform.name:{width}}  {transform.doc.splitlines()[0]}")

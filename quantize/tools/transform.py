"""`transform_model`: apply a pipeline of transforms to a model file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ... import RequantError
from ...calibration.model.session import ModelSource, open_session
from ...system.apart import PathLike
from ...system.given import check_function, check_kind, check_path, normalise_fields, or_default
from ...system.printable import one_line
from ...transforms import Pipeline, StepResult, load_plugins, parse, run
from ..model.dumps import begin_dumps
from ..model.files import about, check_onnx_output, load_model, serialize, staging
from ..model.writing import save_model
from ..runtime.progress import Progress, silent

OF_ATTRIBUTES = ("remove_attribute", "rename_attribute")
"""Transforms that may take what an operator needs; the checks of onnx do not know it of each operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformOptions:
    """The options of `transform_model`.

    Attributes:
        inputs: Tensors where ``strip_unused_nodes`` cuts the graph.
        outputs: Tensors that ``strip_unused_nodes`` keeps.
        dump_dir: A folder for the model after each step; None for none.
        external_data: Write the weights to one file beside the output; above 2 GB this always happens.
        force: Overwrite an existing output, and remove existing dumps.
    """

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    dump_dir: PathLike | None = None
    external_data: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        """Refuse values of another type.

        Raises:
            RequantError: There is one.
        """
        normalise_fields(self)


@dataclass(frozen=True, slots=True)
class Transformed:
    """A transformed model.

    Attributes:
        output: The file that was written.
        pipeline: The transforms.
        steps: The result of each step.
    """

    output: str
    pipeline: Pipeline
    steps: tuple[StepResult, ...]

    def lines(self) -> Iterator[str]:
        """Yield the notes of each step, then what it changed, or the error that it ignored."""
        for each in self.steps:
            yield from (f"note: {notice}" for notice in each.notices)
            yield f"{each.step}: {each.error or each.change}"

    def __str__(self) -> str:
        """Return `lines` as printable text."""
        return "\n".join(map(one_line, self.lines()))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        steps = [
            {
                "step": str(each.step),
                "applied": each.change.applied,
                "skipped": dict(each.change.skipped),
                "error": each.error,
            }
            for each in self.steps
        ]
        return {"output": self.output, "pipeline": str(self.pipeline), "steps": steps}


def transform_model(
    model: PathLike,
    output: PathLike,
    transforms: str | Pipeline,
    options: TransformOptions | None = None,
    progress: Progress = silent,
) -> Transformed:
    """Apply transforms to a model file and write the result.

    Args:
        model: The path of the model.
        output: The path of the model to write; it appears whole or not at all.
        transforms: A pipeline such as ``"fold_constants fold_batch_norms"``, or the result of
            `requant.transforms.parse_groups`, for instance ``parse_groups("simplify")``.
        options: See `TransformOptions`.
        progress: Called with a step, the number of steps before it, and the number of steps.

    Raises:
        RequantError: The pipeline or the model cannot be used, a step failed, a step took an attribute that the
            runtime needs, or the output cannot be written.
    """
    check_path(model, "a model")
    check_path(output, "an output")
    options, source = or_default(options, TransformOptions), Path(model)
    check_function(progress, "progress")
    load_plugins()
    pipeline = parse(transforms) if isinstance(transforms, str) else transforms
    check_kind(pipeline, Pipeline, "transforms must be a text or a Pipeline")
    external = options.external_data or any(step.name == "externalize_weights" for step in pipeline.steps)
    check_onnx_output(output, source, force=options.force, external=external)
    loaded = [load_model(source, in_place=True)]  # popped below, so that the model is freed once `run` has a copy
    folder = options.dump_dir
    keep = None if folder is None else begin_dumps(folder, pipeline, source, output, force=options.force)
    count = itertools.count()
    with about(source):
        result = run(
            pipeline,
            loaded.pop(),
            inputs=options.inputs,
            outputs=options.outputs,
            progress=lambda step: progress(f"transform {source.name}: {step.name}", next(count), len(pipeline.steps)),
            keep=keep,
        )
    names = [each.step.name for each in result.applied if each.change.applied and each.step.name in OF_ATTRIBUTES]
    if names:
        _check_loads(result.model, source, output, f"{source}: after {names[-1]}")
    save_model(result.model, output, external=external)
    return Transformed(os.fspath(output), pipeline, result.applied)


def _check_loads(model: ir.Model, source: Path, output: PathLike, place: str) -> None:
    """Refuse a result that the runtime does not load, unless it does not load the given model either.

    Args:
        model: The result.
        source: The file of the given model.
        output: The file to write; large weights of the trial go beside it.
        place: What an error begins with.

    Raises:
        RequantError: It loads the given model alone.
    """
    with staging(output) as folder:
        reason = _why_not(serialize(model.clone(), folder))
    if reason and not _why_not(source):
        raise RequantError(f"{place}: {reason.removeprefix('the model: ')}")


def _why_not(model: ModelSource) -> str:
    """Return why the runtime does not load a model; empty if it does."""
    try:
        open_session(model, lean=True)
    except RequantError as error:
        return str(error)
    return ""

"""Make a model again by a plan, without the clock: nothing is timed, and nothing is decided anew."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from ...calibration.data.sources import DataSource
from ...transforms.int8.plan import Impl, Plan
from ..job import Evidence
from ..model.metadata import Written, describe_origin
from ..options.options import Options
from ..placement.plan_file import read_plan
from ..runtime.progress import Progress
from .emit import correct, plan_by_rules, scale_channels
from .hold_out import hold_out
from .prepare import as_given, prepare
from .ranges import find_ranges
from .written import as_written


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a run decided, by the clock or by this machine.

    Attributes:
        plan: The plan file; not read if no units are in int8.
        written: What was written.
        exact: Whether the target adds products of 8 bits exactly.
    """

    plan: str | os.PathLike[str]
    written: Written
    exact: bool


def remake(
    path: str | os.PathLike[str],
    data: DataSource | None,
    options: Options,
    recipe: Recipe,
    folder: Path,
    progress: Progress,
) -> ir.Model:
    """Return the model that `quantize_model` writes with these options and this plan.

    Args:
        path: The float model.
        data: The data, as `quantize_model` takes them.
        options: The options.
        recipe: What was decided.
        folder: A folder for temporary files.
        progress: Called with each stage.

    Raises:
        RequantError: The model, the data or the plan cannot be used.
    """
    named = replace(options, isa="vnni" if recipe.exact else "avx2")
    job = replace(prepare(path, data, named, folder, progress), options=options)
    job = scale_channels(hold_out(job))
    ranges = find_ranges(job)
    facts, rules, write = plan_by_rules(job, ranges, Evidence())
    written = recipe.written
    if written == "int8":
        candidate = correct(job, ranges, write(read_plan(recipe.plan, facts, rules)))
        return as_written(candidate.model, job, ranges, candidate.plan, written)
    kept = (job.unscaled or job) if written == "float" else as_given(job, simplified=written == "given")
    model = (kept.simple if written == "unsimplified" else kept.spelled).clone()
    describe_origin(model, (), {}, job.asked())
    return as_written(model, kept, ranges, all_float(kept.all_int8_plan), written)


def all_float(plan: Plan) -> Plan:
    """Return a plan with every unit in float, without reasons."""
    return plan.with_choices({name: replace(choice, impl=Impl.FLOAT) for name, choice in plan.choices.items()})

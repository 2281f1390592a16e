"""Make a model again by a plan, without the clock: nothing is timed, and nothing is decided anew."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from ...calibration.observations import Observations
from ...calibration.sources import DataSource
from ...transforms.plan import Impl, Plan
from ..job import Evidence, Job
from ..model.files import load_model
from ..model.metadata import Environment, Made, Written, describe_making, describe_origin, plan_digest
from ..model.stored import stored_as_given
from ..options.options import Options
from ..placement.plan_file import read_plan
from ..runtime.progress import Progress
from .emit import correct, equalize, plan_by_rules
from .hold_out import hold_out
from .prepare import as_given, prepare
from .ranges import TensorRanges, find_ranges


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
    job = equalize(hold_out(job))
    ranges = find_ranges(job)
    facts, rules, write = plan_by_rules(job, ranges, Evidence())
    written = recipe.written
    if written == "int8":
        candidate = correct(job, ranges, write(read_plan(recipe.plan, facts, rules)))
        return as_written(candidate.model, job, ranges, candidate.plan, written)
    kept = as_given(job) if written == "given" else job
    model = kept.simple.clone()
    describe_origin(model, (), {}, job.asked())
    return as_written(model, kept, ranges, all_float(kept.all_int8_plan if written == "given" else rules), written)


def all_float(plan: Plan) -> Plan:
    """Return a plan with every unit in float, without reasons."""
    return plan.with_choices({name: replace(choice, impl=Impl.FLOAT) for name, choice in plan.choices.items()})


def as_written(model: ir.Model, job: Job, ranges: TensorRanges, plan: Plan, written: Written) -> ir.Model:
    """Return a model in the form in which it is written; its metadata say what is needed to make it again.

    Its float weights are stored as the given model stores them, where that is shorter.
    """
    given = {"data": job.judged, "ranges": job.supply.ranges is not None}
    made = Made(
        source=job.path.name,
        model=job.identity,
        written=written,
        plan=plan_digest(plan),
        own_plan=job.options.plan is not None,
        calibration=job.options.calibration,
        inputs=tuple(name for name in ("data", "ranges") if given[name]),
        data=data_digest(ranges.seen),
        exact=job.no_saturation,
        native=job.policy.native,
        environment=Environment.here(),
    )
    describe_making(model, made)
    return stored_as_given(model, load_model(job.path))


def data_digest(seen: Observations) -> str:
    """Return the SHA-256, in hex, of the digests of all observed feeds, in any order; empty without any."""
    rows = sorted((digest, times) for digest, (_, times) in seen.repeated.items())
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest() if rows else ""

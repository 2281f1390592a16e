"""The form in which a model is written: its metadata, and how its float weights are stored."""

from __future__ import annotations

import hashlib
import json

import onnx_ir as ir

from ...calibration.statistics.observations import Observations
from ...transforms.int8.plan import Plan
from ..job import Job
from ..model.files import load_model
from ..model.metadata import Environment, Made, Written, describe_making, plan_digest
from ..model.stored import stored_as_given
from .ranges import TensorRanges


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

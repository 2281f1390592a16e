"""Find what is to be adjusted of the weights and biases of an INT8 model."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import islice

from ... import RequantError
from ...calibration.session import Array
from ...transforms.int8_weights import Adjustment
from ..job import Candidate, Job
from ..options.efforts import EFFORTS
from .bias import correct_bias
from .layer_by_layer import Step, walk
from .rounding import learn_rounding, operations

SAMPLES = 64


def find_adjustments(job: Job, candidate: Candidate) -> dict[str, Adjustment]:
    """Return the adjustments of the units of a candidate, by name; as far as pieces of the models run."""
    if job.source is None:
        return {}
    feeds = [sample.feed for sample in islice(job.source.samples(SAMPLES), SAMPLES)]
    total = sum(candidate.plan.impl(unit).reads_u8 for unit in candidate.plan.units)
    left = EFFORTS[job.options.effort].operations or math.inf  # with little effort it is asked for by name
    found: dict[str, Adjustment] = {}

    def correct(step: Step) -> tuple[Adjustment, list[Array]]:
        nonlocal left
        stored, needed = None, operations(step)
        if "rounding" in job.corrections and needed <= left and job.no_saturation:
            left -= needed
            stored = learn_rounding(step, shifted="bias" in job.corrections)
        if "bias" in job.corrections:
            return correct_bias(step, stored)
        return Adjustment(stored=stored), step.run(stored)

    with suppress(RequantError):  # what is behind a piece that does not run on its own is left as it is
        for name, adjustment in walk(job, candidate, feeds, correct):
            found[name] = adjustment
            job.progress("correct weights", len(found), total)
    return found

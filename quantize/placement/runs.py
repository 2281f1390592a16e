"""How often a float model may run for one purpose: an estimate by built-in costs, equal on all machines."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...calibration.model.session import FEW, Array
from ...transforms.graphs.queries import nodes_by_name
from ..job import Job
from ..model.shapes import Shape, fed_shapes
from .estimates import runs_in

MOST_SAMPLES = 64
"""The number of samples that judge a model, or that its weights are corrected on, at most."""
RUNNING = 6.0
"""How long these samples may take in the float model, in seconds by built-in costs; at least `FEW` of them are used.

A network of U-Net's kind for images of 1024 x 1024 pixels has 10^12 products. Each of its outputs has as many values as
64 images of a small network have, so that fewer images say as much.
"""


SLACK = 3.0
"""How many times as long as by built-in costs some runs may take, before the clock limits their number."""


def samples_for(job: Job) -> int:
    """Return how many samples judge the models of a job and correct their weights, `FEW` to `MOST_SAMPLES`."""
    if job.feed is None:
        return MOST_SAMPLES
    return int(min(max(runs_for(job, job.feed, RUNNING), FEW), MOST_SAMPLES))


def runs_within(job: Job, feed: Mapping[str, Array], seconds: float, run: float) -> float:
    """Return what `runs_for` does, unless the runs then take more than `SLACK` times as long: built-in costs are rough.

    Args:
        job: The job.
        feed: The feed.
        seconds: The time by built-in costs.
        run: The measured time of a run, in seconds.
    """
    return min(runs_for(job, feed, seconds), SLACK * seconds / run)


def shapes_for(job: Job, feed: Mapping[str, Array]) -> Mapping[str, Shape]:
    """Return the shapes of the tensors of the simplified model for a feed: those of the job's own feed where they fit.

    To infer them takes as long as some runs of the model.
    """
    own, asked = ({name: array.shape for name, array in each.items()} for each in (job.feed or {}, feed))
    return job.fed_shapes if own and own == asked else fed_shapes(job.simple, feed)


def runs_for(job: Job, feed: Mapping[str, Array], seconds: float) -> float:
    """Return the estimated number of runs of the float model on a feed in some seconds."""
    sizes = {name: math.prod(shape) for name, shape in shapes_for(job, feed).items()}
    return runs_in(seconds, job.all_int8_plan.units, nodes_by_name(job.simple), sizes)

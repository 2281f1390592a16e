"""How often a float model may run for one purpose: an estimate by built-in costs, equal on all machines."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...calibration.session import FEW, Array
from ...transforms.graph import nodes_by_name
from ..job import Job
from ..model.shapes import fed_shapes
from .estimates import runs_in

MOST_SAMPLES = 64
"""The number of samples that judge a model, or that its weights are corrected on, at most."""
RUNNING = 6.0
"""How long these samples may take in the float model, in seconds by built-in costs; at least `FEW` of them are used.

A network of U-Net's kind for images of 1024 x 1024 pixels has 10^12 products. Each of its outputs has as many values as
64 images of a small network have, so that fewer images say as much.
"""


def samples_for(job: Job) -> int:
    """Return how many samples judge the models of a job and correct their weights, `FEW` to `MOST_SAMPLES`."""
    if job.feed is None:
        return MOST_SAMPLES
    return int(min(max(runs_for(job, job.feed, RUNNING), FEW), MOST_SAMPLES))


def runs_for(job: Job, feed: Mapping[str, Array], seconds: float) -> float:
    """Return the estimated number of runs of the float model on a feed in some seconds."""
    sizes = {name: math.prod(shape) for name, shape in fed_shapes(job.simple, feed).items()}
    return runs_in(seconds, job.all_int8_plan.units, nodes_by_name(job.simple), sizes)

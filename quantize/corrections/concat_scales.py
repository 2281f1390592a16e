"""Scale the parts of a Concat to similar ranges: each channel gets the steps that its values need.

The result of a Concat has one step. A part with 1 / r of the range has r^2 times the relative noise power: a matting
network joins features of [-23, 57] and an image of [0, 1], which has 3 of the 256 steps. A factor in front of the
Concat, with weights divided by it behind the Concat, is exact for each channel. The factors are powers of two with the
least noise in what the readers compute, that of their weights included. The noise of the parts themselves does not
count: a part may be float where its own step is too wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np

from ...system.printable import number_of
from ...transforms.fold_batch_norms import fold_batch_norms
from ...transforms.graphs.queries import node_name
from ...transforms.graphs.rewriter import names
from ...transforms.lift_channel_scales import lift_channel_scales
from ...transforms.parts.concat_scales import JoinedParts, find_joined, scale_parts
from ..job import Job
from ..model.files import serialize
from .channel_noise import Channels, Floats, reader_of, total
from .equalization import EXPONENTS, TINY, channel_statistics, integer_nodes, may_scale, relative

SAMPLES = 16
LEAST_RATIO = 4.0
"""Where the narrowest part is not narrower by this factor it has 6 of the 8 bits, and all stays."""
LEAST_GAIN = 0.5
"""The parts stay as they are if factors remove less than this share of the noise: each factor may take a product."""


def scale_joined_parts(job: Job) -> Job:
    """Return a job whose simplified model has the parts of Concats in similar ranges.

    The factors go into the weights that make a part where they can; else a Mul is new, which the plan of the job does
    not know. The job is returned as it is where nothing gains, and `Job.unscaled` is the job before. Tensors with
    ranges or QDQ pairs from the user are left alone.

    Raises:
        RequantError: The data do not fit the model.
    """
    if job.source is None or not may_scale(job):
        return job
    integer, model = integer_nodes(job), job.simple.clone()
    usable = [
        each
        for each in find_joined(model)
        if node_name(each.node) in integer and not job.reserved.intersection(each.readers.tensors)
    ]
    if not usable:
        return job
    axes = {name: each.readers.tensors[name] for each in usable for name in _tensors(each)}
    seen = channel_statistics(model, axes, job.source.samples(SAMPLES))
    taken, count = names(model), 0
    for each in usable:
        factors = choose(each, seen, integer)
        count += factors is not None and scale_parts(each, factors, taken)
    if not count:
        return job
    lift_channel_scales(model)
    fold_batch_norms(model)
    note = f"parts of {number_of(count, 'Concat')} scaled to similar ranges"
    source = serialize(model, job.folder)
    scaled, before = job.scaled | {"parts"}, job.unscaled or job
    return replace(job, simple=model, float_source=source, notes=(*job.notes, note), scaled=scaled, unscaled=before)


def _tensors(joined: JoinedParts) -> set[str]:
    """Return the result of a Concat, and the tensors that the readers of its channels read."""
    return {joined.tensor, *(fold.tensor for fold in joined.readers.readers)}


def choose(joined: JoinedParts, seen: Mapping[str, Channels], integer: set[str]) -> Floats | None:
    """Return the factor of each channel with the least noise, (C,); None if it removes too little of the noise.

    Args:
        joined: The Concat.
        seen: Statistics of the channels of the result and of what its readers read.
        integer: Names of the nodes that compute in integers.
    """
    if not _tensors(joined) <= seen.keys() or _ratio(joined, seen[joined.tensor]) < LEAST_RATIO:
        return None
    folds = [fold for fold in joined.readers.readers if node_name(fold.node) in integer]
    readers = [reader for reader in map(reader_of, folds) if reader is not None]
    if not readers:
        return None
    widths = relative(_widths(seen[joined.tensor]))
    weights = relative(np.max([reader.reach / reader.reach.max(initial=TINY) for reader in readers], axis=0))
    best, least = None, total(readers, seen, (), np.ones_like(widths)) * (1 - LEAST_GAIN)
    for a, w in product(EXPONENTS, EXPONENTS):
        scale = np.exp2(np.round(np.log2(widths**a / weights**w)))
        scale /= scale.max()
        noise = total(readers, seen, (), scale)
        if noise < least:
            best, least = 1 / scale, noise
    return best


def _widths(seen: Channels) -> Floats:
    """Return the range of each channel, 0 included."""
    return np.maximum(seen.hi, 0.0) - np.minimum(seen.lo, 0.0)


def _ratio(joined: JoinedParts, seen: Channels) -> float:
    """Return the range of the widest part over that of the narrowest one that is not 0 throughout."""
    parts = zip(joined.split(seen.lo), joined.split(seen.hi), strict=True)
    widths = [max(0.0, float(hi.max())) - min(0.0, float(lo.min())) for lo, hi in parts]
    known = [width for width in widths if width > 0]
    return max(known) / min(known) if known else 1.0

"""Find better integers and biases for the weights of an INT8 model, from sample data."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from itertools import islice

import onnx_ir as ir

from ... import RequantError
from ...calibration.model.session import Array
from ...transforms.graphs.queries import nodes_by_name
from ...transforms.int8.block_weights import in_blocks
from ...transforms.int8.plan import Impl
from ...transforms.int8.weights import Adjustment
from ..job import Candidate, Job
from ..options.efforts import EFFORTS
from ..runtime.progress import CORRECT_WEIGHTS
from .bias import correct_bias
from .block_rounding import block_operations, learn_blocks
from .layer_by_layer import BlockLayer, Layer, walk_layers
from .rounding import learn_rounding, operations
from .samples import correcting_samples, walked_layers


def find_adjustments(job: Job, candidate: Candidate) -> dict[str, Adjustment]:
    """Return the adjustments of a candidate's units, by unit name.

    If the runtime rejects a piece of the models, the units behind this piece get no adjustment.
    """
    if job.source is None:
        return {}
    count = correcting_samples(job, walked_layers(job, candidate.plan))
    feeds = [sample.feed for sample in islice(job.source.samples(count), count)]
    impls = [candidate.plan.impl(unit) for unit in candidate.plan.units]
    total = sum(impl.reads_u8 or impl.in_blocks for impl in impls)
    budget = EFFORTS[job.options.effort].operations or math.inf  # effort low: the user named the correction
    adjustments: dict[str, Adjustment] = {}
    shared = _shared_weights(job, candidate)

    def correct_blocks(layer: BlockLayer) -> tuple[Adjustment, list[Array]]:
        nonlocal budget
        if layer.node.inputs[1] in shared:
            return Adjustment(), layer.run(in_blocks(layer.rows, layer.form))
        cost = block_operations(layer)
        rounding = "rounding" in job.corrections and cost <= budget
        budget -= cost if rounding else 0
        blocked = learn_blocks(layer, rounding=rounding)
        return Adjustment(blocked=blocked), layer.run(blocked)

    def correct(layer: Layer) -> tuple[Adjustment, list[Array]]:
        nonlocal budget
        integers, cost = None, operations(layer)
        if "rounding" in job.corrections and cost <= budget and layer.node.inputs[1] not in shared:
            budget -= cost
            integers = learn_rounding(layer, shifted="bias" in job.corrections, exact=job.no_saturation)
        if "bias" in job.corrections:
            return correct_bias(layer, integers)
        return Adjustment(stored=integers), layer.run(integers)

    job.progress(CORRECT_WEIGHTS, 0, total)  # the first layer waits for its inputs
    with suppress(RequantError):
        for name, adjustment in walk_layers(job, candidate, feeds, correct, correct_blocks):
            adjustments[name] = adjustment
            job.progress(CORRECT_WEIGHTS, len(adjustments), total)
    return adjustments


def _shared_weights(job: Job, candidate: Candidate) -> frozenset[ir.Value]:
    """Return the weights that several units read in integers. Rounded for each unit, each would have its own copy."""
    nodes, plan = nodes_by_name(job.simple), candidate.plan
    forms = [impl for impl in Impl if impl.reads_u8 or impl.in_blocks]
    read = [nodes[unit.nodes[0]].inputs[1:2] for unit in plan.units if plan.impl(unit) in forms]
    counts = Counter(weights for inputs in read for weights in inputs if weights is not None)
    return frozenset(weights for weights, count in counts.items() if count > 1)

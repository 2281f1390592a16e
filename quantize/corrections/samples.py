"""How many samples the weights of a model are corrected on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ...transforms.graph import constant, nodes_by_name
from ...transforms.int8.plan import Plan
from ..job import Job
from ..model.shapes import fed_shapes
from ..placement.runs import samples_for
from .layer_by_layer import WALKED
from .rounding import ROWS, channels_of

FEWEST = 16
"""The least number of samples, if there are so many: a bias is corrected by the spread of the samples' means."""


@dataclass(frozen=True, slots=True)
class WalkedLayer:
    """A layer whose weights are corrected.

    Attributes:
        node: Its node.
        shape: The shape of its weights.
        positions: The number of positions of its result in one sample; 0 if it is unknown.
    """

    node: ir.Node
    shape: tuple[int, ...]
    positions: float

    def wanted(self, most: int) -> int:
        """Return how many of `most` samples give it the `ROWS` positions that learned rounding uses at most."""
        return min(most, math.ceil(ROWS / max(self.positions, 1)))


def walked_layers(job: Job, plan: Plan, sizes: Mapping[str, int]) -> Iterator[WalkedLayer]:
    """Yield the layers of a plan whose weights are corrected.

    Args:
        job: The job.
        plan: The plan.
        sizes: The number of elements of tensors by name, for one sample.
    """
    nodes = nodes_by_name(job.simple)
    for unit in plan.units:
        impl = plan.impl(unit)
        if unit.op not in WALKED or not (impl.reads_u8 or impl.in_blocks):
            continue
        node = nodes[unit.nodes[0]]
        weight = constant(node.inputs[1])
        if weight is not None and len(weight.shape) > 1:
            shape = tuple(weight.shape.numpy())
            elements = sizes.get(unit.outputs[0], 0) if unit.outputs else 0
            yield WalkedLayer(node, shape, elements / channels_of(node, shape))


def correcting_samples(job: Job, plan: Plan) -> int:
    """Return how many samples correct the weights of a plan: as many as the layer with the fewest positions needs.

    Of large images few are enough. Each layer computes all of them three times, and uses `ROWS` positions.
    """
    most = samples_for(job)
    if job.feed is None:
        return most
    batch = job.loads[0].batch
    sizes = {name: math.prod(shape) // batch for name, shape in fed_shapes(job.simple, job.feed).items()}
    wanted = (layer.wanted(most) for layer in walked_layers(job, plan, sizes))
    return min(most, max([FEWEST, *wanted]))

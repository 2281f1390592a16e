"""How many samples the weights of a model are corrected on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ...transforms.graphs.queries import constant, nodes_by_name
from ...transforms.int8.plan import Plan
from ..job import Job
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


def walked_layers(job: Job, plan: Plan) -> Iterator[WalkedLayer]:
    """Yield the layers of a plan whose weights are corrected."""
    nodes, batch = nodes_by_name(job.simple), job.loads[0].asked if job.loads else 1
    shapes = job.fed_shapes
    for unit in plan.units:
        impl = plan.impl(unit)
        if unit.op not in WALKED or not (impl.reads_u8 or impl.in_blocks):
            continue
        node = nodes[unit.nodes[0]]
        weight = constant(node.inputs[1])
        if weight is not None and len(weight.shape) > 1:
            shape = tuple(weight.shape.numpy())
            elements = math.prod(shapes[unit.outputs[0]]) if unit.outputs and unit.outputs[0] in shapes else 0
            yield WalkedLayer(node, shape, elements / batch / channels_of(node, shape))


def correcting_samples(job: Job, layers: Iterable[WalkedLayer]) -> int:
    """Return how many samples correct the weights of layers: as many as the layer with the fewest positions needs.

    Of large images few are enough. Each layer computes all of them three times, and uses `ROWS` positions.
    """
    most = samples_for(job)
    return min(most, max([FEWEST, *(layer.wanted(most) for layer in layers)]))

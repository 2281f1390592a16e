"""Models that draw random numbers: their outputs differ from run to run, so that a comparison says little of INT8."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from ...calibration.model.session import Feed
from ...system.printable import number_of
from ...transforms.graphs.queries import computing_nodes, node_name
from ...transforms.parts.constant_values import RANDOM
from ...transforms.remove_nodes import is_training
from .classes import Outputs
from .promise import LEAST_DB
from .sqnr import decibels, decibels_text, output_powers, worst_powers

DRAWN = (
    "the outputs are random: {} draws numbers anew in each run, so that two runs of the float model on one sample "
    "differ ({} at {}), and a comparison with INT8 says little; make the numbers an input of the model, or set "
    "their scale to 0 in the model or in the data"
)


def random_nodes(model: ir.Model) -> tuple[ir.Node, ...]:
    """Return the nodes that draw random numbers, also in bodies; a Dropout does in training mode only."""
    found = computing_nodes(model, *sorted(RANDOM))
    return tuple(node for node in found if node.op_type != "Dropout" or is_training(model, node))


@dataclass(frozen=True, slots=True)
class Randomness:
    """How much random numbers change the outputs of a model.

    Attributes:
        note: What the user should know of it: a node, the difference of two runs, and what to do.
        sqnr_db: The SQNR between two runs of the float model at the output that differs most, in dB.
    """

    note: str
    sqnr_db: float

    @property
    def hides_noise(self) -> bool:
        """Whether no INT8 model could keep the promise of accuracy: two runs of the float model do not keep it."""
        return self.sqnr_db < LEAST_DB


def randomness(model: ir.Model, run: Callable[[], Callable[[Feed], Outputs]], feed: Feed) -> Randomness | None:
    """Return how much the random numbers of a node change the outputs; None without such a node.

    Two runs tell whether they do: a scale of 0, which is often an input, leaves nothing of them, and ONNX Runtime may
    ignore the training mode of a Dropout.

    Args:
        model: The float model.
        run: Opens the float model; it is called if there are such nodes.
        feed: The inputs of a sample.

    Raises:
        RequantError: The model does not run.
    """
    nodes = random_nodes(model)
    if not nodes:
        return None
    loaded = run()
    name, ratio = _worst(loaded(feed), loaded(feed))
    if ratio == math.inf:
        return None
    told = f"SQNR {decibels_text(ratio)}" if ratio > -math.inf else "in length or value"
    return Randomness(DRAWN.format(_named(nodes), told, name), ratio)


def _named(nodes: tuple[ir.Node, ...]) -> str:
    """Return ``"node 'noise' (RandomNormalLike)"``, with the number of further nodes."""
    first = f"node {node_name(nodes[0])!r} ({nodes[0].op_type})"
    return f"{first}, like {number_of(len(nodes) - 1, 'other')}," if len(nodes) > 1 else first


def _worst(one: Outputs, two: Outputs) -> tuple[str, float]:
    """Return the output that differs most between two runs, and its SQNR in dB; infinite if none differs."""
    found = {name: decibels(*worst_powers(pairs)) for name, pairs in output_powers(one, two).items()}
    return min(found.items(), key=lambda row: row[1], default=("", math.inf))

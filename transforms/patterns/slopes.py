"""Find a PRelu of two parts: ``Relu(x) + Clip(x, max=0) * slopes``, with constant slopes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import onnx_ir as ir

from ..graphs.queries import Shape, constant, is_standard, producer_of, sole_reader
from .elementwise import Place, bounds_of, channels_of

NO_BOUND = (-inf, float(np.finfo(np.float32).min))  # a Clip without a lower bound takes the least float for it


@dataclass(frozen=True, eq=False)
class Sloped:
    """A PRelu of two parts.

    Attributes:
        x: What it is a function of.
        slopes: The constant factors of the values below 0, float32.
        nodes: The Relu, the Clip, the Mul and the Add.
    """

    x: ir.Value
    slopes: ir.Value
    nodes: Sequence[ir.Node]


def find_sloped(add: ir.Node) -> Sloped | None:
    """Return the PRelu of two parts that ends with an Add; None if it is something else.

    Nothing else reads the tensors between its operators.
    """
    if not is_standard(add, "Add"):
        return None
    for first, second in (add.inputs, add.inputs[::-1]):
        relu, mul = producer_of(first), producer_of(second)
        if not is_standard(relu, "Relu") or not is_standard(mul, "Mul"):
            continue
        slopes = next((value for value in mul.inputs if constant(value) is not None), None)
        clip = next((producer_of(value) for value in mul.inputs if value is not slopes), None)
        if slopes is None or not is_standard(clip, "Clip") or bounds_of(clip) not in [(low, 0.0) for low in NO_BOUND]:
            continue
        x, tensor = relu.inputs[0], constant(slopes)
        inner = all(sole_reader(node.outputs[0]) is reader for node, reader in ((relu, add), (clip, mul), (mul, add)))
        if x is not None and x is clip.inputs[0] and inner and tensor is not None and tensor.dtype is ir.DataType.FLOAT:
            return Sloped(x, slopes, (relu, clip, mul, add))
    return None


def slopes_each(found: Sloped, shape: Shape) -> bool:
    """Whether the slopes of a PRelu have the shape of its tensor without the first axis: one for each element."""
    tensor = constant(found.slopes)
    return tensor is not None and len(shape) > 1 and tuple(tensor.shape.numpy()) == tuple(shape[1:])


def slopes_channels(found: Sloped, place: Place) -> bool:
    """Whether the slopes of a PRelu are the same for all elements of a channel."""
    return all(channels_of(node, place) for node in found.nodes)

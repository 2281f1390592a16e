"""Functions of one element: operators whose result at an element depends on this element alone, and on its channel."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import onnx_ir as ir

from ..graphs.queries import constant, one_number

ELEMENTWISE = frozenset(
    "Abs Add Celu Clip Div Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Log Max Min Mish Mul Neg Pow Relu Selu "
    "Sigmoid Softplus Softsign Sqrt Sub Swish Tanh".split()
)
"""Standard operators that are such functions if they read one computed tensor."""
BATCH_NORM = "BatchNormalization"
CHANNELWISE = frozenset({BATCH_NORM, "PRelu"})
"""Those whose constants have a value for each channel."""
MOMENTS = 5  # the inputs of a BatchNormalization: it and four constants


@dataclass(frozen=True, slots=True)
class Place:
    """Where the channels of a tensor are.

    Attributes:
        rank: How many axes it has.
        axis: The axis of the channels.
    """

    rank: int
    axis: int


def channels_of(node: ir.Node, place: Place | None) -> int:
    """Return for how many channels the constants of a function have values; 1 if they are the same for all elements.

    Args:
        node: A node.
        place: Where the channels of its tensor are; None if that is unknown.

    Returns:
        0 if the node is no function of one element.
    """
    if node.domain or node.op_type not in ELEMENTWISE | CHANNELWISE or any(value.name for value in node.outputs[1:]):
        return 0
    if node.op_type == BATCH_NORM and (len(node.inputs) != MOMENTS or node.attributes.get_int("training_mode", 0) != 0):
        return 0
    tensors = [constant(value) for value in node.inputs]
    counts = {_count(node, tensor, place) for tensor in tensors if tensor is not None} | {1}
    return max(counts) if 0 not in counts and len(counts) <= 2 else 0


def _count(node: ir.Node, tensor: ir.TensorProtocol, place: Place | None) -> int:
    """Return for how many channels a constant of a node has values; 0 if it differs along another axis."""
    shape = tensor.shape.numpy()
    if tensor.size == 1 and (place is None or len(shape) <= place.rank):
        return 1
    if place is None or len(shape) > place.rank:
        return 0
    if node.op_type == BATCH_NORM:
        return int(tensor.size) if place.axis == 1 else 0
    whole = (*[1] * (place.rank - len(shape)), *shape)
    return int(whole[place.axis]) if tensor.size == whole[place.axis] else 0


def clip_bounds(node: ir.Node) -> tuple[float, float] | None:
    """Return the bounds of a Relu or Clip with constant bounds that contain zero, else None.

    The range of a quantized tensor always contains zero, so saturation cannot replace a Clip to [1, 6].
    """
    lo, hi = bounds_of(node) or (inf, -inf)
    return (lo, hi) if lo <= 0.0 <= hi and hi > lo else None


def bounds_of(node: ir.Node) -> tuple[float, float] | None:
    """Return the bounds of a Relu or Clip, infinite where it has none; None if one is computed."""
    if node.op_type == "Relu":
        return 0.0, inf
    limits = [node.attributes.get_float("min", -inf), node.attributes.get_float("max", inf)]
    for index, value in enumerate(node.inputs[1:3]):
        if value is not None:
            limit = one_number(value, 1)
            if limit is None:
                return None
            limits[index] = limit
    return limits[0], limits[1]

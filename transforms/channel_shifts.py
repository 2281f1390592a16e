"""Channel shifts: subtract a constant per channel from an activation and compensate in the biases behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .bias_correction import mean_shift
from .channel_scales import Floats, Fold, floats
from .graph import constant, release, sole_reader
from .ops import key

BIASES = {
    "Conv": 2,
    "ConvTranspose": 2,
    "Gemm": 2,
    "LayerNormalization": 2,
    "BatchNormalization": 2,
    "com.microsoft.SkipLayerNormalization": 3,
}
"""By operator, the index of the input that adds a constant to each channel of the output."""
MOVES = frozenset(
    "Identity Dropout MaxPool GlobalMaxPool GlobalAveragePool Transpose Gather Flatten Reshape Squeeze".split()
)
"""Operators that only move or select values: a shift of the input shifts the output."""
ABOVE_ZERO = frozenset({"Relu", "LeakyRelu"})
"""Operators for which this is so while the input stays above zero."""


@dataclass(frozen=True, slots=True)
class Place:
    """A constant to which a vector per channel can be added.

    Attributes:
        node: The node that reads the constant.
        index: The input of the node; a missing input can be added.
        axis: The channel axis of the constant, counted from the end.
    """

    node: ir.Node
    index: int
    axis: int = -1


@dataclass(frozen=True, slots=True)
class Shifts:
    """The constants that change when the channels of a group are shifted.

    Attributes:
        producer: The bias that is reduced by the shift.
        readers: Weights that read the channels, each with the bias that compensates.
        above_zero: Whether a Relu is in between. A shift must then be at least 0 and at most the minimum of the
            channel.
    """

    producer: Place
    readers: tuple[tuple[Fold, Place], ...]
    above_zero: bool


def shifts_of(folds: Iterable[Fold], passed: Iterable[ir.Node]) -> Shifts | None:
    """Return how the channels of a group can be shifted; None if they cannot.

    The group must have one producer. Between the producer and the readers only a bias, a Relu and operators that move
    or select values are possible. The readers must be products with a bias, and convolutions without padding, because a
    shift would also shift the padded zeros.
    """
    folds, passed = list(folds), list(passed)
    added = [node for node in passed if node.op_type == "Add" and any(constant(v) is not None for v in node.inputs)]
    others = [node for node in passed if node not in added]
    producers = [fold.node for fold in folds if fold.role == "producer"]
    weights = [fold for fold in folds if fold.role == "reader"]
    readers = [(fold, place) for fold in weights if (place := _behind(fold)) is not None]
    if len(producers) != 1 or len(added) > 1 or len(readers) != len(weights):
        return None
    if any(node.op_type not in MOVES | ABOVE_ZERO for node in others):
        return None
    producer = _before(producers[0], added, others)
    if producer is None:
        return None
    return Shifts(producer, tuple(readers), any(node.op_type in ABOVE_ZERO for node in others))


def contribution(fold: Fold, shift: Floats) -> Floats:
    """Return the change of each output channel of a product from a shift of its input, float64 of shape (M,)."""
    tensor = constant(fold.node.inputs[fold.index])
    assert tensor is not None  # a fold is a constant
    change = mean_shift(fold.node, tensor.numpy(), shift)
    release(tensor)
    assert change is not None  # `equalize.find` has compared the shapes
    return change.astype(np.float64)


def _before(node: ir.Node, added: list[ir.Node], others: list[ir.Node]) -> Place | None:
    """Return the bias of a producer; None without one."""
    if node.op_type == "Gemm" and not _plain(node):
        return None
    if key(node) in BIASES:
        return Place(node, BIASES[key(node)])
    # a bias behind another operator has another channel axis
    if node.op_type == "MatMul" and added and added[0] is sole_reader(node.outputs[0]):
        return _constant_of(added[0])
    return None


def _behind(fold: Fold) -> Place | None:
    """Return the bias of a product; None if it cannot compensate."""
    node = fold.node
    if node.op_type == "Gemm":
        return Place(node, 2) if _plain(node) and _is_floats(node, 2) else None
    if node.op_type == "Conv":
        auto = node.attributes.get_string("auto_pad", "NOTSET")
        padded = any(node.attributes.get_ints("pads", ())) or auto not in ("NOTSET", "VALID")
        return Place(node, 2) if not padded and _is_floats(node, 2) else None
    tensor = constant(node.inputs[1]) if node.op_type == "MatMul" else None
    adder = sole_reader(node.outputs[0])
    if tensor is None or len(tensor.shape) != 2 or adder is None or key(adder) != "Add":
        return None
    return _constant_of(adder)


def _plain(node: ir.Node) -> bool:
    """Whether a Gemm scales neither its product nor its bias."""
    return all(node.attributes.get_float(name, 1.0) == 1 for name in ("alpha", "beta"))


def _is_floats(node: ir.Node, index: int) -> bool:
    """Whether an input is a constant of floats, or missing."""
    return index >= len(node.inputs) or node.inputs[index] is None or floats(node.inputs[index]) is not None


def _constant_of(node: ir.Node) -> Place | None:
    """Return the constant of an Add; None without one."""
    return next((Place(node, index) for index in (0, 1) if floats(node.inputs[index]) is not None), None)

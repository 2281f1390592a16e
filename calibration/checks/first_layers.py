"""The first layers of a model, and the statistics of the training data that they contain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..model.session import Array

if TYPE_CHECKING:
    import onnx_ir as ir

NORMS, GATES = 4, 4
"""The most BatchNormalization nodes and the most gates, in the order of the graph."""
LIVE = 10
"""A channel varied in training if its variance is larger than this factor times epsilon."""
SATURATION = {"Sigmoid": math.log(255), "Tanh": math.log(255) / 2}
"""The absolute input at which the output is 1/256 of the operator's range away from a bound."""
WEIGHTED = ("Conv", "Gemm", "MatMul")


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The statistics of its input that a BatchNormalization recorded in training.

    Attributes:
        node: The name of the node or of its output.
        mean: The mean of each channel, (C,) float64.
        variance: The variance of each channel plus epsilon, (C,) float64.
        live: Which channels varied, (C,) bool.
        source: The input of the convolution before the BatchNormalization; None if there is no such convolution.
        weight: The convolution's weights, summed over each kernel, (C, channels of `source`) float64.
        bias: The convolution's bias, (C,) float64.
    """

    node: str
    mean: Array
    variance: Array
    live: Array
    source: str | None = None
    weight: Array | None = None
    bias: Array | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """A node whose output saturates at two bounds.

    Attributes:
        node: The name of the node or of its output.
        tensor: The name of its input.
        lo: Below this input the output is at the lower bound.
        hi: Above this input the output is at the upper bound.
    """

    node: str
    tensor: str
    lo: float
    hi: float


@dataclass(frozen=True, slots=True, eq=False)
class Biased:
    """A layer with a bias.

    Attributes:
        node: The name of the node or of its output.
        source: The name of its input.
        tensor: The name of its output.
        bias: The bias, any shape.
        axis: The channel axis of the output.
    """

    node: str
    source: str
    tensor: str
    bias: Array
    axis: int


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The first layers of a model.

    Attributes:
        norms: The statistics of BatchNormalization nodes that do not depend on another one, by input tensor.
        gates: If there are no `norms`, the gates in the first half of the layers. Later gates may saturate on correct
            data.
        biased: If there are no `norms`, the first layer, if it has a bias.
    """

    norms: Mapping[str, Recorded] = field(default_factory=dict)
    gates: tuple[Gate, ...] = ()
    biased: Biased | None = None


def first_layers(graph: ir.Graph) -> FirstLayers:
    """Find the first layers of a graph."""
    norms: dict[str, Recorded] = {}
    gates: list[Gate] = []
    layers: list[ir.Node] = []
    half = sum(_is_layer(node) for node in graph) / 2
    fed: set[ir.Value] = {value for value in graph.inputs if value.const_value is None}  # depends on the inputs
    normed: set[ir.Value] = set()  # depends on a BatchNormalization
    for node in graph:
        reads = {value for value in node.inputs if value is not None}
        data = node.inputs[0] if node.inputs else None
        if data is not None and data.name and data in fed:
            row = _recorded(node, data)
            if row is not None and not normed & reads and len(norms) < NORMS:
                norms[data.name] = row
            gate = _gate(node, data.name)
            if gate is not None and 0 < len(layers) <= half and len(gates) < GATES:
                gates.append(gate)
            if _is_layer(node):
                layers.append(node)
        if fed & reads:
            fed.update(node.outputs)
        if normed & reads or node.op_type == "BatchNormalization":
            normed.update(node.outputs)
    if norms:
        return FirstLayers(norms)
    return FirstLayers({}, tuple(gates), _biased(layers[0]) if layers else None)


def constant(value: ir.Value | None) -> Array | None:
    """Return the values of a float constant as float64; None for another value."""
    import onnx_ir as ir

    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.dtype.name not in ("FLOAT", "FLOAT16", "DOUBLE"):
        return None
    return np.asarray(tensor.numpy(), np.float64)


def _is_layer(node: ir.Node) -> bool:
    """Whether a node multiplies its input by constant weights."""
    import onnx_ir as ir

    if node.op_type not in WEIGHTED or len(node.inputs) < 2 or node.inputs[1] is None:
        return False
    return ir.convenience.get_const_tensor(node.inputs[1]) is not None


def _recorded(node: ir.Node, data: ir.Value) -> Recorded | None:
    """Return the statistics of a BatchNormalization; None for other nodes."""
    if node.op_type != "BatchNormalization" or node.domain or len(node.inputs) < 5:
        return None
    mean, variance = constant(node.inputs[3]), constant(node.inputs[4])
    if mean is None or variance is None or mean.shape != variance.shape or not np.isfinite([mean, variance]).all():
        return None
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    recorded = (_name_of(node), mean, variance + epsilon, variance > LIVE * epsilon)
    conv = data.producer()
    weight = None if conv is None or conv.op_type != "Conv" else constant(conv.inputs[1])
    if conv is None or conv.inputs[0] is None or weight is None or conv.attributes.get_int("group", 1) != 1:
        return Recorded(*recorded)
    bias = constant(conv.inputs[2]) if len(conv.inputs) > 2 else None
    sums = weight.sum(axis=tuple(range(2, weight.ndim)))
    return Recorded(*recorded, conv.inputs[0].name, sums, np.zeros_like(mean) if bias is None else bias)


def _gate(node: ir.Node, tensor: str) -> Gate | None:
    """Return where a node saturates; None for a node that does not saturate at both ends."""
    if node.domain:
        return None
    if node.op_type in SATURATION:
        bound = SATURATION[node.op_type]
        return Gate(_name_of(node), tensor, -bound, bound)
    if node.op_type != "HardSigmoid":
        return None
    slope, offset = (node.attributes.get_float(name, value) for name, value in (("alpha", 0.2), ("beta", 0.5)))
    return Gate(_name_of(node), tensor, -offset / slope, (1 - offset) / slope) if slope > 0 else None


def _biased(node: ir.Node) -> Biased | None:
    """Return a layer with its bias; None if it has no bias."""
    bias = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    source, output = node.inputs[0], node.outputs[0]
    if bias is None or source is None or not source.name or not output.name or not np.isfinite(bias).all():
        return None
    return Biased(_name_of(node), source.name, output.name, bias, 1 if node.op_type == "Conv" else -1)


def _name_of(node: ir.Node) -> str:
    """Return a node's name or, if it has none, its output's."""
    return node.name or next((value.name for value in node.outputs if value.name), "")

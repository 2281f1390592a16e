"""Built-in costs: the estimated time of a kernel that was not measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from ...transforms.graphs.queries import constant
from ...transforms.int8.ops import GATE, OPS
from ...transforms.int8.plan import Impl, Unit

LAUNCH = 2.0  # microseconds of the smallest kernel
CONVERTED = 0.25e-3  # microseconds per element of a QuantizeLinear or a DequantizeLinear
TURNED = 0.3e-3  # microseconds per element of a change of layout
IMAGE = 4  # tensors of this rank change their layout between float and integer convolutions
PRODUCTS = {Impl.FLOAT: 1 / 60e3, Impl.DYNAMIC: 1 / 130e3, Impl.WEIGHT: 1 / 60e3, Impl.U8_FLOAT: 1 / 200e3}
PRODUCTS |= {Impl.BLOCK: 1 / 50e3, Impl.BLOCK_NATIVE: 1 / 120e3}
PRODUCTS |= {Impl.U8: 1 / 200e3, Impl.U8_GEMM: 1 / 200e3, Impl.U8_NATIVE: 1 / 200e3}
PRODUCTS |= {Impl.DYNAMIC_NATIVE: 1 / 200e3}
"""Microseconds per multiply-accumulate of one thread with VNNI."""
DEPTHWISE = 8.0  # factor on the time of a product in a convolution with fewer than FEW products per output
FEW = 32
ELEMENTS: Mapping[str, tuple[float, float]] = {
    "Add": (0.3e-3, 0.21e-3),
    "Mul": (0.35e-3, 0.37e-3),
    "Concat": (0.2e-3, 0.1e-3),
    "Sigmoid": (0.4e-3, 0.48e-3),
    "HardSigmoid": (0.39e-3, 0.33e-3),
    GATE: (0.6e-3, 0.8e-3),
    "GlobalAveragePool": (0.1e-3, 0.07e-3),
    "AveragePool": (0.3e-3, 0.5e-3),
    "MaxPool": (0.5e-3, 0.3e-3),
    "LeakyRelu": (0.35e-3, 0.33e-3),
}
"""Microseconds per element in float and in uint8; `OTHERS` for other operators."""
OTHERS = (0.3e-3, 0.15e-3)


def runs_in(seconds: float, units: Iterable[Unit], nodes: Mapping[str, ir.Node], sizes: Mapping[str, int]) -> float:
    """Return the estimated number of runs of a float model in some time. Built-in costs make it equal on all machines.

    Args:
        seconds: The time, in seconds.
        units: The units of the model.
        nodes: Its nodes by name.
        sizes: Elements by tensor, as far as they are known.
    """
    each = math.fsum(estimate(unit, nodes, sizes, Impl.FLOAT) for unit in units)
    return 1e6 * seconds / each if each else math.inf


def estimate(unit: Unit, nodes: Mapping[str, ir.Node], sizes: Mapping[str, int], impl: Impl) -> float:
    """Return the estimated time of a unit on one thread, in microseconds.

    Args:
        unit: The unit.
        nodes: The nodes of the model by name.
        sizes: Elements by tensor, as far as they are known.
        impl: The implementation.
    """
    elements = max((sizes.get(tensor, 0) for tensor in (*unit.outputs, *unit.inputs)), default=0)
    row = OPS.get(unit.op)
    weight = constant(nodes[unit.nodes[0]].inputs[1]) if row is not None and row.kind == "compute" else None
    if weight is None:
        per_float, per_u8 = ELEMENTS.get(unit.op, OTHERS)
        return LAUNCH + elements * (per_u8 if impl.reads_u8 else per_float)
    node = nodes[unit.nodes[0]]
    depth = _depth(node, weight.shape.numpy())
    produced = sum(sizes.get(tensor, 0) for tensor in unit.outputs)
    return LAUNCH + produced * depth * PRODUCTS[impl] * (DEPTHWISE if depth < FEW else 1.0)


def _depth(node: ir.Node, shape: Sequence[int]) -> int:
    """Return the products that are added for one element of the result.

    Args:
        node: A Conv, Gemm, MatMul or another product.
        shape: The shape of its weight: (M, C / group, *kernel) of a Conv; (C, M / group, *kernel) of a ConvTranspose;
            (..., K, N), or (K,), of a MatMul.
    """
    if node.op_type == "ConvTranspose":  # each element is reached by one tap of a stride
        taps = math.prod(shape[2:]) // math.prod(node.attributes.get_ints("strides", (1,)))
        return max(shape[0] // node.attributes.get_int("group", 1) * taps, 1)
    if node.op_type == "Conv":
        return math.prod(shape[1:])
    if node.attributes.get_int("transB", 0):
        return shape[1]
    return shape[-2] if len(shape) > 1 else math.prod(shape)


def conversion(elements: int, *, image: bool) -> float:
    """Return the estimated time of a QuantizeLinear or a DequantizeLinear, with the change of layout of an image."""
    return LAUNCH + elements * (CONVERTED + (TURNED if image else 0.0))

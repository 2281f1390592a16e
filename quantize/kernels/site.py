"""A unit that may become a call of a native operator, and what all kinds of units read of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...calibration.model.session import Array
from ...transforms.graphs.queries import Shape, constant, made_by
from ...transforms.int8.plan import Unit
from ...transforms.int8.qparams import QParams, quantize
from ...transforms.patterns.elementwise import clip_bounds
from .call import attributes_of

IMAGE = 4  # axes of a tensor with a layout
X, Y = ("x", "x_scale", "x_zero_point"), ("y_scale", "y_zero_point")
WINDOW = {"dilations": [1, 1], "pads": [0, 0, 0, 0], "strides": [1, 1]}
"""The attributes of a kernel on an image, with their defaults."""
UNSIGNED = (ir.DataType.UINT8, ir.DataType.FLOAT)
"""Types of zero points and scales."""


@dataclass(frozen=True, eq=False)
class Site:
    """A unit that may become a call.

    Attributes:
        unit: The unit.
        nodes: The nodes of the model by name.
        quantize: The node that computes its uint8 result.
        shapes: The shapes of the unit's inputs and of its result, in NCHW.
        images: Whether the tensors are images.
    """

    unit: Unit
    nodes: Mapping[str, ir.Node]
    quantize: ir.Node
    shapes: Sequence[Shape]
    images: bool

    @property
    def channel(self) -> int:
        """The axis of the channels of the result."""
        return 1 if self.images else len(self.shapes[-1]) - 1

    @property
    def end(self) -> ir.Value:
        """The uint8 result."""
        return self.quantize.outputs[0]


def dequantized(value: ir.Value | None) -> ir.Node | None:
    """Return the DequantizeLinear that computes a tensor; None if another node does."""
    return made_by(value, "DequantizeLinear")


def operands(node: ir.Node) -> list[ir.Value | None]:
    """Return the tensor, the scale and the zero point of a DequantizeLinear or QuantizeLinear."""
    return [*node.inputs, None, None][:3]


def with_defaults(node: ir.Node, defaults: Mapping[str, list[int]], **more: int | list[int]) -> dict[str, ir.Attr]:
    """Return attributes of a node, with the defaults of those that it does not have, and more attributes."""
    values = {name: list(node.attributes.get_ints(name, default)) for name, default in defaults.items()}
    return attributes_of({**values, **more})


def are_constants(values: Iterable[ir.Value | None]) -> bool:
    """Return whether all scales and zero points are constants, and the zero points uint8."""
    tensors = [constant(value) for value in values]
    return all(tensor is not None and tensor.dtype in UNSIGNED for tensor in tensors)


def clipping(absorbed: Iterable[ir.Node], quantize_node: ir.Node) -> dict[str, Array]:
    """Return a Relu or Clip as a table of integers, uint8 (256,); no table if every integer stays as it is.

    Rounding to integers is monotone, so that it can come before or after the Clip.
    """
    params = parameters_of(quantize_node)
    table = every = np.arange(256)
    for node in absorbed:
        bounds = clip_bounds(node)
        assert bounds is not None  # `units` absorbs no other Clip
        table = np.clip(table, *quantize(np.asarray(bounds, np.float32), params).astype(np.int64))
    return {} if (table == every).all() else {"table": table.astype(np.uint8)}


def parameters_of(node: ir.Node) -> QParams:
    """Return the constant scale and zero point of a DequantizeLinear or QuantizeLinear."""
    scale, zero = (constant(value) for value in operands(node)[1:])
    assert scale is not None
    assert zero is not None
    return QParams(scale=scale.numpy().reshape(()), zero_point=zero.numpy().reshape(()))

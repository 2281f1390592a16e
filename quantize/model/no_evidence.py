"""The tensors whose values say nothing about the data: the graph alone decides them, or nothing uses them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...transforms.graphs.queries import computing_graphs, constant
from ...transforms.graphs.rewriter import LARGE
from .shapes import SHAPES, of_shapes_alone

SHAPE_READERS = SHAPES | {"EyeLike", "RandomNormalLike", "RandomUniformLike"}
"""Operators that use the shape of their input and none of its values."""
OF_ANY = frozenset({"MatMul", "Mul"})
"""Operators whose result is zero if one input is; the other may hold NaN, which is a finding of its own."""
OF_FIRST = frozenset(
    """Abs Cast Div Expand Flatten Gather Identity Neg Relu Reshape Slice Split Sqrt Squeeze Tanh Tile Transpose
    Unsqueeze""".split()
)
"""Operators whose results are zero if the first input is."""
OF_ALL = frozenset({"Add", "Concat", "Max", "Min", "Sub", "Sum"})
"""Operators whose result is zero if all inputs are."""


def no_evidence(model: ir.Model) -> frozenset[str]:
    """Return the names of the tensors that are no evidence of a mistake in the data, whatever their values are.

    They depend on shapes alone (`of_shapes_alone`), are zero for all inputs (`always_zero`), or their values are not
    used (`unused`).
    """
    return of_shapes_alone(model) | always_zero(model) | unused(model)


def always_zero(model: ir.Model) -> frozenset[str]:
    """Return the names of the tensors that are zero for all inputs, such as the product of a gate and a first state."""
    zero: set[ir.Value] = set()
    for graph in computing_graphs(model):
        zero |= {value for value in graph.initializers.values() if _is_zero_constant(value)}
        for node in graph:
            if not node.domain and _makes_zeros(node, zero):
                zero |= set(node.outputs)
    return frozenset(str(value.name) for value in zero)


def _makes_zeros(node: ir.Node, zero: set[ir.Value]) -> bool:
    """Return whether the results of a standard operator are zero, from the tensors that are known to be zero."""
    inputs = [value in zero for value in node.inputs if value is not None]
    if node.op_type == "Constant":
        return _is_zero_constant(node.outputs[0])
    if node.op_type == "ConstantOfShape":
        filled = node.attributes.get_tensor("value", None)
        return filled is None or not np.any(filled.numpy())
    if node.op_type in OF_FIRST:
        return bool(inputs) and inputs[0]
    return bool(inputs) and ((node.op_type in OF_ANY and any(inputs)) or (node.op_type in OF_ALL and all(inputs)))


def _is_zero_constant(value: ir.Value) -> bool:
    """Return whether a tensor is a constant of zeros that is not large."""
    tensor = constant(value)
    if tensor is None or tensor.nbytes > LARGE or tensor.dtype == ir.DataType.STRING:
        return False
    return not np.any(tensor.numpy())


def unused(model: ir.Model) -> frozenset[str]:
    """Return the names of the tensors whose values reach no output: nothing reads them, or their shape alone is read.

    A node with a body uses all that it and its body read.
    """
    graphs = computing_graphs(model)
    used: set[ir.Value] = {value for graph in graphs for value in graph.outputs}
    for graph in reversed(graphs):  # what a body reads of the graphs around it is used there
        for node in reversed(graph):
            has_body = any(attribute.type is ir.AttributeType.GRAPH for attribute in node.attributes.values())
            if has_body or (not used.isdisjoint(node.outputs) and (node.domain or node.op_type not in SHAPE_READERS)):
                used |= {value for value in node.inputs if value is not None}
    every = {value for graph in graphs for node in graph for value in node.outputs} | set(model.graph.inputs)
    return frozenset(str(value.name) for value in every - used)

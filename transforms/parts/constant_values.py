"""The values of nodes that depend only on constants, or only on the shapes of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ..graphs.evaluation import evaluated
from ..graphs.queries import QDQ, constant, is_standard, producer_of
from ..registry import LeftAlone

RANDOM = frozenset(
    ["Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
BODIES = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})
VALUES_GIVE_SHAPE = frozenset(
    "AffineGrid BlackmanWindow CenterCropPad Col2Im ConstantOfShape DFT Expand HammingWindow HannWindow ImageDecoder"
    " MaxUnpool MelWeightMatrix OneHot Pad Range Resize STFT Tile Upsample".split()
)
"""Operators of which a few numbers can make a result of any size; without a known shape they are not computed."""
StandIns = Mapping[ir.Value, ir.Value]
"""By tensor of a model, a value with its inferred shape and type (`inference.stand_ins`)."""


def has_value(node: ir.Node) -> bool:
    """Whether `node` depends only on constants, or only on the shape of a tensor."""
    if node.domain == "" and node.op_type in ("Shape", "Size"):
        return True
    return _is_dimension(node) or has_constant_inputs(node)


def has_constant_inputs(node: ir.Node) -> bool:
    """Whether all inputs of a node are constants."""
    return all(value is None or constant(value) is not None for value in node.inputs)


def _is_dimension(node: ir.Node) -> bool:
    """Whether `node` selects elements of a Shape by constants: a Gather or a Slice."""
    if not is_standard(node, "Gather", "Slice") or node.inputs[0] is None:
        return False
    if len(node.inputs) < 2 or any(constant(value) is None for value in node.inputs[1:] if value is not None):
        return False
    shape = node.inputs[0].producer()
    return is_standard(shape, "Shape")


def why_left(node: ir.Node) -> str:
    """Return why a node stays whatever its inputs are; an empty text if it need not."""
    if node.domain != "":
        return "unknown-domain"
    if {attribute.type for attribute in node.attributes.values()} & BODIES:
        return "control-flow"
    if node.op_type in RANDOM:
        return "random"
    if node.op_type in QDQ:
        return "quantization"
    return "graph-output" if any(value.is_graph_output() for value in node.outputs) else ""


def results_of(model: ir.Model, node: ir.Node, shapes: StandIns, limit: int) -> list[np.ndarray]:
    """Return the values of the outputs of a node that `has_value`, an array for each.

    Args:
        model: The model, whose operator sets the node follows.
        node: The node.
        shapes: Values with the shapes of tensors.
        limit: The size of the largest result in bytes, unless the inputs are larger.

    Raises:
        LeftAlone: The node must stay.
    """
    if why := why_left(node):
        raise LeftAlone(why)
    if node.op_type in ("Shape", "Size"):
        return [_shape_result(node, shapes)]
    if _is_dimension(node):
        return [_dimension_result(node, shapes)]
    if node.op_type == "Constant":
        tensor = constant(node.outputs[0])
        if tensor is None or tensor.dtype == ir.DataType.STRING:
            raise LeftAlone("not-a-numeric-tensor")
        return [tensor.numpy()]
    return evaluate_node(model, node, shapes, limit)


def _dimensions(value: ir.Value | None, shapes: StandIns) -> Sequence[int | ir.SymbolicDim]:
    """Return the dimensions of a tensor, integers or symbols."""
    known = shapes.get(value, value) if value is not None else None
    if known is None or known.shape is None:
        raise LeftAlone("shape-unknown")
    return known.shape.dims


def _fixed(dimensions: Sequence[int | ir.SymbolicDim]) -> np.ndarray:
    """Return the dimensions as int64.

    Raises:
        LeftAlone: A dimension is not an integer.
    """
    if not all(isinstance(length, int) for length in dimensions):
        raise LeftAlone("shape-not-fixed")
    return np.array(dimensions, np.int64)


def _shape_result(node: ir.Node, shapes: StandIns) -> np.ndarray:
    """Return the value of ``Shape(x)``, with ``start`` and ``end``, or of ``Size(x)``."""
    dimensions = _dimensions(node.inputs[0], shapes)
    if node.op_type == "Size":
        return np.array(np.prod(_fixed(dimensions), dtype=np.int64))
    return _fixed(dimensions[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)])


def _dimension_result(node: ir.Node, shapes: StandIns) -> np.ndarray:
    """Return the value of a Gather or Slice of a Shape; only the selected dimensions must be integers."""
    value = node.inputs[0]
    shape = producer_of(value)
    if shape is None:
        raise LeftAlone("shape-unknown")
    start, end = shape.attributes.get_int("start", 0), shape.attributes.get_int("end", None)
    dimensions = _dimensions(shape.inputs[0], shapes)[start:end]
    given = [None if tensor is None else tensor.numpy() for tensor in map(constant, node.inputs[1:])]
    indices = _sliced(given, len(dimensions)) if node.op_type == "Slice" else given[0]
    if indices is None or not all(-len(dimensions) <= i < len(dimensions) for i in indices.flat):
        raise LeftAlone("index-out-of-range")
    return _fixed([dimensions[i] for i in indices.flat]).reshape(indices.shape)


def _sliced(given: Sequence[np.ndarray | None], count: int) -> np.ndarray | None:
    """Return which of some elements a Slice selects, from its starts, ends, axes and steps; None if it is malformed."""
    starts, ends, _, steps = [*given, None, None][:4]
    if starts is None or ends is None or starts.size != 1 or ends.size != 1:
        return None
    step = 1 if steps is None else int(steps.item())
    return np.arange(count)[slice(int(starts.item()), int(ends.item()), step)] if step > 0 else None


def evaluate_node(
    model: ir.Model, node: ir.Node, shapes: StandIns, limit: int, known: Mapping[ir.Value, np.ndarray] | None = None
) -> list[np.ndarray]:
    """Run one node in onnx's reference evaluator; return the values of its outputs, empty for outputs without a name.

    Args:
        model: The model, whose operator sets the node follows.
        node: The node.
        shapes: Values with the shapes of tensors.
        limit: The size of the largest result in bytes, unless the inputs are larger.
        known: Inputs that are no constants of the model yet.

    Raises:
        LeftAlone: A result is too large, or its size, type or values cannot be known.
    """
    given = [value for value in node.inputs if value is not None]
    constants = {str(value.name): tensor for value in given if (tensor := constant(value)) is not None}
    constants |= {str(value.name): ir.tensor(known[value]) for value in given if known and value in known}
    read = sum(tensor.nbytes for tensor in constants.values())
    outputs = [value for value in node.outputs if value.name]
    for value in outputs:
        _check_size(expected_bytes(shapes.get(value)), read, limit)
        if node.op_type in VALUES_GIVE_SHAPE and not has_size(shapes.get(value)):
            raise LeftAlone("shape-unknown")
    results = evaluated([node], constants, [str(value.name) for value in outputs], model.opset_imports)
    arrays = iter(_checked(value, result, shapes) for value, result in zip(outputs, results, strict=True))
    return [next(arrays) if value.name else np.empty(0) for value in node.outputs]


def has_size(value: ir.Value | None) -> bool:
    """Whether each length of a tensor is known."""
    return value is not None and value.shape is not None and value.shape.is_static()


def expected_bytes(value: ir.Value | None) -> float:
    """Return the size of a tensor in bytes; 0 if the shape or type is not known, or for texts."""
    if value is None or value.dtype in (None, ir.DataType.STRING) or value.shape is None or not has_size(value):
        return 0
    return float(np.prod(value.shape.numpy(), dtype=np.float64) * value.dtype.itemsize)


def _check_size(size: float, read: int, limit: int) -> None:
    """Raise LeftAlone for a result larger than the limit and larger than the inputs; sizes in bytes."""
    if size > max(read, limit):
        raise LeftAlone("too-large")


def _checked(value: ir.Value, result: object, shapes: StandIns) -> np.ndarray:
    """Return a result as an array; raise LeftAlone if its type is not the one that onnx infers."""
    if not isinstance(result, np.ndarray | np.generic) or result.dtype.kind in "OSU":
        raise LeftAlone("not-a-numeric-tensor")
    expected = shapes.get(value)
    if expected is None or expected.dtype is None or ir.DataType.from_numpy(result.dtype) != expected.dtype:
        raise LeftAlone("type-unsure")
    return np.asarray(result)

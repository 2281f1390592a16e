"""Compute at conversion time what does not depend on the model's inputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from .. import UnknownNameError
from .graph import add_initializer, computing_graphs, constant, discard, graph_of, release, stand_ins
from .registry import Change, LeftAlone, transform

RANDOM = frozenset(
    ["Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
BODIES = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})
QUANTIZATION = frozenset({"QuantizeLinear", "DequantizeLinear"})

Values = Mapping[ir.Value, ir.Value]


@transform("fold_constants")
def fold_constants(
    model: ir.Model,
    *,
    max_size_in_bytes: int = 10 * 2**20,
    exclude_op: tuple[str, ...] = (),
    exclude_node: tuple[str, ...] = (),
) -> Change:
    """Replace every node whose inputs are constants, or that asks for a known shape, by its value.

    Before:  w = Transpose(W); n = Constant(); s = Shape(x), x of shape (1, 3, 8, 8); d = Gather(Shape(z), n), z (N, 4)
    After:   w, n, s, d are initializers
    Left alone: random operators; QuantizeLinear and DequantizeLinear, which are the int8 weights themselves;
        control flow, but not what is inside it; operators of other domains; outputs of graphs and bodies; results
        larger than both max_size_in_bytes and their inputs; what ``onnx.reference`` cannot compute or computes in
        another type.

    Options:
        max_size_in_bytes: A larger result is stored only when it is no larger than what it was computed from.
        exclude_op: Operator types to leave alone.
        exclude_node: Names of nodes to leave alone.

    Raises:
        UnknownNameError: No node has a name in exclude_node.
    """
    known = {node.name for graph in computing_graphs(model) for node in graph if node.name}
    for name in exclude_node:
        if name not in known:
            raise UnknownNameError("node", name, known)
    change = Change()
    progress = True
    while progress:  # a constant target shape of Reshape makes shapes behind it known
        progress = False
        change.skipped.clear()
        shapes = stand_ins(model)
        for node in [node for graph in computing_graphs(model) for node in graph]:
            if not _is_candidate(node):
                continue
            try:
                if node.op_type in exclude_op or node.name in exclude_node:
                    raise LeftAlone("excluded")
                _store(node, _folded(model, node, shapes, max_size_in_bytes))
            except LeftAlone as left:
                change.skip(str(left))
            else:
                change.applied += 1
                progress = True
    return change


def _is_candidate(node: ir.Node) -> bool:
    """Whether `node` depends on nothing but constants, or on the shape of a tensor alone."""
    if node.domain == "" and node.op_type in ("Shape", "Size"):
        return True
    return _is_dimension(node) or all(value is None or constant(value) is not None for value in node.inputs)


def _is_dimension(node: ir.Node) -> bool:
    """Whether `node` picks constant places from a Shape: ``Gather(Shape(x), indices)``."""
    if node.op_type != "Gather" or node.domain != "" or node.inputs[0] is None or constant(node.inputs[1]) is None:
        return False
    shape = node.inputs[0].producer()
    return shape is not None and shape.op_type == "Shape" and shape.domain == ""


def _folded(model: ir.Model, node: ir.Node, shapes: Values, limit: int) -> list[np.ndarray]:
    """Return the values of the outputs of a candidate.

    Raises:
        LeftAlone: It has to stay.
    """
    if node.domain != "":
        raise LeftAlone("unknown-domain")
    if {attribute.type for attribute in node.attributes.values()} & BODIES:
        raise LeftAlone("control-flow")
    if node.op_type in RANDOM:
        raise LeftAlone("random")
    if node.op_type in QUANTIZATION:
        raise LeftAlone("quantization")
    if any(value.is_graph_output() for value in node.outputs):
        raise LeftAlone("graph-output")
    if node.op_type in ("Shape", "Size"):
        return [_shape_result(node, shapes)]
    if _is_dimension(node):
        return [_dimension_result(node, shapes)]
    if node.op_type == "Constant":
        tensor = constant(node.outputs[0])
        if tensor is None or tensor.dtype == ir.DataType.STRING:
            raise LeftAlone("not-a-numeric-tensor")
        return [tensor.numpy()]
    return _evaluated(model, node, shapes, limit)


def _dimensions(value: ir.Value | None, shapes: Values) -> Sequence[int | ir.SymbolicDim]:
    """Return the lengths of a tensor, known or not."""
    known = shapes.get(value, value) if value is not None else None
    if known is None or known.shape is None:
        raise LeftAlone("shape-unknown")
    return known.shape.dims


def _fixed(dimensions: Sequence[int | ir.SymbolicDim]) -> np.ndarray:
    """Return the lengths as int64, or leave the node when one is not fixed."""
    if not all(isinstance(length, int) for length in dimensions):
        raise LeftAlone("shape-not-fixed")
    return np.array(dimensions, np.int64)


def _shape_result(node: ir.Node, shapes: Values) -> np.ndarray:
    """Return what ``Shape(x)``, with ``start`` and ``end``, or ``Size(x)`` gives."""
    dimensions = _dimensions(node.inputs[0], shapes)
    if node.op_type == "Size":
        return np.array(np.prod(_fixed(dimensions), dtype=np.int64))
    return _fixed(dimensions[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)])


def _dimension_result(node: ir.Node, shapes: Values) -> np.ndarray:
    """Return what ``Gather(Shape(x), indices)`` gives when just the lengths that it picks are fixed."""
    shape, tensor = node.inputs[0], constant(node.inputs[1])
    asked = shape.producer() if shape is not None else None
    if asked is None or tensor is None:
        raise LeftAlone("shape-unknown")
    start, end = asked.attributes.get_int("start", 0), asked.attributes.get_int("end", None)
    dimensions = _dimensions(asked.inputs[0], shapes)[start:end]
    indices = tensor.numpy()
    if not all(-len(dimensions) <= i < len(dimensions) for i in indices.flat):
        raise LeftAlone("index-out-of-range")
    return _fixed([dimensions[i] for i in indices.flat]).reshape(indices.shape)


def _evaluated(model: ir.Model, node: ir.Node, shapes: Values, limit: int) -> list[np.ndarray]:
    """Run the node alone in onnx's reference evaluator, under the operator sets of the model."""
    tensors = {value.name or "": constant(value) for value in node.inputs if value is not None}
    read = sum(tensor.nbytes for tensor in tensors.values() if tensor is not None)
    outputs = [value for value in node.outputs if value.name]
    for value in outputs:
        _check_size(_expected_bytes(shapes.get(value)), read, limit)
    feeds = {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}
    for tensor in tensors.values():
        release(tensor)
    graph = onnx.GraphProto(name="fold_constants", node=[ir.to_proto(node)])
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in feeds)
    graph.output.extend(onnx.ValueInfoProto(name=value.name) for value in outputs)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            results = ReferenceEvaluator(graph, opsets=dict(model.opset_imports)).run(None, feeds)
    except Exception as error:  # the evaluator raises whatever numpy or its own gaps raise
        raise LeftAlone("cannot-evaluate") from error
    arrays = iter(_checked(value, result, shapes) for value, result in zip(outputs, results, strict=True))
    return [next(arrays) if value.name else np.empty(0) for value in node.outputs]


def _expected_bytes(value: ir.Value | None) -> float:
    """Return the size that a tensor will have, 0 when that is not known beforehand."""
    if value is None or value.dtype is None or value.shape is None or not value.shape.is_static():
        return 0
    return float(np.prod(value.shape.numpy(), dtype=np.float64) * value.dtype.itemsize)


def _check_size(size: float, read: int, limit: int) -> None:
    """Leave a node whose result would make the model larger by more than the limit allows."""
    if size > max(read, limit):
        raise LeftAlone("too-large")


def _checked(value: ir.Value, result: object, shapes: Values) -> np.ndarray:
    """Return a result as an array, if it is of the type that onnx infers for it."""
    if not isinstance(result, np.ndarray | np.generic) or result.dtype.kind in "OSU":
        raise LeftAlone("not-a-numeric-tensor")
    expected = shapes.get(value)
    if expected is None or expected.dtype is None or ir.DataType.from_numpy(result.dtype) != expected.dtype:
        raise LeftAlone("type-unsure")
    return np.asarray(result)


def _store(node: ir.Node, arrays: Sequence[np.ndarray]) -> None:
    """Put initializers with the names of the node's outputs in the place of the node."""
    graph = graph_of(node)
    inputs, outputs = tuple(node.inputs), tuple(node.outputs)
    for value, array in zip(outputs, arrays, strict=True):
        if value.name and value.uses():
            value.replace_all_uses_with(add_initializer(graph, value.name, array))
    graph.remove(node, safe=True)
    discard(*inputs)
    for source in inputs:  # a Shape of which every length that was asked for is known now
        asked = source.producer() if source is not None else None
        if asked is not None and asked.domain == "" and asked.op_type == "Shape" and asked.graph is graph:
            _remove_unread(graph, asked)


def _remove_unread(graph: ir.Graph, node: ir.Node) -> None:
    """Remove a node unless something still wants its output."""
    if not any(value.uses() or value.is_graph_output() for value in node.outputs):
        graph.remove(node, safe=True)

"""Types and shapes that onnx infers, with a bound on the values that it propagates.

onnx keeps one entry for each element of a tensor of one axis that may hold lengths. A few nodes can make such a tensor
arbitrarily long (Range, or a Concat of a tensor with itself, again and again), so its length is checked first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx.helper import get_node_attr_value

from .queries import MS, known_shape, own_values

APART = 1000  # bytes; onnx does not need larger initializers
LONGEST = 2**22  # elements of a tensor of one axis whose values onnx may propagate
HEADROOM = 2**30  # bytes that onnx may need more than the process has
BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
SKIPPED = (0, 3)  # the results of a SkipLayerNormalization that have the shape of its input: the norm and the sum
ALIKE: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("", "GroupNormalization"): (0,),
    ("", "SimplifiedLayerNormalization"): (0,),
    (MS, "BiasGelu"): (0,),
    (MS, "FastGelu"): (0,),
    (MS, "Gelu"): (0,),
    (MS, "QuickGelu"): (0,),
    (MS, "RotaryEmbedding"): (0,),
    (MS, "SkipLayerNormalization"): SKIPPED,
    (MS, "SkipSimplifiedLayerNormalization"): SKIPPED,
}
"""Operators, by domain and type, of which onnx infers nothing, and their results with the type and shape of input 0."""


def infer(model: ir.Model) -> None:
    """Set each type and shape that onnx can infer, in place; a model that onnx cannot infer stays as it is."""
    for value, found in stand_ins(model).items():
        value.shape, value.type = found.shape, found.type


def outputs_of(model: ir.Model) -> list[ir.Value]:
    """Return the outputs of a model, each with the shape that onnx infers."""
    known = stand_ins(model)
    return [known.get(each, each) for each in model.graph.outputs]


def stand_ins(model: ir.Model) -> dict[ir.Value, ir.Value]:
    """Return a new value for each value of the model and its bodies, with the type and the shape that onnx can infer.

    A new value has no producer, no readers and no tensor. Operators of `ALIKE` pass on what they read. A type or a
    shape that onnx cannot infer, for instance behind a node of an unknown domain, is that of `model`. `model` itself
    does not change, because a transform without rewrites must leave it as it is.
    """
    try:
        inferred = _inferred(_message(model))
        pairs = list(_pairs(model.graph, inferred.graph))
    except Exception:  # noqa: BLE001 - onnx raises anything; nothing more is known
        pairs = [(graph, onnx.GraphProto()) for graph in model.graphs()]
    found: dict[ir.Value, ir.Value] = {}
    for graph, message in pairs:
        known = {info.name: info for info in (*message.input, *message.output, *message.value_info)}
        for value in own_values(graph):
            found[value] = _stand_in(value, known.get(value.name or ""))
    symbols = {
        length.value for value in model.graph.inputs for length in value.shape or () if not isinstance(length, int)
    }
    for value in model.graph.outputs:
        if value in found:
            found[value].shape = _told(found[value].shape, value.shape, symbols - {None})
    return found


def _told(inferred: ir.Shape | None, declared: ir.Shape | None, symbols: Collection[str | None]) -> ir.Shape | None:
    """Return the shape of an output: the inferred lengths, and declared ones where no length is inferred.

    A declared number where the length is that of an input, for instance the number of boxes of the example with which
    the model was exported, is wrong for other inputs. The runtime only warns of it.
    """
    if inferred is None or declared is None or len(inferred) != len(declared):
        return inferred
    sure = [isinstance(length, int) or length.value in symbols for length in inferred]
    return ir.Shape([ours if known else other for ours, other, known in zip(inferred, declared, sure, strict=True)])


class Known:
    """The types and shapes of the tensors of a model: what onnx infers, else what is declared.

    They are inferred at the first question, of all tensors, also of those in bodies: most transforms find nothing of
    their pattern in most models, and ask nothing. So the first question must come before a rewrite or between two of
    them, when the graph is valid. A tensor that was inserted since has what it declares.
    """

    def __init__(self, model: ir.Model) -> None:
        """Take a model, which does not change."""
        self._model = model

    @cached_property
    def _found(self) -> dict[ir.Value, ir.Value]:
        """What `stand_ins` returns."""
        return stand_ins(self._model)

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """Return the element type of a tensor; None if it is not known."""
        return None if value is None else self._found.get(value, value).dtype or value.dtype

    def shape(self, value: ir.Value | None) -> ir.Shape | None:
        """Return the shape of a tensor; None if not even its rank is known."""
        return None if value is None else known_shape(self._found.get(value), value)

    def rank(self, value: ir.Value | None) -> int | None:
        """Return the number of axes of a tensor; None if it is not known."""
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def lengths(self, value: ir.Value | None) -> tuple[int | None, ...] | None:
        """Return the lengths of the axes of a tensor, None for an unknown one; None if the rank is not known."""
        shape = self.shape(value)
        return None if shape is None else tuple(n if isinstance(n, int) else None for n in shape)


def inferred(model: ir.Model, *, bodies: bool = False) -> dict[str, ir.Value]:
    """Return the `stand_ins` of the values of the main graph by name.

    With `bodies`, also those of the values inside bodies of control flow; names must then be unique
    (`separate_bodies`).
    """
    found: dict[str, ir.Value] = {}
    for value, other in stand_ins(model).items():
        if value.name and (bodies or value.graph is model.graph):
            found.setdefault(value.name, other)
    return found


def _stand_in(value: ir.Value, known: onnx.ValueInfoProto | None) -> ir.Value:
    """Return a value with the type and shape of a message, or those of `value` where the message has none."""
    found = ir.Value() if known is None else ir.serde.deserialize_value_info_proto(known, None)
    shape = value.shape.copy() if found.shape is None and value.shape is not None else found.shape
    return ir.Value(name=value.name, shape=shape, type=value.type if found.dtype is None else found.type)


def _pairs(graph: ir.Graph, message: onnx.GraphProto) -> Iterator[tuple[ir.Graph, onnx.GraphProto]]:
    """Yield a graph and its bodies, each with its message; nodes without bodies may differ."""
    yield graph, message
    nodes = [node for node in graph if any(each.type in BODIES for each in node.attributes.values())]
    others = [node for node in message.node if any(each.type in BODIES for each in node.attribute)]
    for node, other in zip(nodes, others, strict=True):
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH:
                yield from _pairs(attribute.as_graph(), get_node_attr_value(other, attribute.name))
            elif attribute.type is ir.AttributeType.GRAPHS:
                bodies = get_node_attr_value(other, attribute.name)
                for body, inner in zip(attribute.as_graphs(), bodies, strict=True):
                    yield from _pairs(body, inner)


def _message(model: ir.Model) -> onnx.ModelProto:
    """Return a model as a message in which large initializers are inputs, and outputs have no shapes.

    `model` does not change.
    """
    graph, inputs = model.graph, list(model.graph.inputs)
    before = [(value, value.const_value) for value in graph.initializers.values()]
    try:
        for value, tensor in before:
            if tensor is not None:
                value.shape = ir.Shape(tensor.shape.numpy()) if value.shape is None else value.shape
                value.type = value.type or ir.TensorType(tensor.dtype)
            if not value.is_graph_input():
                graph.inputs.append(value)
            if tensor is None or tensor.nbytes > APART:
                value.const_value = None
                graph.initializers.pop(str(value.name))
        message = ir.to_proto(model)
        for output in message.graph.output:
            if output.type.HasField("tensor_type"):
                output.type.tensor_type.ClearField("shape")
        _pass_shapes_on(message.graph, {(each.domain, each.name) for each in message.functions})
        return message
    finally:
        graph.initializers.clear()
        for value, tensor in before:
            value.const_value = tensor
            graph.initializers.add(value)
        graph.inputs.clear()  # to delete a slice would leave the marks of an input
        graph.inputs.extend(inputs)


def _pass_shapes_on(graph: onnx.GraphProto, own: Collection[tuple[str, str]]) -> None:
    """Replace the operators of `ALIKE` by an Identity of their input, in place, also in bodies: onnx infers its shape.

    Before:  y, , , z = SkipLayerNormalization(x, s, g)
    After:   y = Identity(x);  z = Identity(x)
    Left alone: operators in `own`, the functions of the model.
    """
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs) if attribute.type in BODIES else ():
                _pass_shapes_on(body, own)
        kind = (node.domain, node.op_type)
        alike = ALIKE.get(kind, ()) if node.input and kind not in own else ()
        results = [node.output[index] for index in alike if index < len(node.output) and node.output[index]]
        nodes.extend(onnx.helper.make_node("Identity", node.input[:1], [name]) for name in results)
        if results:
            changed = True
        else:
            nodes.append(node)
    if changed:
        del graph.node[:]
        graph.node.extend(nodes)


def _inferred(message: onnx.ModelProto) -> onnx.ModelProto:
    """Return a message with inferred types and shapes; with propagated values if their number is bounded."""
    plain = onnx.shape_inference.infer_shapes(message, data_prop=False)
    if any(_is_long(value.type) for value in plain.graph.value_info):
        return plain
    del plain  # a message of many nodes is large: no third one beside the two
    try:
        with _bounded_memory():
            return onnx.shape_inference.infer_shapes(message, data_prop=True)
    except MemoryError:  # lengths that only propagated values show
        return onnx.shape_inference.infer_shapes(message, data_prop=False)


def _is_long(kind: onnx.TypeProto) -> bool:
    """Whether a type is that of a tensor of one long axis."""
    axes = kind.tensor_type.shape.dim
    return len(axes) == 1 and axes[0].dim_value > LONGEST


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Give the process only `HEADROOM` more memory, where the system can say how much it has (Linux)."""
    if sys.platform != "linux":
        yield
        return
    import resource

    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    least = min(used + HEADROOM, *(each for each in (soft, hard) if each != resource.RLIM_INFINITY), sys.maxsize)
    resource.setrlimit(resource.RLIMIT_AS, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

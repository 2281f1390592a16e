"""Put native calls into a model: each stands for the nodes that it computes, which are the body of its function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from ...transforms.graphs.queries import Shape, graph_of
from ...transforms.graphs.rewriter import (
    add_initializer,
    names,
    remove_if_unread,
    remove_unread,
    replace_node,
    unused_name,
)
from ...transforms.graphs.rewriter import replace as replace_value
from .bent_lines import bent_lines_of
from .call import Call, Results, attributes_of
from .calls import LINES
from .chains import table_of
from .functions import TO_NCHW, TO_NHWC, function_of, turned
from .library import names_of
from .nodes import native_node

UINT8 = ir.TensorType(ir.DataType.UINT8)


def put_calls(model: ir.Model, calls: Mapping[ir.Value, Call]) -> int:
    """Put calls into a model, by the tensor that each computes, in order; return how many there are."""
    if not calls:
        return 0
    moved: dict[ir.Value, ir.Value] = {}
    writer = _Writer(model, names(model), {})
    for end, call in calls.items():
        inputs = [value if value is None else moved.get(value, value) for value in call.inputs]
        made = _put(writer, replace(call, inputs=inputs), end)
        if made is not None:
            moved[end] = made
    return len(moved)


@dataclass(frozen=True, eq=False)
class _Writer:
    """The model that calls are written into.

    Attributes:
        model: The model.
        taken: The names in the model.
        functions: The names of the functions, by their content without a name.
    """

    model: ir.Model
    taken: set[str]
    functions: dict[bytes, str]

    def name_of(self, function: ir.Function, operator: str) -> str | None:
        """Return the name of a function, and add the function to the model if it is new; None if no name is left."""
        function.name = ""
        content = ir.to_proto(function).SerializeToString(deterministic=True)
        if content not in self.functions:
            used = {name for _, name, _ in self.model.functions}
            free = next((name for name in names_of(operator) if name not in used), None)
            if free is None:
                return None
            self.functions[content] = function.name = free
            self.model.functions[function.identifier()] = function
        return self.functions[content]


def _put(writer: _Writer, call: Call, end: ir.Value) -> ir.Value | None:
    """Compute the tensor `end` by a call, and remove the nodes that nothing reads then.

    Returns:
        The tensor that replaces `end`; None if the model has too many functions of the operator.
    """
    old = end.producer()
    assert old is not None
    call = _with_table(writer.model, call)
    function, constants = function_of(writer.model, call)
    operator = writer.name_of(function, call.operator)
    if operator is None:
        return None
    _declare(call, end)
    inputs, results = [*_inputs_of(writer, call, old), *constants], call.results
    count = results.count + len(results.more)
    native = native_node(writer.model.graph, operator, inputs, call.attributes, name=call.name, results=count)
    read = [value.producer() for node in call.body for value in node.inputs if value is not None]
    if call.tensors.shapes:
        y = _inserted(old, native, writer.taken, [call.tensors.shapes[-1][axis] for axis in TO_NHWC])
        native = turned(y, TO_NCHW, f"{call.name}/nchw")
    _take_over(results, native.outputs[results.count :])
    replace_node(old, native, results.count)
    remove_unread([*call.body[:-1], *read, *(value.producer() for value in call.computed)])
    return native.outputs[0]


def _declare(call: Call, end: ir.Value) -> None:
    """Set the types, and the shapes of images, of the tensors that a call reads and of its result `end`."""
    tensors = call.tensors
    for value in call.computed:
        value.type = ir.TensorType(tensors.dtype)
    end.type = ir.TensorType(tensors.made or tensors.dtype)
    if tensors.shapes:
        for value, shape in zip((*call.computed, end), tensors.shapes, strict=True):
            value.shape = ir.Shape(shape)


def _inputs_of(writer: _Writer, call: Call, old: ir.Node) -> list[ir.Value | None]:
    """Return the inputs of a call by place: its values become initializers, and its images are in NHWC before `old`."""
    inputs = [*call.inputs, *[None] * (len(call.names) - len(call.inputs))]
    for name, array in call.values.items():
        value = add_initializer(writer.model.graph, unused_name(writer.taken, f"{call.name}/{name}"), array)
        inputs[call.names.index(name)] = value
    in_nhwc: dict[ir.Value, ir.Value] = {}  # a tensor may be both inputs
    for index, x, shape in zip(call.tensors.places, call.computed, call.tensors.shapes, strict=False):
        if x not in in_nhwc:
            in_nhwc[x] = _in_nhwc(x, shape, old, f"{call.name}/{call.names[index]}/nhwc", writer.taken)
        inputs[index] = in_nhwc[x]
    return inputs


def _take_over(results: Results, outputs: Sequence[ir.Value]) -> None:
    """Let outputs of the call be the results of the nodes behind the body, and remove these nodes."""
    for value, result in zip(results.more, outputs, strict=True):
        name = value.name
        replace_value(value, result)
        value.name = None
        result.name = name
    for node in reversed(results.behind):
        remove_if_unread(node)


def _with_table(model: ir.Model, call: Call) -> Call:
    """Return a call with the values of its function: a table, or the lines of each channel."""
    if call.chain is None:
        return call
    chain = replace(call.chain, root=call.computed[0], nodes=tuple(call.body))
    lines = None if chain.place is None else bent_lines_of(model, chain)
    if lines is None:
        return replace(call, values={"table": table_of(model, chain)})
    attributes = attributes_of({"bend": lines.bend, "least": lines.least, "most": lines.most})
    return replace(call, operator="Lines", names=LINES, values={"lines": lines.lines}, attributes=attributes)


def _in_nhwc(x: ir.Value, shape: Shape, place: ir.Node, name: str, taken: set[str]) -> ir.Value:
    """Return a tensor in NHWC: the result of the call that computes it, or that of a new Transpose before `place`.

    Args:
        x: The tensor in NCHW.
        shape: Its shape.
        place: Where the Transpose stands.
        name: Its name.
        taken: The names in the model.
    """
    before = x.producer()
    if before is not None and before.op_type == "Transpose" and before.attributes.get_ints("perm", ()) == TO_NCHW:
        assert before.inputs[0] is not None
        return before.inputs[0]
    return _inserted(place, turned(x, TO_NHWC, name), taken, [shape[axis] for axis in TO_NHWC])


def _inserted(place: ir.Node, node: ir.Node, taken: set[str], shape: Shape) -> ir.Value:
    """Insert a node that computes a uint8 tensor of this shape; return the tensor."""
    graph_of(place).insert_before(place, [node])
    result = node.outputs[0]
    result.name, result.shape, result.type = unused_name(taken, str(node.name)), ir.Shape(shape), UINT8
    return result

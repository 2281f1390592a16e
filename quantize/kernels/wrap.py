"""Put units of a QDQ model into functions of the domain ``ai.requant``, which native operators compute.

A runtime with the library computes the node by the operator of the same name. Any other runtime replaces the node by
the body of the function: the nodes that were there before. The operators take NHWC, so that a Transpose stands on both
sides of the node, and of the body. ONNX Runtime cancels them, if the types and shapes of the tensors are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ... import NATIVE_DOMAIN
from ...calibration.session import Array
from ...transforms.graph import (
    add_initializer,
    constant,
    graph_of,
    names,
    nodes_by_name,
    remove_unread,
    sets_pads,
    sole_reader,
    take,
    take_place,
)
from ...transforms.plan import Unit
from ...transforms.qlinear import equal_parameters
from ...transforms.units import clip_bounds
from .chains import ELEMENTWISE, INTEGER, LEVELS, Chain, chain_of, copied, fine_table_of, is_uint8, table_of
from .library import VERSION, names_of

IMAGE = 4  # axes of a tensor with a layout
TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
CONVOLUTION = ("x", "x_scale", "x_zero_point", "w", "w_scale", "w_zero_point", "y_scale", "y_zero_point", "B", "table")
BIAS, TABLE_OF_CONVOLUTION = CONVOLUTION.index("B"), CONVOLUTION.index("table")
TABLE = ("x", "table")
AVERAGE = ("x", "x_scale", "x_zero_point", "y_scale", "y_zero_point")
WINDOW = {"dilations": [1, 1], "pads": [0, 0, 0, 0], "strides": [1, 1]}
"""The attributes of a kernel on an image, with their defaults."""

UINT8 = ir.TensorType(ir.DataType.UINT8)
UNSIGNED = (ir.DataType.UINT8, ir.DataType.FLOAT)
"""Types of zero points and scales."""

Shape = Sequence[int | str | None]


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a native operator, and the nodes that it replaces.

    Attributes:
        operator: The operator.
        name: The name of the node.
        names: The names of the operator's inputs.
        inputs: The inputs; the first one is the uint8 tensor.
        body: The nodes that it replaces, in order.
        attributes: The attributes of the node.
        anchor: The node of the body that has the attributes; None without attributes.
        table: The values of the last input, uint8; None without them. A Table has those of its body.
        shapes: The shapes of x and of the result in NCHW, if the operator takes NHWC; else empty.
    """

    operator: str
    name: str
    names: Sequence[str]
    inputs: Sequence[ir.Value | None]
    body: Sequence[ir.Node]
    attributes: Mapping[str, ir.Attr] = field(default_factory=dict)
    anchor: ir.Node | None = None
    table: Array | None = None
    shapes: Sequence[Shape] = ()

    @property
    def x(self) -> ir.Value:
        """The uint8 tensor that it reads."""
        x = self.inputs[0]
        assert x is not None
        return x


def wrap_units(model: ir.Model, units: Iterable[Unit], shapes: Mapping[str, Shape], *, fuse: bool = False) -> int:
    """Put units between uint8 tensors into functions; return how many.

    Before:  y8 = QuantizeLinear(Conv(DequantizeLinear(x8), DequantizeLinear(w8), DequantizeLinear(b32)))
    After:   y8 = Transpose(ai.requant.Convolution(Transpose(x8), ..., w8, ..., b32)), a function with the old body
    Left alone: units that have another form in the model, units in bodies of control flow, weights with zero points,
        and tensors of unknown rank.

    Args:
        model: A model in QDQ form.
        units: Convolutions, pools, and units that are functions of each element of one tensor, in order.
        shapes: Shapes of the float tensors by name.
        fuse: Whether a convolution and the function that alone reads it become one call, in which the sums are rounded
            only once, behind the function. Its results are not those of its body, but more accurate.
    """
    nodes = nodes_by_name(model)
    images = any(node.op_type == "Conv" for node in model.graph)
    calls: dict[ir.Value, _Call] = {}  # by the uint8 tensor that they compute
    for unit in units:
        last = nodes.get(unit.nodes[-1])
        end = _quantized(last) if last is not None and last.graph is model.graph else None
        ends = [shapes.get(name) for name in (unit.inputs[0], unit.outputs[0])]
        call = None if end is None or None in ends else CALLS.get(unit.op, _table)(nodes, unit, end)
        if call is None or end is None:
            continue
        if (images or unit.op in CALLS) and all(shape is not None and len(shape) == IMAGE for shape in ends):
            call = replace(call, shapes=[shape for shape in ends if shape is not None])
        before = calls.get(call.x) if fuse else None
        fused = None if before is None else _fused(model, before, call)
        if fused is not None:
            del calls[call.x]
        calls[end] = fused or call
    moved: dict[ir.Value, ir.Value] = {}
    writer = _Writer(model, names(model), {})
    for end, call in calls.items():
        here = replace(call, inputs=[moved.get(call.x, call.x), *call.inputs[1:]])
        made = _put(writer, here, end)
        if made is not None:
            moved[end] = made
    if moved:
        model.opset_imports[NATIVE_DOMAIN] = VERSION
    return len(moved)


def _fused(model: ir.Model, convolution: _Call, function: _Call) -> _Call | None:
    """Return the call of a convolution and the function of its result; None if they cannot be one."""
    inner = {*function.body}
    if (convolution.operator, function.operator) != ("Convolution", "Table"):
        return None
    if convolution.table is not None or not convolution.shapes:
        return None
    if function.x.is_graph_output() or any(use.node not in inner for use in function.x.uses()):
        return None
    table = fine_table_of(model, Chain(function.x, tuple(function.body)))
    body = [*convolution.body, *function.body]
    return None if table is None else replace(convolution, body=body, table=table)


def fused_calls(model: ir.Model) -> int:
    """Return how many native operators of a model are a convolution with the function behind it."""
    convolutions = [node for node in native_calls(model) if node.op_type.startswith("Convolution")]
    tables = [constant(node.inputs[TABLE_OF_CONVOLUTION]) for node in convolutions]
    return sum(table is not None and tuple(table.shape) == (LEVELS,) for table in tables)


def native_calls(model: ir.Model) -> list[ir.Node]:
    """Return the native operators of a model."""
    return [node for node in model.graph if node.domain == NATIVE_DOMAIN]


def _quantized(node: ir.Node) -> ir.Value | None:
    """Return the uint8 form of the result of a node, if nothing else reads the result; else None."""
    reader = sole_reader(node.outputs[0])
    return reader.outputs[0] if reader is not None and reader.op_type == "QuantizeLinear" else None


# ----------------------------------------------------------------------------------------------------- convolutions


def _convolution(nodes: Mapping[str, ir.Node], unit: Unit, end: ir.Value) -> _Call | None:
    """Return the call for a convolution with the Relu or Clip that it absorbs; None if it has another form."""
    anchor, *absorbed = (nodes[name] for name in unit.nodes)
    quantize = end.producer()
    pairs = [value.producer() for value in anchor.inputs if value is not None]
    if quantize is None or any(pair is None or pair.op_type != "DequantizeLinear" for pair in pairs):
        return None
    x, w, *bias = ([*pair.inputs, None][:3] for pair in pairs if pair is not None)
    inputs = [*x, *w, *[*quantize.inputs, None][1:3], *(each[0] for each in bias)]
    if not _is_supported(anchor, inputs):
        return None
    table = _clipping(absorbed, *inputs[BIAS - 2 : BIAS])
    body = [pair for pair in pairs if pair is not None]
    replaced = [*body, anchor, *absorbed, quantize]
    attributes = _attributes(anchor, WINDOW, group=anchor.attributes.get_int("group", 1))
    return _Call("Convolution", str(anchor.name), CONVOLUTION, inputs, replaced, attributes, anchor, table)


def _attributes(node: ir.Node, defaults: Mapping[str, list[int]], **more: int | list[int]) -> dict[str, ir.Attr]:
    """Return attributes of a node, with the defaults of those that it does not have, and more attributes."""
    values = {name: list(node.attributes.get_ints(name, default)) for name, default in defaults.items()}
    return {attribute.name: attribute for attribute in ir.convenience.convert_attributes({**values, **more})}


def _is_supported(node: ir.Node, inputs: Sequence[ir.Value | None]) -> bool:
    """Return whether the operator computes a convolution with these inputs, its own up to the bias."""
    tensors = [constant(value) for value in inputs[1:]]
    if any(tensor is None for tensor in tensors) or not sets_pads(node):
        return False
    by_name = {name: tensor for name, tensor in zip(CONVOLUTION[1:], tensors, strict=False) if tensor is not None}
    unsigned = by_name["x_zero_point"].dtype is by_name["y_zero_point"].dtype is ir.DataType.UINT8
    symmetric = by_name["w"].dtype is ir.DataType.INT8 and not by_name["w_zero_point"].numpy().any()
    return unsigned and symmetric and len(by_name["w"].shape) == IMAGE


def _clipping(absorbed: Iterable[ir.Node], scale: ir.Value | None, zero: ir.Value | None) -> Array | None:
    """Return a Relu or Clip as a table of integers, uint8 (256,); None if every integer stays as it is.

    Rounding to integers is monotone, so that it can come before or after the Clip.
    """
    step, origin = constant(scale), constant(zero)
    assert step is not None
    assert origin is not None
    table = every = np.arange(256)
    for node in absorbed:
        bounds = clip_bounds(node)
        assert bounds is not None  # `units` absorbs no other Clip
        limits = np.rint(np.asarray(bounds, np.float32) / step.numpy().reshape(())) + float(origin.numpy().item())
        table = np.clip(table, *np.clip(limits, 0, 255).astype(np.int64))
    return None if (table == every).all() else table.astype(np.uint8)


# --------------------------------------------------------------------------------------------------------- averages


def _average(nodes: Mapping[str, ir.Node], unit: Unit, end: ir.Value) -> _Call | None:
    """Return the call for a GlobalAveragePool; None if it has another form."""
    (anchor,) = (nodes[name] for name in unit.nodes)
    pair, quantize = anchor.inputs[0].producer() if anchor.inputs[0] is not None else None, end.producer()
    if pair is None or quantize is None or pair.op_type != "DequantizeLinear":
        return None
    inputs = [*[*pair.inputs, None][:3], *[*quantize.inputs, None][1:3]]
    tensors = [constant(value) for value in inputs[1:]]
    if any(tensor is None or tensor.dtype not in UNSIGNED for tensor in tensors):
        return None
    return _Call("GlobalAveragePool", str(anchor.name), AVERAGE, inputs, [pair, anchor, quantize])


def _maximum(nodes: Mapping[str, ir.Node], unit: Unit, end: ir.Value) -> _Call | None:
    """Return the call for a MaxPool; None if it has another form."""
    (anchor,) = (nodes[name] for name in unit.nodes)
    pair, quantize = anchor.inputs[0].producer() if anchor.inputs[0] is not None else None, end.producer()
    if pair is None or quantize is None or pair.op_type != "DequantizeLinear" or len(anchor.outputs) > 1:
        return None
    plain = not anchor.attributes.get_int("ceil_mode", 0) and sets_pads(anchor)
    if not plain or not equal_parameters(pair.inputs[1:3], quantize.inputs[1:3]) or not is_uint8(quantize, 2):
        return None
    kernel = anchor.attributes.get_ints("kernel_shape", ())
    attributes = _attributes(anchor, WINDOW, kernel_shape=list(kernel))
    return _Call("MaxPool", str(anchor.name), ("x",), [pair.inputs[0]], [pair, anchor, quantize], attributes, anchor)


# ----------------------------------------------------------------------------------------------------------- tables


def _table(nodes: Mapping[str, ir.Node], unit: Unit, end: ir.Value) -> _Call | None:
    """Return the call for a unit that is a function of one element; None if it is not."""
    pairs = [value.producer() for value in nodes[unit.nodes[-1]].inputs if value is not None]
    for pair in pairs:
        root = pair.inputs[0] if pair is not None and pair.op_type == "DequantizeLinear" else None
        chains: dict[ir.Value, Chain] = {}
        if root is not None:
            _find_chains(end, root, chains)
        if end in chains and chains[end].root is root:
            return _Call("Table", unit.name, TABLE, [root], chains[end].nodes)
    return None


def _find_chains(value: ir.Value, root: ir.Value, chains: dict[ir.Value, Chain]) -> None:
    """Find what a tensor, and the tensors between it and `root`, are functions of, and add it to `chains`."""
    node = value.producer()
    if value is root or value in chains or node is None or node.op_type not in INTEGER.keys() | ELEMENTWISE:
        return
    for each in node.inputs:
        if each is not None and constant(each) is None:
            _find_chains(each, root, chains)
    chain = chain_of(node, chains)
    if chain is not None:
        chains[value] = chain


CALLS = {"Conv": _convolution, "GlobalAveragePool": _average, "MaxPool": _maximum}
"""What makes the call of a unit, by its operator; `_table` for all others."""


# -------------------------------------------------------------------------------------------------------- functions


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


def _put(writer: _Writer, call: _Call, end: ir.Value) -> ir.Value | None:
    """Compute the uint8 tensor `end` by a call, and remove the nodes that nothing reads then.

    Returns:
        The tensor that replaces `end`; None if the model has too many functions of the operator.
    """
    old = end.producer()
    assert old is not None
    function, constants = _function(writer.model, call)
    operator = writer.name_of(function, call.operator)
    if operator is None:
        return None
    x, *others = call.inputs
    values = table_of(writer.model, Chain(call.x, tuple(call.body))) if call.operator == "Table" else call.table
    if values is not None:
        table = add_initializer(writer.model.graph, take(writer.taken, f"{call.name}/table"), values)
        others += [*[None] * (len(call.names) - 2 - len(others)), table]
    others += [*[None] * (len(call.names) - 1 - len(others)), *constants]
    end.type = call.x.type = UINT8
    if call.shapes:
        call.x.shape, end.shape = (ir.Shape(shape) for shape in call.shapes)
        x = _in_nhwc(call, old, writer.taken)
    native = ir.node(operator, [x, *others], dict(call.attributes), domain=NATIVE_DOMAIN, name=call.name)
    sources = [value.producer() for node in call.body for value in node.inputs if value is not None]
    if call.shapes:
        y = _inserted(old, native, writer.taken, [call.shapes[1][axis] for axis in TO_NHWC])
        native = _turn(y, TO_NCHW, f"{call.name}/nchw")
    take_place(old, native)
    remove_unread([*call.body[:-1], *sources, call.x.producer()])
    return native.outputs[0]


def _function(model: ir.Model, call: _Call) -> tuple[ir.Function, list[ir.Value]]:
    """Return the function of a call, and the constants that are its further inputs.

    Attributes of the node and all constants are parameters, so that one function is the body of many calls.
    """
    formal = [ir.Value(name=name) for name in call.names]
    known = {value: own for value, own in zip(call.inputs[1:], formal[1:], strict=False) if value is not None}
    inner = {node.outputs[0] for node in call.body}
    free = dict.fromkeys(value for node in call.body for value in node.inputs if value is not None)
    constants = [value for value in free if value not in inner and value not in known and value is not call.x]
    formal += [ir.Value(name=f"c{index}") for index in range(len(constants))]
    known |= zip(constants, formal[len(call.names) :], strict=True)
    before = [_turn(formal[0], TO_NCHW, "")] if call.shapes else []
    body = copied(call.body, {**known, call.x: before[0].outputs[0] if before else formal[0]}, _no_constant)
    if call.anchor is not None:
        copy = body[call.body.index(call.anchor)]
        copy.attributes.clear()
        for name, attribute in call.attributes.items():
            copy.attributes[name] = ir.RefAttr(name, name, attribute.type)
    after = [_turn(body[-1].outputs[0], TO_NHWC, "")] if call.shapes else []
    nodes = [*before, *body, *after]
    graph = ir.Graph(formal, [nodes[-1].outputs[0]], nodes=nodes, opset_imports=model.opset_imports, name="body")
    nodes[-1].outputs[0].name = "y"
    attributes = [ir.Attr(name, attribute.type, None) for name, attribute in call.attributes.items()]
    return ir.Function(NATIVE_DOMAIN, call.operator, graph=graph, attributes=attributes), constants


def _no_constant(_: ir.TensorProtocol) -> ir.Value:
    """Refuse a constant: all of them are inputs of the function."""
    raise AssertionError


def _in_nhwc(call: _Call, place: ir.Node, taken: set[str]) -> ir.Value:
    """Return the tensor that a call reads, in NHWC: what the call before it computed, or a Transpose before `place`."""
    before = call.x.producer()
    if before is not None and before.op_type == "Transpose" and before.attributes.get_ints("perm", ()) == TO_NCHW:
        assert before.inputs[0] is not None
        return before.inputs[0]
    shape = [call.shapes[0][axis] for axis in TO_NHWC]
    return _inserted(place, _turn(call.x, TO_NHWC, f"{call.name}/nhwc"), taken, shape)


def _turn(x: ir.Value, order: Sequence[int], name: str) -> ir.Node:
    """Return a Transpose."""
    return ir.node("Transpose", [x], {"perm": list(order)}, name=name or None)


def _inserted(place: ir.Node, node: ir.Node, taken: set[str], shape: Shape) -> ir.Value:
    """Insert a node that computes a uint8 tensor of this shape; return the tensor."""
    graph_of(place).insert_before(place, [node])
    result = node.outputs[0]
    result.name, result.shape, result.type = take(taken, str(node.name)), ir.Shape(shape), UINT8
    return result

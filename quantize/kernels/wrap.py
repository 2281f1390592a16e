"""Put units of a QDQ model into functions of the domain ``ai.requant``, which native operators compute.

A runtime with the library computes the node by the operator of the same name. Any other runtime replaces the node by
the body of the function: the nodes that were there before. The operators take NHWC, so that a Transpose stands on both
sides of the node, and of the body. ONNX Runtime cancels them, if the types and shapes of the tensors are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ... import NATIVE_DOMAIN
from ...transforms.graph import Shape, constant, graph_of
from ...transforms.int8.plan import Unit
from ...transforms.rewriter import add_initializer, names, remove_if_unread, remove_unread, replace_node, unused_name
from ...transforms.rewriter import replace as replace_value
from .bent_lines import bent_lines_of
from .call import Call, Results, Tensors, attributes_of
from .calls import LINES, PAIR, Surroundings, call_of
from .chains import copied, table_of
from .convolution_calls import BIAS, CONVOLUTION, CURVE, RESIDUAL, WEIGHTS
from .curves import SEGMENTS, curve_of
from .library import names_of
from .nodes import native_node
from .site import X, Y

CURVED = frozenset({"Convolution", "GroupNormalization"})
"""The operators that take a function of their result as a curve."""
TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
UINT8 = ir.TensorType(ir.DataType.UINT8)


def wrap_units(
    model: ir.Model, units: Iterable[Unit], shapes: Mapping[str, Shape], *, join: bool = False, exact: bool = False
) -> int:
    """Put units between uint8 tensors into functions; return how many.

    Before:  y8 = QuantizeLinear(Conv(DequantizeLinear(x8), DequantizeLinear(w8), DequantizeLinear(b32)))
    After:   y8 = Transpose(ai.requant.Convolution(Transpose(x8), ..., w8, ..., b32)), a function with the old body
    Left alone: units that have another form in the model, units in bodies of control flow, weights that are not int8
        without their zero points, and tensors of unknown rank.

    Args:
        model: A model in QDQ form.
        units: Convolutions, pools, sums and products, and units that are functions of each element of one tensor, in
            order.
        shapes: Shapes of the float tensors by name.
        join: Whether a convolution and what alone reads it, a sum or a function, become one call; and a group norm and
            a function.
        exact: Whether a call computes what its body computes. If not, joined calls round the sums only once, behind the
            function or the other sum: their results are not those of their bodies, but more accurate.
    """
    return put_calls(model, _calls(model, units, shapes, join=join, exact=exact))


def put_calls(model: ir.Model, calls: Mapping[ir.Value, Call]) -> int:
    """Put calls into a model, by the tensor that each computes, in order; return how many there are."""
    moved: dict[ir.Value, ir.Value] = {}
    writer = _Writer(model, names(model), {})
    for end, call in calls.items():
        inputs = [value if value is None else moved.get(value, value) for value in call.inputs]
        made = _put(writer, replace(call, inputs=inputs), end)
        if made is not None:
            moved[end] = made
    return len(moved)


def drop_inner_rounding(model: ir.Model, units: Iterable[Unit], shapes: Mapping[str, Shape]) -> int:
    """Remove the pairs at which joined calls do not round; return how many.

    Before:  y8 = QuantizeLinear(Sigmoid(DequantizeLinear(QuantizeLinear(Conv(x, w, b)))))
    After:   y8 = QuantizeLinear(Sigmoid(Clip(Conv(x, w, b))))
    The model then computes with float operators what `wrap_units` writes as joined calls: corrections that are learned
    on it fit those. A curve clips what it is a function of; a sum is not clipped in front of a residual.
    Left alone: functions that become tables.

    Args:
        model: A model in QDQ form.
        units: As for `wrap_units`.
        shapes: Shapes of the float tensors by name.
    """
    removed, taken = 0, names(model)
    for call in _calls(model, units, shapes, join=True, exact=False).values():
        grid = call.values.get("grid")
        if grid is None and (call.operator != "Convolution" or len(call.tensors.places) == 1):
            continue
        # blocks of pixels are rounded in front of the convolution
        after = next((place for place, node in enumerate(call.body) if node.op_type == "Conv"), 0)
        rounded = [node for node in call.body[after:-1] if node.op_type == "QuantizeLinear"]
        for node in rounded:
            value = node.inputs[0]
            assert value is not None
            if grid is not None and node is rounded[0]:
                value = _clipped(model, node, value, (grid[0], grid[0] + SEGMENTS * grid[1]), taken)
            pairs = [use.node for use in node.outputs[0].uses()]
            for pair in pairs:
                pair.outputs[0].replace_all_uses_with(value)
            remove_unread(pairs)
        removed += len(rounded)
    return removed


def _clipped(model: ir.Model, place: ir.Node, value: ir.Value, bounds: Sequence[float], taken: set[str]) -> ir.Value:
    """Return a tensor clipped to bounds, by a Clip in front of `place`."""
    limits = [
        add_initializer(model.graph, unused_name(taken, f"{value.name}/bound"), np.asarray(each, np.float32))
        for each in bounds
    ]
    clip = ir.node("Clip", [value, *limits], name=unused_name(taken, f"{value.name}/clip"))
    clip.outputs[0].name = unused_name(taken, f"{value.name}/clipped")
    graph_of(place).insert_before(place, [clip])
    return clip.outputs[0]


def native_calls(model: ir.Model) -> list[ir.Node]:
    """Return the native operators of a model."""
    return [node for node in model.graph if node.domain == NATIVE_DOMAIN]


# ----------------------------------------------------------------------------------------------------------- joined


def _calls(
    model: ir.Model, units: Iterable[Unit], shapes: Mapping[str, Shape], *, join: bool, exact: bool
) -> dict[ir.Value, Call]:
    """Return the calls for units, by the uint8 tensor that they compute; the arguments are those of `wrap_units`."""
    around = Surroundings.of(model, shapes)
    calls: dict[ir.Value, Call] = {}
    for unit in units:
        call = call_of(unit, around)
        if call is None:
            continue
        for end in _joinable(calls, call) if join else ():
            both = _joined(model, calls[end], end, call, exact=exact)
            if both is not None:
                del calls[end]
                call = both
                break
        calls[call.body[-1].outputs[0]] = call
    return calls


def _joinable(calls: dict[ir.Value, Call], call: Call) -> list[ir.Value]:
    """Return the results of convolutions and group norms that a call alone reads, the last one first."""
    found = []
    for end in (end for end in reversed(calls) if end in call.computed):
        images = calls[end].operator in CURVED and calls[end].tensors.shapes and call.tensors.shapes
        if images and not end.is_graph_output() and _read_inside(end, call):
            found.append(end)
    return found


def _read_inside(end: ir.Value, call: Call) -> bool:
    """Return whether only the body of a call reads a tensor, also where one DequantizeLinear serves several readers."""
    pairs = [use.node for use in end.uses()]
    uses = [use.node for pair in pairs if pair is not call.body[-1] for value in pair.outputs for use in value.uses()]
    return all(node in call.body for node in (*pairs, *uses))


def _joined(model: ir.Model, first: Call, end: ir.Value, call: Call, *, exact: bool) -> Call | None:
    """Return one call for a convolution or a group norm and the unit behind it; None if there is no such call.

    Args:
        model: The model.
        first: The convolution or the group norm.
        end: Its result.
        call: What reads it.
        exact: As for `wrap_units`.
    """
    if call.chain is not None:
        return _with_function(model, first, call, exact=exact)
    if call.operator == "Add" and first.operator == "Convolution" and not exact:
        return _with_sum(first, end, call)
    return None


def _with_function(model: ir.Model, first: Call, function: Call, *, exact: bool) -> Call | None:
    """Return the call of a convolution or a group norm with the function of its result behind it.

    The function is a curve or, only behind a convolution, a table. None if the call has a curve already, or for a
    function of each channel: lines take no longer than a table behind it.
    """
    chain = function.chain
    assert chain is not None  # it is a Table
    if "curve" in first.values or chain.place is not None:
        return None
    clipped, body = first.values.get("table"), [*first.body, *function.body]
    curve = None if exact or clipped is not None or _is_bounded(first) else curve_of(model, chain)
    if curve is not None:
        first, values = _curved(first), {"curve": curve.lines, "grid": curve.grid}
    elif "table" in first.names:
        table = table_of(model, chain)
        values = {"table": table if clipped is None else table[clipped]}
    else:
        return None
    return replace(first, body=body, values={**first.values, **values})


def _curved(call: Call) -> Call:
    """Return a call that has inputs for a curve; those that a group norm has not always are told by an attribute."""
    if "curve" in call.names:
        return call
    assert call.anchor is not None
    told = attributes_of({"curved": 1})
    anchor = replace(call.anchor, beside=(*call.anchor.beside, *told))
    return replace(call, names=(*call.names, *CURVE), attributes={**call.attributes, **told}, anchor=anchor)


def _is_bounded(call: Call) -> bool:
    """Return whether a group norm has absorbed a Relu or Clip that changes a result."""
    bounds = [call.attributes[name].as_int() for name in ("least", "most") if name in call.attributes]
    return bool(bounds) and bounds != [0, 255]


def _with_sum(convolution: Call, end: ir.Value, total: Call) -> Call | None:
    """Return the call of a convolution whose result is added to another tensor, the residual, before it is rounded.

    None for a residual that is a value for each channel, for a depthwise convolution, which takes no residual, and for
    a convolution that absorbed a Relu or Clip: it stands between the two.
    """
    one, other, result = total.tensors.shapes
    plain = {"DequantizeLinear", "Conv", "QuantizeLinear"}.issuperset(node.op_type for node in convolution.body)
    if list(one) != list(other) or not plain or len(convolution.tensors.places) > 1:
        return None
    weights = constant(convolution.inputs[WEIGHTS])
    assert weights is not None  # only a convolution over blocks has none, and its body is not plain
    if convolution.attributes["group"].as_int() > 1 and weights.shape[1] == 1:
        return None
    named = dict(zip(PAIR, total.inputs, strict=False))
    operands = [[named[name] for name in X], [named["b"], named["b_scale"], named["b_zero_point"]]]
    (residual,) = (operand for operand in operands if operand[0] is not end)
    place = CONVOLUTION.index(RESIDUAL[0])
    inputs = [*convolution.inputs, *[None] * (place - len(convolution.inputs)), *residual]
    inputs[BIAS - len(Y) : BIAS] = [named[name] for name in Y]
    shapes = (convolution.tensors.shapes[0], result, result)
    tensors, body = Tensors((0, place), shapes=shapes), [*convolution.body, *total.body]
    return replace(convolution, inputs=inputs, body=body, values=total.values, tensors=tensors)


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


def _put(writer: _Writer, call: Call, end: ir.Value) -> ir.Value | None:
    """Compute the tensor `end` by a call, and remove the nodes that nothing reads then.

    Returns:
        The tensor that replaces `end`; None if the model has too many functions of the operator.
    """
    old = end.producer()
    assert old is not None
    call = _with_table(writer.model, call)
    function, constants = _function(writer.model, call)
    operator = writer.name_of(function, call.operator)
    if operator is None:
        return None
    inputs = [*call.inputs, *[None] * (len(call.names) - len(call.inputs))]
    for name, array in call.values.items():
        value = add_initializer(writer.model.graph, unused_name(writer.taken, f"{call.name}/{name}"), array)
        inputs[call.names.index(name)] = value
    inputs += constants
    tensors, results = call.tensors, call.results
    for value in call.computed:
        value.type = ir.TensorType(tensors.dtype)
    end.type = ir.TensorType(tensors.made or tensors.dtype)
    if tensors.shapes:
        for value, shape in zip((*call.computed, end), tensors.shapes, strict=True):
            value.shape = ir.Shape(shape)
        turned: dict[ir.Value, ir.Value] = {}  # a tensor may be both inputs
        for index, x, shape in zip(tensors.places, call.computed, tensors.shapes, strict=False):
            if x not in turned:
                turned[x] = _in_nhwc(x, shape, old, f"{call.name}/{call.names[index]}/nhwc", writer.taken)
            inputs[index] = turned[x]
    count = results.count + len(results.more)
    native = native_node(writer.model.graph, operator, inputs, call.attributes, name=call.name, results=count)
    read = [value.producer() for node in call.body for value in node.inputs if value is not None]
    if tensors.shapes:
        y = _inserted(old, native, writer.taken, [tensors.shapes[-1][axis] for axis in TO_NHWC])
        native = _turn(y, TO_NCHW, f"{call.name}/nchw")
    _take_over(results, native.outputs[results.count :])
    replace_node(old, native, results.count)
    remove_unread([*call.body[:-1], *read, *(value.producer() for value in call.computed)])
    return native.outputs[0]


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
    integers = {"bend": lines.bend, "least": lines.least, "most": lines.most}
    attributes = attributes_of(integers)
    return replace(call, operator="Lines", names=LINES, values={"lines": lines.lines}, attributes=attributes)


def _function(model: ir.Model, call: Call) -> tuple[ir.Function, list[ir.Value]]:
    """Return the function of a call, and the constants that are its further inputs.

    Attributes of the node and all constants are parameters, so that one function is the body of many calls.
    """
    formal = [ir.Value(name=name) for name in call.names]
    known = {value: own for value, own in zip(call.inputs, formal, strict=False) if value is not None}
    replaced, results, in_nhwc = [*call.body, *call.results.behind], call.results, bool(call.tensors.shapes)
    inner = {value for node in replaced for value in node.outputs}
    free = dict.fromkeys(value for node in replaced for value in node.inputs if value is not None)
    constants = [value for value in free if value not in inner and value not in known]
    formal += [ir.Value(name=f"c{index}") for index in range(len(constants))]
    known |= zip(constants, formal[len(call.names) :], strict=True)
    before = [_turn(known[value], TO_NCHW, "") for value in call.computed] if in_nhwc else []
    known |= {value: node.outputs[0] for value, node in zip(call.computed, before, strict=False)}
    body = copied(replaced, known, _no_constant)
    last = body[len(call.body) - 1]
    if call.anchor is not None:
        copy = body[call.body.index(call.anchor.node)]
        copy.attributes.clear()
        for name, attribute in call.attributes.items():
            if name in call.anchor.beside:
                continue
            copy.attributes[name] = ir.RefAttr(name, name, attribute.type)
    after = [_turn(last.outputs[0], TO_NHWC, "")] if in_nhwc else []
    nodes = [*before, *body, *after]
    made = {
        value: own
        for node, copy in zip(results.behind, body[len(call.body) :], strict=True)
        for value, own in zip(node.outputs, copy.outputs, strict=True)
    }
    outputs = [*(after or [last])[-1].outputs[: results.count], *(made[value] for value in results.more)]
    # no node of a body is native; the import would give equal bodies different contents
    imports = {domain: version for domain, version in model.opset_imports.items() if domain != NATIVE_DOMAIN}
    graph = ir.Graph(formal, outputs, nodes=nodes, opset_imports=imports, name="body")
    for index, result in enumerate(outputs):
        result.name = f"y{index or ''}"
    attributes = [ir.Attr(name, attribute.type, None) for name, attribute in call.attributes.items()]
    return ir.Function(NATIVE_DOMAIN, call.operator, graph=graph, attributes=attributes), constants


def _no_constant(_: ir.TensorProtocol) -> ir.Value:
    """Refuse a constant: all of them are inputs of the function."""
    raise AssertionError


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
    return _inserted(place, _turn(x, TO_NHWC, name), taken, [shape[axis] for axis in TO_NHWC])


def _turn(x: ir.Value, order: Sequence[int], name: str) -> ir.Node:
    """Return a Transpose."""
    return ir.node("Transpose", [x], {"perm": list(order)}, name=name or None)


def _inserted(place: ir.Node, node: ir.Node, taken: set[str], shape: Shape) -> ir.Value:
    """Insert a node that computes a uint8 tensor of this shape; return the tensor."""
    graph_of(place).insert_before(place, [node])
    result = node.outputs[0]
    result.name, result.shape, result.type = unused_name(taken, str(node.name)), ir.Shape(shape), UINT8
    return result

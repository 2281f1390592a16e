"""Put products of floats and constant integers into functions, which native operators compute.

They are products that find their ranges at run time, and those whose weights are in blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from ...transforms.fuse_gelu import find_gelu
from ...transforms.graphs.queries import MS, Shape, constant, key, sole_reader
from ...transforms.int8.plan import Unit
from ...transforms.patterns.linear import bias_behind
from .call import FLOATS, Anchor, Call
from .put_calls import put_calls

DYNAMIC = "DynamicQuantizeMatMul"


@dataclass(frozen=True, slots=True)
class Form:
    """How a product is written in the body of a function, and the native operator.

    Attributes:
        native: The native operator.
        constants: The names of its constant inputs behind x; those of the operator in the body are the same.
        bias: The place of the bias among the inputs of the operator in the body.
        channels: The axis of the output channels of the weights.
    """

    native: str
    constants: Sequence[str]
    bias: int
    channels: int

    @property
    def inputs(self) -> Sequence[str]:
        """The names of the inputs of the native operator."""
        return ("x", *self.constants, "B", "residual")


FORMS: Mapping[str, Form] = {
    DYNAMIC: Form("MatMul", ("w", "w_scale", "w_zero_point"), bias=4, channels=-1),
    "MatMulNBits": Form("MatMulNBits", ("w", "w_scale"), bias=5, channels=0),
}
"""The forms by the operator in the body."""
FUNCTION = "function"
RELU, GELU, GELU_BY_TANH, SILU = 1, 2, 3, 4
"""Values of the attribute ``function``."""
NUMBERS = {
    "Relu": RELU,
    "Gelu": GELU,
    f"{MS}.Gelu": GELU,
    f"{MS}.FastGelu": GELU_BY_TANH,
    f"{MS}.QuickGelu": SILU,
}
"""By operator: the number of the function that it computes."""
GATED = "gated"
"""The attribute that says that the residual is a gate: a factor."""


def wrap_products(model: ir.Model, units: Iterable[Unit], shapes: Mapping[str, Shape], *, join: bool = False) -> int:
    """Put products into functions; return how many.

    Before:  y = Gelu(Add(com.microsoft.DynamicQuantizeMatMul(x, W, scale, zero point), b))
    After:   y = ai.requant.MatMul(x, W, scale, zero point, b), function 2, whose body is what was there
        The operator rounds each row of x with a range of its own, the body all rows with one.
    Before:  y = Add(com.microsoft.MatMulNBits(x, W, scale, , , b), r)
    After:   y = ai.requant.MatMulNBits(x, W, scale, b, r), whose body is what was there
        Both round each block of a row of x with a range of its own.
    Before:  y = Mul(Silu(com.microsoft.DynamicQuantizeMatMul(x, W, scale, zero point)), r)
    After:   y = ai.requant.MatMul(x, W, scale, zero point, , r), function 4, gated
    Left alone: products in bodies of control flow, and those that have another form in the model.

    Args:
        model: A model with products that find their ranges at run time or have weights in blocks.
        units: The products, in order.
        shapes: Shapes of the float tensors by name.
        join: Whether a call includes what is behind it: the bias, a Relu, GELU or SiLU, and the sum with another tensor
            or the product with it.
    """
    nodes = {str(node.name): node for node in model.graph}
    functions = _functions(model) if join else {}
    calls: dict[ir.Value, Call] = {}
    for unit in units:
        node = nodes.get(unit.nodes[0])
        if node is None or node.op_type not in FORMS:
            continue
        call = _call(node)
        if join:
            call = _joined(call, functions)
            both = _with_residual(call, shapes)
            # a sum of two products belongs to the first one
            call = call if both.body[-1].outputs[0] in calls else both
        calls[call.body[-1].outputs[0]] = call
    return put_calls(model, calls)


@dataclass(frozen=True, eq=False)
class _Function:
    """Nodes that compute a function of a tensor, in order, and its number."""

    nodes: tuple[ir.Node, ...]
    number: int


def _functions(model: ir.Model) -> dict[ir.Value, _Function]:
    """Return the functions in the main graph that a product may include, by the tensor that nothing else reads."""
    found: dict[ir.Value, _Function] = {}
    places = {node: place for place, node in enumerate(model.graph)}
    for node in places:
        if node.op_type in ("Erf", "Tanh") and (gelu := find_gelu(node)) is not None:
            inside = _between(gelu.source, gelu.last)
            if all(use.node in inside for use in gelu.source.uses()) and not gelu.source.is_graph_output():
                nodes = tuple(sorted(inside, key=places.__getitem__))
                found[gelu.source] = _Function(nodes, GELU_BY_TANH if gelu.tanh else GELU)
        number, value = _number(node), node.inputs[0] if node.inputs else None
        if value is not None and node.op_type == "Sigmoid" and (silu := _silu(node)) is not None:
            found[value] = silu
        if number and value is not None and sole_reader(value) is node:
            found[value] = _Function((node,), number)
    return found


def _number(node: ir.Node) -> int:
    """Return the number of the function that a node computes of its first input; 0 for another function."""
    operator = key(node)
    if operator == "Gelu" and node.attributes.get_string("approximate", "none") == "tanh":
        return GELU_BY_TANH
    if operator == f"{MS}.FastGelu" and len(node.inputs) > 1:  # the second input is a bias
        return 0
    if operator == f"{MS}.QuickGelu" and node.attributes.get_float("alpha", 0) != 1:  # without it alpha is 1.702
        return 0
    return NUMBERS.get(operator, 0)


def _silu(sigmoid: ir.Node) -> _Function | None:
    """Return the SiLU that contains a Sigmoid, if nothing else reads the tensor that it is a function of."""
    source, product = sigmoid.inputs[0], sole_reader(sigmoid.outputs[0])
    if source is None or source.is_graph_output() or product is None or product.op_type != "Mul":
        return None
    whole = {use.node for use in source.uses()} == {sigmoid, product} and source in product.inputs
    return _Function((sigmoid, product), SILU) if whole else None


def _between(source: ir.Value, last: ir.Node) -> set[ir.Node]:
    """Return the nodes that compute the result of `last` from a tensor."""
    found, waiting = {last}, list(last.inputs)
    while waiting:
        value = waiting.pop()
        node = value.producer() if value is not None and value is not source and constant(value) is None else None
        if node is not None and node not in found:
            found.add(node)
            waiting.extend(node.inputs)
    return found


def _call(node: ir.Node) -> Call:
    """Return the call of a product alone."""
    form = FORMS[node.op_type]
    return Call(
        form.native,
        str(node.name),
        form.inputs,
        [*node.inputs[: 1 + len(form.constants)], *node.inputs[form.bias : form.bias + 1]],
        [node],
        {**node.attributes, FUNCTION: ir.AttrInt64(FUNCTION, 0)},
        Anchor(node, beside=(FUNCTION, GATED)),
        tensors=FLOATS,
    )


def _joined(call: Call, functions: dict[ir.Value, _Function]) -> Call:
    """Return the call of a product with the bias and the function behind it."""
    end = call.body[-1].outputs[0]
    bias = bias_of_form(call.body[0])
    if bias is not None:
        add, value = bias
        call = replace(call, inputs=[*call.inputs, value], body=[*call.body, add])
        end = add.outputs[0]
    function = functions.get(end)
    if function is None:
        return call
    attributes = {**call.attributes, FUNCTION: ir.AttrInt64(FUNCTION, function.number)}
    return replace(call, body=[*call.body, *function.nodes], attributes=attributes)


def bias_of_form(product: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """Return the Add of a bias behind a product of `FORMS` that has no bias itself, and the bias; None without one."""
    form, weights, source = FORMS[product.op_type], constant(product.inputs[1]), product.inputs[0]
    if len(product.inputs) > form.bias or weights is None or source is None:
        return None
    rank = 0 if source.shape is None else len(source.shape)
    return bias_behind(product, weights, form.channels, max(rank, 1))


def _with_residual(call: Call, shapes: Mapping[str, Shape]) -> Call:
    """Return the call of a product with the sum of its result and another tensor, or their product, if that follows.

    Both have the same shape as far as it is known: a sum of a batch and one item is possible then, but slow.
    """
    end = call.body[-1].outputs[0]
    last = sole_reader(end)
    if last is None or last.op_type not in ("Add", "Mul") or len({*last.inputs}) != 2:
        return call
    (other,) = (each for each in last.inputs if each is not end)
    if other is None or constant(other) is not None:
        return call
    one, two = (shapes.get(str(value.name)) for value in (end, other))
    if one is None or two is None or len(one) != len(two) or not all(map(_may_be_equal, one, two)):
        return call
    inputs = [*call.inputs, *[None] * (len(call.names) - 1 - len(call.inputs)), other]
    gated = {GATED: ir.AttrInt64(GATED, 1)} if last.op_type == "Mul" else {}
    return replace(call, inputs=inputs, body=[*call.body, last], attributes={**call.attributes, **gated})


def _may_be_equal(one: int | str | None, other: int | str | None) -> bool:
    """Return whether two lengths are equal, as far as they are known."""
    return one == other or not ((isinstance(one, int) and isinstance(other, int)) or 1 in (one, other))

"""Spell functions that ONNX Runtime computes slowly in operators that it computes fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import (
    computing_graphs,
    constant,
    graph_of,
    is_standard,
    node_name,
    one_number,
    producer_of,
    sole_reader,
)
from .graphs.rewriter import add_initializer, insert_before, names, remove_unread, replace_by_earlier, unused_name
from .registry import Change, transform

BROADCASTS = 8  # the opset from which Max and Min broadcast
SATURATED = 20.0  # from here on a Mish is its input in float32


@dataclass(frozen=True, eq=False)
class _Writer:
    """Writes operators in front of a node.

    Attributes:
        node: The node.
        x: The tensor that it is a function of.
        rank: The number of axes of `x`; 0 if it is not known.
        taken: The names in use.
        in_body: Whether the node is in the body of a function, which has no initializers.
    """

    node: ir.Node
    x: ir.Value
    rank: int
    taken: set[str]
    in_body: bool

    def add(self, op: str, *inputs: ir.Value) -> ir.Value:
        """Write an operator; return its result."""
        return insert_before(self.node, self.taken, op, inputs, stem=f"{node_name(self.node)}/spelled")

    def number(self, number: float) -> ir.Value:
        """Return a constant, float32."""
        stem, array = f"{node_name(self.node)}/number", np.array(number, np.float32)
        if self.in_body:
            return insert_before(self.node, self.taken, "Constant", [], {"value": ir.tensor(array)}, stem=stem)
        return add_initializer(graph_of(self.node), unused_name(self.taken, stem), array)


@transform("spell_slow_functions", after=("fold_constants",))
def spell_slow_functions(model: ir.Model) -> Change:
    """Write functions for which ONNX Runtime has slow float kernels in operators with fast ones.

    Before:  y = Mish(x);  y = Mul(x, Tanh(Softplus(x)))
    After:   e = Exp(Min(x, 20));  n = e * (e + 2);  y = x * (n / (n + 2))

    Before:  y = Softplus(x)
    After:   e = Exp(-Abs(x));  u = e + 1;  y = Relu(x) + (Log(u) + (e - (u - 1)))

    Before:  y = Elu(x);  z = Celu(x), both with alpha a
    After:   y = Relu(x) + a * (Exp(Min(x, 0)) - 1);  z = Relu(x) + a * (Exp(Min(x, 0) / a) - 1)

    Before:  y = PRelu(x, s)
    After:   y = Max(x, s * x) where all slopes are constants of at most 1, but not 0, else Relu(x) + s * Min(x, 0)

    Before:  y = Pow(x, p),  p is one of -2, -1, -0.5, 0.25, 0.5, 1.5, 4
    After:   r * r, r = Reciprocal(x);  Reciprocal(x);  Reciprocal(Abs(Sqrt(x)));  Sqrt(Sqrt(x));  Sqrt(x);
             x * Sqrt(x);  s * s, s = x * x

    Results differ by rounding; what is behind the logarithm is the rounding error of u. A root of -infinity is NaN, as
    it is of other negative numbers; Pow returns a number. On one core the functions of the first two rows take a tenth
    to a third of the time, PRelu a ninth, powers a tenth, Elu and Celu two thirds. `requant quantize` runs this last:
    native operators are found by the single operators.
    Left alone: other types than float32 (``not-float32``); opsets below 8 (``old-opset``); other powers; an alpha of a
        Celu that is not above 0; the Tanh or Softplus of a Mish with other readers (the Softplus alone is written).
    """
    change = Change()
    found = _candidates(node for graph in computing_graphs(model) for node in graph)
    if not found:
        return change
    known, taken = Known(model), names(model)
    facts = [(node, known.dtype(node.inputs[0]), known.rank(node.inputs[0]) or 0) for node in found]
    for node, dtype, rank in facts:  # what one function reads, another one may have computed
        if model.opset_imports.get("", 0) < BROADCASTS:
            change.skip("old-opset")
        elif dtype is not ir.DataType.FLOAT:
            change.skip("not-float32")
        elif _spelled(node, rank, taken, in_body=False):
            change.applied += 1
    return change


def spell_body(graph: ir.Graph) -> None:
    """Do the same as `spell_slow_functions` in the body of a function whose tensors are float32, in place."""
    taken = {str(value.name) for node in graph for value in node.outputs}
    taken.update(str(value.name) for value in graph.inputs)
    for node in _candidates(graph):
        _spelled(node, 0, taken, in_body=True)


def _candidates(nodes: Iterable[ir.Node]) -> list[ir.Node]:
    """Return the nodes that may be slow functions; products come first: a Mish of three operators has a Softplus."""
    found = list(nodes)
    products = [node for node in found if is_standard(node, "Mul") and _mish_of(node) is not None]
    inner = {producer for node in products for producer in _inner(node)}
    return [*products, *(node for node in found if _has_row(node) and node not in inner)]


def _has_row(node: ir.Node) -> bool:
    """Whether a node is one of the functions, as far as its operator and an exponent tell."""
    if is_standard(node, "Pow"):
        return one_number(node.inputs[1], None) in POWERS
    return is_standard(node, *FUNCTIONS)


def _mish_of(mul: ir.Node) -> ir.Value | None:
    """Return x if a node is ``x * Tanh(Softplus(x))`` and nothing else reads what is between; else None."""
    for x, factor in (mul.inputs, mul.inputs[::-1]):
        tanh = producer_of(factor)
        softplus = producer_of(tanh.inputs[0]) if is_standard(tanh, "Tanh") else None
        if tanh is None or not is_standard(softplus, "Softplus") or softplus.inputs[0] is not x:
            continue
        if sole_reader(tanh.outputs[0]) is mul and sole_reader(softplus.outputs[0]) is tanh:
            return x
    return None


def _inner(mul: ir.Node) -> list[ir.Node]:
    """Return the Tanh and the Softplus of a Mish of three operators."""
    tanh = next(producer_of(value) for value in mul.inputs if value is not _mish_of(mul))
    softplus = None if tanh is None else producer_of(tanh.inputs[0])
    return [node for node in (tanh, softplus) if node is not None]


def _input(node: ir.Node) -> ir.Value:
    """Return the tensor that a node is a function of."""
    x = _mish_of(node) if node.op_type == "Mul" else node.inputs[0]
    assert x is not None
    return x


def _spelled(node: ir.Node, rank: int, taken: set[str], *, in_body: bool) -> bool:
    """Replace a function; return whether it has a row and a fast form."""
    inner = _inner(node) if node.op_type == "Mul" else []
    write = _mish if inner else FUNCTIONS[node.op_type]
    result = write(_Writer(node, _input(node), rank, taken, in_body))
    if result is None:
        return False
    name, last = node.name, result.producer()
    replace_by_earlier(node, result)
    if last is not None:
        last.name = name
    remove_unread(inner)
    return True


def _mish(writer: _Writer) -> ir.Value:
    """Write a Mish."""
    add, x, two = writer.add, writer.x, writer.number(2.0)
    power = add("Exp", add("Min", x, writer.number(SATURATED)))
    part = add("Mul", power, add("Add", power, two))
    return add("Mul", x, add("Div", part, add("Add", part, two)))


def _softplus(writer: _Writer) -> ir.Value:
    """Write a Softplus. The logarithm of a rounded sum misses the rounding error, which for little values is all."""
    add, x, one = writer.add, writer.x, writer.number(1.0)
    power = add("Exp", add("Neg", add("Abs", x)))
    total = add("Add", power, one)
    missed = add("Sub", power, add("Sub", total, one))
    return add("Add", add("Relu", x), add("Add", add("Log", total), missed))


def _elu(writer: _Writer) -> ir.Value | None:
    """Write an Elu or a Celu; None for a Celu that is not defined."""
    add, x, alpha = writer.add, writer.x, writer.node.attributes.get_float("alpha", 1.0)
    divided = writer.node.op_type == "Celu"
    if divided and not alpha > 0:
        return None
    factor = None if alpha == 1 else writer.number(alpha)
    below = add("Min", x, writer.number(0.0))
    if divided and factor is not None:
        below = add("Div", below, factor)
    below = add("Sub", add("Exp", below), writer.number(1.0))
    return add("Add", add("Relu", x), below if factor is None else add("Mul", below, factor))


def _prelu(writer: _Writer) -> ir.Value | None:
    """Write a PRelu."""
    add, x, slopes = writer.add, writer.x, writer.node.inputs[1]
    tensor = constant(slopes)
    if slopes is None:
        return None
    if tensor is not None and bool(np.all((tensor.numpy() != 0) & (tensor.numpy() <= 1))):  # 0 * infinity is NaN
        return add("Max", x, add("Mul", x, slopes))
    return add("Add", add("Relu", x), add("Mul", add("Min", x, writer.number(0.0)), slopes))


def _pow(writer: _Writer) -> ir.Value | None:
    """Write a power; None for one that is not in `POWERS`."""
    exponent = one_number(writer.node.inputs[1], writer.rank)
    write = None if exponent is None else POWERS.get(exponent)
    return None if write is None else write(writer, writer.x)


def _squared(writer: _Writer, x: ir.Value) -> ir.Value:
    """Write x * x."""
    return writer.add("Mul", x, x)


POWERS: Mapping[float, Callable[[_Writer, ir.Value], ir.Value]] = {
    -2.0: lambda writer, x: _squared(writer, writer.add("Reciprocal", x)),
    -1.0: lambda writer, x: writer.add("Reciprocal", x),
    # the root of -0 is -0, and its power infinity
    -0.5: lambda writer, x: writer.add("Reciprocal", writer.add("Abs", writer.add("Sqrt", x))),
    0.25: lambda writer, x: writer.add("Sqrt", writer.add("Sqrt", x)),
    0.5: lambda writer, x: writer.add("Sqrt", x),
    1.5: lambda writer, x: writer.add("Mul", x, writer.add("Sqrt", x)),
    4.0: lambda writer, x: _squared(writer, _squared(writer, x)),
}
"""By exponent, what writes the power."""
FUNCTIONS: Mapping[str, Callable[[_Writer], ir.Value | None]] = {
    "Celu": _elu,
    "Elu": _elu,
    "Mish": _mish,
    "PRelu": _prelu,
    "Pow": _pow,
    "Softplus": _softplus,
}
"""By operator, what writes the function; it returns the result, or None for a form that has none."""

"""Spell functions that ONNX Runtime computes slowly in operators that it computes fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.opsets import AXES_ARE_INPUT, REDUCED_AXES_ARE_INPUT
from .graphs.queries import (
    computing_graphs,
    constant,
    graph_of,
    is_standard,
    node_name,
    one_number,
    plain_shape,
    producer_of,
    sole_reader,
)
from .graphs.rewriter import add_initializer, insert_before, names, remove_unread, replace_by_earlier, unused_name
from .registry import Change, transform

BROADCASTS = 8  # the opset from which Max and Min broadcast
SATURATED = 20.0  # from here on a Mish is its input in float32
FEW = 512
"""The least number of values of a Softmax: of fewer, several operators take as long."""
FEW_BEHIND = 64
"""The least number of values behind the axis of a Softmax in several operators: with fewer, reductions are slow."""
UNKNOWN = 32  # what an axis of unknown length counts for, without the batch


@dataclass(frozen=True, eq=False)
class _Writer:
    """Writes operators in front of a node.

    Attributes:
        node: The node.
        x: The tensor that it is a function of.
        lengths: The lengths of the axes of `x`, None for an unknown one; empty if the rank is not known.
        opset: The opset of the graph.
        taken: The names in use.
        in_body: Whether the node is in the body of a function, which has no initializers.
    """

    node: ir.Node
    x: ir.Value
    lengths: Sequence[int | None]
    opset: int
    taken: set[str]
    in_body: bool

    def add(self, op: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        """Write an operator; return its result."""
        return insert_before(self.node, self.taken, op, inputs, attributes, stem=f"{node_name(self.node)}/spelled")

    def number(self, number: float) -> ir.Value:
        """Return a constant, float32."""
        return self._constant(np.array(number, np.float32))

    def index(self, index: int) -> ir.Value:
        """Return a constant, int64, shape (1,)."""
        return self._constant(np.array([index], np.int64))

    def _constant(self, array: np.ndarray) -> ir.Value:
        """Return a constant."""
        stem = f"{node_name(self.node)}/number"
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

    Before:  y = Softmax(x), over an axis of length 2
    After:   d = Slice(x)[1] - Slice(x)[0];  y = Reciprocal(Exp(Concat(d, -d)) + 1)

    Before:  y = Softmax(x), over an axis that is not the last one, as that of the channels
    After:   e = Exp(x - ReduceMax(x));  y = e / ReduceSum(e)

    Results differ by rounding; what is behind the logarithm is the rounding error of u. A root of -infinity is NaN, as
    it is of other negative numbers; Pow returns a number. On one core the functions of the first two rows take a tenth
    to a third of the time, PRelu a ninth, powers a tenth, Elu and Celu two thirds, a Softmax of two a fifteenth to
    four fifths, one over channels a seventh to four fifths. `requant quantize` runs this last: native operators are
    found by the single operators.
    Left alone: other types than float32 (``not-float32``); opsets below 8 (``old-opset``); other powers; an alpha of a
        Celu that is not above 0; the Tanh or Softplus of a Mish with other readers (the Softplus alone is written); a
        Softmax below opset 13, of unknown rank, of fewer than 512 values, or, over more than two values, with fewer
        than 64 values behind its axis.
    """
    change = Change()
    found = _candidates(node for graph in computing_graphs(model) for node in graph)
    if not found:
        return change
    known, taken = Known(model), names(model)
    opset = model.opset_imports.get("", 0)
    facts = [(node, known.dtype(node.inputs[0]), known.lengths(node.inputs[0]) or ()) for node in found]
    for node, dtype, lengths in facts:  # what one function reads, another one may have computed
        if opset < BROADCASTS:
            change.skip("old-opset")
        elif dtype is not ir.DataType.FLOAT:
            change.skip("not-float32")
        elif _spelled(_Writer(node, _input(node), lengths, opset, taken, in_body=False)):
            change.applied += 1
    return change


def spell_body(graph: ir.Graph) -> None:
    """Do the same as `spell_slow_functions` in the body of a function whose tensors are float32, in place."""
    taken = {str(value.name) for node in graph for value in node.outputs}
    taken.update(str(value.name) for value in graph.inputs)
    opset = graph.opset_imports.get("", 0)
    for node in _candidates(graph):
        _spelled(_Writer(node, _input(node), (), opset, taken, in_body=True))


def _candidates(nodes: Iterable[ir.Node]) -> list[ir.Node]:
    """Return the nodes that may be slow functions; products come first: a Mish of three operators has a Softplus."""
    found = list(nodes)
    products = [node for node in found if is_standard(node, "Mul") and _mish_of(node) is not None]
    inner = {producer for node in products for producer in _inner(node)}
    return [*products, *(node for node in found if _has_row(node) and node not in inner)]


def _has_row(node: ir.Node) -> bool:
    """Whether a node is one of the functions, as far as its operator, an exponent and a stored shape tell."""
    if is_standard(node, "Pow"):
        return one_number(node.inputs[1], None) in POWERS
    if is_standard(node, "Softmax"):
        return not _is_of_rows(node)
    return is_standard(node, *FUNCTIONS)


def _is_of_rows(softmax: ir.Node) -> bool:
    """Whether the stored shape tells that a Softmax is one over the last axis, of no known length or not of 2."""
    shape, axis = plain_shape(softmax.inputs[0]) or (2,), softmax.attributes.get_int("axis", -1)
    return axis in (-1, len(shape) - 1) and shape[-1] != 2


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


def _spelled(writer: _Writer) -> bool:
    """Replace a function; return whether it has a row and a fast form.

    The last operator gets the name of the function. In place of a Softmax it is the first one: comparisons find the
    logits as what the operator of this name reads.
    """
    node, x = writer.node, writer.x
    inner = _inner(node) if node.op_type == "Mul" else []
    write = _mish if inner else FUNCTIONS[node.op_type]
    readers = set(x.consumers())
    result = write(writer)
    if result is None:
        return False
    first, last = (reader for reader in x.consumers() if reader not in readers), result.producer()
    named, name = next(first) if node.op_type == "Softmax" else last, node.name
    replace_by_earlier(node, result)
    if named is not None:
        named.name = name
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
    exponent = one_number(writer.node.inputs[1], len(writer.lengths))
    write = None if exponent is None else POWERS.get(exponent)
    return None if write is None else write(writer, writer.x)


def _softmax(writer: _Writer) -> ir.Value | None:
    """Write a Softmax; None for one that the runtime computes as fast."""
    lengths = writer.lengths
    if writer.opset < AXES_ARE_INPUT or not lengths:
        return None
    axis = writer.node.attributes.get_int("axis", -1) % len(lengths)
    first, *others = lengths
    counts = [first or 1, *(UNKNOWN if length is None else length for length in others)]
    if prod(counts) < FEW:
        return None
    if lengths[axis] == 2:
        return _softmax_of_two(writer, axis)
    return _softmax_over(writer, axis) if prod(counts[axis + 1 :]) >= FEW_BEHIND else None


def _softmax_of_two(writer: _Writer, axis: int) -> ir.Value:
    """Write a Softmax over an axis of length 2. A Sigmoid of the runtime would lose the digits of small results."""
    add, x, along = writer.add, writer.x, writer.index(axis)
    bounds = [writer.index(bound) for bound in range(3)]
    one, two = (add("Slice", x, begin, end, along) for begin, end in pairwise(bounds))
    difference = add("Sub", two, one)
    power = add("Exp", add("Concat", difference, add("Neg", difference), axis=axis))
    return add("Reciprocal", add("Add", power, writer.number(1.0)))


def _softmax_over(writer: _Writer, axis: int) -> ir.Value:
    """Write a Softmax over an axis that is not the last one."""
    add, x, along = writer.add, writer.x, writer.index(axis)
    most = add("ReduceMax", x, along) if writer.opset >= REDUCED_AXES_ARE_INPUT else add("ReduceMax", x, axes=[axis])
    power = add("Exp", add("Sub", x, most))
    return add("Div", power, add("ReduceSum", power, along))


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
    "Softmax": _softmax,
    "Softplus": _softplus,
}
"""By operator, what writes the function; it returns the result, or None for a form that has none."""

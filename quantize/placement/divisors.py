"""Find the tensors by which float operators divide: a small one that uint8 rounds to 0 gives an infinite result."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ...transforms.graphs.queries import constant
from ...transforms.int8.ops import only_moves, row_of
from ...transforms.patterns.elementwise import ELEMENTWISE, bounds_of

NOT_AT_ZERO = {"Div": 1, "Log": 0, "Reciprocal": 0}
"""By operator that is infinite where an input is 0, the index of this input; a Pow with a negative exponent is one."""
ZERO_AT_ZERO = ELEMENTWISE - {"Exp", "HardSigmoid", "Log", "Sigmoid", "Softplus"} | {"Concat", "PRelu", "Where"}
"""Operators whose result may be 0, or a small constant, where an input is 0; those that move values are not here."""
SMALL = 1e-3
"""A smaller constant does not protect a divisor: a value above it that is rounded to 0 gives a far too large result."""


def divisors_of(nodes: Iterable[ir.Node]) -> frozenset[str]:
    """Return the tensors by which nodes divide, and the tensors before them: where one of these is 0, the divisor is 0.

    Before:  n = ReduceL2(x); c = Clip(n, min=1e-12); e = Expand(c, s); y = Div(x, e)
    Returned:  n, c, e
    """
    waiting = [value for node in nodes if (value := _divisor(node)) is not None]
    found: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        if value not in found and constant(value) is None:
            found.add(value)
            waiting += _sources(value.producer())
    return frozenset(str(value.name) for value in found)


def _divisor(node: ir.Node) -> ir.Value | None:
    """Return the input of a node that must not be 0; None if there is none."""
    if node.domain:
        return None
    if node.op_type == "Pow":
        exponent = constant(node.inputs[1])
        return node.inputs[0] if exponent is not None and (exponent.numpy() < 0).any() else None
    index = NOT_AT_ZERO.get(node.op_type)
    return None if index is None else node.inputs[index]


def _sources(node: ir.Node | None) -> list[ir.Value]:
    """Return the inputs of a node whose zeros make its result 0, or as small as a constant."""
    if node is None or node.domain:
        return []
    row = row_of(node)
    if row is not None and row.kind == "same" and only_moves(node):
        return [value for value in node.inputs[:1] if value is not None]
    if node.op_type not in ZERO_AT_ZERO or _is_far_from_zero(node):
        return []
    return [value for value in node.inputs if value is not None]


def _is_far_from_zero(node: ir.Node) -> bool:
    """Whether the result of a node is far from 0 although an input is 0, because of a constant or of another input."""
    if node.op_type in ("Clip", "Relu"):
        low, _ = bounds_of(node) or (0.0, 0.0)
        return low >= SMALL
    if node.op_type not in ("Add", "Max", "Sub"):
        return False
    tensors = [tensor for value in node.inputs if (tensor := constant(value)) is not None]
    if not tensors:
        return node.op_type != "Max"
    return any(bool((abs(tensor.numpy()) >= SMALL).all()) for tensor in tensors)

"""Find logarithms of sums that are far from 0: ``Log(x + c)``, where no value of x is below 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

import onnx_ir as ir

from ..graphs.queries import constant, is_standard, one_number, producer_of, sole_reader
from .lower_bounds import lower_bound


@dataclass(frozen=True, eq=False)
class Logarithm:
    """A logarithm of a sum.

    Attributes:
        x: The tensor that it is a function of.
        nodes: The operators, in order; the last one is the Log.
        least: How far the argument of the Log is from 0 where x is 0; infinity if x has an Exp behind it, because the
            slope of ``Log(Exp(x) + c)`` is below 1.
    """

    x: ir.Value
    nodes: Sequence[ir.Node]
    least: float


def find_logarithm(log: ir.Node) -> Logarithm | None:
    """Return the logarithm of a sum that ends with a Log; None if it is something else.

    ``Log(Relu(x) + 1)``, as SPLADE weighs terms, is a function of the result of the Relu with a slope of at most 1, and
    ``Log(Exp(x) + 1)`` a Softplus. Nothing else reads the tensors between the operators.
    """
    add = producer_of(log.inputs[0]) if is_standard(log, "Log") else None
    if not is_standard(add, "Add") or sole_reader(add.outputs[0]) is not log:
        return None
    for value, other in (add.inputs, add.inputs[::-1]):
        number = one_number(other, None)
        if value is None or constant(value) is not None or number is None or not (isfinite(number) and number > 0):
            continue
        power = producer_of(value)
        if is_standard(power, "Exp") and power.inputs[0] is not None and sole_reader(value) is add:
            return Logarithm(power.inputs[0], (power, add, log), inf)
        if lower_bound(value) >= 0:
            return Logarithm(value, (add, log), number)
    return None

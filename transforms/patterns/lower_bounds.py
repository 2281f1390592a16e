"""The least value that a tensor can have, by the operators that compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

import onnx_ir as ir

from ..graphs.queries import constant, producer_of
from .elementwise import bounds_of

DEEPEST = 16  # operators in a row; nothing is known behind more of them
NOT_NEGATIVE = frozenset(
    "Abs Exp HardSigmoid ReduceL1 ReduceL2 ReduceSumSquare Relu Sigmoid Softmax Softplus Sqrt".split()
)
KEEPS = frozenset(
    "Flatten GlobalMaxPool Identity MaxPool ReduceMax ReduceMin Reshape Slice Squeeze Transpose Unsqueeze".split()
)
"""Operators whose results are values of their first input."""
MEANS = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum"})
"""Operators whose results are at least 0 if no value of their first input is below."""


def lower_bound(value: ir.Value | None, deepest: int = DEEPEST) -> float:
    """Return a number that no value of a tensor is below, whatever the model reads; -infinity if none is known.

    NaN counts for nothing. The bound is exact in real numbers: a sum in float32 may be below by its rounding.

    Args:
        value: A tensor.
        deepest: How many operators in a row to look at.
    """
    tensor = constant(value)
    if tensor is not None:
        return float(tensor.numpy().min()) if tensor.size and tensor.dtype.is_floating_point() else -inf
    node = producer_of(value)
    if node is None or node.domain or deepest == 0 or value is not node.outputs[0]:
        return -inf
    if node.op_type == "Clip":
        low, high = bounds_of(node) or (-inf, inf)
        return min(max(low, lower_bound(node.inputs[0], deepest - 1)), high)
    if node.op_type in NOT_NEGATIVE:
        return 0.0
    found = [lower_bound(each, deepest - 1) for each in node.inputs]
    if node.op_type in KEEPS:
        return found[0]
    if node.op_type in MEANS:
        return 0.0 if found[0] >= 0 else -inf
    rule = RULES.get(node.op_type)
    return rule(found) if rule is not None else -inf


def _product(bounds: list[float]) -> float:
    """Return the bound of a product of factors that are not negative."""
    return bounds[0] * bounds[1] if min(bounds) >= 0 and max(bounds) < inf else -inf


RULES: Mapping[str, Callable[[list[float]], float]] = {
    "Add": sum,
    "Concat": min,
    "Max": max,
    "Min": min,
    "Mul": _product,
    "Sum": sum,
}
"""By operator, the bound of the result from those of all inputs."""

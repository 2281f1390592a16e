"""Why a unit cannot compute on uint8 with static scales: its kernel, its tensors, their ranges, and its own form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from ...transforms.graphs.queries import is_float32, made_by
from ...transforms.int8.ops import FUNCTION, OPS, Kernel, Op
from ...transforms.int8.plan import Unit
from ...transforms.int8.reasons import ALREADY, NONE, Reason
from ...transforms.int8.units import activations
from ..options.declared import Strategy
from ..runtime.kernels import uint8_kernels
from . import reasons as why
from .facts import FIRST_INTEGER_OPSET, Facts
from .operator_obstacles import compute_obstacle, few_products, follower_obstacle

Rule: TypeAlias = Callable[[Unit, Facts, Strategy], Reason]
"""Returns why a unit cannot have a form under the strategy of the user; `NONE` if it can."""


def static_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot or should not compute from uint8 to uint8, regardless of its neighbours."""
    row = OPS[unit.op]
    either = float_kernel(row, facts) is not None and strategy is not Strategy.STATIC  # it may write float in the end
    touched = unit.inputs if either else (*unit.inputs, *unit.outputs)
    return u8_obstacle(unit, facts, strategy, row.u8, touched)


def float_kernel(row: Op, facts: Facts) -> Kernel | None:
    """Return the kernel that reads uint8 and writes float; in other runtimes every product may write float."""
    own = row.u8 if facts.portable and row.kind == "compute" else None
    return own or row.u8_float


def u8_obstacle(unit: Unit, facts: Facts, strategy: Strategy, kernel: Kernel | None, touched: Iterable[str]) -> Reason:
    """Return why `unit` cannot run on a kernel that reads uint8; `touched` are the tensors that are uint8 then."""
    if kernel is None:
        return why.NO_FORM
    if kernel not in uint8_kernels():
        return why.NOT_INSTALLED.about(kernel[1])
    return tensor_obstacle(unit, facts, touched) or form_obstacle(unit, facts, strategy)


def tensor_obstacle(unit: Unit, facts: Facts, touched: Iterable[str]) -> Reason:
    """Return why tensors that `unit` reads and writes cannot be uint8; `touched` are those that are uint8 then."""
    if any(not is_float32(facts.values.get(name)) for name in (*unit.inputs, *unit.outputs)):
        return why.NOT_FLOAT32
    kept = next((facts.kept_float[tensor] for tensor in touched if tensor in facts.kept_float), "")
    if kept:
        return why.KEPT_FLOAT.about(kept)
    # what a float operator writes is rounded for integer readers alone, except inside a function of several operators
    rounded = {*unit.inputs, *unit.outputs} if unit.op == FUNCTION else {*unit.outputs}
    return why.DIVISOR if facts.divisors & rounded.intersection(touched) else _range_obstacle(unit, facts)


def _range_obstacle(unit: Unit, facts: Facts) -> Reason:
    """Return why `unit` cannot have static scales, or only useless ones."""
    if OPS[unit.op].kind == "compute" and reads_zeros(unit, facts):
        return why.ZERO_INPUT
    if facts.opset < FIRST_INTEGER_OPSET:
        return why.OLD_OPSET.about(facts.opset)
    return NONE if facts.static else why.NO_RANGES


def reads_zeros(unit: Unit, facts: Facts) -> bool:
    """Whether the first input of a unit is zero in all the data."""
    return facts.ranges.get(unit.inputs[0], (-1.0, 1.0)) == (0.0, 0.0)


def form_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why the attributes and constants of an operator keep it from computing on uint8."""
    node, row = facts.nodes[unit.nodes[0]], OPS[unit.op]
    if row.kind != "compute":
        return follower_obstacle(node, row, facts)
    if unit.op == "MatMul" and len(activations(node)) > 1:
        if made_by(node.inputs[1], "DequantizeLinear"):
            return ALREADY
        return NONE if strategy is not Strategy.AUTO or facts.allow_slow else why.BOTH_ACTIVATIONS
    return compute_obstacle(node, row) or (NONE if facts.allow_slow or facts.portable else few_products(node))

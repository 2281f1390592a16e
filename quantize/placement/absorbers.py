"""Units that a native convolution absorbs: it computes both, and does not round between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ...transforms.graphs.queries import constant
from ...transforms.int8.plan import Impl, Plan, Unit
from .facts import Facts
from .native_obstacles import FUNCTIONS

SUM, CONVOLUTION = "Add", "Conv"


def absorbers_of(facts: Facts, plan: Plan, forms: Mapping[str, tuple[Impl, ...]]) -> dict[str, Unit]:
    """Return the convolution that may absorb a function or a sum, by the name of the function or sum.

    A convolution absorbs a unit that alone reads its result, if both have a native form. If two convolutions may absorb
    a sum, the later one does. A convolution with one input channel per group absorbs no sum. The result is empty if
    native operators must compute exactly what the QDQ pairs compute.

    Args:
        facts: The input of the rules.
        plan: The units in order.
        forms: The possible implementations by unit.
    """
    if facts.exact:
        return {}
    native = [unit for unit in plan.units if Impl.U8_NATIVE in forms[unit.name]]
    readers = Counter(tensor for unit in plan.units for tensor in {*unit.inputs})
    before: dict[str, tuple[int, Unit]] = {}  # place and convolution, by the tensor that a single unit reads
    absorbers: dict[str, Unit] = {}
    for place, unit in enumerate(native):
        if unit.op == CONVOLUTION and readers[unit.outputs[0]] == 1:
            before[unit.outputs[0]] = place, unit
        if unit.op not in FUNCTIONS and unit.op != SUM:
            continue
        found = [before[tensor] for tensor in unit.inputs if tensor in before]
        fit = [each for each in found if unit.op != SUM or not _has_one_input_per_group(facts, each[1])]
        if fit:
            absorbers[unit.name] = max(fit)[1]
    return absorbers


def unrounded(plan: Plan, absorbers: Mapping[str, Unit]) -> set[str]:
    """Return the tensors that a plan does not round: those between a native convolution and an absorbed unit."""
    native = {unit.name for unit in plan.units if plan.impl(unit) is Impl.U8_NATIVE}
    return {first.outputs[0] for name, first in absorbers.items() if {name, first.name} <= native}


def _has_one_input_per_group(facts: Facts, unit: Unit) -> bool:
    """Return whether each group of a convolution reads one channel; it may compute several."""
    node = facts.nodes[unit.nodes[0]]
    weights = constant(node.inputs[1])
    return node.attributes.get_int("group", 1) > 1 and weights is not None and weights.shape[1] == 1

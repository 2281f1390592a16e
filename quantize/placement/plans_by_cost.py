"""The plans with the least costs, for one batch size or for several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...transforms.int8.ops import OPS
from ...transforms.int8.plan import Choice, Impl, Plan, Unit
from ...transforms.int8.reasons import Reason
from .estimates import estimate
from .min_cut import Item, Problem, cheapest, weighted_sum
from .pricing import (
    OTHER_FORMS,
    Prices,
    conversions_around,
    dequantize_cost,
    float_time,
    measured,
    measured_int8,
    noise_around,
    noise_cost,
    quantize_cost,
    unit_cost,
)
from .reasons import (
    ABSORBED,
    CONVERSIONS_COST_MORE,
    FLOAT_ABSORBED,
    FLOAT_FASTER,
    NEIGHBOURS_COST_MORE,
    NOISE_AROUND_COSTS_MORE,
    NOISE_COSTS_MORE,
    NOTHING_COMPUTES,
    TOO_NOISY,
)

AS_LONG = 1.25  # a native operator between native operators may take so many times as long as the runtime's kernel
LEAST_US = 1e-3  # the least time of a float model by its costs, as a divisor


def is_same(one: Plan, other: Plan) -> bool:
    """Return whether two plans of the same units have the same implementations."""
    return all(one.impl(unit) is other.impl(unit) for unit in one.units)


def cheapest_plan(prices: Prices) -> Plan:
    """Return the plan with the least cost."""
    return common_plan([prices])


def common_plan(every: Sequence[Prices], factor: float = 1.0) -> Plan:
    """Return the plan with the least sum of costs over batch sizes, each as a share of the float model's time.

    Args:
        every: The costs at each batch size.
        factor: Multiplies the cost of conversions.
    """
    problems = [_problem(prices, factor) for prices in every]
    problem = problems[0]
    if len(every) > 1:
        problem = weighted_sum(problems, [float_time(every[0]) / max(float_time(prices), LEAST_US) for prices in every])
    chosen, space = cheapest(problem), every[0].space
    free = (unit for unit in space.rules.units if unit.name in space.keys)
    plan = space.rules.with_choices({unit.name: _choice(every, unit, chosen[unit.name], factor) for unit in free})
    return without_idle(_with_absorbers(every, plan))


def _problem(prices: Prices, factor: float) -> Problem:
    """Return the units and tensors with their costs."""
    space = prices.space
    units = space.rules.units
    tensors = {tensor for unit in units for tensor in (*unit.inputs, *unit.outputs)}
    stretch = factor * prices.stretch
    price, noises = prices.noise_price, prices.noises
    quantize = {t: stretch * quantize_cost(prices, t) + price * noises.of_tensor(t) for t in tensors}
    dequantize = {t: stretch * dequantize_cost(prices, t) + price * noises.of_dequantize(t) for t in tensors}
    # behind an integer kernel, a unit that float absorbs has a kernel of its own, about as slow as in integers
    for unit in units:
        if unit.name in prices.absorbed:
            alone = estimate(unit, space.facts.nodes, prices.sizes, Impl.FLOAT)
            dequantize[unit.inputs[0]] += max(alone, measured_int8(prices, unit.name) or 0.0)
    return Problem([_item(prices, unit) for unit in units], quantize, dequantize, space.outputs & tensors)


def _item(prices: Prices, unit: Unit) -> Item:
    """Return a unit with the cost of each of its implementations; 0 where there is no choice."""
    forms = prices.space.forms[unit.name]
    if len(forms) == 1:
        return Item(unit.name, unit.inputs, unit.outputs, {forms[0]: 0.0})
    known = _known_forms(prices, unit)
    costs = {form: unit_cost(prices, unit, form) + noise_cost(prices, unit, form) for form in known}
    return Item(unit.name, unit.inputs, unit.outputs, costs)


def _known_forms(prices: Prices, unit: Unit) -> list[Impl]:
    """Return the implementations of a unit that may be chosen: some only where measured, unless there is no other."""
    forms = prices.space.forms[unit.name]
    known = [form for form in forms if form not in OTHER_FORMS or measured(prices, unit.name, form) is not None]
    return known or [forms[0]]


def _choice(every: Sequence[Prices], unit: Unit, impl: Impl, factor: float) -> Choice:
    """Return the choice of an implementation for a unit that may have several; float with the reason."""
    if impl.int8:
        return Choice(impl)
    if every[0].space.rules.impl(unit) is Impl.WEIGHT:  # it takes as long as float, and the file is smaller
        return Choice(Impl.WEIGHT)
    return Choice(Impl.FLOAT, _why_float(every, unit, factor))


def _why_float(every: Sequence[Prices], unit: Unit, factor: float) -> Reason:
    """Return why a unit is float, with its costs at the batch size at which float saves most.

    Args:
        every: The costs at each batch size.
        unit: The unit.
        factor: Multiplies the cost of conversions, as in the plan.
    """
    rows = [_least_costs(each, unit) for each in every]
    (in_float, in_int8), prices = min(zip(rows, every, strict=True), key=lambda row: row[0][0] - row[0][1])
    if in_float == in_int8 == 0:
        return ABSORBED
    if in_float == 0 < in_int8:
        return FLOAT_ABSORBED.about(in_int8)
    if in_float <= in_int8:
        return FLOAT_FASTER.about(in_float, in_int8)
    return _what_outweighs(prices, unit, in_float - in_int8, factor * prices.stretch * conversions_around(prices, unit))


def _what_outweighs(prices: Prices, unit: Unit, gain: float, conversions: float) -> Reason:
    """Return what costs more than a unit gains by integers: noise, conversions, or its neighbours.

    Args:
        prices: The costs.
        unit: The unit.
        gain: How much less time the unit takes in integers, in microseconds.
        conversions: The cost of the conversions around it, in microseconds.
    """
    if noise_around(prices, unit) > gain or (prices.noise_price > 0 and conversions < gain):
        adds_none = unit.op in OPS and OPS[unit.op].kind == "same"
        return (NOISE_AROUND_COSTS_MORE if adds_none else NOISE_COSTS_MORE).about(gain)
    return CONVERSIONS_COST_MORE.about(gain, conversions) if conversions >= gain else NEIGHBOURS_COST_MORE.about(gain)


def _least_costs(prices: Prices, unit: Unit) -> tuple[float, float]:
    """Return the cost of a unit in float, and the least one in integers."""
    integers = [form for form in _known_forms(prices, unit) if form.int8] or prices.space.forms[unit.name][1:2]
    return unit_cost(prices, unit, Impl.FLOAT), min(unit_cost(prices, unit, form) for form in integers)


def tuned_plan(prices: Prices, plan: Plan) -> Plan | None:
    """Return a plan with the fastest kernel for each unit from uint8 to uint8; None if that changes nothing."""
    fastest = {unit.name: _fastest_u8_form(prices, unit) for unit in plan.units if plan.impl(unit) is Impl.U8}
    faster = {name: Choice(form) for name, form in fastest.items() if form is not Impl.U8}
    return _with_absorbers([prices], plan.with_choices(faster)) if faster else None


def _fastest_u8_form(prices: Prices, unit: Unit) -> Impl:
    """Return the fastest form of a unit from uint8 to uint8; a form other than `Impl.U8` only where it is measured."""
    costs = {Impl.U8: unit_cost(prices, unit, Impl.U8)}
    for form in OTHER_FORMS:
        if form.writes_u8 and form in prices.space.forms[unit.name]:
            cost = measured(prices, unit.name, form)
            costs |= {} if cost is None else {form: cost}
    return min(costs, key=costs.__getitem__)


def _with_absorbers(every: Sequence[Prices], plan: Plan) -> Plan:
    """Return a plan with native convolutions before native functions and sums, where that costs no more.

    All native convolutions get the fastest body.
    """
    choices = {}
    for unit in plan.units:
        first = every[0].space.absorbers.get(unit.name)
        if first is None or plan.impl(unit) is not Impl.U8_NATIVE or not plan.impl(first).writes_u8:
            continue
        native = math.fsum(unit_cost(each, both, Impl.U8_NATIVE) for each in every for both in (first, unit))
        stock = ((first, plan.impl(first)), (unit, Impl.U8))
        if native <= math.fsum(unit_cost(each, *one) for each in every for one in stock):
            choices[first.name] = Choice(Impl.U8_NATIVE)
    return _with_bodies(every, _with_native_neighbours(every, plan.with_choices(choices)))


def _with_native_neighbours(every: Sequence[Prices], plan: Plan) -> Plan:
    """Return a plan with native operators for the units between native operators, where both take about as long.

    Native operators have their channels last; a kernel of the runtime between two of them may need them in front, and
    this change of layout is not among the costs of units.
    """
    made = {tensor: unit for unit in plan.units for tensor in unit.outputs}
    readers: dict[str, list[Unit]] = {}
    for unit in plan.units:
        for tensor in unit.inputs:
            readers.setdefault(tensor, []).append(unit)
    choices = {}
    for unit in plan.units:
        if plan.impl(unit) is not Impl.U8 or Impl.U8_NATIVE not in every[0].space.forms[unit.name]:
            continue
        before = [made[tensor] for tensor in unit.inputs if tensor in made]
        after = [reader for tensor in unit.outputs for reader in readers.get(tensor, ())]
        if not before or not after or any(plan.impl(each) is not Impl.U8_NATIVE for each in (*before, *after)):
            continue
        stock, native = (sum(unit_cost(each, unit, form) for each in every) for form in (Impl.U8, Impl.U8_NATIVE))
        if native <= AS_LONG * stock:
            choices[unit.name] = Choice(Impl.U8_NATIVE)
    return plan.with_choices(choices)


def _with_bodies(every: Sequence[Prices], plan: Plan) -> Plan:
    """Return a plan whose native convolutions have the fastest body for a runtime without the library."""
    choices = {}
    for unit in plan.units:
        possible = plan.impl(unit) is Impl.U8_NATIVE and Impl.U8_GEMM in every[0].space.forms[unit.name]
        if not possible or any(measured(prices, unit.name, Impl.U8_GEMM) is None for prices in every):
            continue
        plain, product = (
            math.fsum(unit_cost(prices, unit, form) for prices in every) for form in (Impl.U8, Impl.U8_GEMM)
        )
        if product < plain:
            choices[unit.name] = Choice(Impl.U8_NATIVE, body=Impl.U8_GEMM)
    return plan.with_choices(choices)


def without_idle(plan: Plan) -> Plan:
    """Return a plan with every unit in float if no unit computes on uint8 and the int8 units would only move it."""
    if any(OPS[u.op].kind == "compute" and plan.impl(u).reads_u8 for u in plan.units if u.op in OPS):
        return plan
    return plan.with_choices(
        {u.name: Choice(Impl.FLOAT, NOTHING_COMPUTES) for u in plan.units if plan.impl(u).reads_u8}
    )


def without_noisy(plan: Plan, noise: Mapping[str, float], exchange: float) -> Plan:
    """Return a plan without the units whose tensors have more noise than ``1 / exchange`` times the mean of all."""
    known = [noise[tensor] for tensor in plan.quantized if tensor in noise]
    if not known or exchange <= 0:
        return plan
    limit = math.fsum(known) / len(known) / exchange
    noisy = {tensor for tensor in plan.quantized if noise.get(tensor, 0.0) > limit}
    changed = {
        unit.name: Choice(Impl.FLOAT, TOO_NOISY)
        for unit in plan.units
        if plan.impl(unit).reads_u8 and noisy.intersection((*unit.inputs, *unit.outputs))
    }
    return without_idle(plan.with_choices(changed))

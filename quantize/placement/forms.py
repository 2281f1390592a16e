"""The forms that a unit may have, and plans that give every unit a form of one kind: int8, native, stock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...transforms.int8.ops import ATTENTIONS, OPS, float_reason
from ...transforms.int8.plan import NATIVE_PRODUCTS, Choice, Impl, Plan, Unit
from ...transforms.int8.qparams import BlockForm
from ..options.declared import Strategy
from .facts import Facts
from .neighbours import with_float_results
from .obstacles import OBSTACLES
from .rules import decide, fixed_float

ALL_INT8 = (Impl.U8, Impl.U8_FLOAT, Impl.DYNAMIC, Impl.BLOCK, Impl.U8_NATIVE)
"""The forms of a plan with every unit in integers, the preferred ones first."""
FLOAT_FORMS = {
    Impl.DYNAMIC: Strategy.DYNAMIC,
    Impl.DYNAMIC_NATIVE: Strategy.DYNAMIC,
    Impl.BLOCK: Strategy.BLOCK,
    Impl.BLOCK_NATIVE: Strategy.BLOCK,
}
"""Forms of matrix products from float to float, with the strategies whose obstacles count."""
FORMS_WITHOUT_RANGES = frozenset({Impl.DYNAMIC, Impl.BLOCK, Impl.WEIGHT})
STATIC_FORMS = (Impl.U8, Impl.U8_FLOAT, Impl.U8_GEMM, Impl.U8_NATIVE)


def possible_forms(facts: Facts, plan: Plan) -> dict[str, tuple[Impl, ...]]:
    """Return the implementations of each unit among which costs may decide, by unit name.

    Most units can be float, or have any static integer form with no obstacle but slowness. A matrix product may also
    find its ranges at run time, or have weights in blocks. A unit that the user has fixed, or that is int8 for its
    size, has only the implementation in `plan`.
    """
    free = replace(facts, allow_slow=True)
    return {unit.name: _forms(unit, plan.impl(unit), free) for unit in plan.units}


def all_int8_plan(facts: Facts, plan: Plan) -> Plan:
    """Return a plan with every unit in integers that can be."""
    return with_float_results(plan_to_calibrate(facts, plan), facts)


def observed_plan(facts: Facts, plan: Plan, *, all_int8: bool, native: bool) -> Plan:
    """Return the plan whose ``quantized`` tensors are observed.

    Args:
        facts: The facts.
        plan: The plan by rules.
        all_int8: Whether a later placement may make each unit int8 that can be.
        native: Whether native operators are wanted.
    """
    if all_int8 and facts.static:
        return plan_to_calibrate(facts, plan)
    return native_plan(facts, plan) if native and facts.static else plan


def plan_to_calibrate(facts: Facts, plan: Plan) -> Plan:
    """Return a plan whose ``quantized`` tensors are all that any placement may quantize: these need ranges.

    A portable plan with every unit in integers has fewer, because its products write float where floats read them.
    """
    options = possible_forms(facts, plan)
    preferred = {name: next((form for form in ALL_INT8 if form in forms), None) for name, forms in options.items()}
    changed = {
        name: Choice(form)
        for name, form in preferred.items()
        if form is not None and len(options[name]) > 1 and plan.choices[name].impl is not Impl.U8
    }
    return plan.with_choices(changed)


def native_plan(facts: Facts, plan: Plan) -> Plan:
    """Return a plan with native operators wherever a unit has one for its form, or has no other form in integers."""
    options = possible_forms(facts, plan)
    natives = {unit.name: _native_form(unit, plan.impl(unit)) for unit in plan.units if not plan.impl(unit).native}
    return plan.with_choices({name: Choice(form) for name, form in natives.items() if form in options[name]})


def _native_form(unit: Unit, impl: Impl) -> Impl | None:
    """Return the form of the native operator for a unit that has a form; None without one."""
    row = OPS.get(unit.op)
    if impl in (Impl.FLOAT, Impl.WEIGHT) and row is not None and (row.native or row.native_u8):
        return Impl.DYNAMIC_NATIVE if row.native else Impl.U8_NATIVE
    return Impl.U8_NATIVE if impl.writes_u8 else NATIVE_PRODUCTS.get(impl)


def _is_only_native(unit: Unit) -> bool:
    """Whether only native operators compute a unit in integers: in any other runtime it computes in float."""
    return unit.op in ATTENTIONS or bool(OPS[unit.op].native_u8)


def native_products_plan(forms: Mapping[str, Sequence[Impl]], plan: Plan, *, every: bool = False) -> Plan:
    """Return a plan with a native form from float to float wherever a unit that writes float has one.

    Args:
        forms: The possible implementations by unit.
        plan: The plan.
        every: Whether units that write uint8 get such a form too.
    """
    natives = NATIVE_PRODUCTS.values()
    units = (unit.name for unit in plan.units if every or not plan.impl(unit).writes_u8)
    found = {name: next((form for form in natives if form in forms[name]), None) for name in units}
    return plan.with_choices({name: Choice(form) for name, form in found.items() if form is not None})


def stock_plan(plan: Plan) -> Plan:
    """Return a plan with the runtime's operators in place of native ones."""
    return plan.with_choices({unit.name: _stock_choice(plan, unit) for unit in plan.units if plan.impl(unit).native})


def _stock_choice(plan: Plan, unit: Unit) -> Choice:
    """Return how a unit with a native operator computes by the runtime's operators."""
    if _is_only_native(unit):
        return Choice(Impl.FLOAT, float_reason(unit.op))
    stock = {native: impl for impl, native in NATIVE_PRODUCTS.items()}
    return Choice(stock.get(plan.impl(unit), plan.choices[unit.name].body))


def _forms(unit: Unit, impl: Impl, free: Facts) -> tuple[Impl, ...]:
    """Return the implementations of one unit among which costs may decide.

    Args:
        unit: The unit.
        impl: Its implementation by rules.
        free: The facts, with slow forms allowed.
    """
    row = OPS.get(unit.op)
    strategy = None if row is None else free.selection.strategy_of(unit, row)
    if impl in NATIVE_PRODUCTS and strategy is FLOAT_FORMS[impl]:  # the user's form, by either operator
        native = NATIVE_PRODUCTS[impl]
        return (impl,) if OBSTACLES[native](unit, free, strategy) else (impl, native)
    fixed = impl in FORMS_WITHOUT_RANGES and row is not None and not (row.native or row.native_u8)
    if row is None or strategy is not Strategy.AUTO or fixed:
        return (impl,)
    # the strategy STATIC includes the obstacles of the unit's outputs
    only_native = row.native_u8 and not fixed_float(unit, free) and not free.finished  # the rules have no form for it
    static = STATIC_FORMS if only_native or decide(unit, free).impl.reads_u8 else ()
    forms = [form for form in static if not OBSTACLES[form](unit, free, Strategy.STATIC)]
    offered = row.native or (row.kind == "compute" and free.blocks == BlockForm())  # else the user asked for blocks
    if offered and not fixed_float(unit, free):
        forms += [form for form, asked in FLOAT_FORMS.items() if not OBSTACLES[form](unit, free, asked)]
    return (Impl.FLOAT, *forms) if forms else (impl,)

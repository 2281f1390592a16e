"""The plan by rules: one rule per operator decides. The emitters in `requant.transforms` write the plan.

A unit computes in integers if the operator table has an integer form for it, the installed runtime has the kernel, and
its inputs come in uint8 or are worth a QuantizeLinear. Operators that only move values, and operators that join
branches, follow their neighbours: they run on uint8 if their inputs come in uint8 and their outputs are read in uint8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from ...system.given import check_kind, or_default
from ...transforms.graphs.queries import axes_of, bodies, computing_graphs, plain_shape
from ...transforms.int8.ops import ATTENTIONS, GATE, GROUP_NORM, OPS, SLOPED, float_reason
from ...transforms.int8.plan import NATIVE_PRODUCTS, Choice, Impl, Plan, Unit
from ...transforms.int8.qparams import BlockForm, Scheme
from ...transforms.int8.reasons import FUSED_GROUP, NONE, UNFUSED_GROUP, Reason
from ...transforms.int8.units import Compound, units
from ...transforms.patterns.attention import OPERATORS, find_attention, missing_form
from ...transforms.patterns.group_norms import OPERATORS as NORMS
from ...transforms.patterns.group_norms import find_group_norm
from ...transforms.patterns.slopes import find_sloped
from ...transforms.pipelines.verify import check_model
from ..options.declared import Strategy
from ..options.selection import ORDERS, Selection
from ..runtime.kernels import uint8_kernels
from .facts import Facts, facts_of
from .native_obstacles import sloped_obstacle
from .obstacles import OBSTACLES
from .reasons import (
    ATTENTION_FORM,
    CACHE,
    EXCLUDED,
    FLOAT_INPUTS,
    FLOAT_READERS,
    FOREIGN,
    FUSED_ELSEWHERE,
    NO_FORM,
    OLD_SCAN,
    OPERAND_CONSTANT,
    WRITTEN,
)

INTEGER_EVERYWHERE = frozenset({"Add", "Concat", "AveragePool", "GlobalAveragePool"})
"""Operators that every runtime computes in integers, besides products and operators that move values."""
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


def choose(
    model: ir.Model,
    selection: Selection | None = None,
    *,
    static: bool = True,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    kept_float: Mapping[str, str] | None = None,
    types: Mapping[str, str] | None = None,
    activation: str = "u8",
) -> Plan:
    """Return the plan by rules of a simplified model.

    Args:
        model: A model whose nodes and tensors have names that are unique over the graph and its bodies.
        selection: The nodes and operators that the user allows in int8.
        static: Whether there are data for ranges; without them only weights and dynamic products become int8.
        ranges: Observed ranges. Without them the plan has every unit in int8 that might become int8, so that its
            ``quantized`` tensors are the ones to calibrate: ranges and `kept_float` only take units away.
        kept_float: Tensors that must stay float, with the reason.
        types: Operator types by node name in the user's own model; simplification may have changed some.
        activation: The integer type of activations, ``u8`` or ``s8``.

    Raises:
        RequantError: An argument is of another type, or external data of the model cannot be read.
    """
    check_model(model, "choose")
    selection = or_default(selection, Selection, "selection")
    for name, given in (("ranges", ranges), ("kept_float", kept_float), ("types", types)):
        if given is not None:
            check_kind(given, Mapping, f"{name} must be a mapping from names")
    check_kind(static, bool, "static must be True or False")
    Scheme(activation=activation)  # refuses another name
    facts = facts_of(model, selection, types, activation)
    return choose_by(replace(facts, static=static, ranges=ranges or {}, kept_float=kept_float or {}), model)


def choose_by(facts: Facts, model: ir.Model) -> Plan:
    """Return the plan by rules for given facts; see `choose`."""
    compounds = [*_attentions(model.graph, facts), *_group_norms(model.graph, facts), *_sloped(model.graph, facts)]
    found = tuple(_units(model.graph, facts, compounds))
    choices = {unit.name: _decide(unit, facts) for unit in found}
    _place_followers(found, choices)
    _drop_unread(found, choices, _captured(model), _fixed_u8(found, facts))
    results = frozenset(str(value.name) for value in model.graph.outputs) | _captured(model)
    return _with_float_results(Plan(found, choices, facts.portable, results), facts)


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
    return _with_float_results(plan_to_calibrate(facts, plan), facts)


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
    stock = {made: impl for impl, made in NATIVE_PRODUCTS.items()}
    native = [unit for unit in plan.units if plan.impl(unit).native]
    forms = {unit.name: stock.get(plan.impl(unit), plan.choices[unit.name].body) for unit in native}
    return plan.with_choices(
        {
            u.name: Choice(Impl.FLOAT, float_reason(u.op)) if _is_only_native(u) else Choice(forms[u.name])
            for u in native
        }
    )


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
    only_native = row.native_u8 and not _fixed_float(unit, free) and not free.finished  # the rules have no form for it
    static = STATIC_FORMS if only_native or _decide(unit, free).impl.reads_u8 else ()
    forms = [form for form in static if not OBSTACLES[form](unit, free, Strategy.STATIC)]
    offered = row.native or (row.kind == "compute" and free.blocks == BlockForm())  # else the user asked for blocks
    if offered and not _fixed_float(unit, free):
        forms += [form for form, asked in FLOAT_FORMS.items() if not OBSTACLES[form](unit, free, asked)]
    return (Impl.FLOAT, *forms) if forms else (impl,)


def _units(graph: ir.Graph, facts: Facts, compounds: Sequence[Compound] = ()) -> Iterator[Unit]:
    """Yield the units of a graph; units of a body come before the node that runs the body."""
    for unit in units(graph, compounds):
        for name in unit.nodes:
            for body in bodies(facts.nodes[name], facts.opset):
                yield from _units(body, facts)
        yield unit


def _group_norms(graph: ir.Graph, facts: Facts) -> list[Compound]:
    """Return the normalizations of images by groups of channels that native operators may compute."""
    norms = [node for node in graph if node.op_type in NORMS]
    if not norms or not facts.native or facts.exact or not _decides_all(facts):
        return []
    shapes = {name: plain_shape(value) or () for name, value in facts.values.items()}
    found = [find_group_norm(node, shapes) for node in norms]
    return [
        Compound(GROUP_NORM, nodes, nodes[0].inputs[:1])
        for nodes in found
        if nodes and not any(node.name in facts.selection.strategies for node in nodes)
    ]


def _sloped(graph: ir.Graph, facts: Facts) -> list[Compound]:
    """Return the PRelus of two parts that native operators may compute."""
    if not facts.native or not _decides_all(facts):
        return []
    found = [each for node in graph if (each := find_sloped(node)) is not None and not sloped_obstacle(each, facts)]
    return [
        Compound(SLOPED, each.nodes, [each.x])
        for each in found
        if not any(node.name in facts.selection.strategies for node in each.nodes)
    ]


def _decides_all(facts: Facts) -> bool:
    """Whether the user leaves it to the rules which operators form one unit."""
    chosen = facts.selection
    return chosen.strategy in (Strategy.AUTO, *FLOAT_FORMS.values()) and not chosen.include_ops


def _attentions(graph: ir.Graph, facts: Facts) -> list[Compound]:
    """Return the attentions that are units; none where the user decides over the forms of operators in them."""
    if not facts.attention or not _decides_all(facts):
        return []
    found: list[Compound] = []
    taken: set[ir.Node] = set()
    for node in graph:
        each = find_attention(node)
        if each is None or taken.intersection(each.nodes):  # two may share a product
            continue
        if not any(node.name in facts.selection.strategies for node in each.nodes):
            found.append(Compound.attention(each))
            taken.update(each.nodes)
    return found


def _decide(unit: Unit, facts: Facts) -> Choice:
    """Return how a unit computes; what requant has left in float in a model that it wrote stays float."""
    choice = _first_form(unit, facts)
    return Choice(Impl.FLOAT, WRITTEN) if facts.finished and choice.impl.int8 else choice


def _first_form(unit: Unit, facts: Facts) -> Choice:
    """Return the first implementation of the user's strategy that has no obstacle; else float with the reason."""
    fixed = _fixed_float(unit, facts)
    if fixed:
        return Choice(Impl.FLOAT, fixed)
    row = OPS[unit.op]
    strategy = facts.selection.strategy_of(unit, row)
    reasons = []
    for impl in ORDERS[strategy]:
        reason = OBSTACLES[impl](unit, facts, strategy)
        if not reason:
            return Choice(impl)
        reasons.append(reason)
    telling = next((reason for reason in reasons if reason is not NO_FORM), NONE)
    if row.kind != "float" and not row.native_u8:
        return Choice(Impl.FLOAT, telling or float_reason(unit.op))
    if strategy is Strategy.AUTO and row.native_u8:  # costs may give it this form, which `ORDERS` lacks
        native = OBSTACLES[Impl.U8_NATIVE](unit, facts, strategy)
        if native and native is not NO_FORM:
            return Choice(Impl.FLOAT, native)
    return Choice(Impl.FLOAT, Reason(row.why.code, f"{row.why}; {telling}") if telling else row.why)


def _fixed_float(unit: Unit, facts: Facts) -> Reason:
    """Return why a unit stays float in every form; `NONE` if the obstacles of its forms decide."""
    row, anchor = OPS.get(unit.op), facts.nodes[unit.nodes[0]]
    if not facts.caches.isdisjoint(unit.nodes):
        return CACHE
    if unit.op == "group":
        return FUSED_GROUP if all(_may_be_fused(facts.nodes[name], facts) for name in unit.nodes) else UNFUSED_GROUP
    if unit.op in OPERATORS and facts.attention and (missing := missing_form(anchor)):
        return ATTENTION_FORM.about(missing)
    if row is None:
        return FOREIGN.about(anchor.domain) if anchor.domain else float_reason(unit.op)
    refused = facts.selection.refuses(unit, facts.types)
    if refused:
        return EXCLUDED.about(refused)
    if unit.op == "Scan" and not bodies(anchor, facts.opset):
        return OLD_SCAN
    if row.kind == "float" and not (row.stores or row.dynamic or row.native or row.native_u8):
        return float_reason(unit.op)
    if facts.portable and row.kind == "arith" and unit.op not in INTEGER_EVERYWHERE:
        return FUSED_ELSEWHERE
    if row.kind == "compute" and not unit.inputs:
        return OPERAND_CONSTANT
    hard_swish = unit.op == GATE and anchor.op_type == "HardSigmoid"  # two kernels in float as well
    return row.slow if row.slow and not facts.allow_slow and not hard_swish else NONE


def _may_be_fused(node: ir.Node, facts: Facts) -> bool:
    """Whether the runtime may fuse a node of a group: a mean only over the last axis, or over others and this one."""
    if node.op_type != "ReduceMean" or node.inputs[0] is None:
        return True
    shape = plain_shape(facts.values.get(str(node.inputs[0].name)))
    axes = axes_of(node)
    return shape is None or not axes or any(axis % len(shape) == len(shape) - 1 for axis in axes)


def _place_followers(found: tuple[Unit, ...], choices: dict[str, Choice]) -> None:
    """Place each follower on uint8 if that saves conversions, else in float; `choices` changes in place.

    In uint8 a follower needs a QuantizeLinear for each input that no integer kernel writes or reads already. In float
    it needs a DequantizeLinear for each input that an integer kernel writes, and a QuantizeLinear of its output.
    Matrix products write float at the cost of uint8, so that adding or multiplying their results in uint8 saves
    nothing and costs a rounding: a transformer is faster and more accurate with only its products in integers.
    """
    computing = [u for u in found if choices[u.name].impl.reads_u8 and OPS[u.op].kind == "compute"]
    written = {t for u in computing if choices[u.name].impl is Impl.U8 for t in u.outputs}
    either = {t for u in computing if OPS[u.op].u8_float is not None for t in u.outputs}
    available = written | {t for u in computing for t in u.inputs}
    for unit in found:
        if not choices[unit.name].impl.reads_u8 or OPS[unit.op].kind == "compute":
            continue
        held = [t for t in unit.inputs if t in available and t not in either]
        missing = sum(t not in available for t in unit.inputs)
        if missing < 1 + sum(t in written for t in held) and (held or OPS[unit.op].kind == "same"):
            written.update(unit.outputs)
            available.update((*unit.inputs, *unit.outputs))
            if not held:
                either.update(unit.outputs)
        else:
            choices[unit.name] = Choice(Impl.FLOAT, FLOAT_INPUTS)


def _fixed_u8(found: tuple[Unit, ...], facts: Facts) -> set[str]:
    """Return the units that the user wants to write uint8."""
    return {u.name for u in found if u.op in OPS and facts.selection.strategy_of(u, OPS[u.op]) is Strategy.STATIC}


def _with_float_results(plan: Plan, facts: Facts) -> Plan:
    """Return a plan; if it is portable, products write float where no unit reads them in uint8.

    Other runtimes need no pair behind them, and compute the float operators behind a product in its kernel.
    """
    if not facts.portable:
        return plan
    read = {tensor for unit in plan.units if plan.impl(unit).reads_u8 for tensor in unit.inputs}
    fixed = _fixed_u8(plan.units, facts)
    unread = (unit for unit in plan.units if read.isdisjoint(unit.outputs) and unit.name not in fixed)
    products = (unit for unit in unread if plan.impl(unit) is Impl.U8 and OPS[unit.op].kind == "compute")
    return plan.with_choices({unit.name: Choice(Impl.U8_FLOAT) for unit in products})


def _captured(model: ir.Model) -> set[str]:
    """Return the tensors that bodies of control flow read from the graph around them."""
    values = [(value, node.graph) for graph in computing_graphs(model) for node in graph for value in node.outputs]
    return {str(value.name) for value, graph in values if any(use.node.graph is not graph for use in value.uses())}


def _drop_unread(found: tuple[Unit, ...], choices: dict[str, Choice], captured: set[str], fixed: set[str]) -> None:
    """Make followers float, and products write float, if no unit reads their output in uint8.

    Products that the user wants in uint8 (`fixed`) keep it. An operator that moves values into a body stays in uint8:
    in float, between a DequantizeLinear and a tensor that only a body reads, it makes ONNX Runtime 1.31 abort.
    """
    readers: dict[str, list[Unit]] = defaultdict(list)
    for unit in found:
        for tensor in unit.inputs:
            readers[tensor].append(unit)
    for unit in reversed(found):
        if choices[unit.name].impl is not Impl.U8:
            continue
        wanted = any(choices[r.name].impl.reads_u8 for t in unit.outputs for r in readers[t])
        row = OPS[unit.op]
        wanted = wanted or (row.kind == "same" and not captured.isdisjoint(unit.outputs))
        if not wanted and row.kind != "compute":
            choices[unit.name] = Choice(Impl.FLOAT, FLOAT_READERS)
        elif not wanted and unit.name not in fixed and row.u8_float is not None and row.u8_float in uint8_kernels():
            choices[unit.name] = Choice(Impl.U8_FLOAT)

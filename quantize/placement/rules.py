"""The plan by rules: one rule per operator decides. The emitters in `requant.transforms` write the plan.

A unit computes in integers if the operator table has an integer form for it, the installed runtime has the kernel, and
its inputs come in uint8 or are worth a QuantizeLinear. Operators that only move values, and operators that join
branches, follow their neighbours: they run on uint8 if their inputs come in uint8 and their outputs are read in uint8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from ...system.given import check_kind, or_default
from ...transforms.graphs.queries import axes_of, bodies, plain_shape
from ...transforms.int8.ops import FUNCTION, GATE, OPS, Op, float_reason
from ...transforms.int8.plan import Choice, Impl, Plan, Unit
from ...transforms.int8.qparams import Scheme
from ...transforms.int8.reasons import FUSED_GROUP, NONE, UNFUSED_GROUP, Reason
from ...transforms.patterns.attention import OPERATORS, missing_form
from ...transforms.pipelines.verify import check_model
from ..options.declared import Strategy
from ..options.selection import ORDERS, Selection
from .compounds import units_of
from .facts import Facts, facts_of
from .neighbours import captured_by_bodies, with_float_results, with_neighbours
from .obstacles import OBSTACLES
from .reasons import (
    ATTENTION_FORM,
    CACHE,
    EXCLUDED,
    FOREIGN,
    FUSED_ELSEWHERE,
    NO_FORM,
    OLD_SCAN,
    OPERAND_CONSTANT,
    WRITTEN,
)

INTEGER_EVERYWHERE = frozenset({"Add", "Concat", "AveragePool", "GlobalAveragePool"})
"""Operators that every runtime computes in integers, besides products and operators that move values."""


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
    units = units_of(model.graph, facts)
    captured = captured_by_bodies(model)
    choices = with_neighbours(units, {unit.name: decide(unit, facts) for unit in units}, captured, facts)
    results = frozenset(str(value.name) for value in model.graph.outputs) | captured
    return with_float_results(Plan(units, choices, facts.portable, results), facts)


def decide(unit: Unit, facts: Facts) -> Choice:
    """Return how a unit computes; what requant has left in float in a model that it wrote stays float."""
    choice = _first_form(unit, facts)
    return Choice(Impl.FLOAT, WRITTEN) if facts.finished and choice.impl.int8 else choice


def _first_form(unit: Unit, facts: Facts) -> Choice:
    """Return the first implementation of the user's strategy that has no obstacle; else float with the reason."""
    fixed = fixed_float(unit, facts)
    if fixed:
        return Choice(Impl.FLOAT, fixed)
    strategy = facts.selection.strategy_of(unit, OPS[unit.op])
    obstacles: list[Reason] = []
    for impl in ORDERS[strategy]:
        obstacle = OBSTACLES[impl](unit, facts, strategy)
        if not obstacle:
            return Choice(impl)
        obstacles.append(obstacle)
    telling = next((obstacle for obstacle in obstacles if obstacle is not NO_FORM), NONE)
    return Choice(Impl.FLOAT, _why_float(unit, facts, strategy, telling))


def _why_float(unit: Unit, facts: Facts, strategy: Strategy, telling: Reason) -> Reason:
    """Return why a unit computes in float after all forms of the user's strategy had an obstacle.

    Args:
        unit: The unit.
        facts: The input of the rules.
        strategy: The strategy.
        telling: The first obstacle that says more than that there is no such form; `NONE` without one.
    """
    row = OPS[unit.op]
    if row.kind != "float" and not row.native_u8:
        return telling or float_reason(unit.op)
    if strategy is Strategy.AUTO and row.native_u8:  # costs may give it this form, which `ORDERS` lacks
        native = OBSTACLES[Impl.U8_NATIVE](unit, facts, strategy)
        if native and native is not NO_FORM:
            return native
    last = facts.nodes[unit.nodes[-1]]
    why = float_reason("Log") if unit.op == FUNCTION and last.op_type == "Log" else row.why  # nothing fuses a Log
    return Reason(why.code, f"{why}; {telling}") if telling else why


def fixed_float(unit: Unit, facts: Facts) -> Reason:
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
    return EXCLUDED.about(refused) if refused else _fixed_by_operator(unit, row, anchor, facts)


def _fixed_by_operator(unit: Unit, row: Op, anchor: ir.Node, facts: Facts) -> Reason:
    """Return why an operator of the operator table stays float in every form, or is slow in int8; `NONE` if it is not.

    Args:
        unit: The unit.
        row: Its row of the table.
        anchor: Its first node.
        facts: The input of the rules.
    """
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

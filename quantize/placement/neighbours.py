"""Place operators by their neighbours: what moves or joins values, and what no unit reads in uint8."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from ...transforms.graphs.queries import computing_graphs
from ...transforms.int8.ops import OPS
from ...transforms.int8.plan import Choice, Impl, Plan, Unit
from ..options.declared import Strategy
from ..runtime.kernels import uint8_kernels
from .facts import Facts
from .reasons import FLOAT_INPUTS, FLOAT_READERS

Choices = Mapping[str, Choice]
"""How each unit computes, by name."""


def with_neighbours(units: Sequence[Unit], alone: Choices, captured: set[str], facts: Facts) -> dict[str, Choice]:
    """Return how each unit computes with regard to its neighbours.

    Args:
        units: The units in order.
        alone: How each unit computes regardless of its neighbours.
        captured: The tensors that bodies read from the graph around them, as `captured_by_bodies` returns them.
        facts: The input of the rules.
    """
    return _without_unread(units, _with_followers(units, alone), captured, _fixed_u8(units, facts))


def _with_followers(units: Sequence[Unit], alone: Choices) -> dict[str, Choice]:
    """Return the choices with each follower on uint8 if that saves conversions, else in float.

    In uint8 a follower needs a QuantizeLinear for each input that no integer kernel writes or reads already. In float
    it needs a DequantizeLinear for each input that an integer kernel writes, and a QuantizeLinear of its output.
    Matrix products write float at the cost of uint8, so that adding or multiplying their results in uint8 saves
    nothing and costs a rounding: a transformer is faster and more accurate with only its products in integers.
    """
    computing = [unit for unit in units if _computes_on_u8(unit, alone)]
    written = {t for u in computing if alone[u.name].impl is Impl.U8 for t in u.outputs}
    either = {t for u in computing if OPS[u.op].u8_float is not None for t in u.outputs}  # uint8 or float, at one cost
    available = written | {t for u in computing for t in u.inputs}  # as uint8, without one more conversion
    choices = dict(alone)
    for unit in units:
        if not alone[unit.name].impl.reads_u8 or OPS[unit.op].kind == "compute":
            continue
        held = [tensor for tensor in unit.inputs if tensor in available and tensor not in either]
        needed_in_u8 = sum(tensor not in available for tensor in unit.inputs)
        needed_in_float = 1 + sum(tensor in written for tensor in held)
        if needed_in_u8 >= needed_in_float or not (held or OPS[unit.op].kind == "same"):
            choices[unit.name] = Choice(Impl.FLOAT, FLOAT_INPUTS)
            continue
        written.update(unit.outputs)
        available.update((*unit.inputs, *unit.outputs))
        if not held:
            either.update(unit.outputs)
    return choices


def _computes_on_u8(unit: Unit, choices: Choices) -> bool:
    """Return whether a unit reads uint8 and computes; others move or join values."""
    return choices[unit.name].impl.reads_u8 and OPS[unit.op].kind == "compute"


def _without_unread(units: Sequence[Unit], before: Choices, captured: set[str], fixed: set[str]) -> dict[str, Choice]:
    """Return the choices with less uint8 where no unit reads it: followers become float, and products write float.

    An operator that moves values into a body stays in uint8: in float, between a DequantizeLinear and a tensor that
    only a body reads, it makes ONNX Runtime 1.31 abort.

    Args:
        units: The units in order.
        before: The choices so far.
        captured: As for `with_neighbours`.
        fixed: The units that the user wants to write uint8; products among them keep it.
    """
    readers: dict[str, list[Unit]] = defaultdict(list)
    for unit in units:
        for tensor in unit.inputs:
            readers[tensor].append(unit)
    choices = dict(before)
    for unit in reversed(units):  # a unit that becomes float reads no uint8 from the units before it
        if choices[unit.name].impl is not Impl.U8:
            continue
        row = OPS[unit.op]
        is_read = any(choices[reader.name].impl.reads_u8 for tensor in unit.outputs for reader in readers[tensor])
        if is_read or (row.kind == "same" and not captured.isdisjoint(unit.outputs)):
            continue
        if row.kind != "compute":
            choices[unit.name] = Choice(Impl.FLOAT, FLOAT_READERS)
        elif unit.name not in fixed and row.u8_float is not None and row.u8_float in uint8_kernels():
            choices[unit.name] = Choice(Impl.U8_FLOAT)
    return choices


def with_float_results(plan: Plan, facts: Facts) -> Plan:
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


def captured_by_bodies(model: ir.Model) -> set[str]:
    """Return the tensors that bodies of control flow read from the graph around them."""
    values = [(value, node.graph) for graph in computing_graphs(model) for node in graph for value in node.outputs]
    return {str(value.name) for value, graph in values if any(use.node.graph is not graph for use in value.uses())}


def _fixed_u8(units: Sequence[Unit], facts: Facts) -> set[str]:
    """Return the units that the user wants to write uint8."""
    return {u.name for u in units if u.op in OPS and facts.selection.strategy_of(u, OPS[u.op]) is Strategy.STATIC}

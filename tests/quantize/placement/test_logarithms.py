"""A logarithm of a sum far from 0 is a native table; another one stays float, with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from requant.quantize.placement.facts import facts_of
from requant.quantize.placement.forms import native_plan, possible_forms
from requant.quantize.placement.rules import choose_by
from requant.transforms.int8.ops import FUNCTION
from requant.transforms.int8.plan import Impl

from .test_rules import between, reason

CONSTANTS = {name: np.asarray(number, np.float32) for name, number in (("one", 1), ("tiny", 1e-5), ("two", 2))}
SPLADE = "[relu] r = Relu(a) [sum] s = Add(r, one) [log] b = Log(s)"
Ranges = Mapping[str, tuple[float, float]]


def forms(nodes: str, ranges: Ranges | None = None, name: str = "log", *, native: bool = True) -> tuple[Impl, ...]:
    """Return the forms that a unit may have."""
    facts = dataclasses.replace(facts_of(between(nodes, **CONSTANTS)), native=native, ranges=ranges or {})
    return possible_forms(facts, choose_by(facts, between(nodes, **CONSTANTS)))[name]


def test_a_sum_and_its_logarithm_are_one_unit() -> None:
    model = between(SPLADE, **CONSTANTS)
    facts = dataclasses.replace(facts_of(model), native=True)
    plan = native_plan(facts, choose_by(facts, model))
    (unit,) = [unit for unit in plan.units if "log" in unit.nodes]
    assert (unit.op, unit.nodes, unit.inputs) == (FUNCTION, ("sum", "log"), ("r",))
    assert plan.impl(unit) is Impl.U8_NATIVE


def test_what_scales_the_logarithm_belongs_to_it() -> None:
    model = between(SPLADE.replace("b = Log(s)", "l = Log(s) [scale] b = Mul(l, two)"), **CONSTANTS)
    facts = dataclasses.replace(facts_of(model), native=True)
    (unit,) = [unit for unit in choose_by(facts, model).units if "log" in unit.nodes]
    assert (unit.nodes, unit.outputs) == (("sum", "log", "scale"), ("b",))


@pytest.mark.parametrize(
    ("nodes", "ranges", "native"),
    [
        (SPLADE, {"r": (0.0, 32.0)}, True),
        (SPLADE, {"r": (0.0, 33.0)}, False),
        (SPLADE.replace("one", "tiny"), {"r": (0.0, 1.0)}, False),
        ("[relu] r = Exp(a) [sum] s = Add(r, one) [log] b = Log(s)", {"a": (-90.0, 90.0)}, True),
        ("[relu] r = Tanh(a) [sum] s = Add(r, one) [log] b = Log(s)", {}, False),
        ("[log] b = Log(a)", {}, False),
    ],
    ids=["near enough", "too steep", "near 0", "softplus", "no bound", "no sum"],
)
def test_how_far_from_0(nodes: str, ranges: Ranges, native: bool) -> None:
    assert (Impl.U8_NATIVE in forms(nodes, ranges)) is native


def test_without_native_operators_nothing_changes() -> None:
    assert forms(SPLADE, native=False) == (Impl.FLOAT,)


@pytest.mark.parametrize(
    ("nodes", "high", "words"),
    [
        (SPLADE, 5.0, "the runtime has no integer kernel for Log"),
        (SPLADE, 100.0, "a logarithm of a sum whose input reaches 100 times its constant is too steep for uint8"),
        ("[log] b = Log(a)", 5.0, "the runtime has no integer kernel for Log"),
    ],
)
def test_reasons(nodes: str, high: float, words: str) -> None:
    model = between(nodes, **CONSTANTS)
    facts = dataclasses.replace(facts_of(model), native=True, ranges=dict.fromkeys("abrxy", (0.0, high)))
    (unit,) = [unit for unit in choose_by(facts, model).units if "log" in unit.nodes]
    assert reason(choose_by(facts, model), unit.nodes[0]) == words

"""Convolutions that absorb functions and sums: which they are, what that costs, and what is not rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from requant.quantize.placement.absorbers import absorbers_of, unrounded
from requant.quantize.placement.costs import Costs, signature
from requant.quantize.placement.facts import Facts, facts_of
from requant.quantize.placement.forms import all_int8_plan, native_plan, possible_forms
from requant.quantize.placement.plans_by_cost import _choice, cheapest_plan, tuned_plan
from requant.quantize.placement.pricing import Prices, Space, noise_cost, plan_noise_cost
from requant.quantize.placement.rules import choose_by
from requant.quantize.runtime.machine import Machine
from requant.transforms.int8.plan import Choice, Impl, Plan

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[1,8,16,16] x) => (float[1,8,16,16] y) {
  [first] a = Conv <pads = [1, 1, 1, 1]> (x, w)
  [sigmoid] f = Sigmoid(a)
  [gate] b = Mul(a, f)
  [second] c = Conv <pads = [1, 1, 1, 1]GROUP> (b, v)
  [sum] y = Add(c, b)
}"""
SHAPES = dict.fromkeys("xafbcy", (1, 8, 16, 16))
POOLED = """<ir_version: 8, opset_import: ["" : 17]>
net (float[1,8,16,16] x) => (float[1,8,16,16] c) <float[8,8,3,3] w = {WEIGHTS}> {
  [first] a = Conv <pads = [1, 1, 1, 1]> (x, w)
  [pool] b = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a)
  [second] c = Conv <pads = [1, 1, 1, 1]> (b, w)
}""".replace("WEIGHTS", ", ".join(["1"] * 8 * 8 * 9))


def facts(group: int = 1) -> tuple[ir.Model, Facts]:
    """Return two convolutions with a SiLU and a residual, and what rules know of them."""
    proto = onnx.parser.parse_model(TEXT.replace("GROUP", f", group = {group}"))
    random = np.random.default_rng(0)
    for name, inputs in (("w", 8), ("v", 8 // group)):
        array = random.normal(size=(8, inputs, 3, 3)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    made = ir.from_proto(proto)
    for value in (v for node in made.graph for v in node.outputs):
        value.shape, value.dtype = ir.Shape(SHAPES[str(value.name)]), ir.DataType.FLOAT
    return made, replace(facts_of(made), static=True, native=True, ranges=dict.fromkeys(SHAPES, (-1.0, 1.0)))


def named(group: int = 1, **known: Any) -> dict[str, str]:
    """Return the names of convolutions that absorb units."""
    made, found = facts(group)
    given = replace(found, **known)
    rules = choose_by(given, made)
    return {name: unit.name for name, unit in absorbers_of(given, rules, possible_forms(given, rules)).items()}


def test_functions_and_sums_are_absorbed_by_the_convolution_that_they_alone_read() -> None:
    assert named() == {"gate": "first", "sum": "second"}


def test_a_depthwise_convolution_absorbs_functions_and_no_sum() -> None:
    assert named(group=8) == {"gate": "first"}


def test_exact_operators_absorb_nothing() -> None:
    assert named(exact=True) == {}


def prices(costs: Mapping[str, Mapping[Impl, float]], noise_price: float = 0.0) -> Prices:
    """Return prices with measured costs of units by name, and the same noise for each tensor."""
    made, given = facts()
    rules = choose_by(given, made)
    forms = possible_forms(given, rules)
    keys = {u.name: signature(u, given.nodes, SHAPES) for u in rules.units if len(forms[u.name]) > 1}
    rows = {keys[name]: {impl.value: us for impl, us in row.items()} for name, row in costs.items()}
    space = Space(given, rules, forms, SHAPES, keys, frozenset({"y"}), absorbers_of(given, rules, forms))
    found = Prices.of(space, Costs(Machine("1", "a cpu", 1), rows), dict.fromkeys(SHAPES, 0.01))
    return replace(found, noise_price=noise_price)


def row(stock: float, native: float) -> dict[Impl, float]:
    return {Impl.FLOAT: 500.0, Impl.U8: stock, Impl.U8_NATIVE: native}


def chosen(plan: Plan | None) -> dict[str, Any]:
    assert plan is not None
    return {unit.name: plan.impl(unit) for unit in plan.units}


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize(("native", "together"), [(52.0, True), (150.0, False)])
def test_a_convolution_is_native_where_that_pays_for_what_it_absorbs(
    native: float, together: bool, tuned: bool
) -> None:
    costs = {"first": row(50.0, native), "gate": row(60.0, 5.0), "second": row(50.0, 60.0), "sum": row(20.0, 25.0)}
    known = prices(costs)
    wide = all_int8_plan(known.space.facts, known.space.rules)
    found = chosen(tuned_plan(known, wide) if tuned else cheapest_plan(known))
    assert found["gate"] is Impl.U8_NATIVE
    assert found["first"] is (Impl.U8_NATIVE if together else Impl.U8)
    assert found["second"] is found["sum"] is Impl.U8


def pooled(native: float = 20.0) -> Prices:
    """Return prices of a pool between two convolutions; as a native operator it takes `native` microseconds."""
    made = ir.from_onnx_text(POOLED)
    given = replace(facts_of(made), static=True, native=True, ranges=dict.fromkeys(SHAPES, (-1.0, 1.0)))
    rules = choose_by(given, made)
    forms = possible_forms(given, rules)
    keys = {unit.name: signature(unit, given.nodes, SHAPES) for unit in rules.units}
    costs = {"first": row(200.0, 20.0), "pool": row(20.0, native), "second": row(200.0, 20.0)}
    rows = {keys[name]: {impl.value: us for impl, us in each.items()} for name, each in costs.items()}
    space = Space(given, rules, forms, SHAPES, keys, frozenset({"c"}), {})
    return Prices.of(space, Costs(Machine("1", "a cpu", 1), rows), {})


@pytest.mark.parametrize(("native", "beside"), [(20.0, True), (24.0, True), (40.0, False)])
def test_a_unit_between_native_operators_is_native_unless_that_takes_much_longer(native: float, beside: bool) -> None:
    """A kernel of the runtime between two of them may need another layout, which is not among its costs."""
    plan = cheapest_plan(pooled(native))
    assert chosen(plan) == {
        "first": Impl.U8_NATIVE,
        "pool": Impl.U8_NATIVE if beside else Impl.U8,
        "second": Impl.U8_NATIVE,
    }


@pytest.mark.parametrize(("name", "noise"), [("first", "its noise"), ("pool", "the noise of uint8 tensors around it")])
def test_a_unit_that_selects_values_has_no_noise_of_its_own(name: str, noise: str) -> None:
    known = replace(pooled(), noise_price=1e6)
    unit = next(unit for unit in known.space.rules.units if unit.name == name)
    reason = _choice([known], unit, Impl.FLOAT, 1.0).reason
    assert (reason.code, reason.text) == ("noise-costs-more", f"int8 saves 480 us here, less than {noise} is worth")


def test_nothing_is_rounded_between_a_convolution_and_what_it_absorbs() -> None:
    known = prices({}, noise_price=1.0)
    space = known.space
    wide = all_int8_plan(space.facts, space.rules)
    native = native_plan(space.facts, wide)
    assert unrounded(wide, space.absorbers) == set()
    assert unrounded(native, space.absorbers) == {"a", "c"}
    (gate,) = (unit for unit in wide.units if unit.name == "gate")
    rounding = noise_cost(known, gate, Impl.U8) - noise_cost(known, gate, Impl.U8_NATIVE)
    assert rounding == pytest.approx(0.01)  # of a; both round b
    assert plan_noise_cost(known, wide) == pytest.approx(0.05)
    assert plan_noise_cost(known, native) == pytest.approx(0.03)  # x, b and y
    half = native.with_choices({"gate": Choice(Impl.FLOAT)})
    assert plan_noise_cost(known, half) == pytest.approx(0.04)  # a is rounded, to be read in float

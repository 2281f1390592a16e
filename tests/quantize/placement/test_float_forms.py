"""Matrix products from float to float: dynamic ranges and weights in blocks, chosen by costs and noise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from requant.calibration.data.samples import Sample
from requant.quantize import Options, Selection, Strategy, measure_costs, quantize_model
from requant.quantize.placement.costs import Costs, signature
from requant.quantize.placement.facts import Facts, facts_of
from requant.quantize.placement.forms import all_int8_plan, native_plan, possible_forms, stock_plan
from requant.quantize.placement.plans_by_cost import _choice, cheapest_plan, tuned_plan
from requant.quantize.placement.pricing import Prices, Space, has_unmeasured, plan_noise_cost, with_absorbed
from requant.quantize.placement.rules import choose_by
from requant.quantize.runtime.machine import Machine
from requant.quantize.sensitivity.each_tensor import sqnr_by_tensor
from requant.transforms.int8.plan import NATIVE_PRODUCTS, Choice, Impl
from requant.transforms.int8.qparams import BlockForm, asymmetric_u8

from ...native import needs_library

SHAPES = {"x": (4, 64), "a": (4, 96), "t": (4, 96), "y": (4, 32)}
TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[4,64] x) => (float[4,32] y) {
  [up] a = MatMul(x, w)
  [tanh] t = Tanh(a)
  [down] y = MatMul(t, v)
}"""


def model(idle: int = 0) -> ir.Model:
    """Return two matrix products with a Tanh, which is float, between them.

    Args:
        idle: The number of columns of x that the first product multiplies by 0.
    """
    random = np.random.default_rng(0)
    proto = onnx.parser.parse_model(TEXT)
    for name, shape, width in (("w", (64, 96), 0.1), ("v", (96, 32), 1.0)):
        array = random.normal(scale=width, size=shape).astype(np.float32)
        array[: idle if name == "w" else 0] = 0
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return ir.from_proto(proto)


def facts(made: ir.Model, **known: Any) -> Facts:
    return replace(facts_of(made), static=True, **known)


def prices(measured: Mapping[str, Mapping[Impl, float]], noise_price: float = 0.0, **known: Any) -> Prices:
    """Return prices with measured costs of units by name."""
    made = model()
    given = facts(made, **known)
    rules = choose_by(given, made)
    forms = possible_forms(given, rules)
    keys = {u.name: signature(u, given.nodes, SHAPES) for u in rules.units if len(forms[u.name]) > 1}
    rows = {keys[name]: {impl.value: us for impl, us in row.items()} for name, row in measured.items() if name in keys}
    space = Space(given, rules, forms, SHAPES, keys, frozenset({"y"}))
    found = Prices.of(space, Costs(Machine("1", "a cpu", 1), rows), dict.fromkeys(("x", "t"), 0.01))
    return replace(found, noise_price=noise_price)


ROW = {Impl.FLOAT: 100.0, Impl.U8_FLOAT: 60.0, Impl.U8: 60.0, Impl.DYNAMIC: 40.0, Impl.BLOCK: 50.0}


def chosen(measured: Mapping[str, Mapping[Impl, float]], noise_price: float = 0.0, **known: Any) -> dict[str, Impl]:
    plan = cheapest_plan(prices(measured, noise_price, **known))
    return {name: plan.choices[name].impl for name in ("up", "down")}


def test_the_cheapest_form_of_each_product_is_chosen() -> None:
    other = {**ROW, Impl.BLOCK: 30.0}
    assert chosen({"up": ROW, "down": other}) == {"up": Impl.DYNAMIC, "down": Impl.BLOCK}
    slow = {**ROW, Impl.U8_FLOAT: 10.0, Impl.U8: 10.0}
    assert chosen({"up": ROW, "down": slow}) == {"up": Impl.DYNAMIC, "down": Impl.U8_FLOAT}


@pytest.mark.parametrize(
    ("saved", "noise_price", "says"),
    [
        (1.0, 0.0, "int8 saves 1 us here, its conversions take 4 us"),
        (30.0, 0.0, "int8 saves 30 us here, less than it costs the units around it"),
        (30.0, 100.0, "int8 saves 30 us here, less than its noise is worth"),
    ],
)
def test_a_unit_that_stays_float_says_what_costs_more(saved: float, noise_price: float, says: str) -> None:
    known = prices({"up": {Impl.FLOAT: 100.0, Impl.U8_FLOAT: 100 - saved, Impl.U8: 100 - saved}}, noise_price)
    unit = next(unit for unit in known.space.rules.units if unit.name == "up")
    assert str(_choice([known], unit, Impl.FLOAT, 1.0).reason) == says


def test_a_form_that_was_not_measured_is_not_chosen() -> None:
    few: dict[Impl, float] = {impl: cost for impl, cost in ROW.items() if impl not in (Impl.DYNAMIC, Impl.BLOCK)}
    assert chosen({"up": few, "down": few}) == {"up": Impl.U8_FLOAT, "down": Impl.U8_FLOAT}
    assert has_unmeasured(prices({"up": ROW, "down": few}))
    assert not has_unmeasured(prices({"up": ROW, "down": ROW}))


def test_noise_of_each_form_has_its_price() -> None:
    noise = {Impl.DYNAMIC: {"x": 0.5, "t": 0.0}, Impl.BLOCK: {"x": 0.0, "t": 0.0}}
    assert chosen({"up": ROW, "down": ROW}, 100.0, noise_of=noise) == {"up": Impl.BLOCK, "down": Impl.DYNAMIC}
    priced = prices({"up": ROW, "down": ROW}, 100.0, noise_of=noise)
    plan = priced.space.rules.with_choices({"up": Choice(Impl.DYNAMIC), "down": Choice(Impl.U8_FLOAT)})
    assert plan_noise_cost(priced, plan) == pytest.approx(100 * 0.5 + 100 * 0.01)


def test_an_input_that_is_kept_float_may_be_rounded_at_run_time() -> None:
    known: dict[str, Any] = {"kept_float": {"x": "in uint8 'x' alone leaves 3 dB"}}
    assert possible_forms(facts(model(), **known), choose_by(facts(model(), **known), model()))["up"] == (
        Impl.FLOAT,
        Impl.DYNAMIC,
        Impl.BLOCK,
    )
    assert chosen({"up": ROW, "down": ROW}, **known)["up"] is Impl.DYNAMIC
    assert chosen({"up": ROW, "down": ROW}, **known, harmed_by={Impl.DYNAMIC: {"x": "it ruins"}})["up"] is Impl.BLOCK
    harmed = {Impl.DYNAMIC: {"x": "it ruins"}, Impl.BLOCK: {"x": "it ruins"}}
    assert chosen({"up": ROW, "down": ROW}, **known, harmed_by=harmed)["up"] is Impl.FLOAT
    every = all_int8_plan(facts(model(), **known), choose_by(facts(model(), **known), model()))
    assert every.choices["up"].impl is Impl.DYNAMIC


def test_products_from_uint8_to_uint8_are_not_tuned_to_other_types() -> None:
    priced = prices({"up": ROW, "down": ROW})
    plan = priced.space.rules.with_choices({"up": Choice(Impl.U8), "down": Choice(Impl.U8)})
    assert tuned_plan(priced, plan) is None


def test_other_blocks_and_portable_models_are_no_choice() -> None:
    given = facts(model(), blocks=BlockForm(4, 32))
    assert not {Impl.DYNAMIC, Impl.BLOCK} & {*possible_forms(given, choose_by(given, model()))["up"]}
    given = facts(model(), portable=True)
    assert not {Impl.DYNAMIC, Impl.BLOCK} & {*possible_forms(given, choose_by(given, model()))["up"]}


@pytest.mark.parametrize(("strategy", "form"), [(Strategy.DYNAMIC, Impl.DYNAMIC), (Strategy.BLOCK, Impl.BLOCK)])
def test_costs_decide_between_the_operators_of_a_form_from_float_to_float(strategy: Strategy, form: Impl) -> None:
    """Who asks for a form gets the native operator if it is faster, but not where its results must be exact."""
    made = model()
    given = replace(facts_of(made, Selection(strategy=strategy)), native=True)
    native = NATIVE_PRODUCTS[form]
    assert possible_forms(given, choose_by(given, made))["up"] == (form, native)
    assert native_plan(given, choose_by(given, made)).choices["up"].impl is native
    assert stock_plan(native_plan(given, choose_by(given, made))) == choose_by(given, made)
    for other in (replace(given, native=False), replace(given, exact=True)):
        assert possible_forms(other, choose_by(other, made))["up"] == (form,)


@needs_library
@pytest.mark.parametrize("strategy", ["dynamic", "block"])
def test_a_form_that_the_user_asks_for_needs_no_measured_costs(tmp_path: Path, strategy: str) -> None:
    random = np.random.default_rng(0)
    text = '<ir_version: 8, opset_import: ["" : 17]> net (float[8,64] x) => (float[8,64] y) { [up] y = MatMul(x, w) }'
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(random.normal(size=(64, 64)).astype(np.float32), "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=random.normal(size=(64, 64)).astype(np.float32))
    options = Options(place="estimated", selection=Selection(strategy=Strategy(strategy)), force_int8=True, seconds=0.1)
    found = quantize_model(tmp_path / "m.onnx", str(tmp_path / "d.npz"), tmp_path / "o.onnx", options)
    assert found.int8_nodes == 1


def test_a_trial_rounds_as_the_kernel_does() -> None:
    """A tensor with outliers in one block: rounding in blocks spares the other block, rounding as a whole does not."""
    made = model(idle=32)
    x = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    x[:, :4] *= 300
    sample = Sample({"x": x}, None, "a sample")
    tried = {
        name: sqnr_by_tensor(made, {"x": rounding}, [sample], readers={"up"})["x"]
        for name, rounding in (
            ("range", asymmetric_u8(float(x.min()), float(x.max()))),
            ("run", None),
            ("blocks", BlockForm(8, 32)),
        )
    }
    assert tried["run"] == pytest.approx(tried["range"], abs=0.5)
    assert tried["blocks"] > tried["run"] + 20
    w, v = map(onnx.numpy_helper.to_array, ir.to_proto(made).graph.initializer)
    blocks = x.reshape(4, 2, 32)
    step = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    rounded = (np.rint(blocks / step) * step).reshape(4, 64)
    exact, other = (np.tanh(each @ w) @ v for each in (x, rounded))
    expected = 10 * np.log10(np.sum(exact**2) / np.sum((exact - other) ** 2))
    assert tried["blocks"] == pytest.approx(expected, abs=0.5)


def test_a_plan_file_may_name_the_forms(tmp_path: Path) -> None:
    onnx.save(ir.to_proto(model()), tmp_path / "float.onnx")
    plan, output = tmp_path / "mine.plan.json", tmp_path / "int8.onnx"
    plan.write_text(json.dumps({"schema": 1, "units": {"up": "dynamic", "down": "block"}}))
    feeds = [{"x": np.random.default_rng(seed).normal(size=(4, 64)).astype(np.float32)} for seed in range(8)]
    options = Options(plan=plan, force_int8=True, seconds=0.0)
    result = quantize_model(tmp_path / "float.onnx", feeds, output, options)
    assert result.forms == {"dynamic": 1, "block": 1}
    written = json.loads(output.with_suffix(".plan.json").read_text())["units"]
    assert {name: written[name]["implementation"] for name in ("up", "down")} == {"up": "dynamic", "down": "block"}


def test_costs_of_every_form_are_measured_and_written(tmp_path: Path) -> None:
    onnx.save(ir.to_proto(model()), tmp_path / "float.onnx")
    feeds = [{"x": np.random.default_rng(seed).normal(size=(4, 64)).astype(np.float32)} for seed in range(2)]
    rows = measure_costs(tmp_path / "float.onnx", feeds).rows
    assert len(rows) >= 2
    assert all({"dynamic", "block", "float"} <= row.keys() for key, row in rows.items() if key.startswith("MatMul"))


def test_units_without_a_time_in_float_have_no_kernel_of_their_own_there() -> None:
    """A file of costs has no float row of what the runtime fuses."""
    found = with_absorbed(prices({"up": {Impl.U8_FLOAT: 60.0}, "down": ROW}))
    assert found.absorbed == {"up"}
    assert with_absorbed(prices({"down": ROW})).absorbed == frozenset()

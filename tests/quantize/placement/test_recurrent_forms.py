"""GRUs and LSTMs from float to float: which of them may be native, and why others may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from requant.quantize import Selection, Strategy
from requant.quantize.placement.facts import Facts, facts_of
from requant.quantize.placement.forms import possible_forms, stock_plan
from requant.quantize.placement.obstacles import OBSTACLES
from requant.quantize.placement.rules import choose_by
from requant.transforms.int8.plan import Choice, Impl

GATES = {"GRU": 3, "LSTM": 4}
SIZE = 256
INPUTS = "x, w, r, b"
FUNCTIONS = {"GRU": "Sigmoid Tanh".split(), "LSTM": "Sigmoid Tanh Tanh".split()}


def model(op: str, attributes: str = "", inputs: str = INPUTS, kind: str = "float", opset: int = 17) -> ir.Model:
    """Return one operator with a state of `SIZE`, whose weights are of a type."""
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : {opset}]>
    net ({kind}[9,2,24] x, int32[2] n, {kind}[1,2,{SIZE}] h, {kind}[1,{2 * GATES[op] * SIZE}] computed)
        => ({kind}[9,1,2,{SIZE}] y) {{ [op] y = {op} <hidden_size = {SIZE}{attributes}> ({inputs}) }}""")
    dtype = np.float32 if kind == "float" else np.float16
    rows = GATES[op] * SIZE
    shapes = {"w": (1, rows, 24), "r": (1, rows, SIZE), "b": (1, 2 * rows), "p": (1, 3 * SIZE)}
    for name, shape in shapes.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, dtype), name))
    return ir.from_proto(proto)


def facts(made: ir.Model, selection: Selection | None = None, **known: Any) -> Facts:
    found = facts_of(made) if selection is None else facts_of(made, selection)
    return replace(found, native=True, **known)


def obstacle(made: ir.Model, **known: Any) -> str:
    """Return the code of the reason why the operator of a model cannot be native."""
    given = facts(made, **known)
    (unit,) = choose_by(given, made).units
    return OBSTACLES[Impl.DYNAMIC_NATIVE](unit, given, Strategy.AUTO).code


@pytest.mark.parametrize("op", [*GATES])
def test_costs_decide_among_float_and_both_forms(op: str) -> None:
    made = model(op, inputs=f"{INPUTS}, n, h")
    given = facts(made, static=True)
    assert possible_forms(given, choose_by(given, made))["op"] == (Impl.FLOAT, Impl.DYNAMIC, Impl.DYNAMIC_NATIVE)
    for other in (replace(given, native=False), replace(given, exact=True)):
        assert Impl.DYNAMIC_NATIVE not in possible_forms(other, choose_by(other, made))["op"]


@pytest.mark.parametrize("op", [*GATES])
def test_who_asks_for_ranges_at_run_time_gets_the_faster_form(op: str) -> None:
    made = model(op)
    given = facts(made, Selection(strategy=Strategy.DYNAMIC))
    assert possible_forms(given, choose_by(given, made))["op"] == (Impl.DYNAMIC, Impl.DYNAMIC_NATIVE)


@pytest.mark.parametrize("op", [*GATES])
def test_stock_operators_replace_the_native_one(op: str) -> None:
    made = model(op)
    plan = choose_by(facts(made), made).with_choices({"op": Choice(Impl.DYNAMIC_NATIVE)})
    assert stock_plan(plan).choices["op"].impl is Impl.DYNAMIC


LEFT = {
    "clipped": ("other-activations", {"attributes": ", clip = 2.0"}),
    "layout": ("batch-first", {"attributes": ", layout = 1"}),
    "computed bias": ("bias-computed", {"inputs": "x, w, r, computed"}),
    "computed weights": ("weights-not-constant", {"inputs": "x, w, h"}),
    "half floats": ("not-float32", {"kind": "float16"}),
    "old opset": ("old-opset", {"opset": 12}),
}


@pytest.mark.parametrize(("code", "given"), LEFT.values(), ids=LEFT)
@pytest.mark.parametrize("op", [*GATES])
def test_what_the_operator_does_not_have_is_left_alone_with_a_reason(op: str, code: str, given: dict[str, Any]) -> None:
    assert obstacle(model(op, **given)) == code


@pytest.mark.parametrize("op", [*GATES])
def test_functions_other_than_sigmoid_and_tanh_are_left_alone(op: str) -> None:
    usual = FUNCTIONS[op]
    for names, code in ((usual, ""), (["HardSigmoid", *usual[1:]], "other-activations")):
        written = ", ".join(f'"{name}"' for name in names)
        assert obstacle(model(op, f", activations = [{written}]")) == code


@pytest.mark.parametrize(("attributes", "inputs"), [(", input_forget = 1", INPUTS), ("", f"{INPUTS}, , , , p")])
def test_gates_of_an_lstm_that_read_more_are_left_alone(attributes: str, inputs: str) -> None:
    assert obstacle(model("LSTM", attributes, inputs)) == "peepholes"


@pytest.mark.parametrize("op", [*GATES])
def test_an_input_whose_rounding_ruins_an_output_stays_float(op: str) -> None:
    made, harmed = model(op), {form: {"x": "it ruins"} for form in (Impl.DYNAMIC, Impl.DYNAMIC_NATIVE)}
    assert obstacle(made, harmed_by=harmed) == "kept-float"
    given = facts(made, static=True, harmed_by=harmed)
    assert possible_forms(given, choose_by(given, made))["op"] == (Impl.FLOAT,)

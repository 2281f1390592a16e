"""Products that find their ranges at run time, in functions: with the library, without it, and before."""

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
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import Array, open_session
from requant.quantize import Options, quantize_model
from requant.quantize.kernels.products import wrap_products
from requant.quantize.placement.forms import native_products_plan
from requant.transforms.int8.plan import Choice, Impl, Plan, Unit

from ...native import needs_library
from .two_products import write_two_products

HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n'
GELU = """d = Div(a, root) e = Erf(d) u = Add(e, one) m = Mul(a, u) [gelu] y = Mul(m, half)"""
TANH = """q = Mul(a, a) c = Mul(a, q) k = Mul(c, cubic) l = Add(a, k) f = Mul(l, rate) t = Tanh(f) u = Add(t, one)
    m = Mul(a, u) y = Mul(m, half)"""
PRODUCT = "[product] p = com.microsoft.DynamicQuantizeMatMul(x, w, s, z)"
RANDOM = np.random.default_rng(0)
CONSTANTS: Mapping[str, Array] = {
    # sums of two products with x fit 16 bits: no kernel of a CPU without VNNI saturates
    "w": RANDOM.integers(-64, 65, (16, 24)).astype(np.int8),
    "s": RANDOM.uniform(0.002, 0.004, 24).astype(np.float32),
    "z": np.zeros(24, np.int8),
    "b": RANDOM.normal(size=24).astype(np.float32),
    "g": RANDOM.normal(size=(16, 24)).astype(np.float32),
    "axis": np.asarray([-1]),
    "row": RANDOM.normal(size=(2, 3, 24)).astype(np.float32),
    "root": np.asarray(np.sqrt(2), np.float32),
    "cubic": np.asarray(0.044715, np.float32),
    "rate": np.asarray(np.sqrt(2 / np.pi), np.float32),
    "one": np.asarray(1, np.float32),
    "half": np.asarray(0.5, np.float32),
}
SHAPES: Mapping[str, tuple[int, ...]] = dict.fromkeys(("p", "a", "n", "y"), (2, 3, 24))
UNIT = Unit(name="product", op="MatMul", nodes=("product",), inputs=("x",), outputs=("p",))


def model(nodes: str, outputs: str = "float[2,3,24] y") -> ir.Model:
    """Return a model with a dynamic product of x (2, 3, 16)."""
    proto = onnx.parser.parse_model(f"{HEAD} g (float[2,3,16] x) => ({outputs}) {{ {nodes} }}")
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(numpy_helper.from_array(CONSTANTS[name], name) for name in CONSTANTS if name in read)
    return ir.from_proto(proto)


ROWS = np.random.default_rng(1).normal(size=(2, 3, 16)).astype(np.float32)
ROWS[1] /= 8  # rows have ranges of their own


def run(session: ort.InferenceSession) -> list[Array]:
    return [np.asarray(each) for each in session.run(None, {"x": ROWS})]


def bytes_of(made: ir.Model) -> bytes:
    return bytes(ir.to_proto(made).SerializeToString())


CASES = {
    "alone": (f"{PRODUCT} y = Neg(p)", 1, 0),
    "with a bias inside": ("[product] y = com.microsoft.DynamicQuantizeMatMul(x, w, s, z, b)", 1, 0),
    "bias": (f"{PRODUCT} y = Add(b, p)", 2, 0),
    "relu": (f"{PRODUCT} y = Relu(p)", 2, 1),
    "bias and relu": (f"{PRODUCT} a = Add(p, b) y = Relu(a)", 3, 1),
    "bias and gelu": (f"{PRODUCT} a = Add(p, b) {GELU}", 7, 2),
    "tanh gelu": (f"{PRODUCT} y = com.microsoft.FastGelu(p)", 2, 3),
    "bias and tanh gelu": (f"{PRODUCT} a = Add(p, b) {TANH}", 11, 3),
    "gelu": (f"{PRODUCT} y = com.microsoft.Gelu(p)", 2, 2),
    "silu": (f"{PRODUCT} v = Sigmoid(p) y = Mul(v, p)", 3, 4),
    "bias and silu": (f"{PRODUCT} a = Add(p, b) v = Sigmoid(a) y = Mul(a, v)", 4, 4),
    "silu as an operator": (f"{PRODUCT} y = com.microsoft.QuickGelu <alpha = 1.0> (p)", 2, 4),
    "quick gelu": (f"{PRODUCT} y = com.microsoft.QuickGelu(p)", 1, 0),
    "silu and a gate": (f"r = MatMul(x, g) {PRODUCT} v = Sigmoid(p) n = Mul(p, v) y = Mul(n, r)", 4, 4),
    "a gate": (f"r = MatMul(x, g) {PRODUCT} y = Mul(r, p)", 2, 0),
    "a sum with a constant": (f"{PRODUCT} y = Add(p, row)", 1, 0),
    "a sum with a tensor": (f"r = MatMul(x, g) {PRODUCT} y = Add(r, p)", 2, 0),
    "bias, gelu and a sum": (
        f"r = MatMul(x, g) {PRODUCT} a = Add(p, b) {GELU.replace('y =', 'n =')} y = Add(n, r)",
        8,
        2,
    ),
    "a sum with a row": (f"r = ReduceSum <keepdims = 1> (x, axis) {PRODUCT} y = Add(r, p)", 1, 0),
}


@needs_library
@pytest.mark.parametrize(("nodes", "body", "function"), CASES.values(), ids=CASES)
def test_a_product_becomes_a_function_with_what_follows(nodes: str, body: int, function: int) -> None:
    made = model(nodes)
    shapes = {**SHAPES, "r": (2, 3, 1 if "axis" in nodes else 24)}
    before = run(ort.InferenceSession(bytes_of(made), providers=["CPUExecutionProvider"]))
    assert wrap_products(made, [UNIT], shapes, join=True) == 1
    (call,) = [node for node in made.graph if node.domain == NATIVE_DOMAIN]
    (inner,) = made.functions.values()
    assert (call.op_type, len(list(inner))) == ("MatMul", body)
    assert call.attributes.get_int("function", -1) == function
    # without the library the body runs
    for one, wanted in zip(
        run(ort.InferenceSession(bytes_of(made), providers=["CPUExecutionProvider"])), before, strict=True
    ):
        np.testing.assert_allclose(one, wanted, atol=1e-6)
    # with it, rows are rounded with ranges of their own: 16 products of steps of 1/255 of x, which is below 4
    (found,) = run(open_session(bytes_of(made), threads=1))
    step = 4 * 2 / 255 / 2
    gate = np.abs(ROWS @ CONSTANTS["g"]).max() if call.attributes.get_int("gated", 0) else 1
    assert np.abs(found - before[0]).max() <= 2 * gate * step * np.abs(CONSTANTS["w"] * CONSTANTS["s"]).sum(0).max()


@needs_library
def test_a_sum_of_two_products_belongs_to_the_first_one() -> None:
    nodes = f"{PRODUCT} [second] n = com.microsoft.DynamicQuantizeMatMul(x, w, s, z, b) y = Add(p, n)"
    made, second = model(nodes), replace(UNIT, name="second", nodes=("second",), outputs=("n",))
    before = run(ort.InferenceSession(bytes_of(made), providers=["CPUExecutionProvider"]))
    assert wrap_products(made, [UNIT, second], SHAPES, join=True) == 2
    assert [node.op_type.split("_")[0] for node in made.graph] == ["MatMul", "MatMul"]
    (found,) = run(open_session(bytes_of(made), threads=1))
    step = 4 * 2 / 255 / 2
    assert np.abs(found - before[0]).max() <= 4 * step * np.abs(CONSTANTS["w"] * CONSTANTS["s"]).sum(0).max()


@needs_library
def test_a_sum_whose_lengths_are_not_known_may_repeat_either_operand() -> None:
    text = f"{HEAD} g (float[N,3,16] x, float[M,3,24] r) => (float[K,3,24] y) {{ {PRODUCT} y = Add(p, r) }}"
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(numpy_helper.from_array(CONSTANTS[name], name) for name in "wsz")
    whole, alone = ir.from_proto(proto), ir.from_proto(proto)
    shapes: dict[str, tuple[int | str, ...]] = {"p": ("N", 3, 24), "r": ("M", 3, 24), "y": ("K", 3, 24)}
    assert wrap_products(whole, [UNIT], shapes, join=True) == 1
    assert [node.op_type for node in whole.graph] == ["MatMul"]
    assert wrap_products(alone, [UNIT], shapes) == 1
    sessions, random = [open_session(bytes_of(each)) for each in (whole, alone)], np.random.default_rng(0)
    for rows, others in ((2, 2), (1, 2), (2, 1)):
        feed = {
            name: random.normal(size=(count, 3, width)).astype(np.float32)
            for name, count, width in (("x", rows, 16), ("r", others, 24))
        }
        found, expected = (session.run(None, feed)[0] for session in sessions)
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(Exception, match="do not fit together"):
        sessions[0].run(None, {"x": np.zeros((2, 3, 16), np.float32), "r": np.zeros((3, 3, 24), np.float32)})


def test_a_sum_with_an_operand_that_repeats_stays_a_sum() -> None:
    made = model(f"r = ReduceSum <keepdims = 1> (x, axis) {PRODUCT} y = Add(r, p)")
    assert wrap_products(made, [UNIT], {**SHAPES, "r": (1, 3, 24), "p": ("N", 3, 24)}, join=True) == 1
    assert [node.op_type for node in made.graph] == ["ReduceSum", "MatMul", "Add"]


LEFT = {
    "a product that others read": (f"{PRODUCT} y = Relu(p) o = Neg(p)", "float[2,3,24] y, float[2,3,24] o", 1),
    "a product that is an output": (f"{PRODUCT} y = Add(p, b)", "float[2,3,24] y, float[2,3,24] p", 1),
    "a silu whose input others read": (
        f"{PRODUCT} v = Sigmoid(p) y = Mul(p, v) o = Neg(p)",
        "float[2,3,24] y, float[2,3,24] o",
        1,
    ),
    "a gelu that others read": (f"{PRODUCT} a = Add(p, b) {GELU} o = Neg(a)", "float[2,3,24] y, float[2,3,24] o", 2),
    "a gelu with a bias of its own": (f"{PRODUCT} y = com.microsoft.FastGelu(p, b)", "float[2,3,24] y", 1),
}


@pytest.mark.parametrize(("nodes", "outputs", "body"), LEFT.values(), ids=LEFT)
def test_what_others_read_stays_behind_the_product(nodes: str, outputs: str, body: int) -> None:
    made = model(nodes, outputs)
    assert wrap_products(made, [UNIT], SHAPES, join=True) == 1
    (inner,) = made.functions.values()
    assert len(list(inner)) == body
    onnx.checker.check_model(onnx.load_from_string(bytes_of(made)))


def test_alone_a_product_has_no_function() -> None:
    made = model(CASES["bias and gelu"][0])
    assert wrap_products(made, [UNIT], SHAPES) == 1
    assert [len(list(each)) for each in made.functions.values()] == [1]


@needs_library
def test_native_products_are_chosen_by_their_costs_and_can_be_planned(tmp_path: Path) -> None:
    write_two_products(tmp_path / "m.onnx", 48)
    random = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=random.normal(size=(480, 256)).astype(np.float32))
    asked: dict[str, Any] = {"seconds": 0.05, "force_int8": True, "effort": "low"}
    quantize_model(tmp_path / "m.onnx", tmp_path / "d.npz", tmp_path / "q.onnx", Options(kernels="native", **asked))
    plan = (tmp_path / "q.plan.json").read_text()
    (tmp_path / "mine.json").write_text(_with_form(plan, Impl.DYNAMIC_NATIVE))
    made = quantize_model(
        tmp_path / "m.onnx", tmp_path / "d.npz", tmp_path / "p.onnx", Options(plan=tmp_path / "mine.json", **asked)
    )
    assert made.forms["dynamic native"] == 2
    assert made.native is not None
    assert made.native.units == 2
    names = [node.op_type for node in onnx.load(tmp_path / "p.onnx").graph.node if node.domain == NATIVE_DOMAIN]
    assert [name.split("_")[0] for name in names] == ["MatMul", "MatMul"]


def test_every_unit_that_writes_float_has_its_native_form_in_a_plan_of_native_products() -> None:
    before = [Impl.FLOAT, Impl.DYNAMIC, Impl.U8_FLOAT, Impl.U8, Impl.FLOAT]
    units = tuple(replace(UNIT, name=f"product{index}") for index in range(len(before)))
    plan = Plan(units, {unit.name: Choice(impl) for unit, impl in zip(units, before, strict=True)})
    forms = {unit.name: (Impl.FLOAT, Impl.DYNAMIC, Impl.DYNAMIC_NATIVE) for unit in units[:-1]} | {
        units[-1].name: (Impl.FLOAT,)
    }
    made = native_products_plan(forms, plan)
    assert [made.impl(unit) for unit in units] == [*[Impl.DYNAMIC_NATIVE] * 3, Impl.U8, Impl.FLOAT]
    every = native_products_plan(forms, plan, every=True)
    assert [every.impl(unit) for unit in units] == [*[Impl.DYNAMIC_NATIVE] * 4, Impl.FLOAT]


def _with_form(plan: str, form: Impl) -> str:
    """Return a plan file in which all products have a form."""
    read = json.loads(plan)
    for unit in read["units"].values():
        unit["implementation"] = form.value if unit["operator"] == "MatMul" else "float"
    return json.dumps(read)

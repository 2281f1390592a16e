"""Normalizations in several operators: each spelling against its native operator, and what stays as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from requant.calibration.model.session import Array
from requant.quantize.kernels.normalizations import wrap_normalizations

from ...native import needs_library
from .test_normalizations import model, run

pytestmark = needs_library
WIDTH = 8
CONSTANTS: Mapping[str, Array] = {
    "two": np.array(2, np.float32),
    "three": np.array(3, np.float32),
    "one": np.array(1, np.float32),
    "eps": np.array(1e-3, np.float32),
    "less": np.array(-1e-3, np.float32),
    "wide": np.full(WIDTH, 1e-3, np.float32),
    "last": np.array([-1]),
    "first": np.array([0]),
    "half": np.array(0.5, np.float32),
    "minus": np.array(-0.5, np.float32),
    "both": np.array([0, 1]),
    "gain": np.linspace(0.5, 2, WIDTH, dtype=np.float32),
    "row": np.linspace(0.5, 2, WIDTH, dtype=np.float32)[None],
    "deep": np.linspace(0.5, 2, WIDTH, dtype=np.float32)[None, None],
    "column": np.linspace(0.5, 2, 4, dtype=np.float32)[:, None],
}
SHAPES: Mapping[str, tuple[int | str, ...]] = dict.fromkeys("yz", (4, WIDTH))
POWER = "q = Pow(x, two) m = ReduceMean(q, last) e = Add(m, eps)"
ROOT = f"{POWER} r = Sqrt(e)"
CENTRED = "a = ReduceMean(x, last) d = Sub(x, a) q = Pow(d, two) m = ReduceMean(q, last) e = Add(m, eps) r = Sqrt(e)"
DIVIDED = f"{ROOT} y = Div(x, r)"


def chain(nodes: str, opset: int = 18, outputs: str = "float y") -> onnx.ModelProto:
    """Return a model of nodes with the constants that they read."""
    read = set(re.findall(r"\w+", nodes))
    used = {name: np.asarray(array) for name, array in CONSTANTS.items() if name in read}
    return model(nodes, used, opset, outputs, x=f"float[4,{WIDTH}] x")


def wrapped(proto: onnx.ModelProto, shapes: Mapping[str, tuple[int | str, ...]] | None = None) -> ir.Model:
    """Return a model with its normalizations in functions; tensors y and z have the shape of x."""
    made = ir.from_proto(proto)
    wrap_normalizations(made, SHAPES if shapes is None else shapes)
    return made


@pytest.mark.parametrize(
    ("nodes", "opset", "left"),
    [
        (DIVIDED, 18, []),
        (f"{ROOT} i = Reciprocal(r) y = Mul(x, i)", 18, []),
        (f"{ROOT} i = Div(one, r) y = Mul(i, x)", 18, []),
        (f"{ROOT} i = Reciprocal(r) z = Mul(x, i) y = Mul(gain, z)", 18, []),
        (f"{ROOT} z = Div(x, r) y = Mul(z, row)", 18, []),
        (f"{POWER} r = Pow(e, minus) z = Mul(x, r) y = Mul(z, gain)", 18, []),
        (f"{POWER} r = Pow(e, half) y = Div(x, r)", 18, []),
        (f"{POWER} r = Pow(e, half) i = Reciprocal(r) y = Mul(x, i)", 18, []),
        ("q = Mul(x, x) m = ReduceMean<axes = [-1]>(q) e = Add(eps, m) r = Sqrt(e) y = Div(x, r)", 17, []),
        ("q = Mul(x, x) m = ReduceMean<axes = [1]>(q) e = Add(eps, m) r = Sqrt(e) y = Div(x, r)", 17, []),
        # no gain: the factors belong to another axis, or more than the Mul reads the result
        (f"{ROOT} z = Div(x, r) y = Mul(z, column)", 18, ["Mul"]),
        (f"{ROOT} z = Div(x, r) y = Mul(z, deep)", 18, ["Mul"]),
        (f"{ROOT} z = Div(x, r) a = Mul(z, gain) y = Add(a, z)", 18, ["Mul", "Add"]),
        (f"{ROOT} z = Div(x, r) y = Mul(z, z)", 18, ["Mul"]),
    ],
)
def test_each_spelling_becomes_one_call_with_the_same_result(nodes: str, opset: int, left: list[str]) -> None:
    proto = chain(nodes, opset)
    made = wrapped(proto)
    assert [node.op_type for node in made.graph] == ["Normalization", *left]
    written = ir.to_proto(made)
    x = np.random.default_rng(0).normal(2, 1, (4, WIDTH)).astype(np.float32)
    (before,) = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    (without,) = ort.InferenceSession(written.SerializeToString()).run(None, {"x": x})
    # A sum of n squares is off by n roundings, its root by half of them, in both models; the other operators round at
    # most 6 times. The square, or the sum, behind some results makes it twice as much.
    off = 2 * (WIDTH + 2 * 6) * 2.0**-24
    np.testing.assert_allclose(without, before, rtol=off, atol=0)
    np.testing.assert_allclose(run(written, x), before, rtol=off, atol=0)


@pytest.mark.parametrize(
    ("nodes", "opset", "calls"),
    [
        (f"{CENTRED} y = Div(d, r)", 18, ["Normalization"]),
        (f"{CENTRED} z = Div(d, r) w = Mul(z, gain) y = Add(row, w)", 18, ["Normalization"]),
        (f"{CENTRED} c = Sub(x, a) z = Div(c, r) w = Mul(gain, z) y = Add(w, row)", 18, ["Normalization"]),
        (f"{CENTRED} i = Reciprocal(r) z = Mul(i, d) y = Mul(z, gain)", 18, ["Normalization"]),
        (
            CENTRED.replace("(x, last)", "<axes = [-1]>(x)").replace("(q, last)", "<axes = [1]>(q)") + " y = Div(d, r)",
            13,
            ["Normalization"],
        ),
        # a summand without a factor is no shift of the operator
        (f"{CENTRED} z = Div(d, r) y = Add(z, row)", 18, ["Normalization", "Add"]),
        # others read the distance, or the mean is of another axis: only the root of the mean square is one operator
        (f"{CENTRED} z = Div(d, r) y = Add(z, d)", 18, ["ReduceMean", "Sub", "Normalization", "Add"]),
        (CENTRED.replace("(x, last)", "(x, first)") + " y = Div(d, r)", 18, ["ReduceMean", "Sub", "Normalization"]),
    ],
)
def test_each_spelling_of_a_layer_norm_becomes_one_call(nodes: str, opset: int, calls: list[str]) -> None:
    proto = chain(nodes, opset)
    made = wrapped(proto)
    assert [node.op_type for node in made.graph] == calls
    written = ir.to_proto(made)
    x = np.random.default_rng(0).normal(2, 1, (4, WIDTH)).astype(np.float32)
    (before,) = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    (without,) = ort.InferenceSession(written.SerializeToString()).run(None, {"x": x})
    # The mean of n values is off by n roundings of the largest one. Behind the root that is this error over the
    # deviation, which the sum of squares, its root and the other operators add their own to; a gain is at most 2.
    largest, least = np.abs(x).max(), x.std(axis=-1).min()
    off = 2 * (2 * WIDTH + 12) * 2.0**-24 * largest / least * np.abs(before).max()
    np.testing.assert_allclose(without, before, rtol=0, atol=off)
    np.testing.assert_allclose(run(written, x), before, rtol=0, atol=off)


def test_normalizations_of_one_length_share_a_gain_of_ones() -> None:
    first, second = (re.sub(r"\b([qmer])\b", rf"\g<1>{place}", DIVIDED) for place in (1, 2))
    second = re.sub(r"\bx\b", "z", second)
    nodes = f"{first.replace('y =', 'z =')} {second.replace('y =', 'w =')} y = Neg(w)"
    made = wrapped(chain(nodes), dict.fromkeys("yzw", (4, WIDTH)))
    assert [node.op_type for node in made.graph] == ["Normalization", "Normalization", "Neg"]
    ones = [value for name, value in made.graph.initializers.items() if "ones" in name]
    assert len(ones) == 1
    assert len(ones[0].uses()) == 2
    assert len(made.functions) == 1


@pytest.mark.parametrize(
    "nodes",
    [
        DIVIDED.replace("two", "three"),
        DIVIDED.replace("last", "first"),
        DIVIDED.replace("last", "both"),
        DIVIDED.replace("eps", "less"),
        DIVIDED.replace("eps", "wide"),
        DIVIDED.replace("eps", "x"),
        DIVIDED.replace("Pow(x, two)", "Mul(x, two)"),
        f"{ROOT} y = Div(r, x)",
        f"{ROOT} y = Mul(x, r)",
        f"{POWER} r = Pow(e, half) y = Mul(x, r)",
        f"{POWER} r = Pow(e, minus) y = Div(x, r)",
        f"{POWER} r = Pow(two, e) y = Div(x, r)",
        f"{ROOT} i = Div(two, r) y = Mul(x, i)",
        f"{ROOT} i = Reciprocal(r) o = Neg(x) y = Mul(o, i)",
        f"{ROOT} i = Reciprocal(r) y = Neg(i)",
        f"{ROOT} z = Div(x, r) y = Add(z, r)",
        f"{ROOT} z = Div(x, r) y = Add(z, q)",
        DIVIDED.replace("(q, last)", "<keepdims = 0>(q, last)").replace("(m, eps)", "(m, column)"),
    ],
)
def test_other_operators_stay_as_they_are(nodes: str) -> None:
    proto = chain(nodes)
    made = wrapped(proto)
    assert [node.op_type for node in made.graph] == [node.op_type for node in proto.graph.node]
    assert not [name for name in made.graph.initializers if "ones" in name]


@pytest.mark.parametrize("inner", ["q", "m", "e", "r"])
def test_a_result_inside_that_is_an_output_stays(inner: str) -> None:
    assert not wrapped(chain(DIVIDED, outputs=f"float y, float {inner}")).functions


@pytest.mark.parametrize("shapes", [{}, {"y": (4, "n")}, {"y": ()}])
def test_a_length_that_is_not_known_stays(shapes: Mapping[str, tuple[int | str, ...]]) -> None:
    assert not wrapped(chain(DIVIDED), shapes).functions

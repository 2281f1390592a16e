"""Functions of one element between uint8 tensors: tables, and the lines of each channel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from requant.calibration.model.session import Array, open_session
from requant.quantize import Options, quantize_model
from requant.quantize.kernels.bent_lines import bent_lines_of
from requant.quantize.kernels.chains import Chain, table_of
from requant.quantize.kernels.wrap import wrap_units
from requant.transforms.int8.plan import Unit
from requant.transforms.patterns.elementwise import Place, channels_of

from ...native import needs_library, without_library
from .test_native import patient, session
from .test_wrap import model, outputs, with_library

RANDOM = np.random.default_rng(3)
NEAR = 1e-3
"""Steps: lines in float32 differ by at most some roundings of 2**-24 of 4,000 steps."""

# ------------------------------------------------------------------------------------------------------- the operator


@needs_library
@patient
@given(
    channels=st.sampled_from([1, 3, 8, 24, 64, 65, 100, 130, 4097]),
    rows=st.integers(0, 9),
    bounds=st.tuples(st.integers(0, 255), st.integers(0, 90), st.integers(120, 255)),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_lines_are_their_definition(
    channels: int, rows: int, bounds: tuple[int, int, int], threads: int, seed: int
) -> None:
    random, (bend, least, most) = np.random.default_rng(seed), bounds
    x = random.integers(0, 256, (rows, channels)).astype(np.uint8)
    lines = (random.normal(size=(3, channels)) * [[1], [1], [100]]).astype(np.float32)
    facts: dict[str, Any] = {"bend": bend, "least": least, "most": most}
    found = session("Lines", [x, lines], threads, **facts).run(None, {"x": x})[0]
    below, above, level = lines.astype(np.float64)
    away = x - float(bend)
    value = np.clip(below * np.minimum(away, 0) + above * np.maximum(away, 0) + level, least, most)
    assert (np.abs(found - value) <= 1 / 2 + NEAR).all()


@needs_library
@patient
@given(
    image=st.sampled_from([(1,), (70,), (5, 7), (3, 4, 5), (64, 3, 1), (2, 90, 91), (1, 128, 128), (3, 128, 256)]),
    rows=st.integers(0, 3),
    planes=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_slopes_of_each_element_are_factors(
    image: tuple[int, ...], rows: int, planes: bool, threads: int, seed: int
) -> None:
    """Images of one task, of several, and of a task and one element more; their channels first or last."""
    random = np.random.default_rng(seed)
    slopes, lines = random.normal(size=image), np.array([[0.7], [1.3], [100]], np.float32)
    shape = (*image[1:], image[0]) if planes else image
    x = random.integers(0, 256, (rows, *shape)).astype(np.uint8)
    facts: dict[str, Any] = {"bend": 120, "least": 20, "most": 230, "sloped": 1, "planes": int(planes)}
    found = session("Lines", [x, lines, slopes.astype(np.float32)], threads, **facts).run(None, {"x": x})[0]
    away, below = x - 120.0, 0.7 * (np.moveaxis(slopes, 0, -1) if planes else slopes)
    value = np.clip(below * np.minimum(away, 0) + 1.3 * np.maximum(away, 0) + 100, 20, 230)
    assert (np.abs(found - value) <= 1 / 2 + NEAR).all()


@needs_library
@pytest.mark.parametrize(
    ("lines", "slopes", "message"),
    [
        (np.zeros((3, 4), np.float32), np.zeros((2, 4), np.float32), "beside lines of shape"),
        (np.zeros((3, 1), np.float32), np.zeros((), np.float32), "beside lines of shape"),
        (np.zeros((3, 1), np.float32), np.zeros((0, 4), np.float32), "beside lines of shape"),
        (np.zeros((3, 1), np.float32), np.zeros((2, 4), np.uint8), "slopes must be float"),
        (np.ones((3, 1), np.float32), np.full((2, 4), np.nan, np.float32), "too steep"),
        (np.ones((3, 1), np.float32), np.ones((4, 2), np.float32), "slopes for each element"),
    ],
)
def test_slopes_that_are_none_are_refused(lines: Array, slopes: Array, message: str) -> None:
    x = np.zeros((3, 2, 4), np.uint8)
    with pytest.raises(Exception, match=message):
        session("Lines", [x, lines, slopes], sloped=1).run(None, {"x": x})


@needs_library
@pytest.mark.parametrize(
    ("lines", "facts", "message"),
    [
        (np.zeros((2, 4), np.float32), {}, r"must be a constant of shape \(3, C\)"),
        (np.zeros((3, 0), np.float32), {}, r"must be a constant of shape \(3, C\)"),
        (np.full((3, 4), np.nan, np.float32), {}, "too steep"),
        (np.full((3, 4), 1e9, np.float32), {}, "too steep"),
        (np.zeros((3, 4), np.float32), {"bend": 256}, "must be uint8"),
        (np.zeros((3, 4), np.float32), {"least": -1}, "must be uint8"),
    ],
)
def test_lines_that_are_none_are_refused(lines: Array, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        session("Lines", [np.zeros((2, 4), np.uint8), lines], **facts)


@needs_library
def test_lines_of_another_number_of_channels_are_refused() -> None:
    x = np.zeros((2, 3), np.uint8)
    with pytest.raises(Exception, match="lines for each index"):
        session("Lines", [x, np.zeros((3, 4), np.float32)]).run(None, {"x": x})


# ----------------------------------------------------------------------------------------------------- what they are

CHANNELS = 5
PLACE = Place(4, 1)
VALUES: dict[str, Array] = {
    "slope": RANDOM.uniform(-0.5, 2, (CHANNELS, 1, 1)).astype(np.float32),
    "slopes": np.random.default_rng(4).uniform(-1, 2, (CHANNELS, 32, 32)).astype(np.float32),
    "gamma": RANDOM.uniform(-2, 2, CHANNELS).astype(np.float32),
    "beta": RANDOM.uniform(-1, 1, CHANNELS).astype(np.float32),
    "mean": RANDOM.uniform(-1, 1, CHANNELS).astype(np.float32),
    "variance": RANDOM.uniform(0.3, 1, CHANNELS).astype(np.float32),
    "six": np.asarray(6, np.float32),
    "zero": np.asarray(0, np.float32),
    "half": np.asarray(0.5, np.float32),
    "rows": np.ones((6, 1), np.float32),
    "whole": np.ones((1, 1, 1, 1, 1), np.float32),
}
BENT = {
    "PRelu": "g = PRelu(d, slope)",
    "norm": "g = BatchNormalization(d, gamma, beta, mean, variance)",
    "norm and Relu": "f = BatchNormalization(d, gamma, beta, mean, variance) g = Relu(f)",
    "norm and Clip": "f = BatchNormalization(d, gamma, beta, mean, variance) g = Clip(f, zero, six)",
    "a product": "g = Mul(d, slope)",
}
CURVED = {
    "norm and Tanh": "f = BatchNormalization(d, gamma, beta, mean, variance) g = Tanh(f)",
    "norm and PRelu": "f = BatchNormalization(d, gamma, beta, mean, variance) g = PRelu(f, slope)",
}


def chain(nodes: str, x_scale: float, x_zero: int, y_scale: float, y_zero: int) -> tuple[ir.Model, Chain]:
    """Return a model of a function of each channel between uint8 tensors, and the function."""
    text = f"""<ir_version: 10, opset_import: ["" : 22]>
    g (uint8[N,{CHANNELS},H,W] q) => (uint8[N,{CHANNELS},H,W] r) {{
        d = DequantizeLinear(q, s, z) {nodes} r = QuantizeLinear(g, p, m) }}"""
    proto = onnx.parser.parse_model(text)
    given = {
        **VALUES,
        "s": np.asarray(x_scale, np.float32),
        "z": np.asarray(x_zero, np.uint8),
        "p": np.asarray(y_scale, np.float32),
        "m": np.asarray(y_zero, np.uint8),
    }
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(numpy_helper.from_array(given[name], name) for name in given if name in read)
    made = ir.from_proto(proto)
    return made, Chain(made.graph.inputs[0], tuple(made.graph), CHANNELS, PLACE)


def computed(made: ir.Model) -> Array:
    """Return what the runtime computes of all values in all channels, (C, 256)."""
    q = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None, None], (256, CHANNELS, 1, 1))
    session_of = without_library(made)
    found: Array = session_of.run(None, {"q": np.ascontiguousarray(q)})[0].reshape(256, CHANNELS).T
    return found


@given(
    nodes=st.sampled_from(list(BENT.values())),
    x_zero=st.integers(0, 255),
    scales=st.tuples(st.floats(0.005, 0.05), st.floats(0.005, 0.05)),
    y_zero=st.sampled_from([0, 90, 255]),
)
def test_lines_give_exactly_the_table(nodes: str, x_zero: int, scales: tuple[float, float], y_zero: int) -> None:
    made, function = chain(nodes, scales[0], x_zero, scales[1], y_zero)
    table = table_of(made, function)
    np.testing.assert_array_equal(table, computed(made))
    lines = bent_lines_of(made, function)
    if lines is not None:  # seldom: a value in the middle between two integers in every way
        np.testing.assert_array_equal(lines(), table)


@pytest.mark.parametrize("nodes", BENT.values(), ids=BENT)
def test_functions_of_two_lines_have_lines(nodes: str) -> None:
    made, function = chain(nodes, 0.031, 127, 0.043, 0 if "Relu(f)" in nodes or "Clip" in nodes else 101)
    lines = bent_lines_of(made, function)
    assert lines is not None
    assert (lines.lines.shape, lines.bend) == ((3, CHANNELS), 127)
    np.testing.assert_array_equal(lines(), computed(made))


@pytest.mark.parametrize("nodes", CURVED.values(), ids=CURVED)
def test_other_functions_have_none(nodes: str) -> None:
    made, function = chain(nodes, 0.031, 127, 0.01, 127)
    assert bent_lines_of(made, function) is None
    np.testing.assert_array_equal(table_of(made, function), computed(made))


KNOWN = [
    ("b = Elu(a)", PLACE, 1),
    ("b = Mul(a, half)", None, 1),
    ("b = PRelu(a, slope)", PLACE, CHANNELS),
    ("b = PRelu(a, slope)", None, 0),
    ("b = PRelu(a, rows)", PLACE, 0),
    ("b = Mul(a, slope)", Place(4, 3), 0),
    ("b = Mul(a, whole)", PLACE, 0),  # one more axis
    ("b = BatchNormalization(a, gamma, beta, mean, variance)", PLACE, CHANNELS),
    ("b = BatchNormalization(a, gamma, beta, mean, variance)", Place(4, 3), 0),
    ("b = BatchNormalization <training_mode = 1> (a, gamma, beta, mean, variance)", PLACE, 0),
    ("b = Softmax(a)", PLACE, 0),
    ("b = com.microsoft.Gelu(a)", PLACE, 0),
]


@pytest.mark.parametrize(("text", "place", "count"), KNOWN)
def test_what_is_a_function_of_one_element(text: str, place: Place | None, count: int) -> None:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 22, "com.microsoft" : 1]> g (float[N,5,H,W] a) => (float[N,5,H,W] b) {{ {text} }}'
    )
    proto.graph.initializer.extend(numpy_helper.from_array(VALUES[name], name) for name in VALUES if name in text)
    (node,) = ir.from_proto(proto).graph
    assert channels_of(node, place) == count


# -------------------------------------------------------------------------------------------------------- in the model

BETWEEN = """g (float[N,3,9,8] x) => (float[N,4,5,4] y) {{
    q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
    v = DequantizeLinear <axis = 0> (w, t, n)  e = DequantizeLinear <axis = 0> (b, u)
    [conv] c = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (d, v, e)
    c8 = QuantizeLinear(c, h4, m)  c9 = DequantizeLinear(c8, h4, m)
    {nodes}
    r = QuantizeLinear(g, p, m)  y = DequantizeLinear(r, p, m)
}}"""
FUNCTIONS = {
    **{op: f"[one] g = {op}(c9)" for op in "Elu HardSwish Relu Selu Softplus Softsign Tanh Celu".split()},
    "Clip": "[one] g = Clip(c9, half, six)",
    "Mish": "[one] i = Softplus(c9) [two] j = Tanh(i) [three] g = Mul(c9, j)",
    "PRelu": "[one] g = PRelu(c9, slope)",
    "norm": "[one] f = BatchNormalization(c9, gamma, beta, mean, variance) [two] g = Relu(f)",
}
OTHERS = {
    "h4": np.asarray(0.04, np.float32),
    **{name: VALUES[name] for name in ("half", "six")},
    "slope": VALUES["slope"][:4],
    **{name: VALUES[name][:4] for name in ("gamma", "beta", "mean", "variance")},
}


@needs_library
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_becomes_a_table_with_the_same_results(name: str, join: bool) -> None:
    text = BETWEEN.format(nodes=FUNCTIONS[name])
    feed = {"x": np.random.default_rng(1).normal(0, 2, (2, 3, 9, 8)).astype(np.float32)}
    expected, made = outputs(without_library(model(text, **OTHERS)), feed), model(text, **OTHERS)
    inside = tuple(word for word in ("one", "two", "three") if f"[{word}]" in text)
    shape = ("N", 4, 5, 4)
    both = [
        Unit(name="conv", op="Conv", nodes=("conv",), inputs=("x",), outputs=("c",)),
        Unit(name=inside[-1], op=name, nodes=inside, inputs=("c",), outputs=("g",)),
    ]
    wrap_units(made, both, {"x": ("N", 3, 9, 8), "c": shape, "g": shape}, join=join, exact=True)
    alone = "Lines" if name in ("PRelu", "norm") else "" if join else "Table"
    assert [node.op_type for node in made.graph if node.domain] == ["Convolution", *filter(None, [alone])]
    for run in (without_library(made), with_library(made), with_library(made, optimize=True)):
        np.testing.assert_array_equal(outputs(run, feed)[0], expected[0])


NATIVE = {"Quantize", "Convolution", "Add", "Table", "Lines", "DequantizeLinear"}


@needs_library
@pytest.mark.parametrize(
    "nodes",
    [
        "b = Mish(a)",
        pytest.param("s = HardSigmoid(a) b = Add(s, a)", marks=pytest.mark.slow),
        "b = PRelu(a, slope)",
        "r = Relu(a) m = Clip(a, , zero) p = Mul(m, slope) b = Add(r, p)",
        "r = Relu(a) n = Neg(a) m = Relu(n) p = Mul(m, slopes) b = Add(r, p)",
        pytest.param("n = BatchNormalization(a, gamma, beta, mean, variance) b = Relu(n)", marks=pytest.mark.slow),
    ],
)
def test_functions_between_convolutions_of_a_model_are_native(nodes: str, tmp_path: Path) -> None:
    """What comes before a norm of batches is a sum, into which it cannot be folded."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 22]> g (float[1,3,32,32] x) => (float[1,5,30,30] y) {{
        c = Conv <pads = [1,1,1,1]> (x, v) k = Relu(c) a = Add(c, k) {nodes} y = Conv(b, w) }}"""
    )
    random = np.random.default_rng(0)
    weights = {
        "v": random.normal(0, 0.3, (CHANNELS, 3, 3, 3)).astype(np.float32),
        "w": random.normal(0, 0.2, (5, CHANNELS, 3, 3)).astype(np.float32),
    }
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in (VALUES | weights).items() if name in read
    )
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=random.normal(size=(16, 3, 32, 32)).astype(np.float32))
    asked: dict[str, Any] = {"seconds": 0.05, "force_int8": True, "effort": "low", "force": True}
    path, data = tmp_path / "q.onnx", tmp_path / "d.npz"
    quantize_model(tmp_path / "m.onnx", data, path, Options(kernels="native", **asked))
    plan = json.loads((tmp_path / "q.plan.json").read_text())
    for unit in plan["units"].values():  # what is faster here is for the clock to decide
        unit["implementation"] = "u8->u8 native"
    (tmp_path / "mine.json").write_text(json.dumps(plan))
    made = quantize_model(tmp_path / "m.onnx", data, path, Options(plan=tmp_path / "mine.json", **asked))
    assert made.forms == {"u8->u8 native": len(plan["units"])}
    assert {node.op_type.partition("_")[0] for node in onnx.load(path).graph.node} <= NATIVE | {"Transpose"}
    x = np.load(tmp_path / "d.npz")["x"][:1]
    found, wanted = (open_session(tmp_path / name).run(None, {"x": x})[0] for name in ("q.onnx", "m.onnx"))
    assert np.square(found - wanted).mean() < 1e-2 * np.square(wanted).mean()


@needs_library
def test_a_function_that_adds_axes_is_no_table(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[1,16,8,8] x) => (float[1,1,16,8,8] y) <float[1,1,1,1,1] c = {0.3}> {
      a = Conv<pads = [1, 1, 1, 1]>(x, w)
      s = HardSigmoid(a)
      h = Mul(a, s)
      y = Mul(h, c)
    }"""
    proto, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    weights = random.normal(0, 0.1, (16, 16, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    data = [{"x": random.normal(size=(1, 16, 8, 8)).astype(np.float32)} for _ in range(16)]
    options = Options(kernels="native", effort="low", force_int8=True)
    found = quantize_model(tmp_path / "m.onnx", data, tmp_path / "q.onnx", options)
    assert found.int8_nodes
    assert found.accuracy.worst_sqnr_db > 20  # -inf if the shapes differ

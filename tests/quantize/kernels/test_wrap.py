"""Functions of native operators: the same results with the library, without it, and before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from requant import NATIVE_DOMAIN, RequantError
from requant.calibration.model.session import OPERATORS, Array, open_session
from requant.quantize import Options, quantize_model
from requant.quantize.kernels.curves import LARGEST
from requant.quantize.kernels.library import kernels
from requant.quantize.kernels.nodes import OMITTED
from requant.quantize.kernels.wrap import drop_inner_rounding, wrap_units
from requant.transforms.inline_functions import inline_functions
from requant.transforms.int8.ops import GROUP_NORM
from requant.transforms.int8.plan import Unit

from ...native import needs_library, without_library

ROOT = Path(__file__).parents[3]
DIGITS = ROOT / "sample_models/digits_mobile.onnx"
DATA = f"{ROOT / 'sample_models/digits.npz'}:calib"

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
CONV = """g (float[N,3,9,8] x) => (float[N,4,5,4] y) {{
    q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
    v = DequantizeLinear <axis = 0> (w, t, n)  e = DequantizeLinear <axis = 0> (b, u)
    [conv] c = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (d, v, e)
    {middle}
    r = QuantizeLinear({last}, p, m)  y = DequantizeLinear(r, p, m)
}}"""
SILU = """g (float[N,3,4] x) => (float[N,3,4] y) {
    q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
    [sigmoid] f = Sigmoid(d)
    g = QuantizeLinear(f, h, n8)  i = DequantizeLinear(g, h, n8)
    [silu] j = Mul(d, i)
    r = QuantizeLinear(j, p, m)  y = DequantizeLinear(r, p, m)
}"""
RANDOM = np.random.default_rng(0)
CONSTANTS: Mapping[str, Array] = {
    "s": np.asarray(0.03, np.float32),
    "z": np.asarray(117, np.uint8),
    "w": RANDOM.integers(-63, 64, (4, 3, 3, 3)).astype(np.int8),
    "t": RANDOM.uniform(0.01, 0.02, 4).astype(np.float32),
    "n": np.zeros(4, np.int8),
    "b": RANDOM.integers(-500, 500, 4).astype(np.int32),
    "p": np.asarray(0.05, np.float32),
    "m": np.asarray(30, np.uint8),
    "h": np.asarray(1 / 256, np.float32),
    "n8": np.asarray(0, np.uint8),
    "zero": np.asarray(0, np.float32),
    "six": np.asarray(6, np.float32),
}
CONSTANTS = {**CONSTANTS, "u": CONSTANTS["s"] * CONSTANTS["t"]}


def model(text: str, **other: Array) -> ir.Model:
    """Return a model from ONNX text with the constants that it reads."""
    proto = onnx.parser.parse_model(HEAD + text)
    read = {name for node in proto.graph.node for name in node.input}
    known = {**CONSTANTS, **other}
    proto.graph.initializer.extend(numpy_helper.from_array(known[name], name) for name in known if name in read)
    return ir.from_proto(proto)


def with_library(source: ir.Model | Path, *, optimize: bool = False) -> ort.InferenceSession:
    data = source if isinstance(source, Path) else ir.to_proto(source).SerializeToString()
    return open_session(data, threads=1, optimize=optimize)


def outputs(session: ort.InferenceSession, feed: Mapping[str, Array]) -> list[Array]:
    return [np.asarray(each) for each in session.run(None, dict(feed))]


MIDDLES = {
    "nothing": ("", "c", ("conv",)),
    "relu": ("[relu] a = Relu(c)", "a", ("conv", "relu")),
    "clip": ("[clip] a = Clip(c, zero, six)", "a", ("conv", "clip")),
}


SHIFTED = {"w": CONSTANTS["w"] - np.int8(1), "n": np.full(4, -1, np.int8)}
"""The same weights with the zero point -1, with which the runtime computes a matrix product."""


@needs_library
@pytest.mark.parametrize("weights", [{}, SHIFTED], ids=["plain", "shifted"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("middle", "last", "nodes"), MIDDLES.values(), ids=MIDDLES)
def test_a_convolution_becomes_a_function(
    middle: str, last: str, nodes: tuple[str, ...], bias: bool, weights: dict[str, Array]
) -> None:
    text = CONV.format(middle=middle, last=last)
    text = text if bias else text.replace("(d, v, e)", "(d, v)")
    feed = {"x": np.random.default_rng(1).normal(0, 2, (2, 3, 9, 8)).astype(np.float32)}
    expected, made = outputs(without_library(model(text)), feed), model(text, **weights)
    unit = Unit(name="conv", op="Conv", nodes=nodes, inputs=("x",), outputs=(last,))
    assert wrap_units(made, [unit], {"x": ("N", 3, 9, 8), last: ("N", 4, 5, 4)}) == 1
    assert [node.op_type for node in made.graph].count("Convolution") == 1
    assert "Conv" not in {node.op_type for node in made.graph}
    (key,) = made.functions
    assert key == (NATIVE_DOMAIN, "Convolution", "")
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    for session in (without_library(made), with_library(made), with_library(made, optimize=True)):
        np.testing.assert_array_equal(outputs(session, feed)[0], expected[0])


@needs_library
def test_a_model_for_operators_of_another_version_runs_by_its_bodies() -> None:
    """In the first version nodes omitted inputs, which those of this one refuse."""
    middle, last, nodes = MIDDLES["clip"]
    made = model(CONV.format(middle=middle, last=last).replace("(d, v, e)", "(d, v)"))
    feed = {"x": np.random.default_rng(1).normal(0, 2, (2, 3, 9, 8)).astype(np.float32)}
    expected = outputs(without_library(made), feed)
    unit = Unit(name="conv", op="Conv", nodes=nodes, inputs=("x",), outputs=(last,))
    wrap_units(made, [unit], {"x": ("N", 3, 9, 8), last: ("N", 4, 5, 4)})
    (node,) = (node for node in made.graph if node.domain == NATIVE_DOMAIN)
    for place in [place for place, value in enumerate(node.inputs) if value is not None and value.name == OMITTED]:
        node.replace_input_with(place, None)
    with pytest.raises(RequantError, match="is absent"):
        with_library(made)
    made.opset_imports[NATIVE_DOMAIN] = 1
    np.testing.assert_array_equal(outputs(with_library(made), feed)[0], expected[0])


@needs_library
def test_a_gate_becomes_a_table_with_the_same_results() -> None:
    made = model(SILU)
    feed = {"x": np.random.default_rng(1).normal(0, 2, (2, 3, 4)).astype(np.float32)}
    expected = outputs(without_library(made), feed)
    unit = Unit(name="silu", op="gate", nodes=("sigmoid", "silu"), inputs=("x",), outputs=("j",))
    assert wrap_units(made, [unit], {"x": ("N", 3, 4), "j": ("N", 3, 4)}) == 1
    assert [node.op_type for node in made.graph] == ["QuantizeLinear", "Table", "DequantizeLinear"]
    for session in (without_library(made), with_library(made)):
        np.testing.assert_array_equal(outputs(session, feed)[0], expected[0])


MEAN = """g (float[N,3,9,8] x) => (float[N,3,{rows},{columns}] y) {{
    q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
    [mean] a = {op}(d)
    r = QuantizeLinear(a, p, m)  y = DequantizeLinear(r, p, m)
}}"""
MEANS = {
    "global": ("GlobalAveragePool", (1, 1)),
    "pool": ("AveragePool <kernel_shape = [3, 2], strides = [2, 2], pads = [1, 0, 1, 0]>", (5, 4)),
    "with padding": ("AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], count_include_pad = 1>", (9, 8)),
    "ceil": ("AveragePool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1>", (4, 4)),
    "longer than the image": ("AveragePool <kernel_shape = [11, 9], strides = [4, 2]>", (1, 1)),
    "longer, ceil": ("AveragePool <kernel_shape = [11, 9], strides = [4, 2], ceil_mode = 1>", (1, 1)),
}


@needs_library
@pytest.mark.parametrize(("op", "lengths"), MEANS.values(), ids=MEANS)
def test_a_mean_becomes_a_function(op: str, lengths: tuple[int, int]) -> None:
    made = model(MEAN.format(op=op, rows=lengths[0], columns=lengths[1]))
    feed = {"x": np.random.default_rng(1).normal(0, 2, (2, 3, 9, 8)).astype(np.float32)}
    expected = outputs(without_library(made), feed)
    name = op.split()[0]
    unit = Unit(name="mean", op=name, nodes=("mean",), inputs=("x",), outputs=("a",))
    assert wrap_units(made, [unit], {"x": ("N", 3, 9, 8), "a": ("N", 3, *lengths)}) == 1
    assert [node.op_type for node in made.graph if node.domain] == [name]
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    np.testing.assert_array_equal(outputs(without_library(made), feed)[0], expected[0])
    # the body rounds the sum of float values, the operator the sum of integers: they may differ by one step
    step = 1.001 * float(CONSTANTS["p"])
    np.testing.assert_allclose(outputs(with_library(made), feed)[0], expected[0], rtol=0, atol=step)


GATED = CONV.format(
    middle="""r = QuantizeLinear(c, p, m)  k = DequantizeLinear(r, p, m)
    [sigmoid] f = Sigmoid(k)  g = QuantizeLinear(f, h, n8)  i = DequantizeLinear(g, h, n8)
    [silu] j = Mul(k, i)""",
    last="j",
).replace(
    "r = QuantizeLinear(j, p, m)  y = DequantizeLinear(r, p, m)",
    "o = QuantizeLinear(j, p, m)  y = DequantizeLinear(o, p, m)",
)
UNITS = [
    Unit(name="conv", op="Conv", nodes=("conv",), inputs=("x",), outputs=("c",)),
    Unit(name="silu", op="gate", nodes=("sigmoid", "silu"), inputs=("c",), outputs=("j",)),
]
SHAPES = {"x": ("N", 3, 9, 8), "c": ("N", 4, 5, 4), "j": ("N", 4, 5, 4)}


@needs_library
def test_a_convolution_and_its_gate_become_one_call_that_rounds_once() -> None:
    made, apart = model(GATED), model(GATED)
    feed = {"x": np.random.default_rng(1).normal(0, 2, (2, 3, 9, 8)).astype(np.float32)}
    expected = outputs(without_library(made), feed)[0]
    exact = model(GATED)
    assert wrap_units(made, UNITS, SHAPES, join=True) == 1
    assert wrap_units(exact, UNITS, SHAPES, join=True, exact=True) == 1
    assert wrap_units(apart, UNITS, SHAPES) == 2
    for one in (made, exact):
        assert [node.op_type for node in one.graph if node.domain] == ["Convolution"]
    assert [node.op_type for node in apart.graph if node.domain] == ["Convolution", "Table"]
    same_results = (without_library(made), without_library(apart), with_library(apart), with_library(exact))
    for same in same_results:
        np.testing.assert_array_equal(outputs(same, feed)[0], expected)
    x = np.clip(np.rint(feed["x"] / CONSTANTS["s"]) + 117, 0, 255) - 117
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::2, ::2]
    sums = np.einsum("nchwij,ocij->nohw", windows, CONSTANTS["w"].astype(np.int64))
    real = (sums + CONSTANTS["b"].reshape(1, -1, 1, 1)) * CONSTANTS["u"].reshape(1, -1, 1, 1).astype(np.float64)
    clipped = np.clip(real, -30 * 0.05, 225 * 0.05)
    exact_values = np.clip(clipped / (1 + np.exp(-clipped)), -30 * 0.05, 225 * 0.05)
    fused = outputs(with_library(made), feed)[0]
    # half a step behind the function, and what the curve differs from it
    assert np.abs(fused - exact_values).max() <= 0.05 * (1 / 2 + LARGEST) + 1e-6
    assert np.square(fused - exact_values).mean() < 0.8 * np.square(expected - exact_values).mean()


@needs_library
def test_pairs_at_which_joined_calls_do_not_round_are_dropped() -> None:
    """What corrections are learned on computes what the joined operator computes, up to ties and the curve."""
    plain, joined = model(GATED), model(GATED)
    assert drop_inner_rounding(plain, UNITS[:1], SHAPES) == 0
    assert drop_inner_rounding(plain, UNITS, SHAPES) == 2
    assert [node.op_type for node in plain.graph].count("QuantizeLinear") == 2  # the input and the result
    assert wrap_units(joined, UNITS, SHAPES, join=True) == 1
    feed = {"x": np.random.default_rng(1).normal(0, 1, (8, 3, 9, 8)).astype(np.float32)}
    difference = np.abs(outputs(without_library(plain), feed)[0] - outputs(with_library(joined), feed)[0])
    assert difference.max() <= 1.001 * float(CONSTANTS["p"])
    assert (difference > 0).mean() <= 2 * LARGEST  # a difference of LARGEST steps moves so many results to the next one


NORMED = """g (float[N,3,9,8] x) => (float[N,3,9,8] y) {
    q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
    [norm] c0 = InstanceNormalization(d, gains, shifts)  [clip] c = Clip(c0, low, high)
    r = QuantizeLinear(c, p, m)  k = DequantizeLinear(r, p, m)
    [sigmoid] f = Sigmoid(k)  g = QuantizeLinear(f, h, n8)  i = DequantizeLinear(g, h, n8)
    [silu] j = Mul(k, i)
    o = QuantizeLinear(j, p, m)  y0 = DequantizeLinear(o, p, m)
    y = Conv(y0, eye)
}"""
NORM_UNITS = [Unit(name="norm", op=GROUP_NORM, nodes=("norm", "clip"), inputs=("x",), outputs=("c",)), UNITS[1]]
NORM_SHAPES = dict.fromkeys("xcj", ("N", 3, 9, 8))
GAINS = {
    "gains": np.array([1, -2, 1.5], np.float32),
    "shifts": np.array([0.5, 0, 1], np.float32),
    "eye": np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1),
    "low": np.asarray(-2, np.float32),  # below the least value of a byte
    "high": np.asarray(20, np.float32),
}


@needs_library
def test_a_group_norm_and_its_gate_become_one_call_that_rounds_once() -> None:
    made, apart, plain = (model(NORMED, **GAINS) for _ in range(3))
    feed = {"x": np.random.default_rng(1).normal(0, 1, (8, 3, 9, 8)).astype(np.float32)}
    expected = outputs(without_library(made), feed)[0]
    assert wrap_units(made, NORM_UNITS, NORM_SHAPES, join=True) == 1
    assert wrap_units(apart, NORM_UNITS, NORM_SHAPES) == 2
    assert drop_inner_rounding(plain, NORM_UNITS, NORM_SHAPES) == 2
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    assert [node.op_type for node in made.graph if node.domain] == ["GroupNormalization"]
    assert [node.op_type for node in apart.graph if node.domain] == ["GroupNormalization", "Table"]
    np.testing.assert_array_equal(outputs(without_library(made), feed)[0], expected)
    once, fused = (outputs(session, feed)[0] for session in (without_library(plain), with_library(made)))
    assert np.abs(once - fused).max() <= 1.001 * float(CONSTANTS["p"])
    assert (once != fused).mean() <= 2 * LARGEST < (once != expected).mean()


@needs_library
def test_a_function_behind_bounds_stays_apart() -> None:
    made = model(NORMED, **{**GAINS, "high": np.asarray(3, np.float32)})
    assert wrap_units(made, NORM_UNITS, NORM_SHAPES, join=True) == 2


POOL = """g (float[N,3,9,8] x) => (float[N,3,4,4] y) {
    q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
    [pool] a = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [0, 1, 0, 0], ceil_mode = 1> (d)
    r = QuantizeLinear(a, s, z)  y = DequantizeLinear(r, s, z)
}"""


@needs_library
def test_a_maximum_becomes_a_function() -> None:
    made = model(POOL)
    feed = {"x": np.random.default_rng(1).normal(0, 2, (2, 3, 9, 8)).astype(np.float32)}
    expected = outputs(without_library(made), feed)
    unit = Unit(name="pool", op="MaxPool", nodes=("pool",), inputs=("x",), outputs=("a",))
    assert wrap_units(made, [unit], {"x": ("N", 3, 9, 8), "a": ("N", 3, 4, 4)}) == 1
    assert [node.op_type for node in made.graph if node.domain] == ["MaxPool"]
    for session in (without_library(made), with_library(made)):
        np.testing.assert_array_equal(outputs(session, feed)[0], expected[0])


PAIR = """g (float[N,3,9,8] x, float[{b}] x2) => (float[N,3,9,8] y) {{
    q = QuantizeLinear(x, s, z)    d = DequantizeLinear(q, s, z)
    q2 = QuantizeLinear(x2, p, m)  d2 = DequantizeLinear(q2, p, m)
    [pair] c = {op}({order})
    {relu}
    r = QuantizeLinear({last}, o, n8)  y0 = DequantizeLinear(r, o, n8)
    y = Conv (y0, k)
}}"""
RELU = {"nothing": ("", "c", ("pair",)), "relu": ("[relu] a = Clip(c, zero, six)", "a", ("pair", "relu"))}


@needs_library
@pytest.mark.parametrize(
    ("op", "order", "b"),
    [
        ("Add", "d, d2", ("N", 3, 9, 8)),
        ("Mul", "d2, d", ("N", 3, 9, 8)),
        ("Mul", "d, d2", ("N", 3, 1, 1)),
        ("Add", "d2, d", (1, 3, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("relu", "last", "nodes"), RELU.values(), ids=RELU)
def test_a_sum_and_a_product_become_functions(
    op: str, order: str, b: tuple[Any, ...], relu: str, last: str, nodes: tuple[str, ...]
) -> None:
    more = {"k": np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1), "o": np.asarray(0.0613, np.float32)}
    made = model(PAIR.format(op=op, order=order, b=",".join(map(str, b)), relu=relu, last=last), **more)
    random = np.random.default_rng(1)
    lengths = [2 if axis == "N" else axis for axis in b]
    feed = {"x": random.normal(0, 2, (2, 3, 9, 8)), "x2": random.normal(0, 4, lengths)}
    feed = {name: value.astype(np.float32) for name, value in feed.items()}
    expected = outputs(without_library(made), feed)[0]
    names = ("x", "x2") if order == "d, d2" else ("x2", "x")
    unit = Unit(name="pair", op=op, nodes=nodes, inputs=names, outputs=(last,))
    assert wrap_units(made, [unit], {"x": ("N", 3, 9, 8), "x2": b, last: ("N", 3, 9, 8)}) == 1
    assert [node.op_type for node in made.graph if node.domain] == [op]
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    np.testing.assert_array_equal(outputs(without_library(made), feed)[0], expected)
    # the body rounds products of scales, the operator their ratios: at a half, they may go different ways
    found = outputs(with_library(made), feed)[0]
    assert np.abs(found - expected).max() <= 1.001 * 0.0613
    assert (found != expected).mean() < 0.01


@pytest.mark.parametrize("b", [(3, 9, 8), ("N", 3, 9, 1), ("M", 3, 1, 1), ("N", 1, 1, 1), ("N", None, 1, 1)], ids=str)
def test_sums_of_other_shapes_are_left_alone(b: tuple[Any, ...]) -> None:
    made = model(
        PAIR.format(op="Add", order="d, d2", b=",".join(str(n or "K") for n in b), relu="", last="c"),
        k=np.zeros((3, 3, 1, 1), np.float32),
        o=np.asarray(0.0613, np.float32),
    )
    unit = Unit(name="pair", op="Add", nodes=("pair",), inputs=("x", "x2"), outputs=("c",))
    assert wrap_units(made, [unit], {"x": ("N", 3, 9, 8), "x2": b, "c": ("N", 3, 9, 8)}) == 0


CONCAT = """g (float[N,3,9,8] x, float[N,2,9,8] x2) => (float[N,{count},9,8] y) {{
    q = QuantizeLinear(x, s, z)    d = DequantizeLinear(q, s, z)
    q2 = QuantizeLinear(x2, p, m)  d2 = DequantizeLinear(q2, p, m)
    q3 = QuantizeLinear(x, o, n8)  d3 = DequantizeLinear(q3, o, n8)
    d4 = DequantizeLinear(zeros, p, m)
    [join] c = Concat <axis = 1> ({order})
    r = QuantizeLinear(c, p, m)    y0 = DequantizeLinear(r, p, m)
    y = Conv (y0, k)
}}"""


@needs_library
@pytest.mark.parametrize(("order", "count"), [("d, d2", 5), ("d2, d3, d", 8), ("d, d4, d2", 7)])
def test_a_concatenation_becomes_a_function_with_the_same_results(order: str, count: int) -> None:
    more = {"k": np.eye(count, dtype=np.float32).reshape(count, count, 1, 1), "o": np.asarray(0.06, np.float32)}
    more["zeros"] = np.full((2, 2, 9, 8), 7, np.uint8)  # a constant, as where channels are padded
    made = model(CONCAT.format(order=order, count=count), **more)
    random = np.random.default_rng(1)
    feed = {name: random.normal(0, 3, (2, rows, 9, 8)).astype(np.float32) for name, rows in {"x": 3, "x2": 2}.items()}
    expected = outputs(without_library(made), feed)[0]
    inputs = ("x2", "x3", "x") if count == 8 else ("x", "x2")
    unit = Unit(name="join", op="Concat", nodes=("join",), inputs=inputs, outputs=("c",))
    shapes = {"x": ("N", 3, 9, 8), "x2": ("N", 2, 9, 8), "x3": ("N", 3, 9, 8), "c": ("N", count, 9, 8)}
    for lost in (*inputs, "c"):  # with a constant, the others would stand in its place
        assert wrap_units(made, [unit], {name: each for name, each in shapes.items() if name != lost}) == 0
    assert wrap_units(made, [unit], shapes) == 1
    assert [node.op_type for node in made.graph if node.domain] == ["Concat"]
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    for session in (without_library(made), with_library(made), with_library(made, optimize=True)):
        np.testing.assert_array_equal(outputs(session, feed)[0], expected)


RESIDUAL = """g (float[N,4,9,8] x) => (float[N,4,9,8] y) {{
    q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
    v = DequantizeLinear <axis = 0> (w4, t, n)  e = DequantizeLinear <axis = 0> (b, u)
    [conv] c = Conv <pads = [1, 1, 1, 1]> (d, v, e)
    {between}
    r = QuantizeLinear(c0, p, m)  k = DequantizeLinear(r, p, m)
    [sum] f = Add ({order})
    [relu] g = Relu(f)
    o = QuantizeLinear(g, p, n8)  y = DequantizeLinear(o, p, n8)
}}"""
W4 = np.random.default_rng(2).integers(-63, 64, (4, 4, 3, 3)).astype(np.int8)
BETWEEN = {"nothing": ("c0 = Identity(c)", ("conv",), 1), "a Relu": ("[mid] c0 = Relu(c)", ("conv", "mid"), 2)}


@needs_library
@pytest.mark.parametrize("order", ["k, d", "d, k"])
@pytest.mark.parametrize(("between", "nodes", "calls"), BETWEEN.values(), ids=BETWEEN)
def test_a_convolution_and_its_residual_become_one_call_that_rounds_once(
    between: str, nodes: tuple[str, ...], calls: int, order: str
) -> None:
    text = RESIDUAL.format(between=between, order=order)
    if calls == 1:
        text = text.replace("c0 = Identity(c)", "").replace("c0", "c")
    last = "c" if calls == 1 else "c0"
    made = model(text, w4=W4)
    feed = {"x": np.random.default_rng(1).normal(0, 2, (2, 4, 9, 8)).astype(np.float32)}
    expected = outputs(without_library(made), feed)[0]
    shape = ("N", 4, 9, 8)
    inputs = (last, "x") if order == "k, d" else ("x", last)
    units = [
        Unit(name="conv", op="Conv", nodes=nodes, inputs=("x",), outputs=(last,)),
        Unit(name="sum", op="Add", nodes=("sum", "relu"), inputs=inputs, outputs=("g",)),
    ]
    assert wrap_units(made, units, dict.fromkeys(("x", last, "g"), shape), join=True) == calls
    assert [node.op_type for node in made.graph if node.domain] == ["Convolution", "Add"][:calls]
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    np.testing.assert_array_equal(outputs(without_library(made), feed)[0], expected)
    x = np.clip(np.rint(feed["x"] / CONSTANTS["s"]) + 117, 0, 255) - 117
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    sums = np.einsum("nchwij,ocij->nohw", windows, W4.astype(np.int64)) + CONSTANTS["b"].reshape(1, -1, 1, 1)
    real = sums * CONSTANTS["u"].reshape(1, -1, 1, 1).astype(np.float64)
    real = np.maximum(real, 0) if calls == 2 else real
    exact = np.clip(real + x * float(CONSTANTS["s"]), 0, 255 * 0.05)
    for optimize in (False, True):
        found = outputs(with_library(made, optimize=optimize), feed)[0]
        # half a step for each rounding: one in the fused call, two with a Relu between the two
        assert np.abs(found - exact)[np.abs(real) < 5].max() <= 0.05 * calls / 2 + 1e-5


@needs_library
def test_units_for_which_no_name_is_left_stay_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requant.quantize.kernels.put_calls.names_of", lambda operator: [])
    made = model(SILU)
    unit = Unit(name="silu", op="gate", nodes=("sigmoid", "silu"), inputs=("x",), outputs=("j",))
    before = ir.to_proto(made).SerializeToString(deterministic=True)
    assert wrap_units(made, [unit], {"x": ("N", 3, 4), "j": ("N", 3, 4)}) == 0
    assert ir.to_proto(made).SerializeToString(deterministic=True) == before


LEFT = {
    "weights of nine bits": {"n": np.asarray([0, 127, 0, 0], np.int8)},
    "unsigned weights": {"w": CONSTANTS["w"].view(np.uint8), "n": np.full(4, 128, np.uint8)},
    "signed activations": {"z": np.asarray(3, np.int8)},
}


@pytest.mark.parametrize("constants", LEFT.values(), ids=LEFT)
def test_what_the_operator_does_not_compute_is_left_alone(constants: dict[str, Array]) -> None:
    made = model(CONV.format(middle="", last="c"), **constants)
    before = ir.to_proto(made).SerializeToString(deterministic=True)
    unit = Unit(name="conv", op="Conv", nodes=("conv",), inputs=("x",), outputs=("c",))
    assert wrap_units(made, [unit], {"x": ("N", 3, 9, 8), "c": ("N", 4, 5, 4)}) == 0
    assert wrap_units(made, [unit], {}) == 0
    assert ir.to_proto(made).SerializeToString(deterministic=True) == before


# ------------------------------------------------------------------------------------------------------- the whole flow


@needs_library
def test_a_model_with_functions_computes_the_same_with_and_without_the_library(
    tmp_path: Path,
) -> None:
    asked: dict[str, Any] = {"place": "all", "force_int8": True, "seconds": 0.05, "samples": 16, "effort": "low"}
    stock = quantize_model(DIGITS, DATA, tmp_path / "stock.onnx", Options(kernels="stock", **asked))
    native = quantize_model(DIGITS, DATA, tmp_path / "native.onnx", Options(kernels="exact", **asked))
    assert "u8->u8 native" not in stock.forms
    assert native.forms["u8->u8 native"] >= 10
    assert native.kernels["Convolution"] >= 10
    assert stock.native is None
    assert native.native is not None
    assert (native.native.units, native.native.joined > 0) == (native.forms["u8->u8 native"], True)
    assert native.native.stock_ms is not None
    assert native.native.stock_promise is None  # the operators compute what their bodies compute
    assert native.to_json()["native"]["library"] == os.fspath(OPERATORS)
    fused = quantize_model(DIGITS, DATA, tmp_path / "fused.onnx", Options(kernels="native", **asked))
    assert fused.native is not None
    assert fused.native.stock_promise is not None
    assert "without this library " + str(fused.native.stock_promise) in str(fused)
    assert fused.to_json()["native"]["stock_promise"]["kept"] is fused.native.stock_promise.kept
    assert "see 'requant kernels'" in str(native)
    assert native.accuracy.worst_sqnr_db == pytest.approx(stock.accuracy.worst_sqnr_db, abs=0.5)
    x = np.load(ROOT / "sample_models/digits.npz")
    name = without_library(tmp_path / "stock.onnx").get_inputs()[0].name
    feed = {name: next(x[key] for key in x.files if x[key].ndim == 4)[:8].astype(np.float32)}
    for optimize in (False, True):  # the runtime's kernels round ties otherwise than the pairs that they replace
        expected = outputs(without_library(tmp_path / "stock.onnx", optimize=optimize), feed)
        found = outputs(without_library(tmp_path / "native.onnx", optimize=optimize), feed)
        for one, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, wanted)
    for one, wanted in zip(outputs(with_library(tmp_path / "native.onnx"), feed), expected, strict=True):
        np.testing.assert_array_equal(one, wanted)
    units = json.loads((tmp_path / "native.plan.json").read_text())["units"]
    assert list(units.values()) if isinstance(units, dict) else units
    again = quantize_model(
        DIGITS,
        DATA,
        tmp_path / "again.onnx",
        Options(plan=tmp_path / "native.plan.json", **{**asked, "place": "measured"}),
    )
    assert again.forms == native.forms


@pytest.mark.slow
@pytest.mark.usefixtures("vnni")
@needs_library
def test_a_plan_says_the_form_of_a_body(tmp_path: Path) -> None:
    """Bodies with the other form compute the same, in the operator and in the runtime."""
    form, body = "u8->u8 native", "u8->u8 gemm"
    float_model = onnx.load(DIGITS)
    convs = [node for node in float_model.graph.node if node.op_type == "Conv"]
    dense = {node.name for node in convs if all(each.i == 1 for each in node.attribute if each.name == "group")}
    asked: dict[str, Any] = {"force_int8": True, "seconds": 0.01, "samples": 16, "corrections": ()}
    x, found = np.load(ROOT / "sample_models/digits.npz"), {}
    feed = {float_model.graph.input[0].name: next(x[k] for k in x.files if x[k].ndim == 4)[:8].astype(np.float32)}
    for name, more in (("plain", {}), ("shifted", {"body": body})):
        units = {node.name: {"implementation": form, **(more if node.name in dense else {})} for node in convs}
        (tmp_path / "p.json").write_text(json.dumps({"schema": 1, "units": units}))
        path = tmp_path / f"{name}.onnx"
        quantize_model(DIGITS, DATA, path, Options(plan=tmp_path / "p.json", **asked))
        zeros = [numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer if each.data_type == 3]
        assert any((zero == -1).all() for zero in zeros) is (name == "shifted")
        rows = json.loads((tmp_path / f"{name}.plan.json").read_text())["units"]
        assert {row.get("body") for row in rows.values()} == ({None, body} if more else {None})
        found[name] = [
            outputs(session, feed)[0] for session in (with_library(path), without_library(path, optimize=True))
        ]
    for one, other in zip(found["plain"], found["shifted"], strict=True):
        np.testing.assert_array_equal(one, other)


@needs_library
def test_corrections_are_learned_where_the_first_convolution_reads_blocks_of_pixels(tmp_path: Path) -> None:
    text = """g (float[1,3,32,32] x) => (float[1,8,16,16] y) {
        [first] c = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, v, b)
        f = Sigmoid(c) [silu] s = Mul(c, f)
        [last] y = Conv <pads = [1, 1, 1, 1]> (s, u, b)
    }"""
    random = np.random.default_rng(0)
    proto = onnx.parser.parse_model(HEAD + text)
    for name, shape in (("v", (8, 3, 3, 3)), ("u", (8, 8, 3, 3)), ("b", (8,))):
        proto.graph.initializer.append(numpy_helper.from_array(random.normal(0, 0.4, shape).astype(np.float32), name))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=random.normal(size=(8, 3, 32, 32)).astype(np.float32))
    options = Options(place="all", kernels="native", force_int8=True, seconds=0.05)
    found = quantize_model(tmp_path / "m.onnx", tmp_path / "d.npz", tmp_path / "q.onnx", options)
    assert found.forms["u8->u8 native"] == 3
    assert found.accuracy.worst_sqnr_db > 30


def test_native_operators_stay_functions_unless_they_are_to_be_inlined() -> None:
    made = model(CONV.format(middle="", last="c"))
    unit = Unit(name="conv", op="Conv", nodes=("conv",), inputs=("x",), outputs=("c",))
    wrap_units(made, [unit], {"x": ("N", 3, 9, 8), "c": ("N", 4, 5, 4)})
    before = [node.op_type for node in made.graph]
    assert inline_functions(made).applied == 0
    assert [node.op_type for node in made.graph] == before
    assert inline_functions(made, native=True).applied == 1
    assert {node.domain for node in made.graph} == {""}
    assert "Conv" in {node.op_type for node in made.graph}
    assert NATIVE_DOMAIN not in made.opset_imports


@pytest.mark.slow
@needs_library
def test_every_placement_has_native_operators_on_demand_and_a_plan_only_where_they_are_allowed(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"force_int8": True, "seconds": 0.05, "samples": 16, "effort": "low", "force": True}
    for how in ("rules", "measured"):  # the sample is too small to be placed by measured costs
        found = quantize_model(DIGITS, DATA, tmp_path / "q.onnx", Options(place=how, kernels="native", **asked))
        assert found.native is not None
        assert found.native.units == found.forms["u8->u8 native"]
    (tmp_path / "q.plan.json").rename(tmp_path / "mine.json")
    with pytest.raises(RequantError, match="cannot be 'u8->u8 native'"):
        quantize_model(
            DIGITS, DATA, tmp_path / "q.onnx", Options(plan=tmp_path / "mine.json", kernels="stock", **asked)
        )


@pytest.mark.slow
@needs_library
def test_a_model_with_native_operators_is_a_fixed_point_and_becomes_portable_on_demand(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"force_int8": True, "seconds": 0.05, "samples": 16, "effort": "low"}
    quantize_model(DIGITS, DATA, tmp_path / "one.onnx", Options(place="all", kernels="native", **asked))
    quantize_model(tmp_path / "one.onnx", DATA, tmp_path / "two.onnx", Options(place="rules", **asked))
    one, two = (onnx.load(tmp_path / name) for name in ("one.onnx", "two.onnx"))
    assert [node.op_type for node in one.graph.node] == [node.op_type for node in two.graph.node]
    assert [function.name for function in one.functions] == [function.name for function in two.functions]
    quantize_model(tmp_path / "one.onnx", DATA, tmp_path / "three.onnx", Options(portable=True, **asked))
    assert not onnx.load(tmp_path / "three.onnx").functions


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"kernels": "fast"}, "no kernels 'fast'; there are: auto, native, exact, stock"),
        ({"kernels": "native", "portable": True}, "the kernels 'native' do not go with portable"),
        ({"kernels": "native", "format": "qoperator"}, "the kernels 'native' do not go with the format qoperator"),
    ],
)
def test_options_that_contradict_each_other_are_refused(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequantError, match=reason):
        Options(**asked)


def test_native_operators_that_are_not_here_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("requant.quantize.kernels.library.OPERATORS", tmp_path / "none.so")
    kernels.cache_clear()
    with pytest.raises(RequantError, match="no native operators here"):
        quantize_model(DIGITS, DATA, tmp_path / "out.onnx", Options(kernels="native"))
    kernels.cache_clear()
    assert list(tmp_path.iterdir()) == []


@needs_library
def test_the_library_stays_loaded_when_the_last_session_closes() -> None:
    program = f"""
import onnxruntime as ort
for _ in range(5):
    ort.SessionOptions().register_custom_ops_library({os.fspath(OPERATORS)!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

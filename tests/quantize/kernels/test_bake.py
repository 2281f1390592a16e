"""Native operators in graphs that the runtime has optimized, and the commands around them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from requant import NATIVE_DOMAIN, RequantError
from requant.calibration import open_session
from requant.calibration.model.session import Array
from requant.cli import main
from requant.quantize import compile_model
from requant.quantize.kernels import build
from requant.quantize.kernels.bake import bake_convolutions, bake_tables, is_depthwise
from requant.quantize.kernels.library import VERSION, Kernels, kernels
from requant.transforms.spell_slow_functions import spell_slow_functions

from ...native import FOUND, needs_library

HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n'
SCALES: dict[str, Array] = {
    "s": np.asarray(0.05, np.float32),
    "z": np.asarray(117, np.uint8),
    "g": np.asarray(1 / 256, np.float32),
    "n": np.asarray(0, np.uint8),
    "b": np.asarray(-3, np.int8),
    "half": np.asarray([0.5], np.float32),
    "axes": np.full((1, 1, 1, 1), 0.5, np.float32),
    "many": np.linspace(0.5, 2, 8, dtype=np.float32),
}
SILU = """g (uint8[N,8] x) => (uint8[N,8] y) {
    f = com.microsoft.QLinearSigmoid(x, s, z, g, n)
    y = com.microsoft.QLinearMul(x, s, z, f, g, n, s, z)
}"""
FLOAT = """g (uint8[N,8] x) => (uint8[N,8] y) {
    d = DequantizeLinear(x, s, z)  e = Erf(d)  m = Mul(e, half)  a = Add(m, d)  y = QuantizeLinear(a, s, z)
}"""
BETWEEN = """g (uint8[N,8] x) => (uint8[N,8] y, uint8[N,8] t) {
    t = com.microsoft.QLinearLeakyRelu <alpha = 0.1> (x, s, z, s, z)
    f = com.microsoft.QLinearSigmoid(t, s, z, g, n)
    y = com.microsoft.QLinearAdd(t, s, z, f, g, n, s, z)
}"""
TWO = """g (uint8[N,8] x, uint8[N,8] w) => (uint8[N,8] y) { y = com.microsoft.QLinearAdd(x, s, z, w, s, z, s, z) }"""
INT8 = """g (int8[N,8] x) => (int8[N,8] y) { y = com.microsoft.QLinearSigmoid(x, s, b, g, b) }"""
VECTOR = """g (uint8[N,8] x) => (uint8[N,8] y) {
    d = DequantizeLinear(x, s, z)  m = Mul(d, many)  y = QuantizeLinear(m, s, z)
}"""
SOFTMAX = """g (uint8[N,8] x) => (uint8[N,8] y) {
    d = DequantizeLinear(x, s, z)  m = Softmax(d)  y = QuantizeLinear(m, s, z)
}"""

CALL = f"""g (uint8[4,8] x) => (float[4,8] y) {{ t = {NATIVE_DOMAIN}.Table(x, table)  y = DequantizeLinear(t, s, z) }}
<domain: "{NATIVE_DOMAIN}", opset_import: ["" : 17]> Table (a, b) => (c) {{ c = Identity(a) }}"""
"""A call whose function computes something else than the native operator."""


def made(text: str, **arrays: Array) -> ir.Model:
    """Return a model from ONNX text with the scales that it reads."""
    proto = onnx.parser.parse_model(HEAD + text)
    read = {name for node in proto.graph.node for name in node.input}
    known = {**SCALES, **arrays}
    proto.graph.initializer.extend(numpy_helper.from_array(known[name], name) for name in known if name in read)
    return ir.from_proto(proto)


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def outputs(model: ir.Model, feed: dict[str, Array]) -> Sequence[Array]:
    session = open_session(ir.to_proto(model).SerializeToString(), threads=1, optimize=False)
    return [np.asarray(each) for each in session.run(None, feed)]


@needs_library
@pytest.mark.parametrize(("text", "tables"), [(SILU, 1), (FLOAT, 1), (BETWEEN, 2)], ids=["silu", "float", "between"])
def test_a_chain_becomes_a_table_with_the_same_results(text: str, tables: int) -> None:
    model = made(text)
    feed = {"x": np.arange(256, dtype=np.uint8).reshape(32, 8)}
    before, names = outputs(model, feed), [value.name for value in model.graph.outputs]
    assert bake_tables(model) == tables
    assert operators(model) == ["Table"] * tables
    assert [value.name for value in model.graph.outputs] == names
    assert set(model.graph.initializers) == {value.name for node in model.graph for value in node.inputs[1:] if value}
    for found, expected in zip(outputs(model, feed), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert bake_tables(model) == 0


@needs_library
@pytest.mark.parametrize(
    "nodes",
    [
        "a = Softplus(d) t = Tanh(a) f = Mul(d, t)",
        "f = Softplus(d)",
        "f = Elu(d)",
        "a = Celu <alpha = 2.0> (d) f = Mul(a, a)",
    ],
)
def test_a_spelled_function_becomes_a_table_too(nodes: str) -> None:
    """A model that was quantized without native operators has such functions between integers."""
    model = made(
        f"g (uint8[N,8] x) => (uint8[N,8] y) {{ d = DequantizeLinear(x, s, z) {nodes} y = QuantizeLinear(f, s, z) }}"
    )
    assert spell_slow_functions(model).applied
    feed = {"x": np.arange(256, dtype=np.uint8).reshape(32, 8)}
    before = outputs(model, feed)
    assert bake_tables(model) == 1
    assert operators(model) == ["Table"]
    np.testing.assert_array_equal(outputs(model, feed), before)


AXES = """g (uint8[N,8] x) => (uint8[1,1,N,8] y) {
    d = DequantizeLinear(x, s, z)  m = Mul(d, axes)  y = QuantizeLinear(m, s, z)
}"""
LEFT = {"two tensors": TWO, "int8": INT8, "a vector": VECTOR, "softmax": SOFTMAX, "more axes": AXES}


@pytest.mark.parametrize("text", LEFT.values(), ids=LEFT)
def test_what_is_no_function_of_one_element_is_left_alone(text: str) -> None:
    model = made(text)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert bake_tables(model) == 0
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


CONV = """g (uint8[N,H,W,8] x) => (uint8[N,P,Q,8] y) {{
    c = com.microsoft.QLinearConv <channels_last = {last}, group = {group}, pads = [1, 1, 1, 1]> (x, s, z, w, g, {zero}, s, z)
    f = com.microsoft.QLinearSigmoid(c, s, z, g, n)
    y = com.microsoft.QLinearMul(c, s, z, f, g, n, s, z)
}}"""


def convolution(group: int = 1, last: int = 1, zero: int = 0) -> ir.Model:
    weights = np.random.default_rng(0).integers(-63, 64, (8, 8 // group, 3, 3)).astype(np.int8)
    return made(CONV.format(group=group, last=last, zero="wz"), w=weights, wz=np.asarray(zero, np.int8))


@needs_library
@pytest.mark.parametrize("group", [1, 8], ids=["dense", "depthwise"])
def test_a_convolution_takes_its_table(group: int) -> None:
    model = convolution(group)
    feed = {"x": np.random.default_rng(1).integers(0, 256, (2, 6, 7, 8)).astype(np.uint8)}
    (expected,) = outputs(model, feed)
    bake_tables(model)
    assert bake_convolutions(model, lambda _: True) == 1
    assert operators(model) == ["Convolution"]
    np.testing.assert_array_equal(outputs(model, feed)[0], expected)


@needs_library
@pytest.mark.parametrize("zero", [0, -1])
def test_a_convolution_without_a_table_is_replaced_too(zero: int) -> None:
    model = convolution(zero=zero)
    feed = {"x": np.random.default_rng(1).integers(0, 256, (2, 6, 7, 8)).astype(np.uint8)}
    (expected,) = outputs(model, feed)
    assert bake_convolutions(model, lambda _: True) == 1
    assert operators(model) == ["Convolution", "QLinearSigmoid", "QLinearMul"]
    np.testing.assert_array_equal(outputs(model, feed)[0], expected)


def test_only_the_wanted_convolutions_are_replaced() -> None:
    assert [bake_convolutions(convolution(group), is_depthwise) for group in (1, 8)] == [0, 1]
    assert bake_convolutions(convolution(last=0), lambda _: True) == 0
    assert bake_convolutions(convolution(zero=127), lambda _: True) == 0  # weights of nine bits


# -------------------------------------------------------------------------------------------------------- commands


@needs_library
def test_the_command_shows_the_operators_and_the_lines() -> None:
    assert isinstance(FOUND, Kernels)
    done = CliRunner().invoke(main, ["kernels", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == FOUND.to_json()
    assert found["operators"] == [
        "Table",
        "Convolution",
        "GlobalAveragePool",
        "MaxPool",
        "AveragePool",
        "Concat",
        "Add",
        "Mul",
        "MatMul",
        "Attention",
        "WindowAttention",
        "Normalization",
        "GRU",
        "LSTM",
        "MatMulNBits",
        "RotaryEmbedding",
        "Quantize",
        "CachedAttention",
        "QuantizedCacheAttention",
        "Resize",
        "Softmax",
        "Lines",
        "DequantizeSoftmax",
        "ConvTranspose",
        "DepthToSpace",
        "GroupNormalization",
    ]
    assert found["isa"] == found["available"][0]
    assert found["available"][-1] == "portable"
    shown = CliRunner().invoke(main, ["kernels"]).stdout
    for language in ("Python", "C++", "C#"):
        assert language in shown


def test_without_the_library_it_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("requant.quantize.kernels.library.OPERATORS", tmp_path / "none.so")
    kernels.cache_clear()
    done = CliRunner().invoke(main, ["kernels"])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "python -m requant.quantize.kernels.build" in done.stderr
    with pytest.raises(RequantError, match="no native operators here"):
        compile_model(tmp_path / "m.onnx", tmp_path / "o.onnx", kernels="native")
    kernels.cache_clear()


@pytest.mark.parametrize("here", [False, True], ids=["none", "another version"])
def test_a_model_with_native_operators_needs_their_library(
    here: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = convolution()
    bake_convolutions(model, lambda _: True)
    if here:
        model.opset_imports[NATIVE_DOMAIN] = VERSION - 1
    else:
        monkeypatch.setattr("requant.calibration.model.session.native_library", lambda: None)
    ir.save(model, tmp_path / "model.onnx")
    why = "another requant compiled it; compile it again" if here else "they are not built here"
    with pytest.raises(RequantError, match=f"its native operators are unknown: {why}; see 'requant kernels'"):
        open_session(tmp_path / "model.onnx")


def test_the_build_refuses_other_systems_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Windows")
    with pytest.raises(SystemExit, match=r"^error: the native operators are for Linux, not for Windows$"):
        build.main()


@needs_library
def test_a_model_is_compiled_with_native_operators_and_computes_the_same(tmp_path: Path) -> None:
    model = convolution()
    model.graph.inputs[0].shape = ir.Shape([1, 32, 32, 8])
    model.graph.outputs[0].shape = ir.Shape([1, 32, 32, 8])
    ir.save(model, tmp_path / "model.onnx")
    found = compile_model(tmp_path / "model.onnx", tmp_path / "out.onnx", kernels="native")
    assert found.kernels.startswith("tables")
    assert found.identical
    assert set(found.tried) == {"stock", "tables", "tables, convolutions"}
    assert "register_custom_ops_library" in found.snippet
    assert {"Table", "Convolution"} & {node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node}
    open_session(tmp_path / "out.onnx")  # registers the library by itself
    settings = CliRunner().invoke(main, ["bench", str(tmp_path / "out.onnx"), "--settings", "--seconds", "0.5"])
    assert settings.exit_code == 0, settings.output
    stock = compile_model(tmp_path / "model.onnx", tmp_path / "stock.onnx", kernels="stock")
    assert (stock.kernels, stock.tried) == ("stock", {})
    with pytest.raises(RequantError, match=r"give a path that ends in \.onnx"):
        compile_model(tmp_path / "model.onnx", tmp_path / "out.ort", kernels="native")
    with pytest.raises(RequantError, match="no kernels 'fast'"):
        compile_model(tmp_path / "model.onnx", tmp_path / "o.onnx", kernels="fast")


@needs_library
@pytest.mark.parametrize("asked", ["native", "auto", "stock"])
def test_native_operators_of_the_original_stay_unless_stock_is_asked_for(asked: str, tmp_path: Path) -> None:
    model = made(CALL, table=np.arange(255, -1, -1, dtype=np.uint8))
    model.opset_imports[NATIVE_DOMAIN] = VERSION
    ir.save(model, path := tmp_path / "model.onnx")
    found = compile_model(path, tmp_path / "out.onnx", kernels=asked)
    domains = {node.domain for node in onnx.load(tmp_path / "out.onnx").graph.node}
    kept = asked != "stock"
    assert (NATIVE_DOMAIN in domains, found.kernels) == (kept, "own" if kept else "stock")
    assert (found.identical, "register_custom_ops_library" in found.snippet) == (kept, kept)
    assert kept or found.sqnr_db["y"] < 20  # against the model with its library
    ort = tmp_path / "out.ort"
    if asked == "auto":
        with pytest.raises(RequantError, match="the model has native operators; give a path that ends in"):
            compile_model(path, ort, kernels=asked)
    assert kept or compile_model(path, ort, kernels=asked).identical is False
    assert ort.exists() is not kept

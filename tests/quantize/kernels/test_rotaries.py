"""Rotary embeddings in functions: with the library, without it, and before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import Array, open_session
from requant.quantize import Options, Selection, Strategy, quantize_model
from requant.quantize.kernels.rotaries import wrap_rotaries

from ...native import needs_library

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
PAIRS = """a = Gather <axis = -1> (x, zero) b = Gather <axis = -1> (x, one) p = Mul(a, c) q = Mul(b, s) d = Sub(p, q)
    u = Mul(a, s) v = Mul(c, b) t = Add(u, v) k = Unsqueeze(d, last) l = Unsqueeze(t, last)
    y = Concat <axis = -1> (k, l)"""
HALVES = """p = Mul(x, c) h = Slice(x, half, end, last) n = Neg(h) g = Slice(x, zeros, half, last)
    r = Concat <axis = -1> (n, g) q = Mul(r, s) y = Add(p, q)"""
TEXTS = {"pairs": PAIRS, "halves": HALVES}


def model(text: str, x: Array, c: Array, s: Array) -> ir.Model:
    """Return a model of x, with the cosines c and the sines s as constants."""
    axes = ",".join(str(length) for length in x.shape)
    whole = (
        (*np.broadcast_shapes(x.shape[:-1], c.shape, s.shape), 2)
        if "Gather" in text
        else np.broadcast_shapes(x.shape, c.shape, s.shape)
    )
    result = ",".join(str(length) for length in whole)
    proto = onnx.parser.parse_model(f"{HEAD} g (float[{axes}] x) => (float[{result}] y) {{ {text} }}")
    constants: Mapping[str, Array] = {
        "c": c,
        "s": s,
        "zero": np.asarray(0),
        "one": np.asarray(1),
        "last": np.asarray([-1]),
        "zeros": np.asarray([0]),
        "half": np.asarray([x.shape[-1] // 2]),
        "end": np.asarray([2**63 - 1]),
    }
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(numpy_helper.from_array(constants[name], name) for name in constants if name in read)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def shapes_of(made: ir.Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a model."""
    values = [*made.graph.inputs, *(value for node in made.graph for value in node.outputs)]
    return {str(value.name): tuple(value.shape.numpy()) for value in values if value.shape is not None}


def bytes_of(made: ir.Model) -> bytes:
    """Return a model as bytes."""
    return bytes(ir.to_proto(made).SerializeToString())


@needs_library
@settings(max_examples=30)
@given(
    kind=st.sampled_from(sorted(TEXTS)),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    pairs=st.integers(1, 20),
    repeats=st.lists(st.booleans(), min_size=3, max_size=3),
    seed=st.integers(0, 2**32 - 1),
    threads=st.integers(1, 2),
)
def test_the_operator_computes_what_its_body_does(
    kind: str, lengths: list[int], pairs: int, repeats: list[bool], seed: int, threads: int
) -> None:
    random = np.random.default_rng(seed)
    inner = (pairs,) if kind == "pairs" else (2 * pairs,)
    outer = tuple(1 if again else length for length, again in zip(lengths, repeats, strict=False))
    x = random.normal(size=(*lengths, *inner, *((2,) if kind == "pairs" else ()))).astype(np.float32)
    c, s = (random.normal(size=(*outer[dropped:], *inner)).astype(np.float32) for dropped in (0, seed % len(outer)))
    made = model(TEXTS[kind], x, c, s)
    (before,) = ort.InferenceSession(bytes_of(made), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    assert wrap_rotaries(made, shapes_of(made)) == 1
    (call,) = made.graph
    assert (call.domain, call.op_type) == (NATIVE_DOMAIN, "RotaryEmbedding")
    assert call.attributes.get_int("interleaved", -1) == int(kind == "pairs")
    for session in (
        ort.InferenceSession(bytes_of(made), providers=["CPUExecutionProvider"]),
        open_session(bytes_of(made), threads=threads),
    ):
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], before)


LEFT = {
    "another order": PAIRS.replace("d = Sub(p, q)", "d = Sub(q, p)"),
    "other sines": PAIRS.replace("u = Mul(a, s)", "u = Mul(a, c)"),
    "the same value twice": PAIRS.replace("(x, one)", "(x, zero)"),
    "another axis": PAIRS.replace("b = Gather <axis = -1>", "b = Gather <axis = 0>"),
    "halves the other way round": HALVES.replace("Concat <axis = -1> (n, g)", "Concat <axis = -1> (g, n)"),
    "another axis of halves": HALVES.replace("g = Slice(x, zeros, half, last)", "g = Slice(x, zeros, half, zeros)"),
    "no half": HALVES.replace("h = Slice(x, half, end, last)", "h = Slice(x, zeros, half, last)"),
}


@pytest.mark.parametrize("text", LEFT.values(), ids=LEFT)
def test_other_operators_are_left_alone(text: str) -> None:
    x = np.ones((4, 4, 2) if "Gather" in text else (4, 4), np.float32)
    inner = x.shape[:-1] if "Gather" in text else x.shape
    made = model(
        TEXTS["pairs" if "Gather" in text else "halves"], x, np.ones(inner, np.float32), np.ones(inner, np.float32)
    )
    shapes = shapes_of(made)
    other = model(text, x, np.ones(inner, np.float32), np.full(inner, 2, np.float32))
    count = len(list(other.graph))
    assert wrap_rotaries(other, shapes) == 0
    assert len(list(other.graph)) == count


def test_other_sums_of_products_and_other_types_are_left_alone() -> None:
    scalar = """<ir_version: 8, opset_import: ["" : 17]> g (float[2,4] m) => (float[2,4] y) {
        t = ReduceMean <keepdims = 0> (m) n = Neg(t) p = Mul(m, t) q = Mul(m, n) y = Add(p, q) }"""
    old = """<ir_version: 8, opset_import: ["" : 8]> g (float[2,4] m) => (float[2,4,2] y) {
        k = Unsqueeze <axes = [2]> (m) t = Sigmoid(m) l = Unsqueeze <axes = [2]> (t) y = Concat <axis = 2> (k, l) }"""
    for text in (scalar, old):
        made = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
        assert wrap_rotaries(made, shapes_of(made)) == 0
    x = np.ones((3, 4), np.float64)
    proto = onnx.parser.parse_model(f"{HEAD} g (double[3,4] x) => (double[3,4] y) {{ {HALVES} }}")
    ones = {"c": x, "s": x, "zeros": np.asarray([0]), "half": np.asarray([2]), "end": np.asarray([4])}
    ones["last"] = np.asarray([-1])
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in ones.items())
    made = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    assert wrap_rotaries(made, shapes_of(made)) == 0


@needs_library
@pytest.mark.parametrize(
    ("x", "c", "message"),
    [
        ((3, 4, 2), (2, 4), "do not fit together"),
        ((3, 4, 3), (3, 4), "the last axis of x must have pairs"),
    ],
)
def test_what_the_operator_does_not_compute_is_refused(x: tuple[int, ...], c: tuple[int, ...], message: str) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.requant" : 2]> g (float[A,B,C] x, float[D,E] c) => (float[F,G,H] y)
        { y = ai.requant.RotaryEmbedding <interleaved = 1> (x, c, c) }"""
    session = open_session(onnx.parser.parse_model(text).SerializeToString(), threads=1)
    with pytest.raises(Exception, match=message):
        session.run(None, {"x": np.ones(x, np.float32), "c": np.ones(c, np.float32)})


@needs_library
def test_a_model_with_native_operators_has_native_embeddings(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    text = f"""{HEAD} g (float[4,64] i) => (float[4,64] y) {{ [up] m = MatMul(i, w) x = Reshape(m, four)
        {PAIRS.replace("y = Concat", "e = Concat")} f = Reshape(e, two) [down] y = MatMul(f, w) }}"""
    proto = onnx.parser.parse_model(text)
    arrays = {
        "w": random.normal(0, 0.1, (64, 64)).astype(np.float32),
        "c": np.cos(np.arange(128.0)).reshape(4, 1, 32).astype(np.float32),
        "s": np.sin(np.arange(128.0)).reshape(4, 1, 32).astype(np.float32),
        "four": np.asarray([4, 1, 32, 2]),
        "two": np.asarray([4, 64]),
        "zero": np.asarray(0),
        "one": np.asarray(1),
        "last": np.asarray([-1]),
    }
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.save(proto, tmp_path / "m.onnx")
    options = Options(
        kernels="native", seconds=0.05, force_int8=True, effort="low", selection=Selection(strategy=Strategy.DYNAMIC)
    )
    quantize_model(tmp_path / "m.onnx", None, tmp_path / "q.onnx", options)
    written = [node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node]
    assert "RotaryEmbedding" in written
    assert "Gather" not in written

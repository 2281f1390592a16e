"""Normalizations in functions: the native operator against its definition, and what stays as it is."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import Array
from requant.quantize.kernels.library import VERSION, Kernels
from requant.quantize.kernels.normalizations import wrap_normalizations

from ...native import FOUND, needs_library

pytestmark = needs_library


def model(
    nodes: str, constants: Mapping[str, Array], opset: int = 17, outputs: str = "float y", x: str = "float[4,8] x"
) -> onnx.ModelProto:
    """Return a model with an input x and constants."""
    head = f'<ir_version: 8, opset_import: ["" : {opset}, "{NATIVE_DOMAIN}" : {VERSION}]>'
    proto = onnx.parser.parse_model(f"{head} g ({x}) => ({outputs}) {{ {nodes} }}")
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return proto


def run(proto: onnx.ModelProto, x: Array, threads: int = 1) -> Array:
    """Return the result of a model with the library."""
    assert isinstance(FOUND, Kernels)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(os.fspath(FOUND.library))
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def call(count: int, *, biased: bool, centred: bool, seed: int) -> tuple[onnx.ModelProto, Array, Array]:
    """Return a model with the operator alone, its scale and its bias."""
    random = np.random.default_rng(seed)
    scale, bias = (random.normal(size=count).astype(np.float32) for _ in range(2))
    given = {"s": scale, "b": bias} if biased else {"s": scale}
    inputs = "x, s, b" if biased else "x, s"
    text = f"y = {NATIVE_DOMAIN}.Normalization<epsilon: float = 1e-5, centred: int = {int(centred)}>({inputs})"
    proto = model(text, given, x="float x")
    return proto, scale, bias if biased else np.zeros_like(bias)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.sampled_from([(1,), (3,), (2, 5), (300,)]),
    count=st.integers(1, 150),
    biased=st.booleans(),
    centred=st.booleans(),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 9999),
)
def test_the_operator_computes_its_definition(
    isa: str, rows: tuple[int, ...], count: int, biased: bool, centred: bool, threads: int, seed: int
) -> None:
    x = np.random.default_rng(seed).normal(3, 2, (*rows, count)).astype(np.float32)
    proto, scale, bias = call(count, biased=biased, centred=centred, seed=seed)
    away = x.astype(np.float64)
    if centred:
        away -= away.mean(-1, keepdims=True)
    spread = np.sqrt(np.square(away).mean(-1, keepdims=True) + 1e-5)
    # x - mean loses the last bits of x, and of a sum of `count` values; the division by a small spread makes it larger
    off = 2.0**-23 * (8 + np.sqrt(count)) * (np.abs(x).max() / spread + 1) * np.abs(scale).max() + 1e-6
    assert (np.abs(run(proto, x, threads) - (away / spread * scale + bias)) <= off).all()


def test_rows_that_are_not_finite_become_nan_and_others_do_not(isa: str) -> None:
    x = np.ones((3, 40), np.float32)
    x[1, 3] = np.inf
    x[0] = np.arange(40)
    found = run(call(40, biased=True, centred=True, seed=0)[0], x)
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


def test_a_length_that_does_not_fit_ends_with_one_line() -> None:
    with pytest.raises(Exception, match="the last axis of x must have as many values as scale"):
        run(call(5, biased=True, centred=True, seed=0)[0], np.zeros((2, 4), np.float32))


VECTOR: Mapping[str, Array] = {"s": np.linspace(0.5, 2, 8, dtype=np.float32), "b": np.ones(8, np.float32)}


@pytest.mark.parametrize(
    ("nodes", "opset"),
    [
        ("y = LayerNormalization<epsilon: float = 0.001>(x, s, b)", 17),
        ("y = LayerNormalization<axis = 1>(x, s)", 17),
        ("y = RMSNormalization(x, s)", 23),
    ],
)
def test_a_normalization_becomes_a_function_whose_body_is_what_was_there(nodes: str, opset: int) -> None:
    used = {name: array for name, array in VECTOR.items() if f", {name}" in nodes}
    proto = model(nodes, used, opset)
    made = ir.from_proto(proto)
    assert wrap_normalizations(made, {"y": (4, 8)}) == 1
    written = ir.to_proto(made)
    assert [node.op_type for node in written.graph.node] == ["Normalization"]
    assert len(written.functions) == 1
    x = np.random.default_rng(0).normal(2, 1, (4, 8)).astype(np.float32)
    (before,) = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    (without,) = ort.InferenceSession(written.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(without, before, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(run(written, x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "shapes", "outputs"),
    [
        ("y = LayerNormalization<axis = 0>(x, s, b)", {"y": (1, 8)}, "float y"),
        ("y = LayerNormalization(x, s, b)", {}, "float y"),
        ("y = LayerNormalization(x, x, b)", {"y": (8,)}, "float y"),
        ("y, m = LayerNormalization(x, s, b)", {"y": (4, 8)}, "float y, float m"),
        ("y = LayerNormalization(x, s, b)", {"y": (4, 1)}, "float y"),
    ],
)
def test_other_normalizations_stay_as_they_are(nodes: str, shapes: Mapping[str, tuple[int, ...]], outputs: str) -> None:
    made = ir.from_proto(model(nodes, VECTOR, 17, outputs))
    assert wrap_normalizations(made, shapes) == 0
    assert "LayerNormalization" in {node.op_type for node in made.graph}

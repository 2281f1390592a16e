"""Softmaxes over few classes in functions: the native operator against its definition, and what stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import Array
from requant.quantize import Options
from requant.quantize.kernels.library import VERSION
from requant.quantize.kernels.softmaxes import wrap_softmaxes
from requant.quantize.runtime.progress import silent
from requant.quantize.steps.prepare import prepare

from ...native import needs_library
from .test_native import load

pytestmark = needs_library


def model(node: str, opset: int = 17, x: str = "float x", y: str = "float y") -> onnx.ModelProto:
    """Return a model of one node."""
    head = f'<ir_version: 8, opset_import: ["" : {opset}, "{NATIVE_DOMAIN}" : {VERSION}]>'
    return onnx.parser.parse_model(f"{head} g ({x}) => ({y}) {{ {node} }}")


def softmax(x: Array, axis: int, threads: int = 1) -> Array:
    """Return what the native operator computes."""
    proto = model(f"y = {NATIVE_DOMAIN}.Softmax<axis = {axis}>(x)")
    return np.asarray(load(proto, threads).run(None, {"x": x})[0])


def dequantize_softmax(x: Array, scale: float, axis: int, threads: int = 1) -> Array:
    """Return what the native operator computes of scale * (x - 9)."""
    constants = f"<float s = {{{scale}}}, uint8 z = {{9}}>"
    head = f'<ir_version: 8, opset_import: ["" : 17, "{NATIVE_DOMAIN}" : {VERSION}]>'
    call = f"y = {NATIVE_DOMAIN}.DequantizeSoftmax<axis = {axis}>(x, s, z)"
    proto = onnx.parser.parse_model(f"{head} g (uint8 x) => (float y) {constants} {{ {call} }}")
    return np.asarray(load(proto, threads).run(None, {"x": x})[0])


def defined(x: Array, axis: int) -> Array:
    """Return the definition in float64."""
    away = x.astype(np.float64) - x.max(axis, keepdims=True)
    shares: Array = np.exp(away)
    total: Array = shares.sum(axis, keepdims=True)
    return np.asarray(shares / total)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4).filter(lambda shape: np.prod(shape) < 30_000),
    place=st.integers(0, 3),
    spread=st.sampled_from([0.1, 3.0, 60.0]),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 9999),
)
def test_the_operator_computes_its_definition(
    isa: str, shape: list[int], place: int, spread: float, threads: int, seed: int
) -> None:
    x = (spread * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)
    axis = place % len(shape) - (len(shape) if seed % 2 else 0)
    found, exact = softmax(x, axis, threads), defined(x, axis)
    assert (np.abs(found - exact) <= allowed(x, exact, axis)).all()
    integers = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    scale = np.float32(spread / 50)
    steps = integers.astype(np.float32) * scale
    found, exact = dequantize_softmax(integers, float(scale), axis, threads), defined(steps, axis)
    assert (np.abs(found - exact) <= allowed(steps, exact, axis)).all()


def allowed(x: Array, exact: Array, axis: int) -> Array:
    """Return by how much results may be off.

    Each exponential is off by 2e-7 of it and half of the last bit of x - greatest; their sum by a bit for each class.
    """
    found: Array = exact * (1e-6 + 2.0**-24 * (x.shape[axis] + np.abs(x).max() * 2)) + 2.0**-126
    return found


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("classes", [2, 3, 4, 8, 16])
def test_numbers_that_are_not_finite(isa: str, axis: int, classes: int) -> None:
    x = np.zeros((5, classes), np.float32)
    x[:, -1] = [np.nan, np.inf, -np.inf, -200, -np.inf]
    x[4] = -np.inf
    x = x if axis == 1 else x.T.copy()
    found = softmax(x, axis)
    found = found if axis == 1 else found.T
    assert np.isnan(found[[0, 1, 4]]).all()
    others = classes - 1
    np.testing.assert_allclose(found[[2, 3]], [[1 / others] * others + [0]] * 2, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3)])
def test_an_empty_tensor_has_an_empty_result(shape: tuple[int, ...]) -> None:
    assert softmax(np.zeros(shape, np.float32), 1).shape == shape


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_is_not_there_ends_with_one_line(axis: int) -> None:
    with pytest.raises(Exception, match=r"ai\.requant\.Softmax: x does not have the axis"):
        softmax(np.zeros((2, 3), np.float32), axis)


@pytest.mark.parametrize(
    ("node", "shape", "opset"),
    [
        ("y = Softmax(x)", (6, 5, 4), 17),
        ("y = Softmax<axis = 1>(x)", (2, 100, 16), 13),
        ("y = Softmax<axis = -2>(x)", (2, 3, "n"), 22),
        ("y = Softmax(x)", (6, 4), 12),
        ("y = Softmax<axis = 2>(x)", (6, 5, 4), 11),
    ],
)
def test_a_softmax_becomes_a_function_whose_body_is_what_was_there(
    node: str, shape: Sequence[int | str], opset: int
) -> None:
    axes = ", ".join(map(str, shape))
    proto = model(node, opset, x=f"float[{axes}] x", y=f"float[{axes}] y")
    made = ir.from_proto(proto)
    assert wrap_softmaxes(made, {"y": shape}) == 1
    written = ir.to_proto(made)
    assert [(node.op_type, node.domain) for node in written.graph.node] == [("Softmax", NATIVE_DOMAIN)]
    x = np.random.default_rng(0).normal(2, 1, [axis if isinstance(axis, int) else 3 for axis in shape]).astype("f4")
    (before,) = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    (without,) = ort.InferenceSession(written.SerializeToString()).run(None, {"x": x})
    np.testing.assert_array_equal(without, before)
    np.testing.assert_allclose(load(written).run(None, {"x": x})[0], before, rtol=2e-6)


CONVERSION = "<float s = {0.1}, uint8 z = {7}, float[1] s1 = {0.1}, uint8[1] z1 = {7}, int8 i = {7}>"
DEQUANTIZED = {
    "alone": ("s, z", "y = Softmax(d)", "DequantizeSoftmax"),
    "one value": ("s1, z1", "y = Softmax(d)", "DequantizeSoftmax"),
    "other axis": ("s, z", "y = Softmax<axis = 1>(d)", "DequantizeSoftmax"),
    "two readers": ("s, z", "y = Softmax(d) n = Neg(d)", "Softmax"),
    "signed": ("s, i", "y = Softmax(d)", "Softmax"),
    "no zero point": ("s", "y = Softmax(d)", "Softmax"),
}
"""The parameters of a conversion to integers and back, what reads the result, and the native operator."""


@pytest.mark.parametrize(("parameters", "readers", "operator"), DEQUANTIZED.values(), ids=DEQUANTIZED)
def test_a_softmax_reads_integers_that_are_dequantized_for_it_alone(
    parameters: str, readers: str, operator: str
) -> None:
    head = f'<ir_version: 8, opset_import: ["" : 17, "{NATIVE_DOMAIN}" : {VERSION}]>'
    outputs = "float[2,32,16] y, float[2,32,16] n" if "Neg" in readers else "float[2,32,16] y"
    nodes = f"x8 = QuantizeLinear(x, {parameters}) d = DequantizeLinear(x8, {parameters}) {readers}"
    proto = onnx.parser.parse_model(f"{head} g (float[2,32,16] x) => ({outputs}) {CONVERSION} {{ {nodes} }}")
    made = ir.from_proto(proto)
    assert wrap_softmaxes(made, {"y": (2, 32, 16)}) == 1
    written = ir.to_proto(made)
    onnx.checker.check_model(written, full_check=True)
    assert [node.op_type for node in written.graph.node if node.domain == NATIVE_DOMAIN] == [operator]
    x = {"x": np.random.default_rng(0).normal(0, 9, (2, 32, 16)).astype("f4")}
    (before, *_) = ort.InferenceSession(proto.SerializeToString()).run(None, x)
    (without, *_) = ort.InferenceSession(written.SerializeToString()).run(None, x)
    np.testing.assert_array_equal(without, before)
    np.testing.assert_allclose(load(written).run(None, x)[0], before, rtol=5e-6)  # half of the last bit of 25.5 - 0.7


LEFT: Mapping[str, tuple[onnx.ModelProto, Mapping[str, Sequence[int | None]]]] = {
    "many values of the last axis": (model("y = Softmax(x)"), {"y": (2, 17)}),
    "few values behind another axis": (model("y = Softmax<axis = 1>(x)"), {"y": (2, 17, 3, 5)}),
    "a length that is not known": (model("y = Softmax(x)"), {"y": (2, None)}),
    "a shape that is not known": (model("y = Softmax(x)"), {}),
    "an axis that is not there": (model("y = Softmax<axis = 3>(x)"), {"y": (2, 3)}),
    "all axes from one on": (model("y = Softmax<axis = 1>(x)", 12), {"y": (2, 3, 40)}),
    "all axes but the first": (model("y = Softmax(x)", 12), {"y": (2, 3, 40)}),
    "another operator of that name": (model("y = other.Softmax(x)"), {"y": (2, 3)}),
    "another type": (model("y = Softmax(x)", x="double x", y="double y"), {"y": (2, 3)}),
}


@pytest.mark.parametrize(("proto", "shapes"), LEFT.values(), ids=LEFT)
def test_other_softmaxes_stay_as_they_are(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int | None]]) -> None:
    assert wrap_softmaxes(ir.from_proto(proto), shapes) == 0


def test_no_shape_is_known_of_a_softmax_of_doubles(tmp_path: Path) -> None:
    nodes = "d = Cast<to = 11>(x) p = Softmax<axis = -1>(d) y = Cast<to = 1>(p)"
    proto = model(nodes, x="float[N,2,3] x", y="float[N,2,3] y")
    onnx.save(proto, tmp_path / "m.onnx")
    job = prepare(tmp_path / "m.onnx", None, Options(), tmp_path, silent)
    assert job.shapes["y"] == job.shapes["x"]
    assert not {"d", "p"} & {*job.shapes}

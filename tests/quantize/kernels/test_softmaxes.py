"""Softmaxes over few classes in functions: the native operator against its definition, and what stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from requant import NATIVE_DOMAIN
from requant.quantize.kernels.softmaxes import wrap_softmaxes

from ...native import needs_library
from .test_native import load

pytestmark = needs_library
Array = NDArray[Any]


def model(node: str, opset: int = 17, x: str = "float x", y: str = "float y") -> onnx.ModelProto:
    """Return a model of one node."""
    head = f'<ir_version: 8, opset_import: ["" : {opset}, "{NATIVE_DOMAIN}" : 1]>'
    return onnx.parser.parse_model(f"{head} g ({x}) => ({y}) {{ {node} }}")


def softmax(x: Array, axis: int, threads: int = 1) -> Array:
    """Return what the native operator computes."""
    proto = model(f"y = {NATIVE_DOMAIN}.Softmax<axis = {axis}>(x)")
    return np.asarray(load(proto, threads).run(None, {"x": x})[0])


def defined(x: Array, axis: int) -> Array:
    """Return the definition in float64."""
    away = x.astype(np.float64) - x.max(axis, keepdims=True)
    shares: Array = np.exp(away)
    total: Array = shares.sum(axis, keepdims=True)
    return np.asarray(shares / total)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    # each exponential is off by 2e-7 of it and half of the last bit of x - greatest; their sum by a bit for each class
    off = exact * (1e-6 + 2.0**-24 * (shape[axis] + np.abs(x).max() * 2)) + 2.0**-126
    assert (np.abs(found - exact) <= off).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_numbers_that_are_not_finite(isa: str, axis: int) -> None:
    x = np.zeros((5, 3), np.float32)
    x[:, 2] = [np.nan, np.inf, -np.inf, -200, -np.inf]
    x[4] = -np.inf
    x = x if axis == 1 else x.T.copy()
    found = softmax(x, axis)
    found = found if axis == 1 else found.T
    assert np.isnan(found[[0, 1, 4]]).all()
    np.testing.assert_array_equal(found[[2, 3]], [[0.5, 0.5, 0]] * 2)


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

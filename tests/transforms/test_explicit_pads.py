"""Pads as numbers: ONNX Runtime computes the same as with the rule that they replace, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from requant.transforms.explicit_pads import explicit_pads

CHANNELS = 3
RULES = ("SAME_UPPER", "SAME_LOWER", "VALID")


@dataclass(frozen=True)
class Axis:
    """The window over one spatial axis."""

    length: int
    kernel: int
    stride: int
    dilation: int


def model(op: str, axes: list[Axis], given_length: bool, **attributes: Any) -> onnx.ModelProto:
    """Return a model of one node; without `given_length`, the lengths of the input have names."""
    kernel = [axis.kernel for axis in axes]
    lengths = [axis.length if given_length else f"n{place}" for place, axis in enumerate(axes)]
    weights = np.random.default_rng(7).normal(size=(CHANNELS, CHANNELS, *kernel)).astype(np.float32)
    convolves = op.startswith("Conv")
    attributes["strides"] = [axis.stride for axis in axes]
    if not convolves:  # a convolution takes it from its weights
        attributes["kernel_shape"] = kernel
    node = helper.make_node(op, ["x", "w"] if convolves else ["x"], ["y"], **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, CHANNELS, *lengths])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weights, "w")] if convolves else [],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def explicit(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Return a model with pads as numbers, and the report."""
    made = ir.from_proto(proto)
    report = str(explicit_pads(made))
    return ir.to_proto(made), report


def result(proto: onnx.ModelProto, axes: list[Axis]) -> np.ndarray:
    x = np.random.default_rng(3).normal(size=(1, CHANNELS, *(axis.length for axis in axes))).astype(np.float32)
    return np.asarray(ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})[0])


AXIS = st.builds(Axis, st.integers(5, 11), st.integers(1, 5), st.integers(1, 4), st.just(1))


@given(
    op=st.sampled_from(["Conv", "ConvTranspose", "MaxPool", "AveragePool"]),
    axes=st.lists(AXIS, min_size=1, max_size=3),
    rule=st.sampled_from(RULES),
    given_length=st.booleans(),
    counts=st.booleans(),
    ceil=st.booleans(),
)
def test_the_results_stay(op: str, axes: list[Axis], rule: str, given_length: bool, counts: bool, ceil: bool) -> None:
    attributes: dict[str, Any] = {"auto_pad": rule}
    if op.endswith("Pool"):
        attributes["ceil_mode"] = int(ceil)
    if op == "AveragePool":
        attributes["count_include_pad"] = int(counts)
    before = model(op, axes, given_length, **attributes)
    after, report = explicit(before)
    attributes_after = {each.name for each in after.graph.node[0].attribute}
    assert ("auto_pad" in attributes_after) == (report != "1 applied")
    assume(report == "1 applied")
    assert "pads" in attributes_after
    one, other = result(before, axes), result(after, axes)
    assert one.shape == other.shape
    assert one.tobytes() == other.tobytes()


@given(
    axes=st.lists(
        st.builds(Axis, st.integers(4, 9), st.integers(1, 4), st.integers(1, 3), st.integers(2, 3)),
        min_size=1,
        max_size=2,
    ),
    rule=st.sampled_from(RULES[:2]),
)
def test_dilated_convolutions_are_as_the_standard_says(axes: list[Axis], rule: str) -> None:
    """ONNX Runtime refuses the rule; a kernel with zeros between its weights, without dilations, is the same."""
    dilations = [axis.dilation for axis in axes]
    made, report = explicit(model("Conv", axes, True, auto_pad=rule, dilations=dilations))
    assume(report == "1 applied")
    spread = [Axis(each.length, (each.kernel - 1) * each.dilation + 1, each.stride, 1) for each in axes]
    plain = model("Conv", spread, True, auto_pad=rule)
    weights = numpy_helper.to_array(made.graph.initializer[0])
    wide = np.zeros((CHANNELS, CHANNELS, *(axis.kernel for axis in spread)), np.float32)
    wide[(slice(None), slice(None), *(slice(None, None, step) for step in dilations))] = weights
    plain.graph.initializer[0].CopyFrom(numpy_helper.from_array(wide, "w"))
    found, expected = result(made, axes), result(plain, spread)
    x = np.random.default_rng(3).normal(size=(1, CHANNELS, *(axis.length for axis in axes)))
    terms = CHANNELS * int(np.prod([axis.kernel for axis in axes]))
    # two sums of the same products, in any order
    bound = 2 * terms * 2.0**-24 * terms * np.abs(weights).max() * np.abs(x).max()
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("rule", RULES)
def test_what_stays_is_said(rule: str) -> None:
    strided = [Axis(9, 3, 2, 1)]
    found = explicit(model("MaxPool", strided, False, auto_pad=rule))[1]
    assert found == ("1 applied" if rule == "VALID" else "0 applied, 1 free-length")
    assert explicit(model("MaxPool", strided, True, auto_pad=rule))[1] == "1 applied"
    assert explicit(model("MaxPool", strided, True, auto_pad=rule, pads=[0, 0]))[1] == "0 applied, 1 pads-too"


@pytest.mark.parametrize("strides", [[0], [-1], [1, 1]], ids=str)
def test_wrong_numbers_are_left_to_the_runtime(strides: list[int]) -> None:
    proto = model("MaxPool", [Axis(9, 3, 1, 1)], True, auto_pad="SAME_UPPER")
    for attribute in proto.graph.node[0].attribute:
        if attribute.name == "strides":
            attribute.ints[:] = strides
    assert explicit(proto)[1] == "0 applied, 1 window"


@pytest.mark.parametrize("rule", RULES)
def test_a_given_output_shape_decides_its_pads(rule: str) -> None:
    proto = model("ConvTranspose", [Axis(4, 3, 2, 1)], True, auto_pad=rule, output_shape=[8])
    assert explicit(proto)[1] == "0 applied, 1 output-shape"

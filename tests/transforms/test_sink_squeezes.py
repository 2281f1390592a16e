"""A Squeeze behind what a convolution can absorb gives equal outputs, and the convolution absorbs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.transforms import parse_groups, run
from requant.transforms.sink_squeezes import sink_squeezes

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
    keras (float[2,4,1,9] x) => (float[A,B,C] y)
    <int64[1] two = {{{axis}}}, float[1,3,1] each = {{0.5, -1, 2}}, float[3,1] low = {{1, 2, -3}}, float[3] ones = {{1, 2, 3}},
     float[1] one = {{0.7}}, float zero = {{0}}, float six = {{6}}> {{
    c = Conv(x, w) v0 = Squeeze(c, two) {nodes} y = Identity(v{last}) }}"""
FUNCTIONS = {
    "bias": "Add(each, {})",
    "summand": "Add({}, one)",
    "factor": "Mul({}, low)",
    "quotient": "Div({}, each)",
    "difference": "Sub(low, {})",
    "norm": "BatchNormalization({}, ones, ones, ones, ones)",
    "relu": "Relu({})",
    "relu6": "Clip({}, zero, six)",
    "slope": "PRelu({}, low)",
    "tanh": "Tanh({})",
    "elu": "Elu<alpha = 0.5>({})",
}


def model_of(functions: list[str], axis: int = 2) -> onnx.ModelProto:
    """Return a convolution, a Squeeze, and functions of each value."""
    nodes = " ".join(f"v{i + 1} = {FUNCTIONS[name].format(f'v{i}')}" for i, name in enumerate(functions))
    proto = onnx.parser.parse_model(MODEL.format(axis=axis, nodes=nodes, last=len(functions)))
    weights = np.random.default_rng(1).normal(size=(3, 4, 1, 3)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    return proto


def computed(proto: onnx.ModelProto) -> Any:
    """Return the result of a model for random inputs."""
    x = np.random.default_rng(0).normal(size=(2, 4, 1, 9)).astype(np.float32)
    results: Any = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    return results[0]


@given(functions=st.lists(st.sampled_from(sorted(FUNCTIONS)), min_size=1, max_size=4), axis=st.sampled_from([2, -2]))
def test_outputs_stay(functions: list[str], axis: int) -> None:
    proto = model_of(functions, axis)
    model = ir.from_proto(proto)
    assert sink_squeezes(model).applied == len(functions)
    assert [node.op_type for node in model.graph][-2:] == ["Squeeze", "Identity"]
    before = computed(proto)
    # The runtime may fold a factor or a norm into the convolution in one of the two models: its 12 products and each of
    # up to 4 functions round once more, and a factor of up to 3, or a norm, makes an error larger before the next one.
    off = (12 + 4) * 3**2 * 2.0**-24 * (1 + np.abs(before).max())
    np.testing.assert_allclose(computed(ir.to_proto(model)), before, rtol=0, atol=off)


@pytest.mark.parametrize("functions", [["bias", "relu"], ["bias", "relu", "norm"], ["norm", "relu"]])
def test_a_convolution_of_keras_has_its_bias(functions: list[str]) -> None:
    model = run(parse_groups("simplify"), ir.from_proto(model_of(functions))).model
    found = [node.op_type for node in model.graph]
    assert found[:2] == ["Conv", "Relu"]
    assert found[-1] == "Squeeze"
    assert len(model.graph[0].inputs) == 3

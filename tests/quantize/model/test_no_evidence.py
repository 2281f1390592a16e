"""Which tensors say nothing about the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from requant.calibration.model.session import Array
from requant.quantize import Options, quantize_model
from requant.quantize.model.no_evidence import always_zero, no_evidence, unused

LSTM = """<ir_version: 10, opset_import: ["" : 21]>
net (float[N, 8] x, int64[S] slots, float[N, 8] mask, float[M] dead) => (float[N, 8] y)
<int64[1] axes = {0}, float[1] none = {0}, float[1] one = {1}>
{
    s = Shape(x)
    c0 = ConstantOfShape(s)
    g = MatMul(x, w)
    f = Sigmoid(g)
    fc = Mul(f, c0)
    moved = Unsqueeze(fc, axes)
    kept = Add(moved, one)
    c = Add(fc, g)
    i = Cast <to = 1> (slots)
    n = Shape(i)
    filled = ConstantOfShape <value = float[1] {3}> (n)
    count = ReduceSum(filled)
    noise = RandomNormalLike(dead)
    all_of_noise = ReduceSum <keepdims = 0> (noise)
    m = Mul(c, mask)
    t = Add(m, count)
    z = Mul(none, all_of_noise)
    left = Relu(t)
    y = Add(t, z)
}"""
BODY = """<ir_version: 10, opset_import: ["" : 21]>
net (float[8] x, bool which, float[8] a, float[8] b) => (float[8] y)
{
    y = If (which) <then_branch = one () => (float[8] u) { u = Add(x, a) },
                    else_branch = two () => (float[8] v) { k = Shape(b) v = Relu(x) }>
}"""


def model() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(LSTM)
    weights = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return proto


def test_what_is_zero_for_all_inputs_is_found() -> None:
    found = always_zero(ir.from_proto(model()))
    assert found >= {"c0", "fc", "moved", "none", "z"}
    assert not found & {"x", "f", "g", "c", "kept", "filled", "count", "noise", "one", "m", "y"}


def test_what_only_its_shape_is_read_of_is_unused() -> None:
    found = unused(ir.from_proto(model()))
    assert found >= {"slots", "i", "dead", "left", "moved", "kept"}
    assert not found & {"x", "mask", "w", "g", "f", "c", "m", "t", "y", "count", "filled", "n"}


def test_what_a_body_reads_is_used() -> None:
    found = unused(ir.from_proto(onnx.parser.parse_model(BODY)))
    assert not found & {"x", "which", "a", "u", "v", "y"}
    assert found >= {"b", "k"}


@pytest.mark.parametrize("constant", ["slots", "mask"])
def test_only_values_that_are_used_give_a_finding(tmp_path: Path, constant: str) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    random = np.random.default_rng(1)

    def feed() -> dict[str, Array]:
        found: dict[str, Array] = {
            "x": random.standard_normal((2, 8)).astype(np.float32),
            "slots": random.integers(1, 9, 5),
            "mask": random.random((2, 8), np.float32),
            "dead": np.zeros(3, np.float32),
        }
        return found | {constant: np.zeros_like(found[constant])}

    wanted = Options(place="all", force_int8=True)
    result = quantize_model(tmp_path / "m.onnx", [feed() for _ in range(20)], tmp_path / "q.onnx", wanted)
    told = [each.message for each in result.findings if each.kind == "constant"]
    assert [text for text in told if text.startswith("input")] == (
        ["input 'mask' is 0 in all samples; that is right for a first state only: check how the data are read"]
        if constant == "mask"
        else []
    )
    assert not any("'fc'" in text or "'z'" in text for text in told)
    assert no_evidence(ir.load(tmp_path / "m.onnx")) >= {"slots", "fc", "s"}

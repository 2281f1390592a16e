"""A PRelu of several operators gives the same results as a LeakyRelu, or in the parts that are written for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from requant.transforms.fuse_prelu import fuse_prelu
from requant.transforms.patterns.slopes import find_sloped

FORMS = {
    "keras": "r = Relu(x) n = Neg(x) b = Relu(n) f = Neg(b) p = Mul(f, a) y = Add(r, p)",
    "difference": "r = Relu(x) n = Neg(x) b = Relu(n) p = Mul(a, b) y = Sub(r, p)",
    "paddle": "r = Relu(x) s = Abs(x) d = Sub(x, s) p = Mul(a, d) h = Mul(p, half) y = Add(h, r)",
    "absolute": "r = Relu(x) s = Abs(x) d = Sub(s, x) h = Div(d, two) n = Neg(h) p = Mul(n, a) y = Add(r, p)",
    "clip": "r = Relu(x) b = Clip(x, , zero) p = Mul(b, a) y = Add(p, r)",
    "greater": "c = Greater(x, zero) p = Mul(x, a) y = Where(c, x, p)",
    "less": "c = LessOrEqual(x, zero) p = Mul(a, x) y = Where(c, p, x)",
    "zero first": "c = Less(zero, x) p = Mul(a, x) y = Where(c, x, p)",
    "turned": "t = Transpose <perm = [0,2,1]> (x) q = Transpose <perm = [0,2,1]> (t) r = Relu(q) b = Clip(q, , zero) p = Mul(b, a) y = Add(r, p)",
}


def model(nodes: str, slopes: Any) -> onnx.ModelProto:
    """Return a model of a PRelu of a tensor (N, 3, 4)."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N,3,4] x) => (float[N,3,4] y)
        <float zero = {{0}}, float half = {{0.5}}, float two = {{2}}> {{ {nodes} }}"""
    )
    proto.graph.initializer.append(numpy_helper.from_array(slopes, "a"))
    return proto


@given(
    nodes=st.sampled_from(list(FORMS.values())),
    shape=st.sampled_from([(), (1,), (1, 1, 1), (4,), (3, 1), (3, 4), (1, 3, 4), (1, 1, 4)]),
    seed=st.integers(0, 2**16),
)
def test_results_stay(nodes: str, shape: tuple[int, ...], seed: int) -> None:
    random = np.random.default_rng(seed)
    slopes = np.asarray(random.normal(size=shape) * (random.random(shape) < 0.8), np.float32)
    x = (random.normal(size=(2, 3, 4)) * (random.random((2, 3, 4)) < 0.9)).astype(np.float32)
    proto = model(nodes, slopes)
    made = ir.from_proto(proto)
    fuse_prelu(made)
    last = made.graph.outputs[0].producer()
    assert last is not None
    if slopes.size == 1:
        assert last.op_type == "LeakyRelu"
    else:
        assert find_sloped(last) is not None
    before, after = (
        ort.InferenceSession(each.SerializeToString()).run(None, {"x": x})[0] for each in (proto, ir.to_proto(made))
    )
    np.testing.assert_allclose(after, before, rtol=1e-6, atol=0)
    assert not fuse_prelu(made).applied


@pytest.mark.parametrize("nodes", FORMS.values(), ids=FORMS)
def test_values_that_are_not_finite_stay(nodes: str) -> None:
    """NaN and infinite values stay, or become what the operator PRelu makes of them where there was no number."""
    x = np.array([np.inf, -np.inf, np.nan, 1] * 3, np.float32).reshape(1, 3, 4)
    proto = model(nodes, np.array([[0.5], [2], [-1]], np.float32))
    made = ir.from_proto(proto)
    fuse_prelu(made)
    before, after = (
        ort.InferenceSession(each.SerializeToString()).run(None, {"x": x})[0] for each in (proto, ir.to_proto(made))
    )
    known = ~np.isnan(before)
    np.testing.assert_array_equal(after[known], before[known])
    assert np.isnan(after[np.isnan(x)]).all()

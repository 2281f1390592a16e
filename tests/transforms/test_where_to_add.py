"""Scores that a Where replaces in front of a Softmax give the same shares with a mask that is added."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.transforms.patterns.attention import find_attention
from requant.transforms.where_to_add import where_to_add

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
    masked (float[2,2,3,4] q, float[2,2,4,5] k, float[2,2,5,4] v, bool[2,1,R,5] m) => (float[2,2,3,4] y)
    <float below = {{{below}}}, float zero = {{0}}, float scale = {{{scale}}}> {{
    a = MatMul(q, k) b = Mul(a, scale) c = Where(m, {scores}) p = Softmax<axis = -1>(c) {guard} y = MatMul({shares}, v) }}"""


def computed(proto: onnx.ModelProto, feed: dict[str, Any]) -> Any:
    """Return the first result of a model."""
    results: Any = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    return results[0]


@given(
    below=st.sampled_from(["-inf", "-3.4e38", "-1e9", "-10000"]),
    scale=st.sampled_from([0.5, 300.0]),
    stay=st.booleans(),
    guarded=st.booleans(),
    rows=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**16),
)
def test_shares_stay(below: str, scale: float, stay: bool, guarded: bool, rows: int, seed: int) -> None:
    """Also those of rows whose scores are all hidden: equal ones, 0 with a guard, or no numbers without one."""
    order = ("{0}, {1}" if stay else "{1}, {0}").format
    guard = f"r = Where(m, {order('p', 'zero')})" if guarded else ""
    shares = "r" if guarded else "p"
    text = MODEL.format(below=below, scale=scale, scores=order("b", "below"), guard=guard, shares=shares)
    proto = onnx.parser.parse_model(text)
    random = np.random.default_rng(seed)
    sizes = {"q": (2, 2, 3, 4), "k": (2, 2, 4, 5), "v": (2, 2, 5, 4)}
    feed: dict[str, Any] = {name: random.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    feed["m"] = random.random((2, 1, rows, 5)) < 0.4
    feed["m"][0, 0, 0] = not stay
    made = ir.from_proto(proto)
    assert where_to_add(made).applied == 1
    before, after = (computed(each, feed) for each in (proto, ir.to_proto(made)))
    # a share is at most 1, and the runtime's exponential is exact to 1e-6
    np.testing.assert_allclose(after, before, rtol=0, atol=2e-6 * np.abs(feed["v"]).sum(axis=-2).max())


@pytest.mark.parametrize(("guard", "zero"), [("", False), ("r = Where(m, zero, p)", True)])
def test_the_rest_is_attention(guard: str, zero: bool) -> None:
    shares = "r" if guard else "p"
    text = MODEL.format(below="-1e9", scale=1, scores="below, b", guard=guard, shares=shares)
    turned = text.replace("float[2,2,4,5] k", "float[2,2,5,4] k").replace(
        "a = MatMul(q, k)", "kt = Transpose<perm = [0, 1, 3, 2]>(k) a = MatMul(q, kt)"
    )
    model = ir.from_proto(onnx.parser.parse_model(turned))
    where_to_add(model)
    found = find_attention(next(node for node in model.graph if node.op_type == "Softmax"))
    assert found is not None
    assert (found.zero, found.mask is not None) == (zero, True)

"""The operators that replace a LRN compute what its definition says."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
from hypothesis import given
from hypothesis import strategies as st

from requant.transforms.lrn_to_pool import lrn_to_pool

MODEL = """<ir_version: 8, opset_import: ["" : 13]>
    lrn (float[{shape}] x) => (float[{shape}] y) {{
    y = LRN<size = {size}, alpha = {alpha}, beta = {beta}, bias = {bias}>(x) }}"""


def computed(proto: onnx.ModelProto, x: Any) -> Any:
    """Return the result of a model for one input."""
    results: Any = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    return results[0]


@given(
    size=st.sampled_from([1, 3, 5, 9]),
    channels=st.integers(1, 12),
    alpha=st.sampled_from([1e-4, 0.5]),
    beta=st.sampled_from([0.75, 0.5, 1.0]),
    bias=st.sampled_from([1.0, 2.0]),
    free=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_results_stay(size: int, channels: int, alpha: float, beta: float, bias: float, free: bool, seed: int) -> None:
    shape = f"N,{channels},H,W" if free else f"2,{channels},3,5"
    proto = onnx.parser.parse_model(MODEL.format(shape=shape, size=size, alpha=alpha, beta=beta, bias=bias))
    x = np.random.default_rng(seed).normal(0, 20, (2, channels, 3, 5)).astype(np.float32)
    made = ir.from_proto(proto)
    assert lrn_to_pool(made).applied == 1
    squares = np.pad(x.astype(np.float64) ** 2, ((0, 0), (size // 2, size // 2), (0, 0), (0, 0)))
    total = sum(squares[:, i : i + channels] for i in range(size))
    wanted = x / (bias + alpha / size * total) ** beta
    # at most 9 squares and their sum, two products, roots, a quotient: each is exact to half a unit in the last place
    np.testing.assert_allclose(computed(ir.to_proto(made), x), wanted, rtol=20 * 2**-24)
    # the runtime keeps a running sum over the channels: its error is that of the largest sum
    np.testing.assert_allclose(computed(proto, x), wanted, rtol=1e-4)

"""A convolution of one channel with a long kernel is a product with a matrix."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from hypothesis import assume, given
from hypothesis import strategies as st

from requant.transforms.long_conv_to_matmul import long_conv_to_matmul


@given(
    length=st.integers(1, 9),
    kernel=st.integers(1, 12),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 3),
    pads=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_results_stay(
    length: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int], bias: bool, seed: int
) -> None:
    assume(length + sum(pads) >= dilation * (kernel - 1) + 1)
    random = np.random.default_rng(seed)
    values = ", ".join(map(str, random.normal(size=kernel).astype(np.float32)))
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        long (float[N,1,{length}] x) => (float[N,1,U] y) <float[1,1,{kernel}] w = {{{values}}}, float[1] b = {{0.5}}> {{
        y = Conv<strides = [{stride}], dilations = [{dilation}], pads = [{pads[0]}, {pads[1]}]>
            (x, w{", b" if bias else ""}) }}""")
    made = ir.from_proto(proto)
    change = long_conv_to_matmul(made)
    assert (change.applied, change.skipped) == ((1, {}) if 2 * kernel >= length else (0, {"short": 1}))
    feed = {"x": random.normal(size=(3, 1, length)).astype(np.float32)}
    models = [proto.SerializeToString(), ir.to_proto(made).SerializeToString()]
    before, after = (ort.InferenceSession(each).run(None, feed)[0] for each in models)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-4)


def test_the_matrix_has_a_limit() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        long (float[1,1,2000] x) => (float[1,1,U] y) <float[1,1,1000] w> {
        y = Conv<pads = [500, 500]>(x, w) }""")
    weights = onnx.numpy_helper.from_array(np.ones((1, 1, 1000), np.float32), "w")
    del proto.graph.initializer[:]
    proto.graph.initializer.append(weights)
    change = long_conv_to_matmul(ir.from_proto(proto))
    assert (change.applied, change.skipped) == (0, {"large": 1})

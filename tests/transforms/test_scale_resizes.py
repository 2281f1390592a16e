"""A Resize by constant scales computes what one to computed sizes does."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir
import onnxruntime as ort
from hypothesis import example, given
from hypothesis import strategies as st

from requant.transforms.scale_resizes import scale_resizes

MODEL = """<ir_version: 8, opset_import: ["" : 13]>
    up (float[N,2,{rows},{columns}] x, float[N,1,{high},{wide}] z) => (float[N,2,{high},{wide}] y)
    <int64[1] zero = {{0}}, int64[1] two = {{2}}, int64[1] four = {{4}}> {{
    s = Shape(x) kept = Slice(s, zero, two) t = Shape(z) wanted = Slice(t, two, four)
    sizes = Concat<axis = 0>(kept, wanted) y = Resize<{way}>(x, , , sizes) }}"""
WAYS = (
    'mode = "linear"',
    'mode = "linear", coordinate_transformation_mode = "align_corners"',
    'mode = "linear", coordinate_transformation_mode = "asymmetric"',
    'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"',
    'mode = "nearest"',
    'mode = "cubic"',
)
LENGTHS = st.integers(1, 40)


@example(sizes=(7, 7, 31, 62), way=WAYS[0], batch=1)
@example(sizes=(18, 9, 300, 300), way=WAYS[0], batch=1)
@example(sizes=(7, 22, 31, 13), way='mode = "nearest"', batch=1)
@given(sizes=st.tuples(LENGTHS, LENGTHS, LENGTHS, LENGTHS), way=st.sampled_from(WAYS), batch=st.integers(1, 2))
def test_results_stay(sizes: tuple[int, int, int, int], way: str, batch: int) -> None:
    """A scale one float32 step above the quotient moves a position by 40 * 2^-23: linear results by as much."""
    rows, columns, high, wide = sizes
    text = MODEL.format(rows=rows, columns=columns, high=high, wide=wide, way=way)
    proto = onnx.parser.parse_model(text)
    made = ir.from_proto(proto)
    change = scale_resizes(made)
    assert change.applied or ("nearest" in way and [*change.skipped] == ["moves-pixels"])
    onnx.shape_inference.infer_shapes(ir.to_proto(made), strict_mode=True)  # refuses other lengths than those declared
    random = np.random.default_rng(sum(sizes))
    feed: dict[str, Any] = {
        "x": random.normal(size=(batch, 2, rows, columns)).astype(np.float32),
        "z": np.zeros((batch, 1, high, wide), np.float32),
    }
    before, after = (
        np.asarray(ort.InferenceSession(each.SerializeToString()).run(None, feed)[0])
        for each in (proto, ir.to_proto(made))
    )
    assert after.shape == before.shape
    if "nearest" in way:
        assert np.array_equal(after, before)
    else:
        np.testing.assert_allclose(after, before, atol=1e-4)

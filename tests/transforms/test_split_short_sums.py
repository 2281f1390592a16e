"""Sums over short axes: the Adds of the parts compute the same."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
from hypothesis import given
from hypothesis import strategies as st

from requant.transforms.split_short_sums import split_short_sums


@given(
    parts=st.integers(2, 4),
    row=st.sampled_from([(1024,), (16, 8, 8), (5, 300)]),
    gated=st.booleans(),
    split=st.booleans(),
    axis=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_sum_stays(parts: int, row: tuple[int, ...], gated: bool, split: bool, axis: bool, seed: int) -> None:
    lengths = (1, parts, *row)
    gates = (1, parts, row[0], *[1] * (len(row) - 1))
    given_as = (1, parts * row[0], *row[1:]) if split else lengths
    text = ["float[{}] {}".format(",".join(map(str, sizes)), name) for sizes, name in ((given_as, "x"), (gates, "g"))]
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g ({text[0]}, {text[1]}) => (float[{",".join(map(str, (1, *row)))}] y, float[N] unused)
        <int64[{len(lengths)}] whole = {{{",".join(map(str, lengths))}}}, int64[1] over = {{{1 if axis else -1 - len(row)}}},
         int64[1] all = {{-1}}> {{
        v = Reshape(x, whole) p = {"Mul(v, g)" if gated else "Identity(v)"} y = ReduceSum<keepdims = 0>(p, over)
        unused = Reshape(g, all) }}""")
    random = np.random.default_rng(seed)
    feed = {name: random.normal(size=sizes).astype(np.float32) for name, sizes in (("x", given_as), ("g", gates))}
    made = ir.from_proto(proto)
    assert split_short_sums(made).applied == 1
    written = ir.to_proto(made)
    before, after = (
        np.asarray(ort.InferenceSession(each.SerializeToString()).run(["y"], feed)[0]) for each in (proto, written)
    )
    sizes = np.abs(feed["x"].reshape(lengths) * (feed["g"] if gated else 1)).sum(1)
    # both add `parts` products, each rounded, in some order
    assert (np.abs(after - before) <= 2 * parts * 2.0**-24 * sizes).all()

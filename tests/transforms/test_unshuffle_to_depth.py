"""A pixel unshuffle is a SpaceToDepth with its channels in another order."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.transforms import parse_groups, run
from requant.transforms.unshuffle_to_depth import unshuffle_to_depth

FREE = """u = Unsqueeze(x, three) r = Reshape(u, rows) s = Reshape(r, columns)
    t = Transpose<perm = [0, 1, 3, 5, 2, 4]>(s) m = Reshape(t, merge) d = Squeeze(m, ones)"""
FIXED = "s = Reshape(x, split) t = Transpose<perm = [0, 1, 3, 5, 2, 4]>(s) d = Reshape(t, whole)"


def unshuffle(channels: int, block: int, sides: tuple[int, int], *, free: bool, beside: int = 0) -> onnx.ModelProto:
    """Return a model that convolves what PyTorch writes for a PixelUnshuffle, behind `beside` other channels."""
    rows, columns = sides
    count = channels * block**2
    lengths = ("H", "W", "I", "J") if free else (rows * block, columns * block, rows, columns)
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        net (float[N,{channels},{lengths[0]},{lengths[1]}] x, float[N,{beside},{lengths[2]},{lengths[3]}] o)
        => (float[N,3,P,Q] y)
        <int64[1] three = {{3}}, int64[5] rows = {{0, 0, -1, {block}, 0}}, int64[2] ones = {{2, 3}},
        int64[6] columns = {{0, 0, 0, 0, -1, {block}}}, int64[6] merge = {{0, -1, 1, 1, 0, 0}},
        int64[6] split = {{-1, {channels}, {rows}, {block}, {columns}, {block}}},
        int64[4] whole = {{-1, {count}, {rows}, {columns}}}> {{
        {FREE if free else FIXED}
        k = {"Concat<axis = -3>(o, d)" if beside else "Identity(d)"} y = Conv<pads = [1, 0, 1, 0]>(k, w) }}"""
    made = onnx.parser.parse_model(
        text.replace("k = Identity(d)", "").replace("(k, w)", "(k, w)" if beside else "(d, w)")
    )
    weights = np.random.default_rng(0).normal(size=(3, beside + count, 3, 1)).astype(np.float32)
    made.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    if not beside:
        del made.graph.input[1]
    return made


def results(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    """Return the result of a model in ONNX Runtime."""
    return np.asarray(ort.InferenceSession(model.SerializeToString()).run(None, feed)[0])


@given(
    batch=st.integers(1, 2),
    channels=st.integers(1, 4),
    block=st.integers(2, 4),
    sides=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    free=st.booleans(),
    beside=st.integers(0, 3),
)
def test_results_stay(batch: int, channels: int, block: int, sides: tuple[int, int], free: bool, beside: int) -> None:
    proto = unshuffle(channels, block, sides, free=free, beside=beside)
    made = ir.from_proto(proto)
    change = unshuffle_to_depth(made)
    assert (change.applied, change.skipped) == (1, {})
    assert [node.op_type for node in made.graph] == ["SpaceToDepth", *(["Concat"] if beside else []), "Conv"]
    random = np.random.default_rng(1)
    shapes = {"x": (batch, channels, sides[0] * block, sides[1] * block), "o": (batch, beside, *sides)}
    given_inputs = {value.name for value in proto.graph.input}
    feed = {
        name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items() if name in given_inputs
    }
    after = results(ir.to_proto(made), feed)
    np.testing.assert_allclose(after, results(proto, feed), rtol=0, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("free", [False, True])
def test_the_group_finds_it(channels: int, free: bool) -> None:
    """No other step changes the reshapes before."""
    made = run(parse_groups("simplify"), ir.from_proto(unshuffle(channels, 2, (4, 5), free=free))).model
    assert [node.op_type for node in made.graph] == ["SpaceToDepth", "Conv"]


def test_weights_that_another_layer_reads_stay() -> None:
    proto = unshuffle(2, 2, (4, 4), free=False)
    proto.graph.node.append(onnx.helper.make_node("Relu", ["w"], ["z"]))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None))
    made = ir.from_proto(proto)
    assert unshuffle_to_depth(made).applied == 1
    x = np.random.default_rng(1).normal(size=(1, 2, 8, 8)).astype(np.float32)
    outputs = [
        ort.InferenceSession(model.SerializeToString()).run(None, {"x": x}) for model in (proto, ir.to_proto(made))
    ]
    for before, after in zip(*outputs, strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-4)

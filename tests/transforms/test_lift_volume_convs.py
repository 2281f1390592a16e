"""Networks of volumes compute the same as networks of their frames."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from requant.transforms import run
from requant.transforms.graphs.queries import constant, every_node
from requant.transforms.patterns.linear import CONVOLUTIONS
from requant.transforms.pipelines.pipeline import parse

from ..stored import store

SHAPES = {
    "w": (16, 16, 3, 3, 3),
    "flat": (16, 16, 1, 3, 3),
    "point": (16, 16, 1, 1, 1),
    "deep": (16, 16, 3, 1, 1),
    "few": (8, 16, 3, 3, 3),
    "dw": (16, 1, 1, 3, 3),
    "dw3": (16, 1, 3, 3, 3),
    "up": (16, 16, 1, 2, 2),
    "up2": (16, 16, 2, 2, 2),
    "bias": (16,),
    "slope": (16, 1, 1, 1),
    "whole": (1, 16, 1, 1, 1),
    "places": (5, 1, 1),
    "columns": (7,),
    "g": (16,),
    "c": (16,),
    "m": (16,),
    "n": (16,),
    "one": (1,),
}
INTEGERS = {"mean": [2, 3, 4], "cut": [1], "end": [9], "depth": [2]}
BODIES = {
    "a bias and strides": "[op] y = Conv <strides = [2, 2, 1], pads = [1, 0, 1, 0, 1, 1]> (a, w, bias)",
    "dilations": "[op] y = Conv <dilations = [2, 1, 2], pads = [2, 1, 2, 2, 1, 2]> (a, w)",
    "pads beyond the taps": "[op] y = Conv <pads = [2, 0, 0, 1, 0, 0]> (a, point)",
    "one frame": "[op] y = Conv <pads = [0, 1, 1, 0, 1, 1], strides = [2, 1, 1]> (a, flat)",
    "one value": "b = Conv(a, point) y = Conv <strides = [2, 2, 2]> (b, point)",
    "no rows": "b = Conv <pads = [1, 0, 0, 1, 0, 0]> (a, deep) y = Relu(b)",
    "depthwise in a frame": "y = Conv <group = 16, pads = [0, 1, 1, 0, 1, 1]> (a, dw)",
    "transposed": "y = ConvTranspose <strides = [1, 2, 2]> (a, up)",
    "transposed, a frame for each tap": "y = ConvTranspose <strides = [2, 2, 2]> (a, up2, bias)",
    "transposed, joined taps": "b = ConvTranspose <strides = [2, 2, 2], pads = [1, 1, 1, 1, 1, 1], "
    "output_padding = [1, 1, 1]> (a, w, bias) d = Relu(b) y = Conv <pads = [0, 1, 1, 0, 1, 1]> (d, flat)",
    "transposed, stride 1": "y = ConvTranspose <pads = [1, 1, 1, 1, 1, 1]> (a, w)",
    "few results": "y = Conv(a, few)",
    "functions": "b = Sigmoid(a) d = Mul(a, b) e = Clip(d) y = LeakyRelu <alpha = 0.1> (e)",
    "constants of channels": "b = Add(a, slope) d = Mul(b, whole) e = Mul(d, one) y = PRelu(e, slope)",
    "a constant of columns": "b = Add(a, columns) y = Conv(b, w)",
    "a constant in front": "b = Sub(slope, a) d = Mul(one, b) y = Sub(a, d)",
    "a constant of the depth": "y = Add(a, places)",
    "a norm of batches": "y = BatchNormalization(a, g, c, m, n)",
    "a norm of instances": "b = InstanceNormalization(a, g, c) d = Relu(b) y = Conv(d, w)",
    "a norm at the end": "y = InstanceNormalization(a, g, c)",
    "a residual": "b = Add(a, x) d = Relu(b) y = Sub(x, d)",
    "pools": "b = MaxPool <kernel_shape = [1, 3, 3], strides = [1, 2, 2], pads = [0, 1, 1, 0, 1, 1]> (a) "
    "y = AveragePool <kernel_shape = [1, 2, 2]> (b)",
    "a pool of the depth": "b = MaxPool <kernel_shape = [2, 2, 2]> (a) y = Relu(b)",
    "a pool of all axes": "b = MaxPool <kernel_shape = [3, 2, 3], strides = [2, 1, 2], pads = [1, 0, 1, 0, 1, 1], "
    "dilations = [1, 2, 1]> (a) y = Relu(b)",
    "a mean of all axes": "b = AveragePool <kernel_shape = [3, 3, 2], strides = [1, 2, 1]> (a) y = Relu(b)",
    "a mean with pads": "b = AveragePool <kernel_shape = [3, 3, 2], pads = [1, 1, 1, 1, 0, 0], count_include_pad = 1> (a) "
    "y = Conv(b, w)",
    "a mean without pads": "b = AveragePool <kernel_shape = [3, 3, 2], pads = [1, 1, 1, 1, 0, 0]> (a) y = Relu(b)",
    "a pool with a place": "b, d = MaxPool <kernel_shape = [2, 2, 2]> (a) y = Add(b, b)",
    "a gate": "p = GlobalAveragePool(a) s = Sigmoid(p) y = Mul(a, s)",
    "a gate of a convolution": "p = GlobalAveragePool(a) q = Conv(p, point) s = Sigmoid(q) d = Mul(a, s) y = Conv(d, w)",
    "a mean": "y = ReduceMean <keepdims = 0> (a, mean)",
    "joined": "b = Concat <axis = 1> (a, x) y = Relu(b)",
    "joined along the depth": "b = Concat <axis = 2> (a, x) y = Relu(b)",
    "cut": "b = Slice(a, cut, end, depth) y = Conv(b, w)",
    "read by others": "b = Relu(a) d = Transpose <perm = [0, 2, 1, 3, 4]> (b) y = Relu(d)",
    "read in a branch": """y = If (yes) <then_branch = used () => (float[N,C,D,H,W] u) { u = Relu(a) },
        else_branch = other () => (float[N,C,D,H,W] z) { z = Identity(x) }>""",
}


def network(body: str, batch: str = "1", shapes: dict[str, tuple[int, ...]] = SHAPES, depth: int = 5) -> ir.Model:
    """Return a network that begins with a convolution of the volume x; its weights are those that the body reads."""
    rng = np.random.default_rng(0)
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 21]>
        net (float[{batch},16,{depth},6,7] x, bool yes) => (y) {{
            [conv] a = Conv <pads = [1, 1, 1, 1, 1, 1]> (x, w) {body} }}""")
    arrays: dict[str, NDArray[np.generic]] = {name: rng.random(shape).astype("f4") for name, shape in shapes.items()}
    arrays |= {name: np.asarray(values, np.int64) for name, values in INTEGERS.items()}
    store(model, arrays)
    model.graph.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return model


def outputs(model: ir.Model, batch: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(1)
    given = model.graph.inputs[0].shape
    assert given is not None
    lengths = [length if isinstance(length, int) else batch for length in given]
    feed = {"x": rng.standard_normal(lengths).astype(np.float32), "yes": np.array(True)}
    wanted = {name: feed[name] for name in (value.name for value in model.graph.inputs) if name is not None}
    found: NDArray[np.float32] = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, wanted)[0]
    return found


def lift(model: ir.Model) -> ir.Model:
    return run(parse("lift_volume_convs"), model).model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("batch", ["1", "2", "N"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_computes_the_same_on_frames(body: str, batch: str) -> None:
    model = network(body, batch)
    before = outputs(model, 3)
    lifted = lift(model)
    after = outputs(lifted, 3)
    assert after.shape == before.shape
    # two sums of up to 864 products in another order, of values below the largest
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=2 * 864 * 1.2e-7 * float(np.abs(before).max()))
    weights = [constant(node.inputs[1]) for node in every_node(lifted) if node.op_type in CONVOLUTIONS]
    assert weights[0] is not None
    assert len(weights[0].shape) == 4


def test_what_stands_between_convolutions_needs_no_change_of_shape() -> None:
    model = network("b = Relu(a) d = Add(b, x) e = Concat <axis = 1> (d, x) y = BatchNormalization(d, g, c, m, n)")
    assert operators(lift(model)) == [
        *("Transpose", "Reshape", "Pad", "Slice", "Slice", "Slice", "Concat", "Conv"),
        *("Relu", "Add", "Concat", "BatchNormalization", "Reshape", "Transpose"),
    ]


def test_a_batch_that_is_free_has_an_axis_of_its_own_between_the_taps() -> None:
    model = network("y = Conv <pads = [0, 1, 1, 0, 1, 1]> (a, flat)", "N")
    assert operators(lift(model)) == [
        *("Transpose", "Reshape", "Reshape", "Pad", "Slice", "Slice", "Slice", "Concat", "Reshape", "Conv"),
        *("Conv", "Reshape", "Transpose"),
    ]


def test_taps_of_pads_alone_are_left_out() -> None:
    """A volume of one frame needs one of three taps, neither pads nor a Slice."""
    lifted = lift(network("y = Relu(a)", depth=1))
    assert operators(lifted) == ["Reshape", "Conv", "Relu", "Reshape"]


def test_types_are_declared_where_shapes_are(caplog: pytest.LogCaptureFixture) -> None:
    """onnx-ir warns of a shape without a type, and does not write it."""
    lifted = lift(network(BODIES["a norm of instances"]))
    ir.to_proto(lifted)
    assert all(value.type is not None for node in lifted.graph for value in node.outputs)
    assert "Skipping serialization" not in caplog.text


def test_a_second_time_it_changes_nothing() -> None:
    (again,) = run(parse("lift_volume_convs"), lift(network(BODIES["a residual"]))).applied
    assert again.change.applied == 0


@pytest.mark.parametrize(
    ("body", "skipped"),
    [
        ("b = Softmax <axis = 2> (a) y = Conv(b, few)", {"narrow": 1}),
        ("y = Conv <group = 16> (a, dw3)", {"groups": 1}),
        ("y = ConvTranspose <dilations = [2, 1, 1]> (a, up2)", {"alone": 1}),
        ("y = ConvTranspose <strides = [2, 2, 2]> (a, w)", {"alone": 1}),
        ("b = Softmax <axis = 2> (a) y = ConvTranspose <strides = [2, 2, 2]> (b, up2)", {"alone": 1}),
        ("b = Softmax <axis = 2> (a) y = Conv(b, point)", {"alone": 1}),
        ('y = Conv <auto_pad = "SAME_UPPER"> (a, w)', {"computed": 1}),
    ],
)
def test_others_keep_their_volumes(body: str, skipped: dict[str, int]) -> None:
    (done,) = run(parse("lift_volume_convs"), network(body)).applied
    assert done.change.skipped == skipped
    assert done.change.applied == 1


def test_taps_above_the_limit_stay_volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requant.transforms.lift_volume_convs.LARGEST", 4 * 3 * 16 * 5 * 6 * 7 - 1)
    (done,) = run(parse("lift_volume_convs"), network("y = Relu(a)")).applied
    assert (done.change.applied, done.change.skipped) == (0, {"large": 1})


AXES = st.tuples(*[st.integers(1, 3)] * 3)


@settings(max_examples=100)
@given(
    window=AXES,
    strides=AXES,
    dilations=st.tuples(*[st.integers(1, 2)] * 3),
    pads=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    batch=st.sampled_from(["1", "2", "N"]),
    groups=st.sampled_from([1, 4, 16]),
    depth=st.integers(1, 5),
)
def test_any_window_computes_the_same(
    window: tuple[int, int, int],
    strides: tuple[int, int, int],
    dilations: tuple[int, int, int],
    pads: list[int],
    batch: str,
    groups: int,
    depth: int,
) -> None:
    assume(depth + pads[0] + pads[3] > dilations[0] * (window[0] - 1))
    attributes = f"strides = {[*strides]}, dilations = {[*dilations]}, pads = {pads}, group = {groups}"
    shapes = SHAPES | {"any": (16, 16 // groups, *window)}
    model = network(f"b = Relu(a) y = Conv <{attributes}> (b, any)", batch, shapes, depth)
    before = outputs(model, 3)
    lifted = run(parse("lift_volume_convs"), model)
    after = outputs(lifted.model, 3)
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=2 * 864 * 1.2e-7 * float(np.abs(before).max(initial=0)))
    assert lifted.applied[0].change.applied == (2 if groups == 1 or window[0] == 1 else 1)


@settings(max_examples=60)
@given(
    window=st.integers(1, 5),
    stride=st.integers(1, 3),
    front=st.integers(0, 4),
    depth=st.integers(1, 5),
    batch=st.sampled_from(["1", "2", "N"]),
)
def test_any_transposed_depth_computes_the_same(window: int, stride: int, front: int, depth: int, batch: str) -> None:
    behind = window - front - stride  # so that the result has `stride` frames for each frame
    beyond = max(0, -behind)
    assume(beyond < stride and front < window)
    attributes = (
        f"strides = {[stride, 2, 1]}, pads = {[front, 0, 1, max(0, behind), 1, 0]}, output_padding = {[beyond, 1, 0]}"
    )
    shapes = SHAPES | {"any": (16, 16, window, 3, 2)}
    model = network(f"b = Relu(a) y = ConvTranspose <{attributes}> (b, any, bias)", batch, shapes, depth)
    before = outputs(model, 3)
    lifted = run(parse("lift_volume_convs"), model)
    after = outputs(lifted.model, 3)
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=2 * 864 * 1.2e-7 * float(np.abs(before).max(initial=0)))
    assert lifted.applied[0].change.applied == 2


@settings(max_examples=60)
@given(
    op=st.sampled_from(["MaxPool", "AveragePool"]),
    window=AXES,
    strides=AXES,
    pads=st.lists(st.integers(0, 1), min_size=6, max_size=6),
    counted=st.booleans(),
    batch=st.sampled_from(["1", "2", "N"]),
)
def test_any_pool_computes_the_same(
    op: str,
    window: tuple[int, int, int],
    strides: tuple[int, int, int],
    pads: list[int],
    counted: bool,
    batch: str,
) -> None:
    assume(all(pad < length for pad, length in zip(pads, window * 2, strict=True)))
    mean = f", count_include_pad = {int(counted)}" if op == "AveragePool" else ""
    attributes = f"kernel_shape = {[*window]}, strides = {[*strides]}, pads = {pads}{mean}"
    model = network(f"b = {op} <{attributes}> (a) y = Conv(b, point)", batch)
    before = outputs(model, 3)
    after = outputs(lift(model), 3)
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=2 * 864 * 1.2e-7 * float(np.abs(before).max(initial=0)))

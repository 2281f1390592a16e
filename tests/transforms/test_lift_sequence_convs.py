"""Networks of sequences compute the same as networks of images, and have no convolution of a sequence left."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from requant.transforms import run
from requant.transforms.graphs.queries import constant, every_node
from requant.transforms.graphs.rewriter import add_initializer
from requant.transforms.patterns.linear import CONVOLUTIONS
from requant.transforms.pipelines.pipeline import parse

from ..stored import store

SHAPES = {
    "w": (16, 16, 3),
    "dw": (16, 1, 5),
    "v": (16, 16, 2),
    "bias": (16,),
    "slope": (16, 1),
    "whole": (1, 16, 1),
    "g": (16,),
    "c": (16,),
    "m": (16,),
    "n": (16,),
    "last": (12,),
    "one": (1,),
    "gate": (16, 16, 1),
    "two": (2,),
}
INTEGERS = {
    "pads": [0, 0, 2, 0, 0, 1],
    "cut": [1],
    "end": [9],
    "time": [2],
    "back": [-1],
    "halves": [8, 8],
    "parts": [5, 7],
    "channels": [1],
    "from": [0, 1, 2],
    "to": [2, 9, 11],
    "groups": [0, 2, -1],
    "sequence": [2, 16, 12],
    "rest": [0, 16, -1],
    "halved": [4, 8, 12],
    "same": [0, 0, 0],
    "parted": [0, 0, 4, 3],
}
X, FIRST = (2, 16, 12), "[conv] a = Conv <pads = [1, 1]> (x, w)"
GROUPED = "p = Reshape(a, groups) q = InstanceNormalization(p, two, two)"
BODIES = {
    "a bias and a window": "[op] y = Conv <dilations = [2], strides = [3], pads = [2, 1], kernel_shape = [3]> (a, w, bias)",
    "depthwise": "[op] y = Conv <group = 16, pads = [2, 2]> (a, dw)",
    "padding by rule": '[op] y = Conv <auto_pad = "SAME_UPPER", strides = [2]> (a, w)',
    "transposed": "[op] y = ConvTranspose <strides = [2], output_padding = [1], pads = [1, 0]> (a, v)",
    "functions": "b = Sigmoid(a) d = Mul(a, b) e = Clip(d) y = LeakyRelu <alpha = 0.1> (e)",
    "constants of channels": "b = Add(a, slope) d = Mul(b, whole) e = Mul(d, one) y = PRelu(e, slope)",
    "a constant of steps": "y = Add(a, last)",
    "normalizations": "b = InstanceNormalization(a, g, c) y = BatchNormalization(b, g, c, m, n)",
    "a group norm": "b = GroupNormalization <num_groups = 4> (a, g, c) d = Relu(b) y = Conv(d, w)",
    "a group norm in parts": f"{GROUPED} b = Reshape(q, sequence) d = Mul(b, slope) e = Add(d, whole) y = Conv(e, w)",
    "groups without a length": f"{GROUPED} b = Reshape(q, rest) y = Conv(b, w)",
    "groups that end in a sequence": f"{GROUPED} b = Reshape(q, sequence) y = Transpose <perm = [0, 2, 1]> (b)",
    "groups with other readers": f"{GROUPED} b = Reshape(q, sequence) d = Reshape(p, sequence) y = Add(b, d)",
    "groups of other lengths": f"{GROUPED} b = Reshape(q, halved) y = Relu(b)",
    "a residual": "b = Add(a, x) d = Relu(b) y = Sub(x, d)",
    "pools": "b = MaxPool <kernel_shape = [3], strides = [2], pads = [1, 1]> (a) y = AveragePool <kernel_shape = [2]> (b)",
    "a gate": "p = GlobalAveragePool(a) q = Conv(p, gate) s = Sigmoid(q) y = Mul(a, s)",
    "a mean": "p = ReduceMean <keepdims = 1> (a, back) y = Mul(a, p)",
    "a mean without the axis": "y = ReduceMean <keepdims = 0> (a, time)",
    "a mean of channels": "p = ReduceMean(a, channels) y = Mul(a, p)",
    "joined": "b = Concat <axis = 1> (a, x) y = Concat <axis = -1> (b, b)",
    "split": "b, d = Split <axis = 1> (a, halves) e, y = Split <axis = -1> (b, parts)",
    "cut": "b = Slice(a, cut, end, time) y = Slice(b, cut, end, back)",
    "cut without axes": "y = Slice(a, from, to)",
    "padded": 'b = Pad <mode = "reflect"> (a, pads) y = Pad(b, pads)',
    "a softmax": "b = Softmax <axis = 1> (a) y = Softmax(b)",
    "read by others": "b = Relu(a) d = Transpose <perm = [0, 2, 1]> (b) y = Relu(d)",
    "read in a branch": """y = If (yes) <then_branch = used () => (float[N,C,S] u) { u = Relu(a) },
        else_branch = other () => (float[N,C,S] z) { z = Identity(x) }>""",
}


def network(body: str) -> ir.Model:
    """Return a network that begins with a convolution of the sequence x; its weights are those that the body reads."""
    rng = np.random.default_rng(0)
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 21]>
        net (float[2,16,12] x, bool yes) => (y) {{ {FIRST} {body} }}""")
    arrays: dict[str, NDArray[np.generic]] = {name: rng.random(shape).astype("f4") for name, shape in SHAPES.items()}
    arrays |= {name: np.asarray(values, np.int64) for name, values in INTEGERS.items()}
    store(model, arrays)
    model.graph.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return model


def outputs(model: ir.Model) -> NDArray[np.float32]:
    feed = {"x": np.random.default_rng(1).standard_normal(X).astype(np.float32), "yes": np.array(True)}
    found: NDArray[np.float32] = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, feed)[0]
    return found


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_computes_the_same_on_images(body: str) -> None:
    model = network(body)
    lifted = run(parse("lift_sequence_convs"), model).model
    before, after = outputs(model), outputs(lifted)
    assert after.shape == before.shape
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)  # sums of 80 products of about 1, in another order
    weights = [constant(node.inputs[1]) for node in every_node(lifted) if node.op_type in CONVOLUTIONS]
    assert all(each is not None and len(each.shape) == 4 for each in weights)


def test_what_stands_between_convolutions_needs_no_change_of_shape() -> None:
    model = network("b = Relu(a) d = Add(b, x) e = Concat <axis = 1> (d, x) y = BatchNormalization(d, g, c, m, n)")
    lifted = run(parse("lift_sequence_convs"), model).model
    assert [node.op_type for node in lifted.graph] == [
        *("Unsqueeze", "Conv", "Relu", "Add", "Concat", "BatchNormalization", "Squeeze"),
    ]


def test_a_group_norm_in_parts_needs_no_change_of_shape() -> None:
    """It reads an image and writes one: the native operator finds it between native convolutions."""
    lifted = run(parse("lift_sequence_convs"), network(BODIES["a group norm in parts"])).model
    assert [node.op_type for node in lifted.graph] == [
        *("Unsqueeze", "Conv", "Reshape", "InstanceNormalization", "Reshape", "Mul", "Add", "Conv", "Squeeze"),
    ]


@given(
    groups=st.sampled_from([1, 2, 4, 8, 16]),
    front=st.sampled_from([(0, 1, -1), (2, 1, -1), (-1, 1, 0), (0, -1, 0), (2, 1, 0)]),
    back=st.sampled_from([(0, 16, -1), (2, 16, 12), (-1, 16, 12), (0, -1, 12), (4, 8, 12), (2, -1, 24), (12, 16, 2)]),
    scaled=st.booleans(),
)
def test_any_targets_of_a_group_norm_compute_the_same(
    groups: int, front: tuple[int, int, int], back: tuple[int, int, int], scaled: bool
) -> None:
    """In `front` a 1 stands for the number of groups, and a 0 at the end for the values of a group."""
    rest = (
        "d = Mul(b, slope) y = Conv(d, w)" if scaled and back[1:] in ((16, -1), (16, 12), (-1, 12)) else "y = Relu(b)"
    )
    model = network(f"p = Reshape(a, groups) q = InstanceNormalization(p, two, two) b = Reshape(q, sequence) {rest}")
    first = [front[0], groups if front[1] == 1 else -1, front[2] or 16 * 12 // groups]
    changed = {"groups": np.asarray(first), "sequence": np.asarray(back), "two": np.full(groups, 0.5, np.float32)}
    for name, array in changed.items():
        value = model.graph.initializers[name]
        value.const_value = ir.tensor(array)
        value.shape = ir.Shape(array.shape)
    before = outputs(model)
    lifted = run(parse("lift_sequence_convs"), model).model
    np.testing.assert_allclose(outputs(lifted), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", ["same", "parted"])
def test_other_reshapes_around_a_norm_read_sequences(target: str) -> None:
    """A 0 for the third axis would copy the length of the row, and a group norm has three axes."""
    body = f"p = Reshape(a, {target}) q = InstanceNormalization(p, g, c) b = Reshape(q, sequence) y = Relu(b)"
    model = network(body)
    lifted = run(parse("lift_sequence_convs"), model).model
    assert [node.op_type for node in lifted.graph][:4] == ["Unsqueeze", "Conv", "Squeeze", "Reshape"]
    np.testing.assert_allclose(outputs(lifted), outputs(model), rtol=1e-4, atol=1e-4)


def test_a_second_time_it_changes_nothing() -> None:
    lifted = run(parse("lift_sequence_convs"), network(BODIES["a gate"])).model
    (again,) = run(parse("lift_sequence_convs"), lifted).applied
    assert again.change.applied == 0


@pytest.mark.parametrize(
    ("count", "op", "skipped"),
    [
        (1, "Conv", {"narrow": 1}),
        (5, "Conv", {"narrow": 1}),
        (6, "Conv", {}),
        (1, "ConvTranspose", {}),
    ],
)
def test_few_results_stay_sequences(count: int, op: str, skipped: dict[str, int]) -> None:
    """The blocked layout of images computes 16 channels where one is needed."""
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 21]>
        net (float[2,16,12] x) => (y) {{ y = {op}(x, w) }}""")
    shape = (count, 16, 3) if op == "Conv" else (16, count, 3)
    (node,) = model.graph
    node.replace_input_with(1, add_initializer(model.graph, "v", np.ones(shape, np.float32)))
    (done,) = run(parse("lift_sequence_convs"), model).applied
    assert done.change.skipped == skipped
    assert done.change.applied == 1 - len(skipped)


@pytest.mark.parametrize(
    ("op", "inputs", "results", "window", "lifted"),
    [
        ("Conv", 3, 8, 3, True),
        ("Conv", 8, 6, 9, False),
        ("Conv", 8, 7, 6, False),
        ("Conv", 8, 7, 7, True),
        ("Conv", 15, 11, 6, False),
        ("Conv", 12, 12, 4, False),
        ("Conv", 12, 12, 5, True),
        ("Conv", 8, 16, 2, False),
        ("Conv", 8, 16, 3, True),
        ("Conv", 16, 8, 1, True),
        ("ConvTranspose", 8, 8, 2, False),
        ("ConvTranspose", 8, 1, 3, True),
        ("ConvTranspose", 16, 8, 2, True),
    ],
)
def test_narrow_inputs_need_long_windows_or_many_results(
    op: str, inputs: int, results: int, window: int, lifted: bool
) -> None:
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 21]>
        net (float[2,{inputs},12] x) => (y) {{ y = {op}(x, w) }}""")
    shape = (results, inputs, window) if op == "Conv" else (inputs, results, window)
    (node,) = model.graph
    node.replace_input_with(1, add_initializer(model.graph, "v", np.ones(shape, np.float32)))
    (done,) = run(parse("lift_sequence_convs"), model).applied
    assert done.change.skipped == ({} if lifted else {"narrow": 1})
    assert done.change.applied == int(lifted)

"""Channels of activations are scaled, the constants around them compensate, and the model computes the same."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant import RequantError
from requant.calibration.data.samples import Sample
from requant.calibration.model.session import Array
from requant.quantize.corrections.channel_noise import Channels, reader_of, total
from requant.quantize.corrections.equalization import choose, equalize_channels, observed
from requant.quantize.model.files import staging
from requant.quantize.options.options import Options
from requant.quantize.runtime.progress import silent
from requant.quantize.steps.prepare import prepare
from requant.transforms import verify
from requant.transforms.graphs.inference import inferred
from requant.transforms.graphs.queries import node_name
from requant.transforms.graphs.rewriter import add_initializer
from requant.transforms.parts.equalize import Group, equalize, find, groups

EPS = float(np.finfo(np.float32).eps)
CHANNELS = 4
HEADER = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n'
WEIGHTS = {"v": (4, 4), "w": (4, 4), "k": (4, 4, 1, 1), "l": (4, 4, 1, 1), "p": (4, 4, 3, 3), "d": (4, 1, 1, 1)}
VECTORS = ("a", "b", "g", "h")


def made(body: str, shape: str = "N,4", outputs: str = "y", opset: int = 17) -> ir.Model:
    """Return a model with random weights of `WEIGHTS` and vectors of `VECTORS`, and the scalars zero, six and half."""
    results = ", ".join(f"float[] {name}" for name in outputs.split())
    known = [*WEIGHTS, *VECTORS, "zero", "six", "half"]
    # types of initializers are known only once they are there
    text = (
        HEADER.replace("17", str(opset))
        + f"g (float[{shape}] x, {', '.join(f'float[] {n}' for n in known)}) => ({results}) {{ {body} }}"
    )
    model = ir.from_onnx_text(text)
    random = np.random.default_rng(5)
    arrays: dict[str, Array] = {name: random.normal(size=shape) for name, shape in WEIGHTS.items()}
    arrays |= {name: random.uniform(0.5, 2, CHANNELS) for name in VECTORS}
    arrays |= {"zero": np.asarray(0.0), "six": np.asarray(6.0), "half": np.asarray(0.5)}
    graph = model.graph
    for value in tuple(graph.inputs)[1:]:
        graph.inputs.remove(value)
        if value.uses():
            fresh = add_initializer(graph, f"{value.name}_", arrays[str(value.name)].astype(np.float32))
            value.replace_all_uses_with(fresh)
            fresh.name = value.name
    known_shapes = inferred(model)
    for value in graph.outputs:
        found = known_shapes[str(value.name)].shape
        value.shape = found if found else ir.Shape([None] * len(graph.inputs[0].shape or ()))
    return model


def outputs(model: ir.Model, feed: Mapping[str, Array]) -> list[Array]:
    """Run a model as it is written."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    data = ir.to_proto(model).SerializeToString()
    return [
        np.asarray(v) for v in ort.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, feed)
    ]


def weights_of(model: ir.Model, name: str) -> Array:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def feed_of(shape: tuple[int, ...]) -> dict[str, Array]:
    return {"x": np.random.default_rng(3).normal(size=shape).astype(np.float32)}


FREE = {
    "matmul": ("t = MatMul(x, v)  y = MatMul(t, w)", "N,4", 1),
    "gemm": ("t = Gemm<transB = 1>(x, v, a)  r = Relu(t)  y = Gemm(r, w, b)", "N,4", 1),
    "bias": ("m = MatMul(x, v)  t = Add(a, m)  r = Relu(t)  y = MatMul(r, w)", "N,3,4", 1),
    "three-readers": ("t = LayerNormalization(x, g, h)  q = MatMul(t, v)  e = MatMul(t, w)  y = Sub(q, e)", "N,3,4", 1),
    "rms-norm": (
        "q = Mul(x, x)  m = ReduceMean<axes = [-1]>(q)  r = Sqrt(m)  i = Div(x, r)  t = Mul(g, i)  y = MatMul(t, v)",
        "N,3,4",
        1,
    ),
    "skip-norm": ("t = com.microsoft.SkipLayerNormalization(x, x, g, h)  y = MatMul(t, v)", "N,3,4", 1),
    "depthwise": (
        "c = Conv(x, k, a)  r = Relu(c)  e = Conv<group = 4>(r, d)  s = Relu(e)  y = Conv(s, p, b)",
        "N,4,5,5",
        2,
    ),
    "transposed": ("c = ConvTranspose(x, k, a)  r = LeakyRelu(c)  y = ConvTranspose(r, l)", "N,4,5,5", 1),
    "normalised": (
        "c = Conv(x, k)  n = BatchNormalization(c, g, h, a, b)  r = PRelu(n, half)  y = Conv(r, l)",
        "N,4,5,5",
        2,
    ),
    "residual": (
        "c = Conv(x, k, a)  r = Relu(c)  e = Conv(r, l)  s = Add(e, r)  f = Relu(s)  y = Conv(f, l)",
        "N,4,5,5",
        1,
    ),
    "pooled": (
        "c = Conv(x, k, a)  m = MaxPool<kernel_shape = [2,2]>(c)  q = GlobalAveragePool(m)  f = Flatten(q)  y = Gemm(f, v)",
        "N,4,5,5",
        1,
    ),
    "gate": ("t = MatMul(x, v)  e = MatMul(x, w)  s = Sigmoid(e)  m = Mul(s, t)  y = MatMul(m, w)", "N,4", 1),
    "attention": ("t = MatMul(x, v)  e = Softmax(x)  m = MatMul(e, t)  y = MatMul(m, w)", "4,4", 1),
    "squeezed": ("t = MatMul(x, v)  i = Transpose<perm = [1,0,2]>(t)  n = Shape(i)  y = MatMul(i, w)", "N,3,4", 1),
}


@pytest.mark.parametrize(("body", "shape", "count"), FREE.values(), ids=FREE)
@pytest.mark.parametrize("opset", [17, 13], ids="opset{}".format)
def test_powers_of_two_change_no_bit(body: str, shape: str, count: int, opset: int) -> None:
    if "LayerNormalization(x, g" in body and "Skip" not in body and opset < 17:
        pytest.skip("LayerNormalization is of opset 17")
    model = made(body, shape, opset=opset)
    feed = feed_of(tuple(3 if part == "N" else int(part) for part in shape.split(",")))
    before, names = outputs(model, feed), [(node.op_type, node.outputs[0].name) for node in model.graph]
    found = groups(model)
    assert len(found) == count
    random = np.random.default_rng(9)
    change = equalize(model, {each.tensor: np.exp2(random.integers(-5, 6, CHANNELS)) for each in found})
    assert change.applied == count
    verify(model)
    assert [(node.op_type, node.outputs[0].name) for node in model.graph] == names
    for expected, value in zip(before, outputs(model, feed), strict=True):
        np.testing.assert_array_equal(value, expected)


STUCK = {
    "graph-output": ("y = MatMul(x, v)  z = MatMul(y, w)", "y z", "graph-output"),
    "activation": ("t = MatMul(x, v)  s = Sigmoid(t)  u = Add(t, s)  y = MatMul(t, w)", "y u", "next-to-Sigmoid"),
    "silu": ("t = MatMul(x, v)  s = Sigmoid(t)  m = Mul(t, s)  y = MatMul(m, w)", "y", "next-to-Sigmoid"),
    "square": ("t = MatMul(x, v)  m = Mul(t, t)  y = MatMul(m, w)", "y", "next-to-Mul"),
    "clip": ("t = MatMul(x, v)  c = Clip(t, half, six)  y = MatMul(c, w)", "y", ""),
    "residual": ("t = MatMul(x, v)  s = Add(t, x)  y = MatMul(s, w)", "y", ""),
    "transposed": (
        "t = MatMul(x, v)  i = Transpose<perm = [1,0]>(t)  y = MatMul(i, w)",
        "y",
        "channels-on-another-axis",
    ),
    "left": ("t = MatMul(x, v)  y = MatMul(w, t)  z = MatMul(t, w)", "y z", "graph-output"),
}


@pytest.mark.parametrize(("body", "results", "reason"), STUCK.values(), ids=STUCK)
def test_what_is_not_free_is_left_alone(body: str, results: str, reason: str) -> None:
    found, skipped = find(made(body, "4,4", results))
    assert not found
    assert set(skipped) == ({reason} if reason else set())


def test_a_reader_in_a_body_keeps_the_scale() -> None:
    model = ir.from_onnx_text(
        HEADER
        + """g (float[N,2] x, bool c) => (float[N,2] y, float[N,2] z) <float[2,2] v = {1, 2, 3, 4}> {
        t = MatMul(x, v)
        z = MatMul(t, v)
        y = If(c) <then_branch = a () => (float[N,2] p) { p = Relu(t) }, else_branch = b () => (float[N,2] q) { q = Neg(t) }>
    }"""
    )
    found, skipped = find(model)
    assert not found
    assert skipped == {"read-in-a-body": 1}


def test_shared_weights_are_copied() -> None:
    model = made("t = MatMul(x, v)  r = Relu(t)  s = MatMul(r, v)  y = Sigmoid(s)  z = MatMul(x, v)", "N,4", "y z")
    weights, feed = weights_of(model, "v"), feed_of((3, 4))
    before = outputs(model, feed)
    equalize(model, {groups(model)[0].tensor: np.array([0.5, 1, 2, 4.0])})
    np.testing.assert_array_equal(weights_of(model, "v"), weights)
    assert len(model.graph.initializers) == 3
    for expected, value in zip(before, outputs(model, feed), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_grouped_convolutions_take_the_scale_of_their_own_channels() -> None:
    random = np.random.default_rng(2)
    model = made(
        "c = Conv(x, k)  r = Relu(c)  e = Conv<group = 2>(r, q)  f = ConvTranspose<group = 2>(e, u)  y = Conv(f, l)".replace(
            "q)", "k)"
        ).replace("u)", "k)"),
        "N,4,3,3",
    )
    for node, shape in (("e", (6, 2, 1, 1)), ("f", (6, 2, 1, 1))):
        place = next(n for n in model.graph if n.outputs[0].name == node)
        place.replace_input_with(
            1, add_initializer(model.graph, f"w_{node}", random.normal(size=shape).astype(np.float32))
        )
    feed = feed_of((2, 4, 3, 3))
    before, found = outputs(model, feed)[0], groups(model)
    assert [each.channels for each in found] == [4, 6, 4]
    equalize(model, {each.tensor: np.exp2(random.integers(-5, 6, each.channels)) for each in found})
    np.testing.assert_array_equal(outputs(model, feed)[0], before)


REFUSED = {
    "name": ({"nothing": np.ones(4)}, "nothing"),
    "length": ({"t": np.ones(3)}, "4 channels"),
    "sign": ({"t": np.array([1, 1, 0, 1.0])}, "positive"),
}


@pytest.mark.parametrize(("scales", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_folded_is_refused(scales: dict[str, Array], message: str) -> None:
    with pytest.raises(RequantError, match=message):
        equalize(made("t = MatMul(x, v)  y = MatMul(t, w)"), scales)


def test_overflow_is_left_alone() -> None:
    model = made("t = MatMul(x, v)  y = MatMul(t, w)")
    change = equalize(model, {"t": np.full(4, 1e39)})
    assert (change.applied, change.skipped) == (0, {"not-finite": 1})


@given(
    widths=st.lists(st.integers(1, 6), min_size=3, max_size=5),
    acts=st.lists(st.sampled_from(["", "Relu", "LeakyRelu", "Abs", "Neg"]), min_size=4, max_size=4),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=30)
def test_chains_compute_the_same_within_rounding(widths: list[int], acts: list[str], seed: int) -> None:
    """Each of the two models is off by at most (n + 4) eps |W| |x| per layer, of the scale, the weight and n products."""
    random = np.random.default_rng(seed)
    graph = ir.Graph([ir.val("x", ir.DataType.FLOAT, [2, widths[0]])], [], nodes=[], name="g", opset_imports={"": 17})
    value, size = (
        graph.inputs[0],
        np.abs(feed := random.normal(size=(2, widths[0])).astype(np.float32)).astype(np.float64),
    )
    for layer, (n, m) in enumerate(pairwise(widths)):
        weight, bias = random.normal(size=(n, m)).astype(np.float32), random.normal(size=m).astype(np.float32)
        constants = [add_initializer(graph, f"{name}{layer}", array) for name, array in (("w", weight), ("b", bias))]
        steps: list[tuple[str, list[ir.Value]]] = [("MatMul", constants[:1]), ("Add", constants[1:])]
        if acts[layer] and layer < len(widths) - 2:
            steps.append((acts[layer], []))
        for op, more in steps:
            node = ir.node(op, [value, *more])
            graph.append(node)
            value = node.outputs[0]
            value.name = f"{op}{layer}"
        size = size @ np.abs(weight).astype(np.float64) + np.abs(bias)
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([2, widths[-1]])
    graph.outputs.append(value)
    model = ir.Model(graph, ir_version=8)
    before, found = outputs(model, {"x": feed})[0], groups(model)
    assert len(found) == len(widths) - 2
    scales = {each.tensor: 2 ** random.uniform(-4, 4, each.channels) for each in found}
    assert equalize(model, scales).applied == len(found)
    allowed = 2 * len(widths) * (max(widths) + 4) * EPS * size
    assert (np.abs(outputs(model, {"x": feed})[0] - before) <= allowed).all()


def channels(values: Array) -> Channels:
    return Channels(values.min(axis=0), values.max(axis=0), values.mean(axis=0), np.square(values).mean(axis=0))


def test_the_estimate_is_what_rounding_makes() -> None:
    """Noise of 20,000 products of 32 outputs: its estimate is off by the spread of 640,000 squares and of 32 steps."""
    random = np.random.default_rng(0)
    model = made("t = MatMul(x, v)  y = MatMul(t, w)")
    x = random.normal(size=(20_000, 4)) * [1, 4, 16, 0.5]
    big = random.normal(size=(4, 32)).astype(np.float32)
    reader = next(node for node in model.graph if node.outputs[0].name == "y")
    reader.replace_input_with(1, add_initializer(model.graph, "big", big))
    (group,) = groups(model)
    readers = [each for fold in group.readers if (each := reader_of(fold)) is not None]
    for scale in (np.ones(4), np.array([0.25, 1, 4, 0.125])):
        step = (max(0, (x / scale).max()) - min(0, (x / scale).min())) / 255
        weight = big * scale[:, None]
        steps = np.abs(weight).max(axis=0) / 127
        error = (np.rint(x / scale / step) * step) @ (np.rint(weight / steps) * steps) - x @ big
        found = total(readers, {"t": channels(x)}, (), scale)
        # the rounding errors of 128 weights are few: their sum of squares spreads by sqrt(1.8 / 128) * 3 sigma
        assert np.square(error).sum(axis=1).mean() == pytest.approx(found, rel=0.36)


def uneven(body: str, shape: str) -> ir.Model:
    """Return a model whose second tensor has channels of 1, 10, 100 and 1000 times a range."""
    model = made(body, shape)
    for value in model.graph.initializers.values():
        if value.name in ("k", "v") and value.const_value is not None:
            array = value.const_value.numpy()
            factor = 10.0 ** np.arange(4)
            array = array * (factor.reshape(4, 1, 1, 1) if array.ndim == 4 else factor)
            value.const_value = ir.Tensor(array.astype(np.float32), name=value.name)
    return model


def decided(model: ir.Model, feeds: list[dict[str, Array]]) -> tuple[Group, Array | None]:
    (group,) = groups(model)
    samples = [Sample(feed, None, f"sample {index}") for index, feed in enumerate(feeds)]
    names = {node_name(node) for node in model.graph}
    return group, choose([group], observed(model, [group], samples), names).get(group.tensor)


def test_channels_come_closer_to_each_other() -> None:
    model = uneven("t = Conv(x, k)  r = Relu(t)  y = Conv(r, l)", "N,4,5,5")
    _, scale = decided(model, [feed_of((2, 4, 5, 5))])
    assert scale is not None
    assert (np.diff(np.log2(scale)) >= 0).all()
    assert scale[3] / scale[0] >= 32
    assert (np.log2(scale) % 1 == 0).all()


def test_even_channels_stay() -> None:
    model = made("t = Conv(x, k)  y = Conv(t, l)", "N,4,5,5")
    for value in model.graph.initializers.values():
        value.const_value = ir.Tensor(np.ones((4, 4, 1, 1), np.float32), name=value.name)
    assert decided(model, [feed_of((2, 4, 5, 5))])[1] is None


@pytest.mark.parametrize("pool", ["", "GlobalAveragePool"], ids=["bare", "pooled"])
def test_a_clip_acts_on_the_same_values(pool: str) -> None:
    body = f"t = Conv(x, k)  c = Clip(t, zero, six)  {f'q = {pool}(c)  y = Conv(q, l)' if pool else 'y = Conv(c, l)'}"
    model = uneven(body, "N,4,5,5")
    weight = model.graph.initializers["k"]
    assert weight.const_value is not None
    weight.const_value = ir.Tensor(weight.const_value.numpy() / np.float32(100), name="k")
    feed = feed_of((8, 4, 5, 5))
    before = outputs(model, feed)[0]
    group, scale = decided(model, [feed])
    assert group.ceiling == 6
    assert scale is not None
    assert scale[3] == 1  # it reaches the bound
    assert scale[0] < 1
    equalize(model, {group.tensor: scale})
    np.testing.assert_array_equal(outputs(model, feed)[0], before)


def test_a_job_keeps_its_plan_and_its_model(tmp_path: Path) -> None:
    model = uneven("t = Conv(x, k)  r = Relu(t)  y = Conv(r, p)", "N,4,9,9")
    model.graph.outputs[0].shape = ir.Shape([None, 4, 7, 7])
    path, random = tmp_path / "float.onnx", np.random.default_rng(1)
    ir.save(model, path)
    feeds = [{"x": random.normal(size=(1, 4, 9, 9)).astype(np.float32)} for _ in range(8)]
    with staging() as folder:
        job = prepare(path, feeds, Options(place="all"), folder, silent)
        better = equalize_channels(job)
        assert [*better.notes][-1].startswith("channels of 1 group")
        assert better.all_int8_plan is job.all_int8_plan
        for feed in feeds:
            np.testing.assert_array_equal(outputs(better.simple, feed)[0], outputs(job.simple, feed)[0])
        assert not np.array_equal(weights_of(better.simple, "k"), weights_of(job.simple, "k"))

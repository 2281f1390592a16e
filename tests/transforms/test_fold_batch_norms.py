"""The arithmetic of `fold_batch_norms`: each kind of weight against the formula, and what must not be folded."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from requant.transforms import REGISTRY, Change
from requant.transforms.int8.qparams import asymmetric_u8, dequantize, quantize
from requant.transforms.patterns.linear import DEVIATIONS, noise_before

fold_batch_norms = REGISTRY["fold_batch_norms"]

EPS = float(np.finfo(np.float32).eps)


def model(
    nodes: list[tuple[str, list[str], str, dict[str, Any]]],
    constants: dict[str, np.ndarray],
    shape: list[int],
    opset: int = 17,
) -> ir.Model:
    """Build a model from x to y, both float32."""
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [output], name=output, **attributes) for op, inputs, output, attributes in nodes],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape))],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))


def result(model: ir.Model, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@given(
    op=st.sampled_from(["Conv", "ConvTranspose"]),
    groups=st.integers(1, 3),
    per_group=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40)
def test_convolutions_of_any_grouping_give_the_same(
    op: str, groups: int, per_group: tuple[int, int], bias: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    channels_in, channels = groups * per_group[0], groups * per_group[1]
    shape = (channels, per_group[0], 2, 2) if op == "Conv" else (channels_in, per_group[1], 2, 2)
    constants = {"w": random.normal(size=shape)} | {
        key: random.normal(size=channels) for key in ("gamma", "beta", "mean")
    }
    constants["var"] = random.uniform(0.1, 2, channels)
    constants["scale"], constants["shift"] = (
        random.normal(size=(1, channels, 1, 1)),
        random.normal(size=(channels, 1, 1)),
    )
    if bias:
        constants["b"] = random.normal(size=channels)
    made = model(
        [
            (op, ["x", "w", *(["b"] if bias else [])], "c", {"group": groups}),
            ("BatchNormalization", ["c", "gamma", "beta", "mean", "var"], "n", {"epsilon": 1e-3}),
            ("Mul", ["scale", "n"], "m", {}),
            ("Add", ["m", "shift"], "y", {}),
        ],
        {name: array.astype(np.float32) for name, array in constants.items()},
        [2, channels_in, 4, 4],
    )
    x = random.normal(size=(2, channels_in, 4, 4)).astype(np.float32)
    expected = result(made, x)
    assert fold_batch_norms(made).applied == 3
    assert [node.op_type for node in made.graph] == [op]
    # Both sides round each of K products and sums once, and the constants 3 times; every term is below `terms`.
    products = int(np.prod(shape))
    gain = np.max(np.abs(constants["gamma"] / np.sqrt(constants["var"]) * constants["scale"].ravel()))
    terms = gain * (products * np.max(np.abs(x)) * np.max(np.abs(constants["w"])) + 8) + 16
    assert np.max(np.abs(result(made, x) - expected)) <= (products + 8) * EPS * terms


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("bias", [(3,), (1, 3), (1,), (), None], ids=str)
def test_gemm_keeps_alpha_and_takes_up_beta(transposed: int, bias: tuple[int, ...] | None) -> None:
    constants = {"w": np.arange(6.0).reshape((3, 2) if transposed else (2, 3)), "s": np.array([2.0, 4.0, 8.0])}
    if bias is not None:
        constants["b"] = np.arange(1.0, 1 + np.prod(bias)).reshape(bias)
    made = model(
        [
            (
                "Gemm",
                ["x", "w", *(["b"] if bias is not None else [])],
                "g",
                {"alpha": 0.5, "beta": 2.0, "transB": transposed},
            ),
            ("Mul", ["g", "s"], "y", {}),
        ],
        {name: array.astype(np.float32) for name, array in constants.items()},
        [2, 2],
    )
    x = np.array([[1, 2], [-3, 4]], np.float32)
    expected = result(made, x)
    assert fold_batch_norms(made) == Change(applied=1)
    assert np.array_equal(result(made, x), expected)  # whole numbers times powers of two: nothing is rounded


def test_a_weight_that_would_overflow_its_type_stays() -> None:
    half = {"w": np.full((1, 1, 1, 1), 60000, np.float16), "s": np.full((1, 1, 1), 2, np.float16)}
    made = model([("Conv", ["x", "w"], "c", {}), ("Mul", ["c", "s"], "y", {})], half, [1, 1, 2, 2])
    assert fold_batch_norms(made).skipped == {"not-finite": 1}


@pytest.mark.parametrize(
    ("constant", "reason"),
    [
        (np.ones((1, 2, 2), np.float32), "not-per-channel"),
        (np.ones((2,), np.float32), "not-per-channel"),
        (np.ones((3, 1, 1, 1), np.float32), "not-per-channel"),
        (np.ones((1, 1, 1, 1, 1), np.float32), "not-per-channel"),
        (np.ones((3, 1, 1), np.float32), "not-per-channel"),
    ],
    ids=["per-pixel", "along-width", "along-batch", "more-axes", "more-channels"],
)
def test_constants_along_another_axis_stay(constant: np.ndarray, reason: str) -> None:
    constants = {"w": np.ones((1, 1, 1, 1), np.float32), "s": constant}
    made = model([("Conv", ["x", "w"], "c", {}), ("Mul", ["c", "s"], "y", {})], constants, [1, 1, 2, 2])
    assert fold_batch_norms(made) == Change(skipped={reason: 1})  # type: ignore[arg-type]


@given(
    op=st.sampled_from(["Conv", "ConvTranspose"]),
    groups=st.integers(1, 3),
    per_group=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    shift=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40)
def test_a_norm_before_a_convolution_of_any_grouping_gives_the_same(
    op: str, groups: int, per_group: tuple[int, int], shift: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    channels_in, channels = groups * per_group[0], groups * per_group[1]
    shape = (channels, per_group[0], 2, 2) if op == "Conv" else (channels_in, per_group[1], 2, 2)
    zero = np.zeros(channels_in)
    constants = {
        "w": random.normal(size=shape),
        "b": random.normal(size=channels),
        "gamma": random.normal(size=channels_in),
        "beta": random.normal(size=channels_in) if shift else zero,
        "mean": random.normal(size=channels_in) if shift else zero,
        "var": random.uniform(0.1, 2, channels_in),
    }
    made = model(
        [
            ("BatchNormalization", ["x", "gamma", "beta", "mean", "var"], "n", {"epsilon": 1e-3}),
            (op, ["n", "w", "b"], "y", {"group": groups}),
        ],
        {name: array.astype(np.float32) for name, array in constants.items()},
        [2, channels_in, 4, 4],
    )
    x = random.normal(size=(2, channels_in, 4, 4)).astype(np.float32)
    expected = result(made, x)
    if op == "ConvTranspose" and shift:
        assert fold_batch_norms(made).skipped == {"padding": 1}
        return
    assert fold_batch_norms(made).applied == 1
    assert [node.op_type for node in made.graph] == [op]
    products = int(np.prod(shape))
    gain = np.max(np.abs(constants["gamma"] / np.sqrt(constants["var"])))
    read = gain * (np.max(np.abs(x)) + np.max(np.abs(constants["mean"]))) + np.max(np.abs(constants["beta"]))
    terms = products * read * np.max(np.abs(constants["w"])) + np.max(np.abs(constants["b"]))
    assert np.max(np.abs(result(made, x) - expected)) <= (products + 8) * EPS * terms


@pytest.mark.parametrize(("op", "transposed"), [("Gemm", 0), ("Gemm", 1), ("MatMul", 0)])
def test_what_normalises_the_input_goes_into_a_product(op: str, transposed: int) -> None:
    constants = {"w": np.arange(6.0).reshape((3, 2) if transposed else (2, 3)), "s": np.array([[2.0, 4.0]])}
    nodes: list[tuple[str, list[str], str, dict[str, Any]]] = [("Div", ["x", "s"], "e", {}), (op, ["e", "w"], "y", {})]
    if op == "Gemm":
        constants |= {"t": np.array([1.0, -3.0]), "c": np.arange(1.0, 4.0)}
        nodes = [
            ("Sub", ["x", "t"], "d", {}),
            ("Div", ["d", "s"], "e", {}),
            ("Gemm", ["e", "w", "c"], "y", {"alpha": 0.5, "beta": 2.0, "transB": transposed}),
        ]
    made = model(nodes, {name: array.astype(np.float32) for name, array in constants.items()}, [2, 2])
    x = np.array([[1, 2], [-3, 4]], np.float32)
    expected = result(made, x)
    assert fold_batch_norms(made).applied == len(nodes) - 1
    assert [node.op_type for node in made.graph] == [op]
    assert np.array_equal(result(made, x), expected)  # whole numbers times powers of two: nothing is rounded


def test_a_norm_over_the_rows_of_a_stack_of_matrices_stays() -> None:
    constants = {"w": np.eye(2)} | {key: np.array([1.0, 2.0]) for key in ("gamma", "beta", "mean", "var")}
    made = model(
        [("MatMul", ["x", "w"], "c", {}), ("BatchNormalization", ["c", "gamma", "beta", "mean", "var"], "y", {})],
        {name: array.astype(np.float32) for name, array in constants.items()},
        [3, 2, 2],
    )
    assert fold_batch_norms(made).skipped == {"not-per-channel": 1}


@pytest.mark.parametrize(
    ("mean", "deviation"),
    [((0.0, 1.0), (1.0, 3.0)), ((60.0, 0.0, 5.0), (20.0, 0.01, 4.0)), ((0.0, 0.0), (100.0, 0.1))],
    ids=["alike", "coordinates beside features", "rounded to zero"],
)
def test_the_noise_before_a_norm_is_what_rounding_adds(mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
    """The channels are uniform around their means, so that none leaves the range of three deviations."""
    channels, rows = len(mean), 40_000
    norm = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N,{channels}] x) => (float[N,{channels}] y)
        <float[{channels}] gamma = {{{", ".join(["2"] * channels)}}}, float[{channels}] beta = {{{", ".join("1" * channels)}}},
         float[{channels}] mean = {{{", ".join(map(str, mean))}}},
         float[{channels}] variance = {{{", ".join(str(each**2) for each in deviation)}}}>
        {{ y = BatchNormalization<epsilon = 0.0>(x, gamma, beta, mean, variance) }}"""
    (node,) = ir.from_onnx_text(norm).graph
    reach = np.sqrt(3) * np.array(deviation)
    x = np.array(mean) + np.random.default_rng(3).uniform(-1, 1, (rows, channels)) * reach
    low, high = (np.array(mean) + sign * DEVIATIONS * np.array(deviation) for sign in (-1, 1))
    params = asymmetric_u8(float(low.min()), float(high.max()))
    error = (dequantize(quantize(x.astype(np.float32), params), params) - x) / np.array(deviation)
    # of 40,000 squares of uniform errors a mean deviates by 0.45 %; the values of a channel are no whole number of steps
    assert noise_before(node, channels) == pytest.approx((error**2).sum() / rows / channels, rel=0.1)

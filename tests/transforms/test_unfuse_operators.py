"""Fused operators taken apart: the runtime's results for both, every option of theirs, and what must stay."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from requant.transforms import REGISTRY, Change, run, verify

unfuse_operators = REGISTRY["unfuse_operators"]

EPS = float(np.finfo(np.float32).eps)
MS = "com.microsoft"


def model(
    op: str, arrays: dict[str, np.ndarray], constants: str = "", opset: int = 17, rank: int = 2, **attributes: Any
) -> ir.Model:
    """Build a model of one fused node, called ``fused``."""
    graph = helper.make_graph(
        [helper.make_node(op, list(arrays), ["y"], name="fused", domain=MS, **attributes)],
        "g",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
            for name, array in arrays.items()
            if name not in constants
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items() if name in constants],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MS, 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=7))


def result(model: ir.Model, arrays: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {feed.name: arrays[feed.name] for feed in session.get_inputs()})[0])


def numbers(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return eighths from -1 to 1: their sums and products are exact in float32."""
    random = np.random.default_rng(0)
    return {name: (random.integers(-8, 9, shape) / 8).astype(np.float32) for name, shape in shapes.items()}


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two results are, each within 2 units in the last place of itself or of 1, values of one exact number.

    That is what implementations of Sigmoid, Tanh and the like are expected to keep; sums and products here are exact.
    """
    units = EPS * np.maximum(1, np.abs(expected))
    return found.shape == expected.shape and bool(np.all(np.abs(found - expected) <= 4 * units))


@pytest.mark.parametrize("opset", [7, 10, 13, 17])
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize(
    ("activation", "parameters"),
    [
        ("Relu", []),
        ("Sigmoid", []),
        ("Tanh", []),
        ("LeakyRelu", [0.25]),
        ("Clip", [-0.5, 0.75]),
        ("HardSigmoid", [0.25, 0.5]),
        ("HardSwish", []),
        ("", []),
    ],
    ids=lambda value: value or "none" if isinstance(value, str) else "",
)
def test_fused_conv(activation: str, parameters: list[float], added: bool, opset: int) -> None:
    arrays = numbers(x=(2, 3, 5, 5), w=(4, 3, 3, 3), b=(4,))
    if added:
        arrays |= numbers(z=(2, 4, 3, 3))
    attributes: dict[str, Any] = {"strides": [2, 2], "pads": [1, 1, 1, 1]}
    attributes |= {"activation": activation} if activation else {}
    attributes |= {"activation_params": parameters} if parameters else {}
    before = model("FusedConv", arrays, "wb", opset, 4, **attributes)
    after = run("unfuse_operators", before)
    if activation == "HardSwish" and opset < 14:
        assert after.applied[0].change == Change(skipped={"activation": 1})  # type: ignore[arg-type]
        return
    operators = [node.op_type for node in after.model.graph]
    assert operators == ["Conv", *(["Add"] if added else []), *([activation] if activation else [])]
    assert after.model.graph[0].name == "fused"
    assert close(result(after.model, arrays), result(before, arrays))


def test_fused_conv_adds_to_a_convolution_without_bias() -> None:
    made = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[1,1,2,2] x, float[1,1,2,2] z) => (float[1,1,2,2] y) <float[1,1,1,1] w = {2}> {
        y = com.microsoft.FusedConv <activation = "Relu"> (x, w, , z)
    }""")
    after = run("unfuse_operators", made).model
    feeds = {"x": np.array([[[[1, -2], [3, 4]]]], np.float32), "z": np.array([[[[-4, 1], [1, 1]]]], np.float32)}
    assert np.array_equal(result(after, feeds), result(made, feeds))


@pytest.mark.parametrize(
    ("activation", "parameters"),
    [
        ("Relu", {}),
        ("Sigmoid", {}),
        ("Tanh", {}),
        ("Softplus", {}),
        ("Softsign", {}),
        ("LeakyRelu", {"activation_alpha": 0.25}),
        ("Elu", {"activation_alpha": 0.5}),
        ("ThresholdedRelu", {"activation_alpha": 0.5}),
        ("HardSigmoid", {"activation_alpha": 0.25, "activation_beta": 0.5}),
        ("Selu", {"activation_alpha": 0.5, "activation_gamma": 0.75}),
        ("Celu", {"activation_alpha": 0.5}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fused_gemm(activation: str, parameters: dict[str, float]) -> None:
    arrays = numbers(a=(3, 2), b=(4, 3), c=(4,))
    attributes: dict[str, Any] = {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 0.25, **parameters}
    before = model("FusedGemm", arrays, "bc", activation=activation, **attributes)
    after = run("unfuse_operators", before).model
    assert [node.op_type for node in after.graph] == ["Gemm", activation]
    assert close(result(after, arrays), result(before, arrays))


# How FusedMatMul reads the axes of an operand of four, by (trans, transBatch).
ORDERS = {(0, 0): (0, 1, 2, 3), (1, 0): (0, 1, 3, 2), (0, 1): (1, 2, 0, 3), (1, 1): (1, 2, 3, 0)}


@pytest.mark.parametrize("constants", ["", "a", "b"])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("right", ORDERS, ids=str)
@pytest.mark.parametrize("left", ORDERS, ids=str)
def test_fused_matmul(left: tuple[int, int], right: tuple[int, int], alpha: float, constants: str) -> None:
    read = numbers(a=(2, 5, 3, 4), b=(2, 5, 4, 6))
    stored = {
        name: np.ascontiguousarray(array.transpose(np.argsort(ORDERS[flags])))
        for (name, array), flags in zip(read.items(), (left, right), strict=True)
    }
    attributes = {"transA": left[0], "transBatchA": left[1], "transB": right[0], "transBatchB": right[1]}
    before = model("FusedMatMul", stored, constants, rank=4, alpha=alpha, **attributes)
    after = run("unfuse_operators", before).model
    expected = np.matmul(read["a"], read["b"]) * np.float32(alpha)
    assert np.array_equal(result(before, stored), expected)
    assert np.array_equal(result(after, stored), expected)
    operators = [node.op_type for node in after.graph]
    turned = [name for name, flags in (("a", left), ("b", right)) if any(flags) and name not in constants]
    assert operators == ["Transpose"] * len(turned) + ["MatMul"] + (["Mul"] if alpha != 1 and not constants else [])


def test_vectors_are_not_transposed() -> None:
    arrays = numbers(a=(3,), b=(3, 2))
    before = model("FusedMatMul", arrays, rank=1, transA=1)
    after = run("unfuse_operators", before).model
    assert [node.op_type for node in after.graph] == ["MatMul"]
    assert np.array_equal(result(after, arrays), result(before, arrays))


def test_transpose_matmul_is_the_older_name() -> None:
    arrays = numbers(a=(4, 3), b=(2, 4))
    before = model("TransposeMatMul", arrays, "b", transA=1, transB=1, alpha=0.5)
    after = run("unfuse_operators", before).model
    assert [node.op_type for node in after.graph] == ["Transpose", "MatMul"]
    assert np.array_equal(result(after, arrays), result(before, arrays))


@pytest.mark.parametrize("op", ["BiasGelu", "FastGelu"])
@pytest.mark.parametrize(("opset", "domain"), [(17, MS), (20, "")])
def test_a_bias_before_gelu_is_added_to_the_product(op: str, opset: int, domain: str) -> None:
    before = ir.from_onnx_text(f"""<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {{1, 2, 3, 4}}, float[2] b = {{1, 2}}> {{
        t = MatMul (x, w)
        y = com.microsoft.{op} (t, b)
    }}""")
    after = run("unfuse_operators", before).model
    names = [(node.domain, node.op_type) for node in after.graph]
    assert names == [("", "MatMul"), ("", "Add"), (MS, "FastGelu") if op == "FastGelu" else (domain, "Gelu")]
    feeds = {"x": np.array([[0.125, -0.25], [0, 0.5]], np.float32)}
    expected = result(before, feeds)
    assert np.all(np.abs(result(after, feeds) - expected) <= 4 * EPS * (1 + np.abs(expected)))
    assert unfuse_operators(after) == Change()


def test_what_is_behind_a_fused_operator_is_known_once_that_is_taken_apart() -> None:
    made = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[N,2] x, float[N,2] r) => (float[2,2] y) <float[2,2] w = {1, 2, 3, 4}> {
        t = com.microsoft.FusedMatMul <alpha = 2.0> (x, w)
        y = com.microsoft.FusedMatMul <transA = 1, alpha = 2.0> (t, r)
    }""")
    assert run("unfuse_operators", made).applied[0].change == Change(applied=2)


@pytest.mark.parametrize("c", [True, False])
def test_fused_operators_in_bodies(c: bool) -> None:
    before = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[2,2] x, bool c) => (float[2,2] y) <float[2,2] w = {1, 2, 3, 4}> {
        y = If (c) <
            then_branch = t () => (float[2,2] a) { a = com.microsoft.FusedMatMul <transA = 1, transB = 1> (x, w) },
            else_branch = e () => (float[2,2] a) { a = com.microsoft.FusedGemm <activation = "Relu"> (x, w) }
        >
    }""")
    after = run("unfuse_operators", before)
    assert after.applied[0].change == Change(applied=2)
    feeds = {"x": np.array([[1, -2], [3, 4]], np.float32), "c": np.array(c)}
    assert np.array_equal(result(after.model, feeds), result(before, feeds))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ('FusedConv <activation = "Mish"> (image, kernel)', "activation"),
        ('FusedConv <activation = "LeakyRelu"> (image, kernel)', "activation"),
        ('FusedGemm <activation = "HardSigmoid", activation_alpha = 0.5> (x, w)', "activation"),
        ("FusedMatMul <transA = 1> (unknown, w)", "rank-unknown"),
        ("FusedMatMul <transBatchA = 1> (x, w)", "rank"),
        ("FusedMatMul <alpha = 10.0> (x, large)", "not-finite"),
        ("BiasGelu (x, b)", "no-product"),
    ],
)
def test_what_stays(call: str, reason: str) -> None:
    made = ir.from_onnx_text(f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1, "my.domain" : 1]>
        g (float[N,2] x, float[N,1,2,2] image) => (float[N,2] y) <float[2,2] w = {{1, 2, 3, 4}}, float[2] b = {{1, 2}},
            float[2,2] large = {{1, 2, 3, 3e38}}, float[1,1,1,1] kernel = {{2}}> {{
        unknown = my.domain.Norm (x)
        y = com.microsoft.{call}
    }}""")
    before = ir.to_onnx_text(made)
    assert unfuse_operators(made) == Change(skipped={reason: 1})  # type: ignore[arg-type]
    assert ir.to_onnx_text(made) == before


def test_a_gemm_below_opset_11_needs_its_bias() -> None:
    made = model("FusedGemm", numbers(a=(2, 3), b=(3, 4)), "b", 10, activation="Relu")
    verify(made)
    assert unfuse_operators(made) == Change(skipped={"needs-bias": 1})  # type: ignore[arg-type]


def test_types_and_ranks_are_followed_through_the_runtimes_own_operators() -> None:
    made = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[N,3,4] x, float[N,3,4] r) => (float[N,3,3] y) <float[4] one = {1, 1, 1, 1}, int64[4] heads = {0, 0, 2, 2}> {
        n = com.microsoft.SkipLayerNormalization (x, r, one)
        s = Mul (n, n)
        h = Reshape (s, heads)
        t = Transpose <perm = [0, 2, 1, 3]> (h)
        p = com.microsoft.FusedMatMul <alpha = 2.0, transB = 1> (t, t)
        y = ReduceSum <keepdims = 0> (p)
    }""")
    change = unfuse_operators(made)
    assert change == Change(applied=1)
    assert [node.op_type for node in made.graph][-4:] == ["Transpose", "MatMul", "Mul", "ReduceSum"]
    assert [value.dtype for name, value in made.graph.initializers.items() if name.endswith("alpha")] == [
        ir.DataType.FLOAT
    ]

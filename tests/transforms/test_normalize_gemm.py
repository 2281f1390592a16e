"""Gemm without factors: the same sums for every form of it, copies of shared weights, and large ones left unread."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from requant.transforms import REGISTRY, Change, run, verify
from requant.transforms.graphs.rewriter import LARGE

normalize_gemm = REGISTRY["normalize_gemm"]

EPS = float(np.finfo(np.float32).eps)
ROWS, INNER, COLUMNS = 3, 4, 2


def model(arrays: dict[str, np.ndarray], constants: str, opset: int = 17, **attributes: Any) -> ir.Model:
    """Build a model of one Gemm; `constants` names the operands, of A, B and C, that are initializers."""
    graph = helper.make_graph(
        [helper.make_node("Gemm", list(arrays), ["y"], name="gemm", **attributes)],
        "g",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
            for name, array in arrays.items()
            if name not in constants
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [ROWS, COLUMNS])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items() if name in constants],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=7))


def result(model: ir.Model, arrays: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {feed.name: arrays[feed.name] for feed in session.get_inputs()})[0])


def is_normal(node: ir.Node) -> bool:
    """Whether a Gemm is A @ B + C, with C of shape (N,) or absent."""
    factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    one_row = bias is None or (bias.const_value is not None and tuple(bias.const_value.shape.numpy()) == (COLUMNS,))
    return factors == [1, 1] and not node.attributes.get_int("transA", 0) and one_row


@given(
    flips=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    factors=st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, -2.0])] * 2),
    bias=st.sampled_from([None, (), (1,), (COLUMNS,), (1, 1), (1, COLUMNS), (ROWS, 1), (ROWS, COLUMNS)]),
    constants=st.sampled_from(["B", "BC"]),
    opset=st.sampled_from([7, 9, 11, 13]),
)
@settings(max_examples=150)
def test_any_form_gives_the_same(
    flips: tuple[int, int],
    factors: tuple[float, float],
    bias: tuple[int, ...] | None,
    constants: str,
    opset: int,
) -> None:
    random = np.random.default_rng(0)
    shapes = {"A": (ROWS, INNER)[:: -1 if flips[0] else 1], "B": (INNER, COLUMNS)[:: -1 if flips[1] else 1]}
    if bias is not None or opset < 11:
        shapes["C"] = bias or ()
    arrays = {name: random.integers(-9, 10, shape).astype(np.float32) for name, shape in shapes.items()}
    attributes = {"transA": flips[0], "transB": flips[1], "alpha": factors[0], "beta": factors[1]}
    before = model(arrays, constants, opset, **attributes)
    after = run("normalize_gemm", before).model
    (gemm,) = [node for node in after.graph if node.op_type == "Gemm"]
    assert is_normal(gemm)
    assert gemm.name == "gemm"
    assert gemm.attributes.get_int("transB", 0) == flips[1]
    assert factors[1] != 0 or opset < 11 or len(gemm.inputs) == 2 or "C" not in arrays
    assert np.array_equal(result(after, arrays), result(before, arrays))  # powers of two and whole numbers: exact
    assert normalize_gemm(after) == Change()


def test_factors_cost_one_rounding_of_each_constant() -> None:
    random = np.random.default_rng(0)
    arrays = {"A": (ROWS, INNER), "B": (INNER, COLUMNS), "C": (COLUMNS,)}
    numbers = {name: random.normal(size=shape).astype(np.float32) for name, shape in arrays.items()}
    before = model(numbers, "BC", alpha=0.3, beta=1.7)
    after = run("normalize_gemm", before).model
    assert np.array_equal(after.graph.initializers["B"].const_value.numpy(), numbers["B"] * np.float32(0.3))  # type: ignore[union-attr]
    # Each of both sides rounds a constant or a sum, once a factor, and a sum of INNER + 1 terms.
    terms = 0.3 * np.abs(numbers["A"]) @ np.abs(numbers["B"]) + 1.7 * np.abs(numbers["C"])
    assert np.all(np.abs(result(after, numbers) - result(before, numbers)) <= 2 * (INNER + 3) * EPS * terms)


def test_a_constant_that_others_read_gets_a_copy() -> None:
    made = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,2] x) => (float[N,2] y, float[N,2] z, float[2] c) <float[2,2] w = {1, 2, 3, 4}, float[2] b = {1, 2}> {
        y = Gemm <alpha = 2.0, beta = 4.0> (x, w, b)
        z = MatMul (x, w)
        c = Identity (b)
    }""")
    normalize_gemm(made)
    verify(made)
    kept = {name: value.const_value.numpy().ravel().tolist() for name, value in made.graph.initializers.items()}  # type: ignore[union-attr]
    assert kept == {"w": [1, 2, 3, 4], "b": [1, 2], "w_scaled": [2, 4, 6, 8], "b_scaled": [4, 8]}


@pytest.mark.parametrize("c", [True, False])
def test_a_gemm_in_a_body_with_weights_from_outside(c: bool) -> None:
    before = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,2] x, bool c) => (float[N,2] y) <float[2,2] w = {1, 2, 3, 4}, float[N,2] u> {
        u = Neg (x)
        y = If (c) <then_branch = t () => (float[N,2] a) { a = Gemm <alpha = 2.0, beta = 0.5> (x, w, u) },
                    else_branch = e () => (float[N,2] a) { one = Constant <value = float {1}> ()  a = Gemm (x, w, one) }>
    }""")
    after = run("normalize_gemm", before)
    assert after.applied[0].change == Change(applied=2)
    feeds = {"x": np.array([[1, -2], [3, 4]], np.float32), "c": np.array(c)}
    assert np.array_equal(result(after.model, feeds), result(before, feeds))
    assert "w" in after.model.graph.initializers  # the second Gemm goes on reading it


def test_a_sum_behind_a_graph_output_keeps_the_name_of_the_output() -> None:
    random = np.random.default_rng(0)
    arrays = {"A": (ROWS, INNER), "B": (INNER, COLUMNS), "C": (ROWS, COLUMNS)}
    made = model({name: random.normal(size=shape).astype(np.float32) for name, shape in arrays.items()}, "B")
    normalize_gemm(made)
    assert [(node.name, node.op_type, node.outputs[0].name) for node in made.graph] == [
        ("gemm", "Gemm", "gemm/product"),
        ("gemm/add", "Add", "y"),
    ]


def test_large_weights_are_scaled_when_they_are_read() -> None:
    reads = []

    def read() -> ir.TensorProtocol:
        reads.append(1)
        return ir.Tensor(np.full((LARGE // 2, 2), 2, np.float32), name="B")

    small = {"A": np.ones((ROWS, INNER), np.float32), "B": np.ones((INNER, COLUMNS), np.float32)}
    made = model(small, "B", alpha=0.5)
    made.graph.initializers["B"].const_value = ir.LazyTensor(
        read, ir.DataType.FLOAT, ir.Shape([LARGE // 2, 2]), name="B"
    )
    assert normalize_gemm(made) == Change(applied=1)
    assert not reads
    weight = made.graph.initializers["B"].const_value
    assert weight is not None
    assert np.array_equal(weight.numpy(), np.ones((LARGE // 2, 2)))


def test_a_scaled_weight_that_would_overflow_stays() -> None:
    arrays = {"A": np.ones((ROWS, INNER), np.float32), "B": np.full((INNER, COLUMNS), 3e38, np.float32)}
    made = model(arrays, "B", alpha=2.0)
    assert normalize_gemm(made) == Change(skipped={"not-finite": 1})  # type: ignore[arg-type]

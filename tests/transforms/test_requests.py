"""Transforms that do what a user names: what is refused, and with which words; what single ones promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant import RequantError
from requant.quantize.model.files import load_model
from requant.quantize.model.writing import save_model
from requant.transforms import METADATA_KEY, REGISTRY, TransformError, VerifyError, run
from requant.transforms.externalize_weights import EXTERNAL, external_threshold
from requant.transforms.int8.qparams import QParams

ROOT = Path(__file__).parents[2]

MODEL = """<ir_version: 8, opset_import: ["" : 17, "blocks" : 1, "my.domain" : 1]>
g (float[N,4] x) => (float[N,4] y) <float[4] w = {1, 2, 3, 4}> {
    [first] a = LeakyRelu <alpha = 0.2> (x)
    [custom] b = my.domain.Norm <alpha = 1, slope = 2> (a)
    [call] c = blocks.Block (b)
    [last] y = Mul(c, w)
}
<domain: "blocks", opset_import: ["" : 17]>
Block (x) => (y) { y = Relu (x) }"""

REFUSED = {
    "rename_node-unknown": (
        "rename_node(old_node_name=fist, new_node_name=z)",
        "rename_node: no node or tensor named 'fist'; did you mean 'first'?",
    ),
    "rename_node-taken": (
        "rename_node(old_node_name=first, new_node_name=b)",
        "rename_node: the name 'b' is already in use; choose another new_node_name",
    ),
    "rename_op-function": (
        "rename_op(old_op_name=blocks.Block, new_op_name=Relu)",
        "rename_op: blocks.Block is a function of the model; run inline_functions first",
    ),
    "rename_op-attributes": (
        "rename_op(old_op_name=LeakyRelu, new_op_name=Relu)",
        "after rename_op: onnx.checker: Unrecognized attribute: alpha for operator Relu",
    ),
    "rename_attribute-taken": (
        "rename_attribute(old_attribute_name=alpha, new_attribute_name=slope, op_name=my.domain.Norm)",
        "rename_attribute: node 'custom' (Norm) already has an attribute 'slope'",
    ),
    "rename_attribute-unknown": (
        "rename_attribute(old_attribute_name=alpha, new_attribute_name=beta, op_name=LeakyRelu)",
        "after rename_attribute: onnx.checker: Unrecognized attribute: beta for operator LeakyRelu",
    ),
    "extract_subgraph": (
        "extract_subgraph(inputs=a)",
        "extract_subgraph: name the tensors to extract: extract_subgraph(outputs=...)",
    ),
    "round_weights": ("round_weights(num_steps=1)", "round_weights: num_steps must be at least 2, not 1"),
    "insert_qdq-log": (
        "insert_qdq(min_max_log_file=none.log)",
        "insert_qdq: none.log: no such file",
    ),
    "insert_qdq-percentile": (
        "insert_qdq(min_max_log_file=none.log, max_percentile=101)",
        "insert_qdq: max_percentile must lie in 0..100, not 101",
    ),
    "remove_nodes": ("remove_nodes", "remove_nodes needs op: remove_nodes(op=...)"),
}


@pytest.mark.parametrize(("pipeline", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_done_is_refused(pipeline: str, message: str) -> None:
    with pytest.raises(RequantError) as caught:
        run(pipeline, ir.from_onnx_text(MODEL))
    assert str(caught.value).partition("\n")[0].startswith(message)


def test_a_log_of_another_graph_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "min_max.log"
    log.write_text(";conv__print__;__requant_min_max:[0][1]\n;aa__print__;__requant_min_max:[0][1]\n")
    with pytest.raises(TransformError, match="no tensor named 'aa' \\(and 1 more\\) in the graph"):
        run(f'insert_qdq(min_max_log_file="{log}")', ir.from_onnx_text(MODEL))


@pytest.mark.parametrize("first", ["", "fold_constants "])
def test_only_sorting_takes_a_graph_that_is_not_sorted(first: str) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { y = Relu(a)  a = Neg(x) }'
    if first:
        with pytest.raises(VerifyError, match="comes before the node that computes 'a'"):
            run(f"{first}sort_by_execution_order", ir.from_onnx_text(text))
        return
    result = run("sort_by_execution_order", ir.from_onnx_text(text))
    assert [node.op_type for node in result.model.graph] == ["Neg", "Relu"]


def test_a_cycle_cannot_be_sorted() -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { y = Add(x, a)  a = Neg(y) }'
    with pytest.raises(TransformError, match="the nodes form a cycle"):
        run("sort_by_execution_order", ir.from_onnx_text(text))


def test_other_names_reveal_nothing(tmp_path: Path) -> None:
    source = load_model(ROOT / "sample_models" / "digits_mobile.onnx")
    for node in source.graph:
        node.metadata_props["stack"] = "secret.py:7"
    result = run("obfuscate_names", source).model
    kept = {value.name for value in (*result.graph.inputs, *result.graph.outputs)}
    names = [node.name for node in result.graph] + [value.name for node in result.graph for value in node.outputs]
    assert all(name in kept or len(str(name)) <= 2 for name in names)
    assert b"secret" not in ir.to_proto(result).SerializeToString()
    assert [node.op_type for node in result.graph] == [node.op_type for node in source.graph]


@settings(max_examples=60)
@given(
    low=st.floats(-100, 0),
    high=st.floats(0, 100),
    steps=st.integers(2, 300),
    seed=st.integers(0, 1000),
    size=st.just(400),
)
def test_rounded_weights_have_few_values_and_are_near(
    low: float, high: float, steps: int, seed: int, size: int
) -> None:
    array = np.random.default_rng(seed).uniform(low, high, size).astype(np.float32)
    array[0] = 0
    weight = ir.Value(name="w", const_value=ir.Tensor(array, name="w"), type=ir.TensorType(ir.DataType.FLOAT))
    weight.shape = ir.Shape([size])
    graph = ir.Graph([], [], nodes=[], initializers=[weight], opset_imports={"": 17})
    change = REGISTRY["round_weights"](ir.Model(graph, ir_version=8), num_steps=steps)
    rounded = weight.const_value.numpy()  # type: ignore[union-attr]
    assert len(np.unique(rounded)) <= max(steps, len(np.unique(array)) if not change.applied else 0)
    assert rounded[0] == 0
    step = (float(array.max()) - float(array.min())) / (steps - 1)
    slack = 4 * np.finfo(np.float32).eps * max(abs(low), abs(high))
    assert np.abs(rounded - array).max() <= step + slack  # half a step, and half of one by which the grid is shifted


def test_weights_marked_for_a_file_of_their_own_get_one(tmp_path: Path) -> None:
    source = load_model(ROOT / "sample_models" / "digits.onnx")
    marked = run("externalize_weights(threshold=2000)", source).model
    target = tmp_path / "out.onnx"
    save_model(marked, target)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 2
    written = load_model(target)
    outside = [v for v in written.graph.initializers.values() if isinstance(v.const_value, ir.ExternalTensor)]
    assert len(outside) == sum(
        v.const_value.nbytes >= 2000 for v in source.graph.initializers.values() if v.const_value
    )
    assert EXTERNAL not in written.metadata_props
    assert written.metadata_props[METADATA_KEY] == "externalize_weights(threshold=2000)"


def test_joined_tensors_of_one_range_are_as_near_as_that_allows() -> None:
    """x and z are rounded once, to the grid that holds both, and joining them rounds nothing more."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,8] x, float[1,8] z) => (float[1,16] y)
    <float s = {0.01}, uint8 p = {100}, float t = {0.05}, uint8 q = {20}, float u = {0.03}> {
        a = QuantizeLinear(x, s, p)  b = DequantizeLinear(a, s, p)
        c = QuantizeLinear(z, t, q)  d = DequantizeLinear(c, t, q)
        e = Concat <axis = 1> (b, d)  f = QuantizeLinear(e, u, q)  y = DequantizeLinear(f, u, q)
    }"""
    random = np.random.default_rng(5)
    ranges = [
        QParams(scale=np.array(s), zero_point=np.array(p, np.uint8)).range
        for s, p in ((0.01, 100), (0.05, 20), (0.03, 20))
    ]
    x = random.uniform(*ranges[0], (1, 8)).astype(np.float32)
    z = random.uniform(*ranges[1], (1, 8)).astype(np.float32)
    after = run("rerange_quantized_concat", ir.from_onnx_text(text)).model
    (scale,) = {float(v.const_value.numpy()) for v in after.graph.initializers.values() if "scale" in str(v.name)}  # type: ignore[union-attr]
    session = ort.InferenceSession(ir.to_proto(after).SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x, "z": z})
    exact = np.concatenate([x, z], axis=1)
    eps = float(np.finfo(np.float32).eps)
    assert np.abs(y - exact).max() <= scale / 2 + 4 * eps * np.abs(exact).max()
    low, high = min(lo for lo, _ in ranges), max(hi for _, hi in ranges)
    assert scale == pytest.approx((high - low) / 255, rel=8 * eps)


def test_a_product_of_a_log_has_the_error_of_its_steps(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[N,4] x) => (float[N,2] y)
    <float[4,2] w = {1, -2, 3, 4, -5, 6, 7, -8}> { [product] y = MatMul(x, w) }"""
    log = tmp_path / "min_max.log"
    log.write_text(";x__print__;__requant_min_max:[-1][3]\n")
    after = run(f'insert_qdq(min_max_log_file="{log}")', ir.from_onnx_text(text)).model
    assert [node.op_type for node in after.graph].count("QuantizeLinear") == 1
    x = np.random.default_rng(3).uniform(-1, 3, (5, 4)).astype(np.float32)
    w = np.array([[1, -2], [3, 4], [-5, 6], [7, -8]], np.float32)  # no pair of rows adds up to more than 16 bits hold
    session = ort.InferenceSession(ir.to_proto(after).SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    step, steps = 4 / 255, np.abs(w).max(axis=0) / 127
    bound = (step / 2) * (np.abs(w).sum(axis=0) + 4 * steps) + (steps / 2) * np.abs(x).sum(axis=1, keepdims=True)
    rounded = 8 * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(w))  # four products and sums, and the scales
    assert (np.abs(y - x @ w) <= bound + rounded).all()


def test_the_example_of_a_transform_is_the_transform() -> None:
    example = (ROOT / "CONTRIBUTING.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert example == (ROOT / "transforms" / "merge_transposes.py").read_text()


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_page_says_what_it_does_and_what_every_option_means(name: str) -> None:
    found = REGISTRY[name]
    sentence, *rest = found.doc.splitlines()
    assert sentence.endswith(".")
    assert [
        part for part in ("Before:", "After:", "Left alone:") if not any(line.startswith(part) for line in rest)
    ] == []
    told = found.doc.partition("Options:")[2]
    assert [option for option in found.options if f"{option}:" not in told and f"{option}," not in told] == []


@pytest.mark.parametrize("text", ["", "many", "-1", 5000 * "9"], ids=["none", "word", "negative", "5000-digits"])
def test_a_mark_that_is_no_size_is_no_mark(text: str) -> None:
    model = ir.from_onnx_text('<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }')
    model.metadata_props[EXTERNAL] = text
    assert external_threshold(model) is None

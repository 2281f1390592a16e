"""Weights in blocks, corrected on data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from requant.quantize import Options, quantize_model
from requant.quantize.options.declared import Strategy
from requant.quantize.options.selection import Selection
from requant.transforms.int8.qparams import Scheme

SAMPLES, ROWS, COLUMNS = 16, 64, 64


@pytest.fixture
def correlated() -> list[dict[str, np.ndarray]]:
    """Return inputs (rows, K) of few directions, with columns of different power."""
    random = np.random.default_rng(4)
    mixed = random.standard_normal((8, COLUMNS)) * np.exp(random.standard_normal(COLUMNS))
    found = []
    for _ in range(SAMPLES):
        x = random.standard_normal((ROWS, 8)) @ mixed + 0.05 * random.standard_normal((ROWS, COLUMNS))
        found.append({"x": x.astype(np.float32)})
    return found


def saved(folder: Path, node: str) -> Path:
    """Save a model of one product; Gemm has a bias and its weights transposed."""
    random = np.random.default_rng(5)
    head = '<ir_version: 10, opset_import: ["" : 21]>'
    text = f"{head} g (float[m,{COLUMNS}] x) => (float[m,48] y) {{ [op] y = {node} }}"
    model = onnx.parser.parse_model(text)
    weights = random.standard_normal((COLUMNS, 48)).astype(np.float32)
    arrays = {"w": weights.T.copy() if "Gemm" in node else weights, "b": random.standard_normal(48).astype(np.float32)}
    named = (name for name in arrays if f", {name}" in node)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(arrays[name], name) for name in named)
    onnx.save(model, folder / "float.onnx")
    return folder / "float.onnx"


def error(model: Path, quantized: Path, feeds: list[dict[str, np.ndarray]]) -> float:
    """Return the squared error of the dequantized weights' results, without the rounding of activations."""
    exact = onnx.load(quantized)
    for attribute in (a for node in exact.graph.node for a in node.attribute if a.name == "accuracy_level"):
        attribute.i = 0
    options = ort.SessionOptions()
    options.log_severity_level = 4
    one, other = (ort.InferenceSession(source, options) for source in (str(model), exact.SerializeToString()))
    return float(sum(np.sum((one.run(None, feed)[0] - other.run(None, feed)[0]) ** 2) for feed in feeds))


@pytest.mark.parametrize("node", ["MatMul (x, w)", "Gemm <transB=1> (x, w, b)"], ids=["MatMul", "Gemm"])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_learned_on_data_lowers_the_error_on_other_data(
    node: str, bits: int, correlated: list[dict[str, np.ndarray]], tmp_path: Path
) -> None:
    model, errors = saved(tmp_path, node), {}
    for name in ("means", "rounding"):
        options = Options(
            selection=Selection(strategy=Strategy.BLOCK),
            scheme=Scheme(block_bits=bits, block_size=16),
            corrections=(name,),
            force_int8=True,
            seconds=0.0,
        )
        output = tmp_path / f"{name}.onnx"
        result = quantize_model(model, correlated[:12], output, options)
        assert result.forms == {"block": 1}
        errors[name] = error(model, output, correlated[12:])
    assert errors["rounding"] < 0.7 * errors["means"]


def test_weights_that_two_products_share_are_written_once(
    correlated: list[dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """Learned for each product, they would be two constants, and two layers would be as large as two weights."""
    head = '<ir_version: 10, opset_import: ["" : 21]>'
    nodes = "[one] a = MatMul (x, w) r = Relu (a) [two] b = MatMul (r, w) s = Relu (b) [own] y = MatMul (s, v)"
    proto = onnx.parser.parse_model(f"{head} g (float[m,{COLUMNS}] x) => (float[m,{COLUMNS}] y) {{ {nodes} }}")
    random = np.random.default_rng(5)
    for name in "wv":
        weights = random.standard_normal((COLUMNS, COLUMNS)).astype(np.float32) / 8
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    onnx.save(proto, tmp_path / "float.onnx")
    written = {}
    for name in ("means", "rounding"):
        options = Options(
            selection=Selection(strategy=Strategy.BLOCK),
            scheme=Scheme(block_bits=4, block_size=16),
            corrections=(name,),
            force_int8=True,
            seconds=0.0,
        )
        result = quantize_model(tmp_path / "float.onnx", correlated, tmp_path / f"{name}.onnx", options)
        assert result.forms == {"block": 3}
        graph = onnx.load(tmp_path / f"{name}.onnx").graph
        arrays = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
        products = [node for node in graph.node if node.op_type == "MatMulNBits"]
        assert [list(node.input[1:3]) for node in products[:1]] == [list(node.input[1:3]) for node in products[1:2]]
        written[name] = [arrays[node.input[1]] for node in products]
        assert len([array for array in arrays.values() if array.dtype == np.uint8]) == 2
    shared, _, own = zip(*written.values(), strict=True)
    assert np.array_equal(*shared)
    assert not np.array_equal(*own)

"""Weights in blocks: the integers, their packing, and the kernels that read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant import RequantError
from requant.quantize import Options, quantize_model
from requant.quantize.options.declared import Strategy
from requant.quantize.options.selection import Selection
from requant.transforms.int8.block_forms import to_blocks
from requant.transforms.int8.block_weights import in_blocks
from requant.transforms.int8.qparams import BLOCK_BITS, BLOCK_SIZES, BlockForm, Scheme
from requant.transforms.int8.writer import Writer

MS = "com.microsoft"
HEADER = f'<ir_version: 10, opset_import: ["" : 21, "{MS}" : 1]>\n'
FORMS = st.builds(BlockForm, st.sampled_from(BLOCK_BITS), st.sampled_from(BLOCK_SIZES))
WEIGHTS = st.tuples(st.integers(1, 9), st.integers(1, 300), st.integers(0, 2**32 - 1))


def drawn(of: tuple[int, int, int]) -> np.ndarray:
    """Return normal weights (N, K), with a block of zeros and one large value."""
    rows, columns, seed = of
    random = np.random.default_rng(seed)
    array = random.standard_normal((rows, columns)).astype(np.float32)
    array[0, : columns // 2] = 0
    array[-1, -1] *= 30
    return array


def run(text: str, feed: dict[str, Any], **constants: np.ndarray) -> np.ndarray:
    """Run a model in ONNX text; constants are initializers."""
    model = onnx.parser.parse_model(HEADER + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feed)[0])


@settings(max_examples=40)
@given(FORMS, WEIGHTS, st.integers(1, 5))
def test_the_kernel_multiplies_the_dequantized_weights(form: BlockForm, of: tuple[int, int, int], count: int) -> None:
    weights = drawn(of)
    rows, columns = weights.shape
    found = in_blocks(weights, form)
    form = found.form
    blocks = form.blocks(columns)
    codes = found.packed(blocks * form.size).reshape(rows, blocks, -1)
    x = np.random.default_rng(1).standard_normal((count, columns)).astype(np.float32)
    attributes = f"K={columns}, N={rows}, bits={form.bits}, block_size={form.size}, accuracy_level=0"
    text = f"g (float[m,k] x) => (float[m,n] y) {{ y = {MS}.MatMulNBits <{attributes}> (x, q, s) }}"
    y = run(text, {"x": x}, q=codes, s=found.scale)
    values = found.values().astype(np.float64)
    bound = (columns + 2) * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(values).T)
    assert np.all(np.abs(y - x.astype(np.float64) @ values.T) <= bound)


@settings(max_examples=30)
@given(FORMS, WEIGHTS)
def test_a_gather_returns_the_dequantized_rows(form: BlockForm, of: tuple[int, int, int]) -> None:
    rows, columns, seed = of
    columns += columns % 2  # 4-bit codes are in pairs
    found = in_blocks(drawn((rows, columns, seed)), form)
    form = found.form
    attributes = f"bits={form.bits}, block_size={form.size}, gather_axis=0, quantize_axis=1"
    text = f"g (int64[m] i) => (float[m,n] y) {{ y = {MS}.GatherBlockQuantized <{attributes}> (q, i, s) }}"
    places = np.array([0, rows - 1, -1])
    y = run(text, {"i": places}, q=found.packed(columns), s=found.scale)
    assert np.array_equal(y, found.values()[places])


@settings(max_examples=40)
@given(FORMS, WEIGHTS)
def test_weights_are_near_their_blocks(form: BlockForm, of: tuple[int, int, int]) -> None:
    weights = drawn(of)
    found = in_blocks(weights, form)
    form = found.form
    assert form.size >= min(weights.shape[1], 16)
    assert found.steps.min() >= -form.zero
    assert found.steps.max() < form.zero
    padded = np.pad(weights, ((0, 0), (0, form.blocks(weights.shape[1]) * form.size - weights.shape[1])))
    peaks = np.abs(padded.reshape(len(weights), -1, form.size)).max(axis=-1).astype(np.float64)
    nearest = form.size * (peaks / (form.zero - 1) / 2) ** 2  # the error of rounding with the peak on the last code
    error = (found.values() - weights).astype(np.float64) ** 2
    errors = np.pad(error, ((0, 0), (0, padded.shape[1] - error.shape[1]))).reshape(len(weights), -1, form.size)
    assert np.all(errors.sum(axis=-1) <= nearest * (1 + 1e-4) + 1e-30)


@settings(max_examples=20)
@given(FORMS, WEIGHTS, st.sampled_from([-80, 100, 120]))
def test_scaled_weights_have_the_same_integers(form: BlockForm, of: tuple[int, int, int], power: int) -> None:
    weights = drawn(of)
    found, scaled = in_blocks(weights, form), in_blocks(np.ldexp(weights, power), form)
    assert np.array_equal(found.steps, scaled.steps)
    assert np.array_equal(np.ldexp(found.values(), power), scaled.values())


@pytest.mark.parametrize("bits", BLOCK_BITS)
def test_scales_have_the_least_error_of_important_columns(bits: int) -> None:
    random = np.random.default_rng(0)
    weights = random.standard_normal((64, 256)).astype(np.float32)
    importance = np.where(np.arange(256) % 8 == 0, 50.0, 0.1)
    form = BlockForm(bits, 32)
    plain, weighed = (in_blocks(weights, form, each).values() - weights for each in (None, importance))
    assert np.sum(weighed**2 * importance) < np.sum(plain**2 * importance)
    assert np.sum(plain**2) < np.sum(weighed**2)
    naive = np.abs(weights.reshape(64, -1, 32)).max(axis=-1, keepdims=True) / (form.zero - 1)
    rounded = (np.rint(weights.reshape(64, -1, 32) / naive) * naive).reshape(64, 256)
    assert np.sum(plain**2) < np.sum((rounded - weights) ** 2)


@pytest.mark.parametrize("tensor", ["MatMul", "Gemm", "Gemm, transB"])
def test_integer_products_round_the_input_in_blocks(tensor: str, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    weights, bias = (random.standard_normal(shape).astype(np.float32) for shape in ((40, 6), (1, 6)))
    transposed = tensor.endswith("transB")
    node = "MatMul (x, w)" if tensor == "MatMul" else f"Gemm <transB={int(transposed)}> (x, w, b)"
    model = onnx.parser.parse_model(f"{HEADER} g (float[3,40] x) => (float[3,6] y) {{ [op] y = {node} }}")
    arrays = {"w": weights.T.copy() if transposed else weights, **({"b": bias} if tensor != "MatMul" else {})}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.save(model, tmp_path / "float.onnx")
    options = Options(
        selection=Selection(strategy=Strategy.BLOCK), scheme=Scheme(block_size=32), force_int8=True, seconds=0.0
    )
    result = quantize_model(tmp_path / "float.onnx", None, tmp_path / "int8.onnx", options)
    assert result.forms == {"block": 1}
    assert result.kernels == {"MatMulNBits": 1}
    assert result.mac_share_int8 == 1.0
    x = random.standard_normal((3, 40)).astype(np.float32)
    y = ort.InferenceSession(tmp_path / "int8.onnx").run(None, {"x": x})[0]
    padded = np.pad(x, ((0, 0), (0, 24))).reshape(3, 2, 32)
    step = np.abs(padded).max(axis=-1, keepdims=True) / 127
    rounded = (np.rint(padded / step) * step).reshape(3, 64)[:, :40]
    expected = rounded @ in_blocks(weights.T, BlockForm(8, 32)).values().T + (bias if tensor != "MatMul" else 0)
    steps = np.repeat(step[..., 0], 32, axis=1)[:, :40]  # a half may be rounded either way
    assert np.all(np.abs(y - expected) <= 1e-2 * steps @ np.abs(weights) + 1e-5)


@pytest.mark.parametrize(("columns", "size"), [(7, 16), (16, 16), (17, 32), (128, 128), (300, 128)])
def test_short_rows_get_smaller_blocks(columns: int, size: int) -> None:
    assert in_blocks(drawn((2, columns, 0)), BlockForm()).form == BlockForm(8, size)
    assert Scheme().blocks == BlockForm(8, 128)
    assert Scheme(block_bits=4).blocks == BlockForm(4, 32)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"block_bits": 3}, "--block-bits 3: there are 4, 8"),
        ({"block_size": 48}, "--block-size 48: there are 16, 32, 64, 128, 256"),
    ],
    ids=["bits", "size"],
)
def test_blocks_without_a_kernel_are_refused(wanted: Any, message: str) -> None:
    with pytest.raises(RequantError, match=message):
        Scheme(**wanted)


def test_products_of_one_weight_share_equal_codes_beside_other_scales() -> None:
    """The steps of an unrolled recurrence may have learned scales of their own."""
    text = "g (float[2,8] x) => (float[2,4] y) { [a] t = MatMul(x, w) [b] u = MatMul(x, w) y = Add(t, u) }"
    proto, weights = onnx.parser.parse_model(HEADER + text), drawn((4, 8, 0))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(weights.T), "w"))
    model = ir.from_proto(proto)
    found = in_blocks(weights, BlockForm(8, 32))
    own = {"a": found, "b": replace(found, scale=found.scale * np.float32(1.01))}
    writing = SimpleNamespace(
        writer=Writer.of(model, Scheme()), blocked=lambda node, _: own[node.name], bias_row=lambda node: None
    )
    for node in [node for node in model.graph if node.op_type == "MatMul"]:
        to_blocks(node, cast("Any", SimpleNamespace(op="MatMul")), cast("Any", writing))
    one, other = (node for node in model.graph if node.op_type == "MatMulNBits")
    assert one.inputs[1] is other.inputs[1]
    assert one.inputs[2] is not other.inputs[2]

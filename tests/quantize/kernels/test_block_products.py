"""Products with weights in blocks, in functions: with the library, without it, and as a plan chooses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import open_session
from requant.quantize import Options, quantize_model
from requant.quantize.kernels.library import Kernels, kernels
from requant.quantize.kernels.products import wrap_products
from requant.quantize.options.declared import Strategy
from requant.quantize.options.selection import Selection
from requant.transforms.int8.block_weights import Blocked, in_blocks
from requant.transforms.int8.plan import Unit
from requant.transforms.int8.qparams import BlockForm, Scheme

from ...native import needs_library
from .two_products import write_two_products

FOUND = kernels()
IN_TILES = 32
"""From so many rows on, matrix tiles multiply in bf16."""
HEAD = '<ir_version: 8, opset_import: ["" : 20, "com.microsoft" : 1]>\n'
UNIT = Unit(name="product", op="MatMul", nodes=("product",), inputs=("x",), outputs=("p",))
BEHIND = {
    "alone": ("y = Identity(p)", 1, 0),
    "bias": ("y = Add(p, b)", 2, 0),
    "bias and relu": ("a = Add(p, b) y = Relu(a)", 3, 1),
    "bias, gelu and a sum": ("a = Add(p, b) n = Gelu(a) y = Add(n, r)", 4, 2),
    "silu and a gate": ("v = Sigmoid(p) n = Mul(p, v) y = Mul(n, r)", 4, 4),
}


def model(behind: str, weights: Blocked, rows: int) -> ir.Model:
    """Return a model with a product of x (rows, K) and weights in blocks, a bias b and a tensor r like the result."""
    outputs, inputs = weights.steps.shape
    form = weights.form
    blocks = form.blocks(inputs)
    text = (
        f"{HEAD} g (float[{rows},{inputs}] x, float[{rows},{outputs}] r) => (float[{rows},{outputs}] y) {{ [product] "
        f"p = com.microsoft.MatMulNBits <K = {inputs}, N = {outputs}, bits = {form.bits}, block_size = {form.size}, "
        f"accuracy_level = 4> (x, w, s) {behind} }}"
    )
    proto = onnx.parser.parse_model(text)
    constants = {
        "w": weights.packed(blocks * form.size).reshape(outputs, blocks, -1),
        "s": weights.scale,
        "b": np.linspace(-1, 1, outputs, dtype=np.float32),
    }
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(numpy_helper.from_array(constants[name], name) for name in constants if name in read)
    return ir.from_proto(proto)


def bytes_of(made: ir.Model) -> bytes:
    """Return a model as bytes."""
    return bytes(ir.to_proto(made).SerializeToString())


@needs_library
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("behind", "body", "function"), BEHIND.values(), ids=BEHIND)
def test_a_product_becomes_a_function_with_what_follows(behind: str, body: int, function: int, bits: int) -> None:
    random = np.random.default_rng(bits)
    weights = in_blocks(random.normal(size=(24, 48)).astype(np.float32), BlockForm(bits, 16))
    made = model(behind, weights, 5)
    feed = {"x": random.normal(size=(5, 48)).astype(np.float32), "r": random.normal(size=(5, 24)).astype(np.float32)}
    before = ort.InferenceSession(bytes_of(made), providers=["CPUExecutionProvider"]).run(None, feed)[0]
    shapes = dict.fromkeys(("p", "a", "n", "r", "y"), (5, 24))
    assert wrap_products(made, [UNIT], shapes, join=True) == 1
    (call,) = [node for node in made.graph if node.domain == NATIVE_DOMAIN]
    (inner,) = made.functions.values()
    assert (call.op_type, len(list(inner))) == ("MatMulNBits", body)
    assert call.attributes.get_int("function", -1) == function
    onnx.checker.check_model(onnx.load_from_string(bytes_of(made)))
    for session in (
        ort.InferenceSession(bytes_of(made), providers=["CPUExecutionProvider"]),  # the body
        open_session(bytes_of(made), threads=1),
    ):
        # the same sums of integers; each of 3 blocks, the bias and the sum round to float; GELU is exact to 3e-6
        np.testing.assert_allclose(session.run(None, feed)[0], before, rtol=2e-6, atol=2e-5)


@needs_library
@example(seed=1, rows=40, inputs=4200, outputs=40, bits=4, size=32, threads=2)  # more inputs than tiles add at once
@example(seed=2, rows=33, inputs=2100, outputs=17, bits=8, size=16, threads=1)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 80),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 130),
    bits=st.sampled_from([4, 8]),
    size=st.sampled_from([16, 32, 64, 128, 256]),
    threads=st.integers(1, 2),
)
def test_the_operator_computes_what_its_body_does(
    seed: int, rows: int, inputs: int, outputs: int, bits: int, size: int, threads: int
) -> None:
    random = np.random.default_rng(seed)
    weights = in_blocks(random.normal(size=(outputs, inputs)).astype(np.float32), BlockForm(bits, size))
    made = model("y = Identity(p)", weights, rows)
    x = (random.normal(size=(rows, inputs)) * 10 ** random.uniform(-3, 3)).astype(np.float32)
    feed = {"x": x, "r": np.zeros((rows, outputs), np.float32)}
    wrap_products(made, [UNIT], {}, join=True)
    found = open_session(bytes_of(made), threads=threads).run(None, feed)[0]
    blocks = weights.form.blocks(inputs)
    padded = np.zeros((rows, blocks * weights.form.size))
    padded[:, :inputs] = x
    step = np.abs(padded.reshape(rows, blocks, -1)).max(-1, keepdims=True).astype(np.float32) / np.float32(127)
    steps = np.where(step > 0, step, 1)
    rounded = (np.rint(padded.reshape(rows, blocks, -1) / steps) * steps).reshape(rows, -1)[:, :inputs]
    wanted = rounded @ weights.values().T.astype(np.float64)
    # a value near the middle of two integers may be rounded to the other one: a step of x times a weight, a few times
    size = (np.abs(x) @ np.abs(weights.values().T)).max()
    reach = steps.max() * np.abs(weights.values()).max() * 3 + 1e-5 * size
    if rows >= IN_TILES and isinstance(FOUND, Kernels) and FOUND.isa == "amx":  # both factors have 8 binary digits
        wanted, reach = x @ weights.values().T.astype(np.float64), 1.2 * 2**-7 * size
    assert np.abs(found - wanted).max() <= reach


@needs_library
def test_all_of_many_rows_are_rounded_alike() -> None:
    random = np.random.default_rng(0)
    weights = in_blocks(random.normal(size=(40, 256)).astype(np.float32), BlockForm(8, 128))
    x = random.normal(size=(258, 256)).astype(np.float32)
    x[:, 7] = 100.0  # rounding to 8 bits loses most of the other values of its block
    x[-1] = x[0]
    made = model("y = Identity(p)", weights, len(x))
    wrap_products(made, [UNIT], {}, join=True)
    feed = {"x": x, "r": np.zeros((len(x), 40), np.float32)}
    found = open_session(bytes_of(made), threads=1).run(None, feed)[0]
    np.testing.assert_array_equal(found[0], found[-1])


@needs_library
@pytest.mark.parametrize("bits", [4, 8])
def test_the_form_is_offered_with_blocks_and_can_be_asked_for(tmp_path: Path, bits: int) -> None:
    write_two_products(tmp_path / "m.onnx", 4)
    options = Options(
        kernels="native",
        seconds=0.05,
        force_int8=True,
        effort="low",
        selection=Selection(strategy=Strategy.BLOCK),
        scheme=Scheme(block_bits=bits, block_size=32),
    )
    made = quantize_model(tmp_path / "m.onnx", None, tmp_path / "q.onnx", options)
    assert made.forms["block native"] == 2
    written = onnx.load(tmp_path / "q.onnx")
    names = [node.op_type for node in written.graph.node if node.domain == NATIVE_DOMAIN]
    assert [name.split("_")[0] for name in names] == ["MatMulNBits", "MatMulNBits"]
    bodies = [[node.op_type for node in function.node] for function in written.functions]
    assert ["MatMulNBits", "Add", "Relu"] in bodies
    (tmp_path / "again").mkdir()
    planned = Options(
        plan=tmp_path / "q.plan.json",
        force_int8=True,
        effort="low",
        selection=options.selection,
        scheme=options.scheme,
    )
    again = quantize_model(tmp_path / "m.onnx", None, tmp_path / "again/q.onnx", planned)
    assert again.forms == made.forms


@needs_library
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"K": 47}, "the last axis of x must be the inputs of w"),
        ({"N": 25}, "w must have the codes of all blocks"),
        ({"bits": 3}, "bits must be 4 or 8"),
        ({"block_size": 24}, "block_size must be 16, 32, 64, 128 or 256"),
        ({"function": 9}, "the function must be from 0 to 4"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_the_operator_does_not_compute_is_refused(change: dict[str, int], message: str) -> None:
    weights = in_blocks(np.ones((24, 48), np.float32), BlockForm(4, 16))
    made = model("y = Identity(p)", weights, 5)
    wrap_products(made, [UNIT], {}, join=True)
    (call,) = [node for node in made.graph if node.domain == NATIVE_DOMAIN]
    for name, value in change.items():
        call.attributes[name] = ir.AttrInt64(name, value)
    feed = {"x": np.ones((5, 48), np.float32), "r": np.ones((5, 24), np.float32)}
    with pytest.raises(Exception, match=message):
        open_session(bytes_of(made), threads=1).run(None, feed)

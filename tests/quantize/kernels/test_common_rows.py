"""Products of the same rows that attention reads: they become one, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import open_session
from requant.quantize.kernels.attentions import wrap_attentions
from requant.quantize.kernels.products import wrap_products
from requant.transforms.graphs.inference import inferred
from requant.transforms.graphs.queries import plain_shape
from requant.transforms.int8.plan import Unit
from requant.transforms.int8.units import Compound, units
from requant.transforms.patterns.attention import find_attention

from ...native import needs_library

HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n'
PRODUCT = "[{0}] {0}0 = com.microsoft.DynamicQuantizeMatMul({1}, w{0}, s{0}, z{0}{2}) "
PRODUCTS = "".join(PRODUCT.format(name, "x", "") for name in "qkv")
SUMS = "q1 = Add(q0, bq) k1 = Add(bk, k0) v1 = Add(v0, bv) "
HEADS = """q2 = Reshape(q1, heads) k2 = Reshape(k1, heads) v2 = Reshape(v1, heads)
    q3 = Transpose<perm = [0,2,1,3]>(q2) k3 = Transpose<perm = [0,2,3,1]>(k2) v3 = Transpose<perm = [0,2,1,3]>(v2)
    c = MatMul(q3, k3) p = Softmax(c) [attend] o = MatMul(p, v3) [turn] y = Transpose<perm = [0,2,1,3]>(o)"""
SINGLE = "k3 = Transpose<perm = [0,2,1]>(k1) c = MatMul(q1, k3) a = Add(c, m) p = Softmax(a) [attend] y = MatMul(p, v1)"
PLAIN = (
    SUMS.replace("Add(q0, bq)", "Identity(q0)")
    .replace("Add(bk, k0)", "Identity(k0)")
    .replace("Add(v0, bv)", "Identity(v0)")
)


def model_of(nodes: str, outputs: str = "float y") -> ir.Model:
    """Return a model whose products have 16 inputs, and 8 outputs each."""
    mask = ", float[N,6,6] m" if "m)" in nodes else ""
    text = f"{HEAD} g (float[N,6,16] x{mask}) => ({outputs}) <int64[4] heads = {{0, 0, 2, 4}}> {{ {nodes} }}"
    proto, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    for index, name in enumerate("qkv"):
        scale = random.uniform(0.001, 0.004, 1 if index == 2 else 8).astype(np.float32)  # that of v is one number
        arrays: dict[str, NDArray[Any]] = {
            "w": random.integers(-127, 128, (16, 8)).astype(np.int8),
            "s": scale,
            "z": np.zeros_like(scale, np.int8),
            "b": random.normal(size=8).astype(np.float32),
        }
        proto.graph.initializer.extend(numpy_helper.from_array(arrays[kind], kind + name) for kind in arrays)
    for index, node in enumerate(proto.graph.node):
        node.name = node.name or f"n{index}"
    return ir.from_proto(proto)


def wrapped(model: ir.Model, *, join: bool, without: str = "") -> onnx.ModelProto:
    """Put attention, and the products except `without`, into functions."""
    found = find_attention(next(node for node in model.graph if node.op_type == "Softmax"))
    assert found is not None
    (attention,) = (each for each in units(model.graph, [Compound.attention(found)]) if each.op == "attention")
    products = [
        Unit(
            name=str(node.name),
            op="MatMul",
            nodes=(str(node.name),),
            inputs=("x",),
            outputs=(str(node.outputs[0].name),),
        )
        for node in model.graph
        if node.op_type == "DynamicQuantizeMatMul" and node.name != without
    ]
    shapes = {name: plain_shape(value) or () for name, value in inferred(model).items()}
    shapes |= {f"{name}{stage}": ("N", 6, 8) for name in "qkv" for stage in (0, 1)}  # not inferred behind products
    assert wrap_attentions(model, [*products, attention], shapes, join=join) == 1
    wrap_products(model, products, shapes, join=True)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return proto


def operators(proto: onnx.ModelProto) -> list[str]:
    """Return the native operators of a model, without their numbers, and all other operators."""
    return [node.op_type.partition("_")[0] for node in proto.graph.node]


@needs_library
@pytest.mark.parametrize("nodes", [PRODUCTS + SUMS + HEADS, PRODUCTS + PLAIN + HEADS, PRODUCTS + SUMS + SINGLE])
def test_products_of_the_same_rows_become_one_with_the_same_results(nodes: str, tmp_path: Path) -> None:
    joined, apart = wrapped(model_of(nodes), join=True), wrapped(model_of(nodes), join=False)
    assert operators(joined) == ["MatMul", "Attention"]
    assert operators(apart).count("MatMul") == 3
    product, attention = joined.graph.node
    assert (product.name, product.domain) == ("q", NATIVE_DOMAIN)
    assert [*attention.input[:3]] == [product.output[0]] * 3
    onnx.save(joined, tmp_path / "joined.onnx")
    onnx.save(apart, tmp_path / "apart.onnx")
    random = np.random.default_rng(1)
    feed = {
        "x": random.normal(size=(3, 6, 16)).astype(np.float32),
        "m": random.normal(size=(3, 6, 6)).astype(np.float32),
    }
    feed = {each.name: feed[each.name] for each in joined.graph.input}
    native = [open_session(tmp_path / f"{name}.onnx").run(None, feed)[0] for name in ("joined", "apart")]
    np.testing.assert_array_equal(native[0], native[1])
    bodies = [ort.InferenceSession(proto.SerializeToString()).run(None, feed)[0] for proto in (joined, apart)]
    np.testing.assert_allclose(bodies[0], bodies[1], rtol=1e-5, atol=1e-5)


@needs_library
@pytest.mark.parametrize(
    ("nodes", "outputs", "without", "count"),
    [
        (PRODUCTS + SUMS + HEADS, "float y, float k1", "", 3),
        (f"{PRODUCTS} {SUMS} {HEADS} r = Relu(v2)", "float y, float r", "", 3),
        (PRODUCTS + SUMS + HEADS, "float y", "v", 1),
        (
            f"t = Neg(x) {PRODUCT.format('q', 't', '')} {PRODUCT.format('k', 'x', '')} {PRODUCT.format('v', 'x', '')} {SUMS}{HEADS}",
            "float y",
            "",
            2,
        ),
    ],
    ids=["an output", "another reader", "not native", "other rows"],
)
def test_others_stay_as_they_are(nodes: str, outputs: str, without: str, count: int) -> None:
    proto = wrapped(model_of(nodes, outputs), join=True, without=without)
    assert operators(proto).count("MatMul") == count
    assert operators(proto).count("DynamicQuantizeMatMul") == (without != "")


@needs_library
def test_a_constant_for_each_item_is_no_bias() -> None:
    nodes = PRODUCTS + SUMS.replace("Add(q0, bq)", "Add(q0, items)") + HEADS
    model = model_of(nodes)
    items = numpy_helper.from_array(np.arange(8, dtype=np.float32).reshape(8, 1, 1), "items")  # as many as outputs
    proto = ir.to_proto(model)
    proto.graph.initializer.append(items)
    found = wrapped(ir.from_proto(proto), join=True)
    assert operators(found).count("MatMul") == 2
    assert "Add" in operators(found)


def test_a_bias_may_be_an_input_of_the_product() -> None:
    nodes = "".join(PRODUCT.format(name, "x", f", b{name}") for name in "qkv") + PLAIN + HEADS
    proto = wrapped(model_of(nodes), join=True)
    assert operators(proto) == ["MatMul", "Attention"]
    biases = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    product = proto.graph.node[0]
    assert biases[product.input[4]].shape == (24,)

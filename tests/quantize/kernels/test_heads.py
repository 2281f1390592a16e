"""Heads that stand side by side: where they are found, and attention that reads them there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from requant.calibration.model.session import open_session
from requant.quantize.kernels.heads import Heads, Places, heads_of
from requant.quantize.runtime.macs import multiply_accumulates
from requant.transforms.graphs.inference import inferred
from requant.transforms.graphs.queries import plain_shape
from requant.transforms.patterns.attention import find_attention

from ...native import needs_library, wrap_attention

OPSET = '<ir_version: 8, opset_import: ["" : 17]>\n'
SPLIT = "a, b, c = Split<axis = -1>(x, thirds)"
OWN = """qr = Reshape(a, heads) kr = Reshape(b, heads) vr = Reshape(c, heads)
    q = Transpose<perm = [0,2,1,3]>(qr) k = Transpose<perm = [0,2,1,3]>(kr) v = Transpose<perm = [0,2,1,3]>(vr)"""
PARTS = "q = Gather<axis = 0>(t, zero) k = Gather<axis = 0>(t, one) v = Gather<axis = 0>(t, two)"
TOGETHER = "r = Reshape(x, five) t = Transpose<perm = [2,0,3,1,4]>(r)"
MINGLED = "r = Reshape(x, mixed) t = Transpose<perm = [3,0,2,1,4]>(r)"
TORCH = """r = Reshape(x, apart) u = Unsqueeze(r, first) w = Transpose<perm = [3,1,2,0,4]>(u) t = Squeeze(w, third)
    a = Gather<axis = 0>(t, zero) b = Gather<axis = 0>(t, one) c = Gather<axis = 0>(t, two)
    qr = Reshape(a, flat) qt = Transpose<perm = [1,0,2]>(qr) q = Reshape(qt, four)
    kr = Reshape(b, flat) kt = Transpose<perm = [1,0,2]>(kr) k = Reshape(kt, four)
    vr = Reshape(c, flat) vt = Transpose<perm = [1,0,2]>(vr) v = Reshape(vt, four)"""
CONSTANTS = """int64[3] thirds = {8, 8, 8}, int64[4] heads = {0, 0, 2, 4}, int64[5] five = {0, 0, 3, 2, 4},
    int64[5] mixed = {0, 0, 2, 3, 4}, int64[4] apart = {6, -1, 3, 8}, int64[3] flat = {6, -1, 4}, int64[4] four = {-1, 2, 6, 4},
    int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] first = {0}, int64[1] third = {3}, float half = {0.5},
    int64[1] last = {-1}, int64[1] least = {-9223372036854775807}, int64[4] turned = {0, 0, 4, 2}"""
CORE = """t1 = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, t1) d = Mul(s, half) p = Softmax(d) [attend] o = MatMul(p, v)"""
CASES = {
    "split": (f"{SPLIT} {OWN}", "float[N,6,24]", 1, 4, 8),
    "together": (f"{TOGETHER} {PARTS}", "float[N,6,24]", 1, 4, 8),
    "mingled": (f"{MINGLED} {PARTS}", "float[N,6,24]", 1, 12, 4),
    "torch": (TORCH, "float[6,N,24]", 2, 4, 8),
}
"""By name: operators from x to q, k and v, the type of x, the order of its axes, and columns from head to head and from q to k."""


def model_of(nodes: str, x: str, y: str = "[turn] y = Transpose<perm = [0,2,1,3]>(o)") -> ir.Model:
    """Return a model of attention of two heads with four columns each."""
    text = f"{OPSET} g ({x} x) => (float y) <{CONSTANTS}> {{ {nodes} {CORE} {y} }}"
    return ir.from_proto(onnx.parser.parse_model(text))


def found_in(model: ir.Model) -> list[Heads | None]:
    """Return where the heads of q, k and v are."""
    found = find_attention(next(node for node in model.graph if node.op_type == "Softmax"))
    assert found is not None
    shapes = {name: plain_shape(value) or () for name, value in inferred(model).items()}
    return [heads_of(model, *each, shapes) for each in zip(found.inputs, found.orders, strict=False)]


@pytest.mark.parametrize("case", CASES)
def test_heads_are_found_where_exporters_move_them_from(case: str) -> None:
    nodes, x, order, step, apart = CASES[case]
    heads = found_in(model_of(nodes, x))
    expected = [Places(order, count=2, columns=4, first=index * apart, step=step) for index in range(3)]
    assert [each and each.places for each in heads] == expected
    assert {each and each.source.name for each in heads} == {"x"}


@pytest.mark.parametrize("before", ["n = Neg(x)", "n = Slice(x, last, least, last, last)"])
def test_a_computed_tensor_and_turned_columns_end_the_way(before: str) -> None:
    nodes = f"{before} {SPLIT.replace('(x,', '(n,')} {OWN}"
    assert [each and each.source.name for each in found_in(model_of(nodes, "float[N,6,24]"))] == ["n"] * 3


def test_columns_that_are_no_neighbours_are_no_heads() -> None:
    nodes = OWN.replace("heads", "turned").replace("0,2,1,3", "0,3,1,2")
    assert found_in(model_of(f"{SPLIT} {nodes}", "float[N,6,24]")) == [None] * 3


@needs_library
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("turn", ["0,2,1,3", "2,0,1,3"])
def test_attention_reads_heads_where_they_are_at_any_batch_size(case: str, turn: str, tmp_path: Path) -> None:
    nodes, x, order, _, _ = CASES[case]
    model = model_of(nodes, x, f"[turn] y = Transpose<perm = [{turn}]>(o)")
    for index, node in enumerate(model.graph):
        node.name = node.name or f"n{index}"
    before = ir.to_proto(model).SerializeToString()
    wrap_attention(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    assert [(node.op_type, [*node.input[:3]]) for node in proto.graph.node] == [("Attention", ["x", "x", "x"])]
    onnx.save(proto, tmp_path / "native.onnx")
    (call,) = model.graph
    keys, depth = 6, 4
    sizes = [(6, 2, 24) if order == 2 else (2, 6, 24)] * 3
    macs = multiply_accumulates("ai.requant.Attention", call, sizes, [(2, 6, 2, 4)])
    assert macs == 2 * 6 * 2 * keys * (depth + 4)
    native, float_, without = (
        open_session(tmp_path / "native.onnx"),
        ort.InferenceSession(before),
        ort.InferenceSession(proto.SerializeToString()),
    )
    for batch in (1, 3):
        shape = (6, batch, 24) if order == 2 else (batch, 6, 24)
        feed = {"x": np.random.default_rng(batch).normal(size=shape).astype(np.float32)}
        (expected,) = float_.run(None, feed)
        np.testing.assert_allclose(without.run(None, feed)[0], expected, rtol=0, atol=1e-6)
        (y,) = native.run(None, feed)
        # q and k of 4 values have steps of about 3 / 127; v and the shares have 1/127 and 1/255 of their ranges
        np.testing.assert_allclose(y, expected, rtol=0, atol=0.08)
        assert not np.array_equal(y, expected)

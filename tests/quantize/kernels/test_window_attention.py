"""Attention of windows that are shifted: a second mask, with a part for each window of an image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import open_session
from requant.quantize.placement.facts import facts_of
from requant.quantize.placement.forms import possible_forms
from requant.quantize.placement.rules import choose_by
from requant.transforms.int8.plan import Impl

from ...native import needs_library, wrap_attention
from .test_attentions import FEW, attention, defined, in_float, side_by_side

pytestmark = needs_library


@pytest.mark.parametrize("queries", [3, 49])
@pytest.mark.parametrize("gap", [None, 2])
def test_the_mask_of_windows_repeats_along_the_batch(isa: str, queries: int, gap: int | None) -> None:
    random, (images, windows, heads, depth) = np.random.default_rng(queries), (2, 3, 2, 32)
    shape = (images * windows, heads, queries, depth)
    q, k, v = (random.normal(0.1, 1.2, shape).astype(np.float32) for _ in range(3))
    bias = random.normal(size=(1, heads, queries, queries)).astype(np.float32)
    mask = np.where(random.random((1, windows, 1, queries, queries)) < 0.3, -100, 0).astype(np.float32)
    mask[0, 0] = 0
    mask[0, 1, 0, :, 0] = -100  # the first key of a row says nothing about the others
    fed, more, orders = {"q": q, "k": k, "v": v}, dict[str, Any](windows=windows), (0, 0, 0, 0)
    if gap is not None:
        orders = (1, 1, 1, 0)
        fed = {name: side_by_side(each, 1, gap) for name, each in fed.items()}
        more |= {"heads": heads, "first": [gap] * 3, "step": [gap + depth] * 3, "columns": [depth, depth]}
    found = attention(0.2, orders, masked=True, **more).run(None, fed | {"m": bias, "w": mask})[0]
    definition = in_float if queries <= FEW else defined
    added = bias + np.concatenate([mask[0]] * images)
    y, off = definition(q, k, v, added, 0.2)
    np.testing.assert_array_less(np.abs(found - y), off)


@pytest.mark.parametrize(
    ("windows", "shape"), [(4, (1, 4, 1, 9, 9)), (3, (1, 2, 1, 9, 9)), (3, (1, 3, 1, 9, 8)), (-3, (1, 3, 1, 9, 9))]
)
def test_windows_that_do_not_fit_end_with_one_line(windows: int, shape: tuple[int, ...]) -> None:
    x, m = np.zeros((6, 2, 9, 8), np.float32), np.zeros((2, 9, 9), np.float32)
    with pytest.raises(Exception, match="windows must"):
        attention(1, (0, 0, 0, 0), masked=True, windows=windows).run(
            None, {"q": x, "k": x, "v": x, "m": m, "w": np.zeros(shape, np.float32)}
        )


SHIFTED = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N,9,48] x) => (float[N,9,16] y) <int64[5] parts = {0, 0, 3, 2, 8}, int64[3] whole = {0, 0, 16},
    float scale = {0.35}, int64[5] five = {-1, 4, 2, 9, 9}, int64[4] four = {-1, 2, 9, 9},
    int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}> {
    r = Reshape(x, parts) t = Transpose<perm = [2,0,3,1,4]>(r)
    q = Gather<axis = 0>(t, i0) k = Gather<axis = 0>(t, i1) v = Gather<axis = 0>(t, i2)
    qs = Mul(q, scale) kt = Transpose<perm = [0,1,3,2]>(k) s = MatMul(qs, kt) b = Add(s, bias) w = Reshape(b, five)
    m = Add(w, mask) f = Reshape(m, four) p = Softmax(f) o = MatMul(p, v) [attend] ot = Transpose<perm = [0,2,1,3]>(o)
    y = Reshape(ot, whole) }"""


def test_shifted_windows_are_one_operator_at_any_batch_size(tmp_path: Path) -> None:
    random, proto = np.random.default_rng(0), onnx.parser.parse_model(SHIFTED)
    bias = random.normal(size=(1, 2, 9, 9)).astype(np.float32)
    mask = np.where(random.random((1, 4, 1, 9, 9)) < 0.4, -100, 0).astype(np.float32)
    proto.graph.initializer.extend([numpy_helper.from_array(bias, "bias"), numpy_helper.from_array(mask, "mask")])
    model = ir.from_proto(proto)
    wrap_attention(model)
    made = ir.to_proto(model)
    onnx.checker.check_model(made)
    (call,) = (node for node in made.graph.node if node.domain == NATIVE_DOMAIN)
    assert (call.op_type, [*call.input[:5]]) == ("WindowAttention", ["x", "x", "x", "bias", "mask"])
    onnx.save(made, tmp_path / "native.onnx")
    before = ort.InferenceSession(proto.SerializeToString())
    without = ort.InferenceSession(made.SerializeToString())
    native = open_session(tmp_path / "native.onnx")
    for images in (1, 3):
        feed = {"x": random.normal(size=(4 * images, 9, 48)).astype(np.float32)}
        (expected,) = before.run(None, feed)
        np.testing.assert_allclose(without.run(None, feed)[0], expected, rtol=0, atol=2e-5)
        (y,) = native.run(None, feed)
        assert not np.array_equal(y, expected)
        assert np.square(y - expected).mean() < 1e-3 * np.square(expected).mean()  # 8 bits of normal values


def test_windows_are_a_unit_that_can_be_native() -> None:
    proto = onnx.parser.parse_model(SHIFTED)
    for name, shape in (("bias", (1, 2, 9, 9)), ("mask", (1, 4, 1, 9, 9))):
        proto.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, np.float32), name))
    model = ir.from_proto(proto)
    for index, node in enumerate(model.graph):
        node.name = node.name or f"n{index}"
    facts = replace(facts_of(model), attention=True, native=True)
    assert Impl.DYNAMIC_NATIVE in possible_forms(facts, choose_by(facts, model))["attend"]

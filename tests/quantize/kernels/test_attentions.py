"""Attention in functions: the native operator, its body, and the plan."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import Array, open_session
from requant.quantize import Options, Selection, Strategy, quantize_model
from requant.quantize.kernels.attentions import wrap_attentions
from requant.quantize.kernels.library import VERSION, Kernels
from requant.quantize.placement.facts import facts_of
from requant.quantize.placement.forms import possible_forms, stock_plan
from requant.quantize.placement.rules import choose_by
from requant.transforms import run
from requant.transforms.int8.plan import Choice, Impl
from requant.transforms.int8.units import Compound, units
from requant.transforms.patterns.attention import find_attention

from ...native import FOUND, by_row, needs_library, wrap_attention

pytestmark = needs_library
FEW = 4
"""The queries that are computed in float."""
NO_SINK = np.asarray(-np.inf)
LAYOUTS = st.tuples(*[st.integers(0, 2)] * 4)
TURNS = {0: (0, 1, 2, 3), 1: (0, 2, 1, 3), 2: (2, 0, 1, 3)}
"""What turns (batch, heads, rows, columns) into each order of axes."""


def attention(
    scale: float, orders: Sequence[int], *, masked: bool, threads: int = 1, **more: Any
) -> ort.InferenceSession:
    """Load a model with the operator alone; `more` are further attributes. With `windows` it has a mask for them."""
    assert isinstance(FOUND, Kernels)
    names = ["q", "k", "v", "m"] if masked else ["q", "k", "v"]
    names += ["w"] if "windows" in more else []
    node = helper.make_node(
        "WindowAttention" if "windows" in more else "Attention",
        names,
        ["y"],
        domain=NATIVE_DOMAIN,
        scale=float(scale),
        orders=list(orders),
        **more,
    )
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(NATIVE_DOMAIN, VERSION)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(os.fspath(FOUND.library))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def evenly(x: Array) -> tuple[Array, Array]:
    """Return the last axis rounded to integers from -127 to 127, and the steps."""
    peak = np.abs(x).max(-1, keepdims=True)
    step = (peak / np.float32(127)).astype(np.float32)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    return np.rint(x * inverse), step.astype(np.float64)


def capped(score: Array, cap: float) -> Array:
    """Return scores that are capped, or as they are if `cap` is 0."""
    return np.asarray(cap * np.tanh(score / cap)) if cap else score


def near_tie(steps: Array) -> Array:
    """Return whether values, at most 255 steps, are so near to a half that an error of float32 changes their integer."""
    return np.asarray(np.abs(np.abs(steps - np.floor(steps)) - 0.5) <= 2.0**-14)  # two roundings of 255 steps


def defined(
    q: Array, k: Array, v: Array, mask: Array, scale: float, cap: float = 0, sink: Array = NO_SINK
) -> tuple[Array, Array]:
    """Return what the operator is defined to compute, (batch, heads, rows, columns) each, and how far it may be off.

    A share near a half may become one of two integers: the operator has exp to 1e-4, and scores in float32. So may a
    value of q, which has been rotated in float32. Where rounding changes the sum of shares by more than a 32nd, they
    have steps of a 256th.
    """
    (q8, q_step), (k8, k_step) = by_row(q), evenly(k)
    v8, v_step = (each.swapaxes(-1, -2) for each in evenly(v.swapaxes(-1, -2)))
    score = capped(scale * (q8 @ k8.swapaxes(-1, -2)) * q_step * k_step.swapaxes(-1, -2), cap) + mask
    most = score.max(-1, keepdims=True)
    exact, unused = 255 * np.exp(score - most), 255 * np.exp(sink - most)
    share, blur = np.rint(exact), 3e-4 + 2.0**-20 * scale * 255 * 127 * q.shape[-1] * q_step * k_step.max()
    blur = blur + scale * (near_tie(q / q_step) * q_step) @ np.abs(k8 * k_step).swapaxes(-1, -2)
    unsure = np.abs(np.abs(exact - np.floor(exact)) - 0.5) <= blur * exact + 1e-4
    total, doubtful = share.sum(-1, keepdims=True), unsure.sum(-1, keepdims=True)
    values = v8 * v_step
    exact_total = exact.sum(-1, keepdims=True)
    rough = np.abs(exact_total - total) * 32 - total
    total, exact_total = total + unused, exact_total + unused
    y = share @ values / total
    off = (unsure @ np.abs(values) + np.abs(y) * doubtful) / (total - doubtful) + 2.0**-18 * np.abs(values).max()
    real, size = exact @ values / exact_total, exact @ np.abs(values) / exact_total
    either = np.abs(rough) <= 0.1 * total + 32 * doubtful
    fine = (np.abs(values).sum(-2, keepdims=True) + np.abs(real) * k.shape[-2]) / 256
    real_off = 2 * blur.max() * size + fine / exact_total + 1e-6
    off = np.where(either, off + real_off + np.abs(real - y), np.where(rough > 0, real_off, off))
    return np.where((rough > 0) & ~either, real, y), off


def in_float(
    q: Array, k: Array, v: Array, mask: Array, scale: float, cap: float = 0, sink: Array = NO_SINK
) -> tuple[Array, Array]:
    """Return what the operator computes for few queries, and how far it may be off: it has exp to 1e-4, in float32."""
    q, k, v = (each.astype(np.float64) for each in (q, k, v))
    score = capped(scale * q @ k.swapaxes(-1, -2), cap) + mask
    most = score.max(-1, keepdims=True)
    share = np.exp(score - most)
    share /= share.sum(-1, keepdims=True) + np.exp(sink - most)
    blur = 3e-4 + 2.0**-20 * scale * (np.abs(q) @ np.abs(k).swapaxes(-1, -2)).max()
    lost = 2.0**-29 * k.shape[-2] * np.abs(v).max()  # shares below 2^-30 count as 0
    return share @ v, 2 * blur * (share @ np.abs(v)) + lost + 1e-6


def side_by_side(heads: Array, order: int, gap: int) -> Array:
    """Return heads (batch, heads, rows, columns) in the last axis of a tensor, with a gap in front of each."""
    gaps = np.full((*heads.shape[:-1], gap), np.nan, np.float32)
    rows = np.concatenate([gaps, heads], -1).transpose(TURNS[order])
    return rows.reshape(*rows.shape[:2], -1)


@settings(
    max_examples=3 * settings().max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sizes=st.tuples(*[st.integers(1, each) for each in (2, 3, 40, 200, 40, 40)]),
    layout=LAYOUTS,
    mask=st.sampled_from(["", "keys", "rows", "all", "causal", "far", "padded"]),
    single=st.sampled_from(["", "q", "k", "v"]),
    gap=st.sampled_from([None, 0, 3]),
    groups=st.integers(1, 3),
    causal=st.booleans(),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 9999),
)
def test_the_operator_computes_its_definition_in_every_layout(
    isa: str,
    sizes: tuple[int, ...],
    layout: tuple[int, ...],
    mask: str,
    single: str,
    gap: int | None,
    groups: int,
    causal: bool,
    threads: int,
    seed: int,
) -> None:
    """With a gap, heads stand side by side, so many columns apart. A head of k and v is for `groups` heads of q."""
    batch, heads, queries, keys, depth, width = sizes
    random = np.random.default_rng(seed)
    shapes = {"q": (queries, depth), "k": (keys, depth), "v": (keys, width)}
    of_q = groups * heads
    given_heads = {
        name: (1 if name == single else batch, of_q if name == "q" else heads, *shape) for name, shape in shapes.items()
    }
    tensors = {name: random.normal(0.2, 1.5, shape).astype(np.float32) for name, shape in given_heads.items()}
    masks = {"keys": (1, 1, 1, keys), "rows": (queries, 1), "all": (batch, of_q, queries, keys)}
    added = random.normal(0, 3, masks.get(mask, ())).astype(np.float32)
    if mask in ("causal", "far"):
        seen = np.arange(keys) <= np.arange(queries)[:, None] + seed % keys
        added = np.where(seen, 0, -np.inf if mask == "causal" else -1e9).astype(np.float32)
    if mask == "padded":  # the first one of a batch sees fewer keys
        lengths = np.array([1 + seed % keys, keys])[:batch, None, None, None]
        added = np.where(np.arange(keys) < lengths, 0, np.finfo(np.float32).min).astype(np.float32)
    fed = {n: tensors[n].transpose(TURNS[order]) for n, order in zip("qkv", layout, strict=False)}
    more: dict[str, Any] = {}
    if gap is not None:
        layout = (*(order or 1 for order in layout[:3]), layout[3])
        fed = {n: side_by_side(tensors[n], order, gap) for n, order in zip("qkv", layout, strict=False)}
        more = {"heads": of_q, "first": [gap] * 3, "step": [gap + each for each in (depth, depth, width)]}
        more |= {"columns": [depth, width], "shared_heads": heads if groups > 1 else 0}
        layout = (*layout[:3], 3 if seed % 2 else layout[3])  # the heads of the result side by side too
    more |= {"causal": 1} if causal else {}
    fed |= {"m": added} if mask else {}
    made = attention(0.3, layout, masked=bool(mask), threads=threads, **more)
    found = made.run(None, {name: np.ascontiguousarray(array) for name, array in fed.items()})[0]
    repeated = {name: tensor if name == "q" else tensor.repeat(groups, 1) for name, tensor in tensors.items()}
    hidden = np.where(causal & (np.arange(keys) > np.arange(queries)[:, None]), -np.inf, np.float32(0))
    definition = in_float if queries <= FEW else defined
    y, off = definition(repeated["q"], repeated["k"], repeated["v"], added + hidden, 0.3)
    if layout[3] == 3:
        layout, found = (*layout[:3], 1), found.reshape(*found.shape[:2], of_q, width)
    shapes_ = (each.shape[:2] for each in repeated.values())
    shape = np.broadcast_shapes(*shapes_, added.shape[:-2] if mask == "all" else ())
    np.testing.assert_array_less(np.abs(found.transpose(np.argsort(TURNS[layout[3]])) - y), off)
    assert y.shape[:2] == shape


WINDOWS = {"one for all heads": (1, 1), "one for each head": (1, 4), "one for each head of each item": (2, 4)}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("planes", WINDOWS.values(), ids=WINDOWS)
def test_keys_that_a_mask_hides_from_queries_that_are_neighbours_change_nothing(
    planes: tuple[int, int], causal: bool
) -> None:
    """So many queries are computed in parts, each with the keys of its window."""
    random, count = np.random.default_rng(0), 400
    q, k, v = (random.normal(size=(2, 4, count, 24)).astype(np.float32) for _ in range(3))
    widths = random.integers(5, 90, planes)[..., None, None]
    apart = np.arange(count)[:, None] - np.arange(count)
    mask = np.where(np.abs(apart) < widths, 0, np.finfo(np.float32).min).astype(np.float32)
    more = {"causal": 1} if causal else {}
    found = attention(0.2, (0, 0, 0, 0), masked=True, **more).run(None, {"q": q, "k": k, "v": v, "m": mask})[0]
    hidden = np.where(apart < 0, -np.inf, 0) if causal else 0
    expected, _ = in_float(q, k, v, mask + hidden, 0.2)
    assert np.square(found - expected).mean() < 4e-4 * np.square(expected).mean()


@pytest.mark.parametrize("least", [-1e30, np.finfo(np.float32).min])
def test_a_query_whose_masks_are_all_the_least_number_sees_all_keys_alike(least: float) -> None:
    """Padded queries have such masks: the scores in front of them are lost in rounding."""
    random, count = np.random.default_rng(0), 300
    q, k, v = (random.normal(size=(1, 2, count, 16)).astype(np.float32) for _ in range(3))
    mask = np.zeros((1, 1, count, count), np.float32)
    mask[:, :, :, 200:] = mask[:, :, 200:] = least
    found = attention(0.2, (0, 0, 0, 0), masked=True).run(None, {"q": q, "k": k, "v": v, "m": mask})[0]
    np.testing.assert_allclose(found[:, :, 200:], np.broadcast_to(v.mean(2, keepdims=True), (1, 2, 100, 16)), atol=0.01)


def test_a_query_that_sees_no_key_is_not_a_number_also_in_parts() -> None:
    random, count = np.random.default_rng(0), 400
    q, k, v = (random.normal(size=(1, 1, count, 8)).astype(np.float32) for _ in range(3))
    apart = np.arange(count)[:, None] - np.arange(count)
    mask = np.where(np.abs(apart) < 20, 0, -np.inf).astype(np.float32)
    mask[7] = -np.inf
    found = attention(0.2, (0, 0, 0, 0), masked=True).run(None, {"q": q, "k": k, "v": v, "m": mask})[0]
    assert np.isnan(found[0, 0, 7]).all()
    assert np.isfinite(np.delete(found, 7, axis=2)).all()


def test_attention_without_heads_has_three_axes(isa: str) -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(2, rows, 8)).astype(np.float32) for rows in (5, 9, 9))
    m = random.normal(size=(2, 1, 9)).astype(np.float32)
    found = attention(1, (0, 0, 0, 0), masked=True).run(None, {"q": q, "k": k, "v": v, "m": m})[0]
    y, off = defined(q, k, v, m, 1)
    np.testing.assert_array_less(np.abs(found - y), off)


def test_a_mask_with_more_rows_repeats_a_single_query(isa: str) -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(1, 2, rows, 8)).astype(np.float32) for rows in (1, 9, 9))
    m = random.normal(size=(6, 9)).astype(np.float32)
    found = attention(1, (0, 0, 0, 0), masked=True).run(None, {"q": q, "k": k, "v": v, "m": m})[0]
    y, off = defined(q, k, v, m, 1)
    assert found.shape == (1, 2, 6, 8)
    np.testing.assert_array_less(np.abs(found - y), off)


def test_no_keys_give_zeros_and_no_depth_gives_means(isa: str) -> None:
    made = attention(1, (0, 0, 0, 0), masked=False)
    q, k, v = (np.ones((1, 1, rows, 8), np.float32) for rows in (3, 0, 0))
    np.testing.assert_array_equal(made.run(None, {"q": q, "k": k, "v": v})[0], np.zeros((1, 1, 3, 8)))
    v = np.arange(40, dtype=np.float32).reshape(1, 1, 5, 8)
    found = made.run(None, {"q": q[..., :0], "k": v[..., :0], "v": v})[0]
    np.testing.assert_allclose(found, np.broadcast_to(v.mean(2, keepdims=True), found.shape), rtol=0.01)


@pytest.mark.parametrize("queries", [4, 5])
def test_rows_that_are_not_finite_become_nan_and_others_do_not(isa: str, queries: int) -> None:
    q, k, v = (np.ones((1, 1, rows, 8), np.float32) for rows in (queries, 6, 6))
    q[0, 0, 1, 3], mask = np.nan, np.zeros((queries, 6), np.float32)
    mask[2], mask[3, 1:] = -np.inf, -np.inf
    (found,) = attention(1, (0, 0, 0, 0), masked=True).run(None, {"q": q, "k": k, "v": v, "m": mask})
    assert np.isnan(found[0, 0, 1:3]).all()
    np.testing.assert_allclose(found[0, 0, [0, 3]], 1, rtol=1e-6)
    v[0, 0, 0, 2] = np.inf
    (found,) = attention(1, (0, 0, 0, 0), masked=False).run(None, {"q": np.ones_like(q), "k": k, "v": v})
    assert not np.isfinite(found[..., 2]).any()
    assert np.isfinite(np.delete(found, 2, -1)).all()


@pytest.mark.parametrize("queries", [4, 5])
def test_a_query_that_sees_no_key_is_zero_if_that_is_asked(isa: str, queries: int) -> None:
    q, k, v = (np.ones((1, 1, rows, 8), np.float32) for rows in (queries, 70, 70))
    q[0, 0, 1, 3], mask = np.nan, np.zeros((queries, 70), np.float32)
    mask[2], mask[3, 1:] = -np.inf, -np.inf
    (found,) = attention(1, (0, 0, 0, 0), masked=True, zero=1).run(None, {"q": q, "k": k, "v": v, "m": mask})
    assert np.isnan(found[0, 0, 1]).all()
    np.testing.assert_array_equal(found[0, 0, 2], 0)
    np.testing.assert_allclose(found[0, 0, [0, 3]], 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q": (1, 1, 2, 3)}, "do not fit together"),
        ({"v": (1, 1, 4, 8)}, "do not fit together"),
        ({"k": (5, 8)}, "three or four axes"),
        ({"m": (2, 5)}, "do not fit together"),
        ({"m": (3, 4)}, "a column for each key"),
        ({"q": (2, 1, 3, 8), "k": (3, 1, 5, 8)}, "do not fit together"),
    ],
)
def test_shapes_that_do_not_fit_end_with_one_line(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    whole = {"q": (1, 1, 3, 8), "k": (1, 1, 5, 8), "v": (1, 1, 5, 8), "m": (3, 5)} | shapes
    with pytest.raises(Exception, match=message):
        attention(1, (0, 0, 0, 0), masked=True).run(
            None, {n: np.zeros(shape, np.float32) for n, shape in whole.items()}
        )


def test_without_heads_there_is_one_order_of_axes() -> None:
    x = np.zeros((2, 5, 8), np.float32)
    with pytest.raises(Exception, match="without heads all orders must be 0"):
        attention(1, (0, 0, 0, 2), masked=False).run(None, {"q": x, "k": x, "v": x})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"orders": [0, 1, 3, 0]}, "must be 0, 1 or 2"),
        ({"heads": 2, "first": [0, 0]}, "must be described"),
        ({"heads": 2, "first": [0, 0, -8]}, "inside their tensor"),
        ({"heads": 2, "columns": [-4, 4]}, "inside their tensor"),
        ({"heads": 2, "first": [0, 8, 17]}, "inside their tensor"),
        ({"heads": 2**62, "step": [4, 4, 4]}, "inside their tensor"),
    ],
)
def test_heads_outside_their_tensor_end_with_one_line(attributes: dict[str, Any], message: str) -> None:
    asked = {"orders": [1, 1, 1, 0], "first": [0, 8, 16], "step": [4, 4, 4], "columns": [4, 4], **attributes}
    x = np.zeros((1, 5, 24), np.float32)
    with pytest.raises(Exception, match=message):
        attention(1, asked.pop("orders"), masked=False, **asked).run(None, {"q": x, "k": x, "v": x})


BLOCK = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1,24,64] x, float[1,1,1,24] m) => (float[1,24,64] y) <int64[4] heads = {0, 0, 4, 16}, int64[3] whole = {0, 0, 64},
    float scale = {0.25}> {
    a = MatMul(x, wq) b = MatMul(x, wk) c = MatMul(x, wv)
    q = Reshape(a, heads) k = Reshape(b, heads) v = Reshape(c, heads)
    qt = Transpose<perm = [0,2,1,3]>(q) kt = Transpose<perm = [0,2,3,1]>(k) vt = Transpose<perm = [0,2,1,3]>(v)
    [scores] s = MatMul(qt, kt) t = Mul(s, scale) u = Add(t, m) p = Softmax(u) [values] o = MatMul(p, vt)
    [attend] ot = Transpose<perm = [0,2,1,3]>(o) z = Reshape(ot, whole) y = MatMul(z, wo) }"""


def block(folder: Path) -> Path:
    """Write a block of a transformer with data beside it; return the path of the model."""
    random, proto = np.random.default_rng(0), onnx.parser.parse_model(BLOCK)
    for name in ("wq", "wk", "wv", "wo"):
        proto.graph.initializer.append(
            numpy_helper.from_array(random.normal(0, 0.2, (64, 64)).astype(np.float32), name)
        )
    onnx.save(proto, folder / "m.onnx")
    x = random.normal(size=(20, 24, 64)).astype(np.float32)
    np.savez(folder / "d.npz", x=x, m=np.where(random.random((20, 1, 1, 24)) < 0.2, -1e4, 0).astype(np.float32))
    return folder / "m.onnx"


def test_attention_becomes_a_function_whose_body_is_what_was_there(tmp_path: Path) -> None:
    model = ir.load(block(tmp_path))
    found = find_attention(next(node for node in model.graph if node.op_type == "Softmax"))
    assert found is not None
    (unit,) = (each for each in units(model.graph, [Compound.attention(found)]) if each.op == "attention")
    assert (unit.name, unit.inputs) == ("attend", ("q", "k", "v", "m"))
    assert wrap_attentions(model, [unit], {}) == 1
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    (call,) = (node for node in proto.graph.node if node.domain == NATIVE_DOMAIN)
    assert (call.name, [*call.input[:4]]) == ("attend", ["q", "k", "v", "m"])
    (body,) = proto.functions
    kinds = ["Transpose", "Transpose", "MatMul", "Mul", "Add", "Softmax", "Transpose", "MatMul", "Transpose"]
    assert [node.op_type for node in body.node] == kinds
    feed = {"x": np.load(tmp_path / "d.npz")["x"][:1], "m": np.load(tmp_path / "d.npz")["m"][:1]}
    (before,) = ort.InferenceSession(tmp_path / "m.onnx").run(None, feed)
    (without,) = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    np.testing.assert_allclose(without, before, rtol=0, atol=2e-5)
    onnx.save(proto, tmp_path / "native.onnx")
    (native,) = open_session(tmp_path / "native.onnx").run(None, feed)
    # a head has 16 values of about 1.6: noise of 1/255 of a range in q, k and v, and of 1/255 in the shares
    assert np.square(native - before).mean() < 1e-3 * np.square(before).mean()
    assert not np.array_equal(native, before)


def test_attention_is_chosen_by_its_costs_and_can_be_planned(tmp_path: Path) -> None:
    path = block(tmp_path)
    asked: dict[str, Any] = {"seconds": 0.05, "force_int8": True, "effort": "low"}
    quantize_model(path, tmp_path / "d.npz", tmp_path / "q.onnx", Options(kernels="native", **asked))
    plan = json.loads((tmp_path / "q.plan.json").read_text())
    assert plan["units"]["attend"]["operator"] == "attention"
    for unit in plan["units"].values():
        wanted = {"MatMul": Impl.DYNAMIC, "attention": Impl.DYNAMIC_NATIVE}
        unit["implementation"] = wanted.get(unit["operator"], Impl.FLOAT).value
    (tmp_path / "mine.json").write_text(json.dumps(plan))
    made = quantize_model(path, tmp_path / "d.npz", tmp_path / "p.onnx", Options(plan=tmp_path / "mine.json", **asked))
    assert (made.forms["dynamic native"], made.forms["dynamic"]) == (1, 4)
    names = [node.op_type for node in onnx.load(tmp_path / "p.onnx").graph.node if node.domain == NATIVE_DOMAIN]
    assert names == ["Attention"]
    stock = Options(plan=tmp_path / "mine.json", kernels="stock", **asked)
    with pytest.raises(Exception, match="native"):
        quantize_model(path, tmp_path / "d.npz", tmp_path / "s.onnx", stock)


def test_a_plan_without_attention_has_its_operators_as_units(tmp_path: Path) -> None:
    path = block(tmp_path)
    asked: dict[str, Any] = {"seconds": 0.05, "force_int8": True, "effort": "low"}
    quantize_model(path, tmp_path / "d.npz", tmp_path / "q.onnx", Options(kernels="stock", **asked))
    plan = json.loads((tmp_path / "q.plan.json").read_text())
    assert {"scores", "values"} <= plan["units"].keys()
    again = Options(plan=tmp_path / "q.plan.json", **asked)
    quantize_model(path, tmp_path / "d.npz", tmp_path / "p.onnx", again)
    written = json.loads((tmp_path / "p.plan.json").read_text())
    assert {name: row["implementation"] for name, row in written["units"].items()} == {
        name: row["implementation"] for name, row in plan["units"].items()
    }


def test_options_for_operators_inside_attention_keep_them_units(tmp_path: Path) -> None:
    model = ir.load(block(tmp_path))
    for asked in (Selection(strategies={"scores": Strategy.STATIC}), Selection(include_ops=frozenset({"MatMul"}))):
        plan = choose_by(replace(facts_of(model, asked), attention=True, native=True), model)
        assert {"scores", "values"} <= {unit.name for unit in plan.units}
    for strategy in (Strategy.DYNAMIC, Strategy.BLOCK):  # attention finds its ranges at run time
        given = replace(facts_of(model, Selection(strategy=strategy)), attention=True, native=True)
        assert Impl.DYNAMIC_NATIVE in possible_forms(given, choose_by(given, model))["attend"]
    whole = choose_by(replace(facts_of(model), attention=True, native=True), model)
    assert [unit.name for unit in whole.units if unit.op == "attention"] == ["attend"]
    native = whole.with_choices({"attend": Choice(Impl.DYNAMIC_NATIVE)})
    assert stock_plan(native).choices["attend"].impl is Impl.FLOAT


def test_attentions_that_share_a_product_are_one_unit_and_single_ones() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2,6,8] q, float[2,6,8] k, float[2,5,6] w, float[2,5,8] v) => (float[2,6,8] y) {
        kt = Transpose<perm = [0,2,1]>(k) s = MatMul(q, kt) p = Softmax(s) wt = Transpose<perm = [0,2,1]>(w)
        t = MatMul(p, wt) r = Softmax(t) y = MatMul(r, v) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    for index, node in enumerate(model.graph):
        node.name = f"n{index}"
    plan = choose_by(replace(facts_of(model), attention=True, native=True), model)
    assert sorted(name for unit in plan.units for name in unit.nodes) == [f"n{index}" for index in range(7)]


def test_a_product_in_the_mask_is_no_residual(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2,16,16] x, float[2,16,16] q, float[2,16,16] k, float[2,16,16] v) => (float[2,16,16] y) {
        [mask] m = MatMul(x, w) r = Relu(m) kt = Transpose<perm = [0,2,1]>(k) s = MatMul(q, kt) a = Add(s, r)
        p = Softmax(a) [attend] y = MatMul(p, v) }"""
    proto, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    proto.graph.initializer.append(numpy_helper.from_array(random.normal(size=(16, 16)).astype(np.float32), "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    data: dict[str, Any] = {name: random.normal(size=(40, 16, 16)).astype(np.float32) for name in "xqkv"}
    np.savez(tmp_path / "d.npz", **data)
    (tmp_path / "plan.json").write_text(
        json.dumps(
            {
                "schema": 1,
                "units": {
                    "mask": {"operator": "MatMul", "implementation": "dynamic native"},
                    "attend": {"operator": "attention", "implementation": "dynamic native"},
                },
            }
        )
    )
    asked = Options(plan=tmp_path / "plan.json", seconds=0.05, force_int8=True, effort="low")
    made = quantize_model(tmp_path / "m.onnx", tmp_path / "d.npz", tmp_path / "q.onnx", asked)
    assert made.forms["dynamic native"] == 2


def test_many_small_shares_beside_a_large_one_count(isa: str) -> None:
    q, k = np.ones((1, 1, 2, 4), np.float32), np.zeros((1, 1, 512, 4), np.float32)
    v = np.ones((1, 1, 512, 3), np.float32)
    k[0, 0, 0], v[0, 0, 0] = 6.3 / 4, -1
    (found,) = attention(1, (0, 0, 0, 0), masked=False).run(None, {"q": q, "k": k, "v": v})
    exact = (511 - np.exp(6.3)) / (511 + np.exp(6.3))
    np.testing.assert_allclose(found, exact, rtol=0, atol=0.02)  # the score 6.3 itself is rounded to 1/127 at most


GROUPED = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N,4,S,16] q, float[N,2,T,16] k, float[N,2,T,16] v) => (float[N,4,S,16] y) <int64[1] two = {2},
    int64[5] times = {1, 1, 2, 1, 1}, int64[4] whole = {0, 4, -1, 16}, float scale = {0.25}> {
    ku = Unsqueeze(k, two) kx = Expand(ku, times) kr = Reshape(kx, whole) kt = Transpose<perm = [0,1,3,2]>(kr)
    vu = Unsqueeze(v, two) vx = Expand(vu, times) vr = Reshape(vx, whole)
    s = MatMul(q, kt) t = Mul(s, scale) p = Softmax(t) [attend] y = MatMul(p, vr) }"""
ONE_QUERY = GROUPED.replace("float[N,4,S,16] q", "float[N,1,S,16] q")
ROWS_BEFORE_HEADS = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N,S,4,16] q, float[N,T,2,16] k, float[N,T,2,16] v) => (float[N,4,S,16] y) <int64[1] three = {3},
    int64[5] times = {1, 1, 1, 2, 1}, int64[4] whole = {0, -1, 4, 16}, float scale = {0.25}> {
    ku = Unsqueeze(k, three) kx = Tile(ku, times) kr = Reshape(kx, whole) kt = Transpose<perm = [0,2,3,1]>(kr)
    vu = Unsqueeze(v, three) vx = Tile(vu, times) vr = Reshape(vx, whole) vt = Transpose<perm = [0,2,1,3]>(vr)
    qt = Transpose<perm = [0,2,1,3]>(q)
    s = MatMul(qt, kt) t = Mul(s, scale) p = Softmax(t) [attend] y = MatMul(p, vt) }"""
INTERLEAVED = GROUPED.replace("two = {2}", "two = {1}").replace("{1, 1, 2, 1, 1}", "{1, 2, 1, 1, 1}")


REPEAT = """s0X = Shape(X) nX = Gather(s0X, i0) hX = Gather(s0X, i1) tX = Gather(s0X, i2) dX = Gather(s0X, i3)
    uX = Unsqueeze(X, two) nuX = Unsqueeze(nX, zero) huX = Unsqueeze(hX, zero) tuX = Unsqueeze(tX, zero)
    duX = Unsqueeze(dX, zero) cX = Concat<axis = 0>(nuX, huX, two, tuX, duX) vX = Reshape(cX, flat)
    shX = Shape(vX) oneX = ConstantOfShape<value = int64[1] {1}>(shX) negX = Mul(oneX, flat) eX = Equal(vX, negX)
    wX = Where(eX, oneX, vX) xX = Expand(uX, wX) mX = Mul(huX, two) rX = Concat<axis = 0>(nuX, mX, tuX, duX)
    Xr = Reshape(xX, rX)"""
AT_RUN_TIME = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[N,4,S,16] q, float[N,2,T,16] k, float[N,2,T,16] v) => (float[N,4,S,16] y) <int64[1] two = {{2}},
    int64[1] zero = {{0}}, int64[1] flat = {{-1}}, int64 i0 = {{0}}, int64 i1 = {{1}}, int64 i2 = {{2}}, int64 i3 = {{3}},
    float scale = {{0.25}}> {{ {REPEAT.replace("X", "k")} {REPEAT.replace("X", "v")}
    kt = Transpose<perm = [0,1,3,2]>(kr) s = MatMul(q, kt) t = Mul(s, scale) p = Softmax(t) [attend] y = MatMul(p, vr) }}"""


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (GROUPED, ["q", "k", "v"]),
        (AT_RUN_TIME, ["q", "k", "v"]),
        (INTERLEAVED, ["q", "kr", "vr"]),
        (ONE_QUERY, ["q", "kr", "vr"]),
        (ROWS_BEFORE_HEADS, ["q", "k", "v"]),
    ],
)
def test_keys_and_values_of_several_queries_are_read_once(text: str, read: list[str], tmp_path: Path) -> None:
    """Only neighbouring queries may share them, and q has all heads: else the operators that repeat them stay."""
    proto = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    sizes = {"q": (3, 1 if text is ONE_QUERY else 4, 5, 16), "k": (3, 2, 9, 16), "v": (3, 2, 9, 16)}
    feed = {name: random.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    if text is ROWS_BEFORE_HEADS:
        feed = {name: array.swapaxes(1, 2) for name, array in feed.items()}
    (before,) = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    model = run("fold_constants simplify_reshapes strip_unused_nodes", ir.from_proto(proto)).model
    wrap_attention(model)
    made = ir.to_proto(model)
    (call,) = (node for node in made.graph.node if node.domain == NATIVE_DOMAIN)
    assert [*call.input[:3]] == read
    (without,) = ort.InferenceSession(made.SerializeToString()).run(None, feed)
    np.testing.assert_allclose(without, before, rtol=0, atol=2e-5)
    onnx.save(made, tmp_path / "native.onnx")
    (native,) = open_session(tmp_path / "native.onnx").run(None, feed)
    assert np.square(native - before).mean() < 1e-3 * np.square(before).mean()  # 8 bits of normal values


GUARDED = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[2,4,S,16] q, float[2,4,T,16] k, float[2,4,T,16] v, float[2,1,S,T] m) => (float[2,4,S,16] y)
    <float scale = {0.25}, float other = {0}> { kt = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, kt) t = Mul(s, scale)
    u = Add(t, m) p = Softmax<axis = -1>(u) n = IsNaN(p) w = Where(n, other, p) [attend] y = MatMul(w, v) }"""


def test_masked_rows_that_become_zero_are_attention(tmp_path: Path) -> None:
    """PyTorch writes Where(IsNaN(shares), 0, shares), so that a query that sees no key gives 0."""
    proto = onnx.parser.parse_model(GUARDED)
    random = np.random.default_rng(0)
    sizes = {"q": (2, 4, 5, 16), "k": (2, 4, 9, 16), "v": (2, 4, 9, 16)}
    feed = {name: random.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    feed["m"] = np.where(random.random((2, 1, 5, 9)) < 0.3, -np.inf, 0).astype(np.float32)
    feed["m"][1, 0, 2] = -np.inf
    (before,) = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    model = ir.from_proto(proto)
    wrap_attention(model)
    made = ir.to_proto(model)
    assert [node.domain for node in made.graph.node] == [NATIVE_DOMAIN]
    onnx.save(made, tmp_path / "native.onnx")
    (native,) = open_session(tmp_path / "native.onnx").run(None, feed)
    assert not native[1, :, 2].any()
    assert np.square(native - before).mean() < 1e-3 * np.square(before).mean()  # 8 bits of normal values


def test_masked_rows_that_become_another_number_are_no_attention() -> None:
    model = ir.from_proto(onnx.parser.parse_model(GUARDED.replace("{0}", "{0.5}")))
    assert find_attention(next(node for node in model.graph if node.op_type == "Softmax")) is None

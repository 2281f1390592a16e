"""Attention that a model has as one operator: its native form, its body, and what stays float."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from onnx.backend.test.case import node as cases

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import Array, open_session
from requant.quantize import Options, Selection, quantize_model
from requant.quantize.kernels.attentions import wrap_attentions
from requant.quantize.model.types import add_types
from requant.quantize.placement.facts import facts_of
from requant.quantize.placement.forms import possible_forms
from requant.quantize.placement.rules import choose_by
from requant.quantize.runtime.macs import multiply_accumulates
from requant.transforms.graphs.inference import inferred
from requant.transforms.graphs.queries import plain_shape
from requant.transforms.int8.plan import Impl
from requant.transforms.int8.units import Compound, units
from requant.transforms.patterns.attention import find_attention

from ...native import needs_library
from .test_attentions import defined

Feed = dict[str, Array]
HEAD = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>'
FOUR = "float[N,6,S,16] q, float[N,{kv},T,16] k, float[N,{kv},T,8] v"
THREE = "float[N,S,96] q, float[N,T,{k}] k, float[N,T,{v}] v"
BATCH, QUERIES, KEYS = 2, 5, 7


def model_of(attributes: str, *, kv: int, axes: int, mask: str = "") -> onnx.ModelProto:
    """Return a model of one Attention with 6 heads of queries, and `kv` of keys and values."""
    tensors = FOUR.format(kv=kv) if axes == 4 else THREE.format(k=16 * kv, v=8 * kv)
    heads = [] if axes == 4 else ["q_num_heads = 6", f"kv_num_heads = {kv}"]
    given = ", ".join(filter(None, [attributes, *heads]))
    y, more = "float[N,6,S,8] y" if axes == 4 else "float[N,S,48] y", f", {mask} m" if mask else ""
    text = f"{HEAD} g ({tensors}{more}) => ({y}) {{ [op] y = Attention <{given}> (q, k, v{', m' if mask else ''}) }}"
    return onnx.parser.parse_model(text.replace("<>", ""))


def feed_of(kv: int, axes: int, mask: Array | None, *, queries: int = QUERIES) -> Feed:
    """Return values for `model_of`."""
    random = np.random.default_rng(kv + axes)
    sizes = {"q": (6, queries, 16), "k": (kv, KEYS, 16), "v": (kv, KEYS, 8)}
    heads = {name: random.normal(0.1, 1, (BATCH, *size)).astype(np.float32) for name, size in sizes.items()}
    rows = {name: each.transpose(0, 2, 1, 3).reshape(BATCH, each.shape[2], -1) for name, each in heads.items()}
    return {**(heads if axes == 4 else rows), **({} if mask is None else {"m": mask})}


def in_heads(feed: Feed, kv: int) -> tuple[Array, Array, Array]:
    """Return q, k and v as (batch, 6, rows, columns)."""
    count = {"q": 6, "k": kv, "v": kv}
    whole = {
        n: x if x.ndim == 4 else x.reshape(BATCH, x.shape[1], count[n], -1).transpose(0, 2, 1, 3)
        for n, x in feed.items()
        if n in count
    }
    q, k, v = (whole[name].repeat(6 // count[name], axis=1) for name in "qkv")
    return q, k, v


def wrapped(proto: onnx.ModelProto, *, join: bool) -> onnx.ModelProto:
    """Return a model with native attention wherever its units can have it."""
    model = ir.from_proto(proto)
    for index, node in enumerate(model.graph):
        node.name = node.name or f"n{index}"
    add_types(model)  # onnx does not know the runtime's operators
    facts = replace(facts_of(model), attention=True, native=True)
    plan = choose_by(facts, model)
    options = possible_forms(facts, plan)
    chosen = [unit for unit in plan.units if Impl.DYNAMIC_NATIVE in options[unit.name] and unit.op == "attention"]
    shapes = {name: plain_shape(value) or () for name, value in inferred(model).items()}
    wrap_attentions(model, chosen, shapes, join=join)
    made = ir.to_proto(model)
    onnx.checker.check_model(made)
    return made


def calls(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the native operators of a model."""
    return [node for node in proto.graph.node if node.domain == NATIVE_DOMAIN]


BITS = np.random.default_rng(1).random((BATCH, 1, QUERIES, KEYS)) < 0.6
BITS[0, 0, 2], BITS[:, :, :2, 0], BITS[:, :, 3:, 0], BITS[1, :, 2, 0] = False, True, True, True
ADDED = np.random.default_rng(2).normal(size=(6, QUERIES, KEYS)).astype(np.float32)
MASKS: dict[str, tuple[str, Array | None]] = {
    "none": ("", None),
    "bool": ("bool[N,1,S,T]", BITS),
    "bool rows": ("bool[S,T]", BITS[1, 0]),
    "float": ("float[6,S,T]", ADDED),
    "float batch": ("float[N,1,S,T]", np.where(BITS | (np.arange(KEYS) < 2), 0, -1e9).astype(np.float32)),
}


@needs_library
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("kv", [6, 2])
@pytest.mark.parametrize("attributes", ["", "scale = 0.4", "is_causal = 1", "softcap = 0.5"])
def test_the_native_form_computes_the_operator(attributes: str, kv: int, axes: int, mask: str, tmp_path: Path) -> None:
    declared, values = MASKS[mask]
    proto, feed = model_of(attributes, kv=kv, axes=axes, mask=declared), feed_of(kv, axes, values)
    (before,) = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    added: Array = np.zeros(()) if values is None else values
    added = np.where(added, 0, -np.inf) if added.dtype == bool else added
    hidden = np.where(("causal" in attributes) & (np.arange(KEYS) > np.arange(QUERIES)[:, None]), -np.inf, 0)
    with np.errstate(invalid="ignore"):
        scale, cap = 0.4 if "scale" in attributes else 0.25, 0.5 if "softcap" in attributes else 0
        y, off = defined(*in_heads(feed, kv), added + hidden, scale, cap)
    for join in (False, True):
        made = wrapped(proto, join=join)
        assert [node.name for node in calls(made)] == ["op"]
        (without,) = ort.InferenceSession(made.SerializeToString()).run(None, feed)
        np.testing.assert_array_equal(without, before)  # the body is the operator
        onnx.save(made, tmp_path / "m.onnx")
        (native,) = open_session(tmp_path / "m.onnx").run(None, feed)
        assert native.shape == before.shape
        rows = native if axes == 4 else native.reshape(BATCH, QUERIES, 6, 8).transpose(0, 2, 1, 3)
        seen = ~np.isnan(y)
        np.testing.assert_array_less(np.abs(rows - y)[seen], off[seen])
        np.testing.assert_array_equal(rows[~seen], 0)  # of queries that see no key
        # 16 products with steps of 1/255 and 1/127 of about 5 values' spread, then shares and values of the same kind
        assert np.square(native - before).mean() < 1e-3 * np.square(before).mean()


MOVED = """ g (float[N,S,288] x) => (float[N,S,96] y) <int64[4] heads = {0, 0, 6, 16}, int64[3] whole = {0, 0, 96}> {
    a, b, c = Split <axis = -1, num_outputs = 3> (x)
    ar = Reshape(a, heads) br = Reshape(b, heads) cr = Reshape(c, heads)
    q = Transpose <perm = [0,2,1,3]> (ar) k = Transpose <perm = [0,2,1,3]> (br) v = Transpose <perm = [0,2,1,3]> (cr)
    o = Attention(q, k, v) [op] t = Transpose <perm = [0,2,1,3]> (o) y = Reshape(t, whole) }"""
PARTS = """ g (float[N,S,160] x) => (float[N,S,96] y) <int64[3] sizes = {96, 32, 32}> {
    q, k, v = Split <axis = -1> (x, sizes)
    [op] y = Attention <q_num_heads = 6, kv_num_heads = 2, is_causal = 1> (q, k, v) }"""


@needs_library
@pytest.mark.parametrize(("text", "left"), [(MOVED, ["Attention", "Reshape"]), (PARTS, ["Attention"])])
def test_heads_are_read_where_they_stand(text: str, left: list[str], tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(HEAD + text)
    made = wrapped(proto, join=True)
    assert [node.op_type for node in made.graph.node] == left
    (call,) = calls(made)
    assert [*call.input[:3]] == ["x", "x", "x"]
    x = np.random.default_rng(0).normal(size=(3, 5, 288 if text is MOVED else 160)).astype(np.float32)
    (before,) = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    (without,) = ort.InferenceSession(made.SerializeToString()).run(None, {"x": x})
    np.testing.assert_array_equal(without, before)
    onnx.save(made, tmp_path / "m.onnx")
    (native,) = open_session(tmp_path / "m.onnx").run(None, {"x": x})
    assert 0 < np.square(native - before).mean() < 1e-3 * np.square(before).mean()


@needs_library
@pytest.mark.parametrize("axes", [3, 4])
def test_factors_behind_a_pair_have_the_shapes_of_the_unit(axes: int, tmp_path: Path) -> None:
    """A unit reads q; where other units compute it in uint8, the operator reads ``q/dequantized``."""
    proto = model_of("", kv=2, axes=axes)
    model = ir.from_proto(proto)
    (op,) = model.graph
    found = [each for each in map(find_attention, model.graph) if each is not None]
    (unit,) = units(model.graph, [Compound.attention(each) for each in found])
    params = [ir.Value(name=name, const_value=ir.tensor(number)) for name, number in SCALES.items()]
    for value in params:
        model.graph.register_initializer(value)
    down = ir.node("QuantizeLinear", [model.graph.inputs[0], *params])
    up = ir.node("DequantizeLinear", [down.outputs[0], *params])
    down.outputs[0].name, up.outputs[0].name = "q8", "q/dequantized"
    model.graph.insert_before(op, [down, up])
    op.replace_input_with(0, up.outputs[0])
    feed = feed_of(2, axes, None)
    shapes = {str(value.name): plain_shape(value) or () for value in model.graph.inputs}
    assert wrap_attentions(model, [unit], shapes, join=False) == 1
    onnx.save(ir.to_proto(model), tmp_path / "m.onnx")
    (native,) = open_session(tmp_path / "m.onnx").run(None, feed)
    (before,) = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    assert np.square(native - before).mean() < 2e-3 * np.square(before).mean()  # q is rounded twice


SEEN = np.array([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, -1]], np.int32)
SCALES: dict[str, Array] = {"scale": np.asarray(0.04, np.float32), "zero": np.asarray(128, np.uint8)}
MULTI: dict[str, tuple[str, str, Feed, Array]] = {
    "plain": ("", "q, k, v", {}, np.zeros(())),
    "padding": (", int32[N,T] m", "q, k, v, , m", {"m": SEEN}, np.where(SEEN > 0, 0, -1e4)[:, None, None]),
    "filter": (", int32[N,T] m", "q, k, v, , m", {"m": SEEN}, np.where(SEEN > 0, 0, -2.0)[:, None, None]),
    "added": (", float[1,6,S,T] m", "q, k, v, , , m", {"m": ADDED[None]}, ADDED),
    "bias": ("", "q, k, v, b", {}, np.zeros(())),
    "bias and padding": (", int32[N,T] m", "q, k, v, b, m", {"m": SEEN}, np.where(SEEN > 0, 0, -1e4)[:, None, None]),
}


@needs_library
@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("scale", [0.25, 0.4])
def test_the_native_form_computes_multi_head_attention(name: str, scale: float, tmp_path: Path) -> None:
    declared, given, mask, added = MULTI[name]
    attributes = "num_heads = 6" + ", scale = 0.4" * (scale == 0.4) + ", mask_filter_value = -2.0" * (name == "filter")
    graph = f"g ({THREE.format(k=96, v=48)}{declared}) => (float[N,S,48] y)"
    text = f"{HEAD} {graph} {{ [op] y = com.microsoft.MultiHeadAttention <{attributes}> ({given}) }}"
    proto, feed = onnx.parser.parse_model(text), {**feed_of(6, 3, None), **mask}
    bias = np.random.default_rng(3).normal(size=240).astype(np.float32) if "bias" in name else np.zeros(240, np.float32)
    if "bias" in name:
        proto.graph.initializer.append(numpy_helper.from_array(bias, "b"))
    (before,) = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    sums = {n: feed[n] + part for n, part in zip("qkv", np.split(bias, [96, 192]), strict=True)}
    y, off = defined(*in_heads(sums, 6), added, scale)
    for join in (False, True):
        made = wrapped(proto, join=join)
        assert [node.name for node in calls(made)] == ["op"]
        (without,) = ort.InferenceSession(made.SerializeToString()).run(None, feed)
        np.testing.assert_allclose(without, before, rtol=0, atol=1e-6 * bool(bias.any()))
        onnx.save(made, tmp_path / "m.onnx")
        (native,) = open_session(tmp_path / "m.onnx").run(None, feed)
        rows = native.reshape(BATCH, QUERIES, 6, 8).transpose(0, 2, 1, 3)
        np.testing.assert_array_less(np.abs(rows - y), off)
        assert np.square(native - before).mean() < 1e-3 * np.square(before).mean()


LAYERS = {
    "Attention": (
        "float[N,2,S,8] q, float[N,2,S,8] k, float[N,2,S,8] v, bool[S,S] m",
        "[one] y = Attention(q, k, v, m) [two] z = Attention(y, k, v, m)",
        ["Where", "Attention", "Attention"],
    ),
    "MultiHeadAttention": (
        "float[N,S,16] q, float[N,S,16] k, float[N,S,16] v, int32[N,S] m",
        "[one] y = MULTI <num_heads = 2> (q, k, v, , m) [two] z = MULTI <num_heads = 2> (y, k, v, , m)",
        ["Greater", "Unsqueeze", "Where", "Attention", "Attention"],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_one_mask_of_two_layers_is_converted_once(name: str) -> None:
    tensors, nodes, kinds = LAYERS[name]
    nodes = nodes.replace("MULTI", "com.microsoft.MultiHeadAttention")
    z = tensors.partition(" q")[0]
    made = wrapped(onnx.parser.parse_model(f"{HEAD} g ({tensors}) => ({z} z) {{ {nodes} }}"), join=True)
    assert [node.op_type for node in made.graph.node] == kinds
    assert len({node.input[3] for node in calls(made)}) == len(made.functions) == 1


def suite() -> dict[str, Any]:
    """Return the cases of onnx's suite for the operator that the runtime computes, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite divides by 0
        with pytest.MonkeyPatch.context() as patch:  # the cases of all operators take ten seconds
            patch.setattr(cases, "import_recursive", lambda package: import_module(f"{package.__name__}.attention"))
            found = cases.collect_testcases("Attention")
    return {
        case.name: case for case in found if "_expanded" not in case.name and case.name.startswith("test_attention")
    }


@pytest.mark.slow
@needs_library
def test_every_case_of_the_suite_is_right_or_stays_with_a_reason(tmp_path: Path) -> None:
    """Values are from 0 to 1: 1/255 of that for q and each share, 1/127 for k and v, and as much again for the scores."""
    native, left = 0, set[str]()
    for name, case in suite().items():
        ((inputs, outputs),) = case.data_sets
        feed = {each.name: array for each, array in zip(case.model.graph.input, inputs, strict=True)}
        made = wrapped(case.model, join=True)
        if not calls(made):
            model = ir.from_proto(case.model)
            facts = replace(facts_of(model), attention=True, native=True)
            left |= {choice.reason.code for choice in choose_by(facts, model).choices.values()}
            continue
        onnx.save(made, tmp_path / "m.onnx")
        for found, output in zip(open_session(tmp_path / "m.onnx").run(None, feed), outputs, strict=True):
            np.testing.assert_allclose(found, output, rtol=0, atol=0.03, err_msg=name)
        native += 1
    assert native >= 40
    assert left == {"attention-form", "slow-softmax"}  # the latter for tensors in half precision


MULTI_HEAD = "y = com.microsoft.MultiHeadAttention <num_heads = 2> "
LEFT = [
    ("softcap below 0", "y = Attention <softcap = -2.0> (q, k, v)"),
    ("left_window_size", "y = Attention <is_causal = 1, left_window_size = 2> (q, k, v)"),
    ("softmax in half precision", "y = Attention <softmax_precision = 10> (q, k, v)"),
    ("scale that is not above 0", "y = Attention <scale = -1.0> (q, k, v)"),
    ("factors that are constant or equal", "y = Attention(q, k, k)"),
    ("keys or values alone of earlier runs", "y, pk, pv = Attention(q, k, v, , k)"),
    ("caches that nothing reads", "y = Attention(q, k, v, , k, v)"),
    ("lengths of items", "y, pk, pv = Attention(q, k, v, , k, v, m)"),
    ("results beside the first", "y, , , s = Attention(q, k, v) z = Relu(s)"),
    ("keys or values alone of earlier runs", f"{MULTI_HEAD} (q, k, v, , , , k)".replace("y =", "y, pk, pv =")),
    ("caches that nothing reads", f"{MULTI_HEAD} (q, k, v, , , , k, v)"),
    ("caches in one memory", f"{MULTI_HEAD} (q, k, v, , , , k, v, m)".replace("y =", "y, pk, pv =")),
    ("results beside the first", f"{MULTI_HEAD} (q, k, v) z = Relu(s)".replace("y =", "y, , , s =")),
    ("order of keys", f"{MULTI_HEAD} (q, k, v)".replace("= 2", "= 2, unidirectional = 1")),
    ("second mask", f"{MULTI_HEAD} (q, k, v, , m, a)"),
    ("second mask", f"{MULTI_HEAD} (q, k, v, , m, , k, v)".replace("y =", "y, pk, pv =")),
    ("bias that is computed", f"{MULTI_HEAD} (q, k, v, a)"),
    ("factors that are constant or equal", f"{MULTI_HEAD} (q)"),
]


@pytest.mark.parametrize(("reason", "node"), LEFT)
def test_other_forms_of_the_operators_stay_with_a_reason(reason: str, node: str) -> None:
    tensors = "float[N,2,S,8] q, float[N,2,T,8] k, float[N,2,T,8] v, int32[N,T] m, float a"
    model = ir.from_proto(onnx.parser.parse_model(f"{HEAD} g ({tensors}) => (float[N,2,S,8] y) {{ {node} }}"))
    for index, each in enumerate(model.graph):
        each.name = f"n{index}"
    plan = choose_by(replace(facts_of(model), attention=True, native=True), model)
    (unit,) = (unit for unit in plan.units if unit.op.endswith("Attention"))
    assert plan.choices[unit.name].reason.text == f"native attention has no {reason}"
    without = choose_by(facts_of(model), model).choices["n0"]
    assert without.impl is Impl.FLOAT
    assert without.reason.code in ("no-kernel", "foreign-domain")


KEYS_AND_VALUES = "float[N,2,T,8] k, float[N,2,T,8] v"
WITH_CACHE = "y, keys, values = Attention(q, k, v, , pk, pv)"
IN_ORDER = WITH_CACHE.replace("Attention", "Attention<is_causal = 1>")


@pytest.mark.parametrize(
    ("tensors", "node"),
    [
        ("double[N,2,S,8] q, double[N,2,T,8] k, double[N,2,T,8] v", "y = Attention(q, k, v)"),
        ("float[N,S,W] q, float[N,T,W] k, float[N,T,W] v", "y = Attention<q_num_heads=2, kv_num_heads=2>(q, k, v)"),
        ("float[N,2,S,8] q, float[N,2,T,8] k, float[N,2,T,8] v", "y = Attention<q_num_heads=2>(q, k, v)"),
        ("float[N,S,16] q, float[N,T,16] k, float[N,T,16] v", "y = Attention<q_num_heads=2>(q, k, v)"),
        ("float q, float k, float v", "y = Attention(q, k, v)"),
        # q with 3 heads, k with 2; a cache of doubles
        (f"float[N,3,S,8] q, {KEYS_AND_VALUES}, float[N,2,P,8] pk, float[N,2,P,8] pv", WITH_CACHE),
        (f"float[N,2,S,8] q, {KEYS_AND_VALUES}, double[N,2,P,8] pk, double[N,2,P,8] pv", WITH_CACHE),
        (
            f"float[N,2,S,8] q, {KEYS_AND_VALUES}, float[N,2,P,8] pk, float[N,2,P,8] pv".replace(",2,", ",H,"),
            WITH_CACHE,
        ),
        # in order, but with other numbers of queries and of new keys
        (f"float[N,2,S,8] q, {KEYS_AND_VALUES}, float[N,2,P,8] pk, float[N,2,P,8] pv", IN_ORDER),
        (f"float[N,2,1,8] q, {KEYS_AND_VALUES}, float[N,2,P,8] pk, float[N,2,P,8] pv".replace(",T,", ",5,"), IN_ORDER),
        # lengths in place of a number for each key
        ("float[N,S,16] q, float[N,T,16] k, float[N,T,16] v, int32[N] m", f"{MULTI_HEAD} (q, k, v, , m)"),
    ],
)
def test_attention_of_unknown_sizes_is_no_native_operator(tensors: str, node: str) -> None:
    kind = tensors.partition("[")[0] if "[" in tensors else "float"
    model = ir.from_proto(onnx.parser.parse_model(f"{HEAD} g ({tensors}) => ({kind} y) {{ [op] {node} }}"))
    facts = replace(facts_of(model), attention=True, native=True)
    plan = choose_by(facts, model)
    assert possible_forms(facts, plan)["op"] == (Impl.FLOAT,)


def test_a_decoder_whose_lengths_lost_their_names_keeps_its_native_operator() -> None:
    """onnx gives a length behind a Reshape a name of its own, another one for queries than for keys."""
    text = f"""{HEAD} g (float[N,S,16] a, float[N,S,16] b, float[N,S,16] c, float[N,2,P,8] pk, float[N,2,P,8] pv) => (float[N,2,S,8] y)
        <int64[4] heads = {{0, -1, 2, 8}}> {{ e = Reshape(a, heads) f = Reshape(b, heads) g = Reshape(c, heads)
        q = Transpose<perm=[0,2,1,3]>(e) k = Transpose<perm=[0,2,1,3]>(f) v = Transpose<perm=[0,2,1,3]>(g) [op] {IN_ORDER} }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    for index, node in enumerate(model.graph):
        node.name = node.name or f"n{index}"
    facts = replace(facts_of(model), attention=True, native=True)
    assert Impl.DYNAMIC_NATIVE in possible_forms(facts, choose_by(facts, model))["op"]


@pytest.mark.parametrize("axes", [3, 4])
def test_products_of_the_operator_are_counted(axes: int) -> None:
    proto = model_of("", kv=2, axes=axes)
    node, feed = ir.from_proto(proto).graph[0], feed_of(2, axes, None)
    shapes = [feed[name].shape for name in "qkv"]
    y = (BATCH, 6, QUERIES, 8) if axes == 4 else (BATCH, QUERIES, 48)
    products = BATCH * 6 * QUERIES * KEYS * (16 + 8)
    assert multiply_accumulates("Attention", node, shapes, [y]) == products
    assert multiply_accumulates("MultiHeadAttention", node, shapes, [y]) == products


def test_an_excluded_operator_stays_float() -> None:
    model = ir.from_proto(model_of("", kv=6, axes=4))
    asked = Selection(exclude_ops=frozenset({"Attention"}))
    facts = replace(facts_of(model, asked), attention=True, native=True)
    plan = choose_by(facts, model)
    assert possible_forms(facts, plan)["op"] == (Impl.FLOAT,)


BLOCK = """ g (float[N,24,64] x, bool[N,1,24,24] m) => (float[N,24,64] y) <int64[4] heads = {0, 0, 4, 16}, int64[3] whole = {0, 0, 64}> {
    a = MatMul(x, wq) b = MatMul(x, wk) c = MatMul(x, wv)
    ar = Reshape(a, heads) br = Reshape(b, heads) cr = Reshape(c, heads)
    q = Transpose <perm = [0,2,1,3]> (ar) k = Transpose <perm = [0,2,1,3]> (br) v = Transpose <perm = [0,2,1,3]> (cr)
    [core] o = Attention(q, k, v, m) [attend] t = Transpose <perm = [0,2,1,3]> (o) z = Reshape(t, whole) y = MatMul(z, wo) }"""


@needs_library
def test_a_model_with_the_operator_is_quantized(tmp_path: Path) -> None:
    random, proto = np.random.default_rng(0), onnx.parser.parse_model(HEAD + BLOCK)
    for name in ("wq", "wk", "wv", "wo"):
        weights = random.normal(0, 0.2, (64, 64)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weights, name))
    onnx.save(proto, tmp_path / "m.onnx")
    x, seen = random.normal(size=(20, 24, 64)).astype(np.float32), random.random((20, 1, 24, 24)) < 0.8
    np.savez(tmp_path / "d.npz", x=x, m=seen)
    asked: dict[str, Any] = {"seconds": 0.05, "force_int8": True, "effort": "low"}
    data = tmp_path / "d.npz"
    quantize_model(tmp_path / "m.onnx", data, tmp_path / "q.onnx", Options(kernels="native", **asked))
    plan = json.loads((tmp_path / "q.plan.json").read_text())
    attend = plan["units"]["attend"]
    assert (attend["operator"], attend["implementation"]) == ("attention", "dynamic native")
    for unit in plan["units"].values():
        wanted = {"MatMul": Impl.DYNAMIC_NATIVE, "attention": Impl.DYNAMIC_NATIVE}
        unit["implementation"] = wanted.get(unit["operator"], Impl.FLOAT).value
    (tmp_path / "mine.json").write_text(json.dumps(plan))
    chosen = Options(plan=tmp_path / "mine.json", **asked)
    made = quantize_model(tmp_path / "m.onnx", data, tmp_path / "p.onnx", chosen)
    assert made.forms["dynamic native"] == 5
    kinds = [node.op_type for node in onnx.load(tmp_path / "p.onnx").graph.node]
    assert kinds == ["MatMul", "Where", "Attention", "Reshape", "MatMul"]  # three products of the same rows are one
    quantize_model(tmp_path / "m.onnx", data, tmp_path / "s.onnx", Options(kernels="stock", **asked))
    assert [node.op_type for node in onnx.load(tmp_path / "s.onnx").graph.node].count("Attention") == 1

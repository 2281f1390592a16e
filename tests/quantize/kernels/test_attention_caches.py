"""Operators that are attention with a cache of keys and values: the native form and its body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from requant.calibration.model.session import Array, open_session
from requant.quantize import Options, quantize_model
from requant.transforms import REGISTRY

from ...native import needs_library
from .test_attention_operators import HEAD, Feed, calls, wrapped
from .test_attentions import FEW, defined, in_float

BATCH, HEADS, DEPTH = 2, 6, 16
STANDARD = "y, keys, values = Attention <GIVEN> (q, k, v, MASK, pk, pv)"
MULTI_HEAD = "y, keys, values = com.microsoft.MultiHeadAttention <GIVEN> (q, k, v, BIAS, , MASK, pk, pv)"
BIAS = np.linspace(-1, 1, HEADS * 3 * DEPTH, dtype=np.float32)


def model_of(node: str, feed: Feed, kv: int, **given: str) -> onnx.ModelProto:
    """Return a model of one operator with the inputs of `feed`; `given` replaces words of the node."""
    four, width = feed["q"].ndim == 4, feed["pv"].shape[-1]
    shapes = {
        "q": f"N,{HEADS},S,{DEPTH}" if four else f"N,S,{HEADS * DEPTH}",
        "k": f"N,{kv},?,{DEPTH}"
        if four
        else f"N,?,{kv * DEPTH}",  # with a name it would be no native operator in order
        "v": f"N,{kv},?,{width}" if four else f"N,?,{kv * width}",
        "pk": f"N,{kv},P,{DEPTH}",
        "pv": f"N,{kv},P,{width}",
        "m": ",".join(map(str, feed["m"].shape)) if "m" in feed else "",
    }
    kinds = {name: "bool" if array.dtype == bool else "float" for name, array in feed.items()}
    inputs = ", ".join(f"{kinds[name]}[{shapes[name]}] {name}" for name in feed)
    y = f"float[N,{HEADS},S,{width}] y" if four else f"float[N,S,{HEADS * width}] y"
    results = f"{y}, float[N,{kv},T,{DEPTH}] keys, float[N,{kv},T,{width}] values"
    for word, text in given.items():
        node = node.replace(word, text)
    proto = onnx.parser.parse_model(f"{HEAD} g ({inputs}) => ({results}) {{ [op] {node.replace('<>', '')} }}")
    if "bias" in node:
        proto.graph.initializer.append(onnx.numpy_helper.from_array(BIAS, "bias"))
    return proto


def feed_of(kv: int, *, queries: int, fresh: int, past: int, four: bool, width: int = DEPTH) -> Feed:
    """Return q, k, v and the keys and values of earlier runs."""
    random = np.random.default_rng(kv + queries + past)
    sizes = {"q": (HEADS, queries, DEPTH), "k": (kv, fresh, DEPTH), "v": (kv, fresh, width)}
    heads = {name: random.normal(0.1, 1, (BATCH, *size)).astype(np.float32) for name, size in sizes.items()}
    rows = {name: each.transpose(0, 2, 1, 3).reshape(BATCH, each.shape[2], -1) for name, each in heads.items()}
    cache = {"pk": (kv, past, DEPTH), "pv": (kv, past, width)}
    return (heads if four else rows) | {
        name: random.normal(0.1, 1, (BATCH, *size)).astype(np.float32) for name, size in cache.items()
    }


def in_heads(rows: Array, count: int) -> Array:
    """Return rows as (batch, heads, rows, columns)."""
    return rows if rows.ndim == 4 else rows.reshape(*rows.shape[:2], count, -1).transpose(0, 2, 1, 3)


def check(proto: onnx.ModelProto, feed: Feed, added: Array, path: Path, *, body: float = 0) -> None:
    """Check a model against the runtime's operator and the definition; `added`: its mask, and the hidden keys.

    Args:
        proto: The model.
        feed: Its inputs, with a bias in q, k and v.
        added: What is added to the scores.
        path: Where the model is written.
        body: By how much the body differs at most from the operator.
    """
    made = wrapped(proto, join=True)
    assert [node.op_type for node in calls(made)] == ["CachedAttention"]
    given = {each.name: feed[each.name] for each in proto.graph.input}
    before = ort.InferenceSession(proto.SerializeToString()).run(None, given)
    for one, other in zip(before, ort.InferenceSession(made.SerializeToString()).run(None, given), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=body)
    onnx.save(made, path)
    y, keys, values = open_session(path).run(None, given)
    np.testing.assert_allclose(keys, before[1], rtol=0, atol=body)
    np.testing.assert_allclose(values, before[2], rtol=0, atol=body)
    q = in_heads(feed["q"] + (BIAS[: feed["q"].shape[-1]] if body else 0), HEADS)
    k, v = (each.repeat(HEADS // each.shape[1], 1) for each in (keys, values))
    mask = np.broadcast_to(added, (BATCH, HEADS, q.shape[2], k.shape[2]))
    expected, off = (in_float if q.shape[2] <= FEW else defined)(q, k, v, mask, DEPTH**-0.5)
    np.testing.assert_array_less(np.abs(in_heads(y, HEADS) - expected), off + 1e-5)
    assert np.square(y - before[0]).mean() < 2e-3 * np.square(before[0]).mean()


def behind(queries: int, past: int, total: int, *, causal: bool) -> Array:
    """Return -infinity where the order of the keys hides one from a query, else 0."""
    seen = np.arange(total) <= np.arange(queries)[:, None] + past
    return np.where(seen | (not causal), 0, -np.inf)


@needs_library
@pytest.mark.parametrize("mask", ["", "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("four", [False, True])
@pytest.mark.parametrize(("queries", "fresh", "past", "kv"), [(1, 1, 9, 2), (5, 5, 9, 6), (5, 5, 0, 2), (7, 3, 6, 2)])
def test_the_standard_operator_with_a_cache(
    queries: int, fresh: int, past: int, kv: int, four: bool, causal: bool, mask: str, tmp_path: Path
) -> None:
    feed = feed_of(kv, queries=queries, fresh=fresh, past=past, four=four, width=8)
    random, total = np.random.default_rng(7), past + fresh
    masks: dict[str, Array] = {
        "bool": (random.random((BATCH, 1, queries, total)) < 0.6) | (np.arange(total) == 0),
        "float": random.normal(size=(HEADS, queries, total)).astype(np.float32),
    }
    feed |= {"m": masks[mask]} if mask else {}
    heads = "" if four else f"q_num_heads = {HEADS}, kv_num_heads = {kv}"
    given = ", ".join(filter(None, [f"is_causal = {int(causal)}", heads]))
    proto = model_of(STANDARD, feed, kv, GIVEN=given, MASK="m" if mask else "")
    added = np.where(feed["m"], 0, -np.inf) if mask == "bool" else feed.get("m", np.zeros(()))
    check(proto, feed, added + behind(queries, past, total, causal=causal), tmp_path / "m.onnx")


@needs_library
@pytest.mark.parametrize("kv", [2, HEADS])
def test_a_single_query_in_order_sees_the_first_new_key_alone(kv: int, tmp_path: Path) -> None:
    """Also where heads share keys. The runtime hides no key from a single query, so it is not compared."""
    feed = feed_of(kv, queries=1, fresh=5, past=9, four=True)
    made = wrapped(model_of(STANDARD, feed, kv, GIVEN="is_causal = 1", MASK=""), join=True)
    onnx.save(made, tmp_path / "m.onnx")
    y, keys, values = open_session(tmp_path / "m.onnx").run(None, feed)
    k, v = (each.repeat(HEADS // kv, 1) for each in (keys, values))
    expected, off = in_float(feed["q"], k, v, behind(1, 9, 14, causal=True), DEPTH**-0.5)
    np.testing.assert_array_less(np.abs(y - expected), off + 1e-5)


@needs_library
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("queries", "past"), [(1, 9), (6, 9)])
def test_the_runtimes_operator_with_a_cache(
    queries: int, past: int, mask: bool, causal: bool, bias: bool, tmp_path: Path
) -> None:
    feed = feed_of(HEADS, queries=queries, fresh=queries, past=past, four=False)
    if mask:
        shape = (BATCH, HEADS, queries, past + queries)
        feed["m"] = np.random.default_rng(7).normal(size=shape).astype(np.float32)
    words = {"GIVEN": f"num_heads = {HEADS}, unidirectional = {int(causal)}", "MASK": "m" if mask else ""}
    proto = model_of(MULTI_HEAD, feed, HEADS, BIAS="bias" if bias else "", **words)
    added = feed.get("m", np.zeros(())) + behind(queries, past, past + queries, causal=causal)
    # a bias is added in front of the operator and not in it
    check(proto, feed, added, tmp_path / "m.onnx", body=1e-6 if bias else 0)


DECODER = f"""{HEAD} g (float[1,S,64] x, float[1,4,P,16] pk, float[1,4,P,16] pv) => (float[1,S,64] y, float[1,4,T,16] k2, float[1,4,T,16] v2) {{
    a = MatMul(x, wq) b = MatMul(x, wk) c = MatMul(x, wv)
    [attend] o, k2, v2 = Attention <is_causal = 1, q_num_heads = 4, kv_num_heads = 4> (a, b, c, , pk, pv)
    [last] y = MatMul(o, wo) }}"""


@needs_library
def test_a_decoder_of_the_standard_operator_continues_from_its_own_cache(tmp_path: Path) -> None:
    """Steps of one row behind others give what all rows at once give: keys and values go out and come in again."""
    random, proto = np.random.default_rng(0), onnx.parser.parse_model(DECODER)
    for name in ("wq", "wk", "wv", "wo"):
        weights = random.normal(0, 0.2, (64, 64)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    onnx.save(proto, tmp_path / "m.onnx")
    empty = {name: np.zeros((1, 4, 0, 16), np.float32) for name in ("pk", "pv")}
    feed: Feed = {"x": random.normal(size=(1, 24, 64)).astype(np.float32), **empty}
    asked: dict[str, Any] = {"seconds": 0.05, "force_int8": True, "effort": "low", "force": True}
    quantize_model(tmp_path / "m.onnx", [feed], tmp_path / "q.onnx", Options(kernels="native", **asked))
    plan = json.loads((tmp_path / "q.plan.json").read_text())
    for unit in plan["units"].values():
        unit["implementation"] = "dynamic native"
    (tmp_path / "mine.json").write_text(json.dumps(plan))
    quantize_model(tmp_path / "m.onnx", [feed], tmp_path / "q.onnx", Options(plan=tmp_path / "mine.json", **asked))
    kinds = [node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node]
    assert [kinds.count(kind) for kind in ("CachedAttention", "Attention")] == [1, 0]
    session, before = open_session(tmp_path / "q.onnx"), open_session(tmp_path / "m.onnx").run(None, feed)[0]
    whole = session.run(None, feed)[0]
    assert np.square(whole - before).mean() < 1e-3 * np.square(before).mean()  # 30 dB
    rows, cache = [], empty
    for place in range(24):
        y, keys, values = session.run(None, {"x": feed["x"][:, place : place + 1], **cache})
        rows.append(y)
        cache = {"pk": keys, "pv": values}
    # a step computes attention in float, all rows together in integers
    assert np.square(np.concatenate(rows, 1) - whole).mean() < 1e-3 * np.square(before).mean()


@needs_library
@pytest.mark.parametrize("node", [STANDARD, MULTI_HEAD], ids=["Attention", "MultiHeadAttention"])
@pytest.mark.parametrize("queries", [1, 7])
def test_caches_of_the_operators_may_be_bytes(node: str, queries: int, tmp_path: Path) -> None:
    feed = feed_of(HEADS, queries=queries, fresh=queries, past=9, four=False)
    heads = f"q_num_heads = {HEADS}, kv_num_heads = {HEADS}" if node == STANDARD else f"num_heads = {HEADS}"
    proto = model_of(node, feed, HEADS, GIVEN=heads, MASK="", BIAS="")
    rounded = ir.from_proto(proto)
    assert REGISTRY["quantize_caches"](rounded).applied == 2
    made = wrapped(ir.to_proto(rounded), join=True)
    assert [call.op_type for call in calls(made)] == ["QuantizedCacheAttention"]
    onnx.save(made, tmp_path / "m.onnx")
    scales = {f"{name}_scale": np.abs(feed[name]).max(-1, keepdims=True) / 127 for name in ("pk", "pv")}
    stored = {name: np.rint(feed[name] / scales[f"{name}_scale"]) for name in ("pk", "pv")}
    given = feed | scales | {name: (rows + 128).astype(np.uint8) for name, rows in stored.items()}
    floats = feed | {name: rows * scales[f"{name}_scale"] for name, rows in stored.items()}
    before = ort.InferenceSession(proto.SerializeToString()).run(None, floats)
    session = open_session(tmp_path / "m.onnx")
    found = dict(zip((each.name for each in session.get_outputs()), session.run(None, given), strict=True))
    for name, whole in zip(("keys", "values"), before[1:], strict=True):
        steps = found[f"{name}_scale"]
        # half a step of the row, and rounding of the step
        assert (np.abs(steps * (found[name].astype(np.float32) - 128) - whole) <= steps * (0.5 + 1e-4)).all()
    assert np.square(found["y"] - before[0]).mean() < 2e-3 * np.square(before[0]).mean()

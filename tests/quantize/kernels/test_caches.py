"""Attention over a cache: the native operator against its definition and the runtime's operator, and the plan."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.calibration.model.session import Array, open_session, open_without_library
from requant.quantize import Options, quantize_model
from requant.quantize.kernels.caches import wrap_caches
from requant.transforms import REGISTRY
from requant.transforms.int8.units import units
from requant.transforms.patterns.cached_attention import find_cached

from ...native import needs_library
from .test_attentions import FEW, defined, in_float

SAMPLES = Path(__file__).parents[3] / "sample_models"
sys.path.insert(0, str(SAMPLES))
graph_builder, language = (importlib.import_module(name) for name in ("graph_builder", "language"))
sys.path.remove(str(SAMPLES))

Feed = dict[str, Array]
HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
PLACES = 64
"""The places that have cosines."""


def model_of(inputs: str, given: str, attributes: str) -> onnx.ModelProto:
    """Return a model of one GroupQueryAttention; its inputs are declared in `inputs` and named in `given`."""
    return onnx.parser.parse_model(
        f"{HEAD} g ({inputs}) => (float[B,S,W] y, float[B,K,T,D] keys, float[B,K,T,D] values)"
        f"{{ [op] y, keys, values = com.microsoft.GroupQueryAttention<{attributes}>({given}) }}"
    )


TENSORS = {
    "q": "float[B,S,W]",
    "k": "float[B,S,V]",
    "v": "float[B,S,V]",
    "past_k": "float[B,K,P,D]",
    "past_v": "float[B,K,P,D]",
    "lengths": "int32[B]",
    "total": "int32",
    "cos": "float[M,H]",
    "sin": "float[M,H]",
    "places": "int64[B,S]",
    "bias": "float[O,N,S,T]",
    "sinks": "float[Z]",
}
"""The inputs of the operator, in order."""


def declared(feed: Feed) -> tuple[str, str]:
    """Return the declarations of the tensors of a feed, and the inputs of the operator."""
    inputs = ", ".join(f"{TENSORS[name]} {name}" for name in feed)
    last = max(index for index, name in enumerate(TENSORS) if name in feed)
    return inputs, ", ".join(name if name in feed else "" for name in [*TENSORS][: last + 1])


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Feed]:
    """Draw attributes and inputs: a prompt, one token of several items, or some tokens behind others.

    The runtime's operator takes heads of multiples of 16, and multiples of 8 angles. Its cache has room for the new
    rows, or for none of them.
    """
    shared, group, half = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 24]))
    heads, depth = shared * group, 2 * half
    kind = draw(st.sampled_from(["prompt", "token", "behind"]))
    batch = 1 if kind == "behind" else draw(st.integers(1, 2))
    rows = 1 if kind == "token" else draw(st.integers(2, 12))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    before = np.zeros(batch, int) if kind == "prompt" else random.integers(0 if kind == "token" else 1, 20, batch)
    feed = {
        "q": random.normal(0.1, 1, (batch, rows, heads * depth)),
        "k": random.normal(0.1, 1, (batch, rows, shared * depth)),
        "v": random.normal(0.1, 1, (batch, rows, shared * depth)),
    }
    if draw(st.booleans()):  # all in one tensor
        feed = {"q": np.concatenate([*feed.values()], -1)}
    room = before.max() + draw(st.sampled_from([0, rows, rows + 25]))  # the cache grows, or has room
    if kind != "prompt" or draw(st.booleans()):
        feed |= {name: random.normal(0.1, 1, (batch, shared, room, depth)) for name in ("past_k", "past_v")}
    total = before.max() + rows
    integers = {"lengths": (before + rows - 1).astype(np.int32), "total": np.asarray(total, np.int32)}
    attributes = [f"num_heads = {heads}", f"kv_num_heads = {shared}"]
    if draw(st.booleans()):
        angles = random.normal(0, 2, (PLACES, draw(st.sampled_from([8, half]))))
        feed |= {"cos": np.cos(angles), "sin": np.sin(angles)}
        attributes += ["do_rotary = 1", f"rotary_interleaved = {draw(st.integers(0, 1))}"]
    if draw(st.booleans()):
        attributes.append("scale = 0.4")
    if draw(st.booleans()):
        ones = draw(st.sampled_from([(1, 1), (batch, 1), (1, heads), (batch, heads)]))
        feed["bias"] = random.normal(size=(*ones, rows, total))
    if draw(st.booleans()):
        attributes.append(f"local_window_size = {draw(st.integers(1, 30))}")
    if draw(st.booleans()):
        attributes.append("softcap = 1.5")
    sink = draw(st.sampled_from(["", "smooth_softmax = 1", "sinks"]))
    if sink == "sinks":
        feed[sink] = random.normal(size=heads)
    elif sink:
        attributes.append(sink)
    floats = {name: value.astype(np.float32) for name, value in feed.items()}
    whole = {**floats, **integers}
    return ", ".join(attributes), {name: whole[name] for name in TENSORS if name in whole}


def wrapped(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the native operator."""
    model = ir.from_proto(proto)
    assert wrap_caches(model, units(model.graph)) == 1
    made = ir.to_proto(model)
    onnx.checker.check_model(made)
    return made


def turned(x: Array, feed: Feed, before: Array, *, interleaved: bool) -> Array:
    """Return rows (batch, heads, rows, depth) rotated by their places."""
    if "cos" not in feed:
        return x
    y, count = x.astype(np.float64), feed["cos"].shape[1]
    step, apart = (2, 1) if interleaved else (1, count)
    one, other = (np.s_[first : first + step * count : step] for first in (0, apart))
    places = before[:, None] + np.arange(x.shape[2])
    cos, sin = (feed[name][places][:, None].astype(np.float64) for name in ("cos", "sin"))
    a, b = y[..., one].copy(), y[..., other].copy()
    y[..., one], y[..., other] = a * cos - b * sin, a * sin + b * cos
    return y.astype(np.float32)


@needs_library
@given(case=cases())
def test_the_operator_computes_what_it_is_defined_to(
    case: tuple[str, Feed], tmp_path_factory: pytest.TempPathFactory
) -> None:
    attributes, feed = case
    proto = model_of(*declared(feed), attributes)
    made = wrapped(proto)
    path = tmp_path_factory.mktemp("cache") / "m.onnx"
    onnx.save(made, path)
    before = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    for one, other in zip(before, ort.InferenceSession(made.SerializeToString()).run(None, feed), strict=True):
        np.testing.assert_array_equal(one, other)  # the body is the operator
    y, keys, values = open_session(path).run(None, feed)
    # a rotation is two products and their sum, which may be rounded in another order
    np.testing.assert_allclose(keys, before[1], rtol=0, atol=2**-22 * np.abs(before[1]).max(initial=0))
    np.testing.assert_array_equal(values, before[2])

    batch, shared, _, depth = keys.shape
    rows, heads = y.shape[1], y.shape[2] // depth
    q = feed["q"][..., : heads * depth].reshape(batch, rows, heads, depth).transpose(0, 2, 1, 3)
    seen = feed["lengths"] + 1 - rows
    q = turned(q, feed, seen, interleaved="rotary_interleaved = 1" in attributes)
    (node,) = ir.from_proto(proto).graph
    window, cap = node.attributes.get_int("local_window_size", 10**6), node.attributes.get_float("softcap", 0)
    smooth = np.asarray(0.0 if "smooth" in attributes else -np.inf)
    sink = feed["sinks"][:, None, None] if "sinks" in feed else smooth
    for item, past in enumerate(seen):
        total, hidden = past + rows, max(past + 1 - window, 0)
        k, v = (each[item : item + 1, :, hidden:total].repeat(heads // shared, 1) for each in (keys, values))
        bias = np.broadcast_to(feed.get("bias", np.zeros((1, 1, 1, total)))[..., :total], (batch, heads, rows, total))
        behind = past + np.arange(rows)[:, None] - np.arange(total)  # how far a key is behind the query's own
        mask = (bias[item : item + 1] + np.where((behind < 0) | (behind >= window), -np.inf, 0))[..., hidden:]
        scale = 0.4 if "scale" in attributes else depth**-0.5
        computed = in_float if rows <= FEW else defined
        expected, off = computed(q[item : item + 1], k, v, mask, scale, cap, sink)
        made_rows = y[item].reshape(rows, heads, depth).transpose(1, 0, 2)
        np.testing.assert_array_less(np.abs(made_rows - expected[0]), off[0] + 1e-5)
    # q, k and v have steps of 1/255 and 1/127 of their rows' spread, as in the test of Attention
    assert np.square(y - before[0]).mean() < 2e-3 * np.square(before[0]).mean()


@needs_library
@pytest.mark.parametrize(("rows", "window"), [(600, 300), (700, 20)])
def test_queries_with_a_window_leave_out_the_keys_that_they_do_not_see(rows: int, window: int, tmp_path: Path) -> None:
    """So many queries are computed in parts."""
    random = np.random.default_rng(0)
    feed: Feed = {name: random.normal(size=(1, rows, 32)).astype(np.float32) for name in ("q", "k", "v")}
    feed |= {name: random.normal(size=(1, 2, 40, 16)).astype(np.float32) for name in ("past_k", "past_v")}
    feed |= {"lengths": np.array([39 + rows], np.int32), "total": np.asarray(40 + rows, np.int32)}
    feed["bias"] = random.normal(size=(1, 2, rows, 40 + rows)).astype(np.float32)
    attributes = f"num_heads = 2, kv_num_heads = 2, local_window_size = {window}"
    proto = model_of(*declared(feed), attributes)
    onnx.save(wrapped(proto), tmp_path / "m.onnx")
    (y, *_) = open_session(tmp_path / "m.onnx").run(None, feed)
    (expected, *_) = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    assert np.square(y - expected).mean() < 5e-4 * np.square(expected).mean()


@needs_library
def test_past_and_result_may_be_the_same_memory(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    feed: Feed = {name: random.normal(size=(1, 1, 32)).astype(np.float32) for name in ("q", "k", "v")}
    feed |= {name: random.normal(size=(1, 2, 24, 16)).astype(np.float32) for name in ("past_k", "past_v")}
    feed |= {"lengths": np.array([9], np.int32), "total": np.asarray(10, np.int32)}
    made = wrapped(model_of(*declared(feed), "num_heads = 2, kv_num_heads = 2"))
    onnx.save(made, tmp_path / "m.onnx")
    session = open_session(tmp_path / "m.onnx")
    y, keys, values = session.run(None, feed)
    caches = [ort.OrtValue.ortvalue_from_numpy(feed[name]) for name in ("past_k", "past_v")]
    binding = session.io_binding()
    for name, value in feed.items():
        if not name.startswith("past"):
            binding.bind_cpu_input(name, value)
    for past, result, cache in zip(("past_k", "past_v"), ("keys", "values"), caches, strict=True):
        binding.bind_ortvalue_input(past, cache)
        binding.bind_ortvalue_output(result, cache)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs()[-1].numpy(), y)
    for cache, apart, name in zip(caches, (keys, values), ("past_k", "past_v"), strict=True):
        np.testing.assert_array_equal(cache.numpy()[:, :, :10], apart[:, :, :10])
        np.testing.assert_array_equal(cache.numpy()[:, :, 10:], feed[name][:, :, 10:])  # apart it is 0
        assert not apart[:, :, 10:].any()


@needs_library
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": np.array([30], np.int32)}, "lengths must fit to the past"),
        ({"lengths": np.array([-1], np.int32)}, "lengths must fit to the past"),
        ({"lengths": np.array([9, 9], np.int32)}, "a number for each item"),
        ({"total": np.array([10, 10], np.int32)}, "total must be one number"),
        ({"past_v": np.zeros((1, 2, 23, 16), np.float32)}, "past v must fit to v"),
        ({"cos": np.zeros((9, 8), np.float32), "sin": np.zeros((9, 8), np.float32)}, "more places than cosines"),
        ({"k": np.zeros((1, 1, 48), np.float32)}, "k must have the depth of q"),
        ({"bias": np.zeros((1, 1, 1, 9), np.float32)}, "the mask must fit to the scores"),
    ],
)
def test_what_does_not_fit_is_refused(change: Feed, message: str, tmp_path: Path) -> None:
    feed: Feed = {name: np.ones((1, 1, 32), np.float32) for name in ("q", "k", "v")}
    feed |= {name: np.ones((1, 2, 24, 16), np.float32) for name in ("past_k", "past_v")}
    feed |= {"lengths": np.array([9], np.int32), "total": np.array([10], np.int32), **change}
    feed = {name: feed[name] for name in TENSORS if name in feed}
    inputs, names = declared(feed)
    for shape in ("int32[B]", "int32 total"):
        inputs = inputs.replace(shape, shape.replace("int32", "int32[Z]") if shape.endswith("total") else "int32[Z]")
    made = wrapped(model_of(inputs, names, "num_heads = 2, kv_num_heads = 2, do_rotary = 1"))
    onnx.save(made, tmp_path / "m.onnx")
    with pytest.raises(Exception, match=message):
        open_session(tmp_path / "m.onnx").run(None, feed)


PLAIN = "q, k, v, past_k, past_v, lengths, total"
LEFT: list[tuple[str, str, str]] = [
    ("softcap below 0", PLAIN, "softcap = -3.0"),
    ("kv_cache_bit_width", PLAIN, "kv_cache_bit_width = 8"),
    ("position_ids", f"{PLAIN}, cos, sin, places", ""),
    ("factors that are constant or equal", "q, k, k, past_k, past_v, lengths, total", ""),
]


@needs_library
@pytest.mark.parametrize(("missing", "given", "attributes"), LEFT, ids=[missing for missing, *_ in LEFT])
def test_what_the_operator_has_not_stays_float_and_is_named(missing: str, given: str, attributes: str) -> None:
    inputs = ", ".join(f"{TENSORS[name]} {name}" for name in dict.fromkeys(given.split(", ")))
    more = ", ".join(filter(None, ["num_heads = 2, kv_num_heads = 2", attributes]))
    (node,) = ir.from_proto(model_of(inputs, given, more)).graph
    assert find_cached(node) == missing


def decoder(path: Path) -> Feed:
    """Write a small llama with fused attention; return tokens of a prompt."""
    made = graph_builder.empty_model("decoder", 17)
    made.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    sizes = language.Llama(vocabulary=64, width=64, heads=4, layers=2, inner=96, groups=2, fused=True, positions=64)
    language.llama(graph_builder.Graph(0, 17, made.graph), 0, sizes)
    onnx.save(made, path)
    tokens = np.random.default_rng(0).integers(64, size=(1, 24))
    pasts = [f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    return {
        "input_ids": tokens,
        "attention_mask": np.ones_like(tokens),
        **{name: np.zeros((1, 2, 0, 16), np.float32) for name in pasts},
    }


@pytest.mark.slow
@needs_library
def test_a_decoder_of_fused_operators_continues_from_its_own_cache(tmp_path: Path) -> None:
    """Steps of one token behind a prompt give what the whole prompt gives: keys and values go out and come in again."""
    feed = decoder(tmp_path / "m.onnx")
    options = Options(effort="low", place="all", kernels="native", force=True, force_int8=True)
    quantize_model(tmp_path / "m.onnx", [feed], tmp_path / "q.onnx", options)
    nodes = onnx.load(tmp_path / "q.onnx").graph.node
    assert [node.op_type for node in nodes if "Attention" in node.op_type] == ["CachedAttention"] * 2
    session, before = open_session(tmp_path / "q.onnx"), open_session(tmp_path / "m.onnx").run(None, feed)[0]
    names = [each.name for each in session.get_outputs()]
    whole = dict(zip(names, session.run(None, feed), strict=True))
    assert np.square(whole["logits"] - before).mean() < 1e-2 * np.square(before).mean()  # 20 dB
    step, cache = feed["input_ids"], {name: value for name, value in feed.items() if name.startswith("past")}
    logits = []
    for place in range(step.shape[1]):
        given = {"input_ids": step[:, place : place + 1], "attention_mask": np.ones((1, place + 1), np.int64), **cache}
        found = dict(zip(names, session.run(None, given), strict=True))
        logits.append(found["logits"])
        cache = {name: found[name.replace("past_key_values", "present")] for name in cache}
    # a step computes attention in float, the prompt in integers
    steps = np.concatenate(logits, 1)
    assert np.square(steps - whole["logits"]).mean() < 1e-2 * np.square(before).mean()


def with_bytes(feed: Feed) -> Feed:
    """Return a feed of a decoder with the caches in bytes, as `quantize_caches` declares them."""
    made = {name: value for name, value in feed.items() if not name.startswith("past")}
    for name in feed.keys() - made.keys():
        scale = np.abs(feed[name]).max(-1, keepdims=True) / 127
        made[name] = (np.rint(feed[name] / np.maximum(scale, np.finfo(np.float32).tiny)) + 128).astype(np.uint8)
        made[f"{name}_scale"] = scale.astype(np.float32)
    return made


@pytest.fixture(scope="module")
def in_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Feed]:
    """Return a decoder in float, the same one in integers with its caches in bytes, and a prompt for the float one."""
    folder = tmp_path_factory.mktemp("bytes")
    feed = decoder(folder / "m.onnx")
    model = ir.load(folder / "m.onnx")
    assert REGISTRY["quantize_caches"](model).applied == 4
    ir.save(model, folder / "c.onnx")
    options = Options(effort="low", place="all", kernels="native", force=True, force_int8=True)
    quantize_model(folder / "c.onnx", [with_bytes(feed)], folder / "q.onnx", options)
    return folder / "m.onnx", folder / "q.onnx", feed


@needs_library
def test_a_decoder_continues_from_a_cache_in_bytes(in_bytes: tuple[Path, Path, Feed]) -> None:
    """Steps of one token, and of a few tokens behind others, give what the float model gives for the whole prompt."""
    plain, made, feed = in_bytes
    attention = [node.op_type for node in onnx.load(made).graph.node if "Attention" in node.op_type]
    assert attention == ["QuantizedCacheAttention"] * 2
    session, before = open_session(made), open_session(plain).run(None, feed)[0]
    names, logits = [each.name for each in session.get_outputs()], []
    cache = {name: value for name, value in with_bytes(feed).items() if name.startswith("past")}
    for first, last in [(0, 1), (1, 2), (2, 5), (5, 13), (13, 14), (14, 24)]:
        tokens, mask = feed["input_ids"][:, first:last], np.ones((1, last), np.int64)
        found = dict(zip(names, session.run(None, {"input_ids": tokens, "attention_mask": mask, **cache}), strict=True))
        logits.append(found["logits"])
        cache = {name: found[name.replace("past_key_values", "present")] for name in cache}
    assert cache["past_key_values.0.key"].dtype == np.uint8
    assert cache["past_key_values.0.key"].shape == (1, 2, 24, 16)
    assert np.square(np.concatenate(logits, 1) - before).mean() < 1e-2 * np.square(before).mean()  # 20 dB


@needs_library
@pytest.mark.parametrize("rows", [1, 9])
def test_a_cache_in_bytes_is_what_the_body_makes_of_it(rows: int, in_bytes: tuple[Path, Path, Feed]) -> None:
    """Rows of earlier runs stay as they are. The body does not round the new ones before it reads them."""
    _, made, feed = in_bytes
    random, past = np.random.default_rng(rows), 6
    step = {"input_ids": feed["input_ids"][:, :rows], "attention_mask": np.ones((1, past + rows), np.int64)}
    caches = {name: random.normal(size=(1, 2, past, 16)).astype(np.float32) for name in feed if name.startswith("past")}
    step |= with_bytes(caches)
    names = [each.name for each in open_session(made).get_outputs()]
    native, body = (
        dict(zip(names, run.run(None, step), strict=True)) for run in (open_session(made), open_without_library(made))
    )
    for name in (name for name in names if name != "logits"):
        before = step[name.replace("present", "past_key_values")]
        assert native[name].shape == body[name].shape == (1, 2, past + rows, before.shape[-1])
        np.testing.assert_array_equal(native[name][:, :, :past], before)
        # one unit in the last place of the scale, where the body rounds a row again
        np.testing.assert_allclose(body[name][:, :, :past], before, rtol=2**-23)
    # products of the first layer are the same; a step of a byte is 1/254 of the range of a row
    key, scale = (native[f"present.0.{name}"][:, :, past:] for name in ("key", "key_scale"))
    other, step_of_body = (body[f"present.0.{name}"][:, :, past:] for name in ("key", "key_scale"))
    floats, others = scale * (key.astype(int) - 128), step_of_body * (other.astype(int) - 128)
    assert np.square(floats - others).mean() < 1e-3 * np.square(others).mean()
    assert np.square(native["logits"] - body["logits"]).mean() < 1e-2 * np.square(body["logits"]).mean()


@needs_library
def test_steps_must_fit_to_the_rows_of_a_cache(in_bytes: tuple[Path, Path, Feed]) -> None:
    _, made, feed = in_bytes
    step = with_bytes(feed)
    step["past_key_values.0.key_scale"] = np.zeros((1, 2, 3, 1), np.float32)
    with pytest.raises(Exception, match="each row of the past must have a step"):
        open_session(made).run(None, step)


@needs_library
@given(case=cases())
def test_a_cache_in_bytes_gives_what_its_floats_give(
    case: tuple[str, Feed], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also with windows, caps, sinks, rotation, masks and items of different lengths; the new rows alone are rounded."""
    attributes, feed = case
    if "past_k" not in feed:
        return
    path = tmp_path_factory.mktemp("bytes") / "m.onnx"
    proto = model_of(*declared(feed), attributes)
    rounded = ir.from_proto(proto)
    assert REGISTRY["quantize_caches"](rounded).applied == 2
    runs = []
    for made in (proto, ir.to_proto(rounded)):
        onnx.save(wrapped(made), path)
        runs.append(open_session(path))
    given_bytes = with_bytes(feed)
    floats = {
        name: given_bytes[f"{name}_scale"] * (given_bytes[name].astype(np.float32) - 128)
        for name in ("past_k", "past_v")
    }
    expected, found = runs[0].run(None, feed | floats), runs[1].run(None, given_bytes)
    names = [each.name for each in runs[1].get_outputs()]
    results = dict(zip(names, found, strict=True))
    for name, whole in zip(("keys", "values"), expected[1:], strict=True):
        steps = results[f"{name}_scale"]
        # half a step of the row, and rounding of the step
        assert (np.abs(steps * (results[name].astype(np.float32) - 128) - whole) <= steps * (0.5 + 1e-4)).all()
    assert np.square(results["y"] - expected[0]).mean() <= 1e-2 * np.square(expected[0]).mean()  # 20 dB

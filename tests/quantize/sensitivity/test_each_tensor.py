"""Which tensors must not be uint8: found one by one, from the outputs of the float model."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from requant.calibration import Sample
from requant.quantize import Options, quantize_model
from requant.quantize.options.efforts import EFFORTS
from requant.quantize.sensitivity import segments
from requant.quantize.sensitivity.each_tensor import RUIN_DB, Integers, _within, ruinous, sqnr_by_tensor, sqnr_by_weight
from requant.quantize.sensitivity.switch_graph import taps_of
from requant.transforms.int8.qparams import asymmetric_u8

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
CHANNELS = 32
HUGE = 1e4

Floats = NDArray[np.float32]


def build(text: str, **constants: NDArray[np.generic]) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(HEAD + text)
    for name, array in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def weights(*shape: int, seed: int = 0) -> Floats:
    array = np.random.default_rng(seed).standard_normal(shape) / math.sqrt(math.prod(shape[1:]))
    return array.astype(np.float32)


def huge_channel() -> onnx.ModelProto:
    """A chain of convolutions; one channel of `b` is huge, and the weights that read it are as small."""
    w2, w3 = weights(CHANNELS, CHANNELS, 3, 3, seed=2), weights(CHANNELS, CHANNELS, 3, 3, seed=3)
    w2[5] *= HUGE
    w3[:, 5] /= HUGE
    return build(
        """net (float[N,32,8,8] x) => (float[N,32,8,8] y) {
          [first] a = Conv<pads = [1, 1, 1, 1]>(x, w1)
          [second] b = Conv<pads = [1, 1, 1, 1]>(a, w2)
          [third] c = Conv<pads = [1, 1, 1, 1]>(b, w3)
          [fourth] d = Conv<pads = [1, 1, 1, 1]>(c, w4)
          [fifth] y = Conv<pads = [1, 1, 1, 1]>(d, w5)
        }""",
        w1=weights(CHANNELS, CHANNELS, 3, 3, seed=1),
        w2=w2,
        w3=w3,
        w4=weights(CHANNELS, CHANNELS, 3, 3, seed=4),
        w5=weights(CHANNELS, CHANNELS, 3, 3, seed=5),
    )


def feeds(count: int, *shape: int, name: str = "x") -> list[dict[str, Floats]]:
    generator = np.random.default_rng(9)
    return [{name: generator.standard_normal(shape).astype(np.float32)} for _ in range(count)]


def samples(items: Sequence[dict[str, Floats]]) -> list[Sample]:
    return [Sample(dict(feed), None, f"sample {index}") for index, feed in enumerate(items)]


@pytest.fixture(params=[1000, 1], ids=["whole", "segments"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Try the tensors in the whole model, or cut it into segments however small it is."""
    monkeypatch.setattr(segments, "LEAST", request.param)


@pytest.mark.usefixtures("cut")
def test_the_one_tensor_with_a_huge_channel_is_found() -> None:
    ranges = dict.fromkeys("xacdy", (-5.0, 5.0)) | {"b": (-5 * HUGE, 5 * HUGE)}
    qparams = {name: asymmetric_u8(*pair) for name, pair in ranges.items()}
    found = sqnr_by_tensor(ir.from_proto(huge_channel()), qparams, samples(feeds(2, 1, CHANNELS, 8, 8)))
    assert set(found) == set(qparams)
    assert set(ruinous(found)) == {"b"}
    assert found["b"] < RUIN_DB < min(value for name, value in found.items() if name != "b")
    assert f"'b' alone leaves {found['b']:.1f} dB" in ruinous(found)["b"]


def test_the_noise_of_a_tensor_alone_is_that_of_its_own_rounding() -> None:
    """What passes straight to the output has the noise of quantizing it, to the bit."""
    model = build("net (float[N,64] x) => (float[N,64] y) { y = Neg(x) }")
    (feed,) = feeds(1, 1, 64)
    params = asymmetric_u8(-4.0, 4.0)
    (measured,) = sqnr_by_tensor(ir.from_proto(model), {"x": params}, samples([feed])).values()
    steps = np.clip(np.rint(feed["x"] / params.scale) + params.zero_point, 0, 255)
    rounded = ((steps - params.zero_point) * params.scale).astype(np.float32)
    noise = np.square(feed["x"].astype(np.float64) - rounded).sum()
    expected = 10 * math.log10(np.square(feed["x"].astype(np.float64)).sum() / noise)
    assert measured == pytest.approx(expected, abs=1e-9)  # dB of the same values, summed in another order


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("limit", [None, 1], ids=["together", "one after the other"])
def test_the_noise_of_the_weights_of_one_node_alone_is_that_of_their_rounding(limit: int | None) -> None:
    proto, items = huge_channel(), samples(feeds(2, 1, 32, 8, 8))
    names = {"second": "w2", "fourth": "w4"}
    arrays = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    rounded = {name: np.round(arrays[weight] * 8) / 8 for name, weight in names.items()}
    told: list[tuple[int, int]] = []
    asked: list[list[str]] = []

    def made(nodes: Collection[str]) -> dict[str, dict[int, Floats]]:
        asked.append([*nodes])
        return {name: {1: rounded[name].astype(np.float32)} for name in nodes}

    sizes = {name: array.nbytes for name, array in rounded.items()}
    tried = Integers.within(made, limit)
    found = sqnr_by_weight(ir.from_proto(proto), sizes, items, tried, progress=lambda *step: told.append(step))
    assert [name for group in asked for name in group] == ["second", "fourth"]
    assert limit is None or len(asked) == 2
    for name, weight in names.items():
        other = onnx.ModelProto()
        other.CopyFrom(proto)
        for each in other.graph.initializer:
            if each.name == weight:
                each.CopyFrom(numpy_helper.from_array(rounded[name], weight))
        exact, noisy = (
            np.concatenate([ort.InferenceSession(m.SerializeToString()).run(None, item.feed)[0] for item in items])
            for m in (proto, other)
        )
        expected = 10 * math.log10(np.square(exact).sum() / np.square(noisy - exact).sum())
        assert expected - 0.1 < found[name] < expected + 1e-3  # channels differ: each counts by its own power
    assert told == [(1, 2), (2, 2)]
    assert sqnr_by_weight(ir.from_proto(proto), sizes, items, tried, runs=1) == {}


def test_nodes_are_tried_together_up_to_a_size() -> None:
    sizes = {"a": 3, "b": 4, "c": 9, "d": 1, "e": 7, "f": 1}
    assert list(_within(sizes, sizes.__getitem__, 8)) == [["a", "b"], ["c"], ["d", "e"], ["f"]]


@pytest.mark.usefixtures("cut")
def test_the_least_of_several_outputs_counts_and_an_output_can_be_tried() -> None:
    model = build(
        "net (float[N,64] x) => (float[N,64] y, float[N,64] z) {\n[first] y = MatMul(x, w)\n[last] z = Relu(y)\n}",
        w=weights(64, 64),
    )
    qparams = {"x": asymmetric_u8(-4, 4), "y": asymmetric_u8(-4, 4), "z": asymmetric_u8(0, 1e9)}
    found = sqnr_by_tensor(ir.from_proto(model), qparams, samples(feeds(2, 1, 64)))
    assert found["z"] == 0.0  # all of it rounds to zero: the noise is the signal
    assert found["y"] > 30
    assert found["x"] > 30


def test_segments_find_the_same_as_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a skip over several segments, an input and a shape that are read late, and an output in the middle."""
    text = """net (float[N,16] x, float[N,16] late) => (float[N,16] y, float[N,16] early, float[N,16] z) {
        sizes = Shape(x)  k = Constant <value_float = 0.5> ()
        a = MatMul(x, v)  early = Tanh(a)  b = Mul(early, k)  c = MatMul(b, w)  d = Add(c, a)
        z = Reshape(d, sizes)  e = Add(z, late)  y = Mul(e, k)
    }"""
    model = ir.from_proto(build(text, v=weights(16, 16), w=weights(16, 16, seed=1)))
    items = [{**one, **other} for one, other in zip(feeds(3, 4, 16), feeds(3, 4, 16, name="late"), strict=True)]
    qparams = {name: asymmetric_u8(-4, 4) for name in ("y", "x", "e", "early", "late", "a", "z", "b", "c", "d")}
    whole = sqnr_by_tensor(model, qparams, samples(items))
    for least in (1, 2, 5):
        monkeypatch.setattr(segments, "LEAST", least)
        parts = list(segments.segments(model, qparams, samples(items)))
        assert [len(part.tensors) for part in parts] == [max(least, 2)] * (10 // max(least, 2))
        assert len([*parts[-1].model.graph]) < len([*model.graph])
        found = sqnr_by_tensor(model, qparams, samples(items))
        assert list(found) == list(whole)  # float32 in other kernels: far less than the noise of 8 bits
        assert found == pytest.approx(whole, abs=1e-3)


@pytest.mark.usefixtures("cut")
def test_tensors_that_bodies_of_if_read_are_tried() -> None:
    model = build(
        """net (float[1,64] x, bool flag) => (float[1,64] y) {
          [first] a = MatMul(x, w)
          [choice] y = If(flag) <
            then_branch = yes () => (float[1,64] p) { p = Relu(a) },
            else_branch = no () => (float[1,64] q) { q = Neg(a) }
          >
        }""",
        w=weights(64, 64),
    )
    items = [{**feed, "flag": np.asarray(flag)} for feed, flag in zip(feeds(2, 1, 64), (True, False), strict=True)]
    qparams = {"a": asymmetric_u8(0.0, 1e9)}
    # Neg of zeros is zeros, Relu of zeros too: nothing is left of the signal in either branch
    found = sqnr_by_tensor(ir.from_proto(model), qparams, [Sample(dict(item), None, "") for item in items])
    assert found == {"a": 0.0}


@pytest.mark.usefixtures("cut")
def test_tensors_in_bodies_are_tried() -> None:
    """A tensor in the branch of an If, one in a Loop, and the result of a branch."""
    model = build(
        """net (float[1,64] x, bool flag) => (float[1,64] z) {
          [first] a = MatMul(x, w)
          [choice] y = If(flag) <
            then_branch = yes () => (float[1,64] p) { r = Relu(a)  p = MatMul(r, v) },
            else_branch = no () => (float[1,64] q) { q = Neg(a) }
          >
          [again] z = Loop(three, flag, y) <
            body = step (int64 i, bool go, float[1,64] s) => (bool on, float[1,64] t) {
              on = Identity(go)  u = Abs(s)  t = MatMul(u, w)
            }
          >
        }""",
        w=weights(64, 64),
        v=weights(64, 64, seed=1),
        three=np.asarray(3, np.int64),
    )
    items = [{**feed, "flag": np.asarray(True)} for feed in feeds(2, 1, 64)]
    qparams = {name: asymmetric_u8(-1e9, 1e9) for name in "rpu"} | {"a": asymmetric_u8(-8.0, 8.0)}
    found = sqnr_by_tensor(ir.from_proto(model), qparams, [Sample(dict(item), None, "") for item in items])
    assert {name: found[name] for name in "rpu"} == dict.fromkeys("rpu", 0.0)  # rounded to zeros: no signal is left
    assert found["a"] > RUIN_DB


def test_float16_outputs_are_judged_and_others_are_not() -> None:
    half = build("net (float[N,64] x) => (float16[N,64] y) { y = Cast<to = 10>(x) }")
    whole = build("net (float[N,64] x) => (int64[N,64] y) { y = Cast<to = 7>(x) }")
    for model, expected in ((half, 0.0), (whole, math.inf)):
        found = sqnr_by_tensor(ir.from_proto(model), {"x": asymmetric_u8(0.0, 1e9)}, samples(feeds(1, 1, 64)))
        assert found == {"x": expected}


@pytest.mark.usefixtures("cut")
def test_the_model_is_as_it_was_and_progress_is_told() -> None:
    model = ir.from_proto(huge_channel())
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    told: list[tuple[int, int]] = []
    qparams = {name: asymmetric_u8(-5, 5) for name in "xab"}
    sqnr_by_tensor(
        model, qparams, samples(feeds(1, 1, CHANNELS, 8, 8)), progress=lambda done, total: told.append((done, total))
    )
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_as_many_samples_are_tried_as_the_runs_allow() -> None:
    model = ir.from_proto(huge_channel())
    qparams = {name: asymmetric_u8(-5, 5) for name in "xab"}
    two = samples(feeds(2, 1, CHANNELS, 8, 8))
    assert sqnr_by_tensor(model, qparams, two, runs=2) == {}
    assert sqnr_by_tensor(model, qparams, two, runs=5) == sqnr_by_tensor(model, qparams, two[:1])
    assert (
        sqnr_by_tensor(model, qparams, two, runs=6)
        == sqnr_by_tensor(model, qparams, two)
        != sqnr_by_tensor(model, qparams, two[:1])
    )


@pytest.mark.parametrize(
    ("found", "ruined"),
    [
        ({}, set()),
        ({"a": 40.0, "b": 41.0, "c": 5.0}, {"c"}),
        ({"a": 12.0, "b": 11.0, "c": 9.0}, set()),
        ({"a": 60.0, "b": 61.0, "c": 25.0}, set()),
        ({"a": 40.0, "b": math.inf, "c": -math.inf}, {"c"}),
        ({"a": 14.0, "b": 15.0, "c": 2.0}, {"c"}),
    ],
    ids=["none", "one", "all alike", "good enough", "lost", "one of a bad lot"],
)
def test_what_ruins_stands_out(found: dict[str, float], ruined: set[str]) -> None:
    assert set(ruinous(found)) == ruined


@pytest.mark.slow
@pytest.mark.usefixtures("int8_wins")
def test_keeping_the_tensor_in_float_mends_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(huge_channel(), tmp_path / "float.onnx")
    data = feeds(8, 1, CHANNELS, 8, 8)
    mended = quantize_model(tmp_path / "float.onnx", data, tmp_path / "mended.onnx", Options())
    monkeypatch.setattr("requant.quantize.steps.evidence.ruinous", lambda *_: {})
    relieved = quantize_model(tmp_path / "float.onnx", data, tmp_path / "relieved.onnx", Options())
    assert relieved.accuracy.worst_sqnr_db > RUIN_DB  # the frontier keeps the promise without this evidence
    monkeypatch.setattr("requant.quantize.steps.deliver.fall_back_to_float", lambda _job, _ranges, trial: trial)
    ruined = quantize_model(tmp_path / "float.onnx", data, tmp_path / "ruined.onnx", Options())
    assert ruined.rejected is not None  # nothing mended it: not kept, however fast
    assert ruined.rejected.accuracy.worst_sqnr_db < RUIN_DB < mended.accuracy.worst_sqnr_db
    assert "dB at the output, 20 dB are needed: the output is the simplified float model" in ruined.why_not
    kept = {node.name: node.reason for node in mended.float_nodes}
    assert set(kept) == {"second", "third"}
    assert all("'b' alone leaves" in reason for reason in kept.values())
    assert mended.int8_nodes == 3


@pytest.mark.usefixtures("int8_wins")
def test_low_effort_tries_tensors_of_a_ruined_model_unless_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(huge_channel(), tmp_path / "float.onnx")
    data, options = feeds(8, 1, CHANNELS, 8, 8), Options(effort="low", force_int8=True)
    mended = quantize_model(tmp_path / "float.onnx", data, tmp_path / "mended.onnx", options)
    brief = replace(EFFORTS["low"], retry=0.0)
    monkeypatch.setattr("requant.quantize.steps.deliver.EFFORTS", {**EFFORTS, "low": brief})
    ruined = quantize_model(tmp_path / "float.onnx", data, tmp_path / "ruined.onnx", options)
    assert ruined.accuracy.worst_sqnr_db < RUIN_DB < mended.accuracy.worst_sqnr_db


def test_tensors_that_units_write_are_switched_in_their_order() -> None:
    """Comparing names with names would take a time that grows with their square."""
    compared: list[str] = []

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(self)
            return str.__eq__(self, other)

    names = [Name(f"t{index}") for index in range(40)]
    body = "".join(f"t{index + 1} = Relu(t{index}) " for index in range(40))
    model = ir.from_proto(build(f"net (float[4] t0) => (float[4] t40) {{ {body} }}"))
    plan: Any = SimpleNamespace(units=(), produced_u8=frozenset(names[1:]), quantized=tuple(names), root=str)
    found = taps_of(model, plan, dict.fromkeys(map(str, names), asymmetric_u8(0.0, 1.0)))
    assert [switch.tensor for switch in found] == names[1:]
    assert len(compared) < 10 * len(names)

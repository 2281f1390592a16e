"""Outputs of probabilities: an error that nobody can see is none, and a rare detection counts by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from requant.calibration import Sample
from requant.calibration.model.session import Array
from requant.quantize import Options, check, compare_models, quantize_model
from requant.quantize.accuracy.metrics import METRICS, Scorer, of_probabilities
from requant.quantize.accuracy.outputs import Accuracy, compare_outputs
from requant.quantize.accuracy.parts import balance
from requant.quantize.accuracy.probabilities import probability_outputs
from requant.quantize.accuracy.promise import promise
from requant.quantize.accuracy.sqnr import FAINT, SEEN, decibels, output_powers, powers, worst_powers
from requant.quantize.accuracy.terms import Terms
from requant.quantize.sensitivity import each_tensor
from requant.quantize.sensitivity.switch_graph import Switch
from requant.quantize.sensitivity.switch_model import noises, tensor_switches
from requant.quantize.steps import deliver, judge
from requant.transforms.int8.qparams import QParams

HEADER = '<ir_version: 8, opset_import: ["" : {opset}, "com.other" : 1]>'
IN, OUT = "net (float[N,2,8] x) => (float[N,2,8] y)", "net (float[N,2,8] x) => (float[N,1,8] y)"
PART = "<int64[1] b = {0}, int64[1] e = {1}, int64[1] c = {1}>"
WIDE = "net (float[N,513,8] x) => (float[N,1,8] y)"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{IN} {{ y = Sigmoid(x) }}", True),
        (f"{IN} {{ y = HardSigmoid(x) }}", True),
        (f"{IN} <float low = {{0}}, float high = {{1}}> {{ y = Clip(x, low, high) }}", True),
        (f"{IN} <float low = {{-1}}, float high = {{1}}> {{ y = Clip(x, low, high) }}", False),
        (f"{IN} <float low = {{0}}> {{ y = Clip(x, low) }}", False),
        (f"{OUT} {PART} {{ s = Softmax<axis = 1>(x) y = Slice(s, b, e, c) }}", True),
        (f"{WIDE} {PART} {{ s = Softmax<axis = 1>(x) y = Slice(s, b, e, c) }}", False),
        (f"{IN} {{ a = Sigmoid(x) b = Sigmoid(x) p = Mul(a, b) y = Max(p, a) }}", True),
        (f"{IN} {{ a = Sigmoid(x) p = Mul(a, x) y = Identity(p) }}", False),
        (f"{IN} {{ a = Sigmoid(x) y = Add(a, a) }}", False),
        (f"{IN} {{ a = Sigmoid(x) y = com.other.Flatten(a) }}", False),
        (f"{IN} {{ y = Relu(x) }}", False),
        ("net (float[N,2,8] x) => (float[N,2,8] y) { }", False),
    ],
)
def test_the_graph_shows_whether_an_output_holds_probabilities(text: str, found: bool) -> None:
    model = ir.from_proto(onnx.parser.parse_model(HEADER.format(opset=17) + text))
    assert probability_outputs(model) == ({"y"} if found else set())


def test_a_softmax_of_old_operator_sets_is_of_no_single_axis() -> None:
    text = f"{IN} {{ y = Softmax<axis = 1>(x) }}"
    model = ir.from_proto(onnx.parser.parse_model(HEADER.format(opset=11) + text))
    assert probability_outputs(model) == set()


@given(st.integers(0, 10**6), st.sampled_from([1e-5, 1e-3, 0.05, 1.0]))
def test_the_powers_are_those_of_the_definition(seed: int, scale: float) -> None:
    exact, other = scale * np.random.default_rng(seed).uniform(0, 1, (2, 3, 50))
    whole, loud = output_powers({"y": exact}, {"y": other}, {"y"})["y"]
    noise = np.square(exact - other)
    assert decibels(*whole) == pytest.approx(10 * np.log10(max(np.mean(exact**2), FAINT**2) / noise.mean()))
    seen = np.maximum(exact, other) > SEEN
    assert loud == pytest.approx(((exact[seen] ** 2).sum(), noise[seen].sum()))
    assert output_powers({"y": exact}, {"y": other}) == {"y": (powers(exact, other),)}


def compared(exact: Array, other: Array, *, probable: bool = True) -> Accuracy:
    """Compare an output over eight equal samples."""
    terms = Terms("skip", frozenset({"y"} if probable else ()))
    pair = {"y": exact.astype(np.float32)}, {"y": other.astype(np.float32)}
    return compare_outputs([(*pair, Sample({"x": exact}, None, "here"))] * 8, terms=terms)


FAINT_MAP = np.full((1, 4, 100), 3e-4)


@pytest.mark.parametrize("error", [1e-4, 1e-3, 1e-2])
def test_an_error_that_nobody_sees_misses_nothing(error: float) -> None:
    found = compared(FAINT_MAP, FAINT_MAP + error)
    assert promise(found).kept is (error == 1e-4)
    assert found.sqnr_db["y"] == pytest.approx(20 * math.log10(FAINT / error), abs=0.01)
    assert not promise(compared(FAINT_MAP, FAINT_MAP + error, probable=False)).kept


def test_a_rare_detection_is_not_hidden_by_many_small_values() -> None:
    exact = np.full((1, 4, 10_000), 0.05)
    exact[0, 0, 7] = 0.9
    other = exact.copy()
    other[0, 0, 7] = 0.3  # 3.5 dB alone: 0.6 of 0.9
    assert promise(compared(exact, other, probable=False)).kept
    lost = compared(exact, other)
    assert lost.sqnr_db["y"] == lost.low_db["y"] == pytest.approx(20 * math.log10(0.9 / 0.6))
    assert not promise(lost).kept
    false = exact.copy()
    false[0, 1, 7] = 0.9  # a new detection
    assert not promise(compared(exact, false)).kept
    assert promise(compared(exact, exact + 0.004)).kept


def test_another_shape_and_values_that_are_not_finite_are_no_probabilities() -> None:
    faint = FAINT_MAP.astype(np.float32)
    assert output_powers({"y": faint}, {"y": faint[:, :1]}, {"y"})["y"][0][1] == math.inf
    assert compared(FAINT_MAP, np.full_like(FAINT_MAP, np.nan)).sqnr_db["y"] == -math.inf


def test_a_faint_row_beside_a_loud_one_has_the_same_least_signal() -> None:
    rows = np.stack([np.full(400, 0.9), np.full(400, 3e-4)])[None]
    noisy = rows + np.array([1e-4, 2e-4])[None, :, None]
    ((_, plain),) = compared(rows, noisy, probable=False).parts_db.values()
    ((_, floored),) = compared(rows, noisy).parts_db.values()
    assert plain == pytest.approx(20 * math.log10(3 / 2), abs=0.1)
    assert floored == pytest.approx(20 * math.log10(FAINT / 2e-4), abs=0.1)
    weights = [balance([rows], least) for least in (0.0, FAINT**2)]
    assert weights[0] is not None
    assert weights[1] is not None
    assert weights[1].noise(rows, noisy) < 0.03 * weights[0].noise(rows, noisy)


def test_the_metric_is_that_of_the_promise() -> None:
    found = {}
    for metric in (METRICS["sqnr"], of_probabilities(METRICS["sqnr"], frozenset({"y"}))):
        scorer = Scorer(metric)
        for error in (1e-4, 1e-4, 2e-4):
            sample = Sample({"x": FAINT_MAP}, None, "here")
            outputs = {"y": FAINT_MAP}
            scorer.add({"y": FAINT_MAP + error}, sample, metric.kept(outputs, sample))
        found[bool(metric.probabilities)] = scorer.result().value
    assert found[True] == pytest.approx(10 * math.log10(3 * FAINT**2 / 6e-8))
    assert found[False] == pytest.approx(10 * math.log10(3 * 9e-8 / 6e-8))
    assert of_probabilities(METRICS["top1"], frozenset({"y"})) is METRICS["top1"]


# ------------------------------------------------------------------------------------------------------- whole models

NET = """net (float[N,3,32,32] x) => (float[N,1,32,32] y) {
    a = Conv<pads = [1, 1, 1, 1]>(x, w1) b = Relu(a)
    c = Conv<pads = [1, 1, 1, 1]>(b, w2) d = Relu(c)
    e = Conv(d, w3, bias) y = Sigmoid(e)
}"""


def mask_model(path: Path) -> list[dict[str, Array]]:
    """Write a network whose mask is nearly empty on all samples; return the samples."""
    random, proto = np.random.default_rng(0), onnx.parser.parse_model(HEADER.format(opset=17) + NET)
    arrays = {
        "w1": random.standard_normal((16, 3, 3, 3)) / 5,
        "w2": random.standard_normal((16, 16, 3, 3)) / 8,
        "w3": 6 * random.standard_normal((1, 16, 1, 1)),
        "bias": np.array([-42.0]),
    }
    _filled(proto, arrays, path)
    random = np.random.default_rng(1)
    return [{"x": random.standard_normal((1, 3, 32, 32)).astype(np.float32)} for _ in range(64)]


def detector(path: Path) -> list[dict[str, Array]]:
    """Write a network that finds what int8 cannot see: beside values up to 1000 in the other channel it is 1.

    One value of 1024 is a detection, 0.98; all others are 6e-6.
    """
    proto = onnx.parser.parse_model(HEADER.format(opset=17) + NET.replace("3,32,32", "2,32,32"))
    arrays = {"w1": np.zeros((16, 2, 3, 3)), "w2": np.zeros((16, 16, 3, 3)), "w3": np.zeros((1, 16, 1, 1))}
    arrays["w1"][[0, 1], [0, 1], 1, 1] = arrays["w2"][[0, 1], [0, 1], 1, 1] = 1.0
    arrays["w3"][0, 1], arrays["bias"] = 16.0, np.array([-12.0])
    _filled(proto, arrays, path)
    random, samples = np.random.default_rng(1), []
    for _ in range(64):
        image = np.stack([random.uniform(0, 1000, (32, 32)), np.zeros((32, 32))])
        image[1, random.integers(32), random.integers(32)] = 1.0
        samples.append({"x": image[None].astype(np.float32)})
    return samples


def _filled(proto: Any, arrays: dict[str, Any], path: Path) -> None:
    """Write a model with its constants."""
    for name, array in arrays.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
    onnx.save_model(proto, path)


WANTED = Options(place="rules", isa="vnni", effort="low", kernels="stock", seconds=0.1)


def no_probabilities(monkeypatch: pytest.MonkeyPatch, *rooms: ModuleType) -> None:
    for room in rooms:
        monkeypatch.setattr(room, "probability_outputs", lambda _: frozenset())


def test_an_empty_mask_stays_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int8_wins: None) -> None:
    model, data = tmp_path / "m.onnx", mask_model(tmp_path / "m.onnx")
    found = quantize_model(model, data, tmp_path / "int8.onnx", WANTED)
    assert found.promise is not None
    assert found.promise.kept
    assert found.int8_nodes == 3
    outcome = compare_models(model, tmp_path / "int8.onnx", data)
    assert outcome.accuracy.sqnr_db["y"] > 35
    gate = check(model, tmp_path / "int8.onnx", data, tmp_path / "lock.json", update=True)
    (value,) = [line.value for line in gate.lines if line.name == "sqnr"]
    assert value == pytest.approx(outcome.accuracy.sqnr_db["y"])
    no_probabilities(monkeypatch, judge, each_tensor)
    before = quantize_model(model, data, tmp_path / "before.onnx", WANTED)
    assert before.int8_nodes < 3  # units are float, for the errors of a mask that is nearly empty


def test_a_model_that_loses_its_rare_detections_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = detector(tmp_path / "m.onnx")
    found = quantize_model(tmp_path / "m.onnx", data, tmp_path / "float.onnx", WANTED)
    assert found.int8_nodes == 0
    assert "in uint8 'b' alone leaves 0.0 dB at an output" in [node.reason for node in found.float_nodes]
    monkeypatch.setattr(deliver, "_with_ruinous_tensors_in_float", lambda job, ranges, trial: trial)
    forced = quantize_model(tmp_path / "m.onnx", data, tmp_path / "int8.onnx", replace(WANTED, force_int8=True))
    assert forced.int8_nodes > 0
    assert forced.promise is not None
    assert not forced.promise.kept
    assert forced.accuracy.worst_sqnr_db == pytest.approx(0.0, abs=0.1)  # all detections are gone


def test_the_noise_that_has_a_price_is_that_of_the_promise(tmp_path: Path) -> None:
    samples = [Sample(feed, None, "here") for feed in mask_model(tmp_path / "m.onnx")[:4]]
    model = ir.load(tmp_path / "m.onnx")
    board = tensor_switches(model, {"d": QParams(scale=np.array(0.5, np.float32), zero_point=np.array(0, np.uint8))})
    on = {Switch("", "d")}
    exact, rounded = ([board.run(sample.feed, each) for sample in samples] for each in ((), on))
    pairs = [output_powers(*both, {"y"})["y"] for both in zip(exact, rounded, strict=True)]
    wanted = worst_powers(tuple(map(tuple, np.sum(pairs, axis=0))))
    (found,) = noises(board, [on], samples, probabilities=probability_outputs(model))
    (plain,) = noises(board, [on], samples)
    assert found["y"] == pytest.approx(wanted)
    assert decibels(*plain["y"]) < decibels(*found["y"]) - 10

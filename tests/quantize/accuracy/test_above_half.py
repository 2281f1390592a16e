"""Values of a Sigmoid that are above 0.5 in both models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.calibration import Sample
from requant.calibration.model.session import Array
from requant.quantize import compare_models
from requant.quantize.accuracy.above_half import AboveHalf, sigmoid_outputs
from requant.quantize.accuracy.output_kinds import with_sigmoids, without_classes_of_frames
from requant.quantize.accuracy.outputs import Accuracy, accuracy_json, measure
from requant.quantize.accuracy.verdict import accuracy_rows

HEADER = '<ir_version: 8, opset_import: ["" : 17, "com.other" : 1]>'
MOVED = """net (float[N,2,8] x) => (float16[8,N,4] y) {
    a = Sigmoid(x) b = Sigmoid(x) c = Concat<axis = 1>(a, b) d = Transpose<perm = [2, 0, 1]>(c) y = Cast<to = 10>(d)
}"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("net (float[N,9] x) => (float[N,9] y) { y = Sigmoid(x) }", {"y"}),
        ("net (float[N,9] x) => (float[N,9] y, float[N,9] z) { y = Sigmoid(x) z = Tanh(x) }", {"y"}),
        (MOVED, {"y"}),
        ("net (float[N,9] x) => (float[N,18] y) { a = Sigmoid(x) y = Concat<axis = 1>(a, x) }", set()),
        ("net (float[N,9] x) => (float[N,9] y) { a = Sigmoid(x) y = Add(a, a) }", set()),
        ("net (float[N,9] x) => (float[N,9] y) { y = com.other.Sigmoid(x) }", set()),
        ("net (float[N,9] x) => (float[N,9] x) { }", set()),
    ],
    ids=["alone", "beside another", "moved", "beside boxes", "computed", "another domain", "no operator"],
)
def test_outputs_of_a_sigmoid_are_known_by_the_graph(text: str, found: set[str]) -> None:
    assert sigmoid_outputs(ir.from_proto(onnx.parser.parse_model(HEADER + text))) == found


@given(st.integers(0, 10**6))
def test_the_counts_are_those_of_the_definition(seed: int) -> None:
    exact, other = np.random.default_rng(seed).uniform(0, 1, (2, 5, 7)).astype(np.float32)
    found = AboveHalf().with_sample(exact, other).with_sample(exact, exact)
    true = int((exact > 0.5).sum())
    both = int(((exact > 0.5) & (other > 0.5)).sum()) + true
    assert (found.both, found.lost) == (both, 2 * true - both)
    precision, recall = both / (both + found.new), both / (2 * true)
    assert found.f1 == pytest.approx(2 * precision * recall / (precision + recall))


def test_without_values_there_is_no_f1_and_other_shapes_lose_all() -> None:
    low, high = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    assert AboveHalf().with_sample(low, low).f1 is None
    assert AboveHalf().with_sample(high, high[:1]) == AboveHalf(lost=6)
    assert AboveHalf().with_sample(high, np.full_like(high, np.nan)) == AboveHalf(lost=6)
    assert AboveHalf().with_sample(low, high).f1 == 0.0


def compared() -> Accuracy:
    values = np.array([[0.9, 0.8, 0.6, 0.4, 0.1, 0.1]], np.float32)

    def before(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"notes": feed["x"], "other": feed["x"]}

    def after(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"notes": feed["x"] + np.array([0, 0, -0.2, 0.2, 0, 0], np.float32), "other": feed["x"]}

    return measure(before, after, iter([Sample({"x": values}, None, "here")] * 4))


def test_the_table_and_the_json_tell_outputs_of_a_sigmoid_alone() -> None:
    found = with_sigmoids(compared(), {"notes"})
    rows = [text for name, text in accuracy_rows(found, "data") if name == "at 0.5"]
    assert rows == ["66.7% F1 at notes (data): 8 of float's 12 values above 0.5 stay, 4 are new"]
    counts = {"both": 8, "lost": 4, "new": 4, "f1": pytest.approx(2 / 3)}
    assert json.loads(json.dumps(accuracy_json(found)["above_half_by_output"])) == {"notes": counts}
    assert without_classes_of_frames(found, {found.class_output}).above_half == found.above_half
    assert "at 0.5" not in dict(accuracy_rows(with_sigmoids(compared(), ()), "data"))


def test_two_models_are_compared_at_one_half(tmp_path: Path) -> None:
    text = f"{HEADER} net (float[N,9] x) => (float[N,9] y, float[N,9] z) {{ y = Sigmoid(x) z = Tanh(x) }}"
    onnx.save_model(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    rows = np.random.default_rng(0).standard_normal((8, 9)).astype(np.float32)
    found = compare_models(tmp_path / "m.onnx", tmp_path / "m.onnx", [{"x": row[None]} for row in rows])
    assert dict(found.accuracy.above_half) == {"y": AboveHalf(both=int((rows > 0).sum()))}
    assert found.to_json()["above_half_by_output"]["y"]["f1"] == 1.0

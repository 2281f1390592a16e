"""The logits behind outputs that are probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from requant.calibration.data.samples import Sample
from requant.calibration.model.session import Array
from requant.quantize import compare_models, quantize_model
from requant.quantize.accuracy.logits import logits_of, with_logits
from requant.quantize.accuracy.output_kinds import without_classes_of_frames
from requant.quantize.accuracy.outputs import Accuracy, Labelled, accuracy_json, compare_outputs
from requant.quantize.accuracy.promise import hidden_outputs, promise
from requant.quantize.accuracy.samples import WorstSample
from requant.quantize.accuracy.verdict import accuracy_rows, answers_lost
from requant.quantize.steps import judge as judging

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("net (float[N,9] x) => (float[N,9] y) { [p] y = Softmax(x) }", {"y": ("p", 0, "x (into Softmax)")}),
        (
            "net (float[N,9,1,1] x) => (float[N,9] y) { [p] a = Softmax<axis = 1>(x) [f] y = Flatten(a) }",
            {"y": ("p", 0, "x (into Softmax)")},
        ),
        (
            "net (float[N,9] x) => (float[N,9] y, float[N,9] z) { [p] y = Softmax(x) [q] z = Relu(x) }",
            {"y": ("p", 0, "x (into Softmax)")},
        ),
        ("net (float[N,9] x) => (float[N,9] y) { [p] y = Sigmoid(x) }", {}),
        ("net (float[N,9] x) => (float[N,9] y) { [p] y = com.other.Softmax(x) }", {}),
        ("net (float[N,9] x) => (float[N,9] x) { }", {}),
        ("net (float[N,9,8,8] x) => (float[N,9,8,8] y) { [p] y = Softmax<axis = 1>(x) }", {}),
    ],
    ids=["a row", "reshaped", "beside others", "sigmoid", "another domain", "no operator", "a map"],
)
def test_logits_are_found_behind_probabilities(text: str, found: dict[str, tuple[str, int, str]]) -> None:
    header = HEADER.replace("17]", '17, "com.other" : 1]')
    assert logits_of(ir.from_proto(onnx.parser.parse_model(header + text))) == found


def compared(confidence: float, count: int, *, flipped: int = 0, other: bool = False) -> Accuracy:
    """Compare rows of three probabilities; `other` is an output beside them, and some rows of the second model flip."""
    row = np.array([[confidence, (1 - confidence) / 2, (1 - confidence) / 2]], np.float64)

    def results() -> Iterator[tuple[dict[str, Array], dict[str, Array], Sample]]:
        for index in range(count):
            before, after = np.roll(row, index % 3), np.roll(row, (index + (index < flipped)) % 3)
            beside = {"z": np.ones((1, 1, 5))} if other else {}
            yield {"y": before, **beside}, {"y": after, **beside}, Sample({"x": np.zeros((1, 4))}, None, f"{index}")

    return compare_outputs(results())


@pytest.mark.parametrize(
    ("confidence", "count", "saturated"),
    [(1.0, 16, True), (0.99995, 16, True), (0.999, 16, False), (0.8, 16, False), (1.0, 599, True), (1.0, 600, False)],
)
def test_few_probabilities_of_0_and_1_are_saturated(confidence: float, count: int, saturated: bool) -> None:
    found = compared(confidence, count)
    assert found.saturated == ({"y"} if saturated else set())
    assert (promise(found).judge == "SQNR") == saturated


def test_what_is_hidden_is_not_called_equal() -> None:
    found = compared(1.0, 16, other=True)
    assert hidden_outputs(found) == {"y"}
    hidden = "no noise shows, since the probabilities are all 0 or 1,"
    assert promise(replace(found, sqnr_db={"y": math.inf})).text == f"{hidden} at the output, 20 dB are needed"
    rows = [value for name, value in accuracy_rows(found, "data") if name == "SQNR"]
    assert rows == [f"{hidden} at y (data)", "no difference at z (data)"]
    assert answers_lost(found, "data") == "0 of 16 answers changed, probabilities all 0 or 1 (data)"
    assert json.loads(json.dumps(accuracy_json(found)))["saturated"] == ["y"]


def test_probabilities_of_frames_hide_noise_as_those_of_classes_do() -> None:
    found = without_classes_of_frames(compared(1.0, 16, other=True), {"y"})
    assert found.scores is None
    assert found.saturated == hidden_outputs(found) == {"y"}
    assert "no noise shows" in promise(replace(found, sqnr_db={"y": math.inf})).text
    assert without_classes_of_frames(compared(0.8, 16), {"y"}).saturated == set()


def test_a_flipped_answer_misses_the_promise() -> None:
    found = compared(1.0, 16, flipped=1)
    assert not hidden_outputs(found)
    assert not promise(found).kept
    assert answers_lost(found, "data") == "1 of 16 answers changed, probabilities all 0 or 1 (data)"
    label = "l (into Softmax)"
    logits = with_logits(found, {"y": label}, Accuracy(16, None, {label: 30.0}, low_db={label: 29.0}))
    assert (promise(logits).judge, promise(logits).kept) == ("class scores", False)  # logits hide no changed answer


def test_few_labels_judge_no_saturated_probabilities_and_many_do() -> None:
    logits = with_logits(compared(1.0, 16), {"y": "l (into Softmax)"}, Accuracy(16, None, {"l (into Softmax)": 18.0}))
    few = promise(replace(logits, labelled=Labelled(16, 16, 16, 0, 0)))
    assert (few.judge, few.kept) == ("SQNR", False)
    many = promise(replace(logits, labelled=Labelled(20000, 19000, 18995, 30, 25)))
    assert (many.judge, many.kept) == ("labels", True)


def test_logits_stand_in_the_place_of_saturated_probabilities() -> None:
    label = "l (into Softmax)"
    worst = WorstSample("3", label, 19.0)
    other = Accuracy(16, None, {label: 25.0, "z": 3.0}, low_db={label: 23.0}, worst_sample=worst)
    found = with_logits(compared(1.0, 16, other=True), {"y": label}, other)
    assert found.sqnr_db == {label: 25.0, "z": math.inf}
    assert found.logits == {label}
    assert (found.least_db(label), found.worst_sample, found.class_output) == (23.0, worst, "y")
    assert promise(found).text == f"25.0 dB at {label}, at least 23.0 dB with 95 % confidence, 20 dB are needed"
    assert answers_lost(found, "data") == f"0 of 16 answers changed, SQNR 25.0 dB at {label} (data)"


def saturating(folder: Path, scale: float) -> tuple[Path, list[dict[str, Array]]]:
    """Write a classifier whose logits have a scale; return its path, and data without two classes that are near."""
    random, weights = np.random.default_rng(0), dict[str, Array]()
    proto = onnx.parser.parse_model(
        f"""{HEADER} net (float[1,64] x) => (float[1,8] y) {{
          [a] h = MatMul(x, v)
          [r] u = Relu(h)
          [b] l = MatMul(u, w)
          [p] y = Softmax(l)
        }}"""
    )
    for name, shape, factor in (("v", (64, 256), 1.0), ("w", (256, 8), scale)):
        weights[name] = (factor * random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weights[name], name))
    onnx.save(proto, folder / "m.onnx")
    drawn = random.standard_normal((200, 1, 64)).astype(np.float32)
    logits = np.sort(np.maximum(drawn @ weights["v"], 0) @ weights["w"], axis=-1)
    apart = drawn[(logits[..., -1] - logits[..., -2]).ravel() > 0.5 * logits.std()]
    return folder / "m.onnx", [{"x": each} for each in apart[:32]]


@pytest.mark.usefixtures("int8_wins")
@pytest.mark.parametrize("reachable", [True, False])
def test_the_logits_of_a_saturated_classifier_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    model, data = saturating(tmp_path, 1e4)
    if not reachable:
        monkeypatch.setattr(judging, "has_readers", lambda *_: False)
    result = quantize_model(model, data, tmp_path / "out.onnx")
    (told,) = result.accuracy.sqnr_db.items()
    assert result.int8_nodes
    assert result.promise is not None
    assert result.promise.judge == "SQNR"
    if reachable:
        assert told[0] == "l (into Softmax)"
        assert 20 < told[1] < 60
        assert "dB at l (into Softmax), at least " in result.promise.text
    else:
        assert told[0] == "y"
        assert "no difference" not in str(result)
    compared = str(compare_models(model, tmp_path / "out.onnx", data))
    assert "no difference" not in compared
    assert "probabilities all 0 or 1" in compared.splitlines()[0]


@pytest.mark.usefixtures("int8_wins")
def test_probabilities_that_tell_are_judged_themselves(tmp_path: Path) -> None:
    model, data = saturating(tmp_path, 3.0)
    result = quantize_model(model, data, tmp_path / "out.onnx")
    assert list(result.accuracy.sqnr_db) == ["y"]
    assert not result.accuracy.saturated

"""The promise of accuracy: labels, class scores or SQNR judge a model, and units become float until it is kept."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from requant.calibration.data.places import one_of_each_part
from requant.calibration.data.samples import Rows, Sample, Step
from requant.calibration.data.sources import Source
from requant.calibration.model.state import Link
from requant.quantize import Options, check, compare_models, quantize_model
from requant.quantize.accuracy import promise as rules
from requant.quantize.accuracy.class_scores import ClassScores
from requant.quantize.accuracy.classes import evident_scores
from requant.quantize.accuracy.output_kinds import with_sigmoids
from requant.quantize.accuracy.outputs import Accuracy, Labelled, compare_outputs
from requant.quantize.accuracy.promise import promise
from requant.quantize.accuracy.verdict import accuracy_rows, answers_lost
from requant.quantize.placement.runs import MOST_SAMPLES
from requant.quantize.steps import hold_out as holding

from ...accuracies import changed, classes_of, scores_of

Feeds = list[dict[str, Any]]

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
CLASS_SCORES = ClassScores(
    output="y",
    classes=10,
    predictions=64,
    agreement=1.0,
    predicted_drop=0.001,
    items=64,
    whole_drop=0.001,
    whole_interval=(0.0, 0.003),
    confidence=0.8,
)
SCORES = Accuracy(64, CLASS_SCORES, {"y": 18.0})
FEW = Labelled(items=64, float_correct=60, int8_correct=58, broken=3, fixed=1)
MANY_LOST = Labelled(items=5000, float_correct=4700, int8_correct=4600, broken=160, fixed=60)
MANY_KEPT = Labelled(items=20000, float_correct=15000, int8_correct=14990, broken=60, fixed=50)

JUDGED_BY: dict[str, tuple[Accuracy, str, bool]] = {
    "class scores": (SCORES, "class scores", True),
    "an SQNR of few samples": (Accuracy(16, None, {"y": 21.4, "z": 20.5}, low_db={"y": 19.8}), "SQNR", False),
    "an SQNR of many samples": (Accuracy(256, None, {"y": 20.6}, low_db={"y": 20.2}), "SQNR", True),
    "a predicted drop": (changed(SCORES, whole_interval=(0.0, 0.006)), "class scores", False),
    "chance on few samples": (
        changed(SCORES, whole_interval=(0.0, 0.03), sqnr_db={"y": 38.0}),
        "SQNR",
        True,
    ),
    "an embedding, perhaps": (changed(SCORES, sqnr_db={"y": 14.0}, sound=False), "SQNR", False),
    "logits": (changed(SCORES, sqnr_db={"y": 16.0}, sound=False), "class scores", True),
    "few predictions": (changed(SCORES, predictions=8, items=8), "SQNR", False),
    "few good predictions": (changed(SCORES, predictions=8, items=8, sqnr_db={"y": 21.0}), "class scores", True),
    "few predictions that lose": (
        changed(SCORES, predictions=8, items=8, sqnr_db={"y": 21.0}, whole_interval=(-0.01, 0.13)),
        "class scores",
        False,
    ),
    "next to no predictions": (
        changed(SCORES, predictions=3, items=3, sqnr_db={"y": 21.0}, whole_interval=(-0.01, 0.13)),
        "SQNR",
        True,
    ),
    "scores near chance": (changed(SCORES, confidence=0.15), "SQNR", False),
    "a map": (changed(SCORES, predictions=6400, maps=True), "SQNR", False),
    "a sequence": (changed(SCORES, predictions=640, sqnr_db={"y": 21.0}), "class scores", True),
    "a noisy sequence": (changed(SCORES, predictions=640), "SQNR", False),
    "a sequence with a predicted drop": (
        changed(SCORES, predictions=640, sqnr_db={"y": 21.0}, whole_interval=(0.001, 0.02)),
        "class scores",
        False,
    ),
    "another output": (changed(SCORES, sqnr_db={"y": 18.0, "boxes": 19.0}), "SQNR", False),
    "two good outputs": (changed(SCORES, sqnr_db={"y": 18.0, "boxes": 21.0}), "class scores", True),
    "few labels": (changed(SCORES, labelled=FEW), "class scores", True),
    "few labels without scores": (changed(SCORES, labelled=FEW, predictions=3, items=3), "labels", True),
    "labels that are lost": (changed(SCORES, labelled=MANY_LOST), "labels", False),
    "labels that are kept": (changed(SCORES, labelled=MANY_KEPT), "labels", True),
    "a signal": (Accuracy(8, None, {"a": 25.0, "b": 20.0}), "SQNR", True),
    "a lost signal": (Accuracy(8, None, {"a": 25.0, "b": -math.inf}), "SQNR", False),
    "a state": (Accuracy(8, None, {"a": 25.0, "h": 3.0}, states=frozenset({"h"})), "SQNR", True),
    "a part of a state": (
        Accuracy(8, None, {"a": 25.0, "h": 25.0}, parts_db={"h": ("[:1]", 1.0)}, states=frozenset({"h"})),
        "SQNR",
        True,
    ),
    "nothing but a state": (Accuracy(8, None, {"h": 3.0}, states=frozenset({"h"})), "SQNR", False),
    "scores that are ranked": (Accuracy(8, None, {"boxes (into Gather)": 25.0, "m (into TopK)": 16.0}), "SQNR", True),
    "scores of few samples that are ranked": (
        Accuracy(16, None, {"boxes (into Gather)": 25.0, "m (into TopK)": 16.0}, low_db={"m (into TopK)": 14.0}),
        "SQNR",
        False,
    ),
    "a probability of each of few samples": (
        Accuracy(16, None, {"points": 27.3, "present": 34.2}, low_db={"points": 25.5, "present": 19.0}),
        "SQNR",
        False,
    ),
    "lost scores": (Accuracy(8, None, {"boxes (into Gather)": 25.0, "m (into TopK)": 14.0}), "SQNR", False),
    "lost boxes": (Accuracy(8, None, {"boxes (into Gather)": 19.0, "m (into TopK)": 25.0}), "SQNR", False),
    "nothing but scores": (Accuracy(8, None, {"m (into TopK)": 16.0}), "SQNR", True),
    "no outputs of floats": (Accuracy(8, None, {}), "SQNR", True),
}


@pytest.mark.parametrize(("accuracy", "judge", "kept"), JUDGED_BY.values(), ids=JUDGED_BY)
def test_what_judges_a_model(accuracy: Accuracy, judge: str, kept: bool) -> None:
    found = promise(accuracy)
    assert (found.judge, found.kept) == (judge, kept)
    assert (found.excess > 1) is not kept
    assert found.text
    assert not re.search("inf|nan", found.text)


def test_no_more_noise_is_removed_than_good_scores_may_have() -> None:
    """The interval of a few items is wide: 13 points would ask for 28 dB less noise, though 35 dB pass."""
    lost = changed(SCORES, sqnr_db={"y": 22.0}, whole_interval=(-0.01, 0.13))
    assert promise(lost).excess == pytest.approx(10 ** ((35 - 22) / 10))
    assert promise(changed(lost, whole_interval=(0.0, 0.006))).excess == pytest.approx(1.2**2)


@given(st.floats(0, 60), st.floats(0, 60))
def test_the_error_is_the_amplitude_of_the_noise(one: float, two: float) -> None:
    found = promise(Accuracy(8, None, {"a": one, "b": two}))
    assert found.error == pytest.approx(10 ** (-min(one, two) / 20))
    assert found.excess == pytest.approx((10 * found.error) ** 2)
    assert found.kept is (min(one, two) >= 20)


def test_a_sequence_is_right_if_all_of_it_is() -> None:
    """Two items of three predictions; the second item loses 0.6 - 0.4 and 0.7 - 0.3."""
    sure, close, apart = [0.9, 0.1], [0.6, 0.4], [0.7, 0.3]
    before = np.array([[sure, sure, sure], [close, sure, apart]])
    after = np.array([[sure, sure, sure], [close[::-1], sure, apart[::-1]]])
    sample = Sample({"x": np.zeros((2, 5))}, None, "")
    found = compare_outputs([({"y": before}, {"y": after}, sample)])
    assert found.predicted_drop == pytest.approx((0.2 + 0.4) / 6)
    assert scores_of(found).whole_drop == pytest.approx((1 - 0.8 * 0.6) / 2)
    assert (scores_of(found).items, found.predictions, scores_of(found).maps) == (2, 6, False)


def test_an_item_is_right_if_all_its_heads_are() -> None:
    """The same two items, whose predictions are three outputs. Labels count if there is one for each head."""
    sure, close, apart = [0.9, 0.1], [0.6, 0.4], [0.7, 0.3]
    before = {"a": np.array([sure, close]), "b": np.array([sure, sure]), "c": np.array([sure, apart])}
    after = {"a": np.array([sure, close[::-1]]), "b": before["b"], "c": np.array([sure, apart[::-1]])}
    feed = {"x": np.zeros((2, 5))}
    found = compare_outputs([(before, after, Sample(feed, None, ""))])
    assert found.predicted_drop == pytest.approx((0.2 + 0.4) / 6)
    assert scores_of(found).whole_drop == pytest.approx((1 - 0.8 * 0.6) / 2)
    assert (scores_of(found).items, found.predictions, found.changed) == (2, 6, 2)
    labels = np.zeros((2, 3), int)
    whole = compare_outputs([(before, after, Sample(feed, labels, ""))]).labelled
    assert whole is not None
    assert (whole.items, whole.broken) == (6, 2)
    first = compare_outputs([(before, after, Sample(feed, labels[:, 0], ""))])
    assert (first.predictions, first.changed) == (2, 1)  # a label for the first head alone
    other = {**before, "b": np.zeros((2, 7))}
    assert compare_outputs([(other, {**after, "b": other["b"]}, Sample(feed, None, ""))]).predictions == 4


def test_a_transcript_may_shift_a_step() -> None:
    """CTC: blank a a blank b, then blank blank a blank b: the same text; blank blank a blank c: another one."""
    eye = np.full((4, 4), 0.1) + 0.6 * np.eye(4)
    before = eye[[0, 1, 1, 0, 2]][None]
    sample = Sample({"x": np.zeros((1, 5))}, None, "")
    shifted, other = (
        compare_outputs([({"y": before}, {"y": eye[steps][None]}, sample)])
        for steps in ([0, 0, 1, 0, 2], [0, 0, 1, 0, 3])
    )
    assert (scores_of(shifted).whole_drop, shifted.agreement) == (0.0, 0.8)
    assert scores_of(other).whole_drop == pytest.approx(1 - (1 - 0.6) ** 2)


def test_whole_items_are_counted_against_their_labels() -> None:
    """A text is right if each of its labels is; labels below 0 do not count."""
    one_hot = np.eye(3, dtype=np.float32)
    labels = np.array([[0, 1, 2], [1, 1, -1], [2, 2, 2], [-1, -1, -1]])
    right, padded = np.maximum(labels, 0), one_hot[np.maximum(labels, 0)]
    wrong = one_hot[np.where(np.arange(3) == 1, (right + 1) % 3, right)]  # the second class of each item is another
    float_y = np.stack([padded[0], padded[1], wrong[2], padded[3]])
    int8_y = np.stack([wrong[0], padded[1], padded[2], wrong[3]])
    found = compare_outputs([({"y": float_y}, {"y": int8_y}, Sample({"x": np.zeros((4, 3))}, labels, ""))])
    assert found.whole_labelled == Labelled(items=3, float_correct=2, int8_correct=2, broken=1, fixed=1)
    rows = dict(accuracy_rows(found, "here", ""))
    assert rows["whole items"] == "66.67% -> 66.67% with all labels right, 1 broken, 1 fixed of 3 (here)"
    single = compare_outputs([({"y": one_hot}, {"y": one_hot}, Sample({"x": np.zeros((3, 3))}, np.arange(3), ""))])
    assert single.labelled is not None
    assert single.whole_labelled is None


def test_an_output_that_feeds_the_next_step_is_no_result() -> None:
    sample = Sample({"x": np.zeros(1)}, None, "", Step(0, 0, (Link("h", "h0"),)))
    found = compare_outputs([({"y": np.ones(4), "h": np.ones(4)}, {"y": np.full(4, 0.99), "h": np.zeros(4)}, sample)])
    assert found.sqnr_db == pytest.approx({"y": 40.0, "h": 0.0})
    assert found.worst_sqnr_db == found.results_db["y"]
    rows = [text for _, text in accuracy_rows(with_sigmoids(found, ()), "here", "")]
    assert rows == ["40.0 dB at y (here)", "0.0 dB at h, a state (here)"]


def probabilities(*shape: int) -> Any:
    rows = np.random.default_rng(0).random(shape).astype(np.float32)
    return rows / rows.sum(axis=-1, keepdims=True)


def normalised(*shape: int) -> Any:
    rows = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


LOGITS = np.random.default_rng(1).normal(size=(2, 7)).astype(np.float32)
EVIDENCE: dict[str, tuple[dict[str, Any], Any, str | None]] = {
    "a row per item": ({"y": LOGITS}, None, "y"),
    "probabilities of many rows": ({"y": probabilities(2, 9, 5)}, None, "y"),
    "boxes of a detector": ({"y": np.ones((2, 100, 85), np.float32)}, None, None),
    "labels for each row": ({"y": np.ones((2, 9, 5), np.float32)}, np.zeros((2, 9), np.int64), "y"),
    "labels of something else": ({"y": np.ones((2, 9, 5), np.float32)}, np.zeros((2, 4), np.int64), None),
    "an embedding": ({"y": normalised(2, 32)}, None, None),
    "the second output": ({"e": normalised(2, 32), "y": LOGITS}, None, "y"),
    "probabilities behind boxes": ({"boxes": LOGITS[:, :4], "y": probabilities(2, 7)}, None, "y"),
    "a single score": ({"y": np.ones((2, 1), np.float32)}, None, None),
}


@pytest.mark.parametrize(("outputs", "label", "name"), EVIDENCE.values(), ids=EVIDENCE)
def test_scores_per_class_need_evidence(outputs: dict[str, Any], label: Any, name: str | None) -> None:
    found = evident_scores(outputs, Sample({"x": np.zeros((2, 3))}, label, ""))
    assert (found and found[0]) == name


# ------------------------------------------------------------------------------------------------------- quantize


@pytest.mark.parametrize(("length", "classes"), [("T", 0), ("32", 32)])
def test_a_value_for_each_of_many_frames_is_no_class(
    tmp_path: Path, int8_wins: None, length: str, classes: int
) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    net (float[N,8,{length}] x) => (float[N,{length}] y) {{
      h = Conv<pads = [1, 1]>(x, w)
      s = Conv(h, v)
      y = Squeeze(s, axes)
    }}"""
    proto, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    arrays = {"w": random.normal(size=(8, 8, 3)), "v": random.normal(size=(1, 8, 1))}
    weights = {name: array.astype(np.float32) for name, array in arrays.items()} | {"axes": np.array([1])}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(proto, tmp_path / "m.onnx")
    data = [{"x": random.normal(size=(1, 8, 32)).astype(np.float32)} for _ in range(48)]
    wanted = Options(place="rules", isa="vnni", effort="low")
    found = quantize_model(tmp_path / "m.onnx", data, tmp_path / "out.onnx", wanted)
    assert classes_of(found.accuracy) == classes
    again = compare_models(tmp_path / "m.onnx", tmp_path / "out.onnx", data)
    assert classes_of(again.accuracy) == classes
    assert again.accuracy.worst_sample is not None
    gate = check(tmp_path / "m.onnx", tmp_path / "out.onnx", data, tmp_path / "lock.json", update=True)
    assert ("agreement" in {line.name for line in gate.lines}) is bool(classes)


def quantize(tmp_path: Path, name: str = "digits", data: Callable[[Feeds], Any] = list, **options: Any) -> Any:
    images = np.load(SAMPLE_MODELS / "digits.npz")["calib/image"][:48]
    feeds = [{"image": image[None]} for image in images]  # without labels
    wanted = Options(place="rules", isa="vnni", **options)
    return quantize_model(SAMPLE_MODELS / f"{name}.onnx", data(feeds), tmp_path / "out.onnx", wanted)


def test_units_become_float_until_the_promise_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int8_wins: None
) -> None:
    monkeypatch.setattr(rules, "LEAST_ITEMS", 10**9)  # nothing but the SQNR judges
    free = quantize(tmp_path, "digits_transformer", effort="low")
    assert (free.promise.judge, free.placement.missed) == ("SQNR", "")
    least = free.accuracy.worst_sqnr_db + 3
    monkeypatch.setattr(rules, "LEAST_DB", least)
    found = quantize(tmp_path, "digits_transformer", effort="low", force=True)
    assert found.accuracy.worst_sqnr_db >= least
    assert found.promise.kept
    assert found.placement.missed.startswith("SQNR: ")
    assert found.why_not == ""
    assert 0 < found.int8_nodes < free.int8_nodes


def test_low_effort_that_loses_too_much_names_what_medium_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int8_wins: None
) -> None:
    monkeypatch.setattr(rules, "LEAST_ITEMS", 10**9)
    monkeypatch.setattr(rules, "LEAST_DB", 200.0)
    found = quantize(tmp_path, effort="low")
    assert found.notes[-1].startswith("to lose less: the effort medium tries single tensors")


@pytest.mark.parametrize("force_int8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_float_is_written_if_no_plan_keeps_the_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int8_wins: None, force_int8: bool
) -> None:
    monkeypatch.setattr(rules, "LEAST_ITEMS", 10**9)
    monkeypatch.setattr(rules, "LEAST_DB", 200.0)
    found = quantize(tmp_path, force_int8=force_int8)
    reason = "int8 loses too much accuracy, judged by SQNR"
    assert (found.int8_nodes > 0) is force_int8
    assert reason in (found.notes[-1] if force_int8 else found.why_not)
    assert force_int8 or found.notes[-1].startswith("to lose less: the effort high tries more; 'requant sensitivity'")
    assert not found.promise.kept  # the simplified float model has not 200 dB either


@pytest.mark.parametrize("source", [list, lambda feeds: lambda: iter(feeds)], ids=["a list", "a reader"])
def test_samples_that_gave_no_ranges_judge(tmp_path: Path, int8_wins: None, source: Callable[[Feeds], Any]) -> None:
    """A reader does not say how many samples it has: they are read and counted before one of them gives a range."""
    found = quantize(tmp_path, data=source, effort="low")
    assert found.promise.held_out
    assert 0 < found.samples <= MOST_SAMPLES


def test_samples_of_a_large_reader_judge_too_but_fewer_of_them(
    tmp_path: Path, int8_wins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that judge are kept in memory, because a reader begins at its first sample each time."""

    def source(feeds: Feeds) -> Callable[[], Iterator[Any]]:
        monkeypatch.setattr(holding, "LIMIT", 10 * sum(array.nbytes for array in feeds[0].values()))
        return lambda: iter(feeds)

    found = quantize(tmp_path, data=source, effort="low")
    assert found.promise.held_out
    assert found.samples == 10


@given(st.integers(1, 500), st.integers(1, 500))
def test_positions_are_spread(total: int, count: int) -> None:
    count = min(total, count)
    found = one_of_each_part(range(total), count)
    assert len(set(found)) == count
    assert all(0 <= each < total for each in found)
    assert found == sorted(found)


@pytest.mark.parametrize("total", [32, 64, 100, 200])
@pytest.mark.parametrize("kinds", [2, 3, 4, 8])
def test_of_kinds_of_samples_that_alternate_all_judge_and_all_give_ranges(total: int, kinds: int) -> None:
    """Upright and rotated images in turn: what one kind keeps says nothing of the other."""
    count = max(total // 4, 16)
    held = [sum(each % kinds == kind for each in one_of_each_part(range(total), count)) for kind in range(kinds)]
    even = count / kinds
    assert even / 2 <= min(held)
    assert max(held) <= 1.5 * even


@pytest.mark.parametrize("kinds", [2, 4])
def test_held_sequences_are_whole_and_have_every_kind(kinds: int) -> None:
    """Sequences of eight steps whose kinds alternate: ranges and judgement see each kind."""
    steps, count = 8, 32
    rows = Rows(
        "d", steps * count, lambda _: iter(()), starts=lambda _: (range(0, steps * count, steps), steps * count)
    )
    ranged, judging = (
        each.picked if each and each.picked else () for each in holding._parted_sequences(Source((), rows))
    )
    assert sorted([*ranged, *judging]) == [*range(steps * count)]
    sequences = {position // steps for position in judging}
    assert len(judging) == steps * len(sequences) == steps * count // 4
    assert {each % kinds for each in sequences} == {*range(kinds)}


def test_what_is_nearest_to_its_limit_is_told() -> None:
    whole = Accuracy(8, None, {"y": 30.0}, parts_db={"y": ("[:, 4:]", 16.0)})
    assert promise(whole).text == "16.0 dB at y[:, 4:], 15 dB are needed"
    assert promise(replace(whole, parts_db={"y": ("[:, 4:]", 29.0)})).text == "30.0 dB at the output, 20 dB are needed"


def test_the_interval_of_an_sqnr_does_not_count_beside_a_surer_judge() -> None:
    sequence = changed(SCORES, sqnr_db={"y": 21.0}, low_db={"y": 19.0}, predictions=640)
    assert promise(sequence).kept
    assert not promise(replace(sequence, sqnr_db={"y": 19.0})).kept
    assert not promise(replace(sequence, sqnr_db={"y": 21.0, "z": 21.0}, low_db={"y": 19.0, "z": 19.0})).kept
    tokens = Accuracy(16, None, {"y": 21.0}, low_db={"y": 19.0}, divergence=1e-3)
    assert promise(tokens).kept


def test_the_bound_nearest_to_its_need_is_told_and_each_output_has_its_own() -> None:
    """The output with the lower SQNR may have the higher bound, and scores into a choice need less."""
    two = Accuracy(16, None, {"points": 27.3, "present": 34.2}, low_db={"points": 25.5, "present": 22.0})
    assert promise(two).text == "34.2 dB at present, at least 22.0 dB with 95 % confidence, 20 dB are needed"
    rows = [value for name, value in accuracy_rows(two, "held-out") if name == "SQNR"]
    assert rows == [
        "27.3 dB at points (held-out), 95 % interval from 25.5 dB",
        "34.2 dB at present (held-out), 95 % interval from 22.0 dB",
    ]
    fitted = [value for name, value in accuracy_rows(two, "fitted", held_out=False) if name == "SQNR"]
    assert fitted == ["27.3 dB at points (fitted)", "34.2 dB at present (fitted)"]
    ranked = Accuracy(16, None, {"y": 27.3, "m (into TopK)": 25.0}, low_db={"y": 25.5, "m (into TopK)": 15.5})
    assert promise(ranked).text == ("25.0 dB at m (into TopK), at least 15.5 dB with 95 % confidence, 15 dB are needed")


def test_the_interval_of_an_sqnr_is_told() -> None:
    found = promise(Accuracy(16, None, {"y": 21.4, "z": 20.5}, low_db={"y": 19.8}))
    text = "21.4 dB at y, at least 19.8 dB with 95 % confidence, 20 dB are needed"
    assert (found.text, found.kept) == (text, False)
    fitted = promise(Accuracy(16, None, {"y": 21.4, "z": 20.5}, low_db={"y": 19.8}), held_out=False)
    assert fitted.text == "21.4 dB at y, 19.8 dB with the spread of the samples, 20 dB are needed"
    assert fitted == replace(found, text=fitted.text, held_out=False)
    drop = "predicted drop 0.10 points from 64 items, "
    assert promise(SCORES).text == f"{drop}at most 0.30 with 95 % confidence"
    assert promise(SCORES, held_out=False).text == f"{drop}0.30 with the spread of the items"
    assert found.excess == pytest.approx(10**0.02)  # 0.2 dB


@pytest.mark.parametrize(("items", "others"), [(16, "17.1%"), (64, "4.6%"), (1000, "0.3%")])
def test_items_that_did_not_change_say_how_many_others_may(items: int, others: str) -> None:
    same = changed(SCORES, whole_drop=0.0, whole_interval=(0.0, 0.0), items=items, predictions=items)
    none = f"predicted drop 0.00 points, none of {items} items changed"
    found = promise(same)
    assert found.text == f"{none}: with 95 % confidence at most {others} of others change"
    assert found.kept  # the text alone says more
    assert promise(same, held_out=False).text == none
    share = float(others.rstrip("%")) / 100
    assert (1 - share) ** items == pytest.approx(0.05, abs=0.03)  # so rarely would none of the items change


def test_labels_that_the_float_model_does_not_know_judge_nothing() -> None:
    """With 0 right answers, no INT8 model breaks any."""
    wrong = Labelled(items=64, float_correct=10, int8_correct=10, broken=0, fixed=0)
    assert wrong.above_chance(10)
    assert not wrong.above_chance(5)
    known = changed(SCORES, labelled=replace(wrong, items=6400, float_correct=1000, int8_correct=1000))
    assert promise(known).judge == "labels"
    guessed = changed(known, classes=5)  # 15.6 % right
    assert promise(guessed).judge != "labels"
    rows = dict(accuracy_rows(guessed, "data"))
    assert rows["labels"] == "float is right no more often than a guess among 5 classes: check the labels"
    assert "labels" not in dict(accuracy_rows(known, "data"))


@pytest.mark.parametrize("labelled", [False, True])
def test_a_regression_whose_first_value_is_always_the_greatest_is_no_classifier(labelled: bool) -> None:
    random = np.random.default_rng(0)
    rows = random.uniform([200, 3, 1], [300, 4, 6], (64, 3)).astype(np.float32)
    noisy = rows + random.normal(0, 0.3, rows.shape).astype(np.float32)
    label = np.zeros(64, np.int64) if labelled else None
    sample = Sample({"x": rows}, label, "here")
    found = compare_outputs([({"y": rows}, {"y": noisy}, sample)])
    assert found.class_output == ("y" if labelled else "")
    if not labelled:
        assert promise(found).judge == "SQNR"
        assert found.parts_db["y"][0] == "[:, 1:3]"
    for few, name in ((rows[:8], ""), (rows[:8] - 3, "y")):  # amounts are never negative
        found = compare_outputs([({"y": few}, {"y": few + np.float32(0.1)}, Sample({"x": few}, None, "here"))])
        assert found.class_output == name
    scores = np.exp(rows - rows.max(1, keepdims=True)).astype(np.float64)
    scores /= scores.sum(1, keepdims=True)
    sure = compare_outputs([({"y": scores}, {"y": scores}, Sample({"x": rows}, None, "here"))])
    assert sure.class_output == "y"


def test_what_is_compared_in_place_of_an_output_is_named() -> None:
    """Token ids have no SQNR: the scores that an ArgMax reads have one."""
    found = Accuracy(3, None, {"scores (into ArgMax)": 34.9, "y": 40.0})
    assert promise(found).text == "34.9 dB at scores (into ArgMax), 20 dB are needed"
    assert answers_lost(found, "here") == "SQNR 34.9 dB at scores (into ArgMax) (here)"
    assert promise(replace(found, sqnr_db={"y": 40.0})).text == "40.0 dB at the output, 20 dB are needed"

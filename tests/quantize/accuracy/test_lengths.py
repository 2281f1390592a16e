"""Outputs whose lengths differ between two models: what the table, the promise and the first line say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from requant.calibration import Sample
from requant.calibration.model.session import Array
from requant.quantize import Options, quantize_model
from requant.quantize.accuracy import promise as rules
from requant.quantize.accuracy.lengths import OtherLengths, sqnr_text
from requant.quantize.accuracy.outputs import Accuracy, accuracy_json, measure
from requant.quantize.accuracy.promise import promise
from requant.quantize.accuracy.verdict import accuracy_rows, answers_lost

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
SIX = "lengths differ on 2 of 6 samples (3 instead of 4 on axis 1: page 1)"


def compared(lengths: Sequence[int], width: int = 5) -> Accuracy:
    """Compare a model that makes 4 steps with one that makes these numbers of steps; each step is (1, `width`)."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((max(*lengths, 4), width)).astype(np.float32) * 9
    rows = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    samples = [Sample({"steps": np.array(steps)}, None, f"/pages/page {place}") for place, steps in enumerate(lengths)]

    def run(steps: int) -> dict[str, Array]:
        return {"tokens": rows[None, :steps]}

    def after(feed: Mapping[str, Array]) -> dict[str, Array]:
        return run(int(feed["steps"]))

    return measure(lambda _: run(4), after, iter(samples))


def test_the_table_and_the_first_line_count_the_samples() -> None:
    found = compared([4, 3, 4, 9, 4, 4])
    assert str(found.other_lengths["tokens"]) == SIX
    told = f"unknown, since {SIX} at tokens"
    assert ("SQNR", f"{told} (data)") in list(accuracy_rows(found, "data"))
    assert "nothing in common" not in str([*accuracy_rows(found, "data"), answers_lost(found, "data")])
    assert accuracy_json(found)["other_lengths_by_output"] == {
        "tokens": {"samples": 2, "where": "/pages/page 1", "float_shape": [1, 4, 5], "int8_shape": [1, 3, 5]}
    }


def test_the_promise_says_it_whatever_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared([4, 3, 4, 9, 4, 4])
    by_classes = promise(found)
    assert (by_classes.judge, by_classes.kept) == ("class scores", False)
    assert by_classes.text.endswith(f"; {SIX}")
    monkeypatch.setattr(rules, "LEAST_ITEMS", 10**9)
    by_sqnr = promise(found)
    assert (by_sqnr.judge, by_sqnr.kept) == ("SQNR", False)
    assert by_sqnr.text.startswith(f"unknown, since {SIX} at the output")


def test_equal_lengths_are_not_mentioned() -> None:
    found = compared([4] * 6)
    assert found.other_lengths == {}
    assert promise(found).kept
    assert sqnr_text("tokens", -np.inf, {}) == "nothing in common"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ((1, 48, 50), (1, 44, 50), "44 instead of 48 on axis 1"),
        ((48, 4), (44, 5), "44x5 instead of 48x4"),
        ((3,), (), "a scalar instead of 3"),
    ],
)
def test_shapes_in_words(before: tuple[int, ...], after: tuple[int, ...], told: str) -> None:
    equal = OtherLengths().with_sample(np.zeros(2), np.zeros(2), "a")
    found = equal.with_sample(np.zeros(before), np.zeros(after), "b").with_sample(np.zeros(2), np.zeros(1), "c")
    assert str(found) == f"lengths differ on 2 of 3 samples ({told}: b)"


@pytest.mark.parametrize("int8_ms", [0.5, 1.5])
def test_a_loss_of_accuracy_comes_before_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_latency: Callable[..., None], int8_ms: float
) -> None:
    """Where both fail, the first line tells both; advice on accuracy alone would not help."""
    monkeypatch.setattr(rules, "LEAST_ITEMS", 10**9)
    monkeypatch.setattr(rules, "LEAST_DB", 200.0)
    set_latency(monkeypatch, float_ms=1.0, int8_ms=int8_ms)
    images = np.load(SAMPLE_MODELS / "digits.npz")["calib/image"][:16]
    feeds = [{"image": image[None]} for image in images]
    options = Options(place="rules", isa="vnni", effort="low")
    found = quantize_model(SAMPLE_MODELS / "digits.onnx", feeds, tmp_path / "out.onnx", options)
    assert found.why_not.startswith("int8 loses too much accuracy, judged by SQNR")
    assert ("; int8 gains too little here: 0.67x the speed of float" in found.why_not) is (int8_ms > 1)
    assert any(note.startswith("to lose less:") for note in found.notes) is (int8_ms < 1)

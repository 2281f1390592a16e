"""Transcripts: CTC decoding and error rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant import RequantError
from requant.calibration import Sample
from requant.calibration.model.session import Array
from requant.quantize.accuracy.drop import versus
from requant.quantize.accuracy.metrics import Score, Scorer, fitted, metric_named, of_reference
from requant.quantize.accuracy.metrics.sequences import best_path, edits


def scored(
    name: str, outputs: list[Array], labels: list[Any], floats: list[Array] | None = None, batch: int = 1
) -> Score:
    samples = [Sample({"x": np.zeros((batch, 7))}, label, f"sample {i}") for i, label in enumerate(labels)]
    metric = fitted(metric_named(name), samples[0])
    scorer = Scorer(metric)
    for value, reference, sample in zip(outputs, floats or outputs, samples, strict=True):
        scorer.add({"y": value}, sample, metric.kept({"y": reference}, sample) if metric.reference else {})
    return scorer.result()


def paths(*steps: str, classes: int = 5) -> Array:
    """Return class scores (N, T, C) whose best classes are these digits."""
    return np.eye(classes, dtype=np.float32)[[[int(digit) for digit in row] for row in steps]]


def plain_edits(one: Any, two: Any) -> int:
    if not len(one) or not len(two):
        return len(one) + len(two)
    if one[0] == two[0]:
        return plain_edits(one[1:], two[1:])
    return 1 + min(plain_edits(one[1:], two), plain_edits(one, two[1:]), plain_edits(one[1:], two[1:]))


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edits_are_the_fewest(one: str, two: str) -> None:
    assert edits(list(one), list(two)) == plain_edits(one, two) == edits(list(two), list(one))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_best_path_drops_repeats_then_blanks(steps: list[int]) -> None:
    wanted = [c for i, c in enumerate(steps) if c != 0 and (i == 0 or steps[i - 1] != c)]
    if steps.count(3) <= steps.count(0):
        assert best_path(np.eye(4)[[steps]])[0].tolist() == wanted


def test_the_blank_may_be_the_last_class() -> None:
    assert best_path(paths("4414440424"))[0].tolist() == [1, 0, 2]
    assert best_path(paths("0010002042"))[0].tolist() == [1, 2, 4, 2]


@pytest.mark.parametrize("name", ["wer", "cer"])
def test_rates_are_of_all_labels_together(name: str) -> None:
    scores = paths("0110203", "0000400")  # 1 2 3 and 4
    labels = np.array([[1, 3, -1], [4, 4, 4]])  # an insertion, and two deletions
    found = scored(name, [scores], [labels], batch=2)
    assert found.value == 3 / 5
    assert found.parts is not None
    assert found.parts.tolist() == [[1, 2], [2, 3]]
    time_first = np.swapaxes(scores, 0, 1)
    assert scored(name, [time_first], [labels], batch=2).value == 3 / 5
    assert scored(name, [time_first[:, :1]], [labels[0]]).value == 1 / 2
    tokens = np.array([[1, 2, 3], [4, -1, -1]])
    assert scored(name, [tokens], [labels], batch=2).value == 3 / 5


def test_nothing_said_and_nothing_heard_is_no_error() -> None:
    assert scored("cer", [paths("000")], [np.array([[-1]])]).value == 0.0
    assert scored("cer", [paths("010")], [np.array([[-1]])]).value == 1.0


def test_without_labels_the_float_models_transcripts_are_the_labels() -> None:
    floats = [paths("0110203")] * 6
    after = [paths("0110203")] * 4 + [paths("0110200")] * 2
    found = scored("cer", after, [None] * 6, floats)
    assert found.value == 2 / 18
    assert of_reference(found).value == 0.0
    compared = versus(of_reference(found), found)
    assert compared.drop == 2 / 18
    assert "bootstrap of 6 entries" in compared.method
    assert compared.drop_interval is not None
    assert compared.drop_interval[0] <= compared.drop <= compared.drop_interval[1]


def test_a_decoder_gives_texts(tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text(
        "def text(outputs):\n    return [''.join(' abc'[i] for i in row) for row in outputs['y'].argmax(-1)]\n"
    )
    floats, after = [paths("1202031", classes=4)], [paths("1202030", classes=4)]  # "ab b ca", "ab b c "
    assert scored(f"wer:{tmp_path / 'text.py'}:text", after, [None], floats).value == 1 / 3
    assert scored(f"cer:{tmp_path / 'text.py'}:text", after, [None], floats).value == 1 / 7
    with pytest.raises(RequantError, match="the sequences are texts, but the labels are tokens"):
        scored(f"cer:{tmp_path / 'text.py'}:text", after, [np.array([[1, 2]])])


@pytest.mark.parametrize(
    ("output", "label", "mention"),
    [
        (np.zeros((1, 4), np.float32), None, "no output holds class scores (T, N, C) or tokens (N, T)"),
        (paths("01", "02"), np.array([[1]]), "2 sequences for 1 labels (N, L)"),
        (paths("01"), np.array([[0.5]]), "labels must be classes"),
    ],
)
def test_what_does_not_fit_is_refused(output: Array, label: Any, mention: str) -> None:
    with pytest.raises(RequantError) as caught:
        scored("wer", [output], [label], batch=len(output))
    assert str(caught.value).startswith("sample 0: ")
    assert mention in str(caught.value)

"""Outputs that hold several quantities: boxes and scores in one tensor."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from requant.calibration.data.samples import Sample
from requant.calibration.model.session import Array
from requant.quantize.accuracy.outputs import compare_outputs
from requant.quantize.accuracy.parts import balance, quiet_rows
from requant.quantize.accuracy.promise import promise

BOXES, SCORES, PLACES = 4, 12, 500


def detections(seed: int, boxes_db: float, scores_db: float, axis: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return boxes of 0..320 joined with scores of 0..1, exact and with noise, (1, 16, 500) or (1, 500, 16)."""
    random = np.random.default_rng(seed)
    parts = []
    for rows, most, decibels in ((BOXES, 320.0, boxes_db), (SCORES, 1.0, scores_db)):
        exact = random.uniform(0, most, (1, rows, PLACES))
        noise = random.standard_normal(exact.shape)
        noise *= np.linalg.norm(exact) / np.linalg.norm(noise) * 10 ** (-decibels / 20)
        parts.append((exact, exact + noise))
    both = [np.concatenate(each, axis=1).astype(np.float32) for each in zip(*parts, strict=True)]
    one, two = both if axis == 1 else [each.swapaxes(1, 2) for each in both]
    return one, two


@pytest.mark.parametrize(("axis", "where"), [(1, "[:, 4:16]"), (2, "[:, :, 4:16]")])
def test_scores_beside_boxes_have_an_sqnr_of_their_own(axis: int, where: str) -> None:
    pairs = [detections(seed, 40.0, 13.0, axis) for seed in range(3)]
    found = compare_outputs(({"y": exact}, {"y": other}, Sample({}, None, "here")) for exact, other in pairs)
    assert found.sqnr_db == {"y": pytest.approx(40.0, abs=0.1)}
    place, decibels = found.parts_db["y"]
    assert place == where
    assert decibels == pytest.approx(13.0, abs=0.01)
    judged = promise(found)
    assert not judged.kept
    assert judged.text == f"13.0 dB at y{where}, 15 dB are needed"
    assert judged.excess == pytest.approx(10**0.2, rel=0.01)


def test_balanced_noise_is_the_mean_of_the_relative_noise_of_both_parts() -> None:
    exact, other = detections(0, 40.0, 20.0)
    weights = balance([exact, exact])
    assert weights is not None
    signal = float(np.square(exact, dtype=np.float64).sum())
    assert weights.noise(exact, 0 * exact) == pytest.approx(signal)
    assert weights.noise(exact, other) / signal == pytest.approx((1e-4 + 1e-2) / 2, rel=1e-3)
    assert weights.noise(exact, other[:, :3]) == 0.0


@pytest.mark.parametrize(
    ("signal", "values", "rows"),
    [
        ([1e6, 1.0, 1e6, 2.0], 128, [1, 3]),
        ([1e6, 1.0, 1e6, 2.0], 132, None),  # of 33 values in each row 16 are not 0
        ([1e6, 1.0, 1e6, 0.0], 128, [1]),  # zeros belong to neither part
        ([1e6, 1e4, 1e2, 1.0], 128, None),  # no gap of 30 dB
        ([1e6, 1.0, 1e6, 2.0], 127, None),  # too few values
        ([1e6, 0.0, 0.0, 0.0], 128, None),
        ([1e300, 1e-300], 64, [1]),
    ],
)
def test_the_quiet_rows_are_below_a_gap(signal: list[float], values: int, rows: list[int] | None) -> None:
    found = quiet_rows(np.array(signal), np.full(len(signal), 16), values)
    assert (None if found is None else found.tolist()) == rows


@pytest.mark.parametrize(
    "spoil",
    [
        lambda exact: exact[:, :, :20],  # too few values per row
        lambda exact: np.where((np.arange(16)[:, None] < 4) | (np.arange(500) < 249), exact, 0),  # hardly ever above 0
        lambda exact: exact * np.where(np.arange(16) < 4, 1e-3, 1)[:, None],  # of one kind
        lambda exact: np.where(exact > 1, np.nan, exact),
        lambda exact: exact[0, 0],
    ],
    ids=["few", "seldom", "alike", "nan", "vector"],
)
def test_other_outputs_have_no_parts(spoil: Callable[[Array], Array]) -> None:
    exact, other = map(spoil, detections(0, 40.0, 13.0))
    assert list(compare_outputs([({"y": exact}, {"y": other}, Sample({}, None, "here"))]).parts_db) == []


def test_samples_of_other_lengths_have_no_parts() -> None:
    (one, one_noisy), (two, two_noisy) = detections(0, 40.0, 13.0), detections(1, 40.0, 13.0)
    results = [({"y": one}, {"y": one_noisy}), ({"y": two[:, :9]}, {"y": two_noisy[:, :9]})]
    assert list(compare_outputs((a, b, Sample({}, None, "here")) for a, b in results).parts_db) == []


def test_classes_are_no_parts() -> None:
    """A class that hardly ever occurs has small probabilities; that is no other quantity."""
    scores = np.full((400, 4), [0.6, 0.4 - 2e-9, 1e-9, 1e-9], np.float32)
    found = compare_outputs([({"y": scores}, {"y": scores + np.float32(1e-8)}, Sample({"x": scores}, None, "here"))])
    assert found.class_output == "y"
    assert not found.parts_db
    assert math.isfinite(found.sqnr_db["y"])


def test_classes_of_other_heads_and_those_that_are_chosen_from_are_no_parts() -> None:
    scores = np.full((400, 4), [0.6, 0.4 - 2e-9, 1e-9, 1e-9], np.float32)
    logits = np.full((1, 400, 4), [30.0, 20.0, 1e-3, 1e-3], np.float32)
    before = {"first": scores, "second": scores, "logits (into ArgMax)": logits, "logits": logits}
    after = {name: array + np.float32(1e-8) for name, array in before.items()}
    found = compare_outputs([(before, after, Sample({"x": scores}, None, "here"))])
    assert found.class_output == "first"
    assert [*found.parts_db] == ["logits"]

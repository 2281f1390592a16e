"""Metrics of vectors, signals and decisions, against plain definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from requant.quantize.accuracy.shares import binomial_p, paired_interval

CLEAN = -20 * math.log10(2.0**-24)


def scored(name: str, outputs: Sequence[Any], labels: Sequence[Any], references: Sequence[Any] | None = None) -> Score:
    """Score a model that gives these outputs: an array, or a dict of arrays, for each sample."""
    samples = [Sample({"x": np.zeros((1, 1))}, label, f"sample {i}") for i, label in enumerate(labels)]
    metric = fitted(metric_named(name), samples[0])
    scorer = Scorer(metric)
    named = [
        [value if isinstance(value, dict) else {"out": value} for value in row]
        for row in (outputs, references or outputs)
    ]
    for value, reference, sample in zip(*named, samples, strict=True):
        scorer.add(value, sample, metric.kept(reference, sample) if metric.reference else {})
    return scorer.result()


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def wide(values: Array) -> Array:
    return values.astype(np.float64)


# ------------------------------------------------------------------------------------------------------- cosine


def test_cosine_is_of_each_vector_with_the_float_models() -> None:
    before = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]], np.float32)
    after = np.array([[4.0, 3.0], [-2.0, 0.0], [0.0, 0.0], [1.0, 0.0], [np.nan, 1.0]], np.float32)
    found = scored("cosine", [after], [None], [before])
    assert found.items is not None
    assert found.items == pytest.approx([24 / 25, -1, 1, 0, -1], abs=1e-12)
    assert of_reference(found).value == 1.0
    assert versus(of_reference(found), found).drop == pytest.approx(1 - (24 / 25 - 1) / 5)


def test_an_embedding_is_the_output_with_one_vector_per_entry() -> None:
    tokens, pooled = normal(1, 7, 4), normal(1, 4, seed=1)
    outputs = {"ids": np.ones((1, 7), np.int64), "tokens": tokens, "pooled": pooled}
    assert scored("cosine", [outputs | {"tokens": -tokens}], [None], [outputs]).value == pytest.approx(1)
    assert scored("cosine", [outputs | {"pooled": -pooled}], [None], [outputs]).value == pytest.approx(-1)
    per_token = scored("cosine", [{"tokens": tokens}], [None])
    assert per_token.items is not None
    assert len(per_token.items) == 7  # a vector per token
    assert per_token.rows is not None
    assert scored("cosine", [normal(2, 5, 1, 1)], [None]).rows is None  # axes of length 1 are dropped


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 100))
def test_cosine_ignores_lengths(seed: int, factor: float) -> None:
    one, two = normal(3, 6, seed=seed), normal(3, 6, seed=seed + 1)
    plain = [float(a @ b / np.sqrt(a @ a) / np.sqrt(b @ b)) for a, b in zip(wide(one), wide(two), strict=True)]
    assert scored("cosine", [wide(two) * factor], [None], [one]).value == pytest.approx(np.mean(plain), abs=1e-9)


# ------------------------------------------------------------------------------------------------------- recall@K


def test_recall_by_hand() -> None:
    angles = np.radians([0, 10, 25, 90, 97, 200])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    groups = [0, 1, 0, 2, 2, 3]  # the last is alone and asks nothing
    rows = [vectors[[i]] * (i + 1) for i in range(6)]
    one = scored("recall@1", rows, groups)
    assert one.items is not None
    assert one.items.tolist() == [0, 0, 1, 1]  # 0 has 1 before 2, 2 has 1 before 0
    assert scored("recall@2", rows, groups).value == 1.0
    assert scored("recall@1", [np.concatenate(rows)], [np.array(groups)]).value == one.value


def plain_recall(vectors: Array, groups: Sequence[int], k: int) -> float:
    """Sort the others by similarity for each entry that has another of its group."""
    hits = []
    unit = [v / np.sqrt(v @ v) for v in wide(vectors)]
    for i, group in enumerate(groups):
        others = [j for j in range(len(groups)) if j != i]
        if group < 0 or all(groups[j] != group for j in others):
            continue
        nearest = sorted(others, key=lambda j: -float(unit[i] @ unit[j]))[:k]
        hits.append(any(groups[j] == group for j in nearest))
    return float(np.mean(hits))


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.lists(st.integers(-1, 4), min_size=8, max_size=20))
def test_recall_is_what_sorting_finds(seed: int, k: int, groups: list[int]) -> None:
    groups = [0, 0, *groups]
    vectors = normal(len(groups), 5, seed=seed)
    found = scored(f"recall@{k}", [vectors], [np.array(groups)])
    assert found.value == plain_recall(vectors, groups, k)


def test_queries_and_what_is_searched_can_be_apart() -> None:
    vectors = np.array([[1, 0], [1, 0.1], [0, 1], [0.9, 0.3]], np.float32)
    labels = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])  # two queries, two searched
    found = scored("recall@1", [vectors], [labels])
    assert found.items is not None
    assert found.items.tolist() == [1, 0]


def test_the_same_vector_for_all_recalls_nothing() -> None:
    assert scored("recall@1", [np.ones((4, 3), np.float32)], [np.array([0, 0, 1, 1])]).value == 0.0
    assert scored("recall@1", [np.full((4, 3), np.nan, np.float32)], [np.array([0, 0, 1, 1])]).value == 0.0


def test_recall_counts_broken_queries() -> None:
    groups = np.repeat(np.arange(6), 2)
    before = np.eye(12, dtype=np.float32)[2 * (np.arange(12) // 2)] + 0.01 * normal(12, 12)
    after = before.copy()
    after[[1, 2]] = after[[2, 1]]
    found = versus(scored("recall@1", [before], [groups]), scored("recall@1", [after], [groups]))
    assert (found.before, found.broken, found.fixed) == (1.0, 4, 0)
    assert found.items == 12


# ------------------------------------------------------------------------------------------------------- signals


def test_sisdr_by_hand() -> None:
    target = np.array([[1.0, 0.0, 0.0, 0.0]])
    estimate = np.array([[2.0, 0.2, 0.0, 0.0]])
    assert scored("sisdr", [estimate], [target]).value == pytest.approx(20)  # 4 against 0.04
    assert scored("sisdr", [estimate * [1, 0, 1, 1]], [target]).value == CLEAN
    assert scored("sisdr", [estimate * 0], [target]).value == -CLEAN


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10))
def test_sisdr_is_the_distance_to_the_best_scaled_target(seed: int, gain: float) -> None:
    target, estimate = wide(normal(2, 1, 9, seed=seed)), wide(normal(2, 1, 9, seed=seed + 1))
    plain = []
    for s, e in zip(target[:, 0], estimate[:, 0], strict=True):
        scale = np.linalg.lstsq(s[:, None], e, rcond=None)[0][0]
        plain.append(20 * math.log10(np.linalg.norm(scale * s) / np.linalg.norm(scale * s - e)))
    found = scored("sisdr", [gain * estimate], [target[:, 0]])
    assert found.value == pytest.approx(np.mean(plain), abs=1e-6)
    assert found.rows is None


def test_a_silent_target_does_not_count() -> None:
    targets = [np.zeros((1, 4)), np.ones((1, 4))]
    assert scored("sisdr", [normal(1, 4), np.ones((1, 4))], targets).value == CLEAN
    with pytest.raises(RequantError, match="no item of 1 sample has a label that counts"):
        scored("sisdr", [normal(1, 4)], targets[:1])


def test_mse_is_of_all_values_together() -> None:
    outputs, targets = (
        [np.array([[1.0, 2.0]]), np.array([[0.0], [5.0]])],
        [np.array([[1.0, 4.0]]), np.array([[1.0], [2.0]])],
    )
    found = scored("mse", outputs, targets)
    assert found.value == (0 + 4 + 1 + 9) / 4
    assert scored("mse", [np.array([[np.nan, 1.0]])], [np.zeros((1, 2))]).value == math.inf


@pytest.mark.parametrize(("name", "own"), [("mse", 0.0), ("sisdr", math.inf)])
def test_without_labels_the_float_models_output_is_the_target(name: str, own: float) -> None:
    before, after = [normal(1, 3, 5, seed=i) for i in range(6)], [normal(1, 3, 5, seed=i + 9) for i in range(6)]
    found = scored(name, after, [None] * 6, before)
    flat = [[value.reshape(1, -1) for value in row] for row in (after, before)]
    assert found.value == pytest.approx(scored(name, *flat).value)
    assert of_reference(found).value == own
    compared = versus(of_reference(found), found)
    assert compared.drop > 0
    assert (compared.drop_interval is None) == (own == math.inf)  # as for sqnr
    between = versus(found, scored(name, [value + 0.1 for value in after], [None] * 6, before))
    assert between.drop_interval is not None
    assert between.drop_interval[0] < between.drop < between.drop_interval[1]


# ------------------------------------------------------------------------------------------------------- F1


def plain_f1(found: Sequence[int], truth: Sequence[int]) -> float:
    pairs = list(zip(found, truth, strict=True))
    tp, fp, fn = (sum(pair == kind for pair in pairs) for kind in ((1, 1), (1, 0), (0, 1)))
    return 2 * tp / (2 * tp + fp + fn)


@given(st.integers(0, 2**32 - 1), st.integers(3, 5))
def test_f1_is_the_mean_over_classes_that_occur(seed: int, classes: int) -> None:
    scores, labels = normal(25, classes, seed=seed), np.random.default_rng(seed).integers(-1, classes, 25)
    kept = [(int(row.argmax()), int(label)) for row, label in zip(scores, labels, strict=True) if label >= 0]
    shares = [
        plain_f1([f == c for f, _ in kept], [t == c for _, t in kept])
        for c in range(classes)
        if any(c in p for p in kept)
    ]
    assert scored("f1", [scores[:7], scores[7:]], [labels[:7], labels[7:]]).value == pytest.approx(np.mean(shares))


def test_f1_of_two_classes_is_that_of_class_1() -> None:
    labels = np.array([0, 0, 1, 1, 1, 0])
    found = np.array([0, 1, 1, 1, 0, 0])
    wanted = plain_f1(found.tolist(), labels.tolist())
    assert scored("f1", [np.eye(2)[found]], [labels]).value == wanted == 4 / 6
    chances = np.where(found == 1, 0.6, 0.4)[:, None]
    assert scored("f1", [chances], [labels]).value == wanted
    logits = np.log(chances / (1 - chances))
    assert scored("f1", [row[None] for row in logits], labels.tolist()).value == wanted  # single logits may lie in 0..1


@pytest.mark.parametrize("logits", [False, True])
def test_f1_of_several_labels_per_item(logits: bool) -> None:
    scores, labels = normal(30, 4), np.random.default_rng(5).integers(0, 2, (30, 4))
    wanted = np.mean([plain_f1((scores[:, c] > 0).tolist(), labels[:, c].tolist()) for c in range(4)])
    outputs = scores if logits else 1 / (1 + np.exp(-scores))
    found = scored("f1", [outputs[:9], outputs[9:]], [labels[:9], labels[9:]])
    assert found.value == pytest.approx(wanted)
    assert versus(found, found).drop_interval == (0.0, 0.0)


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "output", "label", "mention"),
    [
        ("cosine", np.ones((1, 3), int), None, "no float output holds vectors"),
        ("recall@1", normal(1, 4), None, "no label, but recall@1 needs one"),
        ("recall@1", normal(1, 7, 4), 0, "one per token; recall@K:FILE.py:NAME"),
        ("recall@1", normal(1, 4), np.arange(3), "3 labels for 1 vectors"),
        ("recall@1", normal(1, 4), np.array([[0, 2]]), "the second column of labels must be 0 (a query) or 1"),
        ("f1", normal(1, 4), None, "no label, but f1 needs one"),
        ("f1", normal(1, 4), 4, "label 4, but the output has 4 classes"),
        ("f1", normal(1, 4), np.array([[0, 1, 2, 0]]), "label 2, but one label per score must be 0 or 1"),
        ("f1", normal(1, 4), np.zeros((1, 3), int), "no output fits a label of shape (1, 3)"),
        ("sisdr", normal(1, 4), np.zeros((1, 3)), "no output fits a target of shape (1, 3)"),
        ("mse", np.ones((1, 3), int), None, "the model has no float output to compare"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(name: str, output: Array, label: Any, mention: str) -> None:
    with pytest.raises(RequantError) as caught:
        scored(name, [output], [label])
    assert str(caught.value).startswith("sample 0: ")
    assert mention in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(RequantError, match=r"sample 0: vectors of shape \(1, 3\), but the float model's have \(1, 4\)"):
        scored("cosine", [normal(1, 3)], [None], [normal(1, 4)])


def test_broken_and_fixed_queries_have_the_exact_interval() -> None:
    before = Score(metric_named("recall@3"), 1.0, np.ones((30, 2)))
    parts = np.ones((30, 2))
    parts[:4, 0] = 0
    found = versus(before, Score(metric_named("recall@3"), 26 / 30, parts))
    assert (found.drop_interval, found.p_value) == (paired_interval(4, 0, 30), binomial_p(4, 0))

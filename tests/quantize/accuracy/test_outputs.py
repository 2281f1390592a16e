"""Float against INT8: predictions, agreement, broken and fixed items, the exact test, signal to noise."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant import RequantError
from requant.calibration import Sample
from requant.calibration.model.session import Array
from requant.quantize.accuracy.classes import NO_CLASS, predictions
from requant.quantize.accuracy.labels import check_label
from requant.quantize.accuracy.outputs import Accuracy, Labelled, compare_outputs, measure
from requant.quantize.accuracy.shares import binomial_p, score_interval
from requant.quantize.accuracy.sqnr import decibels, output_powers, powers

counts = st.integers(0, 400)


def by_enumeration(broken: int, fixed: int) -> float:
    """Count, over all outcomes of fair coins, those whose split is at least as uneven."""
    total, uneven = broken + fixed, abs(broken - fixed)
    outcomes = [sum(coins) for coins in product((0, 1), repeat=total)]
    return sum(abs(2 * heads - total) >= uneven for heads in outcomes) / len(outcomes)


@pytest.mark.parametrize(("broken", "fixed"), [(b, f) for b in range(7) for f in range(7)])
def test_binomial_p_is_the_share_of_outcomes_at_least_as_uneven(broken: int, fixed: int) -> None:
    assert binomial_p(broken, fixed) == by_enumeration(broken, fixed)  # both are integers over a power of two


@pytest.mark.parametrize(
    ("broken", "fixed", "p"),
    [(0, 0, 1.0), (5, 0, 2 / 32), (8, 0, 0.0078125), (10, 2, 2 * (1 + 12 + 66) / 4096), (5000, 5000, 1.0)],
)
def test_binomial_p_of_known_splits(broken: int, fixed: int, p: float) -> None:
    assert binomial_p(broken, fixed) == p


@given(counts, counts)
def test_binomial_p_is_a_symmetric_probability_that_falls_as_the_split_widens(broken: int, fixed: int) -> None:
    p = binomial_p(broken, fixed)
    assert 0 < p <= 1
    assert p == binomial_p(fixed, broken)
    if min(broken, fixed) > 0:
        assert binomial_p(max(broken, fixed) + 1, min(broken, fixed) - 1) <= p


def test_binomial_p_of_many_items_neither_overflows_nor_vanishes() -> None:
    assert binomial_p(100_00, 0) >= 0.0
    # the normal approximation of a split 60 % to 40 % of 1000: z = 6.32 with continuity 6.29, p = 3e-10
    assert 1e-10 < binomial_p(600, 400) < 1e-9


@pytest.mark.parametrize(("broken", "fixed"), [(20, 600), (700, 1300), (2500, 2540)])
def test_binomial_p_is_near_the_exact_value(broken: int, fixed: int) -> None:
    """A coefficient takes two roundings a step, and the sum one: 3 / 2^53 for each step (1 %: their products)."""
    total, steps = broken + fixed, min(broken, fixed)
    exact = Fraction(2 * sum(math.comb(total, k) for k in range(steps + 1)), 2**total)
    assert abs(Fraction(binomial_p(broken, fixed)) / exact - 1) <= Fraction(303 * steps, 100 * 2**53)


def test_binomial_p_of_the_pixels_of_an_image_takes_no_time() -> None:
    began = time.process_time()
    p = binomial_p(300_000, 301_000)  # with exact coefficients 20 s and more
    assert time.process_time() - began < 5.0
    # of a symmetric distribution the normal approximation with continuity errs by a share of 1 / items
    assert p == pytest.approx(math.erfc(999 / math.sqrt(2 * 601_000)), rel=1e-4)


# -------------------------------------------------------------------------------------------------- predictions


def scores(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "axis", "result"),
    [
        ((5, 10), -1, (5,)),
        ((2, 7, 12), -1, (2, 7)),
        ((1, 4, 6, 8), 1, (1, 6, 8)),
        ((1, 6, 8, 4), -1, (1, 6, 8)),
        ((3, 4, 2, 2, 6), -1, (3, 4, 2, 2)),
    ],
    ids=["classes", "tokens", "map, channels first", "map, channels last", "five axes"],
)
def test_the_class_axis(shape: tuple[int, ...], axis: int, result: tuple[int, ...]) -> None:
    value = scores(*shape)
    found = predictions({"out": value})
    assert found is not None
    assert found.shape == result
    assert np.array_equal(found, value.argmax(axis))


@pytest.mark.parametrize(
    "value",
    [scores(4), scores(4, 1), np.arange(8).reshape(2, 4), scores(0, 10), np.array([["a", "b"]]), [scores(2, 3)], {}],
    ids=["one axis", "one score", "integers", "empty", "strings", "sequence", "map"],
)
def test_what_holds_no_scores_per_class_gives_no_prediction(value: Any) -> None:
    assert predictions({"out": value}) is None
    later = predictions({"out": value, "scores": np.eye(3, dtype=np.float32)})
    assert later is not None
    assert later.tolist() == [0, 1, 2]


def test_a_prediction_from_nan_is_no_class() -> None:
    value = np.array([[0, 1], [np.nan, 1], [1, np.nan]], np.float32)
    found = predictions({"out": value})
    assert found is not None
    assert found.tolist() == [1, NO_CLASS, NO_CLASS]


# ------------------------------------------------------------------------------------------------------ measure


def compared(
    reference: Sequence[Any], candidate: Sequence[Any], labels: Sequence[Any] | None = None, name: str = "out"
) -> Accuracy:
    """Compare two models that give these outputs for sample 0, 1, ..."""

    def model(outputs: Sequence[Any]) -> Any:
        return lambda feed: {name: outputs[int(feed["index"][0])]}

    def samples() -> Iterator[Sample]:
        for index in range(len(reference)):
            label = None if labels is None else labels[index]
            items = len(reference[index])  # one row of scores for each
            yield Sample({"index": np.full(items, index)}, label, f"sample {index}")

    return measure(model(reference), model(candidate), samples())


def one_hot(*classes: int) -> list[Array]:
    return [np.eye(4, dtype=np.float32)[[c]] for c in classes]


def test_broken_and_fixed_items_are_counted() -> None:
    labels = [0, 1, 2, 3, 0, 1]
    found = compared(one_hot(0, 1, 2, 0, 1, 1), one_hot(0, 2, 3, 3, 2, 1), labels)
    assert found.labelled == Labelled(items=6, float_correct=4, int8_correct=3, broken=2, fixed=1)
    assert found.labelled.p_value == binomial_p(2, 1)
    assert found.agreement == 2 / 6
    assert found.samples == 6


def test_labels_of_pixels_take_no_memory_once_they_are_counted() -> None:
    random, side = np.random.default_rng(0), 128
    labels = random.integers(0, 2, (4, 1, side, side))
    scores = [np.concatenate([1.0 - each, each])[None].astype(np.float32) for each in labels]

    def peak(images: int) -> int:
        tracemalloc.start()
        samples = (Sample({}, labels[index % 4], "image") for index in range(images))
        found = compare_outputs(
            ({"y": scores[0]}, {"y": scores[index % 4]}, sample) for index, sample in enumerate(samples)
        )
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found.labelled is not None
        assert (found.labelled.items, found.labelled.int8_correct) == (images * side**2,) * 2
        return most

    assert peak(24) - peak(4) < 20 * side**2  # bytes: one for each pixel


def test_the_items_of_a_batch_are_counted_one_by_one() -> None:
    before, after = (np.concatenate(one_hot(*classes)) for classes in ((0, 1, 2), (0, 1, 3)))
    found = compared([before], [after], [np.array([0, 1, 2])])
    assert found.labelled == Labelled(items=3, float_correct=3, int8_correct=2, broken=1, fixed=0)
    assert found.agreement == 2 / 3


def test_without_labels_there_is_nothing_to_count() -> None:
    found = compared(one_hot(0, 1), one_hot(0, 1))
    assert found.labelled is None
    assert (found.agreement, found.worst_sqnr_db) == (1.0, math.inf)


LOGITS = np.log([[0.5, 0.25, 0.125, 0.125]])


@pytest.mark.parametrize("scores", [np.exp(LOGITS), LOGITS, LOGITS - 7], ids=["probabilities", "logits", "shifted"])
def test_the_predicted_drop_is_what_the_float_model_gives_less_to_the_other_class(scores: Array) -> None:
    scores = scores.astype(np.float32)
    found = compared([scores, scores], [scores, scores[:, ::-1]])  # the second item: class 0, then class 3
    assert found.predicted_drop == pytest.approx(
        (0.5 - 0.125) / 2, rel=8 * 7 * float(np.finfo(np.float32).eps)
    )  # of logits up to 7
    assert found.predictions == 2


def test_what_has_no_class_is_foretold_to_lose_all_of_its_probability() -> None:
    scores = np.array([[0.75, 0.25]], np.float32)
    assert compared([scores], [np.full_like(scores, np.nan)]).predicted_drop == 0.75


def test_without_scores_no_drop_is_foretold() -> None:
    found = compared([np.ones(3, np.float32)], [np.ones(3, np.float32)])
    assert (found.agreement, found.agreement_interval, found.predicted_drop) == (None, None, None)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_of_a_share_holds_it_and_mirrors(counted: tuple[int, int]) -> None:
    right, items = counted
    low, high = score_interval(right / items, items)
    ulps = 8 * np.finfo(float).eps
    assert -ulps <= low - right / items <= ulps or low < right / items
    assert -ulps <= right / items - high <= ulps or right / items < high
    mirrored = score_interval((items - right) / items, items)
    np.testing.assert_allclose((1 - high, 1 - low), mirrored, atol=ulps, rtol=0)


@pytest.mark.parametrize(
    ("outputs", "labels", "counted"),
    [
        ([np.zeros((1, 4), np.float32)], [np.array([0, 1])], "2 label(s) for 1 prediction(s)"),
        ([np.zeros((1, 1), np.float32)], [0], "1 label(s) for 0 prediction(s)"),
    ],
    ids=["too many", "no classes"],
)
def test_labels_that_do_not_fit_the_predictions_are_refused(outputs: Any, labels: Any, counted: str) -> None:
    with pytest.raises(RequantError) as caught:
        compared(outputs, outputs, labels)
    assert "sample 0: " in str(caught.value)
    assert counted in str(caught.value)


@pytest.mark.parametrize(
    ("label", "told"),
    [
        (np.array([4]), "sample 0: label 4, but the output has 4 classes, counted from 0"),
        (np.array([1.5], np.float32), "sample 0: labels of float32, but labels must be classes"),
    ],
    ids=["counted from 1", "a fraction"],
)
def test_labels_that_are_no_classes_are_refused(label: Array, told: str) -> None:
    """No model is right on them, so that no INT8 model would break any."""
    scores = LOGITS.astype(np.float32)
    with pytest.raises(RequantError, match=told):
        compared([scores], [scores], [label])


def test_the_first_label_is_checked_before_any_work() -> None:
    outputs = {"y": LOGITS.astype(np.float32)}
    bad: list[Array | int] = [np.array([4]), 7]
    for label in bad:
        with pytest.raises(RequantError, match="but the output has 4 classes"):
            check_label(outputs, Sample({}, label, "sample 0"))
    for other in (np.array([3]), np.array([-1]), np.array([9, 9]), np.array([0.5]), None):
        check_label(outputs, Sample({}, other, "sample 0"))


def test_progress_counts_the_samples() -> None:
    seen: list[int] = []
    samples = [Sample({}, None, f"sample {index}") for index in range(3)]
    measure(lambda feed: {}, lambda feed: {}, samples, seen.append)
    assert seen == [1, 2, 3]


# --------------------------------------------------------------------------------------------------------- SQNR


@pytest.mark.parametrize("share", [1.0, 0.1, 0.001])
def test_sqnr_of_known_noise(share: float) -> None:
    """Noise of a share of the signal, in every element, leaves ``-20 log10(share)`` dB."""
    signal = np.array([[1.0, -2.0, 4.0]])
    found = compared([signal, 2 * signal], [signal * (1 + share), 2 * signal * (1 - share)])
    # 1 + share is rounded by up to eps / 2, so the noise's amplitude is off by up to eps / share
    assert found.sqnr_db["out"] == pytest.approx(-20 * math.log10(share), abs=20 * 2**-52 / share + 1e-12)


def test_sqnr_is_of_all_samples_together_and_of_each_output() -> None:
    def outputs(large: float, small: float) -> Mapping[str, Array]:
        return {"a": np.array([large, small]), "b": np.array([1.0]), "class": np.array([1])}

    pair = iter([outputs(3.0, 1.0), outputs(3.0, 1.0)]), iter([outputs(3.0, 0.0), outputs(2.0, 1.0)])
    samples = [Sample({}, None, "") for _ in range(2)]
    found = measure(lambda _: next(pair[0]), lambda _: next(pair[1]), samples)
    assert found.sqnr_db == {"a": decibels(20.0, 2.0), "b": math.inf}
    assert found.worst_sqnr_db == 10.0


def test_float16_outputs_do_not_overflow() -> None:
    value = np.full((1, 4), 60_000, np.float16)
    assert math.isclose(compared([value], [value / 2]).sqnr_db["out"], 20 * math.log10(2))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_lost_leaves_no_signal(wrong: float) -> None:
    good, bad = np.array([[1.0, 2.0]], np.float32), np.array([[1.0, wrong]], np.float32)
    assert compared([good], [bad]).sqnr_db["out"] == -math.inf
    assert compared([bad], [good]).sqnr_db["out"] == -math.inf
    assert compared([bad], [-bad]).sqnr_db["out"] in (-math.inf, decibels(1.0, 4.0))  # NaN has no sign


@pytest.mark.parametrize("same", [np.nan, np.inf, -np.inf])
def test_what_the_float_model_has_lost_itself_is_no_noise(same: float) -> None:
    value = np.array([[1.0, 2.0, same]], np.float32)
    assert compared([value], [value]).sqnr_db["out"] == math.inf
    assert compared([value], [value + np.array([[0, 1, 0]], np.float32)]).sqnr_db["out"] == decibels(5.0, 1.0)


def test_another_shape_is_another_answer() -> None:
    found = compared([np.ones((2, 3), np.float32)], [np.ones((4, 3), np.float32)])
    assert found.sqnr_db["out"] == -math.inf
    assert found.agreement == 0


def test_outputs_that_are_no_tensors_are_left_out() -> None:
    found = compared([[np.ones(3)]], [[np.zeros(3)]])
    assert (found.sqnr_db, found.agreement, found.worst_sqnr_db) == ({}, None, math.inf)


def test_integers_count_where_there_are_no_floats() -> None:
    ids = np.arange(1, 201)
    other = np.where(ids == 10, 200, ids)
    assert 15 < compared([ids], [other]).sqnr_db["out"] < 25
    assert compared([ids], [ids]).sqnr_db == {"out": math.inf}
    same = np.ones(2, np.float32)
    assert output_powers({"y": same, "ids": ids}, {"y": same, "ids": other}) == {"y": ((2.0, 0.0),)}
    assert output_powers({"on": ids > 10}, {"on": other > 10}) == {"on": ((190.0, 1.0),)}


def test_decibels() -> None:
    assert decibels(1.0, 0.0) == decibels(0.0, 0.0) == math.inf
    assert decibels(0.0, 1.0) == decibels(1.0, math.nan) == decibels(1.0, math.inf) == -math.inf
    assert decibels(100.0, 1.0) == 20.0


@given(st.lists(st.floats(width=32), min_size=1, max_size=8), st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_powers_takes_whatever_two_models_give(left: list[float], right: list[float]) -> None:
    exact, other = np.asarray(left, np.float32), np.asarray(right, np.float32)
    signal, noise = powers(exact, other)
    assert signal >= 0
    assert math.isnan(noise) or noise >= 0
    assert powers(exact, exact) == (signal, 0.0)

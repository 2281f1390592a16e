"""The probability of a text, and which sequences of classes are texts."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.calibration.samples import Sample
from requant.quantize.accuracy.transcripts import collapsed, likelihood, text_losses

STEPS, CLASSES = 5, 3
IMAGE = Sample({"x": np.zeros((1, 3, 8, 8), np.float32)}, None, "")


def by_paths(rows: npt.NDArray[np.float64], text: list[int], blank: int) -> float:
    """The sum of the probabilities of all paths that collapse to a text."""
    paths = np.array(list(product(range(CLASSES), repeat=STEPS)))
    fits = [np.array_equal(found, text) for found in collapsed(paths, blank)]
    return float(np.prod(rows[np.arange(STEPS), paths], axis=1)[fits].sum())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), blank=st.sampled_from([0, CLASSES - 1]), length=st.integers(0, STEPS))
def test_the_likelihood_of_a_text_is_the_sum_over_its_paths(seed: int, blank: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.dirichlet(np.ones(CLASSES), STEPS)
    text = rng.choice([each for each in range(CLASSES) if each != blank], length)
    # sums of at most 3**5 products of 5 factors below 1, each rounded to 2**-53
    assert likelihood(rows, text, blank) == pytest.approx(by_paths(rows, text.tolist(), blank), abs=3**5 * 6 * 2**-53)


def scored(best: list[int], other: int = 3) -> npt.NDArray[np.float64]:
    """Rows with p = 0.7 for the best class of each step."""
    return np.full((len(best), other + 1), 0.1)[None] + 0.6 * np.eye(other + 1)[best][None]


def test_a_text_loses_the_difference_of_likelihoods() -> None:
    expected = np.array([[0, 1, 1, 0, 2]])
    rows = scored(expected[0].tolist())
    earlier, another = np.array([[0, 0, 1, 0, 2]]), np.array([[0, 0, 1, 0, 3]])
    assert text_losses(rows, expected, earlier, IMAGE) == [0.0]
    loss = likelihood(rows[0], np.array([1, 2]), 0) - likelihood(rows[0], np.array([1, 3]), 0)
    assert text_losses(rows, expected, another, IMAGE) == [loss]
    assert 0 < loss < 0.5


def test_steps_may_come_before_items() -> None:
    expected, actual = np.array([[0, 1, 1, 0, 2]]), np.array([[0, 0, 1, 0, 3]])
    rows = scored(expected[0].tolist())
    first = text_losses(rows.swapaxes(0, 1), expected.T, actual.T, IMAGE)
    assert first == text_losses(rows, expected, actual, IMAGE)


@pytest.mark.parametrize(
    ("best", "feed"),
    [
        ([0, 0, 0, 0, 0, 0], {}),  # nothing is written
        ([1, 2, 1, 2, 0, 1], {}),  # hardly any blank
        ([0, 0, 0, 1, 1, 1, 1, 0, 0, 0], {}),  # a detector of speech: one long run
        ([0, 1, 0, 0, 2, 0], {"ids": np.zeros((1, 6), np.int64)}),  # a class for each token
    ],
)
def test_other_sequences_are_no_texts(best: list[int], feed: dict[str, npt.NDArray[np.int64]]) -> None:
    found = text_losses(scored(best), np.array([best]), np.array([best]), Sample({**IMAGE.feed, **feed}, None, ""))
    assert found is None

"""Scores of the next token, and the promise about their distribution."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.calibration.data.samples import Sample
from requant.calibration.model.session import Array
from requant.quantize.accuracy.outputs import compare_outputs
from requant.quantize.accuracy.promise import promise
from requant.quantize.accuracy.tokens import Divergence, divergence

TOKENS = np.array([[1, 5, 9, 3]], np.int64)
VOCABULARY = 10


def logits(seed: int) -> Array:
    return np.random.default_rng(seed).normal(0, 2, (1, 4, VOCABULARY)).astype(np.float32)


def softmax(scores: Array) -> Array:
    exact = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    return np.asarray(exact / exact.sum(axis=-1, keepdims=True))


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(0, 3), st.floats(-50, 50))
def test_the_divergence_is_that_of_the_definition(seed: int, noise: float, shift: float) -> None:
    exact = logits(seed)
    other = (exact + noise * logits(seed + 1)).astype(np.float32)
    p, q = softmax(exact), softmax(other)
    wanted = float((p * np.log(p / q)).sum())
    assert divergence(exact, other) == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    assert divergence(exact, other + np.float32(shift)) == pytest.approx(wanted, abs=1e-3)  # float32 rounds the shift
    assert divergence(exact, exact) == 0.0


def test_probabilities_are_no_logits() -> None:
    p, q = np.array([[[0.5, 0.5, 0.0]]], np.float32), np.array([[[0.25, 0.5, 0.25]]], np.float32)
    assert divergence(p, q) == pytest.approx(0.5 * math.log(2))
    lost = 0.25 * (math.log(0.25) - math.log(np.finfo(np.float32).smallest_normal))
    assert divergence(q, p) == pytest.approx(0.25 * math.log(0.5) + lost)  # no probability of a Softmax is 0


def test_a_probability_that_float16_cannot_hold_is_not_infinitely_wrong() -> None:
    """Softmax in float16 writes 0 for what is less than 6e-8."""
    p, q = np.array([[[1.0, 1e-7]]], np.float16), np.array([[[1.0, 0.0]]], np.float16)
    assert divergence(p, q) == divergence(q, p) == 0.0
    p = np.array([[[0.99, 0.01]]], np.float16)
    assert divergence(p, q) == pytest.approx(0.01 * math.log(0.01 / 6.1035e-5) + 0.99 * math.log(0.99), rel=0.01)
    assert divergence(p, np.full_like(p, np.nan)) == math.inf


@pytest.mark.parametrize(
    ("feed", "shape", "found"),
    [
        ({"ids": TOKENS}, (1, 4, VOCABULARY), "y"),
        ({"mask": np.ones((1, 4), np.int64), "ids": TOKENS}, (1, 4, VOCABULARY), "y"),
        ({"ids": TOKENS}, (1, 4, 9), ""),  # a token has no score
        ({"ids": TOKENS}, (1, 5, VOCABULARY), ""),
        ({"ids": TOKENS}, (4, VOCABULARY), ""),
        ({"ids": TOKENS.astype(np.float32)}, (1, 4, VOCABULARY), ""),
        ({"ids": -TOKENS}, (1, 4, VOCABULARY), ""),
        ({"mask": np.ones((1, 4), np.int64)}, (1, 4, VOCABULARY), ""),  # zeros and ones are a mask
    ],
)
def test_scores_of_tokens_are_known_by_the_input(feed: dict[str, Array], shape: tuple[int, ...], found: str) -> None:
    scores = np.zeros(shape, np.float32)
    scores[..., 3] = 8
    assert Divergence().with_sample({"y": scores}, {"y": scores}, Sample(feed, None, "here")).output == found


@pytest.mark.parametrize("ended", [np.tanh, lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)])
def test_hidden_states_are_no_scores_of_tokens(ended: Callable[[Array], Array]) -> None:
    """An encoder of a few symbols has states as wide as a vocabulary."""
    states = ended(np.random.default_rng(0).normal(0, 3, (1, 4, 256)).astype(np.float32))
    assert Divergence().with_sample({"y": states}, {"y": states}, Sample({"ids": TOKENS}, None, "here")) == Divergence()


@pytest.mark.parametrize(("noise", "kept"), [(0.05, True), (0.2, False)])
def test_the_perplexity_judges_a_language_model(noise: float, kept: bool) -> None:
    exact = [logits(seed) for seed in range(50)]
    other = [each + np.float32(noise) * logits(seed + 100) / 2 for seed, each in enumerate(exact)]
    found = compare_outputs(
        ({"y": one}, {"y": two}, Sample({"ids": TOKENS}, None, "here")) for one, two in zip(exact, other, strict=True)
    )
    nats = float(np.mean([divergence(one, two) / 4 for one, two in zip(exact, other, strict=True)]))
    assert found.divergence == pytest.approx(nats)
    judged = promise(found)
    assert (judged.judge, judged.kept) == ("perplexity", kept)
    assert judged.text == f"perplexity +{math.expm1(nats):.2%} on text of the float model's own, 0.30% are allowed"
    assert judged.excess == pytest.approx(nats / math.log(1.003))


@pytest.mark.parametrize("order", [1, -1])
def test_one_token_without_a_score_says_that_no_sample_has_scores_of_tokens(order: int) -> None:
    """A tagger of characters: words of the first letters only have more classes than tokens."""
    words = [np.array([[1, 5, 9, 3]]), np.array([[1, 5, 12, 3]]), np.array([[2, 2, 4, 3]])][::order]
    found = Divergence()
    for seed, word in enumerate(words):
        sample = Sample({"letters": word}, None, "here")
        found = found.with_sample({"y": logits(seed)}, {"y": logits(seed + 10)}, sample)
    assert found.mean is None


def test_positions_beyond_the_vocabulary_leave_the_tokens_their_scores() -> None:
    found = Divergence()
    for last in (9, 3, 40):
        feed = {"positions": np.array([[0, 1, 2, last]]), "ids": TOKENS}
        found = found.with_sample({"y": logits(last)}, {"y": logits(last)}, Sample(feed, None, "here"))
    assert (found.mean, found.predictions) == (0.0, 12)
    assert found.scored == {"positions", "ids"}

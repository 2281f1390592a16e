"""Scores of the next token, and the promise about their distribution."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.calibration.samples import Sample
from requant.quantize.accuracy.classes import Array
from requant.quantize.accuracy.outputs import compare_outputs
from requant.quantize.accuracy.promise import promise
from requant.quantize.accuracy.tokens import divergence, token_scores

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
    assert divergence(q, p) == math.inf  # the second model gives 0 to what the first one writes


@pytest.mark.parametrize(
    ("feed", "shape", "found"),
    [
        ({"ids": TOKENS}, (1, 4, VOCABULARY), "y"),
        ({"mask": np.ones((1, 4), np.int64), "ids": TOKENS}, (1, 4, VOCABULARY), "y"),
        ({"ids": TOKENS}, (1, 4, 9), None),  # a token has no score
        ({"ids": TOKENS}, (1, 5, VOCABULARY), None),
        ({"ids": TOKENS}, (4, VOCABULARY), None),
        ({"ids": TOKENS.astype(np.float32)}, (1, 4, VOCABULARY), None),
        ({"ids": -TOKENS}, (1, 4, VOCABULARY), None),
        ({"mask": np.ones((1, 4), np.int64)}, (1, 4, VOCABULARY), None),  # zeros and ones are a mask
    ],
)
def test_scores_of_tokens_are_known_by_the_input(
    feed: dict[str, Array], shape: tuple[int, ...], found: str | None
) -> None:
    scores = np.zeros(shape, np.float32)
    scores[..., 3] = 8
    assert token_scores({"y": scores}, Sample(feed, None, "here")) == found


@pytest.mark.parametrize("ended", [np.tanh, lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)])
def test_hidden_states_are_no_scores_of_tokens(ended: Callable[[Array], Array]) -> None:
    """An encoder of a few symbols has states as wide as a vocabulary."""
    states = ended(np.random.default_rng(0).normal(0, 3, (1, 4, 256)).astype(np.float32))
    assert token_scores({"y": states}, Sample({"ids": TOKENS}, None, "here")) is None


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
    assert judged.text == f"perplexity +{math.expm1(nats):.2%} on text of the float model's own, 0.50% are allowed"
    assert judged.excess == pytest.approx(nats / math.log(1.005))

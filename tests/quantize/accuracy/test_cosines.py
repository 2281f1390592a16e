"""The cosines between the vectors of two models, for outputs that have a vector for each item."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.calibration import Sample
from requant.calibration.model.session import Array
from requant.quantize.accuracy.cosines import Cosines
from requant.quantize.accuracy.output_kinds import with_sigmoids
from requant.quantize.accuracy.outputs import Accuracy, accuracy_json, measure
from requant.quantize.accuracy.verdict import accuracy_rows

RANDOM = np.random.default_rng(3)
HERE = Sample({"x": np.zeros((2, 3), np.float32)}, None, "here")


def compared(vectors: Array, noise: Array, label: int | None = None) -> Accuracy:
    """Compare vectors (n, D) with vectors that differ by `noise`, each in a sample of its own."""
    data = {"x": vectors, "noise": noise}

    def before(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": feed["x"]}

    def after(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": feed["x"] + feed["noise"]}

    rows = ({name: array[place : place + 1] for name, array in data.items()} for place in range(len(vectors)))
    return measure(before, after, (Sample(feed, label, f"image {place}") for place, feed in enumerate(rows)))


@given(st.integers(0, 10**6))
def test_the_mean_and_the_worst_are_those_of_the_definition(seed: int) -> None:
    exact, other = np.random.default_rng(seed).normal(size=(2, 2, 20)).astype(np.float32)
    found = Cosines().with_sample(exact, other, HERE).with_sample(exact, exact, replace(HERE, where="there"))
    each = (exact * other).sum(axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(other, axis=1)
    assert found.vectors == 4
    np.testing.assert_allclose([found.mean, found.worst], [(each.sum() + 2) / 4, each.min()], rtol=0, atol=1e-6)
    assert found.where == "here"


def test_a_short_vector_counts_as_much_as_a_long_one() -> None:
    vectors = RANDOM.normal(size=(8, 32)).astype(np.float32)
    noise = np.zeros_like(vectors)
    vectors[5] /= 100
    noise[5] = vectors[5][::-1]
    found = compared(vectors, noise)
    assert found.worst_sample is None or found.worst_sqnr_db > 20
    cosine = found.cosines["y"]
    assert (cosine.where, cosine.vectors) == ("image 5", 8)
    assert cosine.worst < 0.95 < cosine.mean
    rows = [value for name, value in accuracy_rows(found, "data") if name == "cosine"]
    assert rows == [f"mean {cosine.mean:.4f}, worst {cosine.worst:.4f} at y (data): image 5"]
    told = json.loads(json.dumps(accuracy_json(found)["cosine_by_output"]))["y"]
    assert told == {"vectors": 8, "mean": cosine.mean, "worst": cosine.worst, "where": "image 5"}


def test_nan_has_the_least_cosine() -> None:
    exact = RANDOM.normal(size=(2, 20)).astype(np.float32)
    assert Cosines().with_sample(exact, np.full_like(exact, np.nan), HERE).worst == -1.0


@pytest.mark.parametrize(
    "shape", [(2, 4), (2, 5, 20), (3, 20), (20,)], ids=["quantities", "tokens", "another number of rows", "a row"]
)
def test_outputs_without_a_vector_for_each_item_have_none(shape: tuple[int, ...]) -> None:
    exact = RANDOM.normal(size=shape).astype(np.float32)
    found = Cosines().with_sample(exact, exact, HERE)
    assert (found.vectors, found.even) == (0, False)
    vectors = RANDOM.normal(size=(2, 20)).astype(np.float32)
    assert not found.with_sample(vectors, vectors, HERE).vectors


def test_probabilities_classes_and_a_sigmoid_have_none() -> None:
    logits = 30 * np.eye(20, dtype=np.float32) - 5
    assert not compared(logits, np.zeros_like(logits)).cosines  # far from chance: scores of classes
    assert not compared(np.eye(20, dtype=np.float32), np.zeros_like(logits)).cosines  # probabilities
    labelled = compared(RANDOM.normal(size=(8, 20)).astype(np.float32) / 100, np.zeros((8, 20), np.float32), 3)
    assert not labelled.cosines
    vectors = compared(RANDOM.normal(size=(8, 20)).astype(np.float32), np.zeros((8, 20), np.float32))
    assert vectors.cosines
    assert not with_sigmoids(vectors, {"y"}).cosines

"""Coordinates are no scores per class: their columns differ more than the items do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.calibration import Sample
from requant.calibration.model.session import Array
from requant.quantize.accuracy.classes import FEWEST, Outputs
from requant.quantize.accuracy.columns import FIXED, Columns
from requant.quantize.accuracy.outputs import Accuracy, compare_outputs
from requant.quantize.accuracy.promise import promise
from requant.quantize.accuracy.verdict import accuracy_rows, answers_lost


def landmarks(items: int, points: int = 21, seed: int = 0) -> Array:
    """Return points (x, y, z) around a mean shape, which move together; two of them are the highest by turns."""
    random = np.random.default_rng(seed)
    shape = random.uniform(-40, 190, (points, 3))
    shape[3, 1] = shape[7, 1] = 200.0
    moved = shape + random.normal(0, 12, (items, 1, 3)) + random.normal(0, 8, (items, points, 3))
    return moved.reshape(items, -1).astype(np.float32)


def logits(items: int, classes: int = 10, seed: int = 0) -> Array:
    """Return scores with a large one at a random class."""
    random = np.random.default_rng(seed)
    rows = random.normal(0, 1.5, (items, classes))
    rows[np.arange(items), random.integers(classes, size=items)] += 6
    return rows.astype(np.float32)


def compared(*samples: Outputs) -> Accuracy:
    """Compare outputs with the same ones with a little noise, each item a sample."""
    random = np.random.default_rng(5)
    noisy = [{k: v + random.normal(0, 0.3, v.shape).astype(np.float32) for k, v in each.items()} for each in samples]
    return compare_outputs(
        (before, after, Sample({"x": np.zeros((1, 4))}, None, "here"))
        for before, after in zip(samples, noisy, strict=True)
    )


def items(**outputs: Array) -> list[Outputs]:
    """Return the outputs of each item."""
    return [
        dict(zip(outputs, (each[None] for each in row), strict=True)) for row in zip(*outputs.values(), strict=True)
    ]


def test_landmarks_are_judged_by_sqnr() -> None:
    rows = landmarks(32)
    assert 0.3 < np.bincount(rows.argmax(1)).max() / 32 < 0.98  # the greatest value is not always the same one
    found = compared(*items(points=rows))
    assert found.class_output == ""
    assert promise(found).judge == "SQNR"
    assert answers_lost(found, "here").startswith("SQNR")
    assert not {name for name, _ in accuracy_rows(found, "here")} & {"top-1 agreement", "predicted drop"}


def test_two_outputs_of_landmarks_are_no_heads_of_classes() -> None:
    """One value of the first is always the greatest, but not of both together."""
    found = compared(*items(screen=landmarks(16) + np.eye(63, dtype=np.float32)[1] * 300, world=landmarks(16, seed=1)))
    assert found.class_output == ""
    assert promise(found).judge == "SQNR"


def gated(x: Array, of: str) -> Array:
    """Return an embedding: rows behind an activation."""
    inner = np.clip(x / 6 + 0.5, 0, 1) if of == "HardSwish" else 1 / (1 + np.exp(-x * (1.702 if of == "Gelu" else 1)))
    return (x * inner).astype(np.float32)


@pytest.mark.parametrize("of", ["Gelu", "Silu", "HardSwish"])
@pytest.mark.parametrize("count", [FEWEST - 1, FEWEST])
def test_an_embedding_behind_an_activation_is_judged_by_sqnr(of: str, count: int) -> None:
    """Its rows are far from chance when read as logits: the headline counted 0 of 48 changed answers."""
    rows = gated(logits(count, classes=32), of)
    assert rows.min() < 0
    found = compared(*items(s=logits(count, classes=1)[:, 0], z=rows))
    many = count >= FEWEST
    assert found.class_output == ("" if many else "z")
    assert promise(found).judge == "SQNR" if many else found.scores is not None
    assert answers_lost(found, "here").startswith("SQNR") or not many


def test_logits_of_many_items_go_below_any_activation() -> None:
    rows = gated(logits(FEWEST, classes=32), "HardSwish")
    rows[3, 5] = -0.4
    assert compared(*items(z=rows)).class_output == "z"


def test_logits_are_scores_per_class() -> None:
    found = compared(*items(y=logits(32)))
    assert found.class_output == "y"
    assert promise(found).judge == "class scores"


def test_a_head_with_one_class_leaves_the_others_what_they_are() -> None:
    """The last sign of a plate is the blank in all the data."""
    blank = logits(16)
    blank[:, 0] += 20
    found = compared(*items(first=logits(16, seed=1), second=logits(16, seed=2), last=blank))
    assert found.class_output == "first"
    assert found.predictions == 48


@pytest.mark.parametrize("count", [FEWEST - 1, FEWEST])
def test_few_items_tell_no_means(count: int) -> None:
    assert compared(*items(points=landmarks(count))).class_output == ("points" if count < FEWEST else "")


def test_with_labels_they_are_classes() -> None:
    rows = landmarks(32)
    sample = Sample({"x": rows}, rows.argmax(1), "here")
    assert compare_outputs([({"y": rows}, {"y": rows}, sample)]).class_output == "y"


@given(st.integers(2, 40), st.integers(2, 9), st.floats(0.1, 10), st.floats(-100, 100), st.integers(0, 99))
def test_the_share_is_that_of_the_definition(rows: int, width: int, scale: float, shift: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(0, scale, (rows, width)) + random.normal(0, 1, width) + random.normal(0, 3, (rows, 1))
    centred = values - values.mean(1, keepdims=True)
    between, within = (centred.mean(0) ** 2).mean(), centred.var(0, ddof=1).mean()
    parts = Columns().with_rows(values[:1]).with_rows(values[1:])
    assert parts.share == pytest.approx(between / (between + within), rel=1e-6)
    assert Columns().with_rows(values + shift).share == pytest.approx(parts.share, rel=1e-6)


def test_what_is_unknown_says_nothing() -> None:
    row = np.array([[1.0, 5.0]])
    assert Columns().share == Columns().with_rows(row).share == 0.0
    of_two_lengths = Columns().with_rows(row).with_rows(row).with_rows(np.ones((1, 3)))
    for unknown in (Columns().with_rows(np.ones((3, 2))), Columns().with_rows(row * np.inf), of_two_lengths):
        assert not unknown.share > FIXED
    assert Columns().with_rows(np.repeat(row, 4, axis=0)).share == 1.0

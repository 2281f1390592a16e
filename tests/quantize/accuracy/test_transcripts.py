"""Which sequences of classes are texts, and what a changed text costs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from requant.calibration.data.samples import Sample
from requant.quantize.accuracy.transcripts import text_losses

IMAGE = Sample({"x": np.zeros((1, 3, 8, 8), np.float32)}, None, "")
CLASSES = 4


def found(best: list[int], actual: list[int], sample: Sample = IMAGE, *, steps_first: bool = False) -> object:
    """What a text of one item costs, if each changed step loses 0.6."""
    one, two = np.array([best]), np.array([actual])
    losses = np.where(one == two, 0.0, 0.6)
    if steps_first:
        losses, one, two = losses.T, one.T, two.T
    return text_losses(losses, one, two, CLASSES, sample)


@pytest.mark.parametrize("steps_first", [False, True])
def test_a_text_that_is_the_same_loses_nothing(steps_first: bool) -> None:
    assert found([0, 1, 1, 0, 2], [0, 0, 1, 0, 2], steps_first=steps_first) == [0.0]
    assert found([0, 1, 1, 0, 2], [0, 0, 1, 0, 3], steps_first=steps_first) == [pytest.approx(1 - (1 - 0.6) ** 2)]


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
    assert found(best, best, Sample({**IMAGE.feed, **feed}, None, "")) is None

"""Several outputs that classify side by side: which they are, and what their labels must be."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from requant import RequantError
from requant.calibration.data.samples import Sample
from requant.quantize.accuracy.labels import check_label
from requant.quantize.accuracy.outputs import compare_outputs
from requant.quantize.accuracy.verdict import accuracy_rows

from ...accuracies import changed, scores_of

SPELLED = {"a": (8, 5), "b": (8, 5), "c": (8, 6)}
"""Characters, the last of which may be missing."""


@pytest.mark.parametrize(
    ("shapes", "labelled", "heads", "left_out"),
    [
        (SPELLED, False, "abc", ()),
        (SPELLED, True, "abc", ()),
        ({**SPELLED, "features": (8, 64)}, False, "abc", ("features",)),
        ({"scores": (8, 5), "features": (8, 6)}, False, "s", ("features",)),
        ({"scores": (8, 5), "each": (8, 3, 6)}, False, "s", ()),
    ],
    ids=["spelled", "labelled", "features beside heads", "features", "another rank"],
)
def test_heads_may_have_different_numbers_of_classes(
    shapes: dict[str, tuple[int, ...]], labelled: bool, heads: str, left_out: tuple[str, ...]
) -> None:
    """An output of logits that may be something else beside the classes is named."""
    rng = np.random.default_rng(0)
    before = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    after = {**before, [*before][len(heads) - 1]: rng.normal(size=shapes[[*before][len(heads) - 1]])}
    labels = np.stack([before[name].argmax(-1) for name in heads], axis=1) if labelled else None
    sample = Sample({"x": np.zeros((8, 5))}, labels, "here")
    found = compare_outputs([(before, after, sample)])
    assert (found.predictions, scores_of(found).items, scores_of(found).left_out) == (8 * len(heads), 8, left_out)
    assert 0 < found.changed <= 8  # the last head
    row = dict(accuracy_rows(changed(found, confidence=1.0), "data"))["top-1 agreement"]
    assert row.endswith("; classes of features are not counted") is bool(left_out)
    assert not check_label(before, sample)


def test_heads_of_probabilities_may_have_any_number_of_classes() -> None:
    """A boy or a girl, and the years; chance is right for one in four."""
    before = {"sex": np.full((8, 2), 0.5), "years": np.full((8, 100), 0.01)}
    found = compare_outputs([(before, before, Sample({"x": np.zeros((8, 5))}, None, "here"))])
    assert (found.predictions, scores_of(found).classes) == (16, 4)


def test_a_label_must_be_a_class_of_its_own_head() -> None:
    before = {name: np.zeros(shape) for name, shape in SPELLED.items()}
    for labels, text in (([4, 4, 5], ""), ([4, 5, 4], "label 5, but the output has 5 classes")):
        sample = Sample({"x": np.zeros((8, 5))}, np.tile(labels, (8, 1)), "here")
        with pytest.raises(RequantError, match=text) if text else nullcontext():
            check_label(before, sample)
        with pytest.raises(RequantError, match=text) if text else nullcontext():
            compare_outputs([(before, before, sample)])

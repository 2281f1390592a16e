"""Accuracies for tests, with some of their fields changed."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from requant.quantize.accuracy.class_scores import ClassScores
from requant.quantize.accuracy.outputs import Accuracy

OF_SCORES = {each.name for each in fields(ClassScores)}


def changed(accuracy: Accuracy, **values: Any) -> Accuracy:
    """Return an accuracy with other values of its fields, and of those of its class scores."""
    scores = {name: value for name, value in values.items() if name in OF_SCORES}
    own = {name: value for name, value in values.items() if name not in OF_SCORES}
    return replace(accuracy, **own, scores=replace(scores_of(accuracy), **scores))


def scores_of(accuracy: Accuracy) -> ClassScores:
    """Return the class scores of an accuracy that has some."""
    assert accuracy.scores is not None
    return accuracy.scores


def classes_of(accuracy: Accuracy) -> int:
    """Return the number of classes; 0 if no output holds scores per class."""
    return 0 if accuracy.scores is None else accuracy.scores.classes

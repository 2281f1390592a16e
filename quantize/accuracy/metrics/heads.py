"""Metrics of classes for models with several heads: each is scored, and the first one that the labels fit counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ....calibration.model.session import Array
from ..classes import Outputs, candidates
from .metric import Metric

Heads: TypeAlias = Mapping[str, tuple[Array, "Array | None"]]
"""The contributions and the rows of each head that all labels so far fit, by the name of its output, in order."""


def heads_for(metric: Metric, outputs: Outputs) -> list[str]:
    """Return the outputs that a metric of classes may judge; empty if there is no choice."""
    found = list(candidates(outputs)) if metric.heads else []
    return found if len(found) > 1 else []


def common_heads(heads: Sequence[Heads]) -> list[str]:
    """Return the heads that fit the labels of all parts of the data, in the order of the first part."""
    return [name for name in heads[0] if all(name in each for each in heads)] if heads else []


def head_note(metric: Metric, fitting: Sequence[str]) -> str:
    """Return which head is judged, and how to judge another one that the labels fit.

    >>> head_note(Metric(name="top1", value=float), ["age", "mood"])
    "top1 judges 'age'; the labels fit 'mood' too: --metric top1:FILE.py:NAME judges what your function returns"
    """
    judged, *others = fitting
    more = f"; the labels fit {', '.join(map(repr, others))} too: --metric {metric.name}:FILE.py:NAME judges what your "
    return f"{metric.name} judges {judged!r}" + (f"{more}function returns" if others else "")

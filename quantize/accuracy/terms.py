"""On what terms the outputs of two models are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Misfits: TypeAlias = Literal["refuse", "skip"]
"""What becomes of labels that do not fit the predictions: they raise, or do not count."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a comparison knows beside the outputs.

    Attributes:
        labels: What becomes of labels that do not fit the predictions.
        probabilities: The outputs whose values are probabilities, see `probability_outputs`.
    """

    labels: Misfits = "refuse"
    probabilities: frozenset[str] = frozenset()


USUAL = Terms()
"""Labels must fit, and no output is known to hold probabilities."""

"""The cosines between the vectors of two models: what a search by embeddings compares, whatever their lengths.

An SQNR weighs each sample by the signal of all: it says little of a vector that is shorter or longer than the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...calibration.data.samples import Sample
from ...calibration.model.session import Array
from .classes import ROWS, are_probabilities, items_of
from .metrics.vectors import cosine_of_rows
from .sqnr import finite

SHORTEST = 16
"""The least number of values of a vector: fewer are quantities, such as the sides of a box."""


@dataclass(frozen=True, slots=True)
class Cosines:
    """The cosines of an output that has a vector for each item.

    Attributes:
        vectors: The number of vectors; 0 if the output is no such output in a sample.
        total: The sum of the cosines.
        worst: The least cosine.
        where: The sample with the least cosine.
        even: Whether the output has been such an output in each sample.
    """

    vectors: int = 0
    total: float = 0.0
    worst: float = 1.0
    where: str = ""
    even: bool = True

    def with_sample(self, exact: Array, other: Array, sample: Sample) -> Cosines:
        """Return the cosines with one more sample added; without any from the first sample on that has no vectors.

        Args:
            exact: The output of the float model; vectors have the shape (N, D) for the N items of the sample.
            other: The output of the INT8 model.
            sample: The sample.
        """
        vectors = exact.ndim == ROWS and len(exact) == items_of(sample) and exact.shape[1] >= SHORTEST
        if not self.even or not vectors or exact.shape != other.shape or are_probabilities(exact):
            return Cosines(even=False)
        found = cosine_of_rows(exact, other)
        least = float(found.min(initial=1.0))
        added = replace(self, vectors=self.vectors + len(found), total=self.total + float(found.sum()))
        lower = not self.where or least < self.worst
        return replace(added, worst=least, where=sample.where) if lower else added

    @property
    def mean(self) -> float:
        """The mean cosine, -1..1; 1 without vectors."""
        return self.total / self.vectors if self.vectors else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"vectors": self.vectors, "mean": finite(self.mean), "worst": finite(self.worst), "where": self.where}

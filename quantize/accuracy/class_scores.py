"""What the scores per class of two models tell without labels: how many predictions are equal, and what they lose."""

from __future__ import annotations

from dataclasses import dataclass

from .classes import Interval

SURE = 1 / 3
"""The least confidence for a predicted drop, from chance (0) to certainty (1). Near chance, all classes have nearly the
same probability, so that any change of class costs nearly nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassScores:
    """The predictions of a float and an INT8 model, on the output that holds scores per class.

    Attributes:
        output: The name of the output.
        classes: The number of classes; of outputs with different numbers their harmonic mean.
        predictions: The number of predictions.
        agreement: The share of equal top-1 predictions, 0..1.
        predicted_drop: The drop of top-1 accuracy that follows from the float model's probabilities, -1..1: the mean of
            p(class of the float model) - p(class of the INT8 model). It needs no labels.
        items: The number of items.
        whole_drop: The predicted drop of whole items: a sequence counts as right if each of its predictions is.
        whole_interval: The 95 % confidence interval of `whole_drop`, for other data of the same kind.
        confidence: The mean of p(class of the float model), 0..1.
        maps: Whether an item has a map of predictions, as in segmentation.
        sound: Whether labels say so, or its rows are probabilities; if not, it may be an embedding.
        left_out: The outputs that may hold scores per class too, but whose classes are not counted.
    """

    output: str
    classes: int
    predictions: int
    agreement: float
    predicted_drop: float
    items: int
    whole_drop: float
    whole_interval: Interval
    confidence: float
    maps: bool = False
    sound: bool = True
    left_out: tuple[str, ...] = ()

    @property
    def changed(self) -> int:
        """The number of predictions that differ."""
        return self.predictions - round(self.agreement * self.predictions)

    @property
    def sure(self) -> bool:
        """Whether the float model's classes are far enough from chance; an embedding, read as scores, is near it."""
        chance = 1 / self.classes
        return self.confidence >= chance + SURE * (1 - chance)

    @property
    def of_items(self) -> bool:
        """Whether each item has one prediction."""
        return self.predictions == self.items

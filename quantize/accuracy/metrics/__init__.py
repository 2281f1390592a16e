"""Metrics by name, and the score of a model in a metric over data."""

from .named import METRICS, Metric, area, metric_named, mid_ranks, of_probabilities
from .remote import can_distribute, score_with
from .scoring import Reference, Score, Scorer, by_row, check_label, fitted, join, of_reference, score

__all__ = [
    "METRICS",
    "Metric",
    "Reference",
    "Score",
    "Scorer",
    "area",
    "by_row",
    "can_distribute",
    "check_label",
    "fitted",
    "join",
    "metric_named",
    "mid_ranks",
    "of_probabilities",
    "of_reference",
    "score",
    "score_with",
]

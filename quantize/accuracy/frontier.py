"""The models that a search has tried, by speed and score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Point:
    """A model that a search has tried.

    Attributes:
        price: The price of all noise, as a share of the float model's run time.
        value: The score; the worst one if there is none.
        speedup: How many times faster than the float model; 0 if it does not run, or the metric fails on its outputs.
        int8_units: Units that compute in integers.
        kept: Whether it keeps the bar.
        digest: The digest of its plan; equal plans are tried once.
    """

    price: float
    value: float
    speedup: float
    int8_units: int
    kept: bool
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return the point as plain JSON values; numbers that are not finite are null."""
        return {name: None if value in (math.inf, -math.inf) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Frontier:
    """The models that a search has tried.

    Attributes:
        metric: The name of the metric.
        higher_is_better: Whether a higher score is better.
        before: The float model's score.
        bar: The score that a model must keep.
        points: All models that were tried, the fastest first.
        best: The fastest model that keeps the bar; None where only the float model keeps it.
        seconds: The duration of the search.
        done: Whether the search ended before its time was up.
        same_data: The share of the evaluation data that is calibration data too, 0..1.
        interrupted: Whether the user interrupted it.
        unit: The unit of the metric, see `Metric`.
    """

    metric: str
    higher_is_better: bool
    before: float
    bar: float
    points: tuple[Point, ...] = ()
    best: Point | None = None
    seconds: float = 0.0
    done: bool = True
    same_data: float = 0.0
    interrupted: bool = False
    unit: str = ""

    @property
    def frontier(self) -> tuple[Point, ...]:
        """The points for which no other point is both faster and better, the fastest first."""
        return undominated(self.scored, higher=self.higher_is_better)

    @property
    def scored(self) -> tuple[Point, ...]:
        """The models that run and have a score."""
        return tuple(point for point in self.points if point.speedup > 0)

    @property
    def most_accurate(self) -> Point | None:
        """The point with the best score; None where no model was scored."""
        return max(self.scored, key=lambda point: point.value if self.higher_is_better else -point.value, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the search as plain JSON values."""
        return {
            "metric": self.metric,
            "float": self.before if math.isfinite(self.before) else None,
            "bar": self.bar if math.isfinite(self.bar) else None,
            "reached": self.best is not None,
            "best": self.best and self.best.to_json(),
            "frontier": [point.to_json() for point in self.frontier],
            "tried": [point.to_json() for point in self.points],
            "seconds": self.seconds,
            "done": self.done,
            "same_data": self.same_data,
        }


def undominated(points: Sequence[Point], *, higher: bool) -> tuple[Point, ...]:
    """Return the points that no other point dominates in speed and score, the fastest first."""
    found: list[Point] = []
    sign = 1.0 if higher else -1.0
    for point in sorted(points, key=lambda each: (-each.speedup, -sign * each.value)):
        if not found or sign * point.value > sign * found[-1].value:
            found.append(point)
    return tuple(found)

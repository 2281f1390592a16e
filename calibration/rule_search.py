"""The search for the range that makes an objective least, from coarse to fine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TypeAlias

import numpy as np

from .histogram import Histogram
from .precision import Precision
from .session import Array

Objective: TypeAlias = Callable[[Array, Array], Array]
"""From the lower ends, (n,), and the upper ends, (n,), of n ranges to what is to be small, (n,)."""
BOTH = 16
"""Places per end in the first, coarse round where both ends are free."""
NEAR = (-2, -1, 0, 1, 2)
"""Places per end in a round of refinement, three times as close as in the round before."""
FEW = 16
"""Places that the objective itself is asked for in the coarse round where there is something rougher."""
HOPELESS = 2.0
"""Refinement, which moves an end by some per cent, does not make up for an objective that is so many times the best."""


@dataclass(frozen=True, slots=True)
class Places:
    """Which ranges are looked at.

    Attributes:
        octaves: How far, in octaves below the extremes, the coarse round goes.
        alone: Places in the coarse round where one end or magnitude is free.
        fine: Refinement ends where places are closer than so many octaves.
    """

    octaves: float
    alone: int
    fine: float


@dataclass(frozen=True, slots=True)
class _Family:
    """Ranges whose ends move with one factor or two.

    Attributes:
        low: The lower end where the factor is 1, and which factor moves it; None for none.
        high: The same of the upper end.
    """

    low: tuple[float, int | None]
    high: tuple[float, int | None]

    @property
    def axes(self) -> int:
        """How many factors there are."""
        return 2 if (self.low[1], self.high[1]) == (0, 1) else 1

    def ends(self, factors: Array, lo: float, hi: float) -> tuple[Array, Array]:
        """Return the ends, (n,) each, within ``[lo, hi]`` for factors of shape (n, axes) in 0..1."""
        low, high = (
            np.full(len(factors), end) if axis is None else end * factors[:, axis]
            for end, axis in (self.low, self.high)
        )
        return np.clip(low, lo, hi) + 0.0, np.clip(high, lo, hi) + 0.0  # + 0.0 turns -0.0 into 0.0


def least(
    histogram: Histogram,
    precision: Precision,
    objective: Objective,
    rough: Objective,
    places: Places,
) -> tuple[float, float]:
    """Return the range within the extremes that has the least objective of those that were looked at.

    The ends are the extremes times powers of two of fractions, so that a power of two on the data is one on the
    range, exactly. Of equal ranges the first wins, and the extremes themselves come first.

    Args:
        histogram: The values.
        precision: Asymmetric, both ends are free where there are values on both sides of zero. Symmetric, one
            magnitude is; or else the upper end alone, with all below zero cut off, which frees half of the integers.
        objective: What is to be small; infinite for a range that is not wanted.
        rough: What stands for the objective in the coarse round, to choose the few ranges that are looked at.
        places: Which ranges to look at.
    """
    lo, hi = histogram.lo, histogram.hi
    best, value = (lo, hi), math.inf
    for family in _families(lo, hi, precision):
        count = BOTH if family.axes == 2 else places.alone
        step = places.octaves / (count - 1)
        cuts = step * _grid(range(count), family.axes)
        promising = np.argsort(rough(*family.ends(np.exp2(-cuts), lo, hi)), kind="stable")[:FEW]
        cuts = cuts[np.union1d(promising, 0)]  # the extremes, whatever `rough` makes of them
        at, reached = cuts[0], math.inf
        while True:
            low, high = family.ends(np.exp2(-cuts), lo, hi)
            found = objective(low, high)
            first = int(np.argmin(found))
            if found[first] < reached:
                reached, at = float(found[first]), cuts[first]
                if reached < value:
                    value, best = reached, (float(low[first]), float(high[first]))
            if step < places.fine or reached > HOPELESS * value:
                break
            step /= 3
            cuts = np.maximum(at + step * _grid(NEAR, family.axes), 0.0)
    return best


@cache
def _grid(places: Sequence[int], axes: int) -> Array:
    """Return all combinations of places, (n, axes), that of the first ones first."""
    return np.array(list(product(places, repeat=axes)))


def _families(lo: float, hi: float, precision: Precision) -> list[_Family]:
    """Return what there is to search between the extremes."""
    if lo >= 0.0:
        return [_Family((lo, None), (hi, 0))]
    if precision.symmetric:
        reach = max(-lo, hi)
        return [_Family((-reach, 0), (reach, 0)), *([_Family((0.0, None), (hi, 0))] if hi > 0.0 else [])]
    if hi <= 0.0:
        return [_Family((lo, 0), (hi, None))]
    return [_Family((lo, 0), (hi, 1))]

"""The coarse-to-fine search for the range that minimizes an objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TypeAlias

import numpy as np

from ..model.session import Array
from ..statistics.histogram import Histogram
from .precision import Precision

Objective: TypeAlias = Callable[[Array, Array], Array]
"""Maps the lower ends, (n,), and the upper ends, (n,), of n ranges to the values to minimize, (n,)."""
BOTH = 16
"""Places per end in the coarse round if both ends are free."""
NEAR = (-2, -1, 0, 1, 2)
"""Places per end in a round of refinement. They are three times as close as in the previous round."""
FEW = 16
"""The number of places of the coarse round for which the exact objective is computed."""
HOPELESS = 2.0
"""Refinement moves an end by some per cent. It is skipped if the objective is more than this factor above the best."""


@dataclass(frozen=True, slots=True)
class Places:
    """The ranges that a search evaluates.

    Attributes:
        octaves: The extent of the coarse round, in octaves below the extremes.
        coarse: Places in the coarse round if one end or magnitude is free.
        fine: Refinement stops when places are closer than this number of octaves.
    """

    octaves: float
    coarse: int
    fine: float


@dataclass(frozen=True, slots=True)
class _Family:
    """Ranges whose ends move with one or two factors.

    Attributes:
        low: The lower end for factor 1, and the index of the factor that moves it, or None.
        high: The upper end, likewise.
    """

    low: tuple[float, int | None]
    high: tuple[float, int | None]

    @property
    def axes(self) -> int:
        """The number of factors."""
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
    """Return the range within the extremes with the least objective among the evaluated ranges.

    The ends are the extremes times powers of two with fractional exponents, so that data scaled by a power of two give
    a range scaled by the same power, exactly. The first of equal ranges wins, and the extremes themselves come first.

    Args:
        histogram: The values.
        precision: If asymmetric and the values have both signs, both ends are free. If symmetric, one magnitude is
            free; the search also tries the upper end alone with all negative values cut off, which frees half of the
            integers.
        objective: The function to minimize; infinite for excluded ranges.
        rough: A fast estimate of the objective. It chooses the `FEW` ranges of the coarse round.
        places: The ranges to evaluate.
    """
    lo, hi = histogram.lo, histogram.hi
    best, value = (lo, hi), math.inf
    for family in _families(lo, hi, precision):
        count = BOTH if family.axes == 2 else places.coarse
        step = places.octaves / (count - 1)
        cuts = step * _grid(range(count), family.axes)
        promising = np.argsort(rough(*family.ends(np.exp2(-cuts), lo, hi)), kind="stable")[:FEW]
        cuts = cuts[np.union1d(promising, 0)]  # always include the extremes
        at, reached = cuts[0], math.inf
        while True:
            low, high = family.ends(np.exp2(-cuts), lo, hi)
            values = objective(low, high)
            first = int(np.argmin(values))
            if values[first] < reached:
                reached, at = float(values[first]), cuts[first]
                if reached < value:
                    value, best = reached, (float(low[first]), float(high[first]))
            if step < places.fine or reached > HOPELESS * value:
                break
            step /= 3
            cuts = np.maximum(at + step * _grid(NEAR, family.axes), 0.0)
    return best


@cache
def _grid(places: Sequence[int], axes: int) -> Array:
    """Return all combinations of places, (n, axes). The combination of the first places comes first."""
    return np.array(list(product(places, repeat=axes)))


def _families(lo: float, hi: float, precision: Precision) -> list[_Family]:
    """Return the families of ranges to search between the extremes."""
    if lo >= 0.0:
        return [_Family((lo, None), (hi, 0))]
    if precision.symmetric:
        reach = max(-lo, hi)
        return [_Family((-reach, 0), (reach, 0)), *([_Family((0.0, None), (hi, 0))] if hi > 0.0 else [])]
    if hi <= 0.0:
        return [_Family((lo, 0), (hi, None))]
    return [_Family((lo, 0), (hi, 1))]

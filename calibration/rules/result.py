"""The range with the least expected error of a function of the values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np

from ..model.session import Array
from ..statistics.histogram import Histogram
from .error import smooth_counts
from .precision import Precision
from .search import Places, least

Function: TypeAlias = Callable[[Array], Array]
"""Maps float32 values of any shape to float32 results of the same shape, element by element."""

PLACES = Places(octaves=7.0, coarse=64, fine=0.02)
"""The ends reach down to 1.5 steps of 256 levels. They are 8 % apart in the coarse round and 1.4 % at the end."""
INSIDE = (0.25, 0.75)
"""The positions in a bin at which its values are assumed."""
COHERENT = 9
"""The weight of the squared mean error: errors of one sign add up in the nine taps of a depthwise kernel."""


def least_result_error(histogram: Histogram, function: Function, precision: Precision) -> tuple[float, float]:
    """Return the range that minimizes the error of a function of the quantized values.

    Values with equal results need no separate levels. For example, a SiLU or a sigmoid maps -20 and -8 to almost the
    same value. The range can end there, and its steps are finer where the function is steep.

    Args:
        histogram: The values.
        function: The function.
        precision: The integers.
    """
    counts, edges = smooth_counts(histogram), histogram.edges
    filled = np.flatnonzero(counts)
    places = np.multiply.outer(INSIDE, np.diff(edges)[filled]) + edges[filled]
    values = np.clip(places, histogram.lo, histogram.hi).astype(np.float32)
    weights = np.broadcast_to(counts[filled] / len(INSIDE), values.shape)
    objective = partial(_errors, values.ravel(), weights.ravel(), function, precision)
    return least(histogram, precision, objective, objective, PLACES)


def _errors(values: Array, weights: Array, function: Function, precision: Precision, lo: Array, hi: Array) -> Array:
    """Return the mean squared errors of the results, (n,) float64, with weight `COHERENT` on the squared mean error."""
    scales, zeros = precision.grids(lo, hi)
    integers = np.arange(precision.top + 1, dtype=np.float32)
    exact, weights = function(values).astype(np.float64), weights / weights.sum()
    rows = function((integers - zeros[:, None].astype(np.float32)) * scales[:, None])
    totals = np.empty(len(lo))
    for index, (scale, zero, row) in enumerate(zip(scales, zeros, rows, strict=True)):
        nearest = np.clip(np.rint(values / scale) + zero, 0, precision.top).astype(np.intp)
        error = row[nearest] - exact
        totals[index] = weights @ (error * error) + (COHERENT - 1) * (weights @ error) ** 2
    return np.where(np.isfinite(totals), totals, np.inf)

"""The range with the least expected error of a function of the values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np

from .histogram import Histogram
from .precision import Precision
from .rule_error import smooth_counts
from .rule_search import Places, least
from .session import Array

Function: TypeAlias = Callable[[Array], Array]
"""From float32 values of any shape to float32 results of the same shape, each of its own value alone."""

PLACES = Places(octaves=7.0, alone=64, fine=0.02)
"""As far below the extremes as a bin and a half of 256 levels, 8 % apart, and 1.4 % in the end."""
INSIDE = (0.25, 0.75)
"""Where in a bin its values are taken to be."""
COHERENT = 9
"""How often the square of the mean error counts: errors of one sign add up in the nine taps of a depthwise kernel."""


def least_result_error(histogram: Histogram, function: Function, precision: Precision) -> tuple[float, float]:
    """Return the range with which a function of the quantized values is closest to that of the values.

    What an activation function makes equal need not be told apart: a SiLU or a sigmoid of -20 is as good as one of -8,
    so that a range may end there, and its steps are finer where the function is steep.

    Args:
        histogram: The values.
        function: What is made of them.
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
    """Return the mean squared errors of the results for n ranges, (n,) float64, with their means counted `COHERENT`."""
    scales, zeros = precision.grids(lo, hi)
    integers = np.arange(precision.top + 1, dtype=np.float32)
    exact, weights = function(values).astype(np.float64), weights / weights.sum()
    rows = function((integers - zeros[:, None].astype(np.float32)) * scales[:, None])
    found = np.empty(len(lo))
    for index, (scale, zero, row) in enumerate(zip(scales, zeros, rows, strict=True)):
        nearest = np.clip(np.rint(values / scale) + zero, 0, precision.top).astype(np.intp)
        error = row[nearest] - exact
        found[index] = weights @ (error * error) + (COHERENT - 1) * (weights @ error) ** 2
    return np.where(np.isfinite(found), found, np.inf)

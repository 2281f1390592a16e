"""The range with the least expected squared error."""

from __future__ import annotations

from .histogram import Histogram
from .precision import Precision
from .rule_error import least_error
from .rule_excess import error_of_ranges
from .rule_search import Places, least

PLACES = Places(octaves=11.0, alone=128, fine=0.003)
"""As far below the extremes as one bin of a histogram of 2048, 6 % apart, and 0.2 % in the end."""


def mse(histogram: Histogram, precision: Precision) -> tuple[float, float]:
    """Return the range that makes `expected_error` least; never one that is worse than the extremes.

    Clipping errs much on few values, rounding little on many: the best range lies where giving up one step of range
    costs as much as it gains.

    Args:
        histogram: The values.
        precision: The integers.
    """
    found = least(histogram, precision, *error_of_ranges(histogram, precision), PLACES)
    return least_error(histogram, [(histogram.lo, histogram.hi), found], precision)

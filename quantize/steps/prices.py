"""Choose the next price of noise that a search tries, from the answers to those before."""

from __future__ import annotations

import math
from collections.abc import Mapping

PRICES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""Prices of all noise, as a share of the float model's run time; the search refines between two of them."""
FIRST = 2
"""The index of the first price: by the exchange of medium effort, the price of a relative error of 5 %."""
FINER = 4
"""Prices to try between two neighbours."""


def next_price(kept: Mapping[float, bool]) -> float | None:
    """Return the price to try next; None where the least price that keeps the bar is found.

    The search halves `PRICES`, then the range between the two neighbours of which one keeps the bar.

    Args:
        kept: By price that was tried, whether its model keeps the bar.
    """
    low, high = -1, len(PRICES)  # the highest that misses, the least that keeps
    middle = FIRST
    while high - low > 1:
        if PRICES[middle] not in kept:
            return PRICES[middle]
        low, high = (low, middle) if kept[PRICES[middle]] else (middle, high)
        middle = (low + high) // 2
    if low < 0 or high == len(PRICES):
        return None
    least, most = PRICES[low], PRICES[high]
    for _ in range(FINER):
        between = math.sqrt(least * most) if least else most / 2
        if between not in kept:
            return between
        least, most = (least, between) if kept[between] else (between, most)
    return None

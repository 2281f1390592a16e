"""Intervals and tests of shares of items, and of their difference between two models that see the same items."""

from __future__ import annotations

import math

from .classes import Interval, Z

LARGE_BITS = 900
LARGE = 2.0**LARGE_BITS  # a larger sum of binomial coefficients is scaled


def binomial_p(broken: int, fixed: int) -> float:
    """Return the two-sided p-value of an exact binomial test of `broken` against `fixed` (McNemar's, exact).

    The binomial coefficients are floats: for m = min(broken, fixed) the relative error is at most 3 m / 2^53.

    >>> binomial_p(4, 4), binomial_p(8, 0)
    (1.0, 0.0078125)
    """
    total = broken + fixed
    tail, outcomes, exponent = 1.0, 1.0, 1 - total  # outcomes * 2**(exponent + total - 1) = comb(total, k)
    for k in range(min(broken, fixed)):
        outcomes = outcomes * (total - k) / (k + 1)
        tail += outcomes
        if tail > LARGE:
            tail, outcomes, exponent = tail / LARGE, outcomes / LARGE, exponent + LARGE_BITS
    return min(1.0, math.ldexp(tail, exponent))


def score_interval(share: float, items: int) -> Interval:
    """Return the 95 % confidence interval of a share of items.

    Wilson, "Probable inference, the law of succession, and statistical inference", Journal of the American Statistical
    Association 22 (1927) 209-212: ``(p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)``.

    >>> tuple(round(end, 4) for end in score_interval(1.0, 64))
    (0.9434, 1.0)
    """
    square = Z * Z / items
    reach = math.sqrt(Z * Z * share * (1 - share) / items + square * square / 4)
    middle = share + square / 2
    return max(0.0, (middle - reach) / (1 + square)), min(1.0, (middle + reach) / (1 + square))


def paired_interval(broken: int, fixed: int, items: int) -> Interval:
    """Return the 95 % confidence interval of ``(broken - fixed) / items``.

    Agresti and Min, "Simple improved confidence intervals for comparing matched proportions", Statistics in Medicine
    24 (2005) 729-740: Wald's interval after adding half an item to each of the four counts. With b broken, c fixed and
    n items it is ``d +- 1.96 sqrt(b + c - (b - c)^2 / n) / n``, where ``d = (b - c) / n``.

    >>> tuple(round(end, 4) for end in paired_interval(22, 6, 650))
    (0.0085, 0.0406)
    """
    b, c, n = broken + 0.5, fixed + 0.5, items + 2.0
    reach = Z * math.sqrt(b + c - (b - c) ** 2 / n) / n
    middle = (b - c) / n
    return max(-1.0, middle - reach), min(1.0, middle + reach)

"""Analytic clipping: the best range of the normal or the Laplace distribution that fits the values.

R. Banner, Y. Nahshan, D. Soudry: Post training 4-bit quantization of convolutional networks for rapid-deployment,
NeurIPS 2019, section 3 (https://arxiv.org/abs/1810.05723).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from .histogram import Histogram
from .precision import Precision
from .rule_error import Spread

LAPLACE_BELOW = math.sqrt(math.pi / (2 * math.e))
"""The mean deviation b over the standard deviation s, below which the Laplace distribution is the likelier one.

The mean log-likelihoods at their best are ``-log(2 e b)`` and ``-log(s sqrt(2 pi e))``.
"""


@dataclass(frozen=True, slots=True)
class Deviations:
    """How far values lie from a centre.

    Attributes:
        centre: From where.
        mean: Mean absolute deviation.
        root_mean_square: Root of the mean square deviation.
    """

    centre: float
    mean: float
    root_mean_square: float

    @classmethod
    def of(cls, spread: Spread, centre: float | None) -> Deviations:
        """Return the deviations from `centre`, or from the mean; exact zeros are left out."""
        a, b = spread.edges[:-1], spread.edges[1:]
        count = spread.counts.sum()
        middle = float(spread.counts @ (a + b) / (2 * count)) if centre is None else centre
        a, b = a - middle, b - middle
        across = np.minimum(-a, b)  # positive only in the piece that holds the centre
        split = np.divide(a * a + b * b, 2 * (b - a), out=np.zeros_like(a), where=across > 0)
        mean = float(spread.counts @ np.where(across > 0, split, np.abs(a + b) / 2) / count)
        square = float(spread.counts @ (a * a + a * b + b * b) / (3 * count))
        return cls(middle, mean, math.sqrt(max(square, 0.0)))


def aciq(histogram: Histogram, precision: Precision) -> tuple[float, float]:
    """Return the range that is best for a normal or a Laplace distribution, whichever is likelier, within the extremes.

    The deviations are those of the histogram: from the mean; from zero where the zero point is the middle; and from
    zero where all values lie on one side of it, which then are half of a distribution and have all integers for
    themselves. Exact zeros, which are quantized without error, are left out.

    Args:
        histogram: The values.
        precision: The integers.
    """
    lo, hi = histogram.lo, histogram.hi
    one_sided = lo >= 0.0 or hi <= 0.0
    spread = Spread.of(histogram)
    if spread.edges[0] == spread.edges[-1]:
        return lo, hi
    seen = Deviations.of(spread, 0.0 if one_sided or precision.symmetric else None)
    # With half a distribution the steps are half as wide, as with one bit more.
    bits = precision.bits + (1 if one_sided and not (precision.symmetric and lo < 0.0) else 0)
    if seen.mean < LAPLACE_BELOW * seen.root_mean_square:
        reach = laplace_clip(bits) * seen.mean
    else:
        reach = normal_clip(bits) * seen.root_mean_square
    least, most = spread.edges[0], spread.edges[-1]
    low, high = (float(np.clip(seen.centre + side * reach, least, most)) for side in (-1, 1))
    return math.ldexp(low, spread.exponent), math.ldexp(high, spread.exponent)


@cache
def laplace_clip(bits: int) -> float:
    """Return the best range ``[-a, a]`` of a Laplace distribution, a in mean deviations.

    Clipping costs ``2 exp(-a)`` and rounding ``a**2 / (3 * 4**bits)``; the derivative is zero where ``exp(-a)`` is
    ``a / (3 * 4**bits)``.
    """
    return _root(lambda a: math.exp(-a) - a / (3 * 4.0**bits))


@cache
def normal_clip(bits: int) -> float:
    """Return the best range ``[-a, a]`` of a normal distribution, a in standard deviations.

    With density f and upper tail F, clipping costs ``2 ((1 + a**2) F(a) - a f(a))`` and rounding
    ``a**2 / (3 * 4**bits)``; the derivative is zero where ``2 (f(a) - a F(a)) = a / (3 * 4**bits)``.
    """

    def slope(a: float) -> float:
        density, tail = math.exp(-a * a / 2) / math.sqrt(2 * math.pi), math.erfc(a / math.sqrt(2)) / 2
        return 2 * (density - a * tail) - a / (3 * 4.0**bits)

    return _root(slope)


def _root(falling: Callable[[float], float]) -> float:
    """Return where a function that falls from a positive to a negative value between 0 and 64 is zero."""
    low, high = 0.0, 64.0
    middle = 32.0
    while low < middle < high:
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
        middle = (low + high) / 2
    return middle

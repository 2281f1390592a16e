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

from ..statistics.histogram import Histogram
from .error import Spread, check_given
from .precision import Precision

LAPLACE_BELOW = math.sqrt(math.pi / (2 * math.e))
"""Limit of the mean deviation over the standard deviation. Below it, the Laplace distribution is more likely.

With mean deviation b and standard deviation s, the maximum mean log-likelihoods are ``-log(2 e b)`` and
``-log(s sqrt(2 pi e))``.
"""


@dataclass(frozen=True, slots=True)
class Deviations:
    """The deviations of values from a centre.

    Attributes:
        centre: The centre.
        mean: The mean absolute deviation.
        root_mean_square: The root of the mean square deviation.
    """

    centre: float
    mean: float
    root_mean_square: float

    @classmethod
    def of(cls, spread: Spread, centre: float | None) -> Deviations:
        """Return the deviations from `centre`, or from the mean. Exact zeros are left out."""
        a, b = spread.edges[:-1], spread.edges[1:]
        count = spread.counts.sum()
        middle = float(spread.counts @ (a + b) / (2 * count)) if centre is None else centre
        a, b = a - middle, b - middle
        across = np.minimum(-a, b)  # positive only in the piece that contains the centre
        split = np.divide(a * a + b * b, 2 * (b - a), out=np.zeros_like(a), where=across > 0)
        mean = float(spread.counts @ np.where(across > 0, split, np.abs(a + b) / 2) / count)
        square = float(spread.counts @ (a * a + a * b + b * b) / (3 * count))
        return cls(middle, mean, math.sqrt(max(square, 0.0)))


def aciq(histogram: Histogram, precision: Precision) -> tuple[float, float]:
    """Return the best range for a normal or a Laplace distribution, whichever is more likely, within the extremes.

    The deviations are from the mean of the histogram. They are from zero if the zero point is the middle of the type,
    or if all values are on one side of zero. In the latter case the values are half of a distribution and use all
    integers. Exact zeros are left out, because their quantization has no error.

    Args:
        histogram: The values.
        precision: The integers.

    Raises:
        RequantError: An argument is of another type.
    """
    check_given(histogram, precision)
    lo, hi = histogram.lo, histogram.hi
    one_sided = lo >= 0.0 or hi <= 0.0
    spread = Spread.of(histogram)
    if spread.edges[0] == spread.edges[-1]:
        return lo, hi
    deviations = Deviations.of(spread, 0.0 if one_sided or precision.symmetric else None)
    # For half a distribution the steps are half as wide, as with one more bit.
    bits = precision.bits + (1 if one_sided and not (precision.symmetric and lo < 0.0) else 0)
    if deviations.mean < LAPLACE_BELOW * deviations.root_mean_square:
        reach = laplace_clip(bits) * deviations.mean
    else:
        reach = normal_clip(bits) * deviations.root_mean_square
    least, most = spread.edges[0], spread.edges[-1]
    low, high = (float(np.clip(deviations.centre + side * reach, least, most)) for side in (-1, 1))
    return math.ldexp(low, spread.exponent), math.ldexp(high, spread.exponent)


@cache
def laplace_clip(bits: int) -> float:
    """Return the best range ``[-a, a]`` of a Laplace distribution, a in mean deviations.

    The clipping error is ``2 exp(-a)`` and the rounding error ``a**2 / (3 * 4**bits)``. The derivative of the sum is
    zero where ``exp(-a)`` is ``a / (3 * 4**bits)``.
    """
    return _root(lambda a: math.exp(-a) - a / (3 * 4.0**bits))


@cache
def normal_clip(bits: int) -> float:
    """Return the best range ``[-a, a]`` of a normal distribution, a in standard deviations.

    With density f and upper tail F, the clipping error is ``2 ((1 + a**2) F(a) - a f(a))`` and the rounding error
    ``a**2 / (3 * 4**bits)``. The derivative of the sum is zero where ``2 (f(a) - a F(a)) = a / (3 * 4**bits)``.
    """

    def slope(a: float) -> float:
        density, tail = math.exp(-a * a / 2) / math.sqrt(2 * math.pi), math.erfc(a / math.sqrt(2)) / 2
        return 2 * (density - a * tail) - a / (3 * 4.0**bits)

    return _root(slope)


def _root(falling: Callable[[float], float]) -> float:
    """Return the zero between 0 and 64 of a function that falls from a positive to a negative value."""
    low, high = 0.0, 64.0
    middle = 32.0
    while low < middle < high:
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
        middle = (low + high) / 2
    return middle

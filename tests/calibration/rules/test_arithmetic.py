"""The arithmetic under the rules, on histograms of a few bins: against integrals over the pieces."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from requant.calibration import Histogram
from requant.calibration.model.session import Array
from requant.calibration.rules.aciq import LAPLACE_BELOW, Deviations, aciq, laplace_clip, normal_clip
from requant.calibration.rules.error import WORK, Spread, errors, smooth_counts
from requant.calibration.rules.excess import SPREAD_EVENLY, Excess, error_of_ranges
from requant.calibration.rules.precision import Precision
from requant.calibration.rules.result import COHERENT, _errors
from requant.calibration.statistics.histogram import MIN_EXPONENT

UNIT = 2.0**MIN_EXPONENT
"""The width of a bin of tiny values: the smallest."""


def tiny(lo: float, hi: float, counts: list[int]) -> Histogram:
    """Return a histogram with few bins. `lo` and `hi` are in bins."""
    return Histogram(lo * UNIT, hi * UNIT, MIN_EXPONENT, math.floor(lo), np.array(counts, np.int64))


FEW_BINS = {
    "positive": tiny(1.25, 4.5, [3, 1, 0, 4]),
    "both-signs": tiny(-1.75, 2.5, [2, 5, 7, 1, 3]),
    "negative": tiny(-4.75, -1.25, [1, 0, 6, 2]),
    "from-zero": tiny(0.0, 2.5, [3, 2, 1]),
    "one-bin": tiny(2.25, 2.75, [5]),
    "constant": tiny(3.5, 3.5, [5]),
}
each_histogram = pytest.mark.parametrize("histogram", FEW_BINS.values(), ids=FEW_BINS.keys())


def sum_over(histogram: Histogram, antiderivative: Callable[[float], float], value: Callable[[float], float]) -> float:
    """Return the sum of a function of all values, in bin widths, that are spread evenly in each bin."""
    edges = histogram.edges / histogram.width
    return math.fsum(
        count * ((antiderivative(b) - antiderivative(a)) / (b - a) if a < b else value(a))
        for a, b, count in zip(edges[:-1], edges[1:], smooth_counts(histogram), strict=True)
    )


def excess_over(histogram: Histogram, threshold: float, power: int) -> float:
    """Return the sum of ``max(x - threshold, 0)**power``; for power 0 the number of values above."""
    return sum_over(
        histogram,
        lambda x: max(x - threshold, 0.0) ** (power + 1) / (power + 1),
        lambda x: max(x - threshold, 0.0) ** power if x > threshold else 0.0,
    )


# ------------------------------------------------------------------------------------------------------ exact zeros


@pytest.mark.parametrize(
    ("first", "counts", "kept"),
    [
        (0, [100, 8, 2], 32),  # 8 * 8 / 2
        (0, [100, 8, 16], 8),  # not less than the bin beside it
        (0, [100, 8, 0, 1], 64),  # an empty bin counts as 1
        (0, [100, 0, 1], 1),
        (0, [20, 8, 2], 20),  # no more than there are
        (-2, [2, 8, 100], 32),
        (-2, [2, 8, 100, 5, 1], 32),
        (-2, [8, 8, 100, 6, 1], 36),  # the greater of both sides
        (-1, [7, 100, 3], 49),  # outside there are no values
        (0, [100, 3], 9),
        (1, [100, 8, 2], 100),  # no zeros in the first bin
        (-3, [2, 8, 100], 100),
    ],
    ids=str,
)
def test_the_bin_at_zero_keeps_what_its_neighbours_extrapolate_to(first: int, counts: list[int], kept: int) -> None:
    ends = first + (0.5 if first else 0.0), first + len(counts) - 1 + (0.5 if first + len(counts) != 1 else 0.0)
    found = smooth_counts(tiny(*ends, counts))
    expected = [float(kept if count == 100 or count == 20 else count) for count in counts]
    assert found.tolist() == expected


def test_one_bin_keeps_all_values() -> None:
    assert smooth_counts(tiny(0.0, 0.5, [9])).tolist() == [9]


def test_a_spread_leaves_out_edges_between_empty_bins() -> None:
    spread = Spread.of(tiny(1.5, 7.5, [3, 0, 0, 0, 2, 0, 4]))
    assert spread.exponent == MIN_EXPONENT + 3
    assert (spread.edges * 8).tolist() == [1.5, 2, 5, 6, 7, 7.5]
    assert spread.counts.tolist() == [3, 0, 2, 0, 4]
    assert spread.total == 9


# ------------------------------------------------------------------------------------------------------ excess


@each_histogram
def test_squared_excess_and_values_above_are_integrals(histogram: Histogram) -> None:
    excess, positions = Excess.of(histogram), np.arange(-3, 9, 0.125)
    squared, above = excess.squares(positions)
    thresholds = positions + histogram.first
    np.testing.assert_allclose(squared, [excess_over(histogram, t, 2) for t in thresholds], rtol=1e-13, atol=1e-12)
    spread = thresholds < (histogram.hi / UNIT if histogram.lo == histogram.hi else np.inf)  # a step is a step
    expected = np.array([excess_over(histogram, t, 0) for t in thresholds])
    np.testing.assert_allclose(above[spread], expected[spread], rtol=1e-13, atol=1e-12)


@each_histogram
@pytest.mark.parametrize("number", [1, 3, 40, WORK + 1])
def test_sums_of_the_excess_are_integrals(histogram: Histogram, number: int) -> None:
    first, step = np.array([-2.0, 0.375, 2.0, -30.0, 9.0]), np.array([0.25, 0.5, 1.5, 1.0, 2.0])
    found = Excess.of(histogram).beyond(first, step, number)
    expected = [
        math.fsum(excess_over(histogram, a + i * s + histogram.first, 1) for i in range(min(number, 80)))
        for a, s in zip(first.tolist(), step.tolist(), strict=True)
    ]  # 80 thresholds reach beyond all values
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("bits", [SPREAD_EVENLY, 8])
@pytest.mark.parametrize("values", [(-3.0, -1.5, 0.25, 0.5, 7.001), (1.0, 2.0, 5.001), (-9.0, -0.503)], ids=str)
def test_the_rough_error_has_a_twelfth_of_the_squared_step_inside(values: tuple[float, ...], bits: int) -> None:
    histogram, precision = Histogram.of(np.array(values)), Precision(bits)
    lo, hi = np.array([-6.0, -1.0, 0.0, -3.0]), np.array([8.0, 1.0, 3.0, 0.0])
    expected = []
    for scale, zero in zip(*precision.grids(lo, hi), strict=True):
        step = float(scale) / histogram.width
        low, high = -float(zero) * step, float(precision.top - zero) * step
        inside = excess_over(histogram, low, 0) - excess_over(histogram, high, 0)
        below = sum_over(histogram, partial(below_cubed, low), lambda x: math.nan)  # no value stands alone
        expected.append(below + excess_over(histogram, high, 2) + inside * step**2 / 12)
    np.testing.assert_allclose(error_of_ranges(histogram, precision)[1](lo, hi), expected, rtol=1e-9)


def below_cubed(low: float, x: float) -> float:
    """Return an antiderivative of ``max(low - x, 0)**2``."""
    return -(max(low - x, 0.0) ** 3) / 3


def test_few_bits_have_no_rough_error_and_many_the_error_by_bins() -> None:
    histogram, ends = Histogram.of(np.linspace(-5, 11, 3001)), (np.array([-5.0, -2.0]), np.array([11.0, 3.0]))
    exact, rough = error_of_ranges(histogram, Precision(SPREAD_EVENLY - 1))
    assert exact is rough
    exact, rough = error_of_ranges(histogram, Precision(SPREAD_EVENLY))
    assert exact is not rough
    for bits in (12, 16):  # more levels than bins
        exact, rough = error_of_ranges(histogram, Precision(bits))
        assert exact(*ends).tolist() == errors(Spread.of(histogram), *ends, Precision(bits)).tolist()
        assert rough(*ends).tolist() != exact(*ends).tolist()


# ------------------------------------------------------------------------------------------------------ aciq


@each_histogram
@pytest.mark.parametrize("centre", [None, 0.0, 2.25 * UNIT], ids=["mean", "zero", "inside"])
def test_deviations_are_integrals(histogram: Histogram, centre: float | None) -> None:
    spread = Spread.of(histogram)
    unit = 2.0 ** (spread.exponent - MIN_EXPONENT)
    found = Deviations.of(spread, None if centre is None else math.ldexp(centre, -spread.exponent))
    count = smooth_counts(histogram).sum()
    mean = sum_over(histogram, lambda x: x * x / 2, lambda x: x) / count
    middle = mean if centre is None else centre / UNIT
    absolute = sum_over(histogram, lambda x: (x - middle) * abs(x - middle) / 2, lambda x: abs(x - middle)) / count
    square = sum_over(histogram, lambda x: (x - middle) ** 3 / 3, lambda x: (x - middle) ** 2) / count
    expected = (middle, absolute, math.sqrt(square))
    assert tuple(part * unit for part in (found.centre, found.mean, found.root_mean_square)) == pytest.approx(
        expected, rel=1e-12, abs=1e-12
    )


EXPONENTIAL = -np.log1p(-(np.arange(4000) + 0.5) / 4000)  # 1e-4 to 9: quantiles
NORMAL = np.sqrt(2 * EXPONENTIAL) * np.cos(np.arange(4000) * 2.399963229728653)  # Box and Muller, angles all around
FLAT = (np.arange(4000) + 0.5) / 4000  # mean deviation 1 / 2, root mean square 1 / sqrt(3) of the reach: normal


@pytest.mark.parametrize(
    ("values", "precision", "low", "high"),
    [
        # half of a distribution has one more bit; about zero
        (EXPONENTIAL, Precision(3), None, laplace_clip(4)),
        (EXPONENTIAL, Precision(3, symmetric=True), None, laplace_clip(4)),
        (-EXPONENTIAL, Precision(3), -laplace_clip(4), None),
        (-EXPONENTIAL, Precision(3, symmetric=True), -laplace_clip(3), None),  # half of the integers are not used
        (np.append(EXPONENTIAL, 0.0), Precision(3), None, laplace_clip(4)),
        (np.append(-EXPONENTIAL, 0.0), Precision(3), -laplace_clip(4), None),
        # both signs: about the mean, or about zero
        (np.append(EXPONENTIAL, -EXPONENTIAL), Precision(3), -laplace_clip(3), laplace_clip(3)),
        (np.append(EXPONENTIAL, -EXPONENTIAL) + 2, Precision(3), 2 - laplace_clip(3), 2 + laplace_clip(3)),
        (NORMAL, Precision(3), -normal_clip(3), normal_clip(3)),
        (NORMAL + 1, Precision(3), 1 - normal_clip(3), 1 + normal_clip(3)),
        (NORMAL + 1, Precision(3, symmetric=True), -math.sqrt(2) * normal_clip(3), math.sqrt(2) * normal_clip(3)),
        # beyond the extremes there are no values
        (FLAT, Precision(8), None, None),
    ],
    ids=str,
)
def test_a_range_is_the_clip_of_the_likelier_distribution(
    values: Array, precision: Precision, low: float | None, high: float | None
) -> None:
    histogram = Histogram.of(values)
    ends = (
        histogram.lo if low is None else max(low, histogram.lo),
        histogram.hi if high is None else min(high, histogram.hi),
    )
    assert aciq(histogram, precision) == pytest.approx(ends, rel=0.01)  # 4000 values are no density


def test_laplace_is_likelier_below_the_ratio_of_the_likelihoods() -> None:
    # A Laplace distribution has the ratio sqrt(1 / 2), a normal one sqrt(2 / pi).
    assert math.log(2 * math.e * LAPLACE_BELOW) == pytest.approx(math.log(math.sqrt(2 * math.pi * math.e)))
    assert math.sqrt(1 / 2) < LAPLACE_BELOW < math.sqrt(2 / math.pi)


# ------------------------------------------------------------------------------------------------------ results


def test_the_error_of_a_result_weighs_the_squared_mean() -> None:
    values, weights = np.array([0.25, 1.0, 1.75, 9.0], np.float32), np.array([1.0, 2.0, 4.0, 1.0])
    lo, hi = np.zeros(2), np.array([3.0, 6.0])  # steps of 1 and 2 with 2 bits
    rounded = np.array([[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 2.0, 6.0]])  # 0.5 steps: half to even
    error = 3 * rounded + 1 - (3 * values + 1)
    mean = (error * weights).sum(axis=1) / 8
    variance = ((error - mean[:, None]) ** 2 * weights).sum(axis=1) / 8
    found = _errors(values, weights, lambda x: 3 * x + 1, Precision(2), lo, hi)
    np.testing.assert_allclose(found, variance + COHERENT * mean**2, rtol=1e-12)
    assert _errors(values, weights, lambda x: x, Precision(2), lo, hi)[0] == pytest.approx(found[0] / 9)


def test_a_result_that_is_not_finite_is_the_worst() -> None:
    def reciprocal(x: Array) -> Array:
        return np.divide(np.float32(1), x, out=np.full_like(x, np.inf), where=x != 0)

    found = _errors(
        np.array([0.25], np.float32), np.ones(1), reciprocal, Precision(2), np.zeros(2), np.array([3.0, 0.75])
    )
    assert found.tolist() == [math.inf, 0.0]

"""The expected quantization error of a histogram: exact for evenly spread values, right for real ones."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from requant.calibration import Histogram
from requant.calibration.model.session import Array
from requant.calibration.rules.error import Spread, errors, expected_error, least_error
from requant.calibration.rules.excess import error_of_ranges
from requant.calibration.rules.precision import Precision

EPS = float(np.finfo(np.float64).eps)
PRECISIONS = [Precision(bits, symmetric) for bits in (2, 4, 8) for symmetric in (False, True)]
values32 = hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-100, 100, width=32))
precisions = st.sampled_from(PRECISIONS)
ends = st.tuples(st.floats(-120, 120, width=32), st.floats(-120, 120, width=32))


def integral(start: Fraction, end: Fraction, least: int, most: int) -> Fraction:
    """Return the integral of (u - n(u))**2, n(u) the nearest integer from `least` to `most`, piece by piece."""
    halves = [Fraction(2 * n + 1, 2) for n in range(max(floor(start), least) - 1, min(ceil(end), most) + 1)]
    inside = [half for half in halves if start < half < end and least < half < most]
    total = Fraction(0)
    for a, b in zip([start, *inside], [*inside, end], strict=True):
        nearest = min(max(round((a + b) / 2), least), most)
        total += ((b - nearest) ** 3 - (a - nearest) ** 3) / 3
    return total


def exact_error(histogram: Histogram, lo: float, hi: float, precision: Precision) -> Fraction:
    """Return the mean squared error in rational arithmetic; the zeros stand apart as in `Spread`."""
    spread = Spread.of(histogram)
    scale, zero = precision.params(lo, hi)
    step, unit, total = Fraction(scale), Fraction(2) ** spread.exponent, Fraction(0)
    for a, b, count in zip(spread.edges[:-1], spread.edges[1:], spread.counts, strict=True):
        start, end = (Fraction(float(edge)) * unit / step for edge in (a, b))
        if not count:
            continue
        if start == end:
            nearest = min(max(round(start), -zero), precision.top - zero)
            mean = (start - nearest) ** 2
        else:
            mean = integral(start, end, -zero, precision.top - zero) / (end - start)
        total += Fraction(float(count)) * mean * step**2
    return total / histogram.count


def measured_error(values: Array, lo: float, hi: float, precision: Precision) -> float:
    """Quantize the values and return the mean squared error."""
    scale, zero = precision.params(lo, hi)
    stored = np.clip(np.rint(values / np.float64(scale)) + zero, 0, precision.top)
    return float(np.mean(((stored - zero) * scale - values) ** 2))


@given(values=values32, range_=ends, precision=precisions)
def test_error_is_the_integral_over_the_bins(values: Array, range_: tuple[float, float], precision: Precision) -> None:
    histogram, (lo, hi) = Histogram.of(values), sorted(range_)
    exact = exact_error(histogram, lo, hi, precision)
    found = expected_error(histogram, lo, hi, precision)
    # An edge in units of the step is right to eps * |u| and so is its distance r from an integer, whose square is then
    # wrong by 2 |r| |u| eps; of the largest |u| this is the error of all. Dividing what is left of crossing an integer
    # by the width of a piece, 2**-24 of the largest edge or more, makes 2**24 * eps of 1/12 + r**2 / 3.
    scale, _ = precision.params(lo, hi)
    u = max(abs(histogram.lo), abs(histogram.hi)) / scale
    r = max(u, 1.0)
    bound = scale**2 * (2 * r * u + r**2 * (values.size + 8)) * EPS + scale**2 * 2**24 * EPS
    assert abs(found - float(exact)) <= bound
    assert found >= 0.0


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_expected_is_what_is_measured_on_values_spread_evenly(precision: Precision) -> None:
    # 512 values at the middles of 512 equal parts of each bin: the sum over them differs from the integral by less
    # than the step of the integrand's changes: |d/du r**2| <= 2 |r|, over half a part, which is a bin / 1024.
    counts = np.random.default_rng(3).integers(1, 5, 256)
    parts = (np.arange(512) + 0.5) / 512
    bins = np.repeat(np.arange(-100, 156), counts)
    values = ((bins[:, None] + parts) / 16).ravel()
    histogram = Histogram.of(values)
    for lo, hi in ((-6.25, 9.75), (-1.0, 1.0), (0.0, 3.0), (-6.25, 0.5), (-100.0, 100.0)):
        reach = max(abs(histogram.lo - min(lo, 0.0)), abs(histogram.hi - max(hi, 0.0)), precision.params(lo, hi)[0])
        found = expected_error(histogram, lo, hi, precision)
        assert abs(found - measured_error(values, lo, hi, precision)) <= 2 * reach * histogram.width / 1024 * 4


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 0.1, -1e-3, 1e30], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_a_constant_has_the_error_of_its_one_value(value: float, precision: Precision) -> None:
    constant = np.full(7, value, np.float32)
    histogram = Histogram.of(constant)
    for end in (histogram.lo, histogram.lo / 2, histogram.lo * 3):
        lo, hi = min(end, 0.0), max(end, 0.0)
        scale, _ = precision.params(lo, hi)
        measured = measured_error(constant.astype(np.float64), lo, hi, precision)
        largest = max(abs(value), scale)
        assert abs(expected_error(histogram, lo, hi, precision) - measured) <= 8 * EPS * largest**2


@pytest.mark.parametrize("zeros", [1_000, 1_000_000])
def test_exact_zeros_cost_nothing(zeros: int) -> None:
    values = np.random.default_rng(0).uniform(0, 8, 100_000).astype(np.float32)
    positive, with_zeros = Histogram.of(values), Histogram.of(np.concatenate([values, np.zeros(zeros, np.float32)]))
    lo, hi = 0.0, 2.0**-10  # a step finer than the bins: every value that is not an exact zero is clipped or rounded
    total = expected_error(positive, lo, hi, Precision()) * positive.count
    # The bin at zero keeps what its neighbours have, at most 4 times the square root of its count off (0.004 % of it all)
    first = float(positive.counts[0])
    slack = (4 * first**0.5 + abs(positive.counts[1] - first) + positive.counts[1] ** 2 / positive.counts[2]) * 2
    found = expected_error(with_zeros, lo, hi, Precision()) * with_zeros.count
    assert abs(found - total) <= slack * positive.width**2 + len(values) * positive.counts.size * EPS * 8**2


def test_half_of_a_relu_is_not_rounding_noise() -> None:
    normal = np.random.default_rng(0).normal(size=200_000)
    values = np.maximum(normal, 0)
    histogram, precision = Histogram.of(values), Precision()
    for hi in (0.05, 0.5, histogram.hi):
        expected, measured = expected_error(histogram, 0.0, hi, precision), measured_error(values, 0.0, hi, precision)
        # 100,000 squares in a mean: 4 / sqrt(n) of the mean for squares of values spread over a step, or of a tail
        assert abs(expected / measured - 1) < 4 / 100_000**0.5


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([-1.7e308, 0.0, 1.7e308], np.inf),
        ([1e-310, 3e-310], 0.0),
        ([1e-45, 3e-45], (4e-90 / 3 * 3.25)),
    ],
    ids=["beyond-the-largest-square", "below-the-smallest-square", "subnormal"],
)
def test_extremes_of_floats_neither_warn_nor_raise(values: list[float], expected: float) -> None:
    histogram = Histogram.of(np.array(values))
    found = expected_error(histogram, histogram.lo, histogram.hi, Precision())
    assert found == pytest.approx(expected, rel=0.5, abs=0)  # the order of magnitude; a bin holds all


@given(values=values32, range_=ends, precision=precisions, power=st.integers(-40, 40))
def test_a_power_of_two_on_the_data_is_its_square_on_the_error(
    values: Array, range_: tuple[float, float], precision: Precision, power: int
) -> None:
    histogram = Histogram.of(values)
    lo, hi = sorted(range_)
    if (
        max(-lo, hi, 0) < 1e-3
        or max(-histogram.lo, histogram.hi) < 1e-3
        or np.any((values != 0) & (abs(values) < 1e-20))
    ):
        return  # float32 has no scale below its smallest normal number, and no bin is narrower
    scaled = Histogram.of(np.ldexp(values, power))
    low, high = (float(np.ldexp(end, power)) for end in (lo, hi))
    error = expected_error(histogram, lo, hi, precision)
    assert expected_error(scaled, low, high, precision) == float(np.ldexp(error, 2 * power))


@given(
    values=values32,
    ranges=st.lists(ends.map(sorted), min_size=1, max_size=4),
    precision=precisions,
    offset=st.booleans(),
)
def test_errors_by_levels_are_those_by_bins(
    values: Array, ranges: list[list[float]], precision: Precision, offset: bool
) -> None:
    histogram = Histogram.of(values + np.float32(1000) if offset else values)
    lo, hi = np.array(ranges, np.float64).T
    exact, _ = error_of_ranges(histogram, precision)
    found = np.ldexp(exact(lo, hi), 2 * histogram.exponent) / histogram.count
    wanted = [expected_error(histogram, low, high, precision) for low, high in ranges]
    # What is subtracted from what is at most the square of the way from the lowest level to the farthest value or level,
    # and each of the levels may be wrong by eps of that, as may the sum over each bin; the other side by what
    # test_error_is_the_integral_over_the_bins allows for the width of a bin.
    scales, _ = precision.grids(lo, hi)
    way = 2 * (max(abs(histogram.lo), abs(histogram.hi)) + scales * precision.top)
    bound = 2 * (precision.top + histogram.counts.size + 8) * EPS * way**2 + scales.astype(float) ** 2 * 2**24 * EPS
    assert np.all(abs(found - wanted) <= bound)


@pytest.mark.parametrize("bits", [8, 10])
def test_the_rough_error_is_that_of_steps_full_of_values(bits: int) -> None:
    histogram, precision = Histogram.of(np.linspace(-5, 11, 100_001)), Precision(bits)
    lo, hi = -np.array([5.0, 4.0, 0.5, 5.0]), np.array([11.0, 10.0, 11.0, 0.5])
    exact, rough = error_of_ranges(histogram, precision)
    # The values in one step may be some more or fewer: at most the step's square times those of a step and a bin.
    step = np.ldexp(precision.grids(lo, hi)[0].astype(float), -histogram.exponent)
    assert np.all(abs(rough(lo, hi) - exact(lo, hi)) <= step**2 * (step + 1) * histogram.counts.max())


@given(values=values32, ranges=st.lists(ends.map(sorted), min_size=1, max_size=5), precision=precisions)
def test_of_equal_ranges_the_first_is_the_one_of_least_error(
    values: Array, ranges: list[list[float]], precision: Precision
) -> None:
    histogram = Histogram.of(values)
    pairs = [(lo, hi) for lo, hi in [*ranges, *ranges[::-1]]]
    lo, hi = np.array(pairs).T
    found = errors(Spread.of(histogram), lo, hi, precision)
    assert least_error(histogram, pairs, precision) == pairs[found.tolist().index(min(found))]

"""The arithmetic of histograms on few bins: grids, merges, and counts of samples, against their definitions."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest

from requant.calibration import Histogram
from requant.calibration.model.session import Array
from requant.calibration.statistics.histogram import CHUNK, MAX_BINS, MIN_EXPONENT, TAIL, Counter, stride_of

UNIT = 2.0**MIN_EXPONENT
"""The width of a bin of tiny values: the smallest."""


def tiny(lo: float, hi: float, counts: list[int]) -> Histogram:
    """Return a histogram with few bins. `lo` and `hi` are in bins."""
    return Histogram(lo * UNIT, hi * UNIT, MIN_EXPONENT, math.floor(lo), np.array(counts, np.int64))


@pytest.mark.parametrize(
    ("lo", "hi", "exponent"),
    [
        (0.0, 2047.0, 0),  # bins 0..2047
        (0.0, 2048.0, 1),  # one bin too many
        (-1024.0, 1023.0, 0),
        (-1024.0, 1024.0, 1),
        (-0.5, 2046.0, 0),
        (-0.5, 2047.0, 1),
        (0.0, 1.0, -10),  # bins 0..1024; of half the width there are 2049
        (2.0**20, 2.0**20 + 2.0**-9, -3),  # a bin is at least 2**-24 of the next power of two
        (2.0**20 - 1, 2.0**20 - 0.5, -4),
        (1.0, 1.0, -23),
        (-1.0, -1.0, -23),
        (0.0, 0.0, -126),
        (0.0, 2.0**-120, -126),
        (0.0, 2.0**-115, -125),  # with bins of 2**-126, 2**-115 would be in bin 2048
    ],
)
def test_a_bin_is_the_least_power_of_two_that_is_permitted(lo: float, hi: float, exponent: int) -> None:
    seen = Histogram.of(np.array([lo, hi]))
    assert (seen.exponent, seen.width) == (exponent, 2.0**exponent)
    assert seen.first == math.floor(lo / 2.0**exponent)
    assert seen.counts.size == math.floor(hi / 2.0**exponent) - seen.first + 1 <= MAX_BINS


def test_edges_are_multiples_of_the_width_between_the_extremes() -> None:
    assert (tiny(-1.75, 2.5, [1, 2, 0, 1, 1]).edges / UNIT).tolist() == [-1.75, -1, 0, 1, 2, 2.5]
    assert (tiny(1.25, 1.5, [2]).edges / UNIT).tolist() == [1.25, 1.5]


def test_merged_bins_are_sums_of_pairs_aligned_at_zero() -> None:
    counts = np.zeros(2048, np.int64)
    counts[[0, 1, 2, 3, -1]] = 1, 2, 4, 8, 16
    fine = Histogram(-1023.5, 1023.5, 0, -1024, counts)
    both = fine | Histogram.of(np.array([2000.0]))
    assert (both.lo, both.hi, both.exponent, both.first) == (-1023.5, 2000.0, 1, -512)
    expected = {0: 1 + 2, 1: 4 + 8, 1023: 16, 1512: 1}  # bins of -1024, -1022, 1022 and 2000
    assert {index: int(both.counts[index]) for index in np.flatnonzero(both.counts)} == expected
    assert both == Histogram.of(np.array([2000.0])) | fine


def test_an_odd_first_bin_shares_its_coarse_bin_with_the_bin_before() -> None:
    counts = np.zeros(2047, np.int64)
    counts[[0, 1, 2, -1]] = 1, 2, 4, 8
    both = Histogram(-1022.5, 1023.5, 0, -1023, counts) | Histogram.of(np.array([-1024.0, 2047.0]))
    assert (both.exponent, both.first) == (1, -512)
    assert {index: int(both.counts[index]) for index in np.flatnonzero(both.counts)} == {
        0: 1 + 1,
        1: 6,
        1023: 8,
        1535: 1,
    }


@pytest.mark.parametrize("counts", [[1, -1, 1], [0, 1, 1], [1, 1, 0], [1, 1], [1, 1, 1, 1]], ids=str)
def test_counts_fit_the_extremes(counts: list[int]) -> None:
    assert tiny(0.5, 2.5, [1, 0, 1]).count == 2
    with pytest.raises(ValueError, match="the counts do not fit"):
        tiny(0.5, 2.5, counts)


def test_counts_are_int64() -> None:
    with pytest.raises(ValueError, match="do not fit the grid"):
        Histogram(0.0, 0.0, MIN_EXPONENT, 0, np.ones(1, np.int32))


@pytest.mark.parametrize(("exponent", "first"), [(-125, 0), (-126, 1)])
def test_the_grid_follows_from_the_extremes(exponent: int, first: int) -> None:
    with pytest.raises(ValueError, match="the grid does not follow"):
        Histogram(0.5 * UNIT, 2.5 * UNIT, exponent, first, np.ones(3, np.int64))


def test_histograms_are_equal_only_if_extremes_and_counts_are() -> None:
    seen = tiny(0.5, 2.5, [1, 0, 1])
    assert seen == tiny(0.5, 2.5, [1, 0, 1])
    assert seen != tiny(0.25, 2.5, [1, 0, 1])
    assert seen != tiny(0.5, 2.25, [1, 0, 1])
    assert seen != tiny(0.5, 2.5, [1, 1, 1])
    assert seen != 1
    with pytest.raises(TypeError):
        operator.or_(seen, 1)


@pytest.mark.parametrize(
    ("shape", "limit", "stride"),
    [
        ((10,), 3, 7),  # 4 and 6 share a factor with 10, 5 too
        ((7,), 2, 4),
        ((9, 4, 5), 30, 7),  # at least 6; the last two axes have 20 places
        ((4, 9, 5), 30, 7),
        ((2, 7, 3, 5), 30, 7),  # the axes before do not matter
    ],
)
def test_a_stride_has_no_factor_of_the_last_two_axes(shape: tuple[int, ...], limit: int, stride: int) -> None:
    assert stride_of(shape, limit) == stride


def by_definition(values: Array, limit: int) -> Array:
    """Return the counts of more values than `limit`: tails are exact, the rest is shared out as the samples are."""
    full = Histogram.of(values)
    stride = stride_of(values.shape, limit)
    bins = np.floor(values.reshape(-1).astype(np.float64) / full.width).astype(np.int64) - full.first
    sampled = np.bincount(bins[stride // 2 :: stride], minlength=full.counts.size)
    few = int(sampled.sum()) // TAIL
    left = right = 0
    while sampled[: left + 1].sum() <= few:
        left += 1
    while sampled[sampled.size - right - 1 :].sum() <= few:
        right += 1
    counts, inner = full.counts.copy(), slice(left, sampled.size - right)
    total, before, part = int(counts[inner].sum()), 0, 0
    for index in range(*inner.indices(counts.size)):
        part += int(sampled[index])
        whole = part * total // int(sampled[inner].sum())
        counts[index], before = whole - before, whole
    return counts


@pytest.mark.parametrize("limit", [TAIL - 1, 1000, 40_000])
@pytest.mark.parametrize("shape", [(CHUNK * 2 + 17,), (3, 151, 211)], ids=str)
@pytest.mark.parametrize("kind", ["both-signs", "positive", "negative"])
def test_samples_are_counted_by_definition(kind: str, shape: tuple[int, ...], limit: int) -> None:
    values = np.random.default_rng(limit).standard_t(4, shape).astype(np.float32)
    values = {"both-signs": values, "positive": np.abs(values) + 1, "negative": -np.abs(values) - 1}[kind]
    counter = Counter(limit)
    assert counter.add(values) == (values.min(), values.max())
    assert counter.histogram().counts.tolist() == by_definition(values, limit).tolist()


def test_as_many_values_as_the_limit_are_all_counted() -> None:
    values = np.random.default_rng(0).normal(size=(10, 100)).astype(np.float32)
    for limit, samples in ((1000, 1), (100, 10), (1000, 3)):  # 3 does not divide 10: one sample
        counter = Counter(limit)
        counter.add(values, samples)
        assert counter.histogram() == Histogram.of(values)
    counter = Counter(999)
    counter.add(values)
    assert counter.histogram() != Histogram.of(values)


def test_a_number_is_a_sample() -> None:
    counter = Counter(1)
    assert counter.add(np.asarray(2.5, np.float32), samples=4) == (2.5, 2.5)
    assert counter.histogram().count == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1])
def test_chunks_are_counted_once(size: int, dtype: type) -> None:
    values: Array = np.arange(size).astype(dtype)  # 0..32768: 16 of each bin
    seen = Histogram.of(values)
    assert seen.exponent == (4 if size <= CHUNK else 5)
    assert seen.counts.tolist() == np.bincount(np.arange(size) >> seen.exponent).tolist()


def test_a_tiny_negative_value_is_below_zero() -> None:
    for values in ([-5e-324, 1e10], [-1e-310, -5e-324, 0.0, 1e300]):
        seen = Histogram.of(np.array(values))
        assert seen.first == -1
        assert seen.counts[:2].tolist() == [sum(value < 0 for value in values), sum(value == 0 for value in values)]


def test_no_values_have_no_histogram() -> None:
    with pytest.raises(ValueError, match="has no values"):
        Counter().histogram()
    with pytest.raises(ValueError, match="has no values"):
        Counter().add(np.zeros((0, 3), np.float32))

"""Sums over runs on small numbers: every result is exact."""

from __future__ import annotations

import operator

import numpy as np
import pytest

from requant.calibration import Channels, Moments, Runs
from requant.calibration.statistics.sums import SUMMED

VALUES = np.array([[[1, -2, 3], [4, 5, -6]], [[0, 2, 0], [-1, 8, 9]]], np.float32)
"""(2, 2, 3)"""


@pytest.mark.parametrize(
    ("axis", "lo", "hi", "total"),
    [
        (0, [-6, -1], [5, 9], [5, 18]),
        (1, [-2, -6], [3, 9], [4, 19]),
        (2, [-1, -2, -6], [4, 8, 9], [4, 13, 6]),
    ],
)
def test_channels_of_an_axis(axis: int, lo: list[float], hi: list[float], total: list[float]) -> None:
    for given in (axis, axis - 3):
        seen = Channels.of(VALUES, given)
        assert (seen.lo.tolist(), seen.hi.tolist(), seen.total.value.tolist()) == (lo, hi, total)
        assert seen.count == 12 // VALUES.shape[axis]
        assert seen.mean.tolist() == [part / seen.count for part in total]
        assert seen.lo.dtype == seen.hi.dtype == np.float64
        with pytest.raises(ValueError, match="read-only"):
            seen.lo[0] = 0
        with pytest.raises(ValueError, match="read-only"):
            seen.hi[0] = 0


@pytest.mark.parametrize("axis", [3, -4])
def test_an_axis_beyond_the_rank_is_refused(axis: int) -> None:
    with pytest.raises(ValueError, match=f"has no axis {axis}"):
        Channels.of(VALUES, axis)


def test_channels_of_a_vector_are_its_values() -> None:
    seen = Channels.of(np.array([-0.0, 2.0]), 0)
    assert (seen.count, seen.lo.tolist(), seen.hi.tolist()) == (1, [0, 2], [0, 2])
    assert not np.signbit(seen.lo).any()
    assert not np.signbit(seen.hi).any()


def test_channels_of_runs() -> None:
    lo, hi = np.array([[-1.0, 2], [-3, 4]]), np.array([[5.0, 6], [4, 7]])
    seen = Channels.of_runs(lo, hi, np.array([[1.0, 2], [4, 8]]), 6)
    assert (seen.lo.tolist(), seen.hi.tolist(), seen.total.value.tolist()) == ([-3, 2], [5, 7], [5, 10])
    assert seen.count == 6


def test_merged_channels() -> None:
    seen = Channels.of(VALUES[:1], 2) | Channels.of(VALUES[1:], 2)
    assert seen == Channels.of(VALUES, 2)
    assert hash(seen) == hash(Channels.of(VALUES, 2))
    with pytest.raises(TypeError):
        operator.or_(seen, 1)


def test_channels_are_equal_only_if_all_attributes_are() -> None:
    lo, hi, total = np.array([[-1.0, -1]]), np.array([[2.0, 2]]), np.array([[1.0, 1]])
    seen = Channels.of_runs(lo, hi, total, 4)
    assert seen == Channels.of_runs(lo, hi, total, 4)
    assert seen != Channels.of_runs(lo * [1, 2], hi, total, 4)
    assert seen != Channels.of_runs(lo, hi * [1, 2], total, 4)
    assert seen != Channels.of_runs(lo, hi, total * [1, 2], 4)
    assert seen != Channels.of_runs(lo, hi, total, 5)
    assert seen != 1


def test_moments_are_those_of_the_population() -> None:
    seen = Moments.of(VALUES) | Moments.of(np.array([3.0, 5.0]))
    values = [*VALUES.ravel().tolist(), 3, 5]
    mean = sum(values) / 14
    assert (seen.count, seen.mean) == (14, mean)
    assert seen.variance == pytest.approx(sum((value - mean) ** 2 for value in values) / 14, rel=1e-14)
    assert seen.powers.value.tolist() == [sum(values), sum(value**2 for value in values)]
    with pytest.raises(TypeError):
        operator.or_(seen, 1)


def test_a_variance_is_never_negative() -> None:
    assert Moments.of(np.full(3, 0.1)).variance < 1e-17
    seen = [Moments.of(np.full(n, 1e8 + 0.1)).variance for n in range(1, 60)]  # rounding is about 1
    assert min(seen) == 0


@pytest.mark.parametrize("size", [SUMMED - 1, SUMMED, SUMMED + 1, 2 * SUMMED + 3])
def test_long_arrays_are_summed_once(size: int) -> None:
    seen = Moments.of(np.full(size, 3.0, np.float32))
    assert (seen.count, *seen.powers.value) == (size, 3 * size, 9 * size)


def test_blocks_of_runs_double() -> None:
    ends = np.array([[-float(n), 2.0 * n] for n in range(1, 9)])
    seen = Runs.of(range(8), ends)
    assert seen.blocks == {0: (-1, 2), 1: (-3, 6), 2: (-7, 14), 3: (-8, 16)}
    assert seen.growth == {1: (-1, 2), 3: (-3, 6), 7: (-7, 14), 15: (-8, 16)}
    assert (seen.count, seen.mean_lo, seen.mean_hi) == (8, -4.5, 9)


def test_merged_runs() -> None:
    ends = np.array([[-1.0, 2], [-3, 4], [-5, 1], [-2, 9]])
    seen = Runs.of([0, 1], ends[:2]) | Runs.of([2, 3], ends[2:])
    assert seen == Runs.of(range(4), ends)
    assert seen.blocks == {0: (-1, 2), 1: (-5, 4), 2: (-2, 9)}
    assert seen.count == 4
    with pytest.raises(TypeError):
        operator.or_(seen, 1)


def test_runs_of_several_tensors_are_those_of_each() -> None:
    ends = np.array([[[-1.0, 2], [0, 1]], [[-3, 4], [5, 6]]])  # (runs, tensors, 2)
    assert Runs.of_many([0, 4], ends) == [Runs.of([0, 4], ends[:, 0]), Runs.of([0, 4], ends[:, 1])]
    assert Runs.of([0, 4], ends[:, 1]).blocks == {0: (0, 1), 2: (5, 6)}
    with pytest.raises(ValueError, match="no values"):
        Runs.of([], np.zeros((0, 2)))

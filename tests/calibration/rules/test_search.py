"""The search for a range: the ranges that it evaluates, in closed form, and the one that it returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from requant.calibration import Histogram
from requant.calibration.model.session import Array
from requant.calibration.rules.precision import Precision
from requant.calibration.rules.search import BOTH, FEW, Places, least

SYMMETRIC = Precision(symmetric=True)
Ranges = list[tuple[float, float]]


@dataclass
class Recorder:
    """An objective that records the ranges of each call."""

    function: Callable[[Array, Array], Array]
    calls: list[Ranges] = field(default_factory=list)

    def __call__(self, lo: Array, hi: Array) -> Array:
        self.calls.append(list(zip(lo.tolist(), hi.tolist(), strict=True)))
        return self.function(lo, hi)


def zeros(lo: Array, hi: Array) -> Array:
    return np.zeros(np.broadcast(lo, hi).shape)


def search(
    ends: tuple[float, float],
    places: Places,
    *,
    precision: Precision = SYMMETRIC,
    objective: Callable[[Array, Array], Array] = zeros,
    rough: Callable[[Array, Array], Array] = zeros,
) -> tuple[tuple[float, float], list[Ranges], list[Ranges]]:
    """Return the range, and the ranges of each call of the objective and of its estimate."""
    exact, estimate = Recorder(objective), Recorder(rough)
    found = least(Histogram.of(np.array(ends)), precision, exact, estimate, places)
    return found, exact.calls, estimate.calls


COARSE = Places(octaves=3.0, coarse=4, fine=2.0)
"""Factors 1, 1/2, 1/4 and 1/8, without refinement."""


@pytest.mark.parametrize(
    ("ends", "precision", "expected"),
    [
        ((0.0, 8.0), Precision(), [[(0, 8), (0, 4), (0, 2), (0, 1)]]),
        ((0.0, 8.0), SYMMETRIC, [[(0, 8), (0, 4), (0, 2), (0, 1)]]),
        ((2.0, 8.0), Precision(), [[(2, 8), (2, 4), (2, 2), (2, 2)]]),
        ((-8.0, 0.0), Precision(), [[(-8, 0), (-4, 0), (-2, 0), (-1, 0)]]),
        ((-8.0, -2.0), Precision(), [[(-8, -2), (-4, -2), (-2, -2), (-2, -2)]]),
        ((-8.0, 0.0), SYMMETRIC, [[(-8, 0), (-4, 0), (-2, 0), (-1, 0)]]),
        (
            (-8.0, 2.0),
            SYMMETRIC,
            [[(-8, 2), (-4, 2), (-2, 2), (-1, 1)], [(0, 2), (0, 1), (0, 0.5), (0, 0.25)]],
        ),
        (
            (-2.0, 8.0),
            SYMMETRIC,
            [[(-2, 8), (-2, 4), (-2, 2), (-1, 1)], [(0, 8), (0, 4), (0, 2), (0, 1)]],
        ),
    ],
    ids=str,
)
def test_one_end_or_one_magnitude_moves_by_octaves(
    ends: tuple[float, float], precision: Precision, expected: list[Ranges]
) -> None:
    _, exact, estimate = search(ends, COARSE, precision=precision)
    assert estimate == expected
    assert exact == expected  # fewer than FEW ranges


def test_both_ends_move_if_the_values_have_both_signs() -> None:
    _, _, (coarse,) = search((-4.0, 8.0), Places(BOTH - 1.0, 4, 2.0), precision=Precision())
    assert coarse == [(-4 * 0.5**i, 8 * 0.5**j) for i in range(BOTH) for j in range(BOTH)]


def test_the_objective_is_computed_for_the_most_promising_ranges_and_the_extremes() -> None:
    places = Places(octaves=63.0, coarse=64, fine=2.0)
    _, (coarse,), _ = search((0.0, 1.0), places, rough=lambda lo, hi: hi)
    assert coarse == [(0, 1), *((0, 0.5**i) for i in range(64 - FEW, 64))]
    found, _, _ = search((0.0, 1.0), places, rough=lambda lo, hi: hi, objective=lambda lo, hi: -hi)
    assert found == (0, 1)


def test_each_refinement_has_a_third_of_the_step_around_the_best_place() -> None:
    def objective(lo: Array, hi: Array) -> Array:
        return np.abs(np.log2(hi) - 1.0) + 1.0  # least at 2 = 8 * 2**-2, a place of the coarse round

    found, calls, _ = search((0.0, 8.0), Places(3.0, 4, 0.2), objective=objective)
    assert found == (0, 2)
    cuts = [[-math.log2(hi / 8) for _, hi in call] for call in calls]
    expected = [[2 + step * place for place in (-2, -1, 0, 1, 2)] for step in (1 / 3, 1 / 9)]
    assert len(cuts) == 1 + len(expected)  # 1/9 is the first step below 0.2
    np.testing.assert_allclose(cuts[1:], expected, atol=1e-12)


def test_a_step_as_wide_as_the_limit_is_refined() -> None:
    _, calls, _ = search((0.0, 8.0), Places(3.0, 4, 1.0))
    assert [len(call) for call in calls] == [4, 5]


def test_no_range_is_wider_than_the_extremes() -> None:
    _, calls, _ = search((0.0, 8.0), Places(3.0, 4, 0.5))
    np.testing.assert_allclose([hi for _, hi in calls[1]], [8, 8, 8, 8 * 2 ** (-1 / 3), 8 * 2 ** (-2 / 3)])


def test_of_equal_places_the_first_stays_the_centre() -> None:
    def objective(lo: Array, hi: Array) -> Array:
        return np.where(hi < 4.0, 1.0, 2.0)  # equal for all cuts above 1

    found, calls, _ = search((0.0, 8.0), Places(3.0, 4, 0.2), objective=objective)
    assert found == (0, 2)
    assert [call[2] for call in calls[1:]] == [(0, 2), (0, 2)]


def test_of_equal_ranges_the_extremes_win() -> None:
    assert search((-8.0, 2.0), Places(3.0, 4, 0.2))[0] == (-8, 2)
    assert search((-8.0, 2.0), Places(15.0, 4, 0.2), precision=Precision())[0] == (-8, 2)


def test_without_any_permitted_range_the_result_is_the_extremes() -> None:
    found, calls, _ = search((0.0, 8.0), Places(3.0, 4, 0.5), objective=lambda lo, hi: np.full(len(hi), np.inf))
    assert found == (0, 8)
    assert calls[1][:3] == [(0, 8)] * 3  # refined around the extremes


@pytest.mark.parametrize(("other", "rounds"), [(0.5, 2), (1.5, 2), (2.0, 2), (2.25, 1)])
def test_a_family_that_is_more_than_twice_as_bad_is_not_refined(other: float, rounds: int) -> None:
    def objective(lo: Array, hi: Array) -> Array:
        return np.where(lo < 0, 1.0, other)

    found, calls, _ = search((-8.0, 2.0), Places(3.0, 4, 0.5), objective=objective)
    assert [call[0][0] for call in calls] == [-8, -8] + [0] * rounds
    assert found == ((0, 2) if other < 1 else (-8, 2))


def test_an_end_that_underflows_is_zero_without_a_sign() -> None:
    _, _, (coarse,) = search((-5e-324, 1.0), Places(BOTH - 1.0, 4, 2.0), precision=Precision())
    lows = [lo for lo, _ in coarse]
    assert 0.0 in lows
    assert not [lo for lo in lows if lo == 0.0 and math.copysign(1.0, lo) < 0]

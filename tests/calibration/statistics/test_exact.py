"""Exact sums: equal to those of fractions, whatever the order, the grouping and the magnitudes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.calibration import ExactSum
from requant.calibration.model.session import Array

numbers = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 5e-324, 1.7e308])
columns = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20)


def exactly(total: ExactSum) -> list[Fraction]:
    """Read the digits."""
    value = [Fraction(0)] * total.shape[0]
    for power, digit in total.digits.items():
        value = [one + int(part) * Fraction(2) ** (32 * power) for one, part in zip(value, digit, strict=True)]
    return value


@given(rows=columns)
def test_the_digits_hold_the_exact_sum(rows: list[tuple[float, float]]) -> None:
    total = ExactSum.of(np.array(rows))
    assert exactly(total) == [sum(map(Fraction, column)) for column in zip(*rows, strict=True)]
    assert all(((digit >= -(2**31)) & (digit < 2**31)).all() for digit in total.digits.values())
    assert all(digit.any() for digit in total.digits.values())


@given(rows=columns, cut=st.integers(0, 20), order=st.randoms(use_true_random=False))
def test_order_and_grouping_change_nothing(rows: list[tuple[float, float]], cut: int, order: object) -> None:
    whole = ExactSum.of(np.array(rows))
    shuffled = list(rows)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    parts = [np.array(part).reshape(-1, 2) for part in (shuffled[:cut], shuffled[cut:])]
    merged = ExactSum.of(parts[0]) | ExactSum.of(parts[1])
    assert merged == whole
    assert hash(merged) == hash(whole)


@given(rows=st.lists(st.tuples(st.floats(-1e30, 1e30), st.floats(-1e-30, 1e-30)), min_size=1, max_size=20))
def test_the_value_is_rounded_by_two_units_in_the_last_place_at_most(rows: list[tuple[float, float]]) -> None:
    total = ExactSum.of(np.array(rows))
    for value, exact in zip(total.value.tolist(), exactly(total), strict=True):
        assert abs(Fraction(value) - exact) <= 2 * Fraction(np.spacing(abs(value)))


def test_cancellation_leaves_nothing_behind() -> None:
    total = ExactSum.of(np.array([[1e300], [1e-300], [-1e300]])) | ExactSum.of(np.array([[-1e-300]]))
    assert total == ExactSum.of(np.zeros((1, 1)))
    assert not total.digits
    assert total.value.tolist() == [0.0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        ExactSum.of(np.array([[1.0], [value]]))


def test_shapes_must_agree() -> None:
    two: Array = np.ones((1, 2))
    with pytest.raises(ValueError, match=r"has shape \(3,\), but had \(2,\)"):
        ExactSum.of(two) | ExactSum.of(np.ones((1, 3)))


@given(rows=columns)
def test_parts_are_the_sums_of_the_parts(rows: list[tuple[float, float]]) -> None:
    values = np.array(rows)
    assert ExactSum.of(values).parts() == [ExactSum.of(values[:, 0]), ExactSum.of(values[:, 1])]


def test_2_to_the_29_values_are_too_many_for_one_step() -> None:
    assert ExactSum.of(np.zeros((2**29 - 1, 0))).shape == (0,)  # arrays without elements need no memory
    with pytest.raises(ValueError, match="too many values"):
        ExactSum.of(np.zeros((2**29, 0)))


def test_sums_are_equal_only_if_shapes_and_digits_are() -> None:
    assert ExactSum.of(np.zeros((1, 1))) != ExactSum.of(np.zeros((1, 2)))  # neither has digits
    assert ExactSum.of(np.ones((1, 1))) != ExactSum.of(np.zeros((1, 1)))
    assert ExactSum.of(np.zeros((1, 1))) != ExactSum.of(np.ones((1, 1)))
    assert ExactSum.of(np.ones((1, 1))) != ExactSum.of(np.full((1, 1), 2.0))
    assert ExactSum.of(np.array([[1.0, 2.0]])) != ExactSum.of(np.array([[1.0, 3.0]]))
    assert ExactSum.of(np.ones((1, 1))) != 1.0


@pytest.mark.parametrize("value", [2.0**31, 2.0**31 - 1, -(2.0**31), -(2.0**31) - 1, 2.0**63, -(2.0**63), 2.0**-1074])
def test_digits_are_balanced(value: float) -> None:
    total = ExactSum.of(np.array([[value]]))
    assert exactly(total) == [Fraction(value)]
    assert all(-(2**31) <= int(digit[0]) < 2**31 and digit.any() for digit in total.digits.values())
    assert total.value.tolist() == [value]


def test_a_carry_meets_the_digit_above_it() -> None:
    # 2**31 - 1 in both digits; 1 more carries 1 into the upper digit, and that carries again.
    full = (2**31 - 1) * (2.0**32 + 1)  # 63 bits, not a float64: two floats
    total = ExactSum.of(np.array([[(2**31 - 1) * 2.0**32], [2.0**31 - 1], [1.0]]))
    assert exactly(total) == [Fraction(2**31 - 1) * (2**32 + 1) + 1]
    assert {k: digit.tolist() for k, digit in total.digits.items()} == {0: [-(2**31)], 1: [-(2**31)], 2: [1]}
    assert total.value.tolist() == [full]

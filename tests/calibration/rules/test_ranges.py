"""Range rules: what they choose, and how they are written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from requant import RequantError, UnknownNameError
from requant.calibration import RULES, Histogram, MinMax, Rule, parse_rule
from requant.calibration.model.session import Array

values32 = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-100, 100, width=32))
percentages = st.floats(50, 100, exclude_min=True)


@given(values=values32, p=percentages)
def test_percentile_is_within_a_bin_of_the_values_percentile(values: Array, p: float) -> None:
    seen = Histogram.of(values)
    lo, hi = Rule("percentile", p)(seen)
    # Both ends are the "inverted CDF" percentile of the data up to its position inside one bin.
    hi_of_data = float(np.percentile(values, p, method="inverted_cdf"))
    lo_of_data = -float(np.percentile(-values, p, method="inverted_cdf"))
    assert abs(hi - hi_of_data) <= seen.width
    assert abs(lo - lo_of_data) <= seen.width


@given(values=values32, p=percentages)
def test_percentile_stays_within_the_extremes(values: Array, p: float) -> None:
    seen = Histogram.of(values)
    lo, hi = Rule("percentile", p)(seen)
    assert seen.lo <= lo <= hi <= seen.hi


@given(values=values32, p=percentages)
def test_percentile_of_mirrored_values_is_mirrored_to_a_bin(values: Array, p: float) -> None:
    seen, mirrored = Histogram.of(values), Histogram.of(-values)
    (lo, hi), (mirrored_lo, mirrored_hi) = Rule("percentile", p)(seen), Rule("percentile", p)(mirrored)
    # Bins are closed on the left, so a value on an edge changes its bin when it is mirrored.
    assert abs(lo + mirrored_hi) <= seen.width + mirrored.width
    assert abs(hi + mirrored_lo) <= seen.width + mirrored.width


@given(values=values32)
def test_percentile_100_is_minmax(values: Array) -> None:
    seen = Histogram.of(values)
    assert Rule("percentile", 100.0)(seen) == Rule("minmax")(seen) == (seen.lo, seen.hi)


def test_percentile_interpolates_inside_a_bin() -> None:
    # All values but the extremes are in bin 1 of width 1; a quarter of the mass lies beyond the 75th percentile.
    counts = np.zeros(2048, np.int64)
    counts[[0, 1, 2047]] = [1, 998, 1]
    seen = Histogram(0.0, 2047.5, 0, 0, counts)
    lo, hi = Rule("percentile", 75.0)(seen)
    assert (lo, hi) == pytest.approx((1 + 249 / 998, 1 + 749 / 998), abs=1e-12)


def test_outliers_are_cut() -> None:
    values = np.concatenate([np.linspace(0, 1, 9_999), [1000]]).astype(np.float32)
    seen = Histogram.of(values)
    assert Rule("percentile", 99.9)(seen)[1] <= 1 + seen.width


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("minmax", "minmax"),
        ("percentile", "percentile(99.99)"),
        ("percentile(99.9)", "percentile(99.9)"),
        ("percentile=99.9", "percentile(99.9)"),
        (" percentile( 100 ) ", "percentile(100)"),
    ],
)
def test_rules_are_read_and_printed(text: str, canonical: str) -> None:
    assert str(parse_rule(text)) == canonical
    assert parse_rule(canonical) == parse_rule(text)


@given(p=percentages)
def test_printed_rules_read_back(p: float) -> None:
    assert parse_rule(str(Rule("percentile", p))) == Rule("percentile", p)


def test_every_rule_reads_back_by_its_name() -> None:
    assert {parse_rule(name).name for name in RULES} == set(RULES)


def test_unknown_rule_has_near_names() -> None:
    with pytest.raises(UnknownNameError, match=r"range rule.*'percentil'.*'percentile'"):
        parse_rule("percentil(99)")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("percentile(x)", "'x' is not a number"),
        ("percentile()", "'' is not a number"),
        ("percentile=", "'' is not a number"),
        ("percentile(50)", "above 50 and at most 100"),
        ("percentile(100.1)", "above 50 and at most 100"),
        ("percentile(nan)", "above 50 and at most 100"),
        ("minmax(3)", "takes no number"),
        ("percentile(99", "cannot read"),
        ("", "cannot read"),
        ("percentile 99", "cannot read"),
    ],
)
def test_bad_numbers_are_refused(text: str, problem: str) -> None:
    with pytest.raises(RequantError, match=problem) as caught:
        parse_rule(text)
    assert not isinstance(caught.value, UnknownNameError)


@pytest.mark.parametrize("name", RULES)
def test_the_range_of_min_and_max_alone_is_min_and_max(name: str) -> None:
    assert parse_rule(name)(MinMax(-1, 3, 20_000)) == (-1, 3)


@pytest.mark.parametrize(("text", "needed"), [("minmax", False), ("percentile", True)])
def test_what_a_rule_needs(text: str, needed: bool) -> None:
    assert parse_rule(text).needs_histogram is needed

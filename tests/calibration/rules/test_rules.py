"""What the rules that look at a whole histogram choose."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from requant.calibration import RULES, Histogram, MinMax, Rule, Statistic, parse_rule
from requant.calibration.model.session import Array
from requant.calibration.rules.aciq import Deviations, laplace_clip, normal_clip
from requant.calibration.rules.entropy import divergence, entropy
from requant.calibration.rules.error import Spread, errors, expected_error, smooth_counts
from requant.calibration.rules.precision import Precision
from requant.calibration.rules.ranges import CANDIDATES, DEFAULT, Range
from requant.calibration.statistics.sums import Runs

SYMMETRIC = Precision(symmetric=True)
PRECISIONS = [DEFAULT, SYMMETRIC, Precision(4), Precision(4, symmetric=True)]
TEXTS = (*CANDIDATES, "auto")
GUARDED = ("mse", "entropy", "auto")
"""The rules whose range has no larger expected error than the extremes."""
SIZE = 50_000
EPS, LARGEST = float(np.finfo(np.float64).eps), float(np.finfo(np.float64).max)

each_rule = pytest.mark.parametrize("text", TEXTS)
each_precision = pytest.mark.parametrize("precision", PRECISIONS, ids=["u8", "u8-symmetric", "u4", "u4-symmetric"])
rules = st.sampled_from(TEXTS).map(parse_rule)
precisions = st.sampled_from(PRECISIONS)
values32 = hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-100, 100, width=32))


def runs_of(*arrays: Array) -> Runs:
    """Return what a rule may know of single runs."""
    (found,) = Runs.of_many(range(len(arrays)), np.array([[(each.min(), each.max())] for each in arrays], np.float64))
    return found


def drawn(make: Callable[[np.random.Generator], Array]) -> Array:
    """Return values, always the same."""
    return np.asarray(make(np.random.default_rng(7)), np.float32)


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


SHAPES: dict[str, Array] = {
    "normal": drawn(lambda r: r.normal(size=SIZE)),
    "normal-off-centre": drawn(lambda r: r.normal(0.7, 1.0, SIZE)),
    "laplace": drawn(lambda r: r.laplace(size=SIZE)),
    "uniform": drawn(lambda r: r.uniform(-3, 5, SIZE)),
    "t3": drawn(lambda r: r.standard_t(3, SIZE)),
    "t2": drawn(lambda r: r.standard_t(2, SIZE)),
    "relu": drawn(lambda r: np.maximum(r.normal(size=SIZE), 0)),
    "relu-t3": drawn(lambda r: np.maximum(r.standard_t(3, SIZE), 0)),
    "negative": drawn(lambda r: -r.exponential(size=SIZE)),
    "silu": drawn(lambda r: silu(r.normal(0, 3, SIZE))),
    "lognormal": drawn(lambda r: r.lognormal(sigma=1.5, size=SIZE)),
    "far-from-zero": drawn(lambda r: r.normal(100, 1, SIZE)),
    "outlier": drawn(lambda r: np.append(r.normal(size=SIZE), 60.3)),
    "two-heaps": drawn(lambda r: np.concatenate([r.normal(-5, 0.1, SIZE), r.normal(9, 0.1, SIZE)])),
    "sigmoid": drawn(lambda r: 1 / (1 + np.exp(-4 * r.normal(size=SIZE)))),
    "clip-6": drawn(lambda r: np.clip(r.normal(2, 3, SIZE), 0, 6)),
}
HISTOGRAMS = {name: Histogram.of(values) for name, values in SHAPES.items()}
each_shape = pytest.mark.parametrize("shape", SHAPES)

EDGES: dict[str, list[float]] = {
    "zero": [0.0],
    "zeros": [0.0] * 100,
    "minus-zero": [-0.0, 0.0],
    "one-value": [3.25],
    "one-negative-value": [-3.25],
    "constant": [0.1] * 1000,
    "two-points": [-1.0] * 10 + [2.0] * 10,
    "zero-and-one": [0.0] * 1000 + [1.0],
    "minus-one-and-zero": [-1.0] + [0.0] * 1000,
    "three-points": [-1e-3, 0.0, 1e3],
    "outlier-1e30": [*np.linspace(-1, 1, 999), 1e30],
    "outliers-1e30": [-1e30, *np.linspace(-1, 1, 999), 1e30],
    "largest-float32": [-3.4028234e38, 0.0, 3.4028234e38],
    "subnormal-float32": [1e-45, 1e-42, 1e-39],
    "subnormal-both-sides": [-1e-42, 0.0, 1e-42],
    "smallest-normal": [1.1754944e-38],
    "narrow-far-from-zero": [1000.0, 1000.0001, 1000.0002],
    "positive": [1.0, 2.0, 3.0, 300.0],
    "negative": [-300.0, -3.0, -2.0, -1.0],
}
WIDE_EDGES: dict[str, list[float]] = {
    "largest": [-LARGEST, 1.0, LARGEST],
    "largest-positive": [1.0, LARGEST],
    "smallest": [5e-324, 1e-323],
    "smallest-both-sides": [-5e-324, 0.0, 5e-324],
    "all-of-float64": [-1e300, -1.0, 1e-300, 1e300],
    "1e200": [0.0, 1e190, 1e200],
}
ALL_EDGES = {name: np.array(values, np.float32) for name, values in EDGES.items()} | {
    f"float64-{name}": np.array(values) for name, values in (EDGES | WIDE_EDGES).items()
}


def choose(text: str, seen: Statistic, precision: Precision = DEFAULT, runs: Runs | None = None) -> Range:
    """Apply a rule and assert what is true of every rule."""
    lo, hi = parse_rule(text)(seen, runs, precision)
    assert isinstance(lo, float)
    assert isinstance(hi, float)
    assert seen.lo <= lo <= hi <= seen.hi
    assert (math.copysign(1, lo), math.copysign(1, hi)) == (-1 if lo < 0 else 1, -1 if hi < 0 else 1)  # no -0.0
    return lo, hi


@pytest.mark.parametrize("edge", ALL_EDGES)
def test_no_data_is_too_odd(edge: str) -> None:
    values = ALL_EDGES[edge]
    seen, runs = Histogram.of(values), runs_of(values[:1], values)
    for text, precision in product(TEXTS, [*PRECISIONS, Precision(16)]):
        choose(text, seen, precision, runs)


@each_rule
@pytest.mark.parametrize("name", ["zeros", "one-value", "one-negative-value", "constant"])
def test_a_constant_has_the_range_of_its_value(name: str, text: str) -> None:
    value = float(np.float32(EDGES[name][0]))
    assert choose(text, Histogram.of(ALL_EDGES[name])) == (value, value)


@given(values=values32, rule=rules, precision=precisions)
def test_every_range_lies_within_the_extremes(values: Array, rule: Rule, precision: Precision) -> None:
    choose(str(rule), Histogram.of(values), precision, runs_of(values[:1], values))


@given(values=values32, rule=rules, precision=precisions, cut=st.integers(0, 300))
def test_neither_order_nor_split_of_the_data_matters(values: Array, rule: Rule, precision: Precision, cut: int) -> None:
    whole = Histogram.of(values)
    parts = [Histogram.of(part) for part in (values[:cut], values[cut:]) if part.size]
    merged = parts[-1] | parts[0] if len(parts) > 1 else parts[0]
    assert rule(merged, None, precision) == rule(whole, None, precision)
    assert rule(whole, None, precision) == rule(whole, None, precision)


@given(values=values32, rule=rules, precision=precisions, power=st.integers(-30, 30))
def test_a_power_of_two_on_the_data_is_one_on_the_range(
    values: Array, rule: Rule, precision: Precision, power: int
) -> None:
    assume(abs(values).max() > 1e-6)  # float32 has no scale below its smallest normal number,
    assume(not np.any((values != 0) & (abs(values) < 1e-20)))  # and no bin is narrower
    scaled = np.ldexp(values, power)
    lo, hi = rule(Histogram.of(values), runs_of(values[:1], values), precision)
    again = rule(Histogram.of(scaled), runs_of(scaled[:1], scaled), precision)
    assert again == (math.ldexp(lo, power), math.ldexp(hi, power))


@each_shape
@pytest.mark.parametrize("power", [-60, 50])
def test_a_power_of_two_on_real_shapes_is_one_on_the_range(shape: str, power: int) -> None:
    scaled = Histogram.of(np.ldexp(SHAPES[shape], power))
    for text in TEXTS:
        lo, hi = choose(text, HISTOGRAMS[shape])
        assert choose(text, scaled) == (math.ldexp(lo, power), math.ldexp(hi, power)), text


def mirrored(histogram: Histogram) -> Histogram:
    """Return the histogram of the values with the other sign, none of which lies on an edge."""
    first = -histogram.first - histogram.counts.size
    return Histogram(-histogram.hi, -histogram.lo, histogram.exponent, first, histogram.counts[::-1].copy())


@pytest.mark.parametrize("precision", [DEFAULT, Precision(4)], ids=["u8", "u4"])
@pytest.mark.parametrize("text", ["minmax", "mean_minmax", "mse", "aciq", "entropy", "auto"])
@pytest.mark.parametrize("shape", ["normal-off-centre", "lognormal", "far-from-zero", "two-heaps"])
def test_mirrored_values_have_the_mirrored_range(shape: str, text: str, precision: Precision) -> None:
    seen = HISTOGRAMS[shape]
    for histogram in (seen, mirrored(seen)):  # zero is in the bin to its right, and no zeros are seen there
        np.testing.assert_array_equal(smooth_counts(histogram), histogram.counts)
    lo, hi = choose(text, seen, precision)
    low, high = choose(text, mirrored(seen), precision)
    # The sums are those of the same terms in the other order, which moves an end by rounding, not from place to place.
    assert (low, high) == pytest.approx((-hi, -lo), abs=seen.counts.size * EPS * max(-seen.lo, seen.hi))


@pytest.mark.parametrize("name", RULES)
def test_min_and_max_alone_cannot_be_cut(name: str) -> None:
    for precision in PRECISIONS:
        assert choose(name, MinMax(-1.0, 3.0, 20_000), precision) == (-1, 3)


# mean_minmax


def test_mean_minmax_is_the_mean_of_the_extremes_of_the_runs() -> None:
    runs = runs_of(np.array([-1.0, 4.0]), np.array([-3.0, 2.0]))
    assert choose("mean_minmax", MinMax(-3.0, 4.0, 4), runs=runs) == (-2, 3)
    assert choose("mean_minmax", Histogram.of(np.array([-1.0, 4.0, -3.0, 2.0])), runs=runs) == (-2, 3)


def test_mean_minmax_of_one_run_is_minmax() -> None:
    values = SHAPES["t3"]
    seen = Histogram.of(values)
    assert choose("mean_minmax", seen, runs=runs_of(values)) == (seen.lo, seen.hi)


def test_a_mean_that_was_rounded_past_the_extremes_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = runs_of(np.array([-0.3, 0.3]))
    monkeypatch.setattr(Runs, "mean_lo", -0.30000000000000004)
    monkeypatch.setattr(Runs, "mean_hi", 0.30000000000000004)
    assert choose("mean_minmax", MinMax(-0.3, 0.3, 9), runs=runs) == (-0.3, 0.3)


def test_what_a_rule_wants_to_know() -> None:
    assert {name for name, kind in RULES.items() if "runs" in kind.takes} == {"mean_minmax", "auto"}
    assert {name for name in RULES if parse_rule(name).needs_histogram} == set(RULES) - {"minmax", "mean_minmax"}


# mse and auto


@each_shape
@each_precision
def test_no_search_ends_above_the_error_of_the_extremes(shape: str, precision: Precision) -> None:
    seen = HISTOGRAMS[shape]
    bound = expected_error(seen, seen.lo, seen.hi, precision)
    found = {text: expected_error(seen, *choose(text, seen, precision), precision) for text in GUARDED}
    assert max(found.values()) <= bound, found


@given(values=values32, precision=precisions, text=st.sampled_from(GUARDED))
def test_no_search_is_worse_than_minmax(values: Array, precision: Precision, text: str) -> None:
    seen = Histogram.of(values)
    found = expected_error(seen, *choose(text, seen, precision), precision)
    assert found <= expected_error(seen, seen.lo, seen.hi, precision)


@each_precision
@pytest.mark.parametrize("shape", ["normal", "t3", "silu", "relu-t3", "two-heaps", "outlier", "clip-6", "negative"])
def test_mse_finds_what_trying_all_ranges_finds(shape: str, precision: Precision) -> None:
    seen = HISTOGRAMS[shape]
    fractions = np.linspace(0, 1, 61)[1:]
    lows = seen.lo * fractions if seen.lo < 0 else [seen.lo]
    highs = seen.hi * fractions if seen.hi > 0 else [seen.hi]
    pairs = np.array([(lo, hi) for lo in [*lows, max(seen.lo, 0.0)] for hi in highs if lo <= hi])
    found = np.array([choose("mse", seen, precision)])
    low, high = np.concatenate([found, pairs]).T
    tried = errors(Spread.of(seen), low, high, precision)
    # The last round's places are at most 2**0.003 apart, and the error of rounding grows with the square.
    assert tried[0] <= tried.min() * 2 ** (2 * 0.003)


@each_precision
def test_mse_cuts_what_is_rare_and_keeps_what_is_not(precision: Precision) -> None:
    assert max(map(abs, choose("mse", HISTOGRAMS["outlier"], Precision(4, precision.symmetric)))) < 30
    assert max(map(abs, choose("mse", HISTOGRAMS["t2"], precision))) < 0.95 * abs(SHAPES["t2"]).max()
    seen = HISTOGRAMS["uniform"]
    lo, hi = choose("mse", seen, precision)
    # Cutting x off one end of a uniform density over a range R costs x**3 / (3 R), and saves at most R x / (6 n**2) of
    # the squared step with n steps in R: x is at most a step / sqrt(2), and half a step more for the place of zero.
    step = precision.params(seen.lo, seen.hi)[0]
    assert max(lo - seen.lo, seen.hi - hi) <= 2 * step


@each_precision
def test_ranges_of_symmetric_precision_are_those_of_one_magnitude(precision: Precision) -> None:
    lo, hi = choose("mse", HISTOGRAMS["normal-off-centre"], precision)
    seen = HISTOGRAMS["normal-off-centre"]
    assert (lo in (-hi, seen.lo)) is precision.symmetric


def test_symmetric_precision_gives_up_a_negative_sliver() -> None:
    # Cutting 1e-6 frees the half of the integers that would lie below.
    values = np.append(np.linspace(0, 10, 100_000), -1e-6).astype(np.float32)
    lo, hi = choose("mse", Histogram.of(values), SYMMETRIC)
    assert lo == 0.0
    assert hi > 9.9


@each_shape
@each_precision
def test_auto_is_the_best_of_all(shape: str, precision: Precision) -> None:
    values, seen = SHAPES[shape], HISTOGRAMS[shape]
    runs = runs_of(*np.array_split(values, 10))
    errors = [expected_error(seen, *choose(text, seen, precision, runs), precision) for text in CANDIDATES]
    assert expected_error(seen, *choose("auto", seen, precision, runs), precision) == min(errors)


def test_auto_breaks_ties_in_favour_of_minmax() -> None:
    # Everything is rounded to zero whatever the range.
    values = np.array([-1e-42, 5e-43, 1e-42])
    assert choose("auto", Histogram.of(values)) == (-1e-42, 1e-42)


def test_auto_chooses_for_the_precision() -> None:
    seen = HISTOGRAMS["normal"]
    assert choose("auto", seen, Precision(4))[1] < 0.8 * choose("auto", seen)[1]


def test_every_rule_but_auto_is_a_candidate_of_auto() -> None:
    assert {parse_rule(text).name for text in CANDIDATES} == set(RULES) - {"auto"}
    assert CANDIDATES[0] == "minmax"


@pytest.mark.parametrize("text", ["mse", "aciq", "entropy"])
def test_the_number_of_exact_zeros_changes_nothing(text: str) -> None:
    positive = SHAPES["relu-t3"][SHAPES["relu-t3"] > 0]
    few, many = (Histogram.of(np.concatenate([positive, np.zeros(count, np.float32)])) for count in (5_000, 5_000_000))
    assert choose(text, few) == choose(text, many)


# aciq


@pytest.mark.parametrize(
    ("clip", "figures"),
    [
        (laplace_clip, (2.83, 3.89, 5.03, 6.2, 7.41, 8.64, 9.89)),
        (normal_clip, (1.71, 2.15, 2.55, 2.93, 3.28, 3.61, 3.92)),
    ],
    ids=["laplace", "normal"],
)
def test_clips_are_those_of_the_paper(clip: Callable[[int], float], figures: tuple[float, ...]) -> None:
    # The figures of its authors' program for 2 to 8 bits; the last digit of some is cut off instead of rounded.
    assert [clip(bits) for bits in range(2, 9)] == pytest.approx(figures, abs=0.01)


@pytest.mark.parametrize("bits", [2, 4, 8, 9, 16])
def test_clips_make_the_cost_least(bits: int) -> None:
    def laplace(a: float) -> float:
        return 2 * math.exp(-a) + a * a / (3 * 4.0**bits)

    def normal(a: float) -> float:
        tail, density = math.erfc(a / math.sqrt(2)), math.exp(-a * a / 2) * math.sqrt(2 / math.pi)
        return (a * a + 1) * tail - a * density + a * a / (3 * 4.0**bits)

    costs = ((laplace, laplace_clip(bits)), (normal, normal_clip(bits)))
    for cost, a in costs:
        assert cost(a) < min(cost(a * 0.99), cost(a * 1.01))


@pytest.mark.parametrize(
    ("shape", "bits", "reach"),
    [
        ("normal", 4, normal_clip(4)),
        ("laplace", 4, laplace_clip(4)),
        ("relu", 4, normal_clip(5)),
        ("negative", 4, laplace_clip(5)),
    ],
)
def test_aciq_knows_the_distribution(shape: str, bits: int, reach: float) -> None:
    lo, hi = choose("aciq", HISTOGRAMS[shape], Precision(bits))
    # Deviations of n values are right to 1 / sqrt(2 n) (normal) or 1 / sqrt(n) (exponential), and so is the mean; half
    # of a Relu's values are zeros. Four times that, and a bin.
    slack = 4 * reach / (SIZE / 2) ** 0.5 + 4 / SIZE**0.5 + HISTOGRAMS[shape].width
    wanted = {"relu": (0.0, reach), "negative": (-reach, HISTOGRAMS["negative"].hi)}.get(shape, (-reach, reach))
    assert (lo, hi) == pytest.approx(wanted, abs=slack)


def test_deviations_are_those_of_values_spread_evenly() -> None:
    # 0..1 evenly: |x - 1/2| is 1/4 in the mean, its square 1/12; from 0 they are 1/2 and 1/3.
    spread = Spread(np.array([0.0, 1.0]), np.array([4.0]), 0, 4)
    about_the_mean, about_zero = Deviations.of(spread, None), Deviations.of(spread, 0.0)
    assert (about_the_mean.centre, about_the_mean.mean) == (0.5, 0.25)
    assert about_the_mean.root_mean_square == pytest.approx(1 / 12**0.5, abs=4 * EPS)
    assert (about_zero.centre, about_zero.mean) == (0.0, 0.5)
    assert about_zero.root_mean_square == pytest.approx(1 / 3**0.5, abs=4 * EPS)


def test_aciq_is_about_the_mean_where_zero_may_lie_anywhere() -> None:
    seen = HISTOGRAMS["normal-off-centre"]
    reach, slack = normal_clip(4), 8 / SIZE**0.5 + seen.width
    assert choose("aciq", seen, Precision(4)) == pytest.approx((0.7 - reach, 0.7 + reach), abs=slack)
    about_zero = (1 + 0.7**2) ** 0.5 * reach
    lo, hi = choose("aciq", seen, Precision(4, symmetric=True))
    assert lo == -hi
    assert hi == pytest.approx(about_zero, abs=4 * slack)


# entropy


def slow_divergence(histogram: Histogram, lo: float, hi: float, precision: Precision) -> float:
    """Return the divergence of a range from the definition, infinite where the range is not admissible."""
    counts, edges = smooth_counts(histogram), histogram.edges
    inside = np.flatnonzero((counts > 0) & ((edges[1:] + edges[:-1]) / 2 >= lo) & ((edges[1:] + edges[:-1]) / 2 <= hi))
    scale, zero = precision.params(lo, hi)
    if inside.size == 0 or scale < histogram.width or np.ptp(inside) < precision.top // 2:
        return math.inf
    i, j = inside[0], inside[-1] + 1
    p = counts[i:j].copy()
    p[0] += counts[:i].sum()
    p[-1] += counts[j:].sum()
    middles = (histogram.first + np.arange(i, j) + 0.5) * histogram.width
    level = np.clip(np.floor(middles / scale + 0.5), -zero, precision.top - zero)
    holds, of = counts[i:j] > 0, np.unique(level, return_inverse=True)[1]
    q = np.where(holds, np.bincount(of, counts[i:j])[of] / np.maximum(np.bincount(of, holds), 1)[of], 0.0)
    p, q = p / p.sum(), q / q.sum()
    return float(np.sum(p[p > 0] * np.log(p[p > 0] / q[p > 0])))


@pytest.mark.parametrize("shape", ["normal", "t3", "relu-t3", "silu", "negative", "two-heaps", "clip-6", "outlier"])
@each_precision
def test_entropy_finds_about_the_least_divergence(shape: str, precision: Precision) -> None:
    seen, random = HISTOGRAMS[shape], np.random.default_rng(0)
    lo, hi = choose("entropy", seen, precision)
    found = divergence(seen, lo, hi, precision)
    assert found < math.inf or divergence(seen, seen.lo, seen.hi, precision) == math.inf
    # Sums of c * log(c) over the bins, each right to eps of the sum of all, N * log(N) at most; and one more for N.
    bound = 4 * seen.counts.size * EPS * math.log(seen.count)
    least = expected_error(seen, seen.lo, seen.hi, precision)
    for low, high in random.uniform(size=(40, 2)) ** 0.5:
        if precision.symmetric and seen.lo < 0:
            reach = high * max(-seen.lo, seen.hi)
            lo, hi = max(seen.lo, -reach), min(seen.hi, reach)
        else:
            lo = seen.lo * low if seen.lo < 0 else seen.lo
            hi = seen.hi * high if seen.hi > 0 else seen.hi
        if lo <= hi:
            other = slow_divergence(seen, lo, hi, precision)
            assert divergence(seen, lo, hi, precision) == pytest.approx(other, abs=bound)
            # The divergence jumps by some per cent where the border of a level passes over a bin.
            assert found <= other * 1.1 or expected_error(seen, lo, hi, precision) > least


def test_entropy_cuts_an_outlier_and_keeps_a_uniform_tensor() -> None:
    lo, hi = choose("entropy", HISTOGRAMS["outlier"], Precision(4))
    assert hi < 15
    assert lo < -3
    seen = HISTOGRAMS["uniform"]
    assert choose("entropy", seen) == (seen.lo, seen.hi)


@pytest.mark.parametrize("shape", ["t2", "t3", "relu-t3", "lognormal"])
def test_entropy_gives_nothing_up_for_a_smaller_divergence(shape: str) -> None:
    seen = HISTOGRAMS[shape]
    chosen = choose("entropy", seen)
    halved = [(seen.lo / 2**n, seen.hi / 2**n) for n in range(1, 5)]
    lo, hi = min(halved, key=lambda ends: divergence(seen, ends[0], ends[1], DEFAULT))
    assert divergence(seen, lo, hi, DEFAULT) < divergence(seen, chosen[0], chosen[1], DEFAULT)
    assert expected_error(seen, lo, hi, DEFAULT) > expected_error(seen, seen.lo, seen.hi, DEFAULT)


@pytest.mark.parametrize("bins", [2, 50, 127])
def test_entropy_has_nothing_to_say_of_fewer_bins_than_levels(bins: int) -> None:
    counts = np.ones(2048, np.int64)
    counts[bins:-1] = 0
    seen = Histogram(0.0, 2047.5, 0, 0, counts)
    assert entropy(seen, DEFAULT)[1] == 2047.5


def test_rules_are_pure() -> None:
    seen = HISTOGRAMS["t3"]
    before = seen.counts.copy()
    ranges: list[Any] = [[choose(text, seen, precision) for text in TEXTS] for precision in PRECISIONS * 2]
    assert ranges[: len(PRECISIONS)] == ranges[len(PRECISIONS) :]
    np.testing.assert_array_equal(seen.counts, before)

"""Statistics: exact merges, exact counts, refusals."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from requant import RequantError
from requant.calibration import Channels, Histogram, MinMax, Moments, Runs, merge
from requant.calibration.model.session import Array
from requant.calibration.rules.ranges import percentile
from requant.calibration.statistics.histogram import MAX_BINS, TAIL, Counter, Statistic, stride_of

KINDS = [MinMax, Histogram]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
floats64 = st.floats(allow_nan=False, allow_infinity=False)


def arrays(dtype: type, elements: st.SearchStrategy[float]) -> st.SearchStrategy[Array]:
    """Arrays of one batch, of any magnitude down to subnormals, often with zeros and repetitions."""
    return hnp.arrays(dtype, st.integers(1, 12), elements=elements | st.sampled_from([0.0, -0.0, 1.0, -1e-40, 1e30]))


batches = st.lists(arrays(np.float32, floats32), min_size=1, max_size=6)
batches64 = st.lists(arrays(np.float64, floats64), min_size=1, max_size=4)


def merged_as_drawn(parts: list[Statistic], draw: st.DataObject) -> Statistic:
    """Merge in an order and a tree that hypothesis chooses."""
    parts = list(draw.draw(st.permutations(parts)))
    while len(parts) > 1:
        index = draw.draw(st.integers(0, len(parts) - 2))
        parts[index : index + 2] = [parts[index] | parts[index + 1]]  # type: ignore[operator]
    return parts[0]


@kinds
@given(data=batches | batches64, draw=st.data())
def test_any_merge_tree_equals_one_pass(kind: type[Statistic], data: list[Array], draw: st.DataObject) -> None:
    assert merged_as_drawn([kind.of(part) for part in data], draw) == kind.of(np.concatenate(data))


@given(batch=arrays(np.float32, floats32) | arrays(np.float64, floats64))
def test_histogram_counts_every_value_in_its_bin(batch: Array) -> None:
    seen = Histogram.of(batch)
    exact = [math.floor(Fraction(value) / Fraction(seen.width)) for value in batch.astype(float).tolist()]
    expected = np.bincount(np.array(exact) - seen.first, minlength=seen.counts.size)
    assert seen.counts.tolist() == expected.tolist()
    assert seen.count == batch.size
    assert (seen.lo, seen.hi) == (batch.min(), batch.max())
    assert seen.counts.size <= MAX_BINS


# ------------------------------------------------------------------------------------- histograms of some of the values


@st.composite
def large(draw: st.DrawFn) -> tuple[Array, int]:
    """An array of up to four axes, and a limit below the number of its values."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, max_side=9).filter(lambda shape: math.prod(shape) > 1))
    array = draw(hnp.arrays(np.float32, shape, elements=floats32 | st.sampled_from([0.0, -0.0, 1.0, -1e-40, 1e30])))
    return array, draw(st.integers(1, array.size - 1))


def counted(*values: Array, limit: int, samples: int = 1) -> Histogram:
    counter = Counter(limit)
    for array in values:
        counter.add(array, samples)
    return counter.histogram()


@given(drawn=large())
def test_tails_are_exact_and_what_is_between_is_estimated(drawn: tuple[Array, int]) -> None:
    array, limit = drawn[0], min(drawn[1], TAIL - 1)  # so few that none of them is of a tail
    seen, full = counted(array, limit=limit), Histogram.of(array)
    assert (seen.lo, seen.hi, seen.exponent, seen.count) == (full.lo, full.hi, full.exponent, array.size)
    stride = stride_of(array.shape, limit)
    values = array.reshape(-1)[stride // 2 :: stride].astype(float).tolist()
    picked = np.array([math.floor(Fraction(value) / Fraction(seen.width)) for value in values]) - seen.first
    assert 0 < picked.size <= limit
    inner = slice(int(picked.min()), int(picked.max()) + 1)
    outer = np.ones(full.counts.size, np.bool_)
    outer[inner] = False
    assert seen.counts[outer].tolist() == full.counts[outer].tolist()
    inside = int(full.counts[inner].sum())
    own = np.bincount(picked, minlength=full.counts.size)[inner]
    most = -(-inside // picked.size)
    assert ((inside // picked.size * own <= seen.counts[inner]) & (seen.counts[inner] <= most * own)).all()


@pytest.mark.parametrize("p", [99.9, 99.99, 99.999])
def test_percentiles_in_the_tails_are_those_of_all_values(p: float) -> None:
    values = np.random.default_rng(5).standard_t(3, (1, 24, 64, 81)).astype(np.float32)
    seen, full = counted(values, limit=4096), Histogram.of(values)
    assert seen != full
    assert percentile(seen, p) == percentile(full, p)


@given(data=st.lists(large(), min_size=1, max_size=4), draw=st.data())
def test_any_merge_tree_of_parts_that_were_counted_in_part_equals_one_pass(
    data: list[tuple[Array, int]], draw: st.DataObject
) -> None:
    limit = min(limit for _, limit in data)
    arrays = [array for array, _ in data]
    whole = counted(*arrays, limit=limit)
    assert merged_as_drawn([counted(array, limit=limit) for array in arrays], draw) == whole
    assert counted(*draw.draw(st.permutations(arrays)), limit=limit) == whole


@given(drawn=large(), samples=st.integers(2, 4))
def test_a_stack_is_counted_as_its_samples_are(drawn: tuple[Array, int], samples: int) -> None:
    array, limit = drawn
    parts = [array * np.float32(0.5**index) for index in range(samples)]
    assert counted(np.concatenate(parts), limit=limit, samples=samples) == counted(*parts, limit=limit)


@given(drawn=large())
def test_what_is_counted_does_not_depend_on_the_layout_in_memory(drawn: tuple[Array, int]) -> None:
    array, limit = drawn
    assert counted(np.asfortranarray(array), limit=limit) == counted(array, limit=limit)


@pytest.mark.parametrize("limit", [1, 64, 4095, 1 << 14])
@pytest.mark.parametrize("shape", [(1, 32, 112, 112), (1, 197, 768), (3, 480, 640), (100_000,), (1, 2, 30030)])
def test_all_columns_are_counted_alike(shape: tuple[int, ...], limit: int) -> None:
    stride = stride_of(shape, limit)
    places = np.arange(math.prod(shape))[stride // 2 :: stride]
    columns = np.bincount(places % shape[-1], minlength=shape[-1])
    assert 0 < places.size <= limit
    # multiples of a number prime to the length of a row come to each column once in as many steps as there are columns
    assert columns.max() - columns.min() <= 1


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_where_nothing_is_counted(odd: float) -> None:
    values = np.zeros(1000, np.float32)
    values[0] = odd  # the first stride's middle is what is counted
    with pytest.raises(ValueError, match="NaN or infinity"):
        Counter(10).add(values)


@given(lo=st.floats(-100, 100, width=32), span=st.floats(1, 1000, width=32))
def test_histogram_is_as_fine_as_the_budget_allows(lo: float, span: float) -> None:
    seen = Histogram.of(np.array([lo, lo + span], np.float32))
    finer = Fraction(seen.width) / 2
    bins = math.floor(Fraction(seen.hi) / finer) - math.floor(Fraction(seen.lo) / finer) + 1
    assert seen.counts.size <= MAX_BINS < bins


def test_histogram_of_many_chunks_equals_the_histogram_of_the_values_one_by_one() -> None:
    values = np.random.default_rng(1).standard_normal((3, 70_000)).astype(np.float32)
    assert Histogram.of(values) == Histogram.of(values[:, ::-1].T)
    assert Histogram.of(values) == reduce(or_, map(Histogram.of, np.split(values.ravel(), 7)))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 1e-45, -1e-45, 3.4e38, -3.4e38], ids=repr)
@kinds
def test_constant_tensor(kind: type[Statistic], value: float) -> None:
    values = np.full((2, 5), value, np.float32)
    seen = kind.of(values)
    assert (seen.lo, seen.hi, seen.count) == (values[0, 0], values[0, 0], 10)
    assert seen | kind.of(values[:1]) == kind.of(np.concatenate([values, values[:1]]))  # type: ignore[operator]


@kinds
def test_negative_zero_is_zero(kind: type[Statistic]) -> None:
    assert str(kind.of(np.array([-0.0], np.float32)).lo) == "0.0"


@kinds
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_not_finite_is_refused(kind: type[Statistic], value: float) -> None:
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        kind.of(np.array([0, value, 1], np.float32))


@kinds
def test_no_values_are_refused(kind: type[Statistic]) -> None:
    with pytest.raises(ValueError, match="no values"):
        kind.of(np.zeros((0, 3), np.float32))


def test_float16_is_counted_as_its_float32_values() -> None:
    values = np.random.default_rng(2).standard_normal(500).astype(np.float16)
    assert Histogram.of(values) == Histogram.of(values.astype(np.float32))


@pytest.mark.parametrize(
    ("lo", "hi", "exponent", "first", "counts"),
    [
        (0.0, 1.0, 5, 0, [1, 1]),
        (0.0, 0.0, -126, 1, [1]),
        (0.0, 0.0, -126, 0, [1, 1]),
        (0.0, 0.0, -126, 0, [0]),
        (1.0, 0.0, -126, 0, [1]),
    ],
    ids=["exponent", "first", "length", "empty-end", "order"],
)
def test_impossible_histogram_is_refused(lo: float, hi: float, exponent: int, first: int, counts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"extremes|grid|above"):
        Histogram(lo, hi, exponent, first, np.array(counts, np.int64))


@given(data=batches)
def test_equal_statistics_have_equal_hashes(data: list[Array]) -> None:
    forward, backward = (reduce(or_, map(Histogram.of, parts)) for parts in (data, data[::-1]))
    assert forward == backward
    assert hash(forward) == hash(backward)


def test_merging_kinds_is_refused_with_the_tensor() -> None:
    values = np.ones(3, np.float32)
    with pytest.raises(RequantError, match=r"tensor 'a'.*histogram"):
        merge(dict[str, Statistic](a=MinMax.of(values)), {"a": Histogram.of(values)})


def test_merge_keeps_what_one_side_has() -> None:
    one, two = (MinMax.of(np.array([value], np.float32)) for value in (1, 2))
    assert merge({"a": one, "b": one}, {"b": two, "c": two}) == {"a": one, "b": MinMax(1, 2, 2), "c": two}


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channels(axis: int) -> None:
    values = np.random.default_rng(3).integers(-9, 9, (4, 3, 5)).astype(np.float32)
    other = values[::-1] * 2 + 1
    seen = Channels.of(values, axis) | Channels.of(other, axis)
    axes = tuple(index for index in range(3) if index != axis % 3)
    both = np.concatenate([np.moveaxis(part, axis, 0).reshape(values.shape[axis], -1) for part in (values, other)], 1)
    assert seen.lo.tolist() == both.min(1).tolist()
    assert seen.hi.tolist() == both.max(1).tolist()
    assert seen.count == both.shape[1]
    total = values.sum(axes, dtype=np.float64) + other.sum(axes, dtype=np.float64)
    assert seen.total.value.tolist() == total.tolist()  # sums of small integers are exact, in any order
    assert seen.mean.tolist() == (total / seen.count).tolist()


def test_channel_refusals() -> None:
    with pytest.raises(ValueError, match="no axis 2"):
        Channels.of(np.ones((1, 2)), 2)
    with pytest.raises(ValueError, match="no values"):
        Channels.of(np.ones((0, 2)), 1)
    with pytest.raises(ValueError, match="NaN"):
        Channels.of(np.array([[np.inf, -np.inf]]), 0)
    with pytest.raises(RequantError, match=r"tensor 'a' has 2 channels in one run and 3 in another"):
        merge({"a": Channels.of(np.ones((1, 2)), 1)}, {"a": Channels.of(np.ones((1, 3)), 1)})


@pytest.mark.parametrize("kind", [Moments.of, lambda part: Channels.of(part, 0)], ids=["moments", "channels"])
@given(data=batches, draw=st.data())
def test_sums_over_runs_do_not_depend_on_their_order(kind: Any, data: list[Array], draw: st.DataObject) -> None:
    parts = [kind(np.atleast_2d(part[:1]) if kind is not Moments.of else part) for part in data]
    assert merged_as_drawn(parts, draw) == reduce(or_, parts)


@given(data=batches)
def test_moments_are_those_of_all_values(data: list[Array]) -> None:
    seen = reduce(or_, map(Moments.of, data))
    values = [Fraction(value) for part in data for value in part.tolist()]
    assert seen.count == len(values)
    # float64 sums of n <= 72 values in a run, then one rounding of the total and one of the quotient
    bound = 80 * np.finfo(np.float64).eps * float(sum(map(abs, values), Fraction(0)) / len(values))
    assert abs(float(Fraction(seen.mean) - sum(values, Fraction(0)) / len(values))) <= bound


ends = st.lists(floats32, min_size=2, max_size=2).map(sorted)


@given(
    runs=st.lists(st.tuples(st.integers(0, 300), ends), min_size=1, max_size=12, unique_by=lambda run: run[0]),
    draw=st.data(),
)
def test_runs_do_not_depend_on_their_order(runs: list[Any], draw: st.DataObject) -> None:
    parts: list[Any] = [Runs.of([position], np.array([pair])) for position, pair in runs]
    positions = [position for position, _ in runs]
    together = Runs.of(positions, np.array([pair for _, pair in runs]))
    assert merged_as_drawn(parts, draw) == together
    assert hash(reduce(or_, parts)) == hash(together)
    for samples, (lo, hi) in together.growth.items():
        seen = [pair for position, pair in runs if position < samples]
        assert (lo, hi) == (min(low for low, _ in seen), max(high for _, high in seen))
    assert max(together.growth) >= max(positions) + 1


def test_runs_give_the_mean_of_the_extremes() -> None:
    seen = Runs.of([0, 1, 2, 3], np.array([[-1.0, 2], [-3, 4], [0, 1], [-4, 5]]))
    assert (seen.count, seen.mean_lo, seen.mean_hi) == (4, -2.0, 3.0)
    assert seen.growth == {1: (-1, 2), 3: (-3, 4), 7: (-4, 5)}


def test_importing_the_rules_loads_no_runtime() -> None:
    check = "import requant.calibration.rules.ranges, sys; print(sorted({'onnx', 'onnx_ir', 'onnxruntime'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

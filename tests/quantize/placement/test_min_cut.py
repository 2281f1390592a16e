"""The minimum cut: never dearer than any other placement, whatever the costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.quantize.placement.min_cut import Item, Problem, cheapest, weighted_sum
from requant.transforms.int8.plan import Impl

FORMS = (
    (Impl.FLOAT,),
    (Impl.U8,),
    (Impl.U8_FLOAT,),
    (Impl.DYNAMIC,),
    (Impl.FLOAT, Impl.U8),
    (Impl.FLOAT, Impl.U8_FLOAT),
    (Impl.FLOAT, Impl.U8, Impl.U8_FLOAT),
)
QUARTERS = st.integers(0, 80).map(lambda n: n / 4)  # sums of which are exact


def total(problem: Problem, chosen: Mapping[str, Impl]) -> float:
    """Return the cost of a placement, in microseconds."""
    written = {t: chosen[item.name].writes_u8 for item in problem.items for t in item.outputs}
    read: dict[str, set[int]] = defaultdict(set)
    for tensor in problem.model_outputs:
        read[tensor].add(0)
    for item in problem.items:
        for tensor in item.inputs:
            read[tensor].add(chosen[item.name].reads_u8)
    cost = math.fsum(item.costs[chosen[item.name]] for item in problem.items)
    for tensor, domains in read.items():
        if written.get(tensor, 0) and 0 in domains:
            cost += problem.dequantize[tensor]
        elif not written.get(tensor, 0) and 1 in domains:
            cost += problem.quantize[tensor]
    return cost


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to seven units, each of which reads one or two tensors made before, and writes one."""
    tensors, items = ["x0", "x1"], []
    for index in range(draw(st.integers(1, 7))):
        inputs = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=2, unique=True))
        forms = draw(st.sampled_from(FORMS))
        costs = {impl: draw(QUARTERS) for impl in forms}
        items.append(Item(f"u{index}", tuple(inputs), (f"t{index}",), costs))
        tensors.append(f"t{index}")
    prices = [{tensor: draw(QUARTERS) for tensor in tensors} for _ in range(2)]
    shown = draw(st.sets(st.sampled_from(tensors), max_size=2))
    return Problem(items, prices[0], prices[1], frozenset(shown))


def every(problem: Problem) -> list[dict[str, Impl]]:
    """Return all placements."""
    names = [item.name for item in problem.items]
    return [dict(zip(names, row, strict=True)) for row in product(*(item.costs for item in problem.items))]


COSTS = {
    Impl.FLOAT: 1.0,
    Impl.U8: 2.0,
    Impl.U8_FLOAT: 4.0,
    Impl.DYNAMIC: 8.0,
}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (Impl.FLOAT, Impl.FLOAT, 0),  # nothing is converted
        (Impl.FLOAT, Impl.U8, 200 + 4000),  # the tensor between is quantized, the output dequantized
        (Impl.U8, Impl.FLOAT, 100 + 2000),  # the input is quantized, the tensor between dequantized
        (Impl.U8, Impl.U8, 100 + 4000),
        (Impl.U8_FLOAT, Impl.FLOAT, 100),
        (Impl.U8_FLOAT, Impl.U8_FLOAT, 100 + 200),
        (Impl.DYNAMIC, Impl.DYNAMIC, 0),
    ],
)
def test_the_total_of_a_chain(first: Impl, second: Impl, expected: float) -> None:
    items = [Item("a", ("x",), ("t",), COSTS), Item("b", ("t",), ("y",), COSTS)]
    prices = {"x": 100.0, "t": 200.0, "y": 400.0}, {"x": 1000.0, "t": 2000.0, "y": 4000.0}
    problem = Problem(items, *prices, frozenset({"y"}))
    assert total(problem, {"a": first, "b": second}) == COSTS[first] + COSTS[second] + expected
    hidden = Problem(items, *prices)  # nothing reads y
    assert total(hidden, {"a": first, "b": second}) == total(problem, {"a": first, "b": second}) - (
        4000 if second == Impl.U8 else 0
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_placement_of_three_units_is_cheaper(seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors, items = ["x0", "x1"], []
    for index in range(3):
        inputs = tuple(tensors[i] for i in random.choice(len(tensors), random.integers(1, 3), replace=False))
        forms = FORMS[random.integers(3, len(FORMS))]
        items.append(Item(f"u{index}", inputs, (f"t{index}",), {impl: random.integers(0, 9) / 2 for impl in forms}))
        tensors.append(f"t{index}")
    prices = [dict(zip(tensors, (random.integers(0, 9, len(tensors)) / 4).tolist(), strict=True)) for _ in range(2)]
    problem = Problem(items, prices[0], prices[1], frozenset(random.choice(tensors, 1).tolist()))
    assert total(problem, cheapest(problem)) == min(total(problem, chosen) for chosen in every(problem))


@given(problems())
@settings(max_examples=6 * settings().max_examples)
def test_no_placement_is_cheaper(problem: Problem) -> None:
    found = cheapest(problem)
    assert found in every(problem)
    assert total(problem, found) == min(total(problem, chosen) for chosen in every(problem))


@pytest.mark.parametrize(("units", "seed"), [(6, 298), (8, 38), (8, 227)])
def test_no_placement_is_cheaper_where_sums_of_costs_are_rounded(units: int, seed: int) -> None:
    """Costs as they are measured, of all magnitudes. With rounded sums, a solver of flows misses the minimum of these."""
    random = np.random.default_rng(seed)
    tensors, items = ["t"], []
    for index in range(units):
        count = min(len(tensors), int(random.integers(1, 3)))
        inputs = tuple(random.choice(tensors[-4:], count, replace=False).tolist())
        costs = {Impl.FLOAT: 10 ** random.uniform(0, 3)}
        costs[Impl.U8] = costs[Impl.FLOAT] * random.uniform(0.2, 1.2)
        if random.random() < 0.3:
            costs[Impl.U8_FLOAT] = costs[Impl.U8] + random.uniform(0, 10)
        items.append(Item(f"u{index}", inputs, (f"t{index}",), costs))
        tensors.append(f"t{index}")
    quantize = {tensor: 10 ** random.uniform(-1, 5) for tensor in tensors}
    dequantize = {tensor: 10 ** random.uniform(-1, 3) for tensor in tensors}
    problem = Problem(items, quantize, dequantize, frozenset({tensors[-1]}))
    least = min(total(problem, chosen) for chosen in every(problem))
    assert total(problem, cheapest(problem)) == pytest.approx(least, rel=1e-12)


def chain(*costs: dict[Impl, float], price: float) -> Problem:
    """Units one after the other."""
    items = [Item(f"u{i}", (f"t{i}",), (f"t{i + 1}",), each) for i, each in enumerate(costs)]
    prices = dict.fromkeys((f"t{i}" for i in range(len(costs) + 1)), price)
    return Problem(items, prices, prices, frozenset({f"t{len(costs)}"}))


COMPUTE = {Impl.FLOAT: 10.0, Impl.U8: 4.0}
SLOW = {Impl.FLOAT: 1.0, Impl.U8: 3.0}


@pytest.mark.parametrize(
    ("price", "expected"),
    [
        (0.5, [Impl.U8, Impl.FLOAT, Impl.U8]),  # in and out of float around what is slow costs 1, and saves 2
        (2.0, [Impl.U8, Impl.U8, Impl.U8]),  # here it costs 4
        (6.0, [Impl.FLOAT, Impl.FLOAT, Impl.FLOAT]),  # both ends cost 12 and all that int8 saves is 10
    ],
)
def test_conversions_decide(price: float, expected: list[Impl]) -> None:
    assert list(cheapest(chain(COMPUTE, SLOW, COMPUTE, price=price)).values()) == expected


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_a_conversion_is_paid_once_however_many_read_it(readers: int) -> None:
    items = [Item(f"u{i}", ("x",), (f"t{i}",), {Impl.FLOAT: 3.0, Impl.U8_FLOAT: 1.0}) for i in range(readers)]
    prices = dict.fromkeys(("x", *(f"t{i}" for i in range(readers))), 5.0)
    found = cheapest(Problem(items, prices, prices))
    assert set(found.values()) == {Impl.U8_FLOAT if 2 * readers > 5 else Impl.FLOAT}


def test_a_thousand_units_are_no_matter() -> None:
    problem = chain(*[COMPUTE, SLOW] * 500, price=0.75)
    found = cheapest(problem)
    assert total(problem, found) == 500 * (4 + 1) + 1000 * 0.75


@given(problems(), st.data())
def test_joined_problems_cost_the_weighted_sum(problem: Problem, data: st.DataObject) -> None:
    """Two problems of the same units: the least sum is found, and a form that one problem lacks is no choice."""
    items = []
    for item in problem.items:
        forms = data.draw(st.sets(st.sampled_from([*item.costs]), min_size=1), label=item.name)
        items.append(Item(item.name, item.inputs, item.outputs, {impl: data.draw(QUARTERS) for impl in forms}))
    tensors = [*problem.quantize]
    prices = [{tensor: data.draw(QUARTERS) for tensor in tensors} for _ in range(2)]
    other = Problem(items, prices[0], prices[1], problem.model_outputs)
    both = weighted_sum([problem, other], [1.0, 2.0])
    assert [set(item.costs) for item in both.items] == [set(item.costs) for item in items]
    sums = [total(problem, chosen) + 2 * total(other, chosen) for chosen in every(both)]
    assert [total(both, chosen) for chosen in every(both)] == sums
    found = cheapest(both)
    assert total(problem, found) + 2 * total(other, found) == min(sums)

"""Units become float along the frontier, by costs that profiles correct."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from requant.quantize.steps.relieve import _fastest
from requant.transforms.plan import Choice, Impl, Plan, Unit

NAMES = "abcd"
UNITS = tuple(Unit(name=name, op="Conv", nodes=(name,), inputs=(f"x{name}",), outputs=(f"y{name}",)) for name in NAMES)
NOISE = dict(zip(NAMES, (8.0, 4.0, 2.0, 1.0), strict=True))


def noise(plan: Plan) -> float:
    return sum(NOISE[unit.name] for unit in plan.units if plan.impl(unit).int8)


@dataclass(frozen=True)
class Priced:
    """Plans by price: float costs `extra` more than int8 for each unit; profiles show what it truly costs."""

    extra: Mapping[str, float]
    true: Mapping[str, float]

    def __call__(self, price: float) -> Plan:
        floats = {name for name in NAMES if price * NOISE[name] > self.extra[name]}
        return Plan(UNITS, {name: Choice(Impl.FLOAT if name in floats else Impl.U8) for name in NAMES})

    def measured(self, plan: Plan) -> tuple[Priced, float]:
        floats = {unit.name for unit in UNITS if not plan.impl(unit).int8}
        seen = {name: self.true[name] if name in floats else cost for name, cost in self.extra.items()}
        return replace(self, extra=seen), 1.0 + sum(self.true[name] for name in floats)


def floats_of(plans: Any, limit: float) -> str:
    _, plan = _fastest(plans, noise, limit)
    assert plan is not None
    return "".join(unit.name for unit in plan.units if not plan.impl(unit).int8)


EVEN = dict.fromkeys(NAMES, 1.0)


@pytest.mark.parametrize(
    ("true", "chosen"),
    [
        ({}, "a"),  # the noisiest unit for the same time
        ({"a": 50.0}, "bcd"),  # in float the first unit is much slower than its cost says
        ({"a": 50.0, "b": 50.0, "c": 50.0, "d": 50.0}, "a"),  # so are all others: the first plan was the best
    ],
)
def test_a_plan_whose_model_is_slower_than_its_costs_gives_way(true: dict[str, float], chosen: str) -> None:
    assert floats_of(Priced(EVEN, {**EVEN, **true}), 8.0) == chosen


def test_no_plan_is_quiet_enough() -> None:
    plans: Any = Priced(dict.fromkeys(NAMES, 1e9), EVEN)
    assert _fastest(plans, noise, 0.5) == (plans, None)

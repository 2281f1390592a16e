"""Units become float along the frontier, by costs that profiles correct."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from requant import RequantError
from requant.quantize import Options
from requant.quantize.job import Evidence
from requant.quantize.placement.noise import Noises
from requant.quantize.placement.quiet_plans import fastest_within
from requant.quantize.runtime.progress import Forecast
from requant.quantize.steps import fall_back
from requant.quantize.steps.forecast import BETWEEN, ROUNDS
from requant.transforms.int8.plan import Choice, Impl, Plan, Unit

NAMES = "abcd"
UNITS = tuple(Unit(name=name, op="Conv", nodes=(name,), inputs=(f"x{name}",), outputs=(f"y{name}",)) for name in NAMES)
NOISE = dict(zip(NAMES, (8.0, 4.0, 2.0, 1.0), strict=True))
NOISES = Noises(weights=NOISE)
noise = NOISES.of_plan


@dataclass(frozen=True)
class Priced:
    """Plans by price: float costs `extra` more than int8 for each unit; profiles show what it truly costs."""

    extra: Mapping[str, float]
    true: Mapping[str, float]
    noises: Noises = NOISES

    def with_noises(self, noises: Noises) -> Priced:
        return replace(self, noises=noises)

    def __call__(self, price: float) -> Plan:
        floats = {name for name in NAMES if price * self.noises.weights[name] > self.extra[name]}
        return Plan(UNITS, {name: Choice(Impl.FLOAT if name in floats else Impl.U8) for name in NAMES})

    def share(self, plan: Plan) -> float:
        return 1.0 + sum(self.extra[unit.name] for unit in UNITS if not plan.impl(unit).int8)

    def ratio(self, plan: Plan, other: Any) -> float:
        return self.measured(plan)[1] / self.measured(other.plan)[1]

    def measured(self, plan: Plan) -> tuple[Priced, float]:
        floats = {unit.name for unit in UNITS if not plan.impl(unit).int8}
        seen = {name: self.true[name] if name in floats else cost for name, cost in self.extra.items()}
        return replace(self, extra=seen), 1.0 + sum(self.true[name] for name in floats)


def floats_of(plans: Any, limit: float) -> str:
    _, plan = fastest_within(plans, noise, limit)
    assert plan is not None
    return floats_in(plan)


def floats_in(plan: Plan) -> str:
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


@dataclass(frozen=True)
class Promised:
    """The promise that a plan of some noise keeps or misses."""

    noise: float
    most: float
    least_excess: float

    @property
    def kept(self) -> bool:
        return self.noise <= self.most

    @property
    def excess(self) -> float:
        ratio = self.noise / self.most
        return ratio if self.kept else max(ratio, self.least_excess)


def model(plan: Plan) -> Any:
    return SimpleNamespace(
        plan=plan, placement=None, evidence=SimpleNamespace(noise=NOISE, noise_of={}, noise_of_weights={})
    )


@pytest.mark.parametrize(
    ("most", "fails", "floats"),
    [
        (1.5, "", "abc"),
        (4.5, "", "ab"),
        (7.5, "", "a"),
        (0.5, "", None),
        (4.5, "ab", "abc"),  # a model that does not run is as one that misses the promise
        (7.5, "abc ab a", None),
        (7.5, "judge", None),
    ],
)
def test_after_a_model_that_keeps_the_promise_faster_ones_are_tried(
    monkeypatch: pytest.MonkeyPatch, most: float, fails: str, floats: str | None
) -> None:
    """The first model has too little noise: what a few samples miss the promise by is mostly chance."""
    found = accepted_plan(monkeypatch, Priced(EVEN, EVEN), most, fails)
    assert (None if found is None else floats_in(found)) == floats


@pytest.mark.parametrize(("extra", "raced"), [(1.0, ["ab", "a"]), (0.0, [])])
def test_a_plan_that_is_not_faster_is_timed_once_and_a_dearer_one_never(
    monkeypatch: pytest.MonkeyPatch, extra: float, raced: list[str]
) -> None:
    """Five limits of noise give two plans; each was profiled and timed up to four times."""
    plans, timed = Priced(dict.fromkeys(NAMES, extra), EVEN), []

    def ratio(self: Priced, plan: Plan, other: Any) -> float:
        timed.append(floats_in(plan))
        return 1.0

    monkeypatch.setattr(Priced, "ratio", ratio)
    if not raced:
        monkeypatch.setattr(Priced, "measured", None)
    accuracy: Any = None
    quiet = Plan(UNITS, {name: Choice(Impl.U8 if name == "d" else Impl.FLOAT) for name in NAMES})
    best = fall_back._Accepted(model(quiet), accuracy, excess=1.0)
    missed = fall_back._Missed(Plan(UNITS, dict.fromkeys(NAMES, Choice(Impl.U8))), excess=15.0)
    some: Any = plans
    assert fall_back._next_faster(some, NOISES, best, [missed])[1] is None
    assert timed == raced


PROPORTIONAL = {**NOISE, "d": 1e9}


@pytest.mark.parametrize(
    ("most", "slow", "fails", "floats"),
    [
        (1.5, False, "", "abc"),
        (6.5, False, "", "ab"),
        (7.5, False, "", "ab"),  # one model is made: the one in the middle
        (6.5, False, "ab", "abc"),
        (7.5, True, "", "abc"),  # the model of the plan between is slower than its costs say
    ],
)
def test_where_no_price_gives_a_plan_between_units_change_one_after_another(
    monkeypatch: pytest.MonkeyPatch, most: float, slow: bool, fails: str, floats: str
) -> None:
    """Of units with the same noise for the same time, a price moves all to float, or none."""
    plans = Priced(PROPORTIONAL, PROPORTIONAL)
    if slow:
        monkeypatch.setattr(Priced, "ratio", lambda self, plan, other: 1.0)
    assert {floats_in(plans(price)) for price in (0.1, 0.9, 1.1, 100.0)} == {"", "abc"}
    found = accepted_plan(monkeypatch, plans, most, fails)
    assert found is not None
    assert floats_in(found) == floats


def accepted_plan(
    monkeypatch: pytest.MonkeyPatch,
    plans: Any,
    most: float,
    fails: str,
    noises: Noises = NOISES,
    true: Callable[[Plan], float] = noise,
    chance: float = 100.0,
) -> Plan | None:
    """Return the plan that keeps a promise of some noise; None if none does. The models of the plans `fails` fail.

    `noises` are those of units alone, `true` gives the noise of the model of a plan, and `chance` is the least excess
    that a model seems to have.
    """
    written: list[Plan] = []

    def made(*given: Any) -> Any:
        written.append(given[-1])
        return model(given[-1])

    def measured(job: Any, candidate: Any) -> float:
        if floats_in(candidate.plan) in fails.split():
            raise RequantError("the model fails: of itself")
        return true(candidate.plan)

    def judged(job: Any, candidate: Any, accuracy: float) -> Any:
        if fails == "judge":
            raise RequantError("the model fails: with another batch")
        return candidate.plan, accuracy

    fakes: dict[str, Any] = {
        "forecast_fall_back": lambda job, tries: Forecast({} if tries else {"compare": 1.0}),
        "promise_of": lambda job, accuracy: Promised(accuracy, most, chance),
        "plan_by_rules": lambda *_: (None, None, lambda plan: plan),
        "plans_by_price": lambda *_: plans,
        "absorbers_of": lambda *_: {},
        "possible_forms": lambda *_: {},
        "_build_candidate": made,
        "measure_accuracy": measured,
        "judge": judged,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(fall_back, name, fake)
    monkeypatch.setattr(Noises, "of", lambda *_: noises)
    job: Any = SimpleNamespace(policy=SimpleNamespace(how="measured"), progress=lambda *_: None, options=Options())
    start: Any = SimpleNamespace(candidate=model(int8(NAMES)), accuracy=true(int8(NAMES)))
    ranges: Any = None
    found: Any = fall_back.fall_back_to_float(job, ranges, start)
    assert len(written) <= ROUNDS + BETWEEN
    return None if found is start else found[0]


@pytest.mark.parametrize(
    ("native", "ratio", "noise", "options", "replaced"),
    [
        ("a", 1.02, 1.0, Options(), True),
        ("a", 0.5, 1.0, Options(), True),
        ("a", 1.05, 1.0, Options(), False),  # the native operator gains
        ("a", 0.0, 1.0, Options(), False),  # costs are not measured
        ("a", 1.0, 3.0, Options(), False),  # the runtime's operator misses the promise
        ("a", 1.0, 1.0, Options(kernels="native"), False),
        ("abcde", 1.0, 1.0, Options(), False),  # too many to gain nothing
        ("", 1.0, 1.0, Options(), False),
    ],
)
def test_few_native_operators_that_gain_nothing_become_those_of_the_runtime(
    monkeypatch: pytest.MonkeyPatch, native: str, ratio: float, noise: float, options: Options, replaced: bool
) -> None:
    units = tuple(Unit(name=name, op="Conv", nodes=(name,), inputs=(f"x{name}",), outputs=(name,)) for name in "abcdef")
    plan = Plan(units, {unit.name: Choice(Impl.U8_NATIVE if unit.name in native else Impl.U8) for unit in units})
    monkeypatch.setattr(fall_back, "promise_of", lambda job, accuracy: Promised(accuracy, 2.0, 100.0))
    monkeypatch.setattr(fall_back, "measure_accuracy", lambda *_: noise)
    accuracy: Any = 0.5
    best = fall_back._Accepted(model(plan), accuracy, 1.0)
    plans: Any = SimpleNamespace(ratio=lambda stock, other: ratio)
    job: Any = SimpleNamespace(options=options)
    found = fall_back._without_few_native(job, plans, best, model)
    assert any(found.candidate.plan.impl(unit).native for unit in units) is (bool(native) and not replaced)
    assert (found is best) is not replaced


def test_no_plan_is_quiet_enough() -> None:
    plans: Any = Priced(dict.fromkeys(NAMES, 1e9), EVEN)
    assert fastest_within(plans, noise, 0.5) == (plans, None)


def test_a_plan_that_is_hardly_slower_and_quieter_is_better() -> None:
    nearly = {**EVEN, "a": 0.02}  # of the time 1.0
    assert floats_of(Priced(nearly, nearly), 15.0) == "a"
    assert floats_of(Priced(EVEN, EVEN), 15.0) == ""


@pytest.mark.parametrize(
    ("effort", "known", "again"),
    [
        ("low", Evidence(), True),
        ("low", Evidence(noise_of_weights={"a": 0.1}, limit=20.0), False),
        ("medium", Evidence(limit=20.0), True),
        ("medium", Evidence(limit=300.0), False),
        ("medium", Evidence(noise={"a": 0.1}, limit=20.0), False),
    ],
    ids=["nothing tried", "tried with low effort", "a longer limit", "tried with that limit", "known"],
)
def test_trials_that_took_too_long_are_not_repeated_with_the_same_limit(
    effort: str, known: Evidence, again: bool
) -> None:
    """The weights of a speech model were tried twice, 45 s each time: before the second model, and to fall back."""
    job: Any = SimpleNamespace(options=Options(effort=effort), weights=SimpleNamespace(large=False))
    trial: Any = SimpleNamespace(candidate=SimpleNamespace(evidence=known, qparams={"a": None}))
    assert fall_back._can_try_tensors(job, trial) is again


def int8(names: str) -> Plan:
    return Plan(UNITS, {name: Choice(Impl.U8 if name in names else Impl.FLOAT) for name in NAMES})


def test_units_that_are_noisier_together_count_more() -> None:
    noises, accuracy = Noises(weights={"a": 0.1, "b": 0.1, "c": 2.0, "d": 3.0}), None
    best = fall_back._Accepted(model(int8("a")), cast("Any", accuracy), excess=0.1)
    found = fall_back._learned(noises, best, [fall_back._Missed(int8("abcd"), 9.0), fall_back._Missed(int8("ab"), 4.0)])
    assert found.weights == pytest.approx({"a": 0.1, "b": 3.9, "c": 2.0, "d": 3.0})
    assert [found.of_plan(int8(each)) for each in ("a", "ab", "abcd")] == pytest.approx([0.1, 4.0, 9.0])


def test_a_unit_that_costs_much_time_stays_int8_where_others_are_noisier_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the noises alone `c` is the first to become float, and `a` the last; but `a` and `b` disturb each other."""
    alone = Noises(weights={"a": 0.5, "b": 0.6, "c": 6.0, "d": 1.0})
    times = {"a": 1.0, "b": 1.0, "c": 5.0, "d": 1.0}

    def together(plan: Plan) -> float:
        disturbed = all(plan.impl(unit).int8 for unit in UNITS[:2])
        return alone.of_plan(plan) + (20.0 if disturbed else 0.0)

    found = accepted_plan(monkeypatch, Priced(times, times, alone), 10.0, "", alone, together, 0.0)
    assert found is not None
    assert floats_in(found) in ("ad", "bd", "a", "b")


def test_what_a_model_that_keeps_the_promise_rounds_counts_as_before() -> None:
    """Also where a model that misses the promise has other units in int8, and another one all of them."""
    noises, accuracy = Noises(weights={"a": 0.1, "b": 0.1, "c": 0.2, "d": 0.1}), None
    best = fall_back._Accepted(model(int8("a")), cast("Any", accuracy), excess=0.5)
    missed = [fall_back._Missed(int8("bc"), 4.0), fall_back._Missed(int8("abcd"), 9.0)]
    found = fall_back._learned(noises, best, missed)
    assert found.weights == pytest.approx({"a": 0.1, "b": 0.8 / 3, "c": 1.6 / 3, "d": 0.9})
    assert [found.of_plan(int8(each)) for each in ("a", "bc", "abcd")] == pytest.approx([0.1, 0.8, 1.8])

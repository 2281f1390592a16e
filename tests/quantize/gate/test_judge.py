"""Judging by a baseline: laws of what fails, and what each line says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from requant import RequantError
from requant.quantize.accuracy.drop import Allowance
from requant.quantize.accuracy.metrics import METRICS, Score
from requant.quantize.gate.baseline import (
    LIMITS,
    UPDATE,
    Baseline,
    Constant,
    DataSummary,
    Layer,
    Measured,
    Scored,
    Speed,
    Statistics,
    tolerances,
)
from requant.quantize.gate.blame import changed_layers, explained
from requant.quantize.gate.judge import Line, Status, beyond, judge, metric_line, share_line, size_line, slower
from requant.quantize.gate.run import CheckOptions
from requant.quantize.runtime.machine import Machine

HERE = Machine("1.31", "a CPU", 1)
counts = st.integers(0, 60)
amounts = st.floats(0, 0.2)


def right(outcomes: list[bool]) -> Score:
    """Return a top-1 score with these items."""
    parts = np.stack([np.asarray(outcomes, np.float64), np.ones(len(outcomes))], axis=1)
    return Score(METRICS["top1"], float(np.mean(outcomes)), parts)


def scored(outcomes: list[bool], before: float = 0.9) -> Scored:
    return Scored(METRICS["top1"], before, right(outcomes), before - float(np.mean(outcomes)), None)


def pair(broken: int, fixed: int, same: int) -> tuple[Scored, Scored]:
    """Return baseline and now, with so many items that became wrong, became right, and stayed right."""
    return (
        scored([True] * broken + [False] * fixed + [True] * same),
        scored([False] * broken + [True] * fixed + [True] * same),
    )


def measured(**changed: Any) -> Measured:
    """Return what was measured of a model."""
    seen = DataSummary("test.npz", 200, "inputs", "labels", {"x": Statistics(0.5, 0.25, 0.0, 1.0, (0.4, 0.5, 0.6))})
    layers = {
        "conv": Layer("Conv", {"weight": Constant("int8", "a", 2.0), "bias": Constant("int32", "b", 1.0)}),
        "fc": Layer("Gemm", {"weight": Constant("int8", "c", 3.0)}, after=("conv",)),
    }
    plain: dict[str, Any] = {
        "float_model": "float",
        "int8_model": "int8",
        "scores": {"top1": scored([True] * 180 + [False] * 20)},
        "data": seen,
        "speed": Speed((2.0, 2.1, 2.2), 2.0, 1.0, 1, HERE),
        "mac_share": 0.98,
        "kernels": {"QLinearConv": (2, 50.0)},
        "size": 1000,
        "opset": 17,
        "layers": layers,
        "noise": {"conv": 40.0, "fc": 38.0},
    }
    return Measured(**{**plain, **changed})


def baseline(given: dict[str, object] | None = None, **changed: Any) -> Baseline:
    found = measured(**changed)
    return Baseline(found, tolerances(given or {}, [row.metric for row in found.scores.values()]))


def failing(now: Measured, by: Baseline | None = None) -> dict[str, Line]:
    """Return the lines that fail, explained."""
    by = by or baseline()
    changed = changed_layers(now, by.measured)
    lines = [explained(line, now, by.measured, changed) for line in judge(now, by)]
    return {line.name: line for line in lines if line.status is Status.FAIL}


# ------------------------------------------------------------------------------------------------- laws of a drop


@given(counts, counts, st.integers(20, 400), amounts)
def test_more_broken_items_never_turn_a_failure_into_a_pass(broken: int, fixed: int, same: int, allowed: float) -> None:
    tolerance = Allowance(allowed, relative=False)
    before = metric_line(*pair(broken, fixed, same), tolerance).status
    after = metric_line(*pair(broken + 1, fixed, same - 1), tolerance).status
    assert not (before is Status.FAIL and after is not Status.FAIL)


@given(counts, counts, st.integers(20, 400), amounts, amounts)
def test_a_greater_tolerance_never_turns_a_pass_into_a_failure(
    broken: int, fixed: int, same: int, one: float, two: float
) -> None:
    low, high = sorted((one, two))
    strict, lenient = (
        metric_line(*pair(broken, fixed, same), Allowance(amount, relative=False)).status for amount in (low, high)
    )
    assert not (strict is Status.OK and lenient is Status.FAIL)


@given(counts, st.integers(20, 400), amounts)
def test_the_same_items_never_fail(wrong: int, same: int, allowed: float) -> None:
    both = scored([False] * wrong + [True] * same)
    assert metric_line(both, both, Allowance(allowed, relative=False)).status is Status.OK


@given(st.integers(0, 60), st.integers(20, 400))
def test_as_many_fixed_as_broken_never_fail(broken: int, same: int) -> None:
    assert metric_line(*pair(broken, broken, same), Allowance(0.0, relative=False)).status is Status.OK


@given(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_drop_counts_beyond_tolerance_and_chance(drop: float, reach: float, allowed: float) -> None:
    counts = beyond(drop, (drop - reach, drop + reach), allowed)
    assert counts == (drop > allowed and drop - reach > 0)
    assert beyond(drop, None, allowed) == (drop > allowed)


def test_a_drop_within_chance_passes_and_says_so() -> None:
    line = metric_line(*pair(2, 0, 98), Allowance(0.005, relative=False))
    assert line.status is Status.OK
    assert "not significant" in line.reason


def test_a_drop_of_a_metric_without_items_is_judged_alone() -> None:
    plain = [replace(scored([True]), after=Score(METRICS["top1"], value)) for value in (0.9, 0.88)]
    assert metric_line(plain[0], plain[1], Allowance(0.01, relative=False)).status is Status.FAIL
    assert metric_line(plain[0], plain[1], Allowance(0.03, relative=False)).status is Status.OK


# ------------------------------------------------------------------------------------------------- laws of speed


@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=15), st.floats(0.1, 5), st.floats(0.1, 5))
def test_a_further_round_can_only_help(rounds: list[float], further: float, floor: float) -> None:
    assert slower(tuple(rounds), floor) or not slower((*rounds, further), floor)


@given(st.lists(st.floats(0.5, 5), min_size=1, max_size=15), st.floats(0.1, 1), st.floats(0.1, 5))
def test_a_slower_model_never_turns_a_failure_into_a_pass(rounds: list[float], factor: float, floor: float) -> None:
    assume(factor < 1)
    assert not slower(tuple(rounds), floor) or slower(tuple(factor * ratio for ratio in rounds), floor)


@given(st.integers(1, 10**9), st.integers(0, 10**9), st.floats(0, 10))
def test_a_larger_file_never_turns_a_failure_into_a_pass(before: int, more: int, allowed: float) -> None:
    one, two = (size_line(before + growth, before, allowed).status for growth in (more, more + 1))
    assert not (one is Status.FAIL and two is Status.OK)


def test_one_good_round_is_enough() -> None:
    slow = Speed((1.0, 1.1, 2.0), 2.0, 1.0, 1, HERE)
    assert "latency" not in failing(measured(speed=slow))


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"machine": Machine("1.31", "another CPU", 1)}, "CPU"),
        ({"machine": Machine("1.31", "a CPU", 4)}, "threads"),
        ({"batch": 8}, "batch"),
    ],
    ids=["cpu", "threads", "batch"],
)
def test_a_speed_elsewhere_is_not_judged(changed: dict[str, Any], word: str) -> None:
    speed = replace(Speed((1.0,), 1.0, 1.0, 1, HERE), **changed)
    line = next(line for line in judge(measured(speed=speed), baseline()) if line.name == "latency")
    assert line.status is Status.SKIP
    assert word in line.reason


def test_another_runtime_is_judged_and_named() -> None:
    speed = Speed((1.0,), 1.0, 1.0, 1, Machine("1.32", "a CPU", 1))
    assert "ONNX Runtime 1.31, this is ONNX Runtime 1.32" in failing(measured(speed=speed))["latency"].reason


def test_a_speed_that_was_not_measured_is_said_to_be_missing() -> None:
    """A gate passed with a required speed-up of 9 that nobody had measured."""
    lines = {line.name: line for line in judge(measured(speed=None), baseline({"speedup": 9.0}))}
    assert (lines["speedup"].status, lines["latency"].status) == (Status.SKIP, Status.SKIP)
    assert lines["speedup"].reason == "nothing was timed: 0 seconds"
    without = replace(baseline(), measured=measured(speed=None))
    (line,) = (line for line in judge(measured(), without) if line.name == "latency")
    assert (line.status, line.reason) == (Status.SKIP, f"the baseline was not timed: {UPDATE} times it")
    assert not [line for line in judge(measured(speed=None), without) if line.name in ("speedup", "latency")]


def test_a_required_speed_needs_a_timing() -> None:
    with pytest.raises(RequantError, match="a required speedup needs a timing, but seconds is 0"):
        CheckOptions(tolerances={"speedup": 9.0}, seconds=0)


def test_a_speed_that_is_asked_for_is_judged_anywhere() -> None:
    speed = Speed((1.0, 1.1), 1.0, 1.0, 1, Machine("1.31", "another CPU", 1))
    found = failing(measured(speed=speed), baseline({"speedup": 1.5}))
    assert set(found) == {"speedup"}
    assert not failing(measured(speed=speed), baseline({"speedup": 1.05}))


def test_a_speed_below_the_required_one_is_not_slower_than_the_baseline() -> None:
    now = measured()
    assert now.speed is not None
    assert set(failing(now, baseline({"speedup": 2 * now.speed.ratio}))) == {"speedup"}


# ------------------------------------------------------------------------------------------------- what fails, and why


def test_an_unchanged_pair_passes() -> None:
    assert failing(measured()) == {}


def test_a_slower_model_names_the_kernels_that_are_new() -> None:
    now = measured(
        int8_model="other",
        speed=Speed((1.0, 1.1), 1.0, 1.0, 1, HERE),
        kernels={"QLinearConv": (2, 50.0), "Erf": (3, 50.0)},
        layers={**measured().layers, "detour": Layer("Erf")},
    )
    (line,) = failing(now).values()
    assert line.name == "latency"
    assert "3 Erf instead of 0 take 50% of the time" in line.reason
    assert line.layers == ("detour: new (Erf)",)


def test_layers_are_ordered_by_what_they_lose_themselves() -> None:
    other = {
        "conv": Layer("Conv", {"weight": Constant("int8", "z", 2.0), "bias": Constant("int32", "b", 1.0)}),
        "fc": Layer("Gemm", {"weight": Constant("int8", "z", 3.0)}, after=("conv",)),
    }
    now = measured(int8_model="other", layers=other, noise={"conv": 20.0, "fc": 17.0})
    assert [row.name for row in changed_layers(now, measured())] == ["conv", "fc"]
    now = measured(int8_model="other", layers=other, noise={"conv": 38.0, "fc": 17.0})
    assert [row.name for row in changed_layers(now, measured())] == ["fc", "conv"]


@pytest.mark.parametrize(
    ("bias", "says"),
    [(None, "bias removed"), (Constant("int32", "0", 0.0), "bias zero")],
    ids=["removed", "zero"],
)
def test_a_bias_that_does_nothing_any_more_fails(bias: Constant | None, says: str) -> None:
    constants = {"weight": Constant("int8", "a", 2.0)} | ({} if bias is None else {"bias": bias})
    now = measured(int8_model="other", layers={**measured().layers, "conv": Layer("Conv", constants)})
    (line,) = failing(now).values()
    assert line.name == "layers"
    assert line.layers[0].startswith(f"conv: {says}")


def test_a_bias_that_a_new_node_adds_is_not_gone() -> None:
    layers = {
        **measured().layers,
        "conv": Layer("Conv", {"weight": Constant("int8", "a", 2.0)}),
        "norm": Layer("BatchNormalization", after=("conv",)),
    }
    assert failing(measured(int8_model="other", layers=layers)) == {}


def test_a_model_that_is_the_same_is_not_blamed() -> None:
    worse = scored([True] * 150 + [False] * 50)
    (line,) = failing(measured(scores={"top1": worse})).values()
    assert line.layers == ()
    assert "the INT8 model is the same" in line.reason


def seen(**changed: Any) -> DataSummary:
    return replace(measured().data, **changed)


OTHER = Statistics(80.0, 60.0, 0.0, 255.0, (70.0, 80.0, 90.0))
SWAPPED = Statistics(0.5, 0.25, 0.0, 1.0, (0.6, 0.5, 0.4))
CLOSE = Statistics(0.5001, 0.2501, 0.0, 1.0, (0.4001, 0.5, 0.6))


@pytest.mark.parametrize(
    ("data", "float_score", "says"),
    [
        (seen(labels="others"), 0.1, "the data changed, not the model: the labels changed"),
        (seen(labels=""), 0.9, "the labels are missing"),
        (seen(inputs="others", statistics={"x": OTHER}), 0.3, "other data or preprocessing: the inputs changed"),
        (seen(inputs="others", statistics={"x": SWAPPED}), 0.9, "channels"),
        (seen(inputs="others", statistics={"x": CLOSE}), 0.5, "scores of the float model: top1 90.00% -> 50.00%"),
        (seen(inputs="others", samples=100), 0.9, "100 samples instead of 200"),
        (seen(), 0.5, "another runtime or metric"),
    ],
    ids=["labels", "no labels", "scale", "channels swapped", "float fell", "fewer", "same data"],
)
def test_other_data_are_said_to_be_other_data(data: DataSummary, float_score: float, says: str) -> None:
    now = measured(data=data, scores={"top1": scored([True] * 20 + [False] * 180, before=float_score)})
    found = failing(now)
    assert set(found) == {"data"}  # the scores are not judged: nobody could say what lost them
    assert says in found["data"].reason


def test_inputs_that_differ_in_their_bits_alone_pass() -> None:
    assert failing(measured(data=seen(inputs="others", statistics={"x": CLOSE}))) == {}


# ------------------------------------------------------------------------------------------------- tolerances


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top1", 1.5),
        ("top1", "150%"),
        ("top1", "-1%"),
        ("top1", "much"),
        ("top1", True),
        ("top1", math.nan),
        ("sqnr", 1e300),
        ("sqnr", "201"),
        ("sqnr", "101%"),
        ("latency", -0.1),
        ("latency", 1.5),
        ("latency", "x"),
        ("mac_share", 2),
        ("size", math.inf),
        ("speedup", "nan"),
    ],
)
def test_tolerances_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(RequantError, match=f"tolerance '{name}'"):
        tolerances({name: value}, [METRICS["top1"], METRICS["sqnr"]])


def test_an_unknown_tolerance_lists_near_names() -> None:
    with pytest.raises(RequantError, match="did you mean 'latency'"):
        tolerances({"latenzy": 0.1}, [METRICS["top1"]])


@given(st.dictionaries(st.sampled_from(sorted(LIMITS)), st.floats(0, 1)), st.floats(0, 1))
def test_tolerances_are_read_as_they_are_written(plain: dict[str, float], drop: float) -> None:
    found = tolerances({**plain, "top1": drop}, [METRICS["top1"]])
    again = tolerances(found.to_json(), [METRICS["top1"]])
    assert all(math.isclose(getattr(again, name), value, rel_tol=0) for name, value in plain.items())
    assert again.drops["top1"].amount == pytest.approx(drop, rel=1e-5)  # six digits are written


@pytest.mark.parametrize("text", ["10%", "0.1", 0.1])
def test_a_share_may_be_written_in_percent(text: object) -> None:
    assert tolerances({"latency": text}, []).latency == pytest.approx(0.1, rel=2**-52)


@pytest.mark.parametrize(("now", "before"), [(0.99, 1.0), (0.89, 0.9), (0.49, 0.5)])
def test_a_drop_by_the_tolerance_is_allowed(now: float, before: float) -> None:
    assert share_line(now, before, 0.01).status is Status.OK
    assert share_line(now - 0.001, before, 0.01).status is Status.FAIL

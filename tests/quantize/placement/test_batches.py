"""One plan for several batch sizes: which plan is fair, and which size pays for which."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from requant import RequantError
from requant.cli import main
from requant.quantize import Latency, Options, measure_costs, quantize_model
from requant.quantize.job import Candidate, Evidence, Job, Placement, Served
from requant.quantize.options.build import build_options
from requant.quantize.options.declared import BATCHES as BATCHES_OPTION
from requant.quantize.placement import batches as module
from requant.quantize.placement import choosing, measuring, priced_plans, racing, tried_plans
from requant.quantize.placement import costs as store
from requant.quantize.placement.batches import (
    MEASURED_NOISE,
    NOISE,
    compromises,
    fairest,
    finalists,
    least_noisy,
    passed,
    served,
    worst_ratios,
)
from requant.quantize.placement.costs import Costs, signature
from requant.quantize.placement.facts import Facts
from requant.quantize.placement.measuring import Bench, Measured, Write
from requant.quantize.placement.priced_plans import plans_by_price
from requant.quantize.placement.pricing import Prices, Space
from requant.quantize.placement.racing import Size, fastest
from requant.quantize.placement.search import place
from requant.quantize.project.check import quantize_arguments
from requant.quantize.project.file import load_project
from requant.quantize.runtime.clock import Times
from requant.quantize.runtime.machine import Machine
from requant.quantize.runtime.progress import silent
from requant.quantize.runtime.timing import Regime
from requant.quantize.steps import search as walking
from requant.quantize.steps.emit import plan_by_rules
from requant.quantize.steps.prepare import prepare
from requant.quantize.steps.ranges import find_ranges
from requant.transforms.int8.plan import Impl, Plan

SAMPLES = Path(__file__).parents[3] / "sample_models"
DATA = f"{SAMPLES / 'digits.npz'}:calib"
TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[{axis}, 16, 8, 8] x) => (float[{axis}, 8, 8, 8] y) {{
    [first] a = Conv <pads = [1, 1, 1, 1]> (x, w1)
    [second] y = Conv <pads = [1, 1, 1, 1]> (a, w2)
}}"""
SHAPES = {"x": (16, 8, 8), "a": (12, 8, 8), "y": (8, 8, 8)}
BATCHES = (1, 16)


@pytest.fixture(autouse=True)
def _no_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUANT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write two convolutions, and data for them."""
    return saved(tmp_path / "m.onnx")


def saved(path: Path, axis: str = "N") -> Path:
    random = np.random.default_rng(0)
    weights = {"w1": (12, 16, 3, 3), "w2": (8, 12, 3, 3)}
    tensors = [
        ir.tensor(random.standard_normal(shape).astype(np.float32) / 10, name=name) for name, shape in weights.items()
    ]
    ir.save(ir.from_onnx_text(TEXT.format(axis=axis), initializers=tensors), path)
    np.savez(path.with_name("d.npz"), x=random.standard_normal((6, 16, 8, 8)).astype(np.float32))
    return path


def begun(model: Path, **options: Any) -> tuple[Job, Facts, Plan, Write]:
    asked = Options(**{"batch": BATCHES, "place": "rules", "isa": "vnni", "effort": "low", **options})
    job = prepare(model, str(model.with_name("d.npz")), asked, model.parent, silent)
    return job, *plan_by_rules(job, find_ranges(job), Evidence())


def changed(plan: Plan, **impls: Impl) -> Plan:
    return plan.with_choices({name: type(plan.choices[name])(impl) for name, impl in impls.items()})


# ----------------------------------------------------------------------------------------------------- which plan

TIMES = st.lists(
    st.lists(st.floats(1.0, 2.0), min_size=5, max_size=5).map(
        lambda row: dict(zip(("rules", "all", "cut 1", "cut 2", "cut 3"), row, strict=True))
    ),
    min_size=1,
    max_size=3,
)
NATIVE = st.sets(st.sampled_from(["rules", "all", "cut 1", "cut 2"]))


def fastest_of(worth: Mapping[str, float], native: set[str]) -> str:
    """Return the plan for one batch size, by the definition: the rules and stock operators are preferred."""
    best = min(worth, key=worth.__getitem__)
    if worth[best] > 0.99 * worth["rules"]:
        best = "rules"
    other = min((name for name in worth if name not in native), key=worth.__getitem__)
    return other if best in native and worth[other] < 1.02 * worth[best] else best


@given(TIMES, NATIVE)
def test_one_batch_size_gets_its_fastest_plan(times: list[dict[str, float]], native: set[str]) -> None:
    assert fairest(times[:1], native) == fastest_of(times[0], native)


@given(TIMES, NATIVE)
def test_a_plan_within_two_percent_everywhere_is_taken_if_there_is_one(
    times: list[dict[str, float]], native: set[str]
) -> None:
    worst = worst_ratios(times)
    chosen = worst[fairest(times, native)]
    least = min(worst.values())
    assert chosen <= 1.02 if least <= 1.02 and len(times) > 1 else chosen <= 1.02 * least / 0.99


@given(TIMES, NATIVE)
def test_the_plans_that_are_timed_again_hold_the_chosen_ones(times: list[dict[str, float]], native: set[str]) -> None:
    kept = set(finalists(times, native))
    assert {fairest(times, native), *(fairest([each], native) for each in times), "rules"} <= kept


CASES: dict[str, tuple[list[dict[str, float]], str]] = {
    "one plan is best everywhere": ([{"rules": 2, "a": 1, "b": 1.5}, {"rules": 20, "a": 10, "b": 15}], "a"),
    "a compromise": ([{"rules": 2, "a": 1, "b": 1.3, "c": 1.1}, {"rules": 20, "a": 13, "b": 10, "c": 10.9}], "c"),
    "the smaller loss": ([{"rules": 2, "a": 1, "b": 1.12}, {"rules": 20, "a": 10.4, "b": 10}], "a"),
    "rules that lose nothing": ([{"rules": 1.005, "a": 1}, {"rules": 10, "a": 10.001}], "rules"),
    "rules that lose too much": ([{"rules": 1.025, "a": 1.019, "b": 1}, {"rules": 10, "a": 10, "b": 20}], "a"),
}


@pytest.mark.parametrize(("times", "best"), CASES.values(), ids=CASES)
def test_the_least_worst_loss_wins(times: list[dict[str, float]], best: str) -> None:
    assert fairest(times) == best


LOADS = [(batch, None) for batch in BATCHES]


def rows(chosen: str, *tried: Mapping[str, float]) -> tuple[Served, ...]:
    own = [min(times, key=times.__getitem__) for times in tried]
    return served(LOADS, chosen, own, tried, [None, None])


def test_of_equally_fast_plans_the_one_with_the_least_noise_is_taken() -> None:
    """How fast they are on a busy machine does not decide how accurate the model is."""
    noise = {"all": 3.0, "cut": 1.0, "rules": 2.0, "native": 0.0}
    for first, second in (({"all": 1.0, "cut": 1.03}, "cut"), ({"all": 1.03, "cut": 1.0}, "cut")):
        times = [{**first, "rules": 1.5, "native": 1.0}]
        best = min(first, key=first.__getitem__)
        assert least_noisy(times, best, noise, {"native"}, 0.05) == second
        assert least_noisy(times, best, noise, {"native"}, 0.01) == best
        assert least_noisy(times, "native", noise, {"native"}, 0.05) == "native"
    equal = dict.fromkeys(noise, 0.0)
    assert least_noisy([{"all": 1.0, "cut": 0.99}], "all", equal, (), 0.05) == "all"


def test_a_note_says_which_batch_size_pays_for_which() -> None:
    found = rows("a", {"a": 1.0, "b": 1.12}, {"a": 10.4, "b": 10.0})
    assert compromises(found) == [
        "batch 16 is 4 % slower than with a plan of its own, which would make batch 1 12 % slower"
    ]
    assert [round(row.slower, 9) for row in found] == [0, 0.04]
    assert found[1].to_json()["own_plan"] == "b"


def test_a_note_names_the_regime_of_a_decoder() -> None:
    loads = [(1, Regime("prefill", 16, 0)), (1, Regime("step", 1, 16))]
    found = served(loads, "a", ["a", "b"], [{"a": 1.0, "b": 1.12}, {"a": 10.4, "b": 10.0}], [None, None])
    (note,) = compromises(found)
    assert note.startswith("step after 16 tokens is 4 % slower than with a plan of its own, which would make prefill")
    assert found[1].to_json()["regime"] == {"name": "step", "tokens": 1, "past": 16}


def test_a_loss_within_two_percent_is_not_worth_a_note() -> None:
    assert compromises(rows("a", {"a": 1.0, "b": 1.12}, {"a": 10.19, "b": 10.0})) == []


def test_one_batch_size_has_no_rows() -> None:
    assert served([(4, None)], "a", ["a"], [{"a": 1.0}], [None]) == ()


# ----------------------------------------------------------------------------------------- whole models, pretended


@pytest.mark.parametrize(
    ("worth", "chosen", "why"),
    [
        ({"rules": 1.0, "cut": 1.2}, "rules", module.NOISE),
        ({"rules": 1.0, "cut": 0.995}, "rules", module.RULES + module.PRICED),
        ({"all": 1.0, "cut": 0.99}, "all", module.NATIVE + module.PRICED),
        ({"all": 1.0, "cut": 0.95}, "all", module.CLOCK_PRICED),
        ({"all": 1.0, "cut": 0.9}, "all", module.CLOCK),
        ({"all": 1.0, "cut": 0.9}, "cut", None),
    ],
)
def test_a_plan_that_is_passed_over_has_its_own_reason(worth: dict[str, float], chosen: str, why: str | None) -> None:
    """The times that are shown have no price: a reason that holds for priced times alone says so."""
    tried = {name: 0.9 if name == "cut" else 1.0 for name in worth}
    assert passed(tried, worth, chosen, {"cut"} if "all" in worth else ()) == ({} if why is None else {"cut": why})


@pytest.mark.parametrize(("time", "why"), [(0.995, module.RULES), (0.9, module.CLOCK)])
def test_where_noise_has_no_price_no_reason_speaks_of_one(time: float, why: str) -> None:
    times = {"rules": 1.0, "cut": time}
    assert passed(times, times, "rules") == {"cut": why}


@pytest.mark.parametrize(
    ("times", "why"),
    [({"rules": 1.0, "all": 1.1, "cut": 0.995}, {"cut": module.RULES}), ({"rules": 1.0, "all": 1.1, "cut": 0.5}, {})],
)
def test_the_placement_holds_the_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch, times: dict[str, float], why: dict[str, str]
) -> None:
    _, _, placement = raced(model, monkeypatch, Clock({1: times}), (1,))
    assert placement.passed == placement.to_json()["passed"] == why


class Clock:
    """Pretends the times of candidates by name at each batch size; the second timing may differ."""

    def __init__(self, *passes: Mapping[int, Mapping[str, float]]) -> None:
        self.passes, self.names, self.calls = passes, dict[int, str](), list[tuple[int, list[str]]]()

    def __call__(self, runs: Sequence[Any], **_: Any) -> list[Times]:
        if not self.names:  # the first call has all candidates, in order
            self.names = {
                id(run.func): name for run, name in zip(runs, next(iter(self.passes[0].values())), strict=True)
            }
        (batch,) = {len(run.args[0]["x"]) for run in runs}
        names = [self.names[id(run.func)] for run in runs]
        seen = sum(batch == size for size, _ in self.calls)
        self.calls.append((batch, names))
        return [Times((self.passes[seen][batch][name] / 1e3,)) for name in names]


def raced(model: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, batches: tuple[int, ...] = BATCHES) -> Any:
    """Return the candidates and the result of `fastest` with pretended times."""
    monkeypatch.setattr(racing, "race", clock)
    job, facts, rules, write = begun(model, batch=batches)
    candidates = {
        "rules": write(rules),
        "all": write(changed(rules, second=Impl.FLOAT)),
        "cut": write(changed(rules, first=Impl.FLOAT)),
    }
    sizes = []
    for load in job.loads:
        prices = Prices.of(Space.of(job, facts, rules, load.feed), Costs(Machine.here(1)), {})
        sizes.append(Size(load.batch, Bench.of(job, prices.space, write, load.feed), Measured.of(prices)))
    return candidates, *fastest(sizes, candidates)


def test_candidates_are_timed_at_every_batch_size(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {1: {"rules": 2.0, "all": 1.0, "cut": 1.04}, 16: {"rules": 30.0, "all": 20.0, "cut": 15.0}}
    clock = Clock(times, times)
    candidates, found, placement = raced(model, monkeypatch, clock)
    assert found is candidates["cut"]  # of batch 1 alone, `all` is the best
    assert placement.tried == pytest.approx(times[1])
    assert [(row.batch, row.own, row.chosen) for row in placement.served] == [(1, "all", "cut"), (16, "cut", "cut")]
    assert placement.served[0].slower == pytest.approx(0.04)
    assert all(row.predicted_ms is not None for row in placement.served)
    assert compromises(placement.served) == [
        "batch 1 is 4 % slower than with a plan of its own, which would make batch 16 33 % slower"
    ]


def test_the_best_candidates_are_timed_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first timing of `cut` at batch 1 was disturbed."""
    monkeypatch.setattr(module, "FINALISTS", 1)
    first = {1: {"rules": 2.0, "all": 1.0, "cut": 1.3}, 16: {"rules": 30.0, "all": 20.0, "cut": 15.0}}
    again = {1: {"rules": 2.0, "all": 1.1, "cut": 1.01}, 16: first[16]}
    clock = Clock(first, again)
    candidates, found, placement = raced(model, monkeypatch, clock)
    assert found is candidates["cut"]
    assert placement.served[0].tried == pytest.approx({"rules": 2.0, "all": 1.0, "cut": 1.01})
    assert [batch for batch, _ in clock.calls] == [1, 16, 1, 16]


def test_one_batch_size_is_timed_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({16: {"rules": 30.0, "all": 20.0, "cut": 15.0}})
    candidates, found, placement = raced(model, monkeypatch, clock, (16,))
    assert found is candidates["cut"]
    assert (len(clock.calls), placement.served, placement.chosen) == (1, (), "cut")
    assert set(placement.to_json()) == {
        "how",
        "why",
        "predicted_ms",
        "tried_ms",
        "chosen",
        "passed",
        "relieved",
        "missed",
        "uncertainty",
        "costs_sure",
    }


# --------------------------------------------------------------------------------------------------------- by costs

COSTS: Mapping[int, Mapping[str, tuple[float, float]]] = {
    1: {"first": (1000.0, 900.0), "second": (1000.0, 300.0)},
    16: {"first": (16000.0, 4000.0), "second": (16000.0, 17000.0)},
}
"""Microseconds of each unit in float and in integers, by batch size."""


def costs_file(model: Path, costs: Mapping[int, Mapping[str, tuple[float, float]]]) -> Path:
    _, facts, rules, _ = begun(model)
    known = Costs(Machine.here(1))
    for batch, times in costs.items():
        shapes = {name: (batch, *shape) for name, shape in SHAPES.items()}
        for unit in rules.units:
            key = signature(unit, facts.nodes, shapes)
            rows = zip((Impl.FLOAT, Impl.U8), times[unit.name], strict=True)
            known = known.with_times((key, impl, cost) for impl, cost in rows)
    store.save(known, model.parent / "c.json")
    return model.parent / "c.json"


def placed(model: Path, batches: tuple[int, ...], **options: Any) -> tuple[dict[str, Impl], Any]:
    costs = costs_file(model, COSTS)
    job, facts, rules, write = begun(model, batch=batches, place="estimated", costs=costs, **options)
    found, placement = place(job, facts, rules, write)
    return {name: choice.impl for name, choice in found.plan.choices.items()}, placement


def test_costs_of_all_batch_sizes_give_a_plan(model: Path) -> None:
    """`first` gains at batch 16, `second` at batch 1; in integers both lose little at the other batch size."""
    alone = {batch: placed(model, (batch,)) for batch in BATCHES}
    assert alone[16][0] == {"first": Impl.U8, "second": Impl.FLOAT}
    assert alone[1][1].served == ()
    impls, placement = placed(model, BATCHES)
    assert impls == {"first": Impl.U8, "second": Impl.U8}
    assert set(placement.served[0].tried) == {"cut for batch 1", "cut for batch 16", "cut for all"}
    assert placement.predicted_ms == placement.served[0].predicted_ms < placement.served[1].predicted_ms
    assert [row.batch for row in placement.served] == [1, 16]


def test_a_search_places_for_all_batch_sizes(model: Path) -> None:
    job, facts, rules, write = begun(model, place="estimated", costs=costs_file(model, COSTS))
    plan_at = plans_by_price(job, facts, rules, write, {"x": 1e-4, "a": 1e-4})
    impls = {name: choice.impl for name, choice in plan_at(0.0).choices.items()}
    assert impls == {"first": Impl.U8, "second": Impl.U8}
    assert {plan_at(1e6).choices[name].impl for name in impls} == {Impl.FLOAT}


def test_a_search_compares_models_at_the_batch_size_that_gains_least(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {1: 1.5, 16: 1.2}, "search")
    job, _, rules, write = begun(model)
    walk: Any = SimpleNamespace(job=job)
    assert walking._speedup(walk, write(rules)) == 1.2


def test_costs_are_measured_at_every_batch_size(model: Path) -> None:
    rows = [measure_costs(model, str(model.with_name("d.npz")), Options(batch=batch)).rows for batch in (1, 4, (1, 4))]
    assert set(rows[0]).isdisjoint(rows[1])
    assert set(rows[2]) == {*rows[0], *rows[1]}


def test_costs_of_a_busy_machine_are_measured_once_in_a_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache keeps no costs of kernels that waited: each placement of a run measured all of them again."""
    monkeypatch.setattr(measuring, "settled", lambda profiles: False)
    monkeypatch.setattr(measuring, "MORE_TURNS", 0)  # none would be the last
    monkeypatch.setattr(tried_plans, "LEAST_MS", 0.0)
    counted = []

    def measure(*given: Any) -> Measured:
        counted.append(given)
        return measuring.measure_units(*given)

    for place_of_use in (tried_plans, priced_plans):
        monkeypatch.setattr(place_of_use, "measure_units", measure)
    begin = begun(model, place="measured", seconds=0.1)
    _, first = place(*begin)
    sizes = len(BATCHES)
    assert (len(counted), first.sure) == (sizes, False)
    assert {Impl.FLOAT.value, Impl.U8.value} <= {impl for row in first.costs.values() for impl in row}
    _, second = place(*begin, before=first)
    plans_by_price(*begin, {"x": 1e-4, "a": 1e-4}, second)
    assert (len(counted), second.sure) == (sizes, False)
    assert second.costs.keys() == first.costs.keys()
    place(*begin)
    assert len(counted) == 2 * sizes


def test_a_plan_is_profiled_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = begun(model, place="measured")
    plans = plans_by_price(*begin, {"x": 1e-4, "a": 1e-4})
    cheap, dear = plans(0.0), plans(1e6)
    plans, took = plans.measured(cheap)
    monkeypatch.setattr(priced_plans, "profile", None)
    assert plans.measured(cheap) == (plans, took)
    with pytest.raises(TypeError, match="NoneType"):
        plans.measured(dear)


# ------------------------------------------------------------------------------------------------------ whole runs


@pytest.mark.slow
def test_a_model_is_placed_and_timed_at_every_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried_plans, "LEAST_MS", 0.0)
    monkeypatch.setattr(tried_plans, "ROUNDS", 1)
    options = Options(batch=(1, 8), samples=16, seconds=0.1, effort="low", force_int8=True)
    found = quantize_model(SAMPLES / "digits.onnx", DATA, tmp_path / "q.onnx", options)
    assert [each.batch for each in found.latencies] == [1, 8]
    assert found.latency is found.latencies[0]
    assert found.placement.how == "measured"
    assert [row.batch for row in found.placement.served] == [1, 8]
    names = set(found.placement.tried)
    assert {"rules", "all"} <= names
    # what costs give beside these, and whether native operators win, depends on the machine
    others = {re.sub("(, (products|dynamic|stock))+$", "", name) for name in names} - {
        "rules",
        "all",
        "all, native",
    }
    assert all(re.search(r" for (batch [18]|all)$", name) for name in others), names
    for row in found.placement.served:
        assert set(row.tried) == names
        assert {row.chosen, row.own} <= names
        assert row.predicted_ms is not None
    written = found.to_json()
    assert [each["batch"] for each in written["latencies"]] == [1, 8]
    assert written["latency"] == written["latencies"][0]
    assert [each["batch"] for each in written["placement"]["served"]] == [1, 8]
    assert json.loads(json.dumps(written)) == written


def test_batch_sizes_that_run_too_briefly_are_placed_by_rules(model: Path) -> None:
    options = Options(batch=(1, 2), isa="vnni", effort="low", seconds=0.01, force_int8=True)
    found = quantize_model(model, str(model.with_name("d.npz")), model.parent / "q.onnx", options)
    assert (found.placement.how, found.placement.served) == ("rules", ())
    assert [each.batch for each in found.latencies] == [1, 2]


@pytest.mark.parametrize(
    ("gain", "unsure", "told"),
    [
        (1.06, 0.03, ""),
        (1.06, 0.08, "1.06x the speed of float (machine busy, +-8 %); the times are unsure by 8 %, which is more"),
        (1.08, 0.5, "1.08x the speed of float (machine busy, +-50 %); the times are unsure by 10 %, which is more"),
        (1.12, 0.5, ""),
        (1.01, 0.08, "1.01x the speed of float (machine busy, +-8 %)"),
    ],
)
def test_a_gain_within_the_uncertainty_of_its_times_is_none(
    model: Path, monkeypatch: pytest.MonkeyPatch, gain: float, unsure: float, told: str
) -> None:
    timed = Latency(gain, 1.0, gain, 1.0, runs=5, uncertainty=unsure)
    monkeypatch.setattr("requant.quantize.steps.judge.time_models", lambda *_, **__: timed)
    options = Options(place="rules", isa="vnni", effort="low")
    found = quantize_model(model, str(model.with_name("d.npz")), model.parent / "q.onnx", options)
    assert found.why_not.partition(": the output")[0] == (f"int8 gains too little here: {told}" if told else "")
    assert bool(found.int8_nodes) is not bool(told)


def pretend(monkeypatch: pytest.MonkeyPatch, speedups: Mapping[int, float], step: str = "judge") -> None:
    """Let INT8 be this many times as fast as float, by batch size."""

    def timed(*_: Any, batch: int, **__: Any) -> Latency:
        return Latency(speedups[batch], 1.0, speedups[batch], 1.0, runs=5, batch=batch)

    monkeypatch.setattr(f"requant.quantize.steps.{step}.time_models", timed)


VERDICTS: dict[str, tuple[tuple[float, float], str, str]] = {
    "gains at both": ((1.3, 1.5), "", ""),
    "gains more than it loses": (
        (0.98, 1.5),
        "",
        "not every batch size gains: 0.98x the speed of float at batch 1, 1.50x at batch 16",
    ),
    "loses more than it gains": (
        (0.7, 1.2),
        "int8 gains too little here: 0.70x the speed of float at batch 1, 1.20x at batch 16",
        "",
    ),
    "gains nothing": (
        (1.0, 1.01),
        "int8 gains too little here: 1.00x the speed of float at batch 1, 1.01x at batch 16",
        "",
    ),
}


@pytest.mark.parametrize(("speedups", "verdict", "note"), VERDICTS.values(), ids=VERDICTS)
def test_the_verdict_is_over_all_batch_sizes(
    model: Path, monkeypatch: pytest.MonkeyPatch, speedups: tuple[float, float], verdict: str, note: str
) -> None:
    pretend(monkeypatch, dict(zip(BATCHES, speedups, strict=True)))
    options = Options(batch=BATCHES, place="rules", isa="vnni", effort="low")
    found = quantize_model(model, str(model.with_name("d.npz")), model.parent / "q.onnx", options)
    assert found.why_not.partition(": the output")[0] == verdict
    assert bool(found.int8_nodes) is not bool(verdict)
    rejected = found.to_json()["rejected"]
    assert [each["batch"] for each in rejected["latencies"]] == [*BATCHES] if verdict else rejected is None
    assert [text for text in found.notes if "batch" in text] == ([note] if note else [])


# --------------------------------------------------------------------------------------------------- command line


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


REFUSED = {
    "0,4": "batch must be at least 1, not 0",
    "4,-1": "batch must be at least 1, not -1",
    "1,16,1": "batch 1 is given more than once",
    "1,many": "'many' is not a whole number; write for instance 16, or 1,16",
    "1,": "'' is not a whole number",
    "1.5": "'1.5' is not a whole number",
    "1000000000000": "batch must be at most",
}


@pytest.mark.parametrize(("text", "said"), REFUSED.items(), ids=REFUSED)
def test_sizes_that_make_no_sense_are_refused(model: Path, text: str, said: str) -> None:
    result = invoke("quantize", model, "--data", model.with_name("d.npz"), "-o", model.with_name("o"), "--batch", text)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr
    assert "--batch" in result.stderr
    assert not model.with_name("o").exists()


def test_a_fixed_batch_axis_is_refused_before_long_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = saved(tmp_path / "fixed.onnx", axis="1")
    monkeypatch.delattr("requant.quantize.steps.ranges.observe")
    result = invoke("quantize", fixed, "--data", tmp_path / "d.npz", "-o", tmp_path / "o.onnx", "--batch", "1,16")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "its first axis is fixed, so the model takes no batch of 16" in result.stderr
    assert not (tmp_path / "o.onnx").exists()


def test_the_table_has_a_row_for_each_batch_size(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {1: 1.5, 16: 2.5})
    costs = costs_file(model, COSTS)
    base = ("quantize", model, "--data", model.with_name("d.npz"), "-o", model.with_name("o.onnx"), "--isa", "vnni")
    result = invoke(*base, "--batch", "1,16", "--costs", costs)
    assert result.exit_code == 0, result.stderr
    for text in ("latency, batch 1 ", "1.50x", "latency, batch 16 ", "2.50x", "placement, batch 1 ", "of 3 plans"):
        assert text in result.stdout
    result = invoke(*base, "--batch", "16", "--costs", costs, "--force", "--json")
    found = json.loads(result.stdout)
    assert found["latency"]["batch"] == 16
    assert "latencies" not in found
    assert "served" not in found["placement"]


@pytest.mark.parametrize(("whole", "int8"), [(1.0, True), (1.99, False)], ids=["faster", "hardly faster"])
def test_noise_alone_leaves_no_model_in_float(
    model: Path, monkeypatch: pytest.MonkeyPatch, whole: float, int8: bool
) -> None:
    job, facts, rules, write = begun(model, batch=1)
    plain = write(changed(rules, **dict.fromkeys((unit.name for unit in rules.units), Impl.FLOAT)))
    prices = Prices.of(Space.of(job, facts, rules, job.feed), Costs(Machine.here(1)), {})
    sizes = [Size(1, Bench.of(job, prices.space, write, job.feed), Measured.of(replace(prices, noise_price=1e9)))]
    candidates = {"all": write(rules), "cut 1": plain}

    def times(
        sizes: Sequence[Size], runners: Mapping[str, object], seconds: float
    ) -> tuple[list[dict[str, float]], float]:
        assert sizes[0].known.prices.noise_price == 0
        return [dict.fromkeys(runners, whole)], 0.0

    monkeypatch.setattr(racing, "least_milliseconds", times)
    before = Placement("measured", 2.0, {"all": whole, "cut 1": 2.0}, chosen="cut 1")
    found, placement = choosing.despite_noise(sizes, candidates, plain, before)
    assert found is candidates["all" if int8 else "cut 1"]
    assert placement.chosen == ("all" if int8 else "cut 1")


@pytest.mark.parametrize(
    ("whole", "error", "chosen", "why"),
    [
        (1.0, 0.05, "all", {}),
        (1.0, 0.2, "cut 1", {"all": MEASURED_NOISE}),
        (1.0, math.inf, "cut 1", {"all": MEASURED_NOISE}),
        (1.95, 0.0, "cut 1", {"all": NOISE}),
    ],
    ids=["little error", "much error", "loses too much", "hardly faster"],
)
def test_the_error_of_a_faster_plan_is_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch, whole: float, error: float, chosen: str, why: Mapping[str, str]
) -> None:
    """An error of 1 is worth the time of the float model, 10 ms; the plan that the estimates chose has 0.02."""
    job, facts, rules, write = begun(model, batch=1)
    job = replace(job, options=replace(job.options, effort="medium"))
    prices = Prices.of(Space.of(job, facts, rules, job.feed), Costs(Machine.here(1)), {})
    sizes = [Size(1, Bench.of(job, prices.space, write, job.feed), Measured.of(replace(prices, noise_price=1e9)))]
    candidates = {"all": write(rules), "cut 1": write(rules), "rules": write(rules)}
    errors = {id(candidates["all"]): error, id(candidates["cut 1"]): 0.02}
    tried = {"all": whole, "cut 1": 2.0, "rules": 3.0}
    asked: list[Candidate] = []

    def measured(candidate: Candidate) -> float:
        asked.append(candidate)
        return errors[id(candidate)]

    def times(
        sizes: Sequence[Size], runners: Mapping[str, object], seconds: float
    ) -> tuple[list[dict[str, float]], float]:
        return [{name: tried[name] for name in runners}], 0.0

    monkeypatch.setattr(racing, "least_milliseconds", times)
    monkeypatch.setattr(choosing, "float_time", lambda prices: 10e3)
    before = Placement("measured", 2.0, tried, chosen="cut 1", passed={"all": NOISE})
    found, placement = choosing.by_measured_error(sizes, candidates, candidates["cut 1"], before, measured)
    assert found is candidates[chosen]
    assert (placement.chosen, placement.passed, placement.tried) == (chosen, why, tried)
    assert len(asked) == (2 if whole == 1.0 else 0)


def test_the_stock_twin_of_the_best_plan_is_no_candidate_whose_error_is_measured(model: Path) -> None:
    """It is timed beside the best plan alone, and its noise may rule it out: this ended with a traceback."""
    job, facts, rules, write = begun(model, batch=1)
    job = replace(job, options=replace(job.options, effort="medium"))
    prices = Prices.of(Space.of(job, facts, rules, job.feed), Costs(Machine.here(1)), {})
    sizes = [Size(1, Bench.of(job, prices.space, write, job.feed), Measured.of(prices))]
    best, twin = write(rules), "cut 1, stock"
    before = Placement("measured", 2.0, {twin: 1.0, "cut 1": 2.0}, chosen="cut 1", passed={twin: NOISE})
    assert choosing.by_measured_error(sizes, {"cut 1": best}, best, before, lambda candidate: 0.02) == (best, before)


@pytest.mark.parametrize(("slow", "kept"), [(1.0, ["all", "rules"]), (0.1, ["all", "cut 1", "rules"])])
def test_slow_plans_far_from_the_fastest_one_are_not_timed(
    model: Path, monkeypatch: pytest.MonkeyPatch, slow: float, kept: list[str]
) -> None:
    job, facts, rules, write = begun(model, batch=1)
    prices = Prices.of(Space.of(job, facts, rules, job.feed), Costs(Machine.here(1)), {})
    sizes = [Size(1, Bench.of(job, prices.space, write, job.feed), Measured.of(prices))]
    took = iter((1.4 * slow, 1.6 * slow, slow))
    monkeypatch.setattr(racing, "time_run", lambda run, **_: Times((next(took),)))
    runners = racing.runners_of(sizes, dict.fromkeys(("all", "cut 1", "rules"), write(rules)), racing.FAR)
    assert [*runners] == kept


def test_one_size_is_a_number_or_a_tuple() -> None:
    assert Options(batch=4).batches == Options(batch=(4,)).batches == (4,)


def test_a_project_names_one_size_or_several(tmp_path: Path) -> None:
    model = 'model = "m.onnx"\noutput = "q.onnx"\n[quantize]\n'
    for text, sizes in (("batch = 16", (16,)), ("batch = [1, 16]", (1, 16))):
        (tmp_path / "requant.toml").write_text(model + text)
        project = load_project(tmp_path / "requant.toml")
        assert project.quantize is not None
        values = {"batch": BATCHES_OPTION.read(project.quantize["batch"])}
        assert build_options(values).batches == sizes
        arguments = quantize_arguments(project)
        assert arguments[arguments.index("--batch") + 1] == ",".join(map(str, sizes))
    for text in ('batch = "1,16"', "batch = [1, true]", "batch = [1.5]"):
        (tmp_path / "requant.toml").write_text(model + text)
        with pytest.raises(
            RequantError, match=r"\[quantize\] batch: must be a whole number or a list of whole numbers"
        ):
            load_project(tmp_path / "requant.toml")


# -------------------------------------------------------------------------------------------------- native or stock


@pytest.mark.parametrize(("gain", "native"), [(1.1, True), (1.001, False)], ids=["gains", "gains too little"])
def test_native_operators_are_compared_with_the_same_plan_without_them(
    model: Path, monkeypatch: pytest.MonkeyPatch, gain: float, native: bool
) -> None:
    job, facts, rules, write = begun(model, batch=1)
    unit = next(unit for unit in rules.units if unit.op == "Conv" and rules.impl(unit) is Impl.U8)
    best = replace(write(rules), plan=changed(rules, **{unit.name: Impl.U8_NATIVE}))
    prices = Prices.of(Space.of(job, facts, rules, job.feed), Costs(Machine.here(1)), {})
    sizes = [Size(batch, Bench.of(job, prices.space, write, job.feed), Measured.of(prices)) for batch in BATCHES]

    def times(
        sizes: Sequence[Size], runners: Mapping[str, object], seconds: float
    ) -> tuple[list[dict[str, float]], float]:
        return [{name: gain if name.endswith(", stock") else 1.0 for name in runners} for _ in sizes], 0.0

    monkeypatch.setattr(racing, "least_milliseconds", times)
    tried = {"cut 1": 1.0, "rules": 2.0}
    for count in (1, 2):
        before = Placement("measured", 1.0, tried, served(LOADS, "cut 1", ["cut 1"] * 2, [tried] * 2, [None] * 2))
        before = replace(before, chosen="cut 1", served=before.served if count > 1 else ())
        found, placement = choosing.native_or_stock(sizes[:count], {"cut 1": best}, best, before)
        assert found.native is native
        assert placement.tried == {**tried, "cut 1, stock": gain}
        assert placement.stock == {"cut 1, stock"}
        assert [row.tried for row in placement.served] == [placement.tried] * len(before.served)
        assert placement.chosen == ("cut 1" if native else "cut 1, stock")
        assert {row.chosen for row in placement.served} <= {placement.chosen}

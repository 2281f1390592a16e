"""Session options are taken where they gain, one by one, and what is recommended loads as it says."""

from __future__ import annotations

import itertools
import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from requant import RequantError
from requant.quantize.runtime import clock as clocks
from requant.quantize.runtime import machine
from requant.quantize.runtime.clock import Times
from requant.quantize.runtime.configured import (
    ENUMERATIONS,
    GAIN,
    Value,
    Values,
    configured_run,
    open_configured,
    snippet,
)
from requant.quantize.runtime.machine import physical_cores
from requant.quantize.tools.bench import settings
from requant.quantize.tools.bench.settings import CANDIDATES, DEFAULTS, Settings, fastest, recommend

ROOT = Path(__file__).parents[3]
DIGITS = ROOT / "sample_models" / "digits.onnx"
FEED = {"image": np.random.default_rng(0).random((1, 1, 28, 28), np.float32)}

Cost = Callable[[Values], float]
SPINNING = "session.intra_op.allow_spinning"
PARALLEL: Value = "parallel"


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cost], None]:
    """Let a run take the time that a function of the values returns, without a clock."""

    def use(cost: Cost) -> None:
        monkeypatch.setattr(settings, "configured_run", lambda _, values, __: lambda: cost(values))
        monkeypatch.setattr(settings, "fastest", lambda runs, **_: [Times((run(),)) for run in runs])
        monkeypatch.setattr(settings, "cpus", lambda: 8)
        monkeypatch.setattr(settings, "physical_cores", lambda: 4)

    return use


def factors(**by_option: float) -> Cost:
    """Return the cost of a run where each option with another value than the default multiplies it."""
    names = {"threads": "intra_op_num_threads", "spinning": SPINNING}
    wide = {names.get(option, option): factor for option, factor in by_option.items()}

    def cost(values: Values) -> float:
        found = 1e-3
        for option, value in values.items():
            found *= wide.get(option, 1.0) if value != DEFAULTS[option] else 1.0
        return found

    return cost


def quick(**options: Any) -> Settings:
    return recommend("m.onnx", FEED, seconds=600, **options)


def test_where_nothing_gains_the_defaults_stay(pretend: Callable[[Cost], None]) -> None:
    pretend(factors())
    found = quick()
    assert (found.values, found.speedup) == ({}, 1.0)
    assert not any(trial.taken for trial in found.trials)


@pytest.mark.parametrize("option", [*CANDIDATES])
@pytest.mark.parametrize(("gain", "taken"), [(1.5, True), (1.021, True), (1.019, False), (0.5, False)])
def test_a_value_is_taken_from_two_percent_on(
    option: str, gain: float, taken: bool, pretend: Callable[[Cost], None]
) -> None:
    pretend(factors(**{option: 1 / gain}))
    found = quick()
    (value,) = CANDIDATES[option]
    assert found.values == ({option: value} if taken else {})
    assert [trial.option for trial in found.trials if trial.taken] == ([option] if taken else [])
    assert found.speedup == pytest.approx(gain if taken else 1.0, rel=1e-12)  # a quotient of two products of rounding


def test_what_gains_is_put_together(pretend: Callable[[Cost], None]) -> None:
    pretend(factors(spinning=0.5, enable_mem_pattern=0.8, graph_optimization_level=3.0))
    found = quick()
    assert found.values == {SPINNING: "0", "enable_mem_pattern": False}
    assert found.speedup == pytest.approx(2.5, rel=1e-12)
    before = {trial.option: trial.before_ms for trial in found.trials}
    assert before["enable_cpu_mem_arena"] == pytest.approx(0.4, rel=1e-12)  # against the best so far, not the defaults


def test_the_best_number_of_threads_is_taken(pretend: Callable[[Cost], None]) -> None:
    pretend(lambda values: {0: 1.0, 1: 0.9, 4: 0.5, 8: 0.7}[int(values.get("intra_op_num_threads", 0))] * 1e-3)
    found = quick()
    assert found.values == {"intra_op_num_threads": 4}
    assert [trial.value for trial in found.trials if trial.option == "intra_op_num_threads"] == [1, 4, 8]


def test_threads_that_were_asked_for_stay(pretend: Callable[[Cost], None]) -> None:
    pretend(factors(threads=0.1, execution_mode=0.1, enable_mem_pattern=0.5))
    found = quick(threads=2)
    assert found.values == {"intra_op_num_threads": 2, "enable_mem_pattern": False}
    assert found.speedup == pytest.approx(2.0, rel=1e-12)  # over two threads
    assert "intra_op_num_threads" not in {trial.option for trial in found.trials}
    reasons = {trial.option: trial.reason for trial in found.trials}
    assert reasons["execution_mode"] == "it would use more threads than given"


def test_one_thread_is_not_asked_to_spin(pretend: Callable[[Cost], None]) -> None:
    pretend(factors(threads=0.5))
    (trial,) = (trial for trial in quick().trials if trial.option == SPINNING)
    assert (trial.reason, trial.speedup, trial.taken) == ("no effect with one thread", None, False)


def test_what_does_not_hold_in_the_end_is_dropped(
    pretend: Callable[[Cost], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(factors())
    raced = itertools.count()
    monkeypatch.setattr(settings, "fastest", lambda runs, **_: [Times((1.0,)), Times((1.0 if next(raced) else 0.5,))])
    found = quick()
    assert [trial.speedup for trial in found.trials if trial.taken] == [2.0]
    assert (found.values, found.speedup) == ({}, 1.0)


def test_without_time_nothing_is_tried(pretend: Callable[[Cost], None]) -> None:
    pretend(factors(threads=0.1, enable_mem_pattern=0.1))
    found = recommend("m.onnx", FEED, seconds=1e-9)
    assert {trial.reason for trial in found.trials} == {"no time was left"}
    assert (found.values, found.speedup) == ({}, 1.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_no_time_is_no_request(seconds: float) -> None:
    with pytest.raises(RequantError, match="seconds must be positive"):
        recommend(DIGITS, FEED, seconds=seconds)


def test_progress_counts_the_trials(pretend: Callable[[Cost], None]) -> None:
    pretend(factors())
    told: list[tuple[str, int, int | None]] = []
    found = quick(progress=lambda *step: told.append(step))
    assert told == [("try session options", index, len(found.trials)) for index in range(len(found.trials))]


# ---------------------------------------------------------------------------------------------------------- the clock


class Clock:
    """A clock that only runs advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.order = 0.0, ""
        monkeypatch.setattr("requant.quantize.runtime.clock.time", SimpleNamespace(perf_counter=lambda: self.now))

    def runner(self, name: str, times: Sequence[float]) -> Callable[[], None]:
        endless = itertools.cycle(times)

        def run() -> None:
            self.order += name
            self.now += next(endless)

        return run


def test_the_least_time_of_each_is_of_blocks_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    runs = [clock.runner("a", [0.03, 0.01, 0.02]), clock.runner("b", [0.05, 0.04])]
    assert [times.least for times in fastest(runs, seconds=0)] == [pytest.approx(0.01), pytest.approx(0.04)]
    warm_up, rounds = clock.order[:6], clock.order[6:]
    assert warm_up == "aaabbb"
    a_once = re.sub("a+", "a", rounds)  # a block of a is two or three runs, of b two
    assert a_once == "abbbbabbbbabb"  # ab, ba, ab, ba, ab


@pytest.mark.parametrize(("run", "expected"), [(1.0, 1), (0.0101, 3), (1e-9, clocks.MOST_RUNS)])
def test_a_block_lasts_but_a_moment(run: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    (times,) = clocks.interleave([clock.runner("a", [run])], seconds=0, block=settings.BLOCK)
    rounds = clocks.FEW_ROUNDS if run > clocks.SLOW else clocks.LEAST_ROUNDS
    assert len(times.seconds) == rounds * expected


# ----------------------------------------------------------------------------------------------------- the real thing

EVERY = [*DEFAULTS.items(), *((option, value) for option, values in CANDIDATES.items() for value in values)]
EVERY += [("graph_optimization_level", "off"), ("graph_optimization_level", "basic"), ("intra_op_num_threads", 2)]


@pytest.mark.parametrize(("option", "value"), EVERY, ids=map(str, EVERY))
def test_a_snippet_sets_what_a_trial_has_set(tmp_path: Path, option: str, value: Value) -> None:
    (tmp_path / "load.py").write_text(snippet(str(DIGITS), {option: value}))
    for session in (
        runpy.run_path(str(tmp_path / "load.py"))["session"],
        open_configured(DIGITS, {option: value}),
    ):
        options = session.get_session_options()
        if "." in option:
            assert options.get_session_config_entry(option) == value
            continue
        kind, _, member = ENUMERATIONS.get((option, value), "").partition(".")
        assert getattr(options, option) == (getattr(getattr(ort, kind), member) if kind else value)


def test_every_option_of_the_table_has_a_default_and_words_have_names() -> None:
    assert set(CANDIDATES) <= set(DEFAULTS)
    assert not [option for option in DEFAULTS if "denormal" in option]  # flushing them changes results
    for option, value in EVERY:
        assert value == DEFAULTS[option] or value != DEFAULTS[option]
        if isinstance(value, str) and "." not in option:
            assert (option, value) in ENUMERATIONS


def test_a_path_is_quoted_in_a_snippet() -> None:
    line = snippet('a "b"\\c.onnx', {}).splitlines()[-1]
    assert 'ort.InferenceSession("a \\"b\\"\\\\c.onnx", options' in line


def test_a_recommendation_of_a_real_model_is_one_of_what_was_tried() -> None:
    found = recommend(DIGITS, FEED, seconds=0.2)
    taken = {trial.option: trial.value for trial in found.trials if trial.taken}
    assert found.values in ({}, taken)
    assert found.speedup == 1.0 or found.speedup >= GAIN
    assert all(trial.speedup is None or trial.taken == (trial.speedup >= GAIN) for trial in found.trials)
    assert found.to_json()["values"] == dict(found.values)


def test_a_model_that_cannot_be_loaded_or_run_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "no.onnx").write_bytes(b"no model at all")
    with pytest.raises(RequantError, match=r"no\.onnx: .*"):
        open_configured(tmp_path / "no.onnx", {})
    with pytest.raises(RequantError, match=r"digits\.onnx: the model fails: "):
        configured_run(DIGITS, {}, {"image": np.zeros((1, 1, 1, 1), np.float32)})


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [(["0", "1", "2", "3"], 4), (["0,2", "1,3", "0,2", "1,3"], 2), (["0-1", "0-1", "2-3"], 4)],
    ids=["one-thread-a-core", "two-threads-a-core", "not-told-of-one"],
)
def test_cores_are_counted_once(
    tmp_path: Path, siblings: Sequence[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_allowed", lambda: range(4))
    for cpu, text in enumerate(siblings):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    assert physical_cores(tmp_path) == expected

"""Session options are taken where they gain, one by one, and what is recommended loads as it says."""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime as ort
import pytest

from requant import RequantError
from requant.quantize.runtime import configured
from requant.quantize.runtime.configured import (
    ENUMERATIONS,
    GAIN,
    Value,
    Values,
    open_configured,
    session_block,
    snippet,
)
from requant.quantize.runtime.machine import physical_cores
from requant.quantize.tools.bench import settings
from requant.quantize.tools.bench.settings import CANDIDATES, DEFAULTS, Settings, race, recommend
from requant.quantize.tools.bench.timed_process import TimedProcess

ROOT = Path(__file__).parents[3]
DIGITS = ROOT / "sample_models" / "digits.onnx"
FEED = {"image": np.random.default_rng(0).random((1, 1, 28, 28), np.float32)}

Cost = Callable[[Values], float]
SPINNING, DENORMALS = "session.intra_op.allow_spinning", "session.set_denormal_as_zero"
PARALLEL: Value = "parallel"


class Pretended:
    """Stands for `TimedProcess`: a run takes what `cost` says."""

    cost: Cost
    made: list[Values]

    def __init__(self, model: object, values: Values, feed: object) -> None:
        self.made.append(dict(values))
        self.seconds = type(self).cost(values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def block(self, count: int) -> list[float]:
        return [self.seconds] * count


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cost], list[Values]]:
    """Let a run take what a function of the values says, without a clock; return the sessions in processes."""

    def use(cost: Cost) -> list[Values]:
        apart: list[Values] = []
        kind = type("Pretended", (Pretended,), {"cost": staticmethod(cost), "made": apart})
        monkeypatch.setattr(settings, "TimedProcess", kind)
        monkeypatch.setattr(settings, "session_block", lambda _, values, __: lambda count: [cost(values)] * count)
        monkeypatch.setattr(settings, "race", lambda blocks, *, seconds: [min(block(1)) for block in blocks])
        monkeypatch.setattr(settings, "logical_cores", lambda: 8)
        monkeypatch.setattr(settings, "physical_cores", lambda: 4)
        return apart

    return use


def factors(**by_option: float) -> Cost:
    """Return the cost of a run where each option with another value than the default multiplies it."""
    names = {"threads": "intra_op_num_threads", "spinning": SPINNING, "denormals": DENORMALS}
    wide = {names.get(option, option): factor for option, factor in by_option.items()}

    def cost(values: Values) -> float:
        found = 1e-3
        for option, value in values.items():
            found *= wide.get(option, 1.0) if value != DEFAULTS[option] else 1.0
        return found

    return cost


def quick(**options: Any) -> Settings:
    return recommend("m.onnx", FEED, seconds=600, **options)


def test_where_nothing_gains_the_defaults_stay(pretend: Callable[[Cost], list[Values]]) -> None:
    pretend(factors())
    found = quick()
    assert (found.values, found.speedup) == ({}, 1.0)
    assert not any(trial.taken for trial in found.trials)


@pytest.mark.parametrize("option", [*CANDIDATES])
@pytest.mark.parametrize(("gain", "taken"), [(1.5, True), (1.021, True), (1.019, False), (0.5, False)])
def test_a_value_is_taken_from_two_percent_on(
    option: str, gain: float, taken: bool, pretend: Callable[[Cost], list[Values]]
) -> None:
    pretend(factors(**{option: 1 / gain}))
    found = quick()
    (value,) = CANDIDATES[option]
    assert found.values == ({option: value} if taken else {})
    assert [trial.option for trial in found.trials if trial.taken] == ([option] if taken else [])
    assert found.speedup == pytest.approx(gain if taken else 1.0, rel=1e-12)  # a quotient of two products of rounding


def test_what_gains_is_put_together(pretend: Callable[[Cost], list[Values]]) -> None:
    pretend(factors(spinning=0.5, enable_mem_pattern=0.8, graph_optimization_level=3.0))
    found = quick()
    assert found.values == {SPINNING: "0", "enable_mem_pattern": False}
    assert found.speedup == pytest.approx(2.5, rel=1e-12)
    before = {trial.option: trial.before_ms for trial in found.trials}
    assert before["enable_cpu_mem_arena"] == pytest.approx(0.4, rel=1e-12)  # against the best so far, not the defaults


def test_the_best_number_of_threads_is_taken(pretend: Callable[[Cost], list[Values]]) -> None:
    pretend(lambda values: {0: 1.0, 1: 0.9, 4: 0.5, 8: 0.7}[int(values.get("intra_op_num_threads", 0))] * 1e-3)
    found = quick()
    assert found.values == {"intra_op_num_threads": 4}
    assert [trial.value for trial in found.trials if trial.option == "intra_op_num_threads"] == [1, 4, 8]


def test_threads_that_were_asked_for_stay(pretend: Callable[[Cost], list[Values]]) -> None:
    pretend(factors(threads=0.1, execution_mode=0.1, enable_mem_pattern=0.5))
    found = quick(threads=2)
    assert found.values == {"intra_op_num_threads": 2, "enable_mem_pattern": False}
    assert found.speedup == pytest.approx(2.0, rel=1e-12)  # over two threads
    assert "intra_op_num_threads" not in {trial.option for trial in found.trials}
    reasons = {trial.option: trial.reason for trial in found.trials}
    assert reasons["execution_mode"] == "it would take further threads"


def test_one_thread_is_not_asked_to_spin(pretend: Callable[[Cost], list[Values]]) -> None:
    pretend(factors(threads=0.5))
    (trial,) = (trial for trial in quick().trials if trial.option == SPINNING)
    assert (trial.reason, trial.speedup, trial.taken) == ("one thread waits for no other", None, False)


def test_what_does_not_hold_in_the_end_is_dropped(
    pretend: Callable[[Cost], list[Values]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(factors())
    raced = itertools.count()
    monkeypatch.setattr(settings, "race", lambda blocks, *, seconds: [1.0, 1.0 if next(raced) else 0.5])
    found = quick()
    assert [trial.speedup for trial in found.trials if trial.taken] == [2.0]
    assert (found.values, found.speedup) == ({}, 1.0)


def test_denormals_are_timed_in_processes_of_their_own(pretend: Callable[[Cost], list[Values]]) -> None:
    apart = pretend(factors(denormals=0.5, enable_cpu_mem_arena=0.5))
    found = quick()
    arena = {"enable_cpu_mem_arena": False}
    assert found.values == {**arena, DENORMALS: "1"}
    assert apart == [arena, {**arena, DENORMALS: "1"}, {}, {**arena, DENORMALS: "1"}]
    assert found.speedup == pytest.approx(4.0, rel=1e-12)


def test_without_time_nothing_is_tried(pretend: Callable[[Cost], list[Values]]) -> None:
    pretend(factors(threads=0.1, enable_mem_pattern=0.1))
    found = recommend("m.onnx", FEED, seconds=1e-9)
    assert {trial.reason for trial in found.trials} == {"no time was left"}
    assert (found.values, found.speedup) == ({}, 1.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_no_time_is_no_request(seconds: float) -> None:
    with pytest.raises(RequantError, match="seconds must be positive"):
        recommend(DIGITS, FEED, seconds=seconds)


def test_progress_counts_the_trials(pretend: Callable[[Cost], list[Values]]) -> None:
    pretend(factors())
    told: list[tuple[str, int, int | None]] = []
    found = quick(progress=lambda *step: told.append(step))
    assert told == [("try session options", index, len(found.trials)) for index in range(len(found.trials))]


# ---------------------------------------------------------------------------------------------------------- the clock


def test_a_race_gives_the_least_time_of_each_in_turns() -> None:
    order: list[str] = []

    def runner(name: str, times: Sequence[float]) -> configured.Block:
        endless = itertools.cycle(times)

        def block(count: int) -> list[float]:
            order.append(name)
            return [next(endless) for _ in range(count)]

        return block

    assert race([runner("a", [3.0, 1.0, 2.0]), runner("b", [5.0, 4.0])], seconds=0) == [1.0, 4.0]
    assert order == ["a", "a", "b", "b", *"ab", *"ba", *"ab"]  # once or twice to warm up


@pytest.mark.parametrize(("run", "expected"), [(1.0, 1), (0.01, 3), (1e-9, settings.MOST_RUNS)])
def test_a_block_lasts_but_a_moment(run: float, expected: int) -> None:
    counts = []

    def block(count: int) -> list[float]:
        counts.append(count)
        return [run] * count

    race([block], seconds=0)
    assert counts[2:] == [expected] * settings.LEAST_BLOCKS


# ----------------------------------------------------------------------------------------------------- the real thing

EVERY = [*DEFAULTS.items(), *((option, value) for option, values in CANDIDATES.items() for value in values)]
EVERY += [("graph_optimization_level", "off"), ("graph_optimization_level", "basic"), ("intra_op_num_threads", 2)]


@pytest.mark.parametrize(("option", "value"), [pair for pair in EVERY if pair[0] != DENORMALS], ids=map(str, EVERY))
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
        session_block(DIGITS, {}, {"image": np.zeros((1, 1, 1, 1), np.float32)})


def test_a_process_times_the_session_it_is_told_to() -> None:
    with TimedProcess(DIGITS, {DENORMALS: "1", "intra_op_num_threads": 1}, FEED) as process:
        for count in (1, 3):
            times = process.block(count)
            assert len(times) == count
            assert min(times) > 0
    assert process._process.returncode == 0


def test_a_process_that_fails_is_told_of() -> None:
    process = TimedProcess("none.onnx", {}, FEED)
    with pytest.raises(RequantError, match=r"none\.onnx: the model fails in a process of its own"), process:
        process.block(1)
    assert process._process.returncode == 1


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [(["0", "1", "2", "3"], 4), (["0,2", "1,3", "0,2", "1,3"], 2), (["0-1", "0-1", "2-3"], 4)],
    ids=["one-thread-a-core", "two-threads-a-core", "not-told-of-one"],
)
def test_cores_are_counted_once(
    tmp_path: Path, siblings: Sequence[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_allowed", lambda: range(4))
    for cpu, text in enumerate(siblings):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    assert physical_cores(tmp_path) == expected

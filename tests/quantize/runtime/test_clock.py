"""How long runs take, in turns, and how sure the ratios of their times are. No test reads a real clock."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from requant.quantize import Latency
from requant.quantize.runtime import clock
from requant.quantize.runtime.clock import (
    AGAIN,
    FEW_ROUNDS,
    LEAST_ROUNDS,
    SHARED,
    TURN,
    UNKNOWN,
    Times,
    doubt,
    interleave,
    race,
    time_run,
    uncertainty,
)
from requant.quantize.runtime.timing import latency_json, summary

MS = 1e-3


class Machine:
    """A machine whose clocks only runs advance: a run takes some CPU time, and then waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.cpu = 0.0
        self.calls = ""
        names = {"perf_counter": lambda: self.wall, "thread_time": lambda: self.cpu}
        monkeypatch.setattr(clock, "time", SimpleNamespace(**names))

    def run(self, name: str, cpu: Sequence[float], waits: Sequence[float] = (0.0,)) -> Callable[[], None]:
        """Return a run; its times in milliseconds repeat."""
        times = zip(itertools.cycle(cpu), itertools.cycle(waits), strict=False)

        def run() -> None:
            computed, waited = next(times)
            self.calls += name
            self.cpu += computed * MS
            self.wall += (computed + waited) * MS

        return run


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def times(*milliseconds: float, cpu: bool = False) -> Times:
    return Times(tuple(MS * each for each in milliseconds), "cpu" if cpu else "wall")


# ---------------------------------------------------------------------------------------------------------- in turns


def test_the_runs_alternate_and_either_comes_first_as_often(machine: Machine) -> None:
    found = interleave([machine.run("a", [1]), machine.run("b", [2])], seconds=0.0)
    assert [len(each.seconds) for each in found] == [5 * TURN] * 2  # however little time there is
    turns = re.sub("(.)" + r"\1" * (TURN - 1), r"\1", machine.calls.removeprefix("aaabbb"))  # warming up, then in turns
    assert turns == "abbaabbaab"
    assert [each.least for each in found] == [pytest.approx(MS), pytest.approx(2 * MS)]


def test_of_several_runs_each_follows_itself(machine: Machine) -> None:
    """Its own data are in the caches then. Otherwise this would be so for the first and the last one only."""
    interleave([machine.run(name, [1]) for name in "abc"], seconds=0.0)
    assert all(2 * name in machine.calls.removeprefix("aaabbbccc") for name in "abc")


def test_long_runs_have_turns_of_two(machine: Machine) -> None:
    interleave([machine.run("a", [20]), machine.run("b", [20])], seconds=0.0)
    assert machine.calls == "aaabbb" + "aabbbbaaaabbbbaaaabb"


def test_slow_runs_have_turns_of_one(machine: Machine) -> None:
    interleave([machine.run("a", [600]), machine.run("b", [200])], seconds=0.0)
    assert machine.calls == "ab" + "abbaab"


@pytest.mark.parametrize(
    ("took", "seconds", "calls"),
    [(1.0, 0.05, TURN + 50), (1.0, 0.0, TURN), (400.0, 0.1, 1 + FEW_ROUNDS), (600.0, 10.0, 1)],
    ids=["short", "one turn", "long", "slow"],
)
def test_a_slow_run_alone_is_called_once(machine: Machine, took: float, seconds: float, calls: int) -> None:
    found = time_run(machine.run("a", [took]), seconds=seconds, threads=1)
    assert len(found.seconds) == pytest.approx(calls, abs=1 if took == 1.0 else 0)  # sums of times are rounded
    assert found.least == pytest.approx(took * MS)


def test_the_number_of_rounds_is_bounded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "MOST_ROUNDS", 7)
    assert len(interleave([machine.run("a", [1])], seconds=60.0)[0].seconds) == 7 * TURN


def test_of_one_thread_cpu_time_counts_and_waiting_does_not(machine: Machine) -> None:
    """The long run always waits, the short one never: by wall time INT8 seems to be 15 times as fast."""
    runs = [machine.run("f", [19], [131]), machine.run("q", [10])]
    one, several = (interleave(runs, seconds=0.0, threads=threads) for threads in (1, 2))
    assert [each.clock for each in (*one, *several)] == ["cpu", "cpu", "wall", "wall"]
    assert [each.waited for each in (*one, *several)] == pytest.approx([131 / 150, 0, 0, 0])
    assert one[0].least / one[1].least == pytest.approx(1.9)
    assert several[0].least / several[1].least == pytest.approx(15)


# ------------------------------------------------------------------------------------------------------------ how sure


def test_a_run_for_which_the_clock_of_a_thread_stands_still_has_its_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "thread_time", lambda: 1.0)
    (times,) = interleave([lambda: None], seconds=0, threads=1)
    assert times.clock == "cpu"
    assert times.least > 0


def test_equal_runs_are_sure() -> None:
    found = [times(*[2.0] * 8), times(*[1.0] * 8)]
    assert (uncertainty(found), doubt(uncertainty(found))) == (0, "")


def test_parts_that_disagree_are_unsure() -> None:
    """The ratios of the four parts are 2, 2, 2 and 2.42: 10 % around their middle."""
    slow = [2.0, 9.0, 2.0, 9.0, 2.0, 9.0, 2.42, 9.0]
    for cpu in (True, False):
        found = [times(*slow, cpu=cpu), times(*[1.0, 4.5] * 4, cpu=cpu)]
        assert uncertainty(found) == pytest.approx(0.1)
        assert doubt(uncertainty(found)) == "machine busy, +-10 %"
        assert uncertainty(found[:1]) == pytest.approx(0.1)  # a time alone


def test_a_slower_machine_for_both_changes_no_ratio() -> None:
    found = [times(2.0, 2.0, 3.0, 3.0), times(1.0, 1.0, 1.5, 1.5)]
    assert uncertainty(found) == pytest.approx(0)


def test_of_wall_times_medians_must_agree_with_minima() -> None:
    """Every part has one run that did not wait; most runs of the first model wait."""
    busy = [times(*[2.0, 6.0, 6.0, 6.0] * 4), times(*[1.0] * 16)]
    assert uncertainty(busy) == pytest.approx(3**0.5 - 1)
    computed = [Times(each.seconds, "cpu") for each in busy]
    assert uncertainty(computed) == 0


@pytest.mark.parametrize(("waited", "unsure"), [(0.05, 0.0), (0.2, SHARED)])
def test_cpu_times_are_unsure_where_runs_wait_for_a_processor(waited: float, unsure: float) -> None:
    slow, fast = [2.0, 6.0, 6.0, 6.0] * 4, [1.0] * 16
    found = [Times(tuple(each), "cpu", sum(each) / (1 - waited)) for each in (slow, fast)]
    assert [each.waited for each in found] == [pytest.approx(waited)] * 2
    assert uncertainty(found) == pytest.approx(unsure)
    assert found[0].and_more(found[1]).waited == pytest.approx(waited)
    assert bool(doubt(uncertainty(found))) is bool(unsure)


def test_the_uncertainty_has_a_limit_and_zero_is_no_error() -> None:
    assert uncertainty([times(0.0, 1.0), times(1.0, 1.0)]) == UNKNOWN
    assert uncertainty([times(0.0, 0.0), times(0.0, 0.0)]) == 0


def test_what_is_unsure_is_timed_again_until_it_is_sure(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "AGAIN", AGAIN)
    race([machine.run("f", [2]), machine.run("q", [1])], seconds=0.0, threads=1)
    once = len(machine.calls)
    machine.calls = ""
    slower = [0.02 * 1.03**run for run in range(100)]  # and slower
    unsure = race([machine.run("f", slower), machine.run("q", [0.01])], seconds=0.0, threads=1)
    assert len(machine.calls) == (1 + AGAIN) * once
    assert len(unsure[0].seconds) == (1 + AGAIN) * LEAST_ROUNDS * TURN


@pytest.mark.parametrize(
    ("int8", "simple", "again"),
    [(0.98, 1.02, AGAIN), (0.98, 0.97, 0), (1.02, 1.03, 0), (0.8, 1.0, 0)],
    ids=["within the uncertainty", "slower than simplified float", "slower", "far outside of it"],
)
def test_a_gain_within_its_uncertainty_is_timed_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, int8: float, simple: float, again: int
) -> None:
    monkeypatch.setattr(clock, "AGAIN", AGAIN)
    monkeypatch.setattr(clock, "uncertainty", lambda _: 0.04)  # as sure as other measurements need to be
    for settle in (True, False):
        runs = [machine.run("f", [1.0]), machine.run("q", [int8]), machine.run("s", [simple])]
        found = race(runs, seconds=0.0, threads=1, settle=settle)
        one = len(found[0].seconds) // (1 + again * settle)
        assert one * (1 + again * settle) == len(found[0].seconds)
        assert one == len(race(runs, seconds=0.0, threads=1)[0].seconds)


# ------------------------------------------------------------------------------------------------------------- latency


def test_latency_takes_the_least_and_the_median_and_says_how_sure_it_is() -> None:
    found = summary(times(6, 9, 12, cpu=True), times(2, 2.5, 3, cpu=True), times(3, 3, 3, cpu=True), batch=4)
    assert (found.float_ms, found.int8_ms, found.simple_ms) == pytest.approx((6, 2, 3))
    assert (found.float_median_ms, found.int8_median_ms) == pytest.approx((9, 2.5))
    assert (found.batch, found.runs, found.clock) == (4, 3, "cpu")
    assert found.speedup == pytest.approx(3)
    assert found.uncertainty == pytest.approx(1.5**0.5 - 1)  # INT8 against the simplified model: 2/3, 2.5/3, 1
    assert found.doubt == "machine busy, +-22 %"
    assert latency_json(found)["uncertainty"] == found.uncertainty


def test_speedup_is_the_ratio_of_the_least_times() -> None:
    assert Latency(float_ms=6.0, int8_ms=2.0, float_median_ms=9.0, int8_median_ms=9.0, runs=5).speedup == 3.0

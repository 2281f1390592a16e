"""Lines about long work, for logs. No test reads a real clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from requant.quantize.runtime import progress
from requant.quantize.runtime.progress import RELIEF, Adding, Forecast, Lines, Stopwatch, announcement


class Told:
    """The lines that are printed on a machine whose clock the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(progress, "GRACE", 3.0)
        monkeypatch.setattr(progress, "LONG", 10.0)
        self.new: list[str] = []
        self.lines = Lines(self.new.append, **settings)

    def at(self, second: float, *step: Any) -> list[str]:
        """Tick each second up to a second of the work, take the progress, and return the new lines."""
        while self.now + 1 <= 100 + second:
            self.now += 1
            self.lines.tick()
        self.now = 100 + second
        if step:
            self.lines(*step)
        found, self.new[:] = list(self.new), []
        return found


def test_short_work_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.lines.expect(Forecast({"calibrate": 2.0}))
    steps = [("simplify: fold_constants", 0, None), ("calibrate", 1, 64), ("calibrate", 64, 64), ("time", 0, None)]
    assert [line for second, step in enumerate(steps) for line in told.at(second * 0.9, *step)] == []


def test_a_stage_that_begins_again_has_the_time_of_its_own_round(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.at(0, "compare", 0, 64)
    told.at(20, "compare", 64, 64)
    told.at(30, "compare", 0, 64)  # other tensors of the same models
    told.at(34, "compare", 32, 64)
    assert told.at(44) == ["   43.00 s  compare: 32 of 64 samples, 13 s, about 13 s left"]


def test_a_line_for_each_stage_and_one_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    assert told.at(0.5, "simplify: fold_constants", 0, None) == []
    assert told.at(2, "calibrate", 0, 500) == []
    assert told.at(3) == ["    3.00 s  calibrate: 0 of 500 samples, 1 s"]  # the grace ends
    assert told.at(12, "calibrate", 50, 500) == []
    assert told.at(26, "calibrate", 120, 500) == [
        "   13.00 s  calibrate: 50 of 500 samples, 11 s, about 99 s left",
        "   23.00 s  calibrate: 50 of 500 samples, 21 s, about 3 min left",
    ]
    assert told.at(33) == ["   33.00 s  calibrate: 120 of 500 samples, 31 s, about 98 s left"]
    assert told.at(34, "compare", 0, 64) == ["   34.00 s  compare: 0 of 64 samples"]
    assert told.at(35, "time batch 1", 0, None) == ["   35.00 s  time batch 1"]
    assert told.at(36, "compare", 1, 64) == []  # it had its line
    assert told.at(46) == ["   45.00 s  compare: 1 of 64 samples, 9 s, about 9 min left"]


def test_with_verbose_each_step_has_a_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, grace=0.0, detailed=True)
    assert told.at(0.0, "simplify: fold_pad", 0, None) == ["    0.00 s  simplify: fold_pad"]
    assert told.at(0.5, "simplify: sort", 0, None) == ["    0.50 s  simplify: sort"]


def test_the_cost_is_announced_and_corrected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of 10 seconds takes 60: all takes 80 seconds, not 30."""
    told = Told(monkeypatch)
    told.lines.expect(Forecast({"calibrate": 10.0, "correct weights": 16.0, "time": 3.0, "compare": 1.0}))
    assert told.at(0) == ["    0.00 s  about 30 s to go: correct weights 16 s, calibrate 10 s, time 3 s"]
    assert told.at(0, "calibrate", 0, 60) == []
    assert told.at(9, "calibrate", 9, 60) == ["    3.00 s  calibrate: 0 of 60 samples, 3 s"]
    assert told.at(13) == [
        "   13.00 s  calibrate: 9 of 60 samples, 13 s, about 74 s left (about 107 s in all, not 30 s)"
    ]
    *late, new = told.at(60, "correct weights", 0, 4)
    assert [line for line in late if "in all" in line] == [
        "   33.00 s  calibrate: 9 of 60 samples, 33 s, about 3 min left (about 4 min in all, not 107 s)"
    ]
    assert new == "   60.00 s  correct weights: 0 of 4 units (about 80 s in all, not 4 min)"
    assert told.at(71, "correct weights", 2, 4) == ["   70.00 s  correct weights: 0 of 4 units, 10 s"]
    assert told.at(80) == ["   80.00 s  correct weights: 2 of 4 units, 20 s, about 20 s left"]


def test_only_long_work_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG", 10.0)
    assert announcement(Forecast()) == announcement(Forecast({"calibrate": 9.0})) == ""
    assert announcement(Forecast({"calibrate": 600.0})) == "about 10 min to go: calibrate 10 min"


def test_of_long_work_the_shorter_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG", 10.0)
    long = {"calibrate": 30.0, "time": 10.0, "correct weights": 200.0, "try tensors alone": 20.0}
    most = "correct weights 3 min, calibrate 30 s, try tensors alone 20 s"
    assert announcement(Forecast(long, low_effort=40.0)) == f"about 4 min to go: {most}; about 40 s with low effort"
    assert "low effort" not in announcement(Forecast(long, low_effort=140.0))  # not less than half
    assert "low effort" not in announcement(Forecast({"correct weights": 100.0}, low_effort=1.0))
    assert "low effort" not in announcement(Forecast(long))  # that is the effort, or the fall-back has begun


def test_work_that_is_announced_again_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that has taken 30 seconds before takes another 12; all was announced as 42 seconds then."""
    told = Told(monkeypatch)
    told.lines.expect(Forecast({"compare": 30.0}))
    told.at(0, "compare", 0, None)
    told.at(30, "units to float", 0, 4)
    told.lines.expect(Forecast({"compare": 12.0}))
    assert told.at(30) == ["   30.00 s  about 12 s to go: compare 12 s"]
    assert not any("in all" in line for line in told.at(41, "compare", 0, None))


def test_what_may_follow_is_announced_but_not_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.lines.expect(Forecast({"calibrate": 2.0}, fallback=600.0))
    assert told.at(0) == []  # that is not long
    told.lines.expect(Forecast({"calibrate": 16.0, "time": 4.0}, fallback=55.0))
    line = "about 20 s to go, up to 75 s if units must become float: calibrate 16 s, time 4 s"
    assert told.at(0) == [f"    0.00 s  {line}"]
    assert not any("in all" in line for line in told.at(15, "calibrate", 15, 16))
    assert "low effort" not in announcement(Forecast({"calibrate": 130.0}, fallback=1000.0))


def test_models_with_more_units_in_float_tell_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes through other stages; all of them together show what another one takes."""
    told = Told(monkeypatch)
    told.at(0, RELIEF, 0, 5)
    told.at(20, RELIEF, 0, 5)  # tensors were tried before
    told.lines.expect(Forecast({RELIEF: 30.0, "correct weights": 60.0}))
    told.at(20)
    assert told.at(32)[-1] == "   30.00 s  units to float: 0 of 5, 30 s, about 80 s left"  # of 90 s since 20
    told.at(32, "correct weights", 0, 4)
    told.at(50, RELIEF, 1, 5)
    assert told.at(64)[-1] == "   62.00 s  units to float: 1 of 5, 12 s, at most about 108 s left"  # 4 times 30 s
    assert (
        told.at(130)[-1] == "  122.00 s  units to float: 1 of 5, 72 s, at most about 90 s left"
    )  # the second one is nearly done


def test_without_a_forecast_nothing_is_told_of_models_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    told.at(0, RELIEF, 0, 5)
    assert told.at(20)[-1].endswith("units to float: 0 of 5, 13 s")


def test_a_stopwatch_passes_everything_on() -> None:
    class Taken:
        def __init__(self) -> None:
            self.steps: list[Any] = []

        def __call__(self, *step: Any) -> None:
            self.steps.append(step)

        def expect(self, forecast: Any) -> None:
            self.steps.append(forecast)

    taken = Taken()
    watch = Stopwatch(taken)
    watch("time", 0, None)
    watch.expect(Forecast({"time": 1.0}))
    assert taken.steps == [("time", 0, None), Forecast({"time": 1.0})]
    Stopwatch().expect(Forecast({"time": 1.0}))  # nobody shows it


def test_the_numbers_of_several_runs_of_a_stage_add_up() -> None:
    """Trials of tensors begin anew for each form: ``44 of 64`` was followed by ``18 of 64``."""
    told: list[tuple[str, int, int | None]] = []
    progress = Adding(lambda *each: told.append(each))
    for stage, done, total in (("try", 0, 3), ("try", 3, 3), ("try", 0, 2), ("try", 2, 2), ("other", 0, None)):
        progress(stage, done, total)
    progress("try", 1, 5)
    assert told == [("try", 0, 3), ("try", 3, 3), ("try", 3, 5), ("try", 5, 5), ("other", 0, None), ("try", 1, 5)]

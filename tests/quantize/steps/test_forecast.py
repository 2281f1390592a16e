"""How long the steps of `quantize_model` will take, about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import onnx_ir as ir
import pytest

from requant.calibration.model.session import Array
from requant.quantize import Options, quantize_model
from requant.quantize import job as job_module
from requant.quantize.job import Job
from requant.quantize.model import shapes
from requant.quantize.options.declared import Strategy
from requant.quantize.options.efforts import EFFORTS
from requant.quantize.options.selection import Selection
from requant.quantize.placement import runs
from requant.quantize.placement.runs import samples_for
from requant.quantize.runtime.clock import Times
from requant.quantize.runtime.progress import RELIEF, silent
from requant.quantize.steps import forecast as module
from requant.quantize.steps.forecast import BETWEEN, ROUNDS, forecast, forecast_fall_back, forecast_second_placement
from requant.quantize.steps.judge import judging_samples
from requant.quantize.steps.prepare import prepare

W = ", ".join(["0.5"] * 64)
SAMPLES = Path(__file__).parents[3] / "sample_models"


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, 1.0)


def take(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Let a run take 1 ms of CPU time, with a share of a processor."""
    times = Times((1e-3,) * 3, "cpu", wall=3e-3 / share)
    monkeypatch.setattr(module, "time_run", lambda run, seconds, threads: times)


def job(folder: Path, data: str | None = f"{SAMPLES / 'digits.npz'}:calib", **options: Any) -> Job:
    return prepare(SAMPLES / "digits_mobile.onnx", data, Options(**options), folder, silent)


@pytest.mark.slow
def test_stages_follow_from_samples_and_effort(tmp_path: Path) -> None:
    medium, low = forecast(job(tmp_path)), forecast(job(tmp_path, effort="low"))
    assert set(medium.stages) - set(low.stages) == {"try tensors alone", "try weights alone", "correct weights"}
    assert set(low.stages) == {"calibrate", "compare", "time", "measure costs", "compare placements"}
    assert medium.low_effort < medium.seconds
    assert low.fallback > 0
    few = forecast(job(tmp_path, samples=50))
    assert few.stages["calibrate"] == pytest.approx(medium.stages["calibrate"] / 4)  # of 200 samples
    assert {**few.stages, "calibrate": 0.0} == {**medium.stages, "calibrate": 0.0}
    assert few.fallback == medium.fallback


def test_without_data_and_a_choice_only_the_clock_takes_time(tmp_path: Path) -> None:
    """Of a speech model with four tables of weights, seven minutes of measurements were announced; rules placed it."""
    text = """<ir_version: 8, opset_import: ["" : 17]> net (int64[N] i, float[N, 64] x) => (float[N, 64] y) {
        e = Gather (w, i)
        y = Add (e, x)
    }"""
    proto = onnx.parser.parse_model(text)
    table = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    wanted = Options(selection=Selection(strategy=Strategy.DYNAMIC), force_int8=True)
    made = prepare(tmp_path / "m.onnx", None, wanted, tmp_path, silent)
    assert set(forecast(made).stages) == {"time"}
    stages = list[str]()
    found = quantize_model(
        tmp_path / "m.onnx", None, tmp_path / "q.onnx", wanted, lambda stage, *_: stages.append(stage)
    )
    assert found.placement.how == "rules"
    assert found.forms == {"weight-only": 1}
    assert not {"compare", "measure costs", "compare placements", "try weights alone"}.intersection(stages)


@pytest.mark.parametrize("effort", ["low", "medium"])
def test_only_what_is_not_asked_for_is_recommended(tmp_path: Path, effort: str) -> None:
    """A run with low effort, and its fall-back, recommended low effort."""
    made = job(tmp_path, effort=effort, place="rules")
    assert math.isfinite(forecast(made).low_effort) is (effort != "low")
    assert forecast_fall_back(made, tries=True).low_effort == math.inf
    assert forecast_second_placement(made).low_effort == math.inf


def test_the_trials_of_a_low_effort_have_a_limit_that_is_that_of_the_usual_ones(tmp_path: Path) -> None:
    """The fall-back of a speech model of 2,755 nodes tried tensors for half an hour, with the lowest effort."""
    made = job(tmp_path, effort="low")
    assert made.feed is not None
    assert EFFORTS["low"].retry == EFFORTS["medium"].seconds < EFFORTS["medium"].retry
    slow = 60.0  # seconds of a run: no tensor can be tried within the limit
    assert module._trial_seconds(made, made.feed, slow, EFFORTS["low"].retry) == {}
    few = module._trial_seconds(made, made.feed, 1e-3, EFFORTS["low"].retry)
    assert few.keys() == {"try tensors alone", "try weights alone"}


def test_what_is_not_measured_takes_no_time(tmp_path: Path) -> None:
    found = forecast(job(tmp_path, place="rules", effort="low"))
    assert set(found.stages) == {"calibrate", "compare", "time"}
    assert found.fallback > 0


def test_costs_are_not_measured_in_bodies(tmp_path: Path) -> None:
    """Rules place models with control flow: the forecast of a voice detector was four times what it took."""
    branches = "then_branch = one () => (float[N, 8] a) { a = MatMul(x, w) }, else_branch = two () => (float[N, 8] b) { b = Relu(x) }"
    text = f"""<ir_version: 8, opset_import: ["" : 17]> net (float[N, 8] x, bool c) => (float[N, 8] y) <float[8, 8] w = {{{W}}}> {{
        y = If (c) <{branches}>
    }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    feeds = [{"x": np.ones((1, 8), np.float32), "c": np.array(True)}] * 40
    made = prepare(tmp_path / "m.onnx", feeds, Options(effort="low"), tmp_path, silent)
    assert set(forecast(made).stages) == {"calibrate", "compare", "time"}
    found = quantize_model(tmp_path / "m.onnx", feeds, tmp_path / "q.onnx", Options(effort="low", force_int8=True))
    assert (
        found.placement.why == "operators in the control flow of the model may be int8, and their costs are not known"
    )


def test_bodies_that_only_move_values_leave_the_model_to_costs(tmp_path: Path) -> None:
    """PyTorch writes a squeeze as an If."""
    branches = "then_branch = one () => (float[A] a) { a = Squeeze(p, k) }, else_branch = two () => (float[A, B] b) { b = Identity(p) }"
    text = f"""<ir_version: 8, opset_import: ["" : 17]> net (float[N, 8] x) => (y) <float[8, 8] w = {{{W}}}, int64[1] k = {{0}}> {{
        p = MatMul (x, w)
        s = Shape <end = 1> (p)
        one = Constant <value = int64[1] {{1}}> ()
        c = Equal (s, one)
        y = If (c) <{branches}>
    }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    made = prepare(tmp_path / "m.onnx", [{"x": np.ones((1, 8), np.float32)}] * 40, Options(), tmp_path, silent)
    assert "measure costs" in forecast(made).stages


def test_other_processes_make_everything_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = forecast(job(tmp_path))
    take(monkeypatch, 1 / 3)
    slow = forecast(job(tmp_path))
    assert slow.stages == {stage: pytest.approx(3 * seconds) for stage, seconds in quiet.stages.items()}
    assert (slow.fallback, slow.low_effort) == pytest.approx((3 * quiet.fallback, 3 * quiet.low_effort))


def test_the_fallback_of_a_model_with_low_effort_begins_with_trials(tmp_path: Path) -> None:
    """At low effort nothing is known of single tensors when the promise is missed."""
    low = job(tmp_path, effort="low")
    known, unknown = (forecast_fall_back(low, tries=tries).stages for tries in (False, True))
    assert unknown.keys() - known.keys() == {"try tensors alone", "try weights alone"}
    assert all(seconds > 0 for seconds in unknown.values())


@pytest.mark.parametrize("effort", ["low", "medium"])
def test_what_the_fallback_of_a_model_may_take_is_told_before(tmp_path: Path, effort: str) -> None:
    """The forecast was a third or a fourth of the time of models that missed the promise of accuracy."""
    made = job(tmp_path, effort=effort)
    usual, again = forecast(made), forecast_second_placement(made)
    fallback = forecast_fall_back(made, tries=False).stages
    assert fallback[RELIEF] > 0  # plans are timed for each model
    models = (ROUNDS + BETWEEN) / module.FALLBACK_MODELS
    most = sum(seconds for stage, seconds in fallback.items() if stage != "time") * models + fallback["time"]
    assert usual.fallback == pytest.approx(most + (again.seconds if effort == "low" else 0))
    assert again.stages["measure costs"] < usual.stages["measure costs"]  # those of the first placement are known


@pytest.mark.parametrize("options", [{"force_int8": True}, {"place": "all"}])
def test_where_no_units_become_float_no_time_is_told_for_it(tmp_path: Path, options: dict[str, Any]) -> None:
    assert forecast(job(tmp_path, **options)).fallback == 0


def test_a_slow_model_is_judged_and_corrected_on_fewer_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job(tmp_path)
    assert made.judging is not None
    assert made.feed is not None
    usual = forecast(made).stages
    each = 1 / runs.runs_for(made, made.feed, 1.0)
    for seconds, count in ((1e3 * each, 64), (20.5 * each, 20), (each, 8)):  # about 8, whatever that takes
        monkeypatch.setattr(runs, "RUNNING", seconds)
        assert samples_for(made) == count
        assert judging_samples(made, made.judging).length == min(count, made.judging.length or count)
    fewer = forecast(made).stages
    assert fewer["compare"] == pytest.approx(usual["compare"] / 8)
    assert fewer["correct weights"] < usual["correct weights"]


def test_shapes_for_the_feed_of_a_job_are_inferred_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To infer them for each trial of the fall-back took seconds of CPU time on a network of 1,000 nodes."""
    made, asked = job(tmp_path), list[int]()
    assert made.feed is not None
    larger = {name: np.concatenate([array, array]) for name, array in made.feed.items()}
    known = {feed: shapes.fed_shapes(made.simple, given) for feed, given in (("own", made.feed), ("larger", larger))}

    def counted(model: ir.Model, feed: Mapping[str, Array]) -> dict[str, shapes.Shape]:
        asked.append(len(next(iter(feed.values()))))
        return shapes.fed_shapes(model, feed)

    monkeypatch.setattr(job_module, "fed_shapes", counted)
    monkeypatch.setattr(runs, "fed_shapes", counted)
    for _ in range(3):
        assert runs.shapes_for(made, made.feed) == known["own"]
    assert runs.shapes_for(made, larger) == known["larger"] != known["own"]
    assert asked == [1, 2]

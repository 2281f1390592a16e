"""The search for the fastest model that keeps a bar: what is tried, what is kept, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from requant import RequantError
from requant.calibration import DataSpec, Execution, input_specs, open_session, open_source
from requant.cli import main
from requant.quantize import Goal, Options, Point, search_model
from requant.quantize.accuracy.drop import parse_drop
from requant.quantize.accuracy.frontier import Frontier, undominated
from requant.quantize.accuracy.metrics import Metric, Score, can_distribute, metric_named, score, score_with
from requant.quantize.accuracy.metrics.metric import Own
from requant.quantize.job import Job
from requant.quantize.placement.facts import Facts
from requant.quantize.placement.measuring import Write
from requant.quantize.runtime.runtimes import STOCK
from requant.quantize.steps import search as frontier
from requant.quantize.steps.prices import FINER, FIRST, PRICES, next_price
from requant.quantize.steps.tried import plan_key, save_tried
from requant.transforms.int8.plan import Choice, Impl, Plan

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
MODEL = SAMPLE_MODELS / "digits.onnx"
DATA = SAMPLE_MODELS / "digits.npz"
OPTIONS = Options(place="all", samples=32, seconds=0.0, force=True, corrections=("means",))

POINTS = st.lists(
    st.builds(
        Point,
        st.just(0.0),
        st.integers(0, 5).map(float),
        st.integers(1, 5).map(float),
        st.just(1),
        st.booleans(),
        st.just(""),
    )
)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, int8_wins: None) -> None:
    """Let a model be the faster the more of it is int8, on any machine."""
    monkeypatch.setattr(
        frontier,
        "_speedup",
        lambda _, candidate: 1 + sum(candidate.plan.impl(u).int8 for u in candidate.plan.units) / 10,
    )


@pytest.fixture(scope="module", autouse=True)
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Judge models on the first 100 of the 797 images."""
    path = tmp_path_factory.mktemp("judged") / "digits.npz"
    np.savez(path, **{name: np.load(DATA)[name][:100] for name in ("image", "labels")})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "JUDGED", path)
        yield


JUDGED = DATA


def goal(drop: str, metric: str = "sqnr", **asked: Any) -> Goal:
    return Goal(metric=metric_named(metric), allowance=parse_drop(drop), data=f"{JUDGED}", **asked)


@given(POINTS, st.booleans())
def test_no_point_of_a_frontier_is_worse_in_both_respects(points: list[Point], higher: bool) -> None:
    found = undominated(points, higher=higher)
    sign = 1 if higher else -1
    for point in found:
        assert not any(p.speedup >= point.speedup and sign * p.value > sign * point.value for p in points)
        assert not any(p.speedup > point.speedup and sign * p.value >= sign * point.value for p in points)
    for point in points:  # and whatever is left out is no better than one that is there
        assert any(p.speedup >= point.speedup and sign * p.value >= sign * point.value for p in found)


@pytest.mark.slow
def test_a_bar_that_everything_keeps_gives_the_fastest_model(tmp_path: Path) -> None:
    result = search_model(MODEL, f"{DATA}:calib", tmp_path / "out.onnx", goal("50%"), OPTIONS)
    assert result.search is not None
    assert result.search.best is not None
    assert result.search.best == result.search.points[0]
    assert result.why_not == ""
    assert not (tmp_path / "out.onnx.search.json").exists()
    onnx.checker.check_model(tmp_path / "out.onnx")


@pytest.mark.slow
def test_a_bar_in_between_gives_up_speed_for_it(tmp_path: Path) -> None:
    """Whatever is tried, the fastest of those that keep the bar is written, and it is not the fastest of all."""
    loose = search_model(MODEL, f"{DATA}:calib", tmp_path / "loose.onnx", goal("50%"), OPTIONS)
    assert loose.search is not None
    fastest = loose.search.points[0].value  # dB
    share = 100 * 10 ** (-(fastest + 0.5) / 20)
    result = search_model(MODEL, f"{DATA}:calib", tmp_path / "out.onnx", goal(f"{share}%"), OPTIONS)
    found = result.search
    assert found is not None
    assert found.best is not None
    assert found.best.value >= found.bar == pytest.approx(fastest + 0.5, abs=1e-9)  # of logarithm and power
    assert found.best.speedup == max(point.speedup for point in found.points if point.kept)
    assert found.best.speedup < loose.search.points[0].speedup
    assert found.frontier == undominated(found.points, higher=True)


@pytest.mark.slow
def test_a_bar_out_of_reach_leaves_the_best_and_exit_code_1(tmp_path: Path) -> None:
    arguments = [
        "quantize",
        MODEL,
        "--data",
        f"{DATA}:calib",
        "-o",
        tmp_path / "out.onnx",
        "--place",
        "all",
        "--json",
        "--corrections",
        "means",
    ]
    search = ["--max-drop", "0.00001%", "--metric", "sqnr", "--eval-data", f"{JUDGED}"]
    done = CliRunner().invoke(main, [str(a) for a in (*arguments, *search)])
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert not found["search"]["reached"]
    assert "no int8 model keeps sqnr" in found["verdict"]
    assert (tmp_path / "out.onnx").exists()
    assert max(point["value"] for point in found["search"]["tried"]) == found["search"]["frontier"][-1]["value"]


@pytest.mark.slow
def test_an_interrupted_search_leaves_the_best_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Plan] = []
    emitted = frontier._emit

    def counted(walk: Any, plan: Plan) -> Any:
        tried.append(plan)
        if len(tried) == 2:
            raise KeyboardInterrupt
        return emitted(walk, plan)

    monkeypatch.setattr(frontier, "_emit", counted)
    output = tmp_path / "out.onnx"
    with pytest.raises(KeyboardInterrupt, match="best model so far"):
        search_model(MODEL, f"{DATA}:calib", output, goal("0.00001%"), OPTIONS)
    assert output.exists()
    before = json.loads((tmp_path / "out.onnx.search.json").read_text())["points"]
    judged: list[object] = []

    def counting(metric: Metric, model: Any, *others: Any, **asked: Any) -> Score:
        judged.append(model)
        return score(metric, model, *others, **asked)

    monkeypatch.setattr(frontier, "score", counting)
    result = search_model(MODEL, f"{DATA}:calib", output, goal("0.00001%"), OPTIONS)
    assert result.search is not None
    assert len(before) == 1
    assert len(judged) == 1 + len(result.search.points) - len(before)  # float, and what was not judged before


@pytest.mark.slow
def test_an_interrupted_search_forgets_models_that_its_prices_no_longer_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are measured again, so a price of the first run may give another plan in the second one."""
    output = tmp_path / "out.onnx"
    remember = save_tried

    def interrupted(*arguments: Any) -> None:
        remember(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(frontier, "save_tried", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search_model(MODEL, f"{DATA}:calib", output, goal("50%"), OPTIONS)
    monkeypatch.setattr(frontier, "save_tried", remember)
    kept = tmp_path / "out.onnx.search.json"
    state = json.loads(kept.read_text())
    state["points"] = [{**point, "digest": "0" * 16, "speedup": 99.0} for point in state["points"]]
    kept.write_text(json.dumps(state))
    found = search_model(MODEL, f"{DATA}:calib", output, goal("50%"), OPTIONS).search
    assert found is not None
    assert found.best is not None
    assert all(point.speedup < 99 for point in found.points)


def with_images(source: Any, place: Path) -> Any:
    """Return a source after its file was replaced by one with three images."""
    np.savez(place, image=np.ones((3, 1, 8, 8), np.float32))
    return source


@pytest.mark.parametrize(
    ("change", "recalled"),
    [
        (lambda source, place: source, 1),
        (lambda source, place: with_images(source, place), 0),
        (lambda source, place: replace(source, reference=None), 0),
    ],
    ids=["same", "other data", "Python objects"],
)
def test_scores_of_other_data_are_not_reused(change: Any, recalled: int, tmp_path: Path) -> None:
    """A file of the same name may hold other data, and nothing tells whether Python objects are the same."""
    place, plan = tmp_path / "eval.npz", SimpleNamespace(units=())
    np.savez(place, image=np.zeros((2, 1, 8, 8), np.float32))
    tried = Point(0.0, 30.0, 2.0, 1, True, plan_key(cast(Plan, plan)))

    def walk(source: Any) -> Any:
        return SimpleNamespace(
            goal=goal("50%"),
            job=SimpleNamespace(identity="", runtime=STOCK, options=OPTIONS, asked=dict),
            ranges=SimpleNamespace(ranges={}),
            source=source,
            plan_at=lambda _: plan,
        )

    source = open_source(DataSpec(str(place)), input_specs(open_session(MODEL)))
    state, found = tmp_path / "state.json", Frontier("sqnr", True, math.inf, 20.0, points=(tried,))
    save_tried(state, frontier._key(walk(source), found.before), found)
    assert len(frontier._recalled(walk(change(source, place)), found, state)) == recalled


@given(st.floats(-0.1, 8.0))
def test_the_least_price_that_keeps_the_bar_is_found(least: float) -> None:
    """Prices at and above `least` keep the bar: the answers end close to it, and no price is tried twice."""
    kept: dict[float, bool] = {}
    while (price := next_price(kept)) is not None:
        assert price not in kept
        kept[price] = price >= least
    assert next(iter(kept)) == PRICES[FIRST]
    keeps, misses = ([price for price in kept if kept[price] is wanted] for wanted in (True, False))
    if least <= 0:
        assert min(keeps) == 0
    elif least > PRICES[-1]:
        assert max(misses) == PRICES[-1]
    else:
        above = next(index for index, price in enumerate(PRICES) if price >= least)
        assert max(misses) < least <= min(keeps)
        assert PRICES[above - 1] <= max(misses)
        assert min(keeps) <= PRICES[above]
        assert sum(price not in PRICES for price in kept) == FINER


def test_the_placement_without_a_goal_is_the_first_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the best of many models that were timed whole; a price has one model, by the sum of costs of units."""
    plans: list[Plan] = []

    def placed(job: Job, facts: Facts, rules: Plan, write: Write, noise: Mapping[str, float]) -> tuple[Any, Any]:
        first = next(unit.name for unit in rules.units if rules.impl(unit).int8)
        plans.append(rules.with_choices({first: Choice(Impl.FLOAT)}))
        return write(plans[0]), None

    monkeypatch.setattr(frontier, "place", placed)
    options = replace(OPTIONS, place="measured", seconds=0.1)
    tried = search_model(MODEL, f"{DATA}:calib", tmp_path / "out.onnx", goal("50%"), options).search
    assert tried is not None
    assert len(tried.points) > 1
    assert plan_key(plans[0]) in {point.digest for point in tried.points}


def test_the_clock_ends_it(tmp_path: Path) -> None:
    result = search_model(MODEL, f"{DATA}:calib", tmp_path / "out.onnx", goal("50%", seconds=1e-9), OPTIONS)
    assert result.search is not None
    assert result.search.points == ()
    assert not result.search.done


@pytest.mark.slow
def test_shared_data_are_said(tmp_path: Path) -> None:
    shared = Goal(metric=metric_named("agreement"), allowance=parse_drop("1"), data=f"{DATA}:calib")
    result = search_model(MODEL, f"{DATA}:calib", tmp_path / "out.onnx", shared, OPTIONS)
    assert result.search is not None
    assert result.search.same_data == 32 / 200  # as many as calibrate it


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--metric", "top1"], "--metric needs --max-drop"),
        (["--time-budget", "5"], "--time-budget needs --max-drop"),
        (["--max-drop", "1%"], "give --metric M"),
        (["--max-drop", "1%", "--metric", "top1"], "give --eval-data SRC"),
        (["--max-drop", "x", "--metric", "top1", "--eval-data", "a.npz"], "'x' is not a drop"),
        (["--max-drop", "200%", "--metric", "top1", "--eval-data", "a.npz"], "200% is out of range; the greatest drop"),
        (["--max-drop", "1%", "--metric", "top2", "--eval-data", "a.npz"], "top2"),
        (["--max-drop", "1%", "--metric", "top1", "--eval-data", "a.npz", "--lambda", "3"], "no price of noise"),
    ],
)
def test_what_is_refused(given: list[str], says: str, tmp_path: Path) -> None:
    arguments = ["quantize", str(MODEL), "--data", f"{DATA}:calib", "-o", str(tmp_path / "out.onnx"), *given]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("metric", "drop", "labelled", "says"),
    [
        ("map", "1%", False, "sample 0: no known detector has these outputs: "),
        ("wer", "1%", False, "sample 0: no output holds class scores (T, N, C) or tokens (N, T)"),
        ("recall@1", "1%", False, "sample 0: no label, but recall@1 needs one"),
        ("sisdr", "1", True, "sample 0: no output fits a target of shape ()"),
        ("mse", "1%", False, "mse without labels is 0 for the float model, and 1% of 0 is 0; give the drop"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused_before_the_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, drop: str, labelled: bool, says: str
) -> None:
    monkeypatch.setattr("requant.quantize.api.find_ranges", lambda _: pytest.fail("it calibrates"))
    arrays = np.load(JUDGED)
    kept = {name: arrays[name] for name in ("image", "labels") if name != "labels" or labelled}
    np.savez(tmp_path / "eval.npz", **kept)
    asked = ["--max-drop", drop, "--metric", metric, "--eval-data", str(tmp_path / "eval.npz")]
    command = ["quantize", str(MODEL), "--data", f"{DATA}:calib", "-o", str(tmp_path / "out.onnx"), *asked]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2, done.output
    assert says in done.stderr.replace("\n", " ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.npz"]


@pytest.mark.parametrize(("metric", "drop"), [("mse", "1000"), pytest.param("recall@1", "50%", marks=pytest.mark.slow)])
def test_a_search_keeps_any_metric(tmp_path: Path, metric: str, drop: str) -> None:
    if metric == "mse":
        np.savez(tmp_path / "eval.npz", image=np.load(JUDGED)["image"])
    data = str(tmp_path / "eval.npz") if metric == "mse" else f"{JUDGED}"
    asked = Goal(metric=metric_named(metric), allowance=parse_drop(drop), data=data)
    result = search_model(MODEL, f"{DATA}:calib", tmp_path / "out.onnx", asked, replace(OPTIONS, force_int8=True))
    assert result.search is not None
    assert result.search.before == {"mse": 0.0}.get(metric, result.search.before)
    assert result.search.points


def failing(how: str, calls: list[str]) -> Metric:
    """Return a user's metric that scores the float model alone."""

    def share(path: str) -> Any:
        calls.append(path)
        if len(calls) > 1 and how == "raises":
            raise KeyError("logits")
        return 1.0 if len(calls) == 1 else {"nan": math.nan, "none": None}.get(how)

    about = Own(share, takes_model=True)
    return Metric(name="mine", labels="none", value=lambda parts: parts[0] / parts[1], own=about)


@pytest.mark.parametrize("how", ["raises", "nan", "none"])
def test_a_metric_that_fails_on_int8_models_leaves_the_float_one(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Goal(metric=failing(how, []), allowance=parse_drop("1%"), data=f"{JUDGED}")
    result = search_model(MODEL, f"{DATA}:calib", tmp_path / "out.onnx", asked, OPTIONS)
    assert result.search is not None
    assert result.search.points
    assert result.search.scored == ()
    assert result.why_not.startswith("no int8 model of the search runs and has a score in mine: the output is")
    assert "a model of the search is left out: metric mine: " in caplog.text
    assert [path.name for path in tmp_path.glob("*.onnx")] == ["out.onnx"]
    assert "NaN" not in json.dumps(result.to_json())


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(RequantError, match="time budget"):
        goal("1%", seconds=0.0)


@pytest.mark.parametrize(
    "metric", ["sqnr", "top1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("f1", "cosine"))]
)
def test_the_score_of_an_executors_workers_is_that_of_this_process(metric: str) -> None:
    """Two thread pools in the place of a cluster: parts of the data, opened by name, joined in their order."""
    chosen, opened = metric_named(metric), open_source(DataSpec(f"{DATA}"), input_specs(open_session(MODEL)))
    source = opened.samples(50)
    execution = Execution(executor=partial(ThreadPoolExecutor, 2), workers=2)
    other = SAMPLE_MODELS / "digits_mobile.onnx"  # any model of the same inputs and outputs
    assert can_distribute(execution, chosen, source)
    assert not can_distribute(Execution(), chosen, source)
    here = score(chosen, other, source, reference=MODEL, threads=1)
    there = score_with(execution, chosen, other, source, reference=MODEL)
    assert (there.value, there.samples) == (here.value, here.samples)
    assert here.parts is not None
    assert there.parts is not None
    np.testing.assert_array_equal(there.parts, here.parts)


@pytest.mark.slow
def test_a_search_scores_on_the_executor_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[str] = []

    def counted(execution: Execution, metric: Metric, *given: Any, **named: Any) -> Score:
        scored.append(metric.name)
        return score_with(execution, metric, *given, **named)

    monkeypatch.setattr(frontier, "score_with", counted)
    execution = Execution(executor=partial(ThreadPoolExecutor, 2), workers=2)
    options = replace(OPTIONS, execution=execution)
    result = search_model(MODEL, f"{DATA}:calib", tmp_path / "out.onnx", goal("50%"), options)
    assert result.search is not None
    assert len(scored) == 1 + len(result.search.points)


@pytest.mark.parametrize("force", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["asked", "forced"])
def test_where_float_is_as_fast_it_keeps_the_bar_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_latency: Callable[..., None], force: bool
) -> None:
    set_latency(monkeypatch, float_ms=1.0, int8_ms=1.0)
    options = replace(OPTIONS, force_int8=force)
    result = search_model(MODEL, f"{DATA}:calib", tmp_path / "out.onnx", goal("50%"), options)
    assert result.search is not None
    assert result.search.best is not None
    assert bool(result.int8_nodes) is force
    assert ("gains too little here: 1.00x" in result.why_not) is not force


def test_a_part_of_the_data_may_have_no_label_that_counts(tmp_path: Path) -> None:
    """Labels below 0 are not judged: here, of all samples of the first parts."""
    data = dict(np.load(DATA))
    labels = next(name for name in data if name.endswith("labels"))
    prefix = labels.removesuffix("labels")
    count = 40
    image = data[f"{prefix}image"][:count]
    given = np.where(np.arange(count) < count // 2, -1, data[labels][:count])
    np.savez(tmp_path / "part.npz", image=image, labels=given)
    chosen = metric_named("top1")
    source = open_source(DataSpec(f"{tmp_path / 'part.npz'}"), input_specs(open_session(MODEL)))
    execution = Execution(executor=partial(ThreadPoolExecutor, 2), workers=2)
    here, there = score(chosen, MODEL, source, threads=1), score_with(execution, chosen, MODEL, source)
    assert (there.value, there.samples) == (here.value, here.samples) == (here.value, count)

"""What is timed where the work of a model depends on its data: a sample on which both models do the same work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from requant.calibration import Source, input_specs, open_session, open_source
from requant.quantize import Options, compare_models, quantize_model
from requant.quantize.accuracy.verdict import latency_rows
from requant.quantize.placement import racing
from requant.quantize.runtime.agreement import agreeing, apart, work_depends_on_data
from requant.quantize.runtime.loads import Load, loads_of
from requant.quantize.runtime.runtimes import Sessions
from requant.quantize.runtime.timing import latency_json

LOOP = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[N, 3] x) => (float[M, 3] y) <float zero = {0}, bool yes = {1}, int64 most = {200}> {
        start = ReduceMax <keepdims = 0> (x)
        last, y = Loop (most, yes, start) <body = step
            (int64 i, bool before, float value) => (bool more, float next, float[3] row) <float d = {STEP}> {
                next = Sub(value, d)
                more = Greater(next, zero)
                three = Constant <value_ints = [3]> ()
                row = Expand(next, three)
            }>
    }"""


def saved(folder: Path, name: str, step: float) -> Path:
    """Write a model that makes as many steps as it can take `step` from its largest input."""
    path = folder / f"{name}.onnx"
    onnx.save(onnx.parser.parse_model(LOOP.replace("STEP", str(step))), path)
    return path


def opened(model: Path, values: list[float]) -> Source:
    data = [{"x": np.full((1, 3), value, np.float32)} for value in values]
    return open_source(data, input_specs(open_session(model)), model)


def steps(model: Path, load: Load) -> int:
    return len(Sessions(model).runner(1)(load.feed)["y"])


@pytest.mark.parametrize(
    ("values", "chosen", "counts"),
    [
        ([9.5, 9.5, 9.5], 9.5, (10, 13)),  # all samples are alike: nothing is better than the usual one
        ([9.5, 0.5, 9.5], 0.5, (1, 1)),
        ([0.5, 99.5, 1.2], 0.5, (1, 1)),
        ([0.5, 0.5, 9.5], 0.5, (1, 1)),  # the usual one is alike
    ],
)
def test_a_sample_on_which_both_make_the_same_steps_is_timed(
    tmp_path: Path, values: list[float], chosen: float, counts: tuple[int, int]
) -> None:
    before, after = saved(tmp_path, "before", 1.0), saved(tmp_path, "after", 0.75)
    source = opened(before, values)
    (usual,) = loads_of(source, (1,))
    found = agreeing(usual, source, [Sessions(each).runner(1) for each in (before, after)])
    assert found.feed["x"][0, 0] == np.float32(chosen)
    assert (steps(before, found), steps(after, found)) == counts
    same = np.array_equal(found.feed["x"], usual.feed["x"])
    assert bool(found.sample) is not same
    assert same or found.sample.endswith("as on the usual sample")


def test_a_batch_repeats_the_sample(tmp_path: Path) -> None:
    before, after = saved(tmp_path, "before", 1.0), saved(tmp_path, "after", 0.75)
    source = opened(before, [9.5, 0.5, 0.5])
    runs = [Sessions(each).runner(1) for each in (before, after)]
    usual = loads_of(source, (1, 4))
    for load in usual:
        found = agreeing(load, source, runs)
        assert found.feed["x"].tolist() == [[0.5] * 3] * load.asked


def test_the_greatest_factor_of_any_output_counts() -> None:
    def model(**outputs: Any) -> Any:
        return lambda _: outputs

    three = [model(a=np.zeros(4), b=np.zeros(size)) for size in (1, 3, 7)]
    assert apart(three, {}) == 4.0
    assert apart([model(a=[np.zeros(2), None]), model(a=[np.zeros(5)])], {}) == 2.0
    assert apart([model(), model()], {}) == 1.0


def test_only_models_of_such_work_are_asked(tmp_path: Path) -> None:
    assert work_depends_on_data(ir.load(saved(tmp_path, "m", 1.0)))
    plain = '<ir_version: 8, opset_import: ["" : 17]> net (float[N] x) => (float[N] y) { y = Relu(x) }'
    assert not work_depends_on_data(ir.from_onnx_text(plain))


def test_compare_times_the_sample_and_says_so(tmp_path: Path) -> None:
    before, after = saved(tmp_path, "before", 1.0), saved(tmp_path, "after", 0.75)
    data = [{"x": np.full((1, 3), value, np.float32)} for value in (9.5, 0.5, 9.5)]
    found = compare_models(before, after, data)
    (timed,) = found.latencies
    told = "where the lengths of outputs are 1.00x apart, not 1.29x as on the usual sample"
    assert told in timed.sample
    assert told in str(list(latency_rows(timed)))
    assert latency_json(timed)["sample"] == timed.sample
    assert "lengths differ on 2 of 3 samples (13 instead of 10 on axis 0" in str(found)


@pytest.mark.parametrize("judged", [True, False])
def test_plans_are_timed_on_a_sample_on_which_all_agree(tmp_path: Path, judged: bool) -> None:
    before, after = saved(tmp_path, "before", 1.0), saved(tmp_path, "after", 0.75)
    source = opened(before, [9.5, 0.5, 9.5])
    (usual,) = loads_of(source, (1,))
    size = racing_size(before, source, usual, judged=judged)
    runners = {"rules": Sessions(after).runner(1)}
    (timed,) = racing.on_agreeing_samples([size], runners)
    assert timed.bench.feed["x"][0, 0] == np.float32(0.5 if judged else 9.5)


@pytest.mark.parametrize("counts", [True, False])
def test_quantize_times_the_agreeing_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: bool) -> None:
    """Only of a model whose work depends on its data; what both models return decides, not what the float model does."""
    asked = []

    def chosen(load: Load, source: Source, models: list[Any]) -> Load:
        asked.append([apart([model], load.feed) for model in models])
        return replace(load, sample="a.npz")

    monkeypatch.setattr("requant.quantize.steps.judge.agreeing", chosen)
    second = "NonZero(x)" if counts else "Shape(x)"
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        net (float[N, 64] x) => (float[N, 64] y, int64[A] n) {{
            y = MatMul(x, w)
            places = {second}
            flat = Constant <value_ints = [-1]> ()
            n = Reshape(places, flat)
        }}""")
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((64, 64)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    feeds = [{"x": rng.standard_normal((4, 64)).astype(np.float32)} for _ in range(8)]
    options = Options(effort="low", place="rules", force_int8=True, seconds=0.01)
    found = quantize_model(tmp_path / "m.onnx", feeds, tmp_path / "q.onnx", options)
    assert [each.sample for each in found.latencies] == (["a.npz"] if counts else [""])
    assert asked == ([[1.0, 1.0]] * len(asked) if counts else [])
    assert bool(asked) is counts


def racing_size(model: Path, source: Source, load: Load, *, judged: bool) -> Any:
    """Return a batch size with what `on_agreeing_samples` reads of it."""

    def made(name: str, **fields: Any) -> Any:
        return make_dataclass(name, fields, frozen=True)(**fields)

    options: Mapping[str, int] = {"threads": 1}
    job = made(
        "Job",
        source=source,
        judged=judged,
        simple=ir.load(model),
        timed=Sessions(model),
        options=made("Options", **options),
    )
    return made("Size", batch=1, asked=1, regime=None, bench=made("Bench", job=job, feed=load.feed))

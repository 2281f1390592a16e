"""The speed benchmarks: their conclusions from times. These tests time nothing."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from requant.calibration.model.session import open_session
from requant.quantize.runtime.profile import KernelRun

from .native import needs_library

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
contenders = importlib.import_module("benchmarks.contenders")
elements = importlib.import_module("benchmarks.elements")
kernel_models = importlib.import_module("benchmarks.kernels")
measurements = importlib.import_module("benchmarks.measurements")
roofline = importlib.import_module("benchmarks.roofline")
speed = importlib.import_module("benchmarks.speed")
speed_rows = importlib.import_module("benchmarks.speed_rows")
sys.path.remove(str(ROOT))

ALL = {"ours": ("ours",), "static": ("static", "static-products")}


def run(ms: float, sqnr_db: float | None = 30.0) -> dict[str, Any]:
    return {"ms": ms, "median_ms": ms, "runs": 5, "sqnr_db": sqnr_db}


def row(**changed: Any) -> Any:
    """Return a row that reaches every goal, with changes."""
    times = {"ours": 1.0, "static": 1.5, "nncf": 9.0} | changed.pop("times", {})
    facts = {"model": "resnet50", "float_ms": 4.0, "forms": {n: n for n in times}, "goal": 3.3, "predicted": 1.1}
    return speed_rows.Row(times=times, **{**facts, **changed})


# ------------------------------------------------------------------------------------------------------- rows


def test_the_fastest_form_of_a_contender_counts() -> None:
    timed = {
        "float": run(4.0),
        "ours ours": run(1.0, None),
        "static static": run(2.0, 40.0),
        "static static-products": run(1.6),
    }
    found = speed_rows.build_row("vit_b_16", timed, {"ours": {}}, ALL, 2.8)
    assert found.times == {"ours": 1.0, "static": 1.6}
    assert found.forms["static"] == "static-products"
    assert found.sqnr_db == {"ours": None, "static": 30.0}
    assert found.ratio("static") == 4.0 / 1.6
    assert speed_rows.cell(found, "static") == "2.50x*"
    assert speed_rows.footnotes([found]) == ["* vit_b_16, ORT static: static-products"]


def test_a_form_that_fails_leaves_the_field_to_the_others() -> None:
    timed = {"float": run(4.0), "ours ours": run(1.0), "static static": {"error": "invalid"}}
    timed["static static-products"] = run(2.0)
    assert speed_rows.build_row("vit_b_16", timed, {}, ALL).times["static"] == 2.0


def test_a_contender_of_which_no_form_runs_fails_with_every_reason() -> None:
    timed = {"float": run(4.0), "ours ours": run(1.0), "static static": {"error": "invalid"}}
    found = speed_rows.build_row("vit_b_16", timed, {"static-products": {"error": "no such file"}}, ALL)
    assert found.errors == {"static": "invalid; no such file"}
    assert speed_rows.cell(found, "static") == "fails"
    assert speed_rows.cell(found, "nncf") == "-"
    assert "vit_b_16, ORT static: invalid; no such file" in speed_rows.footnotes([found])
    assert speed_rows.missed(found) == []


def test_a_float_model_that_does_not_run_is_an_error() -> None:
    with pytest.raises(click.ClickException, match="the float model does not run: no file"):
        speed_rows.build_row("vit_b_16", {"float": {"error": "no file"}}, {}, {})


@pytest.mark.parametrize(
    ("made", "ratio", "shown"),
    [
        ({"predicted_ms": 1.2, "latency": {"int8_ms": 1.0}}, 1.2, "+20%"),
        ({"predicted_ms": None, "latency": {"int8_ms": 1.0}}, None, "-"),
        ({"predicted_ms": 1.2, "latency": None}, None, "-"),
        ({}, None, "-"),
    ],
    ids=["both", "no prediction", "not measured", "neither"],
)
def test_the_prediction_is_shown_where_there_is_one(made: Any, ratio: float | None, shown: str) -> None:
    assert speed_rows.predicted_ratio(made) == ratio
    assert speed_rows.percent(ratio) == shown


@pytest.mark.parametrize(
    ("changed", "goals"),
    [
        ({}, []),
        ({"goal": 4.1}, ["goal 4.1x"]),
        ({"goal": 4.0}, []),
        ({"times": {"ours": 5.0}, "goal": 0.0}, ["slower than float", "slower than ORT static"]),
        ({"times": {"ours": 4.04}, "goal": 0.0, "verdict": "float", "forms": {}}, ["slower than ORT static"]),
        ({"times": {"static": 0.99}}, []),
        ({"times": {"static": 0.97}}, ["slower than ORT static"]),
        ({"times": {"static": 0.9}, "goal": 0.0, "sqnr_db": {"static": 8.0}}, ["slower than ORT static"]),
        ({"times": {"static": 0.9}, "goal": 0.0, "sqnr_db": {"static": 7.9}}, []),
        ({"times": {"static": 0.9}, "sqnr_db": {"static": 7.9}}, ["slower than ORT static"]),
        ({"times": {"openvino": 0.99, "openvino-f32": 1.5, "ours-openvino": 1.0}}, []),
        ({"times": {"nncf-openvino": 0.5}}, ["slower than NNCF in OpenVINO"]),
        ({"times": {"ours-openvino": 0.5}}, ["slower than ours in OpenVINO"]),
        ({"times": {"fallback": 0.5}}, []),
        (
            {"times": {"placed-openvino": 2.0, "openvino": 1.97, "nncf-openvino": 1.9}},
            ["in OpenVINO: slower than NNCF in OpenVINO"],
        ),
        ({"times": {"placed-openvino": 2.0, "nncf": 1.5, "openvino-f32": 2.1}}, []),
        ({"errors": {"placed-openvino": "refused"}}, ["no model of ours placed in OpenVINO"]),
        ({"predicted": 1.16}, ["predicted"]),
        ({"predicted": 0.84}, ["predicted"]),
        ({"predicted": None}, []),
    ],
    ids=[
        "all reached",
        "goal",
        "goal met exactly",
        "slower than float",
        "float kept, within noise",
        "peer within noise",
        "peer",
        "real model, peer valid",
        "real model, peer ruined",
        "random weights",
        "OpenVINO alike",
        "OpenVINO faster",
        "OpenVINO faster with our model",
        "the same model without the library",
        "placed model behind a peer there",
        "placed model behind a peer elsewhere",
        "no placed model",
        "predicted too much",
        "predicted too little",
        "no prediction",
    ],
)
def test_what_is_missed_is_named(changed: dict[str, Any], goals: list[str]) -> None:
    assert speed_rows.missed(row(**changed)) == goals


def test_ours_that_cannot_be_made_is_missed() -> None:
    assert speed_rows.missed(speed_rows.Row("resnet50", 4.0, {}, {}, errors={"ours": "refused"}, goal=3.3)) == [
        "no model of ours"
    ]


@pytest.mark.parametrize(("ratios", "goals"), [((4.0, 3.1), []), ((3.9, 3.0), ["second convolution", "whole network"])])
def test_the_goals_of_the_seed_network(ratios: tuple[float, float], goals: list[str]) -> None:
    assert speed.seed_missed(dict(zip(speed.SEED_GOALS, ratios, strict=True))) == goals


# ------------------------------------------------------------------------------------------------- contenders


def test_what_is_not_installed_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "has", lambda package, python=None: package == "nncf" and python == "other/python")
    found, notes = speed.available(contenders.CONTENDERS, None, openvino=True)
    assert list(found) == ["static", "dynamic", "stock", "ours", "fallback"]
    runtimes = ["float in OpenVINO", "float32 in OpenVINO", "NNCF in OpenVINO", "NNCF's IR in OpenVINO"]
    runtimes += ["ours in OpenVINO", "ours placed in OpenVINO"]
    assert [note.partition(":")[0] for note in notes] == ["NNCF", *runtimes]
    found, notes = speed.available(contenders.CONTENDERS, "other/python", openvino=False)
    assert list(found) == ["static", "dynamic", "nncf", "stock", "ours", "fallback"]
    assert notes == []


def test_an_interpreter_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    missing = str(tmp_path / "python")
    assert not contenders.has("numpy", missing)
    with pytest.raises(contenders.ContenderError, match="No such file"):
        contenders.call("nncf", python=missing)


def test_a_quantizer_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    file = str(tmp_path / "missing.onnx")
    with pytest.raises(contenders.ContenderError) as caught:
        contenders.call("dynamic", model=file, feeds="", output=str(tmp_path / "out.onnx"))
    assert "missing.onnx" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("operators", "forms"),
    [
        ({"Conv", "Relu"}, ("static",)),
        ({"Conv", "MatMul"}, ("static", "static-products")),
        ({"MatMul", "LayerNormalization"}, ("static", "static-products", "static-fused")),
    ],
    ids=["convolutions", "products", "transformer"],
)
def test_a_form_is_tried_where_it_can_gain(operators: set[str], forms: tuple[str, ...]) -> None:
    assert contenders.forms_for(contenders.CONTENDERS["static"], operators) == forms


def test_every_form_of_a_contender_is_a_function_of_the_program() -> None:
    forms = {form for contender in contenders.CONTENDERS.values() for form in contender.forms}
    assert forms <= set(contenders.FORMS)
    assert {form.function for form in contenders.FORMS.values()} <= set(contenders.FUNCTIONS)
    assert set(measurements.LOADERS) == {contender.runtime for contender in contenders.CONTENDERS.values()}


def test_feeds_come_back_as_they_were_written(tmp_path: Path) -> None:
    feeds: list[dict[str, Any]] = [{"a/b": np.array([i, 1], np.int64), "c": np.float32(i)} for i in range(12)]
    measurements.save_feeds(str(tmp_path / "feeds.npz"), feeds)
    found = measurements.load_feeds(str(tmp_path / "feeds.npz"))
    assert [list(feed) for feed in found] == [["a/b", "c"]] * 12
    assert all(np.array_equal(a["a/b"], b["a/b"]) and a["c"] == b["c"] for a, b in zip(feeds, found, strict=True))


def test_the_worst_output_counts() -> None:
    first = [np.full(4, 10.0, np.float32), np.full(4, 1.0, np.float32), np.arange(4)]
    second = [np.full(4, 11.0, np.float32), np.full(4, 2.0, np.float32), np.zeros(4, np.int64)]
    assert measurements.worst_sqnr(first, second) == 0.0  # the noise is as large as the signal; all values are exact
    assert measurements.worst_sqnr(first, first) is None
    with pytest.raises(ValueError, match="not finite"):
        measurements.worst_sqnr(first[:1], [np.full(4, np.nan, np.float32)])


def test_models_that_are_kept_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def call(function: str, *, python: str | None, output: str, **arguments: Any) -> dict[str, Any]:
        calls.append((function, python, arguments.get("batch")))
        Path(output).touch()
        return {"n": len(calls)}

    monkeypatch.setattr(speed, "call", call)
    setting = speed.Setting(tmp_path, contenders.CONTENDERS, python="other/python", remake=frozenset({"ours"}))
    assert [speed.make(setting, tmp_path, form, 16)[1]["n"] for form in ("static", "static", "ours", "ours")] == [
        1,
        1,
        2,
        3,
    ]
    assert speed.make(setting, tmp_path, "nncf", 1)[1] == {"n": 4}
    assert calls == [("static", None, None), ("ours", None, 16), ("ours", None, 16), ("nncf", "other/python", None)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["table", "--only", "resnet"], "no architecture 'resnet'; there are: resnet50, "),
        (["table", "--contenders", "tflite"], "no contender 'tflite'; there are: static, "),
        (["kit", str(ROOT / "docs")], "realkit"),
    ],
    ids=["model", "contender", "kit"],
)
def test_what_is_unknown_is_refused(arguments: list[str], told: str) -> None:
    found = CliRunner().invoke(speed.main, arguments)
    assert found.exit_code != 0
    assert told in found.output


# ---------------------------------------------------------------------------------------------------- roofline

PEAKS = roofline.Peaks(int8=400.0, float32=100.0, bandwidth=((1000, 50.0), (2000, 20.0), (4000, 30.0), (8000, 10.0)))


def kernel(op: str, macs: int = 0, **changed: Any) -> KernelRun:
    facts = {"outputs": ((10, 10),), "inputs": ((10, 10),), "reads": ("float",), "writes": ("float",)}
    return KernelRun("n", "", op, 1.0, macs, **{**facts, **changed})


@pytest.mark.parametrize(
    ("size", "rate"), [(1, 50.0), (1000, 50.0), (1001, 30.0), (4000, 30.0), (8000, 10.0), (10**9, 10.0)]
)
def test_the_bandwidth_is_that_of_the_best_working_set_as_large(size: int, rate: float) -> None:
    assert PEAKS.rate(size) == rate


def test_the_bound_is_the_longer_of_products_and_bytes() -> None:
    assert roofline.bound(kernel("QLinearConv", 4_000_000), 1000, PEAKS) == (10.0, 10.0)
    assert roofline.bound(kernel("Conv", 4_000_000), 1000, PEAKS) == (40.0, 40.0)
    assert roofline.bound(kernel("QLinearConv", 4_000), 1_000_000, PEAKS) == (100.0, 0.01)


@pytest.mark.parametrize(
    ("run", "weights", "size"),
    [
        (kernel("Relu"), [], 800),
        (kernel("Conv", inputs=((10, 10), (3, 3)), reads=("float", "float")), [((3, 3), "float", 36)], 836),
        (kernel("QLinearConv", reads=("uint8",), writes=("uint8",)), [((3, 3), "int8", 9)], 209),
        (kernel("Add", inputs=((10, 10), (10, 10)), reads=("float", "float")), [((10, 10), "float", 400)], 1200),
        (kernel("Reshape"), [], 0),
        (kernel("Gather", inputs=((9999, 10),)), [((9999, 10), "float", 399960)], 800),
    ],
    ids=["activations", "weights shown", "weights packed", "a constant like the input", "view", "part of a table"],
)
def test_bytes_are_counted_once(run: KernelRun, weights: list[Any], size: int) -> None:
    assert roofline.moved(run, weights) == size


def test_shares_add_up() -> None:
    parts = [roofline.Share("Conv", 1, 10.0, 5.0, 5.0, 7), roofline.Share("Add", 2, 30.0, 15.0, 0.0, 0)]
    whole = roofline.summed("whole", parts)
    assert whole == roofline.Share("whole", 3, 40.0, 20.0, 5.0, 7)
    assert whole.reached == 0.5
    assert roofline.summed("nothing", []).reached == 0.0


PRODUCT, CONVOLUTION = kernel_models.Product(3, 8, 5), kernel_models.Convolution(16, 5, 3)


@pytest.mark.parametrize(
    ("shape", "form", "macs"),
    [
        *((PRODUCT, form, 120) for form in ("float", "int8")),
        *((CONVOLUTION, form, 57600) for form in ("float", "int8", "gemm")),
        *(pytest.param(CONVOLUTION, form, 57600, marks=needs_library) for form in ("native", "curve")),
    ],
)
def test_the_kernels_that_are_tried_do_the_work_that_is_counted(shape: Any, form: str, macs: int) -> None:
    from requant.quantize.runtime.profile import profiled

    model, feed = shape.case(form)
    (run,) = [run for run in profiled(model.SerializeToString(), feed, threads=1).runs if run.macs]
    assert run.macs == macs
    assert run.integer == (form != "float")
    assert (run.domain == "ai.requant") == (form in ("native", "curve"))


@needs_library
def test_the_native_convolution_that_is_timed_computes_what_the_runtime_computes() -> None:
    shape = kernel_models.Convolution(12, 7, 3, stride=2)
    results = {}
    for form in ("int8", "native"):
        model, feed = shape.case(form)
        (results[form],) = open_session(model.SerializeToString()).run(None, feed)
    np.testing.assert_array_equal(results["native"].transpose(0, 3, 1, 2), results["int8"])


# --------------------------------------------------------------------------------------------------- elements


@pytest.mark.parametrize("name", elements.KERNELS)
def test_an_element_kernel_runs_as_the_operator_that_it_is_named_for(name: str) -> None:
    from requant.quantize.runtime.profile import profiled

    row = elements.KERNELS[name]
    model, feed = elements.build(row, (1, 12, 4, 4))  # no multiple of 8 or 16: blocked layouts add nodes
    runs = profiled(model.SerializeToString(), feed, threads=1).runs
    assert [run.op for run in runs] == [row.op.rpartition(".")[2]]
    assert all(math.prod(shape) > 0 for run in runs for shape in run.outputs)

"""``requant quantize --report``, ``requant report`` and ``requant view``: what is written, and what is refused before work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner, Result
from onnx import helper

from requant import NATIVE_DOMAIN, RequantError
from requant.cli import main
from requant.quantize import Goal, Latency, Options, Strategy, quantize_model, search_model
from requant.quantize.accuracy.drop import parse_drop
from requant.quantize.accuracy.metrics import metric_named
from requant.quantize.options.selection import Selection
from requant.quantize.placement.runs import MOST_SAMPLES
from requant.quantize.report import Record, Recorder, load_record

SAMPLES = Path(__file__).parents[3] / "sample_models"
DIGITS = SAMPLES / "digits.onnx"
DATA = f"{SAMPLES / 'digits.npz'}:calib"
FASTER = Latency(float_ms=2.0, int8_ms=1.0, float_median_ms=2.0, int8_median_ms=1.0, runs=5)


@pytest.fixture
def _no_clock(monkeypatch: pytest.MonkeyPatch, int8_wins: None) -> None:
    """Let INT8 be faster whatever the machine, and measured in no time."""
    monkeypatch.setattr("requant.quantize.steps.search.time_models", lambda *_, **__: FASTER)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")


def quantize(folder: Path, *more: object) -> Result:
    output = folder / "int8.onnx"
    fixed = ("--effort", "low", "--place", "rules", "--samples", 24)
    return invoke("quantize", DIGITS, "--data", DATA, "-o", output, *fixed, *more)


@pytest.mark.usefixtures("_no_clock")
def test_a_run_is_written_as_page_and_as_record(tmp_path: Path) -> None:
    page, kept = tmp_path / "run.html", tmp_path / "run.json"
    done = quantize(tmp_path, "--report", page, "--report", kept, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    record = load_record(kept)
    assert record.remarks == ()
    assert record.command.startswith("requant quantize ")
    assert str(DIGITS) in record.command
    assert record.headline.speedup == 2.0
    assert record.headline.sqnr_db == result["sqnr_db"]
    assert record.headline.int8_nodes == result["int8_nodes"]
    assert sum(unit.implementation != "float" for unit in record.units) == sum(result["forms"].values())
    made = invoke("report", kept, "-o", tmp_path / "again.html")
    assert made.exit_code == 0, made.output
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()


@pytest.mark.usefixtures("_no_clock")
def test_two_runs_are_compared(tmp_path: Path) -> None:
    assert quantize(tmp_path, "--report", tmp_path / "a.json").exit_code == 0
    shutil.copy(tmp_path / "a.json", tmp_path / "b.json")
    made = invoke("report", tmp_path / "a.json", tmp_path / "b.json", "-o", tmp_path / "both.html")
    assert made.exit_code == 0, made.output
    assert "int8 (1)" in (tmp_path / "both.html").read_text()


def test_a_model_is_viewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("click.launch", opened.append)
    done = invoke("view", DIGITS, "-o", tmp_path / "view.html", "--open")
    assert done.exit_code == 0, done.output
    assert opened == [(tmp_path / "view.html").as_uri()]
    text = (tmp_path / "view.html").read_text()
    assert len(text) < 100_000
    assert "GlobalAveragePool" not in text
    assert "MaxPool" in text


def test_native_operators_are_seen_as_integers(tmp_path: Path) -> None:
    names = ["Convolution_2", "Table", "MatMul", "Softmax", "RotaryEmbedding"]
    nodes = [helper.make_node(name, ["x"], [f"y{at}"], name, domain=NATIVE_DOMAIN) for at, name in enumerate(names)]
    tensors = ["x", *(f"y{at}" for at in range(len(names)))]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.UINT8, [1]) for name in tensors]
    graph = helper.make_graph(nodes, "native", ends[:1], ends[1:])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(NATIVE_DOMAIN, 2)]
    onnx.save(helper.make_model(graph, opset_imports=imports), tmp_path / "native.onnx")
    done = invoke("view", tmp_path / "native.onnx", "-o", tmp_path / "view.html")
    assert done.exit_code == 0, done.output
    assert "3 in 8-bit integers" in (tmp_path / "view.html").read_text()


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        (["run.txt"], "a report is an .html page or a .json run record"),
        (["run.html", "run.html"], "two outputs have this path"),
        (["int8.plan.json"], "two outputs have this path"),
        (["nowhere/run.html"], "no folder"),
        (["taken.html"], "exists already; --force overwrites it"),
        (["folder.html"], "is a folder"),
    ],
    ids=["suffix", "twice", "plan", "no-folder", "exists", "folder"],
)
def test_a_report_that_cannot_be_written_is_refused_first(
    reports: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("requant.quantize.quantize_model", lambda *_, **__: pytest.fail("work began"))
    (tmp_path / "taken.html").write_text("mine")
    (tmp_path / "folder.html").mkdir()
    given = [part for name in reports for part in ("--report", tmp_path / name)]
    done = quantize(tmp_path, *given)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "taken.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "{no}", "-o", "{out}"), "no such file"),
        (("report", "{text}", "-o", "{out}"), "not a run record: "),
        (("report", "{new}", "-o", "{out}"), "version 99; this program reads up to 1"),
        (("report", "{text}", "-o", "{pdf}"), "a page is an .html file"),
        (("report", "{text}", "-o", "{taken}"), "exists already"),
        (("report", "-o", "{out}"), "RECORDS"),
        (("view", "{text}", "-o", "{out}"), "not an ONNX model"),
        (("view", "{model}", "-o", "{taken}"), "exists already"),
        (("view", "{model}", "-o", "{pdf}"), "a page is an .html file"),
        (("view", "{model}", "-o", "{model}"), "--output would overwrite the input"),
        (("view", "{no}", "-o", "{out}"), "no such file"),
    ],
    ids=[
        "missing",
        "text",
        "newer",
        "suffix",
        "exists",
        "none",
        "no-model",
        "view-exists",
        "view-suffix",
        "model",
        "no-file",
    ],
)
def test_what_cannot_be_shown_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    places: dict[str, Any] = {name: tmp_path / f"{name}.html" for name in ("out", "taken")}
    places |= {"no": tmp_path / "no", "text": tmp_path / "text", "new": tmp_path / "new.json", "model": DIGITS}
    places["pdf"] = tmp_path / "page.pdf"
    places["taken"].write_text("mine")
    places["text"].write_text("some text")
    places["new"].write_text(json.dumps({"kind": "requant run record", "schema": 99}))
    done = invoke(*(argument.format(**places) for argument in arguments))
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not places["out"].exists()
    assert places["taken"].read_text() == "mine"


# ------------------------------------------------------------------------------------------------------ what is gathered


def run(folder: Path, model: Path, data: Any, options: Options) -> Record:
    """Quantize, and return the record as a page is made of it; its numbers are those of the result."""
    recorder = Recorder([folder / "run.json", folder / "run.html"])
    result = quantize_model(model, data, folder / "out.onnx", options, look=recorder.look)
    recorder.write(result)
    record, accuracy = load_record(folder / "run.json"), result.accuracy
    assert record.headline.verdict == result.verdict
    if record.judged is not None:
        assert (record.judged.samples, record.judged.predictions) == (accuracy.samples, accuracy.predictions)
        assert record.judged.predicted_drop == accuracy.predicted_drop
        assert (record.judged.labelled, record.judged.differing) == (accuracy.labelled, accuracy.changed)
    return record


@pytest.mark.usefixtures("_no_clock")
def test_the_worst_samples_are_among_those_that_judge(tmp_path: Path) -> None:
    arrays = np.load(DATA.partition(":")[0])
    images = arrays["image"][: 2 * MOST_SAMPLES].astype(np.float32)
    feeds = [{"image": image[None]} for image in images] * 3  # of which a quarter would judge: more than at most
    record = run(tmp_path, DIGITS, feeds, Options(effort="low", place="rules", seconds=0.05))
    assert record.judged is not None
    assert record.judged.samples == MOST_SAMPLES
    assert record.judged.items


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
@pytest.mark.usefixtures("_no_clock")
def test_tensors_have_ranges_histograms_and_noise(form: str, tmp_path: Path) -> None:
    record = run(tmp_path, DIGITS, DATA, Options(effort="low", place="rules", samples=24, format=form))
    assert record.remarks == ()
    stored = [row for row in record.tensors if row.uint8]
    assert stored
    for row in stored:
        assert row.lo is not None and row.hi is not None and row.least is not None and row.most is not None  # noqa: PT018
        assert row.bins is not None  # minmax needs none: they were counted for the report
        assert row.sqnr_db is not None
        assert 20 < row.sqnr_db < 70  # 8 bits: about 50 dB of an even spread over the range
    assert {row.clipped for row in stored if not row.shares} == {0.0}  # by minmax nothing is
    assert record.judged is not None
    assert record.judged.labelled is not None
    assert record.judged.labelled.items == record.judged.samples == MOST_SAMPLES  # samples that gave no ranges
    assert [row.picture[:10] for row in record.judged.items] == ["data:image"] * len(record.judged.items)
    assert any(step.step.startswith("fold_batch_norms") and step.applied == 2 for step in record.pipeline)
    conv = next(unit for unit in record.units if unit.op == "Conv" and unit.implementation == "u8->u8")
    assert any("QLinearConv" in kernel for kernel in conv.int8_kernels)
    assert not any("Q" in kernel for kernel in conv.float_kernels)
    assert set(record.stages) >= {"calibrate", "compare"}


@pytest.mark.usefixtures("_no_clock")
def test_without_data_a_report_has_kernels_and_weights(tmp_path: Path) -> None:
    selection = Selection(frozenset(), frozenset(), frozenset(), Strategy.DYNAMIC, {})
    record = run(tmp_path, DIGITS, None, Options(selection=selection, effort="low"))
    assert record.remarks == ()
    assert record.judged is None
    assert not any(row.bins for row in record.tensors)
    assert record.weights
    assert record.times


def test_a_float_output_says_so(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> net (float[2,4] x) => (float[2,4] y) { [only] y = Exp(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "exp.onnx")
    feeds = [{"x": np.full((2, 4), value, np.float32)} for value in (0.0, 1.0)]
    record = run(tmp_path, tmp_path / "exp.onnx", feeds, Options(effort="low", seconds=0.05))
    assert record.headline.why_not
    assert record.remarks == ()
    assert [unit.implementation for unit in record.units] == ["float"]
    assert record.units[0].reason
    assert "NOT INT8" in (tmp_path / "run.html").read_text()


def test_a_rejected_model_says_what_each_operator_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_latency: Any
) -> None:
    set_latency(monkeypatch, float_ms=1.0, int8_ms=2.0)
    record = run(tmp_path, DIGITS, DATA, Options(effort="low", place="rules", samples=24))
    assert record.remarks == ()
    assert "gains too little" in record.headline.why_not
    tried = [unit for unit in record.units if unit.tried is not None and unit.tried.int8]
    assert {unit.op for unit in tried} == {"Conv", "MaxPool", "Flatten", "Gemm"}
    for unit in tried:
        assert unit.implementation == "float"
        if unit.float_us is not None and unit.tried_us is not None:
            assert ("int8 saves" in unit.reason) is (unit.tried_us < unit.float_us)
            assert unit.reason.startswith(("int8 saves", "float takes"))
        else:
            assert unit.reason.startswith("the INT8 model was rejected as a whole: int8 gains too little here")
    assert all(row.tried_us is not None for row in record.times)
    page = (tmp_path / "run.html").read_text()
    assert "in the rejected INT8 model" in page
    assert "x the speed of float" not in page[page.index('class="card costs"') : page.index('id="graph"')]


@pytest.mark.usefixtures("_no_clock")
def test_a_search_shows_what_was_tried(tmp_path: Path) -> None:
    goal = Goal(metric=metric_named("agreement"), allowance=parse_drop("0.5%"), data=DATA, seconds=60)
    recorder = Recorder([tmp_path / "run.json"])
    options = Options(effort="low", samples=24, place="rules")
    result = search_model(DIGITS, DATA, tmp_path / "out.onnx", goal, options, look=recorder.look)
    recorder.write(result)
    record = load_record(tmp_path / "run.json")
    assert result.search is not None
    assert record.search is not None
    assert len(record.search.points) == len(result.search.points) > 0
    assert record.search.metric == "agreement"


@pytest.mark.slow
@pytest.mark.parametrize("error", [RequantError("no"), ValueError("two\nlines")], ids=["refusal", "fault"])
@pytest.mark.usefixtures("_no_clock")
def test_a_part_that_fails_is_left_out_with_a_remark(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("requant.quantize.report.gather.tensors_of", fail)
    record = run(tmp_path, DIGITS, DATA, Options(effort="low", place="rules", samples=8))
    assert record.remarks == (f"tensors: not gathered: {' '.join(str(error).split())}",)
    assert record.times

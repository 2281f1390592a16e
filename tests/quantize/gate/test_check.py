"""The gate on real models: planted regressions, the lock file, requests that cannot be met, and what comes out."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from requant import RequantError
from requant.calibration.range_files.decoding import convert
from requant.cli import main
from requant.quantize import CheckOptions, Setting, check
from requant.quantize.accuracy.metrics import METRICS, Score
from requant.quantize.gate import lock, measure
from requant.quantize.gate.judge import Status
from requant.quantize.gate.outputs import check_summary, github_lines, junit, markdown, verdict, write_outputs
from requant.quantize.gate.run import Check, ready

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))
gate = importlib.import_module("benchmarks.gate")
sys.path.remove(str(ROOT))

FLOAT, DATA = gate.FLOAT, gate.DATA
UNTIMED = CheckOptions(seconds=0, samples=60)
TIMED = ("a slower model",)  # benchmarks time; see test_gate_judge.py for what is said of it
PLANTED = [row for row in gate.PLANTED if row.name not in TIMED]
LONG = ("ranges of another model", "half the layers float", "a larger file", "an older opset")
"""Regressions that only runs with slow tests plant."""


@pytest.fixture(autouse=True, scope="module")
def _vnni(vnni_module: None) -> None:
    """Quantize for a CPU with VNNI: without it the noise of the weights hides part of what a regression adds."""


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be no job on GitHub, wherever the tests run."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``int8.onnx`` and its baseline ``lock.json``."""
    made: Path = tmp_path_factory.mktemp("gate")
    check(FLOAT, gate.quantized(made), DATA, made / "lock.json", update=True, options=UNTIMED)
    return made


@pytest.fixture(scope="module")
def broken(folder: Path) -> Check:
    """What came of a model with a channel of zeros."""
    model, data = next(row for row in PLANTED if row.name == "one channel zeroed").make(folder)
    return check(FLOAT, model.rename(folder / "broken.onnx"), data, folder / "lock.json", options=UNTIMED)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")


def asked(folder: Path, *more: object, model: str = "int8.onnx", data: object = DATA) -> Result:
    """Run ``requant check`` on the pair."""
    pair = ("--float", FLOAT, "--model", folder / model, "--data", data, "--baseline", folder / "lock.json")
    return invoke("check", *pair, "--seconds", 0, *more)


# ------------------------------------------------------------------------------------------------- what is caught


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(row, id=row.name.replace(" ", "-"), marks=[pytest.mark.slow] * (row.name in LONG))
        for row in PLANTED
    ],
)
def test_a_planted_regression_is_caught_for_the_right_reason(folder: Path, planted: Any) -> None:
    model, data = planted.make(folder)
    found = check(FLOAT, model, data, folder / "lock.json", options=UNTIMED)
    assert gate.caught(planted, found) == "", str(found)


def test_an_unchanged_pair_passes_and_exits_0(folder: Path) -> None:
    result = asked(folder)
    assert result.exit_code == 0, result.output
    assert "nothing is worse" in result.stdout
    assert result.stderr == ""


@pytest.mark.slow
def test_a_better_model_passes(folder: Path) -> None:
    made = gate.quantized(folder, "better.onnx", effort="medium")
    assert check(FLOAT, made, DATA, folder / "lock.json", options=UNTIMED).ok


def test_a_metric_of_ones_own_is_judged(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n\n"
        "def error(outputs, labels):\n"
        "    return np.array([abs(o['logits'][0, y] - o['logits'][0].max()) for o, y in zip(outputs, np.ravel(labels))])\n\n"
        "error.higher_is_better = False\n"
    )
    options = replace(UNTIMED, metrics=(f"{tmp_path / 'mine.py'}:error",))
    made = check(FLOAT, folder / "int8.onnx", DATA, tmp_path / "lock.json", update=True, options=options)
    assert made.measured.scores[options.metrics[0]].metric.higher_is_better is False
    assert check(FLOAT, folder / "int8.onnx", DATA, tmp_path / "lock.json", options=UNTIMED).ok


@pytest.mark.slow
def test_an_update_keeps_tolerances_and_metrics(folder: Path, tmp_path: Path) -> None:
    first = replace(UNTIMED, metrics=("top1", "sqnr"), tolerances={"top1": "0.3%", "size": 0.5})
    for options in (first, UNTIMED):
        check(FLOAT, folder / "int8.onnx", DATA, tmp_path / "lock.json", update=True, options=options)
    found = lock.load_baseline(tmp_path / "lock.json")
    assert list(found.measured.scores) == ["top1", "sqnr"]
    assert str(found.tolerances.drops["top1"]) == "0.3%"
    assert found.tolerances.size == 0.5


# ------------------------------------------------------------------------------------------------- the speed


def timed(monkeypatch: pytest.MonkeyPatch, ratios: list[float]) -> tuple[tuple[float, ...], int]:
    """Measure a speed whose rounds have these ratios, against a floor of 1; return the rounds and how many ran."""
    coming = iter(ratios)
    monkeypatch.setattr(measure, "_rounds", lambda *_: lambda: (next(coming), 1.0))
    pair: Any = type("Pair", (), {"first": None})()
    found = measure.speed_of(pair, measure.Timing(1.0, 1, Setting(), floor=1.0), lambda *_: None)
    return found.rounds, len(ratios) - len(list(coming))


def test_a_speed_that_would_fail_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, ran = timed(monkeypatch, [0.5] * 30)
    assert ran == measure.ROUNDS * (1 + measure.AGAIN)
    assert max(rounds) < 1


def test_a_speed_that_is_well_in_one_round_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed(monkeypatch, [0.5] * 4 + [1.5] + [0.5] * 25)[1] == measure.ROUNDS
    assert timed(monkeypatch, [0.5] * 7 + [1.5] + [0.5] * 22)[1] == 2 * measure.ROUNDS


# ------------------------------------------------------------------------------------------------- the lock file


def test_a_baseline_is_read_as_it_was_written(folder: Path, tmp_path: Path) -> None:
    one = lock.load_baseline(folder / "lock.json")
    lock.save_baseline(tmp_path / "lock.json", one)
    assert (tmp_path / "lock.json").read_text() == (folder / "lock.json").read_text()
    assert max(map(len, (folder / "lock.json").read_text().splitlines())) < 10_000


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(allow_nan=False), st.integers(0, 5)), min_size=1, max_size=40))
def test_what_items_contributed_is_read_as_it_was_written(rows: list[tuple[float, int]]) -> None:
    parts = np.asarray(rows, np.float64)
    found = lock.unpack(convert(json.loads(json.dumps(lock.pack(parts))), lock.Packed, "here"), 2, "here")
    assert found is not None
    assert found.tobytes() == parts.tobytes()


def test_of_many_items_sums_are_kept() -> None:
    parts = np.stack([np.arange(300_000.0) % 2, np.ones(300_000)], axis=1)
    found = measure.bounded(Score(METRICS["top1"], 0.5, parts))
    assert found.parts is not None
    assert len(found.parts) <= measure.BLOCKS
    assert METRICS["top1"].of(found.parts) == METRICS["top1"].of(parts)


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.pop(key)


def placed(value: object, *path: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("format"), "not a baseline"),
        (placed(9, "version"), "of version 9"),
        (without("metrics"), "object missing required field 'metrics'"),
        (
            without("opset"),
            "malformed, --update (in Python: update=True) writes a new one: object missing required field 'opset'",
        ),
        (placed("much", "size"), "malformed, --update (in Python: update=True) writes a new one: 'size': expected int"),
        (
            placed({"x": 1}, "layers", "conv1"),
            "malformed, --update (in Python: update=True) writes a new one: layers 'conv1'",
        ),
        (
            placed("!", "metrics", "top1", "items"),
            "malformed, --update (in Python: update=True) writes a new one: metrics 'top1'",
        ),
        (placed({"type": "<f8", "shape": [9, 2], "data": "AAAA"}, "metrics", "top1", "items"), "malformed"),
        (placed(7, "tolerances", "top1"), "tolerance 'top1': 7 is out of range"),
        (placed(0.1, "tolerances", "latenzy"), "did you mean 'latency'?"),
        (placed(-1, "tolerances", "latency"), "tolerance 'latency': -1 is out of range"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_malformed_baseline_is_refused_with_the_place(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    document = json.loads((folder / "lock.json").read_text())
    change(document)
    document["checksum"] = lock.checksum(document)
    (tmp_path / "lock.json").write_text(json.dumps(document))
    with pytest.raises(RequantError) as error:
        lock.load_baseline(tmp_path / "lock.json")
    assert says in str(error.value)
    assert str(tmp_path / "lock.json") in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        placed({}, "metrics"),
        placed({}, "layers"),
        placed({}, "data", "statistics"),
        placed(99, "opset"),
    ],
    ids=["metrics", "layers", "statistics", "opset"],
)
def test_a_baseline_may_be_edited_in_its_tolerances_alone(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """A gate with an emptied table compares nothing, and stays green."""
    document = json.loads((folder / "lock.json").read_text())
    document["tolerances"]["top1"] = 0.25
    (tmp_path / "lock.json").write_text(json.dumps(document))
    assert lock.load_baseline(tmp_path / "lock.json").tolerances.drops["top1"].amount == 0.25
    change(document)
    (tmp_path / "lock.json").write_text(json.dumps(document))
    with pytest.raises(RequantError, match="more than the tolerances was edited, or a part is missing: --update"):
        lock.load_baseline(tmp_path / "lock.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"version": 1', '"version": 0'),
        lambda text: text.replace('"opset"', '"opsets"'),
        lambda text: f"<<<<<<< ours\n{text}",
    ],
    ids=["version", "field", "conflict"],
)
def test_an_update_replaces_a_damaged_baseline(
    folder: Path, tmp_path: Path, damage: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    text = (folder / "lock.json").read_text()
    place = tmp_path / "lock.json"
    place.write_text(damage(text))
    assert place.read_text() != text
    with pytest.raises(RequantError):
        ready(FLOAT, DATA, place)
    assert ready(FLOAT, DATA, place, update=True).old is None
    assert "it is written anew" in caplog.text


def test_an_update_overwrites_no_other_file(tmp_path: Path) -> None:
    place = tmp_path / "notes.json"
    place.write_text('{"mine": 1}')
    with pytest.raises(RequantError, match="not a baseline"):
        ready(FLOAT, DATA, place, update=True)


def test_a_baseline_that_is_no_json_is_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text('{\n "format": oops\n}')
    with pytest.raises(RequantError, match="line 2 column"):
        lock.load_baseline(tmp_path / "lock.json")


# ------------------------------------------------------------------------------------------------- what is refused


def refused(result: Result, *mentions: str) -> None:
    """Assert one clear line and exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("requant: ")
    for mention in mentions:
        assert mention in line


def test_a_baseline_of_another_model_is_refused(folder: Path) -> None:
    other = ROOT / "sample_models" / "digits_mobile.onnx"
    pair = ("--float", other, "--model", other, "--data", DATA, "--baseline", folder / "lock.json")
    refused(invoke("check", *pair), "the baseline of another float model", "lock.json", "--update")


def test_a_metric_that_raises_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def metric(outputs, labels):\n    raise ValueError('no such class')\n")
    arguments = ("--metric", f"{tmp_path / 'bad.py'}:metric", "--baseline", tmp_path / "new.json", "--update")
    refused(asked(folder, *arguments, "--samples", 5), "bad.py:metric", "ValueError: no such class")
    assert not (tmp_path / "new.json").exists()


def test_data_without_labels_are_refused_for_a_labelled_metric(folder: Path, tmp_path: Path) -> None:
    with np.load(DATA) as file:
        np.savez(tmp_path / "bare.npz", image=file["image"][:20])
    refused(asked(folder, "--metric", "top1", data=tmp_path / "bare.npz"), "no label, but top1 needs one", "sample 0")


def test_a_model_that_does_not_load_is_refused(folder: Path) -> None:
    (folder / "torn.onnx").write_bytes((folder / "int8.onnx").read_bytes()[:5000])
    refused(asked(folder, model="torn.onnx"), "torn.onnx", "truncated")
    refused(asked(folder, model="absent.onnx"), "absent.onnx: no such file")


def test_a_model_with_other_outputs_is_refused(folder: Path) -> None:
    model = onnx.load(folder / "int8.onnx")
    model.graph.output[0].name = model.graph.node[-1].output[0] = "scores"
    onnx.save(model, folder / "renamed.onnx")
    refused(asked(folder, model="renamed.onnx"), "renamed.onnx: has other outputs", "scores")


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (("--metric", "topp"), ("no metric named 'topp'", "top5")),
        (("--metric", "psnr"), ("not in psnr", "--update")),
        (("--tolerance", "top1=2"), ("tolerance 'top1'", "out of range")),
        (("--tolerance", "top1"), ("no pair", "top1=0.5%")),
        (("--tolerance", "latenzy=1"), ("did you mean 'latency'?",)),
        (("--junit", "no/such/folder.xml"), ("no folder",)),
        (("--baseline", "absent.json"), ("absent.json: no such baseline", "--update")),
    ],
    ids=["metric", "other metric", "range", "pair", "name", "junit", "baseline"],
)
def test_requests_that_cannot_be_met(folder: Path, arguments: tuple[str, ...], mentions: tuple[str, ...]) -> None:
    refused(asked(folder, *arguments), *mentions)


def test_a_pair_must_be_given(folder: Path) -> None:
    refused(invoke("check", "--float", FLOAT), "--model is missing", "requant.toml")


# ------------------------------------------------------------------------------------------------- what comes out


def test_a_failure_exits_1_and_tells_which_layer(folder: Path, broken: Check) -> None:
    result = asked(folder, model="broken.onnx")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert any("conv2: 1 channel of weight zero" in line for line in lines)
    assert [line for line in lines if line != line.rstrip()] == []


def test_json_is_one_object_on_stdout(folder: Path, monkeypatch: pytest.MonkeyPatch, broken: Check) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = asked(folder, "--json", model="broken.onnx")
    found = json.loads(result.stdout)
    assert found["ok"] is False
    assert {line["name"] for line in found["lines"] if line["status"] == "fail"} >= {"sqnr", "layers"}
    assert "::error title=requant check%3A sqnr::" in result.stderr


def test_annotations_are_on_stdout_in_a_job(folder: Path, monkeypatch: pytest.MonkeyPatch, broken: Check) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    lines = asked(folder, model="broken.onnx").stdout.splitlines()
    assert [line for line in lines if line.startswith("::error title=")]
    assert all(line.startswith("::error title=") for line in lines if "::" in line)


def test_annotations_are_escaped(broken: Check) -> None:
    line = replace(broken.findings[0], reason="100% of\nthis", layers=())
    (text,) = github_lines(replace(broken, lines=(line,)))
    assert text.endswith("100%25 of%0Athis")


def test_what_is_not_compared_is_told(broken: Check) -> None:
    line = replace(broken.lines[0], name="latency", status=Status.SKIP, reason="the baseline is from another CPU")
    check = replace(broken, lines=(line,))
    assert [*github_lines(check)] == [
        "::warning title=requant check%3A latency::not compared; the baseline is from another CPU"
    ]
    assert verdict(check).endswith("; not compared: latency")


def test_junit_has_a_case_for_each_line(broken: Check) -> None:
    suite = ElementTree.fromstring(junit(broken)).find("testsuite")
    assert suite is not None
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [line.name for line in broken.lines]
    failed = [case.get("name") for case in cases if case.find("failure") is not None]
    assert failed == [line.name for line in broken.findings]
    assert suite.get("failures") == str(len(failed))


def test_junit_holds_names_of_any_kind(broken: Check) -> None:
    line = replace(broken.findings[0], reason="a\x00b <&> \ud7ff \x1b[1m", layers=("x\x07y",))
    assert ElementTree.fromstring(junit(replace(broken, lines=(line,)))).find("testsuite") is not None


def test_markdown_is_a_table_and_goes_into_the_summary(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Check
) -> None:
    (tmp_path / "summary.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    asked(folder, "--markdown", tmp_path / "own.md", "--junit", tmp_path / "own.xml", model="broken.onnx")
    own = (tmp_path / "own.md").read_text()
    assert (tmp_path / "summary.md").read_text() == "before\n" + own
    assert "| ✗ | sqnr |" in own
    assert "  - `conv2: 1 channel of weight zero" in own
    assert ElementTree.parse(tmp_path / "own.xml").getroot().get("failures") == str(len(broken.findings))


@pytest.mark.parametrize(
    ("summary", "said"), [("none/s.md", "no folder"), (".", "is a folder"), ("m.onnx", "the input")]
)
def test_a_summary_that_cannot_be_written_is_refused_first(summary: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    with pytest.raises(RequantError, match=f"{said}.*GITHUB_STEP_SUMMARY|GITHUB_STEP_SUMMARY.*{said}"):
        check_summary({"GITHUB_STEP_SUMMARY": str(tmp_path / summary)}, [tmp_path / "m.onnx"])


@pytest.mark.skipif(os.name != "posix", reason="needs the modes of POSIX")
def test_a_new_summary_is_no_program(broken: Check, tmp_path: Path) -> None:
    write_outputs(broken, None, None, {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")})
    assert not (tmp_path / "summary.md").stat().st_mode & 0o111


def test_markdown_shows_names_as_they_are(broken: Check) -> None:
    line = replace(broken.findings[0], name="a|b*c", reason="<b>`x`", layers=("`y`",))
    text = markdown(replace(broken, lines=(line,)))
    assert "a\\|b\\*c" in text
    assert "\\<b\\>\\`x\\`" in text


@pytest.mark.slow
def test_quiet_leaves_the_exit_code_alone(folder: Path, broken: Check) -> None:
    for arguments in (("--quiet",), ("-q",)):
        result = asked(folder, *arguments, model="broken.onnx")
        assert (result.exit_code, result.output) == (1, "")
    refused(asked(folder, "--quiet", model="absent.onnx"), "no such file")


def test_verbose_tells_stages(folder: Path) -> None:
    stderr = asked(folder, "--verbose").stderr
    assert " s  compare" in stderr
    assert " s  inspect" in stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed(shell: str) -> None:
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert f"_REQUANT_COMPLETE={shell}_complete" in result.stdout


def test_nothing_is_coloured_without_a_terminal_or_where_it_is_not_wanted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "\x1b" not in asked(folder).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m" in asked(folder).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in asked(folder).stdout


def test_a_summary_that_nobody_reads_keeps_nobody_waiting(tmp_path: Path, broken: Check) -> None:
    os.mkfifo(tmp_path / "summary")
    with pytest.raises(RequantError, match="summary: cannot be written: "):
        write_outputs(broken, None, None, {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary")})

"""Findings through the command line: what is wrong with data is told, right data are met with silence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper

from requant.cli import main
from requant.quantize import Options, calibrate_model, merge_ranges, quantize_model
from requant.quantize.steps.deliver import Run
from requant.quantize.steps.ranges import findings_of_plan
from requant.quantize.steps.remake import all_float
from requant.system.printable import number_of

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
DIGITS = SAMPLE_MODELS / "digits.onnx"
RIGHT = f"{SAMPLE_MODELS / 'digits.npz'}:calib"
pytestmark = pytest.mark.usefixtures("int8_wins")


def succeed(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")
    assert result.exit_code == 0, result.output
    return result


def kinds(found: dict[str, Any]) -> list[str]:
    return [finding["kind"] for finding in found["findings"]]


def images() -> Any:
    return np.load(SAMPLE_MODELS / "digits.npz")["calib/image"]


@pytest.fixture
def pixels(tmp_path: Path) -> Path:
    """The digits as they were before they were divided by 255."""
    np.savez(tmp_path / "pixels.npz", image=np.rint(255 * images()))
    return tmp_path / "pixels.npz"


@pytest.mark.parametrize("command", ["calibrate", pytest.param("quantize", marks=pytest.mark.slow)])
def test_data_of_another_scale_get_a_warning(tmp_path: Path, pixels: Path, command: str) -> None:
    more = ("--effort", "low", "--place", "rules") if command == "quantize" else ()
    result = succeed(command, DIGITS, "--data", pixels, "-o", tmp_path / "out", *more)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert "'image' has a mean of " in line
    assert "check scale, mean and std" in line
    result = succeed(command, DIGITS, "--data", pixels, "-o", tmp_path / "again", "--json", *more)
    assert "warning" not in result.stderr
    (finding,) = json.loads(result.stdout)["findings"]
    assert (finding["kind"], finding["name"], finding["severity"]) == ("normalisation", "image", "warning")
    assert f"warning: {finding['message']}" == line


@pytest.mark.parametrize("command", ["calibrate", pytest.param("quantize", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["digits", pytest.param("digits_transformer", marks=pytest.mark.slow)])
def test_right_data_are_met_with_silence(tmp_path: Path, name: str, command: str) -> None:
    arguments = [command, SAMPLE_MODELS / f"{name}.onnx", "--data", RIGHT, "-o", tmp_path / "out", "--json"]
    if command == "quantize":
        arguments += ["--place", "rules", "--effort", "low", "--force-int8"]
    assert json.loads(succeed(*arguments).stdout)["findings"] == []


@pytest.mark.slow
def test_right_data_of_a_model_with_dead_channels_get_a_note_alone(tmp_path: Path) -> None:
    arguments = ["calibrate", SAMPLE_MODELS / "digits_mobile.onnx", "--data", RIGHT, "-o", tmp_path / "out", "--json"]
    (finding,) = json.loads(succeed(*arguments).stdout)["findings"]
    assert (finding["severity"], finding["kind"]) == ("note", "constant")
    assert "channels that are constant" in finding["message"]


def test_right_data_add_nothing_to_what_people_see(tmp_path: Path) -> None:
    result = succeed("calibrate", DIGITS, "--data", RIGHT, "-o", tmp_path / "out")
    assert result.stderr == f"{tmp_path / 'out'}: 8 tensors, 200 samples\n"


def test_the_growth_of_ranges_is_drawn(tmp_path: Path) -> None:
    grown = np.linspace(0.01, 1, 64, dtype=np.float32)[:, None, None, None]
    np.savez(tmp_path / "grown.npz", image=images()[:64] * grown)
    arguments = ["calibrate", DIGITS, "--data", tmp_path / "grown.npz", "-o"]
    shown = succeed(*arguments, tmp_path / "out").stderr
    assert "warning: the ranges still grow: by " in shown
    assert "\N{FULL BLOCK}" in shown
    found = json.loads(succeed(*arguments, tmp_path / "again", "--json").stdout)
    (finding,) = [finding for finding in found["findings"] if finding["kind"] == "growing"]
    assert finding["curve"][-1] == [64, 1.0]


def test_only_the_ranges_that_the_plan_uses_can_still_grow(tmp_path: Path) -> None:
    grown = np.linspace(0.01, 1, 64, dtype=np.float32)[:, None, None, None]
    np.savez(tmp_path / "grown.npz", image=images()[:64] * grown)
    runs: list[Run] = []
    options = Options(effort="low", place="rules", force_int8=True, seconds=0.0)
    result = quantize_model(DIGITS, tmp_path / "grown.npz", tmp_path / "out.onnx", options, look=runs.append)
    (run,) = runs
    plan, others = run.trial.candidate.plan, [each for each in run.ranges.findings if each.kind != "growing"]
    (told,) = [each for each in result.findings if each.kind == "growing"]
    assert f"mean over {len(plan.observed)} tensors" in told.message
    assert "add samples (16 of the given samples judge the model and give no ranges), or " in told.message
    assert "growing" in {each.kind for each in run.ranges.findings}
    assert [*findings_of_plan(run.job, run.ranges, all_float(plan))] == others  # no range is in this model
    last = next(unit for unit in reversed(plan.units) if plan.impl(unit).int8)
    part = all_float(plan).with_choices({last.name: plan.choices[last.name]})
    (told,) = [each for each in findings_of_plan(run.job, run.ranges, part) if each.kind == "growing"]
    assert f"mean over {number_of(len(part.observed), 'tensor')})" in told.message
    assert 0 < len(part.observed) < len(plan.observed) < len(run.ranges.seen.ranges)


@pytest.mark.slow
def test_of_a_part_nothing_is_told_that_only_the_whole_tells(tmp_path: Path) -> None:
    np.savez(tmp_path / "few.npz", image=np.concatenate([images()[:1]] * 6))
    arguments = ["calibrate", DIGITS, "--data", tmp_path / "few.npz", "--json", "-o"]
    assert kinds(json.loads(succeed(*arguments, tmp_path / "whole").stdout)) == ["duplicates", "few"]
    for name, shard in (("a", "1/2"), ("b", "2/2")):
        assert kinds(json.loads(succeed(*arguments, tmp_path / name, "--shard", shard).stdout)) == []
    merge = ["calibrate", "--merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "merged", "--json"]
    assert kinds(json.loads(succeed(*merge).stdout)) == ["duplicates", "few"]
    lone = ["calibrate", DIGITS, "--data", tmp_path / "few.npz", "-o", tmp_path / "c", "--shard", "1/3"]
    succeed(*lone)
    succeed(*lone[:-3], tmp_path / "d", "--shard", "2/3")
    merge = ["calibrate", "--merge", tmp_path / "c", tmp_path / "d", "-o", tmp_path / "part", "--json"]
    assert kinds(json.loads(succeed(*merge).stdout)) == []


@pytest.mark.slow
def test_findings_from_python(tmp_path: Path, pixels: Path) -> None:
    found = calibrate_model(DIGITS, str(pixels))
    asked = Options(effort="low", place="rules")
    result = quantize_model(DIGITS, str(pixels), tmp_path / "out.onnx", asked)
    for findings in (found.findings, result.findings):
        assert [(finding.kind, finding.severity) for finding in findings] == [("normalisation", "warning")]
    assert found.file.samples == 200
    filed = quantize_model(DIGITS, str(pixels), tmp_path / "filed.onnx", replace(asked, ranges=found.file))
    assert filed.findings == ()  # they were told when the file was made
    np.savez(tmp_path / "black.npz", image=np.zeros((20, 1, 28, 28), np.float32))
    from requant.calibration import save_ranges

    save_ranges(tmp_path / "black.json", calibrate_model(DIGITS, str(tmp_path / "black.npz")).file)
    merged = merge_ranges([tmp_path / "black.json"])
    assert ("constant", "image", "warning") in [(f.kind, f.name, f.severity) for f in merged.findings]


@pytest.mark.parametrize("broken", ["probe", "findings", "explain_broken"])
def test_no_failure_of_a_finding_ends_a_run(tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    model, data = write_root(tmp_path)
    monkeypatch.setattr(f"requant.quantize.steps.ranges.{broken}", fail)
    for command in ("calibrate", "quantize"):
        succeed(command, model, "--data", data, "-o", tmp_path / command)


# An activation that turns out to be NaN where the model takes it back: the outputs are finite.
ROOT = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[N,64] x) => (float[N,64] y) {
  [root] s = Sqrt(x)
  [product] p = MatMul(s, w)
  nan = IsNaN(p)
  c = Where(nan, zero, p)
  [last] y = MatMul(c, w)
}
"""


def write_root(folder: Path) -> tuple[Path, Path]:
    """Write a model and data of which sample 17 makes a tensor NaN."""
    proto = onnx.parser.parse_model(ROOT)
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    for name, array in (("w", weights), ("zero", np.zeros(1, np.float32))):
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(proto, folder / "root.onnx")
    x = np.abs(np.random.default_rng(1).standard_normal((20, 64))).astype(np.float32)
    x[17, 0] = -1
    np.savez(folder / "data.npz", x=x)
    return folder / "root.onnx", folder / "data.npz"


@pytest.mark.slow
def test_what_made_a_tensor_nan_is_told(tmp_path: Path) -> None:
    model, data = write_root(tmp_path)
    result = succeed("calibrate", model, "--data", data, "-o", tmp_path / "r.json")
    clause = f"{data}, sample 17, made by Sqrt 'root' from finite 'x' (-1 to "
    assert f"note: 'p', 's' hold NaN or infinity at {clause}" in result.stderr  # of p it is made by s
    found = json.loads(succeed("quantize", model, "--data", data, "-o", tmp_path / "out", "--json").stdout)
    assert [finding["kind"] for finding in found["findings"]] == ["broken"]
    (reason,) = {node["reason"] for node in found["float_nodes"] if node["name"] == "product"}
    assert reason.startswith(f"holds NaN or infinity: {clause}")
    part = ["quantize", model, "--data", data, "-o", tmp_path / "part", "--json", "--samples", "10", "--force-int8"]
    assert json.loads(succeed(*part).stdout)["findings"][0]["kind"] == "few"  # without the 18th of 20

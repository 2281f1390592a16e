"""The matrix of versions: which versions it takes, and what it concludes. These tests make no environment."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
versions = importlib.import_module("benchmarks.versions")
sys.path.remove(str(ROOT))

EPS = float(np.finfo(np.float32).eps)


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("onnxruntime>=1.23", ["1.23.0", "1.24.4", "1.25.1", "2.0.0"]),
        ("onnxruntime>=1.23.2", ["1.23.2", "1.24.4", "1.25.1", "2.0.0"]),
        ("onnxruntime>=1.24,<2,!=1.25.1", ["1.24.1", "1.25.0"]),
    ],
)
def test_the_oldest_allowed_and_the_newest_of_each_later_minor_version_run(
    requirement: str, expected: list[str]
) -> None:
    available = ["2.0.0", "1.25.1", "1.25.0", "1.24.4", "1.24.1", "1.23.2", "1.23.0", "1.22.1", "1.26.0rc1"]
    assert [str(one) for one in versions.supported(available, Requirement(requirement))] == expected


def test_the_project_allows_the_installed_runtime() -> None:
    (requirement,) = [one for one in map(Requirement, versions.project()["dependencies"]) if one.name == "onnxruntime"]
    assert ort.__version__ in requirement.specifier


NOISE = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)
LOCKED = {
    "version|": np.array("1.0"),
    "digits-float|all": 10 * NOISE,
    "digits-static|all": 10 * NOISE + 0.2 * NOISE[::-1],  # the rounding error has an rms of about 0.2
}


def found(change: Any) -> Any:
    return versions.compare({"digits-static|all": change}, LOCKED, "digits-static")


def test_equal_outputs_are_equal() -> None:
    result = found(LOCKED["digits-static|all"].copy())
    assert (result.good, str(result)) == (True, "equal")


@pytest.mark.parametrize(("share", "good"), [(0.5, True), (2, False)])
def test_outputs_may_differ_as_with_independent_rounding(share: float, good: bool) -> None:
    error = LOCKED["digits-static|all"] - LOCKED["digits-float|all"]
    result = found(LOCKED["digits-static|all"] + share * np.roll(error, 1))
    assert result.good == good
    assert float(str(result)) == pytest.approx(share / 2**0.5, rel=0.05)


@pytest.mark.parametrize(("share", "good"), [(0.5, True), (2, False)])
def test_float_outputs_may_differ_by_the_rounding_of_float_sums(share: float, good: bool) -> None:
    plain = LOCKED["digits-float|all"]
    bound = 4 * np.sqrt(3136) * EPS * np.abs(plain).max()  # four sums in sequence, the longest of 3136 products
    shifted = (plain.astype(np.float64) + share * bound).astype(np.float32)
    assert versions.compare({"digits-float|all": shifted}, LOCKED, "digits-float").good == good


def test_a_model_that_is_refused_or_gives_something_else_is_not_good() -> None:
    assert str(found(np.array("no kernel"))) == "refused"
    assert not found(np.array("no kernel")).good
    assert not found(LOCKED["digits-static|all"][:1]).good
    assert not found(np.full((64, 10), np.nan, np.float32)).good


def test_the_program_runs_each_model_at_each_level(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "digits-float.onnx").write_bytes((ROOT / "sample_models/digits.onnx").read_bytes())
    (models / "broken-float.onnx").write_bytes(b"\x08")
    np.savez(tmp_path / "in.npz", image=np.zeros((2, 1, 28, 28), np.float32))
    program = ROOT / "benchmarks/versions_run.py"
    subprocess.run(
        [sys.executable, program, models, tmp_path / "in.npz", tmp_path / "out.npz"], check=True, capture_output=True
    )
    with np.load(tmp_path / "out.npz") as file:
        outputs = dict(file)
    assert str(outputs["version|"]) == ort.__version__
    for level in ("off", "basic", "extended", "all"):
        assert outputs[f"digits-float|{level}"].shape == (2, 10)
        assert outputs[f"broken-float|{level}"].dtype.kind == "U"
    assert not versions.compare(outputs, outputs, "broken-float").good


def test_levels_are_compared_with_no_optimization() -> None:
    outputs = {f"digits-float|{level}": NOISE + shift for level, shift in (("off", 0), ("basic", 0), ("all", 1))}
    table = versions.levels_of(outputs)
    assert {level: str(row["digits-float"]) == "equal" for level, row in table.items()} == {"basic": True, "all": False}

"""The commands in the documentation do what the documentation says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from requant.quantize import Options
from requant.quantize.options.efforts import EFFORTS

ROOT = Path(__file__).parent.parent


def test_the_flow_runs_as_written(tmp_path: Path) -> None:
    """Run the commands of docs/flow.md, from the float model to the fused model, in an empty folder."""
    if shutil.which("sh") is None:
        pytest.skip("needs a POSIX shell")
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "flow.md").read_text(), flags=re.DOTALL)
    script = "set -e\nD=sample_models/digits.npz\nrequant() { " + f"'{sys.executable}' -m requant.cli \"$@\"; }}\n"
    (tmp_path / "sample_models").symlink_to(ROOT / "sample_models")
    done = subprocess.run(
        ["sh", "-c", script + "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for stage in ("simple", "dynamic", "logged", "frozen", "fused"):
        assert (tmp_path / f"{stage}.onnx").is_file()
    fused = [node.op_type for node in ir.load(tmp_path / "fused.onnx").graph]
    assert fused.count("QLinearConv") == 1
    assert fused.count("QGemm") == 2
    assert "Requantize" not in fused
    assert "100.00%" in done.stderr  # the top-1 agreement that the last command prints


def test_the_documented_default_of_the_range_rule_is_the_default() -> None:
    text = (ROOT / "docs" / "calibration.md").read_text()
    (default,) = re.findall(r"^\| `(\w+)` \|.*; the default \|$", text, flags=re.MULTILINE)
    (low,) = re.findall(r"^\| `(\w+)` \|.*; the default of `--effort low` \|$", text, flags=re.MULTILINE)
    assert (default, low) == (EFFORTS["medium"].rule, EFFORTS["low"].rule)
    assert Options().effort == "medium"


def test_the_program_with_processes_runs_as_written(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "calibration.md").read_text(), flags=re.DOTALL)
    (program,) = (block for block in blocks if 'executor_named("processes"' in block)
    (tmp_path / "program.py").write_text(program.replace("workers=8", "workers=2"))
    shutil.copy(ROOT / "sample_models" / "digits.onnx", tmp_path / "model.onnx")
    with np.load(ROOT / "sample_models" / "digits.npz") as data:
        np.savez(tmp_path / "calib.npz", image=data["calib/image"][:8])
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_transform_is_in_the_changelog() -> None:
    from requant.transforms import REGISTRY

    text = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in REGISTRY if f"`{name}`" not in text] == []

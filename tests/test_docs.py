"""The commands in the documentation do what the documentation says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest

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
    assert "100.00%" in done.stdout  # the top-1 agreement that the last command prints


def test_every_transform_is_in_the_changelog() -> None:
    from requant.transforms import REGISTRY

    text = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in REGISTRY if f"`{name}`" not in text] == []

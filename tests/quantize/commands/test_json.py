"""With --json stdout has one JSON object, whatever the user's code prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from requant.cli import main

SAMPLES = Path(__file__).parents[3] / "sample_models"
READER = """
import os, subprocess
import numpy as np
print("MODULE")
def clips():
    os.write(1, b"RAW\\n")
    subprocess.run(["echo", "CHILD"], check=True)
    for seed in range(4):
        print("EACH")
        yield {"image": np.random.default_rng(seed).random((1, 1, 28, 28)).astype("f")}
"""
COMMAND = ("calibrate", SAMPLES / "digits.onnx", "--data", "reader.py:clips", "-o", "r.json", "--json")


@pytest.fixture(autouse=True)
def _reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reader.py").write_text(READER)
    monkeypatch.chdir(tmp_path)


def test_what_a_reader_prints_goes_to_stderr() -> None:
    command = [sys.executable, "-m", "requant.cli", *map(str, COMMAND)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == 4
    for word in ("MODULE", "RAW", "CHILD", "EACH"):
        assert word in done.stderr


def test_in_a_process_that_has_replaced_stdout() -> None:
    done = CliRunner().invoke(main, [str(part) for part in COMMAND])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == 4
    assert "EACH" in done.stderr

"""Tables in a pipe and on a terminal: results on stdout, whole words, no spaces at the end of a line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from requant.quantize.console.terminal import Terminal

ROOT = Path(__file__).parents[3]
DIGITS, DATA = ROOT / "sample_models/digits.onnx", f"{ROOT / 'sample_models/digits.npz'}:calib"

PIPED: dict[str, tuple[str, str]] = {
    "quantize": ("m.onnx --data {data} -o q.onnx --effort low --place rules --force-int8", "latency, batch 1"),
    "compare": ("m.onnx m.onnx --data {data}", "top-1"),
    "inspect": ("m.onnx --dim N=1 --nodes", "activations"),
    "explain": ("m.onnx --data {data} --all", "integer kernels"),
    "ops": ("", "the runtime computes it in one float kernel"),
    "compile": ("m.onnx -o here.onnx --data {data}", "compiled for"),
    "bench": ("m.onnx --data {data}", "slowest nodes"),
    "sensitivity": ("m.onnx --data {data} --samples 1 --calibration-samples 4 --units", "each trial on 1"),
    "check": ("--float m.onnx --model m.onnx --data {data} --seconds 0 --update", "baseline"),
}


QUICK = ("check",)
"""The command that stands for all others in a run without slow tests: each takes a process of its own."""


@pytest.mark.parametrize(
    ("command", "row"),
    [
        pytest.param(f"{name} {rest}", row, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, (rest, row) in PIPED.items()
    ],
)
def test_a_pipe_gets_whole_lines_of_results_on_stdout(command: str, row: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").symlink_to(DIGITS)
    words = [sys.executable, "-m", "requant", *command.format(data=DATA).split()]
    environment = {**os.environ, "COLUMNS": "40", "REQUANT_CACHE": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if row in line]
    assert [line for line in lines if line != line.rstrip()] == []
    assert row not in done.stderr
    if DATA.partition(":")[0] in done.stdout:  # a long word with spaces around it is not broken
        assert any(word.rstrip(",").startswith(DATA.partition(":")[0]) for line in lines for word in line.split())
    if command.startswith(("quantize", "compare")):
        assert re.match(r"\S+x (faster|slower)(, | \(machine busy, )|as fast as float", lines[0])


class Screen(Terminal):
    """A terminal of 50 columns."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 50


PATH = "one/very/long/path/that/is/wider/than/the/whole/screen/model.onnx"
WORDS = f"a sentence of short words, many of them short, and {PATH} at its end, which has short words too"


def test_a_terminal_folds_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("value")
    table.add_row("the name", WORDS)
    Screen().print(table)
    Screen().print(WORDS)
    shown = capsys.readouterr().out
    assert shown.split() == ["name", "value", "the", "name", *WORDS.split(), *WORDS.split()]
    lines = shown.splitlines()
    assert len(lines) == 1 + 4 + 3
    assert [line for line in lines if line != line.rstrip()] == []
    assert [line.strip() for line in lines if len(line) > 50] == [PATH, PATH]
    assert [line.split()[0] for line in lines[2:5]] == ["short,", PATH, "at"]

"""Outputs that name a device, a FIFO or a folder are refused: a new file would take their place, or never be read."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from requant import RequantError
from requant.cli import main
from requant.quantize.model.files import load_model
from requant.quantize.model.writing import save_model
from requant.system.writing import replacing, write_atomically

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs FIFOs")

SAMPLES = Path(__file__).parents[2] / "sample_models"
MODEL, DATA = str(SAMPLES / "digits.onnx"), f"{SAMPLES / 'digits.npz'}:calib"


def replace_it(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"x")


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "out.onnx")
    return tmp_path / "out.onnx"


@pytest.mark.parametrize(
    "write",
    [lambda path: write_atomically(path, b"x"), replace_it, lambda path: save_model(load_model(MODEL), path)],
    ids=["bytes", "stream", "model"],
)
def test_no_file_takes_the_place_of_a_fifo(write: Callable[[Path], None], fifo: Path, tmp_path: Path) -> None:
    with pytest.raises(RequantError, match=r"out\.onnx: is a FIFO; give the path of a file"):
        write(fifo)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert list(tmp_path.iterdir()) == [fifo]


@pytest.mark.parametrize(
    "arguments",
    [
        ("transform", MODEL, "{}", "--force", "--transforms", "fold_constants"),
        ("quantize", MODEL, "--data", DATA, "--force", "-o", "{}"),
        ("calibrate", MODEL, "--data", DATA, "--force", "-o", "{}"),
        ("compile", MODEL, "--force", "-o", "{}"),
        ("check", "--float", MODEL, "--model", MODEL, "--data", DATA, "--baseline", "{}.json", "--junit", "{}"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_refuses_it_before_any_work(arguments: tuple[str, ...], fifo: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [each.format(fifo) for each in arguments])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"requant: {fifo}: is a FIFO; give the path of a file\n"
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert list(tmp_path.iterdir()) == [fifo]

"""`requant demo` works without a clone, overwrites nothing unasked, and opens a page only for somebody who sees it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from requant.cli import main
from requant.quantize.project import demo

SAMPLES = Path(__file__).parents[3] / "sample_models"
FILES = {"digits.onnx", "digits.npz", "digits_int8.onnx", "digits_int8.plan.json", "report.html"}
KIB = 1024


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")


@pytest.mark.usefixtures("int8_wins")
def test_the_demo_quantizes_in_a_new_folder_and_names_commands_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda *_: pytest.fail("nobody sees it"))
    monkeypatch.setenv("DISPLAY", ":0")
    done = invoke("demo", "a new/folder")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "a new" / "folder"
    assert {path.name for path in folder.iterdir()} == FILES
    assert (folder / "digits_int8.onnx").stat().st_size < (folder / "digits.onnx").stat().st_size / 3
    assert "report  a new/folder/report.html" in done.stdout.splitlines()
    *own, last = (line.removeprefix("next    ") for line in done.stdout.splitlines() if line.startswith("next "))
    for command in own:
        tried = invoke(*shlex.split(command)[1:], "--json")
        assert tried.exit_code == 0, tried.output
        assert json.loads(tried.stdout)
    assert last.startswith("requant quantize ")
    assert len(own) == 2


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_demo_overwrites_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    done = invoke("demo", tmp_path)
    assert done.exit_code == 2
    assert done.stderr == f"requant: {tmp_path / name}: exists already; --force overwrites it (in Python: force=True)\n"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine"}


def test_the_same_demo_goes_on_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("requant.quantize.project.request.Request.run", interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            demo.run_demo(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"digits.onnx", "digits.npz"}


@pytest.mark.slow
@pytest.mark.usefixtures("int8_wins")
def test_the_demo_overwrites_where_it_is_told_to(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_text("old")
    assert invoke("demo", tmp_path, "--force").exit_code == 0
    assert all(path.read_bytes() != b"old" for path in tmp_path.iterdir())


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    done = invoke("demo", tmp_path / "taken")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"requant: {tmp_path / 'taken'}: cannot be made: ")


@pytest.mark.slow
def test_the_files_in_the_package_are_what_their_script_writes(tmp_path: Path) -> None:
    assert sum(path.stat().st_size for path in demo.STORED.iterdir()) < 800 * KIB
    done = subprocess.run(
        [sys.executable, SAMPLES / "small.py", "--out", tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout == "797 of 797 test images\n"
    assert {path.name for path in demo.STORED.iterdir()} == {path.name for path in tmp_path.iterdir()} | {"LICENSE.txt"}
    with np.load(tmp_path / "digits.npz") as made, np.load(demo.STORED / "digits.npz") as stored:
        assert made.files == stored.files
        for name in made.files:
            assert np.array_equal(made[name], stored[name])


SHOWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
OPENED = (
    "from pathlib import Path; from requant.quantize.commands.demo import open_page; open_page(Path('a page.html'))"
)


@pytest.mark.skipif(sys.platform != "linux", reason="DISPLAY says whether there is a display")
@pytest.mark.parametrize(
    ("terminal", "display", "opened"),
    [
        (True, {"DISPLAY": ":0"}, True),
        (True, {"WAYLAND_DISPLAY": "wayland-0"}, True),
        (True, {}, False),
        (False, {"DISPLAY": ":0"}, False),
    ],
)
def test_a_page_is_opened_where_somebody_sees_it(
    tmp_path: Path, terminal: bool, display: dict[str, str], opened: bool
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > "{tmp_path}/opened"\n')
    browser.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.endswith("DISPLAY")}
    environment |= {**display, "BROWSER": f"{browser} %s"}
    shown = [sys.executable, "-c", SHOWN] if terminal else []
    command = [*shown, sys.executable, "-c", OPENED]
    subprocess.run(command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert (tmp_path / "opened").exists() is opened
    if opened:
        assert (tmp_path / "opened").read_text() == f"{(tmp_path / 'a page.html').as_uri()}\n"

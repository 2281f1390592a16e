"""No command overwrites a file that it reads, with or without --force."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from requant.cli import main

SAMPLES = Path(__file__).parents[3] / "sample_models"
READ = ("digits_mobile.onnx", "digits.npz")
CHECK = "check --float digits_mobile.onnx --model digits_mobile.onnx --data digits.npz --seconds 0"
COMMANDS = [
    f"{CHECK} --junit digits_mobile.onnx",
    f"{CHECK} --markdown digits.npz",
    f"{CHECK} --junit out --markdown out",
    f"{CHECK} --update --baseline digits.npz",
    "quantize digits_mobile.onnx --data digits.npz:calib -o digits.npz --force",
    "quantize digits_mobile.onnx --data digits.npz:calib -o q.onnx --report digits.npz --force",
    "quantize digits_mobile.onnx --data digits.npz:calib -o q.onnx --plan digits.npz --report digits.npz --force",
    "calibrate digits_mobile.onnx --data digits.npz:calib -o digits.npz --force",
    "calibrate digits_mobile.onnx --data digits.npz:calib --log digits.npz --force",
    "calibrate digits_mobile.onnx --data digits.npz:calib --log out --output out",
    "sensitivity digits_mobile.onnx --data digits.npz:calib -o digits.npz --force",
    "costs measure digits_mobile.onnx --data digits.npz:calib -o digits.npz --force",
    "reproduce digits_mobile.onnx --model digits_mobile.onnx --data digits.npz:calib -o digits.npz --force",
    "transform digits_mobile.onnx digits_mobile.onnx --group simplify --force",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in READ:
        shutil.copy(SAMPLES / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_not_overwrite_what_it_reads(folder: Path, command: str) -> None:
    before = {name: (folder / name).read_bytes() for name in READ}
    found = CliRunner().invoke(main, command.split())
    assert found.exit_code == 2
    assert "choose another path" in found.stderr
    assert found.stderr.count("\n") == 1
    assert {name: (folder / name).read_bytes() for name in READ} == before
    assert {path.name for path in folder.iterdir()} == set(READ)


@pytest.mark.parametrize(
    ("output", "told"),
    [("digits.npz", "output would overwrite the input"), ("notes.txt", "a project overwrites its output")],
)
def test_a_project_does_not_overwrite_what_is_no_output_of_it(folder: Path, output: str, told: str) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "requant.toml").write_text(
        f'model = "digits_mobile.onnx"\noutput = "{output}"\n'
        '[quantize]\ndata = "digits.npz:calib"\n[check]\ndata = "digits.npz:test"\n'
    )
    before = (folder / output).read_bytes()
    found = CliRunner().invoke(main, ["check", "requant.toml"])
    assert found.exit_code == 2
    assert told in found.stderr
    assert (folder / output).read_bytes() == before


@pytest.mark.parametrize(
    ("plan", "written", "options", "told"),
    [
        ("mine", 'plan = "mine.plan.json"\nreport = "mine.plan.json"', [], "report mine.plan.json would overwrite"),
        ("mine", 'plan = "mine.plan.json"\nreport = ["mine.plan.json"]', [], "report mine.plan.json would overwrite"),
        ("q", "", ["--junit", "q.plan.json"], "junit would overwrite"),
    ],
    ids=["a report", "a report of several", "the plan beside the output"],
)
def test_the_reports_of_a_project_are_no_inputs(
    folder: Path, plan: str, written: str, options: list[str], told: str
) -> None:
    (folder / f"{plan}.plan.json").write_text("edited by hand")
    (folder / "requant.toml").write_text(
        'model = "digits_mobile.onnx"\noutput = "q.onnx"\n[check]\ndata = "digits.npz:test"\n'
        f'[quantize]\ndata = "digits.npz:calib"\n{written}\n'
    )
    found = CliRunner().invoke(main, ["check", "requant.toml", *options])
    assert found.exit_code == 2
    assert f"{told} the input '{plan}.plan.json'" in found.stderr
    assert (folder / f"{plan}.plan.json").read_text() == "edited by hand"


def test_a_model_that_is_missing_is_refused_before_libraries_are_imported(tmp_path: Path) -> None:
    """Their import takes two seconds."""
    code = (
        "import sys\n"
        "from requant.cli import main\n"
        "try:\n"
        "    main(['quantize', 'no.onnx', '--data', 'd.npz', '-o', 'q.onnx'])\n"
        "except SystemExit as ended:\n"
        "    print(ended.code, sorted({'onnx', 'onnx_ir', 'onnxruntime', 'numpy'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("2 []\n", "requant: no.onnx: no such file\n")

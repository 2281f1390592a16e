"""Play README.md and every page of docs/: each command and Python block does what the page says.

The fast tests parse the commands with the commands of the program. The slow test runs them, in an empty folder with the
files of `folder.py`, by a wheel that is installed into a new environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from requant.calibration.model.session import OPERATORS
from requant.cli import main

from ..installed import PIP, install_wheel, settings
from .folder import PLAN, known, lay_out, make_all
from .steps import REASONS, ROOT, Step, pages, steps

OUTPUTS = {"output", "target", "folder", "report", "junit", "markdown", "dump_dir", "log"}
"""The parameters of commands that name files to write."""
VERDICTS = {"quantize", "check", "diff"}
"""Commands whose exit code 1 is an answer, which the clock of a busy machine may give."""
PRELUDES = {
    "docs/calibration.md": 'import numpy as np\nmore = np.load("calib.npz")["image"][:8, None]\n',
    "docs/deploy.md": 'from requant.calibration import open_session\nsession = open_session("model_here.onnx")\n',
    "docs/metrics.md": "import numpy as np\n",
    "docs/plugins.md": "import onnx_ir as ir\n",
    "docs/report.md": "import numpy as np\nfeeds = [{'image': i[None]} for i in np.load('calib.npz')['image'][:40]]\n",
}
"""What a Python block of a page takes for granted."""
FILE = re.compile(r"(?<![\w=*])((?:[\w-]+/)*[\w.-]+\.(?:onnx|npz|npy|csv|jsonl|json|toml|py)|(?:[\w-]+/)+)(?=$|[:,\s])")


def context(step: Step) -> tuple[str, click.Context]:
    """Parse a command; return the name of the command, and its context."""
    found: click.Command = main
    parent = click.Context(main, info_name="requant")
    name, *words = step.words[1:]
    while True:
        assert isinstance(found, click.Group)
        command = found.get_command(parent, name)
        assert command is not None, f"{step}: there is no command {name}"
        if not isinstance(command, click.Group):
            return name, command.make_context(name, [*words], parent=parent)
        found, parent, (name, *words) = command, click.Context(command, info_name=name, parent=parent), words


def written(parsed: click.Context) -> list[str]:
    """Return the files that a command writes."""
    values = [value for name, value in parsed.params.items() if name in OUTPUTS and value]
    paths = [str(path) for value in values for path in (value if isinstance(value, tuple | list) else [value])]
    return paths + [path.replace(".onnx", PLAN) for path in paths] + [f"{path}.data" for path in paths]


@pytest.mark.parametrize("page", pages())
def test_every_command_of_a_page_is_one_of_the_program(page: str) -> None:
    made = known()
    for step in steps(page):
        if step.reason is not None:
            assert step.reason in REASONS, f"{step}: {step.reason}"
        elif step.kind == "file":
            made.add(step.name)
        elif step.kind == "command" and step.words[0] == "requant" and "[OPTIONS]" not in step.words:
            try:
                parsed = context(step)[1]
            except click.ClickException as error:
                pytest.fail(f"{step}: {error.format_message()}")
            made |= {*written(parsed), *(step.text.partition("> ")[2].split()[:1]), str(parsed.params.get("baseline"))}
    if not page.startswith("docs/reference/"):
        assert unknown_files(page, made) == []


def unknown_files(page: str, made: set[str]) -> list[str]:
    """Return the files in commands of a page that neither the folder nor a step of the page has."""
    commands = [step for step in steps(page) if step.kind == "command" and step.reason is None]
    named = [
        (step, name) for step in commands if step.words[0] == "requant" for name in FILE.findall(" ".join(step.words))
    ]
    return [
        f"{step}: {name}"
        for step, name in named
        if not {name.rstrip("/"), name.partition("/")[0], name.partition("/")[0] + "/"} & made
    ]


@pytest.mark.parametrize("page", pages())
def test_other_commands_name_what_exists(page: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for step in steps(page):
        words = step.words if step.kind == "command" else [""]
        if words[0] == "make":
            assert words[1] in targets, step
        elif "-m" in words:
            module = words[words.index("-m") + 1]
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file(), step


def test_steps_are_found_in_blocks_and_in_indented_lines() -> None:
    flow = steps("docs/flow.md")
    assert len(flow) == 7
    assert "\n" in flow[0].text
    assert [step.words[1] for step in flow] == ["transform"] * 3 + ["calibrate"] + ["transform"] * 2 + ["compare"]
    assert any(step.kind == "file" and step.name == "tok.py" for step in steps("docs/data.md"))
    assert [step.reason for step in steps("docs/how-to/cluster.md") if step.reason] == ["needs a cluster"]


# ------------------------------------------------------------------------------------------------- the installed wheel


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel of this tree into a new environment; libraries are those of this one. Return its programs."""
    return install_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def store(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the files that pages name."""
    folder = tmp_path_factory.mktemp("store")
    make_all(folder, program / "requant")
    return folder


def environment(program: Path, **more: str) -> dict[str, str]:
    """Return the environment of a user of the installed program."""
    own = settings()
    return {**own, "PATH": f"{program}{os.pathsep}{own['PATH']}", "D": "sample_models/digits.npz", **more}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages() if not page.startswith("docs/reference/")])
def test_a_page_does_as_written(page: str, program: Path, store: Path, tmp_path: Path) -> None:
    if shutil.which("sh") is None:
        pytest.skip("needs a POSIX shell")
    folder = tmp_path / "folder"
    lay_out(folder, store, (ROOT / page).read_text(encoding="utf-8"))
    played = [step for step in steps(page) if step.reason is None]
    user = environment(program, REQUANT_CACHE=str(tmp_path / "cache"), PYTHONPATH=str(plugin(played, tmp_path)))
    for step in played:
        if step.kind == "file":
            (folder / step.name).write_text(step.text, encoding="utf-8")
    for step in played:
        if step.kind == "file":
            (folder / step.name).write_text(step.text, encoding="utf-8")
        elif step.kind == "python":
            library = {"LD_LIBRARY_PATH": str(OPERATORS.parent)}  # pages name the library without a folder
            play_block(step, folder, {**user, **library, "PYTHONPATH": ""})  # a plug-in is for the commands
        elif step.words[0] == "requant":
            play_command(step, folder, user)


def plugin(played: list[Step], folder: Path) -> Path:
    """Install what the page installs from this tree, beside the environment; return the folder."""
    target = folder / "plugins"
    for step in played:
        if step.text.startswith("pip install ./"):
            copy = shutil.copytree(ROOT / step.words[2], folder / "source")
            install = ["install", "--no-deps", "--no-build-isolation", "--target", str(target), str(copy)]
            subprocess.run([*PIP, *install], check=True, env=settings())
    return target


def play_command(step: Step, folder: Path, user: dict[str, str]) -> None:
    """Run a command. Lines of a page stand for themselves, so that what an earlier line wrote is out of the way."""
    name, parsed = context(step)
    for path in written(parsed):
        remove(folder / path)
    done = subprocess.run(
        ["sh", "-c", step.text], cwd=folder, env=user, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode in ({0, 1} if name in VERDICTS else {0}), f"{step}: {done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr, f"{step}: {done.stderr[-2000:]}"


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def play_block(step: Step, folder: Path, user: dict[str, str]) -> None:
    """Run a Python block as a program, or its tests by pytest."""
    tests = "\ndef test_" in f"\n{step.text}"
    path = folder / ("test_block.py" if tests else "block.py")
    path.write_text(PRELUDES.get(step.page, "") + step.text, encoding="utf-8")
    for output in re.findall(r'(?:quantize_model\("[^"]+", [^,]+|report_runs\([^)]*\]), "([^"]+)"', step.text):
        remove(folder / output)
        remove(folder / output.replace(".onnx", PLAN))
    call = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--requant-update"] if tests else ["python"]
    done = subprocess.run(
        [*call, path.name], cwd=folder, env=user, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{step}: {done.stdout[-2000:]}{done.stderr[-2000:]}"

"""Where CI meets the gate: the action, the hook, the pytest plugin and the worked project of ``docs/ci.md``."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml  # type: ignore[import-untyped]

from requant import RequantError
from requant.quantize import check_project
from requant.quantize.gate import pytest_plugin
from requant.quantize.gate.lock import checksum, load_baseline
from requant.quantize.project.file import load_project, parse_project

from ...installed import install_wheel

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "ci"
SAMPLES = ROOT / "sample_models"
PLUGIN = "requant.quantize.gate.pytest_plugin"
WORKFLOW = EXAMPLE / ".github" / "workflows" / "requant.yml"

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="the steps of the action are for bash")


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def lay_out(folder: Path) -> Path:
    """Copy the worked project with the model and the data that its README names."""
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    shutil.copy(SAMPLES / "digits.onnx", folder / "model.onnx")
    shutil.copy(SAMPLES / "digits.npz", folder / "digits.npz")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The worked project, with an INT8 model that is there already and its baseline; little is measured."""
    folder = lay_out(tmp_path_factory.mktemp("made") / "project")
    lighten(folder)
    check_project(folder / "requant.toml", update=True)
    text = (folder / "requant.toml").read_text()
    (folder / "requant.toml").write_text(re.sub(r"\[quantize\].*?(?=\[check\])", "", text, flags=re.DOTALL))
    return folder


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    """A copy of `made`."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def lighten(folder: Path) -> None:
    """Let the project take few samples and no time, for tests of what is around it."""
    text = (folder / "requant.toml").read_text()
    text = text.replace("seconds = 1.0", "seconds = 0\nsamples = 40").replace(
        'isa = "avx2"', 'isa = "avx2"\nsamples = 20'
    )
    (folder / "requant.toml").write_text(text)


def tools(folder: Path, python: str = sys.executable) -> dict[str, str]:
    """Return an environment with ``requant``, ``python`` and the tools of the system, and nothing else of this one."""
    own = folder / "bin"
    own.mkdir(exist_ok=True)
    for name, words in (("requant", "-m requant.cli"), ("python", "")):
        (own / name).write_text(f'#!/bin/sh\nexec "{python}" {words} "$@"\n')
        (own / name).chmod(0o755)
    home = folder / "home"
    home.mkdir(exist_ok=True)
    cache = {"REQUANT_CACHE": os.environ["REQUANT_CACHE"]} if "REQUANT_CACHE" in os.environ else {}
    return {"PATH": f"{own}:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8", **cache}


def bash(script: str, folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub does."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=dict(environment), capture_output=True, text=True, check=False)


# ------------------------------------------------------------------------------------------------- the action


ACTION = read_yaml(ROOT / "action.yml")


def action_environment(step: Mapping[str, Any], given: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables of a step of the action, with its inputs."""
    inputs = {name: str(row["default"]) for name, row in ACTION["inputs"].items()} | dict(given)
    found = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: inputs[match[1]], value)
        for name, value in step.get("env", {}).items()
    }
    job = {name: str(folder / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    return {**found, **job, "GITHUB_ACTIONS": "true", "GITHUB_ACTION_PATH": str(ROOT)}


def run_action(folder: Path, environment: Mapping[str, str], **given: str) -> subprocess.CompletedProcess[str]:
    """Run the steps of the action, without the one that installs."""
    (install, check) = ACTION["runs"]["steps"]
    assert install["if"] == "${{ inputs.install != '' }}"
    return bash(check["run"], folder, {**environment, **action_environment(check, given, folder)})


def test_the_action_refers_to_its_own_inputs_and_puts_none_of_them_into_a_script() -> None:
    text = (ROOT / "action.yml").read_text()
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(ACTION["inputs"])
    assert all("${{" not in step["run"] for step in ACTION["runs"]["steps"])
    assert all(step["shell"] == "bash" for step in ACTION["runs"]["steps"])


@pytest.mark.slow
@needs_bash
def test_the_action_checks_a_project(project: Path) -> None:
    done = run_action(project, tools(project))
    assert done.returncode == 0, done.stderr
    assert (project / "github_output").read_text() == "junit=./requant-check.xml\nok=true\n"
    assert "| ✓ | top1 |" in (project / "github_step_summary").read_text()
    assert "<testsuite " in (project / ACTION["inputs"]["junit"]["default"]).read_text()


@pytest.mark.slow
@needs_bash
def test_the_action_fails_with_annotations_for_a_pair_that_is_worse(project: Path) -> None:
    model = onnx.load(project / "model_int8.onnx")
    model.opset_import[0].version = 13
    onnx.save(model, project / "older.onnx")
    pair = {"float": "model.onnx", "model": "older.onnx", "data": "digits.npz", "baseline": "requant.lock.json"}
    done = run_action(project, tools(project), **pair, arguments="--seconds\n0")
    assert done.returncode == 1, done.stderr
    assert "\n::error title=requant check%3A opset::17 -> 13;" in done.stdout
    assert (project / "github_output").read_text().endswith("ok=false\n")


@pytest.mark.slow
@needs_bash
@pytest.mark.parametrize("absolute", [False, True])
def test_the_action_names_its_junit_file_from_where_the_job_runs(project: Path, tmp_path: Path, absolute: bool) -> None:
    junit = str(tmp_path / "a.xml") if absolute else "a.xml"
    environment = tools(project)
    (_, check) = ACTION["runs"]["steps"]
    assert check["working-directory"] == "${{ inputs.working-directory }}"
    assert ACTION["outputs"]["junit"]["value"] == "${{ steps.check.outputs.junit }}"
    given = {"working-directory": project.name, "junit": junit}
    done = bash(check["run"], project, {**environment, **action_environment(check, given, project)})
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in (project / "github_output").read_text().splitlines() if line.startswith("junit="))
    named = project.parent / line.removeprefix("junit=")  # the job runs in the folder above
    assert "<testsuite " in named.read_text()


@needs_bash
@pytest.mark.parametrize(
    ("given", "installed"),
    [
        ({}, f"{ROOT}"),
        ({"extras": "images,dask"}, f"{ROOT}[images,dask]"),
        ({"install": "requant[images]==0.1.0"}, "requant[images]==0.1.0"),
        ({"install": "requant==0.1.0", "extras": "images"}, None),
    ],
    ids=["action", "extras", "index", "both"],
)
def test_the_action_installs_what_is_asked_for(tmp_path: Path, given: dict[str, str], installed: str | None) -> None:
    environment = tools(tmp_path)
    (tmp_path / "bin" / "python").write_text(
        f'#!/bin/sh\nfor each; do last=$each; done; echo "$last" > "{tmp_path}/last"\n'
    )
    (install, _) = ACTION["runs"]["steps"]
    done = bash(install["run"], tmp_path, {**environment, **action_environment(install, given, tmp_path)})
    assert done.returncode == (2 if installed is None else 0)
    assert installed == ((tmp_path / "last").read_text().strip() if (tmp_path / "last").exists() else None)


@pytest.mark.slow
@needs_bash
def test_an_input_of_the_action_is_never_a_command(tmp_path: Path) -> None:
    done = run_action(tmp_path, tools(tmp_path), project='$(touch here); `touch here` "; touch here; "')
    assert done.returncode == 2
    assert not (tmp_path / "here").exists()


# ------------------------------------------------------------------------------------------------- the hook


@pytest.mark.slow
def test_the_hook_runs_the_check(project: Path) -> None:
    (hook,) = read_yaml(ROOT / ".pre-commit-hooks.yaml")
    (repo,) = read_yaml(EXAMPLE / ".pre-commit-config.yaml")["repos"]
    assert [each["id"] for each in repo["hooks"]] == [hook["id"]]
    for name in ("requant.toml", "requant.lock.json", "models/model.onnx", "digits.npz"):
        assert re.search(hook["files"], name)
    assert not re.search(hook["files"], "README.md")
    environment = tools(project)
    name, *arguments = shlex.split(hook["entry"]) + hook["args"]
    command = [str(project / "bin" / name), *arguments]
    assert subprocess.run(command, cwd=project, env=environment, check=False).returncode == 0
    (project / "requant.toml").write_text("model = 1")
    assert subprocess.run(command, cwd=project, env=environment, check=False).returncode == 2


# ------------------------------------------------------------------------------------------------- the plugin


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin, whether or not its entry point is installed."""
    environment = {**tools(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_plugin_is_declared_and_light(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"requant": PLUGIN}
    assert importlib.import_module(PLUGIN).requant_check
    heavy = "{'numpy', 'onnx', 'onnxruntime', 'rich', 'click'}"
    code = f"import sys, pytest; before = set(sys.modules); import {PLUGIN}; print(sorted({heavy} & set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


TESTS = """
def test_project(requant_check):
    requant_check("requant.toml")

def test_pair(requant_check):
    found = requant_check("model.onnx", "model_int8.onnx", "digits.npz", "pair.json", metrics=["sqnr"],
                          seconds=0, samples=20, fail=False)
    assert found.ok, str(found)
"""


def sealed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document of a baseline with its checksum."""
    return document | {"checksum": checksum(document)}


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((), {}, "requant_check takes the path of a requant.toml, or the float model"),
        (("f.onnx", "q.onnx"), {}, "requant_check takes the path of a requant.toml, or the float model"),
        (("f.onnx", "q.onnx", "d.npz"), {"metric": "top1"}, "named 'metric'; did you mean 'metrics'?"),
    ],
    ids=["nothing", "no data", "metric"],
)
def test_the_fixture_refuses_other_arguments(arguments: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequantError) as error:
        pytest_plugin._checked(arguments, options, update=False)
    assert says in str(error.value)


@pytest.mark.slow
def test_the_fixture_passes_and_fails_with_reasons(project: Path) -> None:
    lock = json.loads((project / "requant.lock.json").read_text())
    (project / "pair.json").write_text(json.dumps(sealed(lock | {"samples": 20, "opset": 99})))
    (project / "test_int8.py").write_text(TESTS)
    done = run_pytest(project)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "opset: 99 -> 17: the INT8 model has an older opset" in done.stdout


@pytest.mark.slow
def test_a_failing_project_fails_its_test_without_a_traceback(project: Path) -> None:
    lock = json.loads((project / "requant.lock.json").read_text())
    (project / "requant.lock.json").write_text(json.dumps(sealed(lock | {"opset": 99})))
    (project / "test_int8.py").write_text(TESTS)
    failed = run_pytest(project, "-k", "project")
    assert re.search(r"^opset: 99 -> 17: ", failed.stdout, re.MULTILINE), failed.stdout
    assert "Traceback" not in failed.stdout


@pytest.mark.slow
def test_the_plugin_writes_baselines(project: Path) -> None:
    (project / "test_int8.py").write_text(TESTS)
    (project / "requant.lock.json").unlink()
    assert "2 passed" in run_pytest(project, "--requant-update").stdout
    assert list(load_baseline(project / "pair.json").measured.scores) == ["sqnr"]
    assert "2 passed" in run_pytest(project).stdout


# ------------------------------------------------------------------------------------------------- the worked project


def steps() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield the steps of the workflow: its name, its script, and the inputs of the action where that is it."""
    for step in read_yaml(WORKFLOW)["jobs"]["int8"]["steps"]:
        uses = step.get("uses", "")
        if "requant@" in uses:
            yield step["name"], "", step["with"]
        elif "run" in step:
            yield step["name"], step["run"], {}
        else:
            assert uses.startswith("actions/")


def run_workflow(folder: Path, environment: Mapping[str, str]) -> None:
    """Run the steps of the workflow in turn; pytest is there already."""
    for name, script, given in steps():
        lines = [line for line in script.splitlines() if "-m pip install" not in line]
        done = bash("\n".join(lines), folder, environment) if script else run_action(folder, environment, **given)
        assert done.returncode == 0, f"{name}: {done.stderr}{done.stdout}"
    for pattern in ("requant-check.xml", "requant-check.json", "requant-check.md", "model_int8.onnx"):
        assert (folder / pattern).is_file()


def test_the_worked_project_is_what_its_readme_says() -> None:
    text = (EXAMPLE / "README.md").read_text()
    there = {path.relative_to(EXAMPLE).as_posix() for path in EXAMPLE.rglob("*") if path.is_file()}
    there = {name for name in there if "__pycache__" not in name and name != "README.md"}
    named = set(re.findall(r"`([\w./-]+\.\w+)`", text))
    assert there <= named
    project = load_project(EXAMPLE / "requant.toml")
    baseline = load_baseline(EXAMPLE / "requant.lock.json")
    assert list(baseline.measured.scores) == project.check["metric"]
    assert baseline.measured.speed is not None
    assert re.fullmatch(r".+ \([a-z0-9_ ]+\)", baseline.measured.speed.machine.cpu)  # as `Machine.here` writes it


@pytest.mark.slow
@needs_bash
def test_a_step_of_the_worked_project_runs(project: Path) -> None:
    (script,) = (script for _, script, _ in steps() if "--markdown" in script)
    done = bash(script, project, tools(project))
    assert done.returncode == 0, done.stderr
    assert json.loads((project / "requant-check.json").read_text())["ok"] is True


@pytest.mark.slow
@needs_bash
def test_the_steps_of_the_worked_project_run(project: Path) -> None:
    environment = {**tools(project), "PYTEST_ADDOPTS": f"-p {PLUGIN}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run_workflow(project, environment)


@pytest.mark.slow
@needs_bash
def test_the_worked_project_passes_as_it_is_where_the_wheel_is_installed(tmp_path: Path) -> None:
    """A new environment, the wheel, and its entry points; libraries are those of this environment."""
    programs = install_wheel(tmp_path)
    folder = lay_out(tmp_path / "project")
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    where = bash("python -c 'import requant; print(requant.__file__)'", folder, environment).stdout
    assert where.startswith(str(programs.parent))
    run_workflow(folder, environment)


def test_the_documentation_shows_what_there_is() -> None:
    text = (ROOT / "docs" / "ci.md").read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    kinds = [kind for kind, _ in blocks]
    assert kinds.count("yaml") == 2
    for kind, block in blocks:
        if kind == "yaml":
            yaml.safe_load(block)
        elif kind == "toml":
            parse_project(Path("requant.toml"), tomllib.loads(block))
        else:
            compile(block, "docs/ci.md", "exec")
    action = next(yaml.safe_load(block) for kind, block in blocks if kind == "yaml")
    assert set(action[0]["with"]) <= set(ACTION["inputs"])

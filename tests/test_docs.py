"""The commands in the documentation do what the documentation says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import numpy as np
import onnx_ir as ir
import pytest
import yaml  # type: ignore[import-untyped]

from requant.cli import main
from requant.quantize import Options
from requant.quantize.options.efforts import EFFORTS
from requant.quantize.project import demo

ROOT = Path(__file__).parent.parent
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]


@pytest.mark.slow
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


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_links_of_the_readme_work_on_a_package_index() -> None:
    text = (ROOT / "README.md").read_text()
    defined = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, flags=re.MULTILINE))
    used = {label or name for name, label in re.findall(r"\[([^\]\n]+)\](?:\[([^\]]+)\]|(?![(:\]]))", text)}
    assert {name for name in used if name.endswith(".md")} <= set(defined) <= used
    targets = [*re.findall(r"\]\(([^)]+)\)", text), *defined.values()]
    places = f"{URLS['Homepage']}/blob/main/", f"{URLS['Homepage'].replace('github', 'raw.githubusercontent')}/main/"
    for target in targets:
        if not target.startswith(places):
            assert target.startswith("https://")
            continue
        path, _, anchor = target.removeprefix(places[0]).removeprefix(places[1]).partition("#")
        assert (ROOT / path).is_file(), target
        assert not anchor or anchor in anchors(ROOT / path), target
    assert any(target.endswith(".png") and target.startswith(places[1]) for target in targets)


def test_the_repository_has_one_address() -> None:
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml", "action.yml")]
    files += [path for folder in (".github", "docs") for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in files:
        if path.suffix in (".md", ".yml", ".yaml", ".toml"):
            text = path.read_text(encoding="utf-8")
            assert set(re.findall(r"https://github\.com/\w+/requant\b", text)) <= {URLS["Homepage"]}, path
            assert set(re.findall(r"uses: (\w+/requant)@", text)) <= {"/".join(URLS["Homepage"].split("/")[-2:])}, path


def test_the_issue_templates_are_forms_that_name_commands_there_are() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert forms
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form)
        asked = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert len(asked) == len(set(asked)) > 0
        named = set(re.findall(r"'requant ([a-z]+)", path.read_text(encoding="utf-8")))
        assert named <= set(main.list_commands(click.Context(main)))


def test_the_readme_names_what_the_sample_models_have() -> None:
    text, model = (ROOT / "README.md").read_text(), ir.load(ROOT / "sample_models" / "digits.onnx")
    axes = {str(axis) for value in model.graph.inputs for axis in value.shape or ()}
    assert {*re.findall(r"--dim (\w+)=", text)} <= axes
    nodes = re.findall(r"--strategy [\w-]+,([^=\s]+)=", text)
    assert nodes
    assert {*nodes} <= {node.name for node in model.graph}
    assert {*re.findall(r"requant_demo/([\w.]+)", text)} == {demo.MODEL, demo.INT8, demo.DATA}


def test_the_documented_default_of_the_range_rule_is_the_default() -> None:
    text = (ROOT / "docs" / "calibration.md").read_text()
    (default,) = re.findall(r"^\| `(\w+)` \|.*; the default \|$", text, flags=re.MULTILINE)
    (low,) = re.findall(r"^\| `(\w+)` \|.*; the default of `--effort low` \|$", text, flags=re.MULTILINE)
    assert (default, low) == (EFFORTS["medium"].rule, EFFORTS["low"].rule)
    assert Options().effort == "medium"


@pytest.mark.slow
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

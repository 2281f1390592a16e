"""Transforms of other packages: the documented example as it is installed, and plug-ins that are broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import onnx
import onnx.parser
import pytest
from click.testing import CliRunner, Result

from requant.cli import main
from requant.transforms import GROUPS, REGISTRY, load_plugins, parse_groups
from requant.transforms.pipelines import plugins

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "plugin"

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
net (float[1,4] x) => (float[1,4] y) {
  [one] a = Relu(x)
  [two] b = Relu(a)
  [three] y = Neg(b)
}
"""


def requant(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``requant`` in a process of its own that finds packages in `site`."""
    return subprocess.run(
        [sys.executable, "-m", "requant.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )


def invoke(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(main, list(map(str, arguments)), prog_name="requant")


def install(site: Path, name: str, code: str | None) -> None:
    """Put a distribution with one module into `site`, as an installer leaves it; None is a module that is missing."""
    if code is not None:
        (site / f"{name}.py").write_text(code)
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[requant.transforms]\n{name} = {name}\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "m.onnx")
    return tmp_path


@pytest.mark.slow
def test_the_example_as_an_installed_package(site: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    source = tmp_path_factory.mktemp("source") / "plugin"  # building leaves files behind
    shutil.copytree(EXAMPLE, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-index"]
    done = subprocess.run(
        [*pip, "--no-build-isolation", "--no-deps", "--target", site, source],
        env={**os.environ, "PYTHONWARNINGS": ""},  # those of pip are not ours
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(requant(site, "transforms", "merge_relus", "--json").stdout)["merge_relus"]
    assert found["groups"] == {"simplify": 45}
    assert found["before"] == "y = Relu(Relu(x))"
    assert [option["name"] for option in found["options"]] == ["keep"]
    done = requant(site, "transform", "m.onnx", "out.onnx", "--group", "simplify")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    at = lines.index("merge_relus: 1 applied")
    assert lines[at - 1].startswith("explicit_pads: 0 applied")
    assert [node.op_type for node in onnx.load(site / "out.onnx").graph.node] == ["Relu", "Neg"]
    kept = requant(site, "transform", "m.onnx", "kept.onnx", "--transforms", "merge_relus(keep=two)")
    assert kept.stderr.splitlines() == ["merge_relus(keep=two): 0 applied, 1 kept"]


HEAD = "from requant.transforms import Change, join, transform\n"
FUNCTION = '\ndef mine(model) -> Change:\n    """Do it."""\n    return Change()\n'

BROKEN = {
    "missing": (None, "ModuleNotFoundError: No module named 'plug'"),
    "syntax": ("def", "SyntaxError: invalid syntax (plug.py, line 1)"),
    "exit": ("raise SystemExit('no licence')", "SystemExit: no licence"),
    "name-taken": (
        f"{HEAD}@transform('remove_nodes'){FUNCTION}",
        "TypeError: two transforms named 'remove_nodes'",
    ),
    "no-page": (
        f"{HEAD}@transform('mine')\ndef mine(model): pass",
        "TypeError: transform 'mine' has no docstring",
    ),
    "unknown-step": (
        f"{HEAD}@transform('mine'){FUNCTION}\njoin('simplify', 5, 'mien')",
        "PipelineError: no transform named 'mien'; did you mean 'mine'?",
    ),
    "bad-option": (
        f"{HEAD}join('simplify', 5, 'remove_nodes(max=1)')",
        "PipelineError: remove_nodes has no parameter 'max'",
    ),
    "wrong-order": (
        f"{HEAD}@transform('mine', after=('fold_constants',)){FUNCTION}\njoin('simplify', 5, 'mine')",
        "PipelineError: mine must come after fold_constants, which this pipeline runs later",
    ),
    "after-one-name": (
        f"{HEAD}@transform('mine', after='fold_constants'){FUNCTION}",
        "TypeError: transform 'mine': after must be a tuple of names, not the text 'fold_constants'",
    ),
    "no-model": (
        f"{HEAD}@transform('mine')" + FUNCTION.replace("(model)", "()"),
        "TypeError: transform 'mine': the first parameter must be the model",
    ),
    "common-option": (
        f"{HEAD}@transform('mine')" + FUNCTION.replace("(model)", "(model, *, ignore_errors: bool = True)"),
        "TypeError: transform 'mine': 'ignore_errors' is an option of every step",
    ),
    "bad-default": (
        f"{HEAD}@transform('mine')" + FUNCTION.replace("(model)", "(model, *, n: int = 'three')"),
        "TypeError: transform 'mine': the default of 'n' is no int",
    ),
    "bad-group": (
        f"{HEAD}join('my group', 5, 'fold_constants')",
        "TransformError: no group can be named 'my group': a name is made of letters, digits and '_'",
    ),
}


@pytest.mark.parametrize(("code", "said"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_plugin_is_one_line_and_leaves_nothing(
    code: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if code is not None:
        (tmp_path / "plug.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "LOADED", {})
    monkeypatch.setattr(plugins, "_found", lambda: (EntryPoint("plug", "plug", plugins.ENTRY_POINTS),))
    before, simplify = list(REGISTRY), str(parse_groups("simplify"))
    try:
        (line,) = load_plugins()
    finally:
        sys.modules.pop("plug", None)
    assert line.startswith(f"plug-in 'plug' (plug) is left out: {said}")
    assert load_plugins() == (line,)
    assert [record.getMessage() for record in caplog.records] == [f"requant: {line}"]
    assert (list(REGISTRY), str(parse_groups("simplify")), "my group" in GROUPS) == (before, simplify, False)


@pytest.mark.slow
def test_a_broken_plugin_does_not_keep_others_out(site: Path) -> None:
    install(site, "broken", "1 / 0")
    install(site, "sound", f"{HEAD}@transform('mine'){FUNCTION}\njoin('mine', 1, 'mine')")
    done = requant(site, "transforms", "--groups")
    assert done.stderr.splitlines() == [
        "requant: plug-in 'broken' (broken) is left out: ZeroDivisionError: division by zero"
    ]
    assert "mine: mine" in done.stdout.splitlines()
    unknown = requant(site, "transforms", "theirs")
    assert unknown.returncode == 2
    assert len(unknown.stderr.splitlines()) == 2
    assert unknown.stderr.splitlines()[1].startswith("requant: no transform named 'theirs'")


@pytest.mark.slow
def test_commands_without_transforms_do_not_import_plugins(site: Path) -> None:
    install(site, "broken", "1 / 0")
    done = requant(site, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert requant(site, "ops", "Relu", "--json").stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("text", [b"[requant.transforms]\nx\n", b"\xff\xfe[requant"], ids=["no value", "no text"])
def test_a_damaged_list_of_plugins_leaves_the_others(site: Path, text: bytes) -> None:
    install(site, "good", f"{HEAD}@transform('mine'){FUNCTION}")
    install(site, "bad", "")
    (site / "bad-1.0.dist-info" / "entry_points.txt").write_bytes(text)
    done = requant(site, "transforms", "mine")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "mine")
    assert done.stderr.startswith("requant: the entry_points.txt of an installed distribution is damaged")
    assert len({*done.stderr.splitlines()}) == 1


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise KeyError('zz')", "broken: broken: KeyError: 'zz'"),
        ("return None", "broken: broken: returned NoneType, not a Change"),
    ],
    ids=["raises", "returns nothing"],
)
def test_a_transform_of_a_plugin_that_fails_is_a_refusal(
    site: Path, body: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import onnx_ir as ir\nfrom requant.transforms import Change, transform\n\n\n"
        f'@transform("broken")\ndef broken(model: ir.Model) -> Change:\n    """Fail."""\n    {body}\n'
    )
    install(site, "broken", code)
    monkeypatch.chdir(site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(plugins, "LOADED", {})
    plugins._found.cache_clear()
    try:
        done = invoke("transform", "m.onnx", "o.onnx", "--transforms", "broken")
        left = invoke("transform", "m.onnx", "o.onnx", "--transforms", "broken(ignore_errors=true)")
    finally:
        REGISTRY.pop("broken", None)
        sys.modules.pop("broken", None)
        plugins._found.cache_clear()
    assert (done.exit_code, done.stdout) == (2, "")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert left.exit_code == 0
    assert (site / "o.onnx").exists()

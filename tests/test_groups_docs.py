"""docs/transforms.md, docs/tools.md and docs/plugins.md agree with the code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from requant.cli import main
from requant.transforms import REGISTRY, parse_groups
from requant.transforms.pipelines.describe import reference

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def test_the_pages_are_those_of_the_docstrings() -> None:
    current = (DOCS / "transforms.md").read_text(encoding="utf-8")
    assert current == reference(REGISTRY.values()), "run: requant transforms --markdown > docs/transforms.md"


def test_the_command_prints_them() -> None:
    assert CliRunner().invoke(main, ["transforms", "--markdown"]).stdout == reference(REGISTRY.values())


def test_every_transform_has_before_after_and_left_alone() -> None:
    from requant.transforms.pipelines.describe import describe

    for transform in REGISTRY.values():
        found = describe(transform)
        assert found["before"], transform.name
        assert found["result"], transform.name


@pytest.mark.slow
def test_the_commands_of_the_tools_run(tmp_path: Path) -> None:
    if shutil.which("sh") is None:
        pytest.skip("needs a POSIX shell")
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / "tools.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    script = "set -e\nrequant() { " + f"'{sys.executable}' -m requant.cli \"$@\"; }}\n"
    (tmp_path / "sample_models").symlink_to(ROOT / "sample_models")
    done = subprocess.run(
        ["sh", "-c", script + "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    text = (DOCS / "tools.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"```\n(- node bn1.*?)```", text, flags=re.DOTALL)
    assert told in done.stdout
    assert len(list((tmp_path / "steps").iterdir())) == len(parse_groups("simplify").steps)


def test_the_example_of_a_plugin_is_the_one_in_the_folder() -> None:
    text = (DOCS / "plugins.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    source = (DOCS / "examples" / "plugin" / "requant_merge_relus.py").read_text(encoding="utf-8")
    assert all(part.strip() in source for part in code.split("    ...\n"))
    (entry,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    assert entry in (DOCS / "examples" / "plugin" / "pyproject.toml").read_text(encoding="utf-8")

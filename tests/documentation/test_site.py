"""The documentation site: every page is in the navigation, every link leads somewhere, made pages are up to date."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

sys.path.insert(0, str(ROOT))
pages: Any = importlib.import_module("website.pages")
reference: Any = importlib.import_module("website.reference")
figures: Any = importlib.import_module("website.figures")
sys.path.remove(str(ROOT))


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere() -> None:
    assert pages.problems() == []


def test_a_link_to_nothing_and_a_page_out_of_the_navigation_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.md").write_text("# A\n\n[b](b.md#nothing) [c](c.md) `[d](d.md)`\n\n```\n[e](e.md)\n```\n")
    (docs / "b.md").write_text("# B\n\n## Some `code`, and more\n\n[here](#some-code-and-more)\n")
    for name in (*pages.FROM_ROOT, "README.md"):
        (tmp_path / name).write_text(f"# {name}\n")
    configuration = tmp_path / "zensical.toml"
    nav = ["a.md", "gone.md", *pages.FROM_ROOT]
    configuration.write_text(f"[project]\nnav = {nav}\n".replace("'", '"'))
    for name, path in (("ROOT", tmp_path), ("DOCS", docs), ("CONFIGURATION", configuration)):
        monkeypatch.setattr(pages, name, path)
    assert pages.problems() == [
        "zensical.toml: no page gone.md",
        "b.md: not in the navigation of zensical.toml",
        "docs/a.md: link to nothing: b.md#nothing",
        "docs/a.md: link to nothing: c.md",
    ]


def test_pages_of_the_root_are_reached_inside_the_site(tmp_path: Path) -> None:
    pages.write(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")} == set(pages.sources())
    for path in tmp_path.rglob("*.md"):
        for link in pages.links(path):
            target = (path.parent / link.partition("#")[0]).resolve()
            assert target.is_relative_to(tmp_path), link
            assert target.exists(), link
    assert "(SECURITY.md)" in (tmp_path / "trust.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["reference/commands.md", "reference/project-file.md", "reference/python.md"])
def test_the_reference_is_that_of_the_program(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == reference.pages()[name], "run: make reference"


def test_figures_are_drawn_and_named() -> None:
    shown = re.findall(r"images/(figure-\w+)\.svg", (DOCS / "how-it-works.md").read_text(encoding="utf-8"))
    assert shown == [f"figure-{name}" for name in figures.FIGURES]
    for name, draw in figures.FIGURES.items():
        stored = ET.fromstring((DOCS / "images" / f"figure-{name}.svg").read_text(encoding="utf-8"))
        drawn = ET.fromstring(str(draw()))
        texts = [[node.text for node in figure.iter() if node.text and node.text.strip()] for figure in (stored, drawn)]
        assert texts[0] == texts[1], "run: make reference"


def test_the_site_asks_no_other_host() -> None:
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    assert project["theme"]["font"] is False
    assert not [path for path in pages.STYLE if "://" in path.read_text(encoding="utf-8")]
    assert not any("://" in str(project.get(key, "")) for key in ("extra_css", "extra_javascript"))

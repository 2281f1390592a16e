"""The pages of the documentation site: those of docs/, and three pages of the root of the repository.

    python -m website.pages

The program writes the pages to build/pages, where the site generator finds them. It stops at a page that is not in the
navigation, at an entry of the navigation without a page, and at a link to nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONFIGURATION = ROOT / "zensical.toml"
STYLE = [ROOT / "website" / name for name in ("site.css", "site.js")]
PAGES = ROOT / "build" / "pages"
FROM_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
FENCE = re.compile(r"^(```+|~~~+).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def sources() -> dict[str, Path]:
    """Return the file of each page, by the name of the page in the site."""
    found = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    return found | {name: ROOT / name for name in FROM_ROOT}


def navigation() -> list[str]:
    """Return the pages of the navigation, in order."""
    configuration = tomllib.loads(CONFIGURATION.read_text(encoding="utf-8"))
    return list(_entries(configuration["project"]["nav"]))


def _entries(nav: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _entries(part)


def problems() -> list[str]:
    """Return what is wrong with the navigation and with the links, one line each."""
    pages, listed = sources(), navigation()
    found = [f"zensical.toml: no page {name}" for name in listed if name not in pages]
    found += [f"zensical.toml: {name} is listed twice" for name in sorted({n for n in listed if listed.count(n) > 1})]
    found += [f"{name}: not in the navigation of zensical.toml" for name in pages if name not in listed]
    for path in [*pages.values(), ROOT / "README.md"]:
        found += [
            f"{path.relative_to(ROOT)}: link to nothing: {link}" for link in links(path) if not _leads(path, link)
        ]
    return found


def links(path: Path) -> list[str]:
    """Return the links and images of a page that stay in the repository."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    text = re.sub(r"`[^`\n]*`(?!\])", "", text)
    return [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]


def _leads(path: Path, link: str) -> bool:
    """Return whether a link of a page leads to a file, and its fragment to a heading."""
    target, _, fragment = unquote(link).partition("#")
    file = (path.parent / target).resolve() if target else path
    if not file.is_file() or not file.is_relative_to(ROOT):
        return False
    return not fragment or fragment in anchors(file)


def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())
        number = 1
        while (name := slug if number == 1 else f"{slug}_{number - 1}") in found:
            number += 1
        found.add(name)
    return found


def page(name: str, path: Path) -> str:
    """Return the text of a page in the site: links to pages of the root lead to their place in the site."""
    files = {file.resolve(): other for other, file in sources().items()} | {ROOT / "README.md": "index.md"}

    def moved(match: re.Match[str]) -> str:
        target, mark, fragment = match[1].partition("#")
        file = (path.parent / unquote(target)).resolve()
        if re.match(r"[a-z]+:", match[1]) or not target or file not in files:
            return match[1]
        return os.path.relpath(files[file], Path(name).parent).replace(os.sep, "/") + mark + fragment

    return LINK.sub(moved, path.read_text(encoding="utf-8"))


def write(folder: Path) -> None:
    """Write all pages, and the files beside them, to a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    for name, path in sources().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(page(name, path), encoding="utf-8")
    for path in STYLE:
        shutil.copy(path, folder)


def main() -> None:
    """Check and write the pages."""
    if found := problems():
        sys.exit("\n".join(found))
    write(PAGES)


if __name__ == "__main__":
    main()

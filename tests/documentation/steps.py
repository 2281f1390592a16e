"""The steps of a page of the documentation: its commands, its Python blocks, and the files that it shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MADE = ("docs/transforms.md",)
"""Pages that show code of other grammars: pipelines and formulas."""
NEEDS = re.compile(r"#\s*(needs [^\n]+)")
NAMED = re.compile(r"^# ([\w/.-]+\.(?:py|toml|yml))$")
START = re.compile(r"(?:\$ )?(requant|pip|make|python|python3|\.venv/bin/python)\s")
REASONS = {
    "needs a cluster",
    "needs uv, and an hour",
    "needs the package transformers",
}
"""The reasons why a step is not played. A page shows the reason in a comment of the step."""


@dataclass(frozen=True)
class Step:
    """A step of a page.

    Attributes:
        page: The path of the page in the repository.
        line: The number of its first line.
        kind: ``command``, ``python``, or ``file``, which has a name in its first line.
        text: The text.
    """

    page: str
    line: int
    kind: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why the step is not played; None if it is played."""
        match = NEEDS.search(self.text)
        return match[1].strip() if match else None

    @property
    def words(self) -> list[str]:
        """The words of a command, without redirections and what follows them."""
        words = shlex.split(self.text.replace("\\\n", " "), comments=True)
        ends = [number for number, word in enumerate(words) if word in (">", "||", "&&", "|")]
        return words[: ends[0]] if ends else words

    @property
    def name(self) -> str:
        """The name of a file."""
        match = NAMED.match(self.text.splitlines()[0])
        return match[1] if match else ""

    def __str__(self) -> str:
        """Return where the step is."""
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return README.md and the pages of docs/ with steps to play."""
    found = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
    return [page for page in found if not page.startswith(MADE) and steps(page)]


def steps(page: str) -> list[Step]:
    """Return the steps of a page in order."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return list(_steps(page, lines))


def _steps(page: str, lines: list[str]) -> Iterator[Step]:
    """Yield the steps of a page: fenced blocks, and indented commands outside of them."""
    number = 0
    while number < len(lines):
        if lines[number].startswith("```"):
            end = next(n for n in range(number + 1, len(lines)) if lines[n].startswith("```"))
            yield from _fenced(page, number + 1, lines[number][3:].strip(), lines[number + 1 : end])
            number = end + 1
        elif lines[number].startswith("    ") and START.match(lines[number].strip()):
            length = _length(lines[number:])
            yield Step(page, number + 1, "command", "\n".join(line[4:] for line in lines[number : number + length]))
            number += length
        else:
            number += 1


def _fenced(page: str, start: int, language: str, block: list[str]) -> Iterator[Step]:
    """Yield the steps of a fenced block."""
    text = "\n".join(block)
    if language in ("python", "toml", "yaml") and block and NAMED.match(block[0]):
        yield Step(page, start + 1, "file", text + "\n")
    elif language == "python":
        yield Step(page, start + 1, "python", text + "\n")
    elif language in ("sh", ""):
        number = 0
        while number < len(block):
            command = START.match(block[number]) if language == "sh" else block[number].startswith("$ requant")
            length = _length(block[number:]) if command else 1
            if command:
                lines = block[number : number + length]
                yield Step(page, start + number + 1, "command", "\n".join(lines).removeprefix("$ "))
            number += length


def _length(lines: list[str]) -> int:
    """Return how many lines a command takes: quotes are closed, and no line ends in a backslash."""
    for length in range(1, len(lines) + 1):
        text = "\n".join(lines[:length])
        try:
            shlex.split(text, comments=True)
        except ValueError:
            continue
        if not lines[length - 1].endswith("\\"):
            return length
    raise ValueError(f"a command without an end: {lines[0]}")

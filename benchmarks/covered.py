"""Print which share of the package's lines and branches the tests ran, after ``coverage combine``.

    python -m benchmarks.covered

The exit code is 1 if fewer than 95 % of the lines or 90 % of the branches ran.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from coverage import Coverage

LEAST_LINES, LEAST_BRANCHES = 0.95, 0.90
COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")
ROOMS = ("calibration", "transforms", "quantize")


def counted() -> dict[str, list[int]]:
    """Return `COUNTS` by part: a package, a room of ``quantize``, or ``.`` for the root; and of all together."""
    coverage = Coverage()
    coverage.load()
    with tempfile.TemporaryDirectory() as folder:
        coverage.json_report(outfile=f"{folder}/coverage.json")
        report = json.loads(Path(folder, "coverage.json").read_text(encoding="utf-8"))
    parts: dict[str, list[int]] = {}
    for name, file in sorted(report["files"].items()):
        path = Path(name)
        if path.parent == Path() or path.parts[0] in ROOMS:  # a test may import a program beside the package
            add(parts.setdefault(part(path), [0] * len(COUNTS)), file["summary"])
    parts["all"] = [sum(column) for column in zip(*parts.values(), strict=True)]
    return parts


def add(counts: list[int], summary: Mapping[str, int]) -> None:
    """Add the counts of one file."""
    for position, name in enumerate(COUNTS):
        counts[position] += summary[name]


def part(path: Path) -> str:
    """Return the part of the package that holds a file."""
    folders = path.parent.parts
    return "/".join(folders[:2]) if folders[:1] and folders[0] in ROOMS else "."


def shares(counts: list[int]) -> tuple[float, float]:
    """Return the shares of lines and of branches."""
    lines, of_lines, branches, of_branches = counts
    return lines / max(1, of_lines), branches / of_branches if of_branches else 1.0


def main() -> None:
    """Print the shares of each part and of all."""
    found = counted()
    print(f"{'':28} {'lines':>7} {'branches':>9}")
    for name, counts in found.items():
        lines, branches = shares(counts)
        print(f"{name:28} {lines:7.1%} {branches:9.1%}")
    lines, branches = shares(found["all"])
    sys.exit(lines < LEAST_LINES or branches < LEAST_BRANCHES)


if __name__ == "__main__":
    main()

"""The result of a check as JUnit XML, Markdown and GitHub annotations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from ... import RequantError
from ...system.apart import PathLike, check_apart
from ...system.printable import CELL, printable, printable_lines, sentence
from ...system.regular import open_waitless, reason_of
from ...system.writing import write_atomically
from .judge import Line, Status
from .run import Check

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The environment variable with the path of the summary of a GitHub job."""
MARKS: Mapping[Status, str] = {Status.OK: "✓", Status.FAIL: "✗", Status.SKIP: "–"}  # noqa: RUF001

COLUMNS = ("", "check", "baseline", "now", "tolerance")


def verdict(check: Check) -> str:
    """Return the result of a check in one sentence."""
    if check.updated:
        return f"{check.baseline}: written"
    count = len(check.findings)
    skipped = [line.name for line in check.lines if line.status is Status.SKIP]
    also = f"; not compared: {', '.join(skipped)}" if skipped else ""
    if not count:
        return f"{check.int8_model}: nothing is worse than in {check.baseline}{also}"
    return f"{check.int8_model}: {count} of {len(check.lines)} checks fail against {check.baseline}{also}"


def junit(check: Check) -> bytes:
    """Return JUnit XML with a test case for each line of the check."""
    counts = {status: sum(line.status is status for line in check.lines) for status in Status}
    totals = {
        "name": "requant check",
        "tests": str(len(check.lines)),
        "failures": str(counts[Status.FAIL]),
        "errors": "0",
        "skipped": str(counts[Status.SKIP]),
    }
    suites = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(suites, "testsuite", totals)
    for line in check.lines:
        named = {"classname": "requant.check", "name": printable(line.name), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", named)
        if line.status is Status.FAIL:
            failed = ElementTree.SubElement(case, "failure", {"message": printable(line.reason), "type": "regression"})
            failed.text = printable_lines("\n".join((_numbers(line), *line.layers)))
        elif line.status is Status.SKIP:
            ElementTree.SubElement(case, "skipped", {"message": printable(line.reason)})
        else:
            ElementTree.SubElement(case, "system-out").text = printable(
                "; ".join(filter(None, (_numbers(line), line.reason)))
            )
    ElementTree.indent(suites)
    return bytes(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)) + b"\n"


def _numbers(line: Line) -> str:
    """Return the value of the baseline, the measured one, and the tolerance."""
    return f"{line.baseline} -> {line.measured} (tolerance {line.tolerance})"


def markdown(check: Check) -> str:
    """Return a section of GitHub Markdown: the verdict, the table, and the reasons with the layers."""
    sign = "✅" if check.ok else "❌"
    rows = [
        f"### {sign} {_cell(verdict(check))}",
        "",
        "| | check | baseline | now | tolerance |",
        "|---|---|---:|---:|---:|",
    ]
    for line in check.lines:
        cells = (line.name, line.baseline, line.measured, line.tolerance)
        rows.append(f"| {MARKS[line.status]} | " + " | ".join(map(_cell, cells)) + " |")
    explained = [line for line in check.lines if line.reason]
    rows += [""] if explained else []
    for line in explained:
        strong = f"**{_cell(line.name)}**" if line.status is Status.FAIL else _cell(line.name)
        rows.append(f"- {strong}: {_cell(line.reason)}")
        rows += [f"  - `{sentence(layer, CELL).replace('`', '')}`" for layer in line.layers]
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    """Return a text as one line without Markdown syntax."""
    return _SYNTAX.sub(r"\\\g<0>", sentence(text, CELL))


_SYNTAX = re.compile(r"[\\`*_\[\]<>|#~$&]|^[-+](?=\s)")


def github_lines(check: Check) -> Iterator[str]:
    """Yield a GitHub workflow command for each line that fails or is skipped; GitHub shows them on top of the job."""
    for line in check.lines:
        if line.status is Status.OK:
            continue
        level = "error" if line.status is Status.FAIL else "warning"
        found = f"{line.baseline} -> {line.measured}" if line.status is Status.FAIL else "not compared"
        message = printable_lines("; ".join((found, line.reason, *line.layers)))
        yield f"::{level} title={_escaped(printable(f'requant check: {line.name}'), ':,')}::{_escaped(message)}"


def _escaped(text: str, more: str = "") -> str:
    """Return a text with the special characters of workflow commands escaped: a newline is ``%0A``."""
    return "".join(f"%{ord(char):02X}" if char in f"%\r\n{more}" else char for char in text)


def check_summary(environment: Mapping[str, str], inputs: Sequence[PathLike]) -> None:
    """Refuse a summary of the job that is an input, or that cannot be written.

    Raises:
        RequantError: It is refused.
    """
    summary = environment.get(SUMMARY)
    if not summary:
        return
    check_apart({f"the file of ${SUMMARY}": summary}, inputs)
    folder = Path(summary).absolute().parent
    if os.path.isdir(summary) or not os.path.isdir(folder):
        what = "is a folder" if os.path.isdir(folder) else f"no folder {str(folder)!r} to write to"
        raise RequantError(f"{summary}: {what}; ${SUMMARY} must name a file")


def write_outputs(
    check: Check, junit_path: Path | None, markdown_path: Path | None, environment: Mapping[str, str]
) -> None:
    """Write the requested files, and append to the summary of the job if there is one.

    Raises:
        RequantError: A file cannot be written.
    """
    for path, text in ((junit_path, junit(check)), (markdown_path, markdown(check).encode())):
        if path is not None:
            write_atomically(path, text)
    summary = environment.get(SUMMARY)
    if summary:
        try:
            with open(summary, "a", encoding="utf-8", opener=open_waitless) as file:
                file.write(markdown(check))
        except OSError as error:
            raise RequantError(f"{summary}: cannot be written: {reason_of(error)}") from error

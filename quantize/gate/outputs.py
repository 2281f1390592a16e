"""What came of a check, for people, for CI servers, and for code review: table, JUnit XML, Markdown, annotations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

from ... import RequantError
from ...calibration.files import write_atomically
from .judge import Line, Status
from .run import Check

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The environment variable that names the file of a job's summary on GitHub."""
ACTIONS = "GITHUB_ACTIONS"
"""The environment variable that is ``true`` in a job on GitHub."""
MARKS: Mapping[Status, str] = {Status.OK: "✓", Status.FAIL: "✗", Status.SKIP: "–"}  # noqa: RUF001

COLUMNS = ("", "check", "baseline", "now", "tolerance")


def verdict(check: Check) -> str:
    """Return what came of a check in one sentence."""
    if check.updated:
        return f"{check.baseline}: written"
    count = len(check.findings)
    if not count:
        return f"{check.int8_model}: nothing is worse than in {check.baseline}"
    return f"{check.int8_model}: {count} of {len(check.lines)} checks fail against {check.baseline}"


def junit(check: Check) -> bytes:
    """Return JUnit XML: a test case for each line, skipped or failed with its reason."""
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
        case = ElementTree.SubElement(suite, "testcase", {"classname": "requant.check", "name": line.name, "time": "0"})
        if line.status is Status.FAIL:
            failed = ElementTree.SubElement(case, "failure", {"message": _printable(line.reason), "type": "regression"})
            failed.text = _printable("\n".join((_numbers(line), *line.layers)))
        elif line.status is Status.SKIP:
            ElementTree.SubElement(case, "skipped", {"message": _printable(line.reason)})
        else:
            ElementTree.SubElement(case, "system-out").text = _printable(
                "; ".join(filter(None, (_numbers(line), line.reason)))
            )
    ElementTree.indent(suites)
    return bytes(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)) + b"\n"


def _numbers(line: Line) -> str:
    """Return what was and what is."""
    return f"{line.baseline} -> {line.measured} (tolerance {line.tolerance})"


def _printable(text: str) -> str:
    """Return a text without the characters that XML cannot hold."""
    return "".join(char if char in "\n\t" or char.isprintable() else "?" for char in text)


def markdown(check: Check) -> str:
    """Return a section of GitHub's Markdown: the verdict, the table, and what fails with the layers that changed."""
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
    told = [line for line in check.lines if line.reason]
    rows += [""] if told else []
    for line in told:
        strong = f"**{_cell(line.name)}**" if line.status is Status.FAIL else _cell(line.name)
        rows.append(f"- {strong}: {_cell(line.reason)}")
        rows += [f"  - `{layer.replace('`', '')}`" for layer in line.layers]
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    """Return a text that Markdown shows as it is."""
    for char in "\\`*_[]<>|":
        text = text.replace(char, f"\\{char}")
    return " ".join(text.split())


def github_lines(check: Check) -> Iterator[str]:
    """Yield a workflow command of GitHub for each finding, which shows it at the top of the job."""
    for line in check.findings:
        message = "; ".join((f"{line.baseline} -> {line.measured}", line.reason, *line.layers))
        yield f"::error title={_escaped(f'requant check: {line.name}', ':,')}::{_escaped(message)}"


def _escaped(text: str, more: str = "") -> str:
    """Return a text as a workflow command takes it: what would end it is written as ``%0A``."""
    return "".join(f"%{ord(char):02X}" if char in f"%\r\n{more}" else char for char in text)


def write_outputs(
    check: Check, junit_path: Path | None, markdown_path: Path | None, environment: Mapping[str, str]
) -> None:
    """Write the files that were asked for, and append to the summary of the job where there is one.

    Raises:
        RequantError: One cannot be written.
    """
    for path, text in ((junit_path, junit(check)), (markdown_path, markdown(check).encode())):
        if path is not None:
            try:
                write_atomically(path, text)
            except OSError as error:
                raise RequantError(f"{path}: cannot be written: {error.strerror}") from error
    summary = environment.get(SUMMARY)
    if summary:
        try:
            with open(summary, "a", encoding="utf-8") as file:
                file.write(markdown(check))
        except OSError as error:
            raise RequantError(f"{summary}: cannot be written: {error.strerror}") from error

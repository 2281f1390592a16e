"""Write reports to files. Invalid paths are refused before any work; a page is written completely or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ... import RequantError
from ...system.apart import PathLike
from ...system.writing import write_atomically
from ..model.files import check_output, load_model
from ..result import Result
from ..steps.deliver import Run
from .gather import collect, finished
from .graph import graph_of
from .record import Record, load_record
from .render import render_comparison, render_report, render_view

PAGES = (".html", ".htm")
RECORD = ".json"


def check_reports(reports: Iterable[PathLike], taken: Iterable[PathLike], source: PathLike, *, force: bool) -> None:
    """Refuse paths that a report cannot be written to.

    Args:
        reports: Paths of pages and records.
        taken: The other outputs of the run.
        source: The model.
        force: Whether existing files may be overwritten.

    Raises:
        RequantError: A suffix is not .html, .htm or .json, two paths are the same, or a path cannot be written to.
    """
    seen = {os.path.realpath(path) for path in taken}
    for report in reports:
        if Path(report).suffix.lower() not in (*PAGES, RECORD):
            raise RequantError(f"{report}: a report is an .html page or a .json run record")
        if os.path.realpath(report) in seen:
            raise RequantError(f"{report}: two outputs have this path; give each its own")
        seen.add(os.path.realpath(report))
        check_output(report, source, force=force)


def write_reports(record: Record, reports: Iterable[PathLike]) -> None:
    """Write a record as pages and as JSON, by the suffix of each path.

    Raises:
        RequantError: A file cannot be written.
    """
    for report in reports:
        if Path(report).suffix.lower() == RECORD:
            text = json.dumps(record.to_json(), allow_nan=False) + "\n"
        else:
            text = render_report(record)
        write_atomically(report, text.encode(errors="replace"))


@dataclass
class Recorder:
    """Collects the record of a run and writes its reports.

    Attributes:
        reports: Paths of pages and records.
        command: The command line that repeats the run.
        record: The record; None until a model is written.
    """

    reports: Sequence[PathLike]
    command: str = ""
    record: Record | None = None

    def look(self, run: Run) -> None:
        """Collect the record; `quantize_model` and `search_model` call this."""
        if self.reports:
            self.record = collect(run, self.command)

    def write(self, result: Result) -> None:
        """Write the reports.

        Raises:
            RequantError: A file cannot be written.
        """
        if self.record is not None:
            write_reports(finished(self.record, result), self.reports)


def report_runs(records: Sequence[PathLike], output: PathLike, *, force: bool = False) -> list[Record]:
    """Write the page of one run record, or a page that compares several records.

    Args:
        records: Run records, at least one.
        output: The page to write.
        force: Whether to overwrite an existing file.

    Returns:
        The records.

    Raises:
        RequantError: A record cannot be read, or the page cannot be written.
    """
    if not records:
        raise RequantError("no run record is given")
    _check_page(output, records, force=force)
    found = [load_record(path) for path in records]
    text = render_report(found[0]) if len(found) == 1 else render_comparison(found)
    write_atomically(output, text.encode(errors="replace"))
    return found


def view_model(model: PathLike, output: PathLike, *, force: bool = False) -> int:
    """Write the graph of an ONNX model as a page.

    Args:
        model: The model.
        output: The page to write.
        force: Whether to overwrite an existing file.

    Returns:
        The number of nodes.

    Raises:
        RequantError: The model cannot be loaded, or the page cannot be written.
    """
    _check_page(output, [model], force=force)
    graph = graph_of(load_model(model))
    write_atomically(output, render_view(graph, Path(model).name, os.fspath(model)).encode(errors="replace"))
    return len(graph.nodes)


def _check_page(output: PathLike, sources: Iterable[PathLike], *, force: bool) -> None:
    """Refuse an output path.

    Raises:
        RequantError: The path does not end in .html, is one of the sources, or cannot be written to.
    """
    if Path(output).suffix.lower() not in PAGES:
        raise RequantError(f"{output}: a page is an .html file")
    for source in sources:
        check_output(output, source, force=force)

"""Quantize by the options of `requant quantize`, from a command line or a ``requant.toml``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import RequantError
from ...calibration import DataSpec
from ...calibration.data.text import SUFFIXES as TABLES
from ..accuracy.drop import parse_drop
from ..accuracy.metrics import metric_named
from ..api import quantize_model, search_model
from ..options.build import build_data, build_options, open_execution
from ..options.declared import AUTO, SEARCH, WORKERS
from ..options.options import Options
from ..options.selection import WITHOUT_RANGES
from ..placement.plan_file import plan_path
from ..result import Result
from ..runtime.progress import Progress, silent
from ..steps.files import check_files
from ..steps.search import Goal
from .fastest import quantize_fastest

if TYPE_CHECKING:
    from ..report import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to quantize a model.

    Attributes:
        model: Path of the float model.
        output: Path of the INT8 model.
        values: The given options by name, as `Option.read` returns them.
        command: The command line that repeats the request, for reports.
    """

    model: str | os.PathLike[str]
    output: str | os.PathLike[str]
    values: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    def run(self, progress: Progress = silent) -> Result:
        """Quantize the model, or search one, and write the reports.

        Raises:
            RequantError: The request cannot be met.
        """
        data, options, goal = build_data(self.values), build_options(self.values), build_goal(self.values)
        _check_data(data, options, goal)
        observing = data is not None and options.ranges is None
        if not observing and (idle := next((row for row in WORKERS if row.name in self.values), None)):
            raise RequantError(f"{idle.flag} would do nothing: no ranges are observed")
        fastest = options.runtime == AUTO and goal is None
        if fastest and (data is None or self.values.get("report")):
            lacks = "needs --data SRC" if data is None else "makes no report: name one runtime"
            raise RequantError(f"--runtime {AUTO} {lacks}")
        with ExitStack() as stack:
            if observing:
                check_files(self.model, data, self.output, options)
                execution = stack.enter_context(open_execution(self.values, self.output))
                options = replace(options, execution=execution)
            recorder = self._recorder(options)
            look = None if recorder is None else recorder.look
            if goal is not None and data is not None:
                result = search_model(self.model, data, self.output, goal, options, progress, look)
            elif fastest and data is not None:
                result = quantize_fastest(self.model, data, self.output, options, progress)
            else:
                result = quantize_model(self.model, data, self.output, options, progress, look)
        if recorder is not None:
            recorder.write(result)
        return result

    def _recorder(self, options: Options) -> Recorder | None:
        """Return the recorder of the requested reports; None without reports."""
        reports = self.values.get("report", ())
        if not reports:
            return None
        from ..report import Recorder, check_reports

        check_reports(reports, (self.output, plan_path(self.output)), self.model, force=options.force)
        return Recorder(reports, self.command)


def build_goal(values: Mapping[str, Any]) -> Goal | None:
    """Return the goal of a search; None without ``max_drop``.

    Raises:
        RequantError: An option of a search is missing, has no effect, or cannot be read.
    """
    if "max_drop" not in values:
        idle = next((row for row in SEARCH if values.get(row.name)), None)
        if idle is not None:
            raise RequantError(f"{idle.flag} needs --max-drop")
        return None
    for name, text in (("metric", "--metric M"), ("eval_data", "--eval-data SRC")):
        if name not in values:
            raise RequantError(f"--max-drop searches for a model: give {text}")
    return Goal(
        metric=metric_named(values["metric"], lower=values.get("lower", False)),
        allowance=parse_drop(values["max_drop"]),
        data=_eval_data(values),
        **({"seconds": values["time_budget"]} if "time_budget" in values else {}),
    )


def _eval_data(values: Mapping[str, Any]) -> str | DataSpec:
    """Return the data of a search, with the state of the data that give the ranges.

    Data of the same kind, folders or tables, are also read with the same preprocessing and tokenizer.
    """
    text = values["eval_data"]
    same = "data" in values and _kind(values["data"]) == _kind(text)
    names = ("state", "preprocess", "tokenizer") if same else ("state",)
    given = {name: values[name] for name in names if values.get(name) is not None}
    return DataSpec(text, **given) if given else text


def _kind(text: str) -> str:
    """Return the kind of data: ``"folder"``, ``"table"`` for .csv, .tsv and .jsonl files, else the suffix."""
    suffix = Path(text).suffix.lower()
    if not suffix or os.path.isdir(text):
        return "folder"
    return "table" if suffix in TABLES else suffix


def _check_data(data: str | DataSpec | None, options: Options, goal: Goal | None) -> None:
    """Refuse a request that needs data and has none."""
    if data is not None:
        return
    if options.ranges is None and options.selection.strategy not in WITHOUT_RANGES:
        raise RequantError("give --data SRC, a sample of the model's inputs; only --ranges and --dynamic need none")
    if goal is not None:
        raise RequantError("a search needs --data SRC, for ranges and corrections")

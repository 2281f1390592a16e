"""`check_project`: quantize the model of a ``requant.toml``, measure the result, and compare it with the baseline."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import chdir, nullcontext
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any

from ... import RequantError
from ...calibration import DataSpec
from ...system.apart import check_apart
from ...system.given import check_function, check_kind
from ...transforms.int8.plan import Impl
from ..gate.judge import Line, Status
from ..gate.run import Check, CheckOptions, judged, ready
from ..model.files import read_message
from ..options.build import build_data
from ..options.declared import CHECK, QUANTIZE
from ..options.option import Kind
from ..placement.plan_file import PlanFileError, implementations, plan_path
from ..runtime.progress import Progress, silent
from .file import Project, requested_project

if TYPE_CHECKING:
    from ..result import Result

DEFAULTS: Mapping[str, Any] = {row.name: row.project for row in QUANTIZE if row.project is not None}
"""The options of `requant quantize` that have another default in a project."""
PLAIN = ("lower", "samples", "batch", "threads", "runtime", "precision", "seconds")
"""Options that `CheckOptions` takes as they are."""
PLACING = frozenset({"costs", "lambda", "max_drop", "place", "plan", "portable"})
"""The options of `requant quantize` that decide what becomes int8; each of them replaces the plan beside the output."""


def check_project(
    project: Project | str | os.PathLike[str],
    *,
    update: bool = False,
    progress: Progress = silent,
    overrides: Mapping[str, Any] | None = None,
) -> Check:
    """Quantize the model of a project, measure it, and compare it with the baseline, or write the baseline.

    During the check, the folder of the project is the current folder.

    Args:
        project: The project, or the path of its file.
        update: Write the baseline.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).
        overrides: Values that replace values of the table ``[check]``; only if `project` is a path.

    Raises:
        RequantError: The project, a model, the data or the baseline cannot be used, or a metric fails.
    """
    check_function(progress, "progress")
    check_kind(update, bool, "update must be True or False")
    check_kind(overrides, (Mapping, NoneType), "overrides must be a mapping from keys of [check] to values")
    if not isinstance(project, Project):
        project = requested_project(project, overrides or {})
    with nullcontext() if project.path is None else chdir(project.folder):
        _check_outputs(project)
        with project.naming("check"):
            options, data = check_options(project.check), _data(project)
            prepared = ready(project.model, data, project.baseline, update=update, options=options)
        result = None
        if project.quantize is not None:
            result = _quantized(project, progress)
        check = judged(prepared, project.output, progress)
    if result is None:
        return check
    return replace(check, lines=(*_verdict(result), *check.lines), quantized=result.to_json())


def _check_outputs(project: Project) -> None:
    """Refuse outputs of a project that would overwrite its inputs, from within its folder.

    Raises:
        RequantError: Two paths are one file, or the output exists and is no model: a project overwrites its output.
    """
    given, check = project.quantize or {}, project.check
    outputs = {name: check[name] for name in ("junit", "markdown") if name in check}
    outputs |= {"baseline": project.baseline, **({} if project.quantize is None else {"output": project.output})}
    texts = (given.get(name) for name in ("data", "eval_data", "labels", "ranges", "overrides", "costs", "plan"))
    reports = given.get("report", ())
    outputs |= {f"report {each}": each for each in ([reports] if isinstance(reports, str) else reports)}
    own = None if project.path is None else project.path.name
    read = project.output if project.quantize is None else plan_path(project.output)  # the plan decides, if it is there
    inputs = (project.model, read, own, check.get("data"), check.get("labels"), *texts)
    check_apart(outputs, [each for each in inputs if isinstance(each, (str, os.PathLike))])
    if project.quantize is not None and os.path.exists(project.output):
        try:
            read_message(project.output)
        except RequantError as error:
            raise RequantError(
                f"{project.output}: a project overwrites its output, and this is no model; choose another output"
            ) from error


def check_options(values: Mapping[str, Any]) -> CheckOptions:
    """Return the options of the table ``[check]``.

    Raises:
        RequantError: A number is out of range.
    """
    plain = {name: values[name] for name in PLAIN if name in values}
    metric = next(row for row in CHECK if row.name == "metric")
    metrics = metric.read(values.get("metric", ()))
    return CheckOptions(metrics=metrics, tolerances=values.get("tolerance", {}), **plain)


def _data(project: Project) -> str | DataSpec:
    """Return the data of the check.

    Raises:
        RequantError: The project names no data.
    """
    if "data" not in project.check:
        where = "give --data SRC" if project.path is None else 'write data = "test.npz" in [check]'
        raise RequantError(f"no data to check on: {where}")
    data = build_data(project.check)
    assert data is not None
    return data


def _quantized(project: Project, progress: Progress) -> Result:
    """Quantize with the options of the table ``[quantize]``; `progress` as for `check_project`.

    Raises:
        RequantError: The request cannot be met.
    """
    from .request import Request  # not needed for a pair of models

    project, beside = _by_plan_beside(project)
    given = {**DEFAULTS, **(project.quantize or {})}
    with project.naming("quantize"):
        try:
            values = {row.name: row.read(given[row.name]) for row in QUANTIZE if row.name in given}
            command = shlex.join(["requant", *quantize_arguments(project)])
            return Request(model=project.model, output=project.output, values=values, command=command).run(progress)
        except PlanFileError as error:
            if not beside:
                raise
            raise RequantError(f"{error}; without {beside} the model is placed anew") from error


def _by_plan_beside(project: Project) -> tuple[Project, str]:
    """Return the project with the plan file beside its output as its plan, and the path of this file.

    So every check makes the model that the first one, or `requant quantize`, has made. The path is empty and the
    project unchanged if there is no such file, an option decides what becomes int8, or the plan is of a model that was
    written in float.

    Raises:
        RequantError: The plan file cannot be read.
    """
    given, path = {**DEFAULTS, **(project.quantize or {})}, str(plan_path(project.output))
    if not given["force_int8"] or given.keys() & PLACING or not os.path.isfile(path):
        return project, ""
    if set(implementations(path).values()) <= {Impl.FLOAT.value}:
        return project, ""
    return replace(project, quantize={**(project.quantize or {}), "plan": path}), path


def _verdict(result: Result) -> Iterator[Line]:
    """Yield a line that fails if the output is not the requested INT8 model."""
    if result.why_not:
        yield Line(name="quantize", status=Status.FAIL, baseline="int8", measured="other", reason=result.why_not)


def quantize_arguments(project: Project) -> list[str]:
    """Return the command line that quantizes with the options of a project.

    >>> arguments = quantize_arguments(Project(path=None, model="m.onnx", output="q.onnx",
    ...                                        quantize={"data": "calib.npz", "exclude_ops": ["Add", "Mul"]}))
    >>> " ".join(arguments)
    'quantize m.onnx -o q.onnx --data calib.npz --exclude-ops Add,Mul --force-int8 --force'
    """
    given = {**DEFAULTS, **(project.quantize or {})}
    arguments = ["quantize", project.model, "-o", project.output]
    for row in (row for row in QUANTIZE if row.name in given):
        value = given[row.name]
        if row.kind is Kind.FLAG:
            arguments += [row.flag] if value else []
        elif row.kind is Kind.EACH:
            arguments += [part for each in row.read(value) for part in (row.flag, each)]
        else:
            arguments += [row.flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return arguments

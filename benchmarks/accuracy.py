"""The accuracy of this project's INT8 models on real models, next to INT8 models of other quantizers.

    python -m benchmarks.accuracy table FOLDER [--tasks mbv1_075,kwt1] [--items 200] [--contenders nncf,medium]
    python -m benchmarks.accuracy table FOLDER --peers-python OTHER/bin/python --models kept --json rows.json
    python -m benchmarks.accuracy ablation FOLDER [--tasks ...]       # no correction, and each correction alone

FOLDER, or the variable REALKIT, contains a realkit.py. One process quantizes a model with all calibration data of a
task and measures its own time. A second process evaluates the model on all evaluation data. Then one process runs the
float model and all contenders in turn on one thread; the table shows the minimum time of each. Rows in the file of
``--json`` are not measured again, so that an interrupted table can be resumed; ``--again`` measures some of them again.
NNCF is not a dependency of this project; `--peers-python` names an interpreter that has it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks.accuracy_rows import CONTENDERS, USUAL, Contender, Row, helping, row_of, select, to_table
from benchmarks.contenders import ContenderError, call, float_files, has, skipped
from benchmarks.options import KIT, PEERS_PYTHON, chosen, chosen_tasks, with_options
from benchmarks.tables import print_table

# ------------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True, slots=True)
class Setting:
    """The options of a measurement.

    Attributes:
        kit: The folder of the kit.
        folder: The folder of the models.
        items: The number of evaluation items; None for all.
        place: The placement option of this project.
        python: The interpreter that has NNCF; None for this one.
        threads: Threads inside one operator while models are timed.
        seconds: The total time for which the models of one task run in turn.
        keep: Called with all rows after each new row.
    """

    kit: Path
    folder: Path
    items: int | None = None
    place: str = "measured"
    python: str | None = None
    threads: int = 1
    seconds: float = 10.0
    keep: Callable[[Sequence[Row]], None] = lambda rows: None


def made(setting: Setting, task: str, name: str, contender: Contender) -> tuple[Path, Row]:
    """Quantize with a contender; return the path of the model, and a row with the time it took or with the error."""
    arguments = dict(contender.arguments)
    if contender.ours:
        arguments["options"] = {"place": setting.place, "force_int8": True, **arguments["options"]}
    place = place_of(setting, contender)
    output = model_path(setting, task, name, place)
    row = Row(task, name, place, setting.items)
    python = setting.python if contender.function == "nncf" else None
    paths = {**float_files(setting.folder / task), "output": str(output)}
    output.unlink(missing_ok=True)
    try:
        result = call("clocked", python=python, what=contender.function, **paths, **arguments)
    except ContenderError as error:
        return output, replace(row, error=str(error))
    return output, replace(
        row, seconds=result["seconds"], int8=result.get("mac_share_int8"), verdict=result.get("verdict", "")
    )


def place_of(setting: Setting, contender: Contender) -> str:
    """Return the placement option of a contender; empty for other quantizers."""
    return setting.place if contender.ours else ""


def model_path(setting: Setting, task: str, name: str, place: str) -> Path:
    """Return the path of the INT8 model of a contender."""
    return setting.folder / task / f"{name}{'-' * bool(place)}{place}.onnx"


def judged(setting: Setting, row: Row, model: Path) -> Row:
    """Return a row with the results on the evaluation data. The first row of a task must be the float row."""
    if row.error:
        return row
    number = "all" if setting.items is None else str(setting.items)
    reference = setting.folder / row.task / f"float-{number}.pickle"
    if row.contender == "float":
        reference.unlink(missing_ok=True)
    arguments: dict[str, Any] = {
        "kit": str(setting.kit),
        "name": row.task,
        "items": setting.items,
        "reference": str(reference),
    }
    try:
        results = call("evaluated", model=str(model), **arguments)
    except ContenderError as error:
        return replace(row, error=str(error))
    return row_of({**asdict(row), **results})


def prepared(setting: Setting, task: str) -> list[str]:
    """Write the float model of a task and its calibration feeds; return the operators of the model."""
    folder = setting.folder / task
    folder.mkdir(parents=True, exist_ok=True)
    operators: list[str] = call("task", kit=str(setting.kit), name=task, **float_files(folder))["operators"]
    return operators


def add_float_row(setting: Setting, task: str, known: list[Row]) -> None:
    """Evaluate the float model of a task, and add its row to `known`; an older row is replaced."""
    row = judged(setting, Row(task, "float", "", setting.items), setting.folder / task / "float.onnx")
    known[:] = [other for other in known if other.key != row.key]
    known.append(row)


def add_row(setting: Setting, task: str, name: str, contender: Contender, known: list[Row]) -> None:
    """Quantize and evaluate with one contender, and add the row to `known`."""
    Console(stderr=True).print(f"{task}: {contender.label}", style="dim")
    path, row = made(setting, task, name, contender)
    known.append(judged(setting, row, path))
    setting.keep(known)


def measured(setting: Setting, task: str, contenders: Mapping[str, Contender], known: list[Row]) -> None:
    """Measure the missing rows of a task, and time all models of the task.

    Args:
        setting: The options.
        task: The task.
        contenders: The contenders, by name.
        known: The measured rows; new rows are appended.
    """
    keys = {row.key for row in known}
    places = {name: place_of(setting, contender) for name, contender in contenders.items()}
    missing = [name for name in contenders if (task, name, places[name], setting.items) not in keys]
    if not missing:
        return
    operators = prepared(setting, task)
    missing = [name for name in missing if not contenders[name].wants or contenders[name].wants in operators]
    if not missing:
        return
    add_float_row(setting, task, known)
    for name in missing:
        add_row(setting, task, name, contenders[name], known)
    _time(setting, task, {name: model_path(setting, task, name, place) for name, place in places.items()}, known)
    setting.keep(known)


def _time(setting: Setting, task: str, models: Mapping[str, Path], known: list[Row]) -> None:
    """Time the models of a task in turn, and store the times in the rows of the task."""
    files = float_files(setting.folder / task)
    own = {row.contender: row for row in known if row.task == task and row.place in ("", setting.place)}
    valid = [name for name, path in models.items() if name in own and own[name].value is not None and path.is_file()]
    cases = [{"name": "float", "model": files["model"], "runtime": "onnxruntime"}]
    cases += [{"name": name, "model": str(models[name]), "runtime": "onnxruntime"} for name in valid]
    times = call("timed", cases=cases, feeds=files["feeds"], threads=setting.threads, seconds=setting.seconds)
    for index, row in enumerate(known):
        if row.task != task or row.place not in ("", setting.place) or row.asked != setting.items:
            continue
        if "ms" in times.get(row.contender, {}):
            known[index] = replace(row, ms=times[row.contender]["ms"], float_ms=times["float"]["ms"])


def alone(setting: Setting, task: str, corrections: Iterable[str], known: list[Row]) -> None:
    """Add the rows of an ablation of a task to `known`: one without corrections, and one per correction."""
    keys = {row.key for row in known}
    names = {"none": [], **{name: [name] for name in corrections}}
    missing = [name for name in names if (task, name, setting.place, setting.items) not in keys]
    if not missing:
        return
    prepared(setting, task)
    add_float_row(setting, task, known)
    for name in missing:
        contender = Contender(name, "configured", {"options": {"corrections": names[name], "seconds": 0.5}}, ours=True)
        add_row(setting, task, name, contender, known)


# ------------------------------------------------------------------------------------------------------- programs


@click.group()
def main() -> None:
    """Measure how accurate INT8 models are."""


SHARED = (
    KIT,
    click.option("--tasks", default="", help="Tasks, separated by commas. [default: all]"),
    click.option("--items", type=click.IntRange(1), help="Number of evaluation items. [default: all]"),
    click.option("--models", type=click.Path(path_type=Path, file_okay=False), help="Keep the models in this folder."),
    click.option(
        "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Keep the rows in this file; resume it."
    ),
    click.option("--again", default="", help="Contenders or corrections to measure again, or 'all'."),
)


@main.command()
@with_options(SHARED)
@click.option("--contenders", default=",".join(USUAL), show_default=True)
@click.option("--place", default="measured", show_default=True, help="Placement, as in 'requant quantize'.")
@PEERS_PYTHON
@click.option("--threads", default=1, show_default=True, help="Threads while models are timed.")
@click.option("--seconds", default=10.0, show_default=True, help="Total time for which the models of a task run.")
def table(
    folder: Path, file: Path | None, contenders: str, peers_python: str | None, models: Path | None, **options: Any
) -> None:
    """Compare all contenders on the tasks of the kit in FOLDER."""
    installed, notes = available(chosen(contenders, CONTENDERS, "contender"), peers_python)
    rows, tasks = kept(file, options.pop("again")), chosen_tasks(folder.resolve(), options.pop("tasks"))
    with tempfile.TemporaryDirectory() as temporary:
        setting = Setting(
            folder.resolve(), models or Path(temporary), python=peers_python, keep=_keeping(file), **options
        )
        for task in tasks:
            measured(setting, task, installed, rows)
    selection = select(rows, tasks, ["float", *installed], setting.items)
    print_table(to_table("real models; speed-up over FP32 in ONNX Runtime", selection), notes)


@main.command()
@with_options(SHARED)
@click.option("--place", default="all", show_default=True, help="Placement; 'measured' may differ between runs.")
@click.option("--corrections", default="", help="Corrections, separated by commas. [default: all]")
def ablation(folder: Path, file: Path | None, models: Path | None, corrections: str, **options: Any) -> None:
    """Measure each correction alone on the tasks of the kit in FOLDER."""
    names = chosen(corrections, registered(), "correction") or registered()
    rows, tasks = kept(file, options.pop("again")), chosen_tasks(folder.resolve(), options.pop("tasks"))
    with tempfile.TemporaryDirectory() as temporary:
        setting = Setting(folder.resolve(), models or Path(temporary), keep=_keeping(file), **options)
        for task in tasks:
            alone(setting, task, names, rows)
    selection = select(rows, tasks, ["float", "none", *names], setting.items)
    print_table(to_table("each correction alone", selection), helping(selection, names))


def available(names: Iterable[str], python: str | None) -> tuple[dict[str, Contender], list[str]]:
    """Return the contenders that are installed, and a note about each other one."""
    from requant.quantize import Options

    options = {entry.name for entry in fields(Options)}
    found, notes = {}, []
    for name in names:
        contender = CONTENDERS[name]
        unknown = [option for option in contender.arguments.get("options", {}) if option not in options]
        if unknown:
            notes.append(f"{contender.label}: skipped, this version has no option {unknown[0]!r}")
        elif contender.function == "nncf" and not has("nncf", python):
            notes.append(skipped(contender.label, "nncf", python))
        else:
            found[name] = contender
    return found, notes


def registered() -> list[str]:
    """Return the names of the corrections of this version.

    Raises:
        click.ClickException: This version has no corrections.
    """
    try:
        from requant.quantize.options.efforts import CORRECTIONS
    except ImportError as error:
        raise click.ClickException("this version has no corrections") from error
    return list(CORRECTIONS)


def kept(file: Path | None, again: str) -> list[Row]:
    """Return the rows of a file, except the rows to measure again.

    Raises:
        click.ClickException: The file does not contain rows.
    """
    if file is None or not file.is_file():
        return []
    try:
        rows = [row_of(record) for record in json.loads(file.read_text())["rows"]]
    except (ValueError, TypeError, KeyError) as error:
        raise click.ClickException(f"{file}: no rows of this program: {error}") from error
    anew = {name.strip() for name in again.split(",")}
    return [row for row in rows if "all" not in anew and row.contender not in anew]


def _keeping(file: Path | None) -> Callable[[Sequence[Row]], None]:
    """Return a function that writes rows into a file. The file is replaced as a whole."""

    def keep(rows: Sequence[Row]) -> None:
        if file is not None:
            fresh = file.with_name(f"{file.name}.new")
            fresh.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
            os.replace(fresh, file)

    return keep


if __name__ == "__main__":
    main()

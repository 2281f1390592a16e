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
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import PRODUCTS, ContenderError, call, float_files, has, skipped
from benchmarks.measurements import NOISE
from benchmarks.options import KIT, PEERS_PYTHON, chosen, chosen_tasks, with_options
from benchmarks.tables import plain_table, print_table


@dataclass(frozen=True, slots=True)
class Contender:
    """A quantizer with its options.

    Attributes:
        label: The name in the table.
        function: A key of `contenders.FUNCTIONS`.
        arguments: The arguments of the function, except model, feeds and output.
        wants: Skip models without this operator: another contender makes the same INT8 model of them.
        ours: Whether the quantizer is this project.
    """

    label: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    wants: str = ""
    ours: bool = False


CONTENDERS: Mapping[str, Contender] = {
    "minmax": Contender("ORT minmax", "static"),
    "products": Contender("ORT minmax, products", "static", {"operators": PRODUCTS}, wants="MatMul"),
    "percentile": Contender("ORT percentile", "static", {"percentile": 99.999}),
    "nncf": Contender("NNCF", "nncf"),
    "low": Contender("ours, low", "configured", {"options": {"effort": "low"}}, ours=True),
    "medium": Contender("ours, medium", "configured", {"options": {"effort": "medium"}}, ours=True),
    "high": Contender("ours, high", "configured", {"options": {"effort": "high"}}, ours=True),
    "plain": Contender("ours, uncorrected", "configured", {"options": {"corrections": []}}, ours=True),
}
"""The contenders, by their name in ``--contenders``."""
USUAL = ("minmax", "products", "percentile", "nncf", "low", "medium", "high")


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of the INT8 model of a task.

    Attributes:
        drop: The largest drop, in the unit of the metric; None for no limit.
        relative: Whether `drop` is a share of the float value.
        least: The lowest value; None for no limit.
        agreement: The lowest agreement with float, 0..1; None for no limit.
    """

    drop: float | None = None
    relative: bool = False
    least: float | None = None
    agreement: float | None = None

    def missed(self, row: Row, before: float) -> str:
        """Return the reason why a row misses the goal; empty if it reaches the goal. `before` is the float value."""
        if row.value is None:
            return "no model"
        bound = math.inf if self.drop is None else self.drop * (abs(before) if self.relative else 1.0)
        if row.drop is not None and row.drop > bound + 1e-12:  # values are quotients of integers
            return f"drop above {bound:.4g}"
        if self.least is not None and row.value < self.least:
            return f"below {self.least:g}"
        if self.agreement is not None and row.agreement is not None and row.agreement < self.agreement:
            return f"agreement below {self.agreement:.1%}"
        return ""


GOALS: Mapping[str, Mapping[str, Goal]] = {
    "medium": {
        "mbv1_075": Goal(drop=0.003),
        "cifar_resnet20": Goal(drop=0.001, agreement=0.993),
        "kwt1": Goal(drop=0.002),
        "yolox_nano": Goal(least=0.325),
        "superres": Goal(drop=0.4),
        "stories260k": Goal(drop=0.01, relative=True),
        "silero_vad": Goal(least=0.999),
    },
    "high": {
        "mbv1_075": Goal(drop=0.0015),
        "cifar_resnet20": Goal(drop=0.0005),
        "kwt1": Goal(drop=0.001),
        "yolox_nano": Goal(least=0.333),
        "superres": Goal(drop=0.1),
        "stories260k": Goal(drop=0.005, relative=True),
        "silero_vad": Goal(least=0.9995),
    },
}
"""The goals of this project's models, by effort and task."""


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of one model.

    Attributes:
        task: The task of the kit.
        contender: ``float``, a key of `CONTENDERS`, or a correction.
        place: The placement option of this project; empty for others.
        asked: The requested number of evaluation items; None for all.
        metric: The main metric of the task.
        lower: Whether a lower value is better.
        value: The value of the metric; None without a model.
        items: The number of evaluation items.
        drop: How much worse `value` is than the float value.
        interval: The 95 % confidence interval of the drop; None if unknown.
        broken: The number of items that are right in float and wrong in INT8.
        fixed: The number of items that are wrong in float and right in INT8.
        p_value: The p-value of the exact test of `broken` against `fixed`.
        agreement: The share of equal predictions.
        sqnr_db: The SQNR of the worst output on 16 inputs; None if all outputs are equal.
        float_ms: The minimum time of the float model in the same process.
        ms: The minimum time of one run.
        seconds: The time of quantizing.
        int8: The share of multiply-accumulates in integer kernels; None if unknown.
        verdict: Why this project would write the float model instead.
        invalid: The error of the onnx checker.
        error: Why there is no model or no value.
    """

    task: str
    contender: str
    place: str = ""
    asked: int | None = None
    metric: str = ""
    lower: bool = False
    value: float | None = None
    items: int = 0
    drop: float | None = None
    interval: tuple[float, float] | None = None
    broken: int | None = None
    fixed: int | None = None
    p_value: float | None = None
    agreement: float | None = None
    sqnr_db: float | None = None
    float_ms: float | None = None
    ms: float | None = None
    seconds: float | None = None
    int8: float | None = None
    verdict: str = ""
    invalid: str = ""
    error: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies the measurement."""
        return self.task, self.contender, self.place, self.asked

    @property
    def speedup(self) -> float | None:
        """Float time over INT8 time."""
        return None if self.float_ms is None or self.ms is None else self.float_ms / self.ms


def row_of(record: Mapping[str, Any]) -> Row:
    """Return a row from JSON; unknown keys are ignored."""
    names = {entry.name for entry in fields(Row)}
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in record.items() if n in names}
    return Row(**values)


def missed(row: Row, rows: Iterable[Row]) -> list[str]:
    """Return the goals that a row of this project misses: its accuracy, and the speed of the best other quantizer.

    The best other quantizer is the fastest one whose model is valid and reaches the accuracy goal.

    Args:
        row: The row.
        rows: All rows.
    """
    goal = GOALS.get(row.contender, {}).get(row.task)
    same = [other for other in rows if other.task == row.task and other.asked == row.asked]
    before = next((other.value for other in same if other.contender == "float"), None)
    if goal is None or before is None:
        return []
    reasons = [reason] if (reason := goal.missed(row, before)) else []
    peers = [
        other
        for other in same
        if other.contender in CONTENDERS
        and not CONTENDERS[other.contender].ours
        and not other.invalid
        and not goal.missed(other, before)
        and other.speedup is not None
    ]
    fastest = max(peers, key=lambda other: other.speedup or 0.0, default=None)
    if fastest is not None and (row.speedup or 0.0) < (fastest.speedup or 0.0) * (1 - NOISE):
        reasons.append(f"slower than {CONTENDERS[fastest.contender].label}")
    return reasons


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


# ------------------------------------------------------------------------------------------------------- printing


def figure(row: Row, value: float | None, *, sign: bool = False) -> str:
    """Return a value of the metric of a row as text. Shares are in percent."""
    if value is None:
        return "-"
    plus = "+" if sign else ""
    return f"{100 * value:{plus}.2f}" if row.metric in ("top1", "finite") else f"{value:{plus}.4f}"


def times(value: float | None) -> str:
    """Return a speed-up as text."""
    return "-" if value is None else f"{value:.2f}x"


def between(row: Row) -> str:
    """Return the interval of the drop as text."""
    return "" if row.interval is None else " to ".join(figure(row, end, sign=True) for end in row.interval)


def counted(row: Row) -> str:
    """Return the numbers of broken and fixed items as text."""
    return "" if row.broken is None else f"{row.broken}/{row.fixed}"


def remarks(row: Row, rows: Sequence[Row]) -> str:
    """Return the problems of a row: an error, an invalid model, or a missed goal."""
    parts = [short(f"fails: {row.error}")] if row.error else []
    parts += [short(f"invalid: {row.invalid}")] if row.invalid else []
    parts += [short(f"not kept: {row.verdict}")] if row.verdict else []
    return "; ".join([*parts, *missed(row, rows)])


def short(text: str, most: int = 60) -> str:
    """Return the first `most` characters of a text.

    >>> short("a long story", 8)
    'a lon...'
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


COLUMNS = (
    *("task", "metric", "model", "value", "drop", "95 %", "broken/fixed", "p", "agreement", "SQNR dB"),
    *("speed-up", "int8", "seconds"),
)


def to_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    found = plain_table(title, COLUMNS, left=("task", "metric", "model"), no_wrap=("task", "metric", "model"))
    found.add_column("", overflow="fold")
    for row in rows:
        label = CONTENDERS[row.contender].label if row.contender in CONTENDERS else row.contender
        found.add_row(
            row.task,
            row.metric,
            label + (f" ({row.place})" if row.place not in ("", "measured") else ""),
            figure(row, row.value),
            figure(row, row.drop, sign=True) if row.contender != "float" else "",
            between(row) if row.contender != "float" else "",
            counted(row) if row.contender != "float" else "",
            "" if row.p_value is None or row.contender == "float" else f"{row.p_value:.2g}",
            "" if row.agreement is None else f"{row.agreement:.2%}",
            "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
            times(row.speedup),
            "" if row.int8 is None else f"{row.int8:.0%}",
            "" if row.seconds is None else f"{row.seconds:.0f}",
            remarks(row, rows),
        )
    return found


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


def select(rows: Iterable[Row], tasks: Sequence[str], contenders: Collection[str], items: int | None) -> list[Row]:
    """Return the rows of these tasks, contenders and number of items, in the order of the table."""
    return ordered((r for r in rows if r.task in tasks and r.contender in contenders and r.asked == items), tasks)


def helping(rows: Sequence[Row], names: Iterable[str]) -> list[str]:
    """Return one line per correction: the tasks on which it is better or worse than no correction."""
    none = {row.task: row for row in rows if row.contender == "none" and row.drop is not None}
    lines = []
    for name in names:
        pairs = [(row, none[row.task]) for row in rows if row.contender == name and row.task in none]
        better = [row.task for row, plain in pairs if row.drop is not None and row.drop < (plain.drop or 0.0)]
        worse = [row.task for row, plain in pairs if row.drop is not None and row.drop > (plain.drop or 0.0)]
        cleaner = [
            row.task
            for row, plain in pairs
            if row.sqnr_db is not None and plain.sqnr_db is not None and row.sqnr_db > plain.sqnr_db
        ]
        lists = (f"{kind} on {', '.join(tasks) or 'none'}" for kind, tasks in (("better", better), ("worse", worse)))
        lines.append(f"{name}: {'; '.join(lists)}; less noise on {', '.join(cleaner) or 'none'}")
    return lines


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


def ordered(rows: Iterable[Row], tasks: Sequence[str]) -> list[Row]:
    """Sort rows by task, then float first, then in the order of `CONTENDERS`."""
    names = ["float", *CONTENDERS]
    return sorted(
        rows,
        key=lambda row: (
            tasks.index(row.task),
            names.index(row.contender) if row.contender in names else len(names),
            row.place,
        ),
    )


if __name__ == "__main__":
    main()

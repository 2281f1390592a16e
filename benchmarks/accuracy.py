"""How accurate the INT8 models of this project are, on real models, and what others make of the same models.

    python -m benchmarks.accuracy table FOLDER [--tasks mbv1_075,kwt1] [--items 200] [--contenders nncf,medium]
    python -m benchmarks.accuracy table FOLDER --peers-python OTHER/bin/python --models kept --json rows.json
    python -m benchmarks.accuracy ablation FOLDER [--tasks ...]       # each correction alone against none

FOLDER, or the variable REALKIT, holds a realkit.py. Each model is made from all of a task's calibration data, in a
process of its own whose time counts, and judged on the whole evaluation data in another. Then the float model and all
contenders run in turn in one process, on one thread, and the minimum of each counts. Rows that are in the file of
``--json`` are kept, so that an interrupted table goes on; ``--again`` makes some of them anew. NNCF is no dependency
of this project; `--peers-python` names an interpreter that has it.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import PRODUCTS, ContenderError, call, has
from benchmarks.speed import NOISE, chosen


@dataclass(frozen=True, slots=True)
class Contender:
    """Who makes an INT8 model.

    Attributes:
        label: How the table calls it.
        function: A key of `contenders.FUNCTIONS`.
        arguments: Its arguments beside the model, the feeds and the output.
        wants: The operator without which it makes the same as another contender.
        ours: Whether it is this project's.
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
"""By the name that ``--contenders`` takes."""
USUAL = ("minmax", "products", "percentile", "nncf", "low", "medium", "high")


@dataclass(frozen=True, slots=True)
class Goal:
    """What a task's INT8 model is to reach.

    Attributes:
        drop: The greatest drop, in the metric's unit; None for none.
        relative: Whether the drop is a share of the float figure.
        least: The least figure.
        agreement: The least agreement.
    """

    drop: float | None = None
    relative: bool = False
    least: float | None = None
    agreement: float | None = None

    def missed(self, row: Row, before: float) -> str:
        """Return what a row misses, in words; nothing where it reaches the goal."""
        if row.value is None:
            return "no model"
        bound = math.inf if self.drop is None else self.drop * (abs(before) if self.relative else 1.0)
        if row.drop is not None and row.drop > bound + 1e-12:  # figures are quotients of whole numbers
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
"""By effort and task what our model is to reach."""


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one model.

    Attributes:
        task: The task of the kit.
        contender: ``float``, a key of `CONTENDERS`, or a correction.
        place: What decided where our int8 pays; empty for others.
        asked: How many evaluation items were asked for; None for all.
        metric: The task's main figure.
        lower: Whether a lower one is better.
        value: It; None where there is no model.
        items: How many evaluation items there were.
        drop: How much worse it is than float.
        interval: The 95 % confidence interval of the drop, where it is known.
        broken: Items that float gets right, and it wrong.
        fixed: Items that it gets right, and float wrong.
        p_value: Of broken against fixed, exact.
        agreement: Share of equal predictions.
        sqnr_db: Signal to noise of the worst output on 16 inputs; None where they are equal.
        float_ms: The least time of the float model in the same process.
        ms: The least time of one run.
        seconds: How long it took to make it.
        int8: Share of multiply-accumulates in integers; None where it is not known.
        verdict: Why our model would not be kept.
        invalid: What the checker of onnx finds wrong.
        error: Why there is no model, or no figure.
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
        """What a row of the same measurement has too."""
        return self.task, self.contender, self.place, self.asked

    @property
    def speedup(self) -> float | None:
        """How many times faster than float it is."""
        return None if self.float_ms is None or self.ms is None else self.float_ms / self.ms


def row_of(found: Mapping[str, Any]) -> Row:
    """Return a row from JSON."""
    known = {entry.name for entry in fields(Row)}
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items() if name in known}
    return Row(**given)


def missed(row: Row, rows: Iterable[Row]) -> list[str]:
    """Return what a row of ours misses: its goal, and the speed of the fastest valid peer that reaches it.

    Args:
        row: The row.
        rows: All rows.
    """
    goal = GOALS.get(row.contender, {}).get(row.task)
    same = [other for other in rows if other.task == row.task and other.asked == row.asked]
    before = next((other.value for other in same if other.contender == "float"), None)
    if goal is None or before is None:
        return []
    found = [words] if (words := goal.missed(row, before)) else []
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
        found.append(f"slower than {CONTENDERS[fastest.contender].label}")
    return found


# ------------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True, slots=True)
class Setting:
    """How rows are measured.

    Attributes:
        kit: The folder of the kit.
        folder: Where models are kept.
        items: Evaluation items; None for all.
        place: What decides where our int8 pays.
        python: The interpreter that has NNCF; None for this one.
        threads: Threads inside one operator while models are timed.
        seconds: How long the models of one task run in turn.
        keep: Called with all rows after each new one.
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
    """Let a contender make its model; return where it is, and a row with the time it took, or why there is none."""
    folder = setting.folder / task
    arguments = dict(contender.arguments)
    if contender.ours:
        arguments["options"] = {"place": setting.place, "force_int8": True, **arguments["options"]}
    place = setting.place if contender.ours else ""
    output = folder / f"{name}{'-' * bool(place)}{place}.onnx"
    row = Row(task, name, place, setting.items)
    python = setting.python if contender.function == "nncf" else None
    paths = {"model": str(folder / "float.onnx"), "feeds": str(folder / "feeds.npz"), "output": str(output)}
    output.unlink(missing_ok=True)
    try:
        told = call("clocked", python=python, what=contender.function, **paths, **arguments)
    except ContenderError as error:
        return output, replace(row, error=str(error))
    return output, replace(
        row, seconds=told["seconds"], int8=told.get("mac_share_int8"), verdict=told.get("verdict", "")
    )


def judged(setting: Setting, row: Row, model: Path) -> Row:
    """Return a row with what the evaluation data say of its model; the first of a task must be that of float."""
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
        told = call("evaluated", model=str(model), **arguments)
    except ContenderError as error:
        return replace(row, error=str(error))
    return row_of({**asdict(row), **told})


def prepared(setting: Setting, task: str) -> list[str]:
    """Write the float model of a task and its calibration feeds; return the operators."""
    folder = setting.folder / task
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"model": str(folder / "float.onnx"), "feeds": str(folder / "feeds.npz")}
    found: list[str] = call("task", kit=str(setting.kit), name=task, **paths)["operators"]
    return found


def measured(setting: Setting, task: str, contenders: Mapping[str, Contender], known: list[Row]) -> None:
    """Add the rows of a task that are not known yet, and time all of its models that are there.

    Args:
        setting: How.
        task: The task.
        contenders: Who takes part.
        known: The rows so far; it grows.
    """
    there = {row.key for row in known}
    places = {name: setting.place if contender.ours else "" for name, contender in contenders.items()}
    missing = [name for name in contenders if (task, name, places[name], setting.items) not in there]
    if not missing:
        return
    operators = prepared(setting, task)
    missing = [name for name in missing if not contenders[name].wants or contenders[name].wants in operators]
    if not missing:
        return
    folder = setting.folder / task
    models = {name: folder / f"{name}{'-' * bool(place)}{place}.onnx" for name, place in places.items()}
    before = judged(setting, Row(task, "float", "", setting.items), folder / "float.onnx")
    known[:] = [row for row in known if row.key != before.key]
    known.append(before)
    for name in missing:
        Console(stderr=True).print(f"{task}: {contenders[name].label}", style="dim")
        models[name], row = made(setting, task, name, contenders[name])
        known.append(judged(setting, row, models[name]))
        setting.keep(known)
    _time(setting, task, models, known)
    setting.keep(known)


def _time(setting: Setting, task: str, models: Mapping[str, Path], known: list[Row]) -> None:
    """Time the models of a task in turn, and put the times into its rows."""
    folder = setting.folder / task
    own = {row.contender: row for row in known if row.task == task and row.place in ("", setting.place)}
    valid = [name for name, path in models.items() if name in own and own[name].value is not None and path.is_file()]
    cases = [{"name": "float", "model": str(folder / "float.onnx"), "runtime": "onnxruntime"}]
    cases += [{"name": name, "model": str(models[name]), "runtime": "onnxruntime"} for name in valid]
    feeds = str(folder / "feeds.npz")
    times = call("timed", cases=cases, feeds=feeds, threads=setting.threads, seconds=setting.seconds)
    for index, row in enumerate(known):
        if row.task != task or row.place not in ("", setting.place) or row.asked != setting.items:
            continue
        if "ms" in times.get(row.contender, {}):
            known[index] = replace(row, ms=times[row.contender]["ms"], float_ms=times["float"]["ms"])


def alone(setting: Setting, task: str, corrections: Iterable[str], known: list[Row]) -> None:
    """Add the rows of an ablation of a task: no correction, and each alone."""
    there = {row.key for row in known}
    names = {"none": [], **{name: [name] for name in corrections}}
    missing = [name for name in names if (task, name, setting.place, setting.items) not in there]
    if not missing:
        return
    prepared(setting, task)
    before = judged(setting, Row(task, "float", "", setting.items), setting.folder / task / "float.onnx")
    known[:] = [row for row in known if row.key != before.key]
    known.append(before)
    for name in missing:
        Console(stderr=True).print(f"{task}: {name}", style="dim")
        contender = Contender(name, "configured", {"options": {"corrections": names[name], "seconds": 0.5}}, ours=True)
        path, row = made(setting, task, name, contender)
        known.append(judged(setting, row, path))
        setting.keep(known)


# ------------------------------------------------------------------------------------------------------- printing


def figure(row: Row, value: float | None, *, sign: bool = False) -> str:
    """Return a figure of a row's metric: shares in percent, others as they are."""
    if value is None:
        return "-"
    plus = "+" if sign else ""
    return f"{100 * value:{plus}.2f}" if row.metric in ("top1", "finite") else f"{value:{plus}.4f}"


def times(value: float | None) -> str:
    """Return a speed-up."""
    return "-" if value is None else f"{value:.2f}x"


def between(row: Row) -> str:
    """Return the interval of the drop."""
    return "" if row.interval is None else " to ".join(figure(row, end, sign=True) for end in row.interval)


def counted(row: Row) -> str:
    """Return what was broken and fixed."""
    return "" if row.broken is None else f"{row.broken}/{row.fixed}"


def told(row: Row, rows: Sequence[Row]) -> str:
    """Return what is to be said of a row: that it fails, is invalid, or misses its goal."""
    parts = [short(f"fails: {row.error}")] if row.error else []
    parts += [short(f"invalid: {row.invalid}")] if row.invalid else []
    parts += [short(f"not kept: {row.verdict}")] if row.verdict else []
    return "; ".join([*parts, *missed(row, rows)])


def short(text: str, most: int = 60) -> str:
    """Return the beginning of a text.

    >>> short("a long story", 8)
    'a lon...'
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def to_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    found = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for column in ("task", "metric", "model"):
        found.add_column(column, no_wrap=True)
    for column in (
        "figure",
        "drop",
        "95 %",
        "broken/fixed",
        "p",
        "agreement",
        "SQNR dB",
        "speed-up",
        "int8",
        "seconds",
    ):
        found.add_column(column, justify="right")
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
            told(row, rows),
        )
    return found


# ------------------------------------------------------------------------------------------------------- programs


@click.group()
def main() -> None:
    """Measure how accurate INT8 models are."""


SHARED = (
    click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), envvar="REALKIT"),
    click.option("--tasks", default="", help="Names of tasks, with commas between them. [default: all]"),
    click.option("--items", type=click.IntRange(1), help="Evaluation items. [default: all]"),
    click.option("--models", type=click.Path(path_type=Path, file_okay=False), help="Keeps the models."),
    click.option(
        "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Keeps the rows, and goes on."
    ),
    click.option("--again", default="", help="Contenders or corrections whose kept rows are made anew, or 'all'."),
)


def shared(command: Any) -> Any:
    """Add what the commands share."""
    for option in reversed(SHARED):
        command = option(command)
    return command


@main.command()
@shared
@click.option("--contenders", default=",".join(USUAL), show_default=True)
@click.option("--place", default="measured", show_default=True, help="Where our int8 goes, as in 'requant quantize'.")
@click.option("--peers-python", metavar="PATH", help="An interpreter that has NNCF. [default: this one]")
@click.option("--threads", default=1, show_default=True, help="While models are timed.")
@click.option("--seconds", default=10.0, show_default=True, help="How long the models of a task run in turn.")
def table(
    folder: Path, file: Path | None, contenders: str, peers_python: str | None, models: Path | None, **options: Any
) -> None:
    """Compare all contenders on the tasks of the kit in FOLDER."""
    asked, notes = available(chosen(contenders, CONTENDERS, "contender"), peers_python)
    rows, tasks = kept(file, options.pop("again")), _tasks(folder, options.pop("tasks"))
    with tempfile.TemporaryDirectory() as temporary:
        setting = Setting(
            folder.resolve(), models or Path(temporary), python=peers_python, keep=_keeping(file), **options
        )
        for task in tasks:
            measured(setting, task, asked, rows)
    wanted = {"float", *asked}
    shown = [row for row in rows if row.task in tasks and row.contender in wanted and row.asked == setting.items]
    _print(to_table("real models; times FP32 in ONNX Runtime", ordered(shown, tasks)), notes)


@main.command()
@shared
@click.option("--place", default="all", show_default=True, help="Where int8 goes; 'measured' may differ between runs.")
@click.option("--corrections", default="", help="Names, with commas between them. [default: all]")
def ablation(folder: Path, file: Path | None, models: Path | None, corrections: str, **options: Any) -> None:
    """Tell what each correction alone changes on the tasks of the kit in FOLDER."""
    known = registered()
    names = chosen(corrections, known, "correction") or known
    rows, tasks = kept(file, options.pop("again")), _tasks(folder, options.pop("tasks"))
    with tempfile.TemporaryDirectory() as temporary:
        setting = Setting(folder.resolve(), models or Path(temporary), keep=_keeping(file), **options)
        for task in tasks:
            alone(setting, task, names, rows)
    wanted = {"float", "none", *names}
    shown = [row for row in rows if row.task in tasks and row.contender in wanted and row.asked == setting.items]
    _print(to_table("each correction alone", ordered(shown, tasks)), helping(shown, names))


def helping(rows: Sequence[Row], names: Iterable[str]) -> list[str]:
    """Return, for each correction, on which tasks it alone makes the figure better or worse than none does."""
    none = {row.task: row for row in rows if row.contender == "none" and row.drop is not None}
    found = []
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
        found.append(f"{name}: {'; '.join(lists)}; less noise on {', '.join(cleaner) or 'none'}")
    return found


def available(names: Iterable[str], python: str | None) -> tuple[dict[str, Contender], list[str]]:
    """Return the contenders that can be had, and a note about each that cannot."""
    from requant.quantize import Options

    options = {entry.name for entry in fields(Options)}
    found, notes = {}, []
    for name in names:
        contender = CONTENDERS[name]
        unknown = [option for option in contender.arguments.get("options", {}) if option not in options]
        if unknown:
            notes.append(f"{contender.label}: left out, this version has no option {unknown[0]!r}")
        elif contender.function == "nncf" and not has("nncf", python):
            notes.append(f"{contender.label}: left out, nncf is not installed in {python or 'this venv'}")
        else:
            found[name] = contender
    return found, notes


def registered() -> list[str]:
    """Return the names of the corrections of this version.

    Raises:
        click.ClickException: It has none.
    """
    try:
        from requant.quantize.options.efforts import CORRECTIONS
    except ImportError as error:
        raise click.ClickException("this version has no corrections") from error
    return list(CORRECTIONS)


def kept(file: Path | None, again: str) -> list[Row]:
    """Return the rows of a file, without those that are to be made anew.

    Raises:
        click.ClickException: The file holds no rows.
    """
    if file is None or not file.is_file():
        return []
    try:
        rows = [row_of(found) for found in json.loads(file.read_text())["rows"]]
    except (ValueError, TypeError, KeyError) as error:
        raise click.ClickException(f"{file}: holds no rows of this program: {error}") from error
    anew = {name.strip() for name in again.split(",")}
    return [row for row in rows if "all" not in anew and row.contender not in anew]


def _keeping(file: Path | None) -> Callable[[Sequence[Row]], None]:
    """Return what writes rows into a file; it appears whole."""

    def keep(rows: Sequence[Row]) -> None:
        if file is not None:
            fresh = file.with_name(f"{file.name}.new")
            fresh.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
            os.replace(fresh, file)

    return keep


def ordered(rows: Iterable[Row], tasks: Sequence[str]) -> list[Row]:
    """Return rows by task, float first, then as they are listed in `CONTENDERS`."""
    names = ["float", *CONTENDERS]
    return sorted(
        rows,
        key=lambda row: (
            tasks.index(row.task),
            names.index(row.contender) if row.contender in names else len(names),
            row.place,
        ),
    )


def _tasks(folder: Path, text: str) -> list[str]:
    """Return the tasks of the kit that are asked for."""
    try:
        known = call("tasks", kit=str(folder.resolve()))["tasks"]
    except ContenderError as error:
        raise click.ClickException(f"{folder}: {error}") from error
    return chosen(text, known, "task") or known


def _print(found: Table, notes: Iterable[str]) -> None:
    """Print a table and what is to be said of it."""
    console = Console(width=200)
    console.print(found)
    for note in notes:
        console.print(note, style="dim", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()

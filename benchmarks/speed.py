"""How fast the INT8 models of this project are: against float, and against what others make of the same model.

    python -m benchmarks.speed table [--batch 1,16] [--only NAME] [--contenders static,ours] [--models FOLDER] [--json]
    python -m benchmarks.speed table --peers-python OTHER/bin/python --openvino
    python -m benchmarks.speed kit FOLDER    # real models, in a folder with a realkit.py
    python -m benchmarks.speed seed          # the network of benchmarks/seed_table.py at batch 128

Each quantization is a process of its own, and so is each row: in it the float model in ONNX Runtime and all contenders
run in turn for a fixed time on one thread, and the minimum of each counts. Models are generated with random weights,
calibrated on 8 random feeds and timed on another one. NNCF and OpenVINO are no dependencies of this project; what is
not installed is left out. `--peers-python` names an interpreter that has NNCF.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import (
    CONTENDERS,
    FORMS,
    Contender,
    ContenderError,
    call,
    forms_for,
    has,
)

GOALS: Mapping[str, float] = {
    "resnet50": 3.3,
    "mobilenet_v2": 1.9,
    "mobilenet_v3_large": 1.15,
    "efficientnet_b0": 1.22,
    "squeezenet1_1": 1.95,
    "vit_b_16": 2.8,
    "bert_base": 2.9,
}
"""The architectures, and how many times faster than the float model ours is to be."""
OPENVINO_GOALS = frozenset({"resnet50", "mobilenet_v2", "vit_b_16"})
"""Where ours in OpenVINO is to be at least as fast as NNCF's."""
SEED_GOALS: Mapping[str, float] = {"second convolution": 4.0, "whole network": 3.1}
VALID_DB = 8.0
"""Signal to noise below which a real model is none any more; of random weights it says less."""
NOISE = 0.02  # by which two minima of the same model differ
PREDICTED = 0.15
SEED_BATCH = 128


# ------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one model.

    Attributes:
        model: Its name.
        float_ms: Least time of the float model in ONNX Runtime.
        times: By contender the least time of its fastest form in ms.
        forms: By contender which form that was.
        sqnr_db: By contender the worst output's signal to noise on the feed that was timed; None for equal outputs.
        errors: By contender why it has no time.
        goal: The speed-up that ours is to reach; 0 where there is none but that of float.
        predicted: The time of ours as the sum of its costs, over the time that the same run measured.
        verdict: Why ours is float; empty where it is INT8.
    """

    model: str
    float_ms: float
    times: Mapping[str, float]
    forms: Mapping[str, str]
    sqnr_db: Mapping[str, float | None] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    goal: float = 0.0
    predicted: float | None = None
    verdict: str = ""

    def ratio(self, contender: str) -> float | None:
        """Return how many times faster than float a contender is, None where it was not timed."""
        return self.float_ms / self.times[contender] if contender in self.times else None


def build_row(
    model: str,
    timed: Mapping[str, Mapping[str, Any]],
    made: Mapping[str, Mapping[str, Any]],
    offered: Mapping[str, Sequence[str]],
    goal: float = 0.0,
) -> Row:
    """Choose the fastest form of each contender.

    Args:
        model: The name of the model.
        timed: What `contenders.timed` returned, by ``float`` and ``CONTENDER FORM``.
        made: By form what its making returned, or ``error``.
        offered: By contender the forms that it was asked for.
        goal: The speed-up that ours is to reach.

    Raises:
        click.ClickException: The float model does not run.
    """
    if "error" in timed["float"]:
        raise click.ClickException(f"{model}: the float model does not run: {timed['float']['error']}")
    times, forms, noise, errors = {}, {}, {}, {}
    for contender, names in offered.items():
        runs = {form: timed[key(contender, form)] for form in names if key(contender, form) in timed}
        valid = {form: run for form, run in runs.items() if "error" not in run}
        if valid:
            best = min(valid, key=lambda form: valid[form]["ms"])
            times[contender], forms[contender] = valid[best]["ms"], best
            noise[contender] = valid[best]["sqnr_db"]
        else:
            errors[contender] = "; ".join({**made.get(form, {}), **runs.get(form, {})}["error"] for form in names)
    own = made.get(offered["ours"][0], {}) if "ours" in offered else {}
    return Row(
        model,
        timed["float"]["ms"],
        times,
        forms,
        noise,
        errors,
        goal,
        predicted_ratio(own),
        own.get("verdict", ""),
    )


def key(contender: str, form: str) -> str:
    """Return how a model is called while it is timed."""
    return f"{contender} {form}"


def predicted_ratio(made: Mapping[str, Any]) -> float | None:
    """Return the predicted over the measured time of ours, None where one of them is missing."""
    if not made.get("predicted_ms") or not made.get("latency"):
        return None
    return float(made["predicted_ms"]) / float(made["latency"]["int8_ms"])


def valid(row: Row, contender: str) -> bool:
    """Tell whether a contender's model counts: of a real model, which has no goal, its outputs must be left."""
    found = row.sqnr_db.get(contender)
    return bool(row.goal) or found is None or found >= VALID_DB


def missed(row: Row) -> list[str]:
    """Return which goals ours misses in a row, in words."""
    ours = row.ratio("ours")
    if ours is None:
        return ["no model of ours"] if "ours" in row.errors else []
    found = [f"goal {row.goal:g}x"] if ours < row.goal else []
    if ours < 1 - NOISE * bool(row.verdict):  # a float model that was kept is the float model, up to noise
        found.append("slower than float")
    found += [
        f"slower than {CONTENDERS[name].label}"
        for name, time in row.times.items()
        if name not in ("ours", "ours-openvino")
        and CONTENDERS[name].runtime == "onnxruntime"
        and valid(row, name)
        and row.times["ours"] > time * (1 + NOISE)
    ]
    theirs, own = row.times.get("nncf-openvino"), row.times.get("ours-openvino")
    if row.model in OPENVINO_GOALS and theirs is not None and (own is None or own > theirs * (1 + NOISE)):
        found.append("slower than NNCF in OpenVINO")
    if row.predicted is not None and abs(row.predicted - 1) > PREDICTED:
        found.append("predicted")
    return found


# ------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True, slots=True)
class Setting:
    """How rows are measured.

    Attributes:
        folder: Where models are kept.
        contenders: Who takes part.
        python: The interpreter of the contenders that this one lacks.
        threads: Threads inside one operator.
        seconds: How long the models of one row run in turn.
        remake: Contenders whose models are made anew.
    """

    folder: Path
    contenders: Mapping[str, Contender]
    python: str | None = None
    threads: int = 1
    seconds: float = 10.0
    remake: frozenset[str] = frozenset()


def available(names: Iterable[str], python: str | None, *, openvino: bool) -> tuple[dict[str, Contender], list[str]]:
    """Return the contenders that can be had, and a note about each that cannot.

    Args:
        names: Who is asked for.
        python: The interpreter of the contenders that this one lacks.
        openvino: Whether those in OpenVINO are asked for.
    """
    found: dict[str, Contender] = {}
    notes = []
    has_openvino = openvino and has("openvino")
    for name in names:
        contender = CONTENDERS[name]
        if contender.runtime == "openvino" and not has_openvino:
            if openvino:
                notes.append(f"{contender.label}: left out, openvino is not installed")
        elif contender.needs and not has(contender.needs, python):
            notes.append(f"{contender.label}: left out, {contender.needs} is not installed in {python or 'this venv'}")
        else:
            found[name] = contender
    return found, notes


def made_once(
    path: Path, function: str, *, python: str | None = None, anew: bool = False, **arguments: Any
) -> dict[str, Any]:
    """Make a file unless it is there, and return what was told when it was made.

    Raises:
        ContenderError: It cannot be made.
    """
    told = path.with_suffix(".json")
    if anew or not (path.is_file() and told.is_file()):
        told.unlink(missing_ok=True)
        told.write_text(json.dumps(call(function, python=python, **arguments)))
    found: dict[str, Any] = json.loads(told.read_text())
    return found


def make(setting: Setting, folder: Path, form: str, batch: int) -> tuple[Path, dict[str, Any]]:
    """Make a model in one form; return where it is and what was told, or ``error``."""
    row = FORMS[form]
    output = folder / (f"{form}-b{batch}-t{setting.threads}.onnx" if row.per_batch else f"{form}.onnx")
    arguments = {
        "model": str(folder / "float.onnx"),
        "feeds": str(folder / "feeds.npz"),
        "output": str(output),
        **({"batch": batch, "threads": setting.threads} if row.per_batch else {}),
        **row.arguments,
    }
    python = setting.python if row.peer else None
    anew = row.function in {FORMS[form].function for name in setting.remake for form in CONTENDERS[name].forms}
    try:
        return output, made_once(output, row.function, python=python, anew=anew, **arguments)
    except ContenderError as error:
        return output, {"error": str(error)}


def measure(
    setting: Setting, model: str, feed: Path, operators: Sequence[str], batch: int = 1, own: str = "ours"
) -> Row:
    """Make and time the models of one row.

    Args:
        setting: How.
        model: The model's name, and that of the folder of its files.
        feed: The feed that is timed.
        operators: The operators of the model.
        batch: Items in the feed.
        own: The form of ours.
    """
    folder = setting.folder / model
    offered = {
        name: (own,) if contender.forms == ("ours",) else forms_for(contender, operators)
        for name, contender in setting.contenders.items()
    }
    made, cases = {}, [{"name": "float", "model": str(folder / "float.onnx"), "runtime": "onnxruntime"}]
    for form in dict.fromkeys(form for forms in offered.values() for form in forms):
        Console(stderr=True).print(f"{model}: {form}", style="dim")
        path, made[form] = make(setting, folder, form, batch)
        cases += [
            {"name": key(name, form), "model": str(path), "runtime": setting.contenders[name].runtime}
            for name, forms in offered.items()
            if form in forms and "error" not in made[form]
        ]
    timed = call("timed", cases=cases, feeds=str(feed), threads=setting.threads, seconds=setting.seconds)
    return build_row(model, timed, made, offered, GOALS.get(model, 0.0))


def prepare(setting: Setting, model: str, batch: int) -> tuple[Path, list[str]]:
    """Write a generated architecture and its feeds; return the feed that is timed, and the operators."""
    folder = setting.folder / model
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Any] = {"model": str(folder / "float.onnx"), "feeds": str(folder / "feeds.npz")}
    told = made_once(folder / "float.onnx", "network", name=model, **paths)
    feed = folder / f"feed-b{batch}.npz"
    made_once(feed, "batch", name=model, size=batch, feeds=str(feed))
    return feed, told["operators"]


def generated(setting: Setting, model: str, batch: int) -> Row:
    """Measure a generated architecture."""
    feed, operators = prepare(setting, model, batch)
    return measure(setting, model, feed, operators, batch)


def real(setting: Setting, kit: Path, task: str, samples: int) -> Row:
    """Measure a task of the kit of real models; ours is what a user gets, which is float where INT8 does not pay."""
    folder = setting.folder / task
    folder.mkdir(parents=True, exist_ok=True)
    feeds = folder / "feeds.npz"
    paths: dict[str, Any] = {"model": str(folder / "float.onnx"), "feeds": str(feeds)}
    told = made_once(folder / "float.onnx", "task", kit=str(kit), name=task, samples=samples, **paths)
    return measure(setting, task, feeds, told["operators"], own="guarded")


# --------------------------------------------------------------------------------------------------- printing


def cell(row: Row, contender: str) -> str:
    """Return what a contender's column shows: the ratio over float, or that it fails."""
    ratio = row.ratio(contender)
    if ratio is None:
        return "fails" if contender in row.errors else "-"
    plain = CONTENDERS[contender].forms[0] == row.forms[contender] or row.forms[contender] == "guarded"
    return f"{ratio:.2f}x" + ("" if plain else "*")


def footnotes(rows: Iterable[Row]) -> list[str]:
    """Return which forms were the fastest where they are not the first, what fails, and where ours is float."""
    found = []
    for row in rows:
        found += [
            f"* {row.model}, {CONTENDERS[name].label}: {form}"
            for name, form in row.forms.items()
            if cell(row, name).endswith("*")
        ]
        found += [f"{row.model}, {CONTENDERS[name].label}: {error}" for name, error in row.errors.items()]
        found += [f"{row.model}, ours: float: {row.verdict}"] if row.verdict else []
    return found


def to_table(title: str, rows: Iterable[Row], contenders: Iterable[str], *, noise: bool = False) -> Table:
    """Return the rows as a table; with `noise` the signal to noise ratio of each contender too."""
    names = list(contenders)
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    table.add_column("model", no_wrap=True)
    shown = [CONTENDERS[name].label for name in names]
    decibels = [f"{label}, dB" for label in shown] if noise else []
    for column in ("FP32 ms", *shown, *decibels, *(() if noise else ("goal", "predicted"))):
        table.add_column(column, justify="right")
    table.add_column("missed")
    for row in rows:
        right = [] if noise else [f"{row.goal:g}x" if row.goal else "", percent(row.predicted)]
        levels = [level(row, name) for name in names] if noise else []
        cells = [cell(row, name) for name in names]
        table.add_row(row.model, f"{row.float_ms:.2f}", *cells, *levels, *right, ", ".join(missed(row)))
    return table


def percent(ratio: float | None) -> str:
    """Return a ratio as its distance from one."""
    return "-" if ratio is None else f"{ratio - 1:+.0%}"


def level(row: Row, contender: str) -> str:
    """Return a contender's signal to noise ratio."""
    if contender not in row.times:
        return "-"
    found = row.sqnr_db[contender]
    return "equal" if found is None else f"{found:.1f}"


def to_json(row: Row) -> dict[str, Any]:
    """Return a row as plain JSON values."""
    return {**asdict(row), "ratios": {name: row.ratio(name) for name in row.times}, "missed": missed(row)}


def chosen(text: str, known: Iterable[str], kind: str) -> list[str]:
    """Split a list of names.

    Raises:
        click.BadParameter: A name is unknown.
    """
    names, there = [name.strip() for name in text.split(",") if name.strip()], list(known)
    unknown = [name for name in names if name not in there]
    if unknown:
        raise click.BadParameter(f"no {kind} {unknown[0]!r}; there are: {', '.join(there)}")
    return names


# --------------------------------------------------------------------------------------------------- programs


@click.group()
def main() -> None:
    """Measure how fast INT8 models are."""


SHARED = (
    click.option("--only", default="", help="Names of models, with commas between them. [default: all]"),
    click.option(
        "--models", type=click.Path(path_type=Path, file_okay=False), help="Keeps models, and uses them again."
    ),
    click.option("--remake", default="ours", show_default=True, help="Contenders whose kept models are made anew."),
    click.option("--threads", default=1, show_default=True),
    click.option("--seconds", default=10.0, show_default=True, help="How long the models of a row run in turn."),
    click.option("--json", "as_json", is_flag=True),
)


def shared(command: Any) -> Any:
    """Add the options that the commands share."""
    for option in reversed(SHARED):
        command = option(command)
    return command


@main.command()
@click.option("--batch", default="1,16", show_default=True, help="Items per run; one table for each.")
@click.option("--contenders", default=",".join(CONTENDERS), show_default=True)
@click.option("--openvino", is_flag=True, help="Also time models in OpenVINO.")
@click.option("--peers-python", metavar="PATH", help="An interpreter that has NNCF. [default: this one]")
@shared
def table(batch: str, contenders: str, openvino: bool, peers_python: str | None, as_json: bool, **options: Any) -> None:
    """Compare all contenders on generated architectures."""
    asked = chosen(contenders, CONTENDERS, "contender")
    found, notes = available(asked, peers_python, openvino=openvino)
    only = chosen(options.pop("only"), GOALS, "architecture") or list(GOALS)
    tables = {}
    with tempfile.TemporaryDirectory() as temporary:
        setting = _setting(temporary, found, peers_python, **options)
        for size in map(int, batch.split(",")):
            tables[size] = [generated(setting, name, size) for name in only]
            if not as_json:
                title = f"batch {size}, {setting.threads} thread(s); times FP32 in ONNX Runtime"
                _print(to_table(title, tables[size], found), footnotes(tables[size]))
    if as_json:
        print(json.dumps({"notes": notes, **{f"batch {n}": [*map(to_json, r)] for n, r in tables.items()}}, indent=2))
    for note in notes:
        click.echo(note, err=True)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), envvar="REALKIT")
@click.option("--samples", default=8, show_default=True, help="Samples that calibrate.")
@shared
def kit(folder: Path, samples: int, as_json: bool, **options: Any) -> None:
    """Compare ours and `quantize_static` on real models: FOLDER, or the variable REALKIT, holds a realkit.py.

    Samples of it calibrate, and the first of them is timed.
    """
    folder = folder.resolve()
    try:
        known = call("tasks", kit=str(folder))["tasks"]
    except ContenderError as error:
        raise click.ClickException(f"{folder}: {error}") from error
    only = chosen(options.pop("only"), known, "task") or known
    with tempfile.TemporaryDirectory() as temporary:
        setting = _setting(temporary, {name: CONTENDERS[name] for name in ("static", "ours")}, None, **options)
        rows = [real(setting, folder, task, samples) for task in only]
    if as_json:
        print(json.dumps([to_json(row) for row in rows], indent=2))
    else:
        title = f"real models, {setting.threads} thread(s); times FP32 in ONNX Runtime"
        _print(to_table(title, rows, setting.contenders, noise=True), footnotes(rows))


@main.command()
@click.option("--batch", default=SEED_BATCH, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def seed(batch: int, threads: int, as_json: bool) -> None:
    """Compare the network of `benchmarks.seed_table`, whose first convolution is slower in INT8."""
    from benchmarks import seed_table
    from requant.quantize import Options, quantize_model

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "int8.onnx"
        options = Options(batch=batch, threads=threads, force_int8=True)
        result = quantize_model(seed_table.MODEL, seed_table.CALIBRATION, output, options)
        found, rows = seed_table.measure(output, batch, threads)
        first = first_convolution(output, batch, threads)
    told = {"predicted_ms": getattr(result, "predicted_ms", None), "latency": result.to_json()["latency"]}
    ratios = {
        "second convolution": rows["float"]["conv2_us"] / rows["int8"]["conv2_us"],
        "whole network": found.latencies[-1].speedup,
    }
    if as_json:
        facts = {"first convolution": first, "predicted": predicted_ratio(told), "missed": seed_missed(ratios, first)}
        print(json.dumps({**ratios, **facts}, indent=2))
        return
    shown = Table(title=f"batch {batch}, {threads} thread(s)", box=None, pad_edge=False, title_justify="left")
    for column in ("", "measured", "goal"):
        shown.add_column(column, justify="left" if not column else "right")
    for name, ratio in ratios.items():
        shown.add_row(name, f"{ratio:.2f}x", f"{SEED_GOALS[name]:g}x")
    shown.add_row("first convolution", first, "float")
    shown.add_row("predicted", percent(predicted_ratio(told)), f"within {PREDICTED:.0%}")
    _print(shown, [f"missed: {name}" for name in seed_missed(ratios, first)])


def first_convolution(model: Path, batch: int, threads: int) -> str:
    """Return in what the first convolution that runs computes: ``float`` or ``int8``."""
    from benchmarks import seed_table
    from requant.quantize.runtime.inputs import open_data, stacked
    from requant.quantize.runtime.profile import executed

    feed = stacked(open_data(seed_table.MODEL, seed_table.TEST), batch).feed
    run = next(run for run in executed(model, feed, threads=threads) if run.op.endswith(("Conv", "ConvInteger")))
    return "int8" if run.integer else "float"


def seed_missed(ratios: Mapping[str, float], first: str) -> list[str]:
    """Return the goals that are missed on the network of the seed's table."""
    found = [name for name, goal in SEED_GOALS.items() if ratios[name] < goal]
    return found + (["first convolution"] if first != "float" else [])


def _setting(
    temporary: str,
    contenders: Mapping[str, Contender],
    python: str | None,
    models: Path | None,
    remake: str,
    threads: int,
    seconds: float,
) -> Setting:
    """Return the setting that the options ask for."""
    anew = frozenset(chosen(remake, CONTENDERS, "contender")) if models is not None else frozenset()
    return Setting(models or Path(temporary), contenders, python, threads, seconds, anew)


def _print(found: Table, notes: Iterable[str]) -> None:
    """Print a table and what is to be said of it."""
    console = Console(width=160)
    console.print(found)
    for note in notes:
        console.print(note, style="dim", highlight=False, soft_wrap=True)
    console.print()


if __name__ == "__main__":
    main()

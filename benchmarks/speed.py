"""The speed of this project's INT8 models, compared with float and with INT8 models of other quantizers.

    python -m benchmarks.speed table [--batch 1,16] [--only NAME] [--contenders static,ours] [--models FOLDER] [--json]
    python -m benchmarks.speed table --peers-python OTHER/bin/python --openvino
    python -m benchmarks.speed kit FOLDER    # real models; FOLDER contains a realkit.py
    python -m benchmarks.speed kit FOLDER --openvino --contenders openvino,nncf-openvino,nncf-ir,placed-openvino
    python -m benchmarks.speed seed          # the network of benchmarks/seed_table.py at batch 128

Each model is quantized in a separate process. Each row is measured in one process: the float model in ONNX Runtime and
all contenders run in turn for a fixed time on one thread, and the minimum time of each counts. The models are generated
with random weights, calibrated on 8 random feeds and timed on another feed. NNCF and OpenVINO are not dependencies of
this project; contenders that need a missing package are skipped. `--peers-python` names an interpreter that has NNCF.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    float_files,
    forms_for,
    has,
    skipped,
)
from benchmarks.measurements import OPENVINO
from benchmarks.options import KIT, PEERS_PYTHON, chosen, chosen_tasks, with_options
from benchmarks.speed_rows import (
    GOALS,
    GUARDED,
    PREDICTED,
    Row,
    build_row,
    footnotes,
    goal_of,
    key,
    percent,
    predicted_ratio,
    to_json,
    to_table,
)
from benchmarks.tables import plain_table, print_table

SEED_GOALS: Mapping[str, float] = {"second convolution": 4.0, "whole network": 3.1}
SEED_BATCH = 128


# ------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True, slots=True)
class Setting:
    """The options of a measurement.

    Attributes:
        folder: The folder of the models.
        contenders: The contenders by name.
        python: The interpreter for packages that this one does not have; None for this one.
        threads: Threads inside one operator.
        seconds: The total time for which the models of one row run in turn.
        remake: Contenders whose models are made again.
    """

    folder: Path
    contenders: Mapping[str, Contender]
    python: str | None = None
    threads: int = 1
    seconds: float = 10.0
    remake: frozenset[str] = frozenset()


def available(names: Iterable[str], python: str | None, *, openvino: bool) -> tuple[dict[str, Contender], list[str]]:
    """Return the contenders that are installed, and a note about each other one.

    Args:
        names: The names of contenders.
        python: The interpreter for packages that this one does not have; None for this one.
        openvino: Whether to return contenders that run in OpenVINO.
    """
    found: dict[str, Contender] = {}
    notes = []
    has_openvino = openvino and has("openvino")
    for name in names:
        contender = CONTENDERS[name]
        if contender.runtime in OPENVINO and not has_openvino:
            if openvino:
                notes.append(skipped(contender.label, "openvino"))
        elif contender.needs and not has(contender.needs, python):
            notes.append(skipped(contender.label, contender.needs, python))
        else:
            found[name] = contender
    return found, notes


def made_once(
    path: Path, function: str, *, python: str | None = None, anew: bool = False, **arguments: Any
) -> dict[str, Any]:
    """Call a function of `contenders` that writes `path`, unless the file exists; return the result of the call.

    A JSON file beside `path` keeps the result.

    Raises:
        ContenderError: The call fails.
    """
    record = path.with_suffix(".json")
    if anew or not (path.is_file() and record.is_file()):
        record.unlink(missing_ok=True)
        record.write_text(json.dumps(call(function, python=python, **arguments)))
    result: dict[str, Any] = json.loads(record.read_text())
    return result


def make(setting: Setting, folder: Path, form: str, batch: int) -> tuple[Path, dict[str, Any]]:
    """Quantize a model in one form; return the path, and the result of the call or ``error``."""
    if form == "float":
        return folder / "float.onnx", {}
    row = FORMS[form]
    sizes = f"-b{batch}-t{setting.threads}" if row.per_batch else ""
    output = folder / f"{form}{sizes}{row.suffix}"
    arguments = {
        **float_files(folder),
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
    setting: Setting, model: str, feed: Path, operators: Sequence[str], batch: int = 1, guarded: bool = False
) -> Row:
    """Quantize and time the models of one row.

    Args:
        setting: The options.
        model: The name of the model, and of the folder of its files.
        feed: The file of the feed that is timed.
        operators: The operators of the model.
        batch: The number of items in the feed.
        guarded: Whether this project may write a float model, as for users.
    """
    folder = setting.folder / model
    offered = {
        name: (GUARDED[name],) if guarded and name in GUARDED else forms_for(contender, operators)
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
    cpu = setting.threads == 1
    timed = call("timed", cases=cases, feeds=str(feed), threads=setting.threads, seconds=setting.seconds, cpu=cpu)
    return build_row(model, timed, made, offered, goal_of(model))


def prepare(setting: Setting, model: str, batch: int) -> tuple[Path, list[str]]:
    """Write a generated architecture and its feeds; return the file of the timed feed, and the operators."""
    folder = setting.folder / model
    folder.mkdir(parents=True, exist_ok=True)
    network = made_once(folder / "float.onnx", "network", name=model, **float_files(folder))
    feed = folder / f"feed-b{batch}.npz"
    made_once(feed, "batch", name=model, size=batch, feeds=str(feed))
    return feed, network["operators"]


def generated(setting: Setting, model: str, batch: int) -> Row:
    """Measure a generated architecture."""
    feed, operators = prepare(setting, model, batch)
    return measure(setting, model, feed, operators, batch)


def real(setting: Setting, kit: Path, task: str, samples: int) -> Row:
    """Measure a task of the kit of real models. This project may write a float model, as for users."""
    folder = setting.folder / task
    folder.mkdir(parents=True, exist_ok=True)
    files = float_files(folder)
    network = made_once(folder / "float.onnx", "task", kit=str(kit), name=task, samples=samples, **files)
    return measure(setting, task, Path(files["feeds"]), network["operators"], guarded=True)


# --------------------------------------------------------------------------------------------------- programs


@click.group()
def main() -> None:
    """Measure how fast INT8 models are."""


SHARED = (
    click.option("--only", default="", help="Models, separated by commas. [default: all]"),
    click.option(
        "--models", type=click.Path(path_type=Path, file_okay=False), help="Keep the models in this folder; reuse them."
    ),
    click.option("--remake", default="ours", show_default=True, help="Contenders whose kept models are made again."),
    click.option("--threads", default=1, show_default=True),
    click.option("--seconds", default=10.0, show_default=True, help="Total time for which the models of a row run."),
    click.option("--json", "as_json", is_flag=True),
)


@main.command()
@click.option("--batch", default="1,16", show_default=True, help="Items per run; one table for each.")
@click.option("--contenders", default=",".join(CONTENDERS), show_default=True)
@click.option("--openvino", is_flag=True, help="Also time models in OpenVINO.")
@PEERS_PYTHON
@with_options(SHARED)
def table(batch: str, contenders: str, openvino: bool, peers_python: str | None, as_json: bool, **options: Any) -> None:
    """Compare all contenders on generated architectures."""
    found, notes = available(chosen(contenders, CONTENDERS, "contender"), peers_python, openvino=openvino)
    only = chosen(options.pop("only"), GOALS, "architecture") or list(GOALS)
    tables = {}
    with tempfile.TemporaryDirectory() as temporary:
        setting = _setting(temporary, found, peers_python, **options)
        for size in map(int, batch.split(",")):
            tables[size] = [generated(setting, name, size) for name in only]
            if not as_json:
                title = f"batch {size}, {setting.threads} thread(s); speed-up over FP32 in ONNX Runtime"
                _print(to_table(title, tables[size], found), footnotes(tables[size]))
    if as_json:
        print(json.dumps({"notes": notes, **{f"batch {n}": [*map(to_json, r)] for n, r in tables.items()}}, indent=2))
    for note in notes:
        click.echo(note, err=True)


@main.command()
@KIT
@click.option("--samples", default=8, show_default=True, help="Number of calibration samples.")
@click.option("--contenders", default="static,ours", show_default=True)
@click.option("--openvino", is_flag=True, help="Also time models in OpenVINO, those of its contenders that are named.")
@PEERS_PYTHON
@with_options(SHARED)
def kit(
    folder: Path,
    samples: int,
    contenders: str,
    openvino: bool,
    peers_python: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare this project and other quantizers on real models.

    FOLDER, or the variable REALKIT, contains a realkit.py. The first calibration sample is timed.
    """
    folder = folder.resolve()
    only = chosen_tasks(folder, options.pop("only"))
    found, notes = available(chosen(contenders, CONTENDERS, "contender"), peers_python, openvino=openvino)
    with tempfile.TemporaryDirectory() as temporary:
        setting = _setting(temporary, found, peers_python, **options)
        rows = [real(setting, folder, task, samples) for task in only]
    if as_json:
        print(json.dumps([to_json(row) for row in rows], indent=2))
    else:
        title = f"real models, {setting.threads} thread(s); speed-up over FP32 in ONNX Runtime"
        _print(to_table(title, rows, setting.contenders, noise=True), footnotes(rows))
    for note in notes:
        click.echo(note, err=True)


@main.command()
@click.option("--batch", default=SEED_BATCH, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def seed(batch: int, threads: int, as_json: bool) -> None:
    """Measure the network of `benchmarks.seed_table`, and say in which type its first convolution computes."""
    from benchmarks import seed_table
    from requant.quantize import Options, quantize_model

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "int8.onnx"
        options = Options(batch=batch, threads=threads, force_int8=True)
        result = quantize_model(seed_table.MODEL, seed_table.CALIBRATION, output, options)
        found, rows = seed_table.measure(output, batch, threads)
        first = first_convolution(output, batch, threads)
    times = {"predicted_ms": getattr(result, "predicted_ms", None), "latency": result.to_json()["latency"]}
    ratios = {
        "second convolution": rows["float"]["conv2_us"] / rows["int8"]["conv2_us"],
        "whole network": found.latencies[-1].speedup,
    }
    if as_json:
        facts = {"first convolution": first, "predicted": predicted_ratio(times), "missed": seed_missed(ratios)}
        print(json.dumps({**ratios, **facts}, indent=2))
        return
    rows_table = plain_table(f"batch {batch}, {threads} thread(s)", ("", "measured", "goal"))
    for name, ratio in ratios.items():
        rows_table.add_row(name, f"{ratio:.2f}x", f"{SEED_GOALS[name]:g}x")
    rows_table.add_row("first convolution", first, "")
    rows_table.add_row("predicted", percent(predicted_ratio(times)), f"within {PREDICTED:.0%}")
    _print(rows_table, [f"missed: {name}" for name in seed_missed(ratios)])


def first_convolution(model: Path, batch: int, threads: int) -> str:
    """Return the type in which the first convolution computes: ``float`` or ``int8``."""
    from benchmarks import seed_table
    from requant.quantize.runtime.inputs import open_data, stacked
    from requant.quantize.runtime.profile import profiled

    feed = stacked(open_data(seed_table.MODEL, seed_table.TEST), batch).feed
    run = next(
        run
        for run in profiled(model, feed, threads=threads).runs
        if run.op.endswith(("Conv", "ConvInteger", "Convolution"))
    )
    return "int8" if run.integer else "float"


def seed_missed(ratios: Mapping[str, float]) -> list[str]:
    """Return the missed goals of the network of `benchmarks.seed_table`."""
    return [name for name, goal in SEED_GOALS.items() if ratios[name] < goal]


def _setting(
    temporary: str,
    contenders: Mapping[str, Contender],
    python: str | None,
    models: Path | None,
    remake: str,
    threads: int,
    seconds: float,
) -> Setting:
    """Return the setting for these options."""
    anew = frozenset(chosen(remake, CONTENDERS, "contender")) if models is not None else frozenset()
    return Setting(models or Path(temporary), contenders, python, threads, seconds, anew)


def _print(found: Table, notes: Iterable[str]) -> None:
    """Print a table, the notes below it, and an empty line."""
    print_table(found, [*notes, ""], width=160)


if __name__ == "__main__":
    main()

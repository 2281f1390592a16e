"""One table of all models of kits: accuracy, speed and time of quantization, by contender.

    python -m benchmarks.models KIT... [--only mbv1_075,minilm_l3] [--contenders default,dynamic] [--models kept]
    python -m benchmarks.models KIT... --json > rows.jsonl
    python -m benchmarks.models KIT... --options "--runtime openvino" --contenders default
    python -m benchmarks.models KIT... --contenders default,dynamic,block     # static and dynamic forms, and blocks
    python -m benchmarks.models KIT... --contenders default,ablation          # what each rewrite and each form gains

KIT is the script of a kit, or a folder with one script. A script has a dict ``TASKS`` whose values have the path of
their float ``model``; a function ``NAME_calib`` for each task that yields calibration feeds; and a command
``compare TASK FLOAT INT8`` that prints the metric of both models: ``name FLOAT -> INT8``, or a table in which ``*``
marks the row ``name FLOAT INT8 CHANGE``. It may print ``broken by INT8 N, fixed by INT8 N, of N`` and ``agreement of
predictions N %``. With the option ``--runtime openvino`` all metrics and times are those in OpenVINO.

The contender ``ablation`` stands for one ``without-PART`` for each part of `benchmarks.parts` that changes a model:
steps of the group ``simplify``, and forms that the plan of the default has. The default is made first.

Each contender quantizes in a process of its own. Then one process runs the float model, the simplified float model and
all contenders in turn on the first calibration feeds, on one thread; the minimum of CPU time counts. The rows of a task
are printed when it is done. A contender that fails has a row with its error, and does not end the program.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.contenders import ContenderError, call, failure
from benchmarks.measurements import NOISE, one_line
from benchmarks.options import chosen
from benchmarks.parts import PARTS, forms_of, steps_of

REQUANT = "import sys; from requant.cli import main; sys.exit(main(sys.argv[1:]))"
REQUANT_WITHOUT = f"from benchmarks.parts import PARTS; PARTS[{{!r}}](); {REQUANT}"
WITHOUT, ABLATION = "without-", "ablation"
RELATIVE = 0.01
"""The largest drop, as a share of the float value."""
POINTS = {"top1": 0.003}
"""The largest drop of metrics that are shares of classified items."""
IN_OPENVINO = Path(__file__).with_name("in_openvino.py")
FEEDS = 3
"""The number of feeds that are timed."""
NUMBER = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan)"
ARROW = re.compile(rf"^(?P<name>.*?):? (?P<before>{NUMBER}) -> (?P<after>{NUMBER})", re.MULTILINE)
MARKED = re.compile(rf"^ *(?P<name>\S.*?) +(?P<before>{NUMBER}) +(?P<after>{NUMBER}) +{NUMBER} \*$", re.MULTILINE)
AGREEMENT = re.compile(rf"agreement of predictions (?P<share>{NUMBER}) %")
ITEMS = re.compile(r"broken by INT8 (?P<broken>\d+), fixed by INT8 (?P<fixed>\d+), of (?P<items>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task of a kit, and the folder for its files.

    Attributes:
        script: The script of the kit.
        task: The name of the task.
        model: The path of the float model.
        lower: Whether a lower metric is better.
        folder: The folder of the models.
        options: More options of ``requant quantize``.
        seconds: The total time for which the models run.
    """

    script: Path
    task: str
    model: Path
    lower: bool
    folder: Path
    options: tuple[str, ...] = ()
    seconds: float = 10.0

    @property
    def runtime(self) -> str:
        """What runs the models: a key of `measurements.LOADERS`."""
        return "openvino" if "openvino" in self.options else "onnxruntime"

    @property
    def data(self) -> str:
        """The calibration data, as users name them."""
        return f"{self.script}:{self.task}_calib"

    @property
    def feeds(self) -> Path:
        """The file with the calibration feeds."""
        return self.folder / "feeds.npz"

    @property
    def simple(self) -> Path:
        """The path of the simplified float model."""
        return self.folder / "simplified.onnx"

    def output(self, contender: str) -> Path:
        """Return the path of the model of a contender."""
        return self.folder / f"{contender}.onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The measurements of one model.

    Attributes:
        kit: The name of the kit's script.
        task: The task.
        contender: A key of `CONTENDERS`.
        metric: The name of the metric.
        lower: Whether a lower value is better.
        before: The metric of the float model; None without a result.
        after: The metric of the contender's model.
        broken: Items that only the float model gets right; None if the kit counts no items.
        fixed: Items that only the contender's model gets right.
        items: The number of items.
        agreement: The share of equal predictions; None if the kit does not print it.
        float_ms: Minimum CPU time of the float model.
        simple_ms: Minimum CPU time of the simplified float model.
        ms: Minimum CPU time of the contender's model.
        seconds: The time that the quantizer took.
        size: The size of the model in bytes.
        verdict: Why this project wrote the float model.
        error: Why something is missing.
    """

    kit: str
    task: str
    contender: str
    metric: str = ""
    lower: bool = False
    before: float | None = None
    after: float | None = None
    broken: int | None = None
    fixed: int | None = None
    items: int | None = None
    agreement: float | None = None
    float_ms: float | None = None
    simple_ms: float | None = None
    ms: float | None = None
    seconds: float | None = None
    size: int | None = None
    verdict: str = ""
    error: str = ""

    @property
    def over_float(self) -> float | None:
        """The speed-up over the float model."""
        return self.float_ms / self.ms if self.float_ms and self.ms else None

    @property
    def over_simple(self) -> float | None:
        """The speed-up over the simplified float model."""
        return self.simple_ms / self.ms if self.simple_ms and self.ms else None

    @property
    def drop(self) -> float | None:
        """How much worse the metric is; negative if it is better."""
        if self.before is None or self.after is None:
            return None
        return (self.after - self.before) * (1 if self.lower else -1)


def missed(row: Row) -> list[str]:
    """Return the goals that a model misses: it is as accurate as float, and as fast as float and simplified float."""
    if row.after is None or row.before is None or row.drop is None:
        return ["no result"]
    allowed = POINTS.get(row.metric, RELATIVE * abs(row.before))
    reasons = [] if row.drop <= allowed + 1e-9 else [f"drop above {allowed:.4g}"]
    for than, ratio in (("float", row.over_float), ("simplified float", row.over_simple)):
        if ratio is not None and ratio < 1 - NOISE:
            reasons.append(f"slower than {than}")
    return reasons


def judged(printed: str) -> dict[str, Any]:
    """Return the values of a row that the command ``compare`` of a kit printed.

    Raises:
        ContenderError: It has no metric.
    """
    found = MARKED.search(printed) or ARROW.search(printed)
    if found is None:
        first = next(iter(printed.split("\n")), "")
        raise ContenderError(f"the kit printed no metric: {first[:100]!r}")
    counted, agreed = ITEMS.search(printed), AGREEMENT.search(printed)
    return {
        "metric": found["name"].strip(),
        "before": float(found["before"]),
        "after": float(found["after"]),
        "agreement": None if agreed is None else float(agreed["share"]) / 100,
        **({} if counted is None else {key: int(value) for key, value in counted.groupdict().items()}),
    }


# ------------------------------------------------------------------------------------------------------ contenders


def run(command: Sequence[str], *, accepted: Sequence[int] = (0,)) -> str:
    """Run a program and return its output.

    Raises:
        ContenderError: The exit code is not accepted; the text is the last line of the errors.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode not in accepted:
        raise failure(done)
    return done.stdout


def environment() -> dict[str, str]:
    """Return the variables for a kit: its sessions register the native operators, if they are built."""
    from requant.calibration.model.session import native_library

    return {"KIT_LIBRARY": native_library() or "", **os.environ}


def requant(*arguments: str, accepted: Sequence[int] = (0,), without: str = "") -> str:
    """Run a command of this project, without a part of it, and return its output."""
    program = REQUANT_WITHOUT.format(without) if without else REQUANT
    return run([sys.executable, "-c", program, *arguments], accepted=accepted)


def by_default(job: Job, output: Path, without: str = "") -> str:
    """Quantize with the data of the task; return why the output is not INT8."""
    return quantized(job, output, "--data", job.data, without=without)


def dynamically(job: Job, output: Path) -> str:
    """Quantize without data; return why the output is not INT8."""
    return quantized(job, output, "--dynamic")


def in_blocks(job: Job, output: Path) -> str:
    """Quantize the weights of matrix products in blocks; return why the output is not INT8."""
    return quantized(job, output, "--data", job.data, "--strategy", "block")


def quantized(job: Job, output: Path, *options: str, without: str = "") -> str:
    """Run ``requant quantize`` and return why the output is not INT8. With exit code 1 the output is a float model."""
    command = ["quantize", str(job.model), "-o", str(output), "--json", "--force", *options, *job.options]
    printed = json.loads(requant(*command, accepted=(0, 1), without=without))
    return str(printed.get("why_not") or "")


def with_runtime(function: str) -> Callable[[Job, Path], str]:
    """Return a contender that is a quantizer of ONNX Runtime, with its preprocessing."""

    def make(job: Job, output: Path) -> str:
        if function == "static" and not job.feeds.is_file():
            call("calibration", script=str(job.script), name=job.task, feeds=str(job.feeds))
        call(function, model=str(job.model), feeds=str(job.feeds), output=str(output))
        return ""

    return make


CONTENDERS: Mapping[str, Callable[[Job, Path], str]] = {
    "default": by_default,
    "dynamic": dynamically,
    "ort-static": with_runtime("static"),
    "ort-dynamic": with_runtime("dynamic"),
    "block": in_blocks,
    **{f"{WITHOUT}{part}": partial(by_default, without=part) for part in PARTS},
}
"""Each writes a model and returns a verdict, or raises a ContenderError."""


# ------------------------------------------------------------------------------------------------------- measuring


def made(job: Job, contender: str) -> Row:
    """Quantize with a contender; return a row with the time, or with the error."""
    row = Row(kit=job.script.stem, task=job.task, contender=contender, lower=job.lower)
    output = job.output(contender)
    output.unlink(missing_ok=True)
    start = time.perf_counter()
    try:
        verdict = CONTENDERS[contender](job, output)
        seconds, size = time.perf_counter() - start, output.stat().st_size
    except (ContenderError, OSError, ValueError) as error:
        return replace(row, error=one_line(error))
    return replace(row, seconds=seconds, verdict=verdict, size=size)


def compared(job: Job, row: Row) -> Row:
    """Return a row with the metric of the float model and of the contender's model."""
    if row.error:
        return row
    judge = [str(IN_OPENVINO)] if job.runtime == "openvino" else []
    models = [str(job.model), str(job.output(row.contender))]
    command = [sys.executable, *judge, str(job.script), "compare", job.task, *models]
    try:
        return replace(row, **judged(run(command)))
    except ContenderError as error:
        return replace(row, error=str(error))


def timed(job: Job, rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the times of all models, run in turn."""
    models = {"float": job.model, "simplified": job.simple}
    models |= {row.contender: job.output(row.contender) for row in rows if not row.error}
    cases = [
        {"name": name, "model": str(path), "runtime": job.runtime} for name, path in models.items() if path.is_file()
    ]
    try:
        if not job.feeds.is_file():
            call("calibration", script=str(job.script), name=job.task, feeds=str(job.feeds))
        found = call("timed", cases=cases, feeds=str(job.feeds), threads=1, seconds=job.seconds, count=FEEDS, cpu=True)
    except ContenderError as error:
        return [replace(row, error=row.error or str(error)) for row in rows]
    return [with_times(row, found) for row in rows]


def with_times(row: Row, found: Mapping[str, Any]) -> Row:
    """Return a row with its times, or with the error of the run.

    Args:
        row: The row.
        found: By model, ``ms`` or ``error``.
    """
    own = found.get(row.contender, {})
    ms = {name: found.get(name, {}).get("ms") for name in ("float", "simplified")}
    error = row.error or own.get("error", "")
    return replace(row, float_ms=ms["float"], simple_ms=ms["simplified"], ms=own.get("ms"), error=error)


def measured(job: Job, contenders: Sequence[str], tell: Callable[[str], None]) -> list[Row]:
    """Measure a task with all contenders."""
    job.folder.mkdir(parents=True, exist_ok=True)
    tell(f"{job.task}: simplify")
    try:
        requant("transform", str(job.model), str(job.simple), "--group", "simplify", "--force")
    except ContenderError as error:  # the rows then have no time of the simplified model
        tell(f"{job.task}: {error}")
        job.simple.unlink(missing_ok=True)
    rows: list[Row] = []
    todo = list(contenders)
    while todo:
        contender = todo.pop(0)
        if contender == ABLATION:
            todo = [*(f"{WITHOUT}{part}" for part in parts_of(job)), *todo]
            continue
        tell(f"{job.task}: {contender}")
        rows.append(compared(job, made(job, contender)))
    tell(f"{job.task}: time")
    return timed(job, rows)


def parts_of(job: Job) -> list[str]:
    """Return the parts that change the model of a task, after its default model is made."""
    plan = job.output("default").with_suffix(".plan.json")
    units = json.loads(plan.read_text(encoding="utf-8"))["units"].values() if plan.is_file() else ()
    return [*steps_of(job.model), *forms_of((unit["operator"], unit["implementation"]) for unit in units)]


def script_of(kit: Path) -> Path:
    """Return the script of a kit: the path itself, or the only script of a folder.

    Raises:
        click.BadParameter: The folder has no script, or several.
    """
    if kit.is_file():
        return kit.resolve()
    scripts = sorted(kit.glob("*.py"))
    if len(scripts) != 1:
        raise click.BadParameter(f"{kit}: {len(scripts)} scripts; name one")
    return scripts[0].resolve()


def jobs(kits: Sequence[Path], only: str, folder: Path, options: str, seconds: float) -> Iterator[Job]:
    """Yield the tasks of all kits, or those that `only` names.

    Raises:
        click.ClickException: A script is no kit.
        click.BadParameter: No kit has a task.
    """
    tasks: list[tuple[Path, str, Mapping[str, Any]]] = []
    for script in map(script_of, kits):
        try:
            tasks += [(script, name, task) for name, task in call("described", script=str(script)).items()]
        except ContenderError as error:
            raise click.ClickException(f"{script}: {error}") from error
    names = chosen(only, [name for _, name, _ in tasks], "task")
    more = tuple(shlex.split(options))
    for script, name, task in tasks:
        if not names or name in names:
            place = folder / script.stem / name
            yield Job(
                script=script,
                task=name,
                model=Path(task["model"]),
                lower=task["lower"],
                folder=place,
                options=more,
                seconds=seconds,
            )


# -------------------------------------------------------------------------------------------------------- printing


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    Attributes:
        title: The title.
        width: The width; the text is on the right if it is negative.
        text: Returns the text of a row.
    """

    title: str
    width: int
    text: Callable[[Row], str] = field(repr=False)

    def padded(self, text: str) -> str:
        """Return a text in the width of the column."""
        return text.rjust(-self.width) if self.width < 0 else text.ljust(self.width)


def number(value: float | None, form: str) -> str:
    """Return a number as text; empty if it is None."""
    return "" if value is None else format(value, form)


COLUMNS = (
    Column("task", 22, lambda row: row.task),
    Column("contender", 27, lambda row: row.contender),
    Column("metric", 27, lambda row: row.metric),
    Column("float", -8, lambda row: number(row.before, ".4f")),
    Column("INT8", -8, lambda row: number(row.after, ".4f")),
    Column("broken", -6, lambda row: number(row.broken, "d")),
    Column("fixed", -5, lambda row: number(row.fixed, "d")),
    Column("agree", -7, lambda row: number(row.agreement, ".2%")),
    Column("ms", -8, lambda row: number(row.ms, ".3f")),
    Column("float/", -6, lambda row: number(row.over_float, ".2f")),
    Column("simple/", -7, lambda row: number(row.over_simple, ".2f")),
    Column("seconds", -7, lambda row: number(row.seconds, ".0f")),
    Column("kB", -7, lambda row: number(None if row.size is None else row.size / 1000, ".0f")),
    Column("", 1, lambda row: "; ".join(filter(None, (*missed(row), row.error, row.verdict)))),
)
"""``float/`` and ``simple/`` are the speed-ups over the float model and over the simplified float model."""


def line(texts: Sequence[str]) -> str:
    """Return a line of the table."""
    return "  ".join(column.padded(text) for column, text in zip(COLUMNS, texts, strict=True)).rstrip()


def to_json(row: Row) -> str:
    """Return a row as a line of JSON."""
    ratios = {"over_float": row.over_float, "over_simple": row.over_simple, "missed": missed(row)}
    return json.dumps({**asdict(row), **ratios})


@click.command()
@click.argument("kits", nargs=-1, required=True, metavar="KIT...", type=click.Path(path_type=Path, exists=True))
@click.option("--only", default="", help="Tasks, separated by commas. [default: all]")
@click.option("--contenders", default=",".join(list(CONTENDERS)[:3]), show_default=True)
@click.option("--models", type=click.Path(path_type=Path, file_okay=False), help="Keep the models in this folder.")
@click.option("--options", default="", metavar="TEXT", help="More options of 'requant quantize': '--effort low'.")
@click.option("--seconds", default=10.0, show_default=True, help="Total time for which the models of a task run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def main(
    kits: tuple[Path, ...],
    only: str,
    contenders: str,
    models: Path | None,
    options: str,
    seconds: float,
    as_json: bool,
) -> None:
    """Measure all models of kits with all contenders."""
    names = chosen(contenders, [*CONTENDERS, ABLATION], "contender")
    with tempfile.TemporaryDirectory(prefix="requant-models-") as temporary:
        work = list(jobs(kits, only, (models or Path(temporary)).resolve(), options, seconds))
        if not as_json:
            click.echo(line([column.title for column in COLUMNS]))
        for job in work:
            for row in measured(job, names, lambda text: click.echo(text, err=True)):
                click.echo(to_json(row) if as_json else line([column.text(row) for column in COLUMNS]))


if __name__ == "__main__":
    main()

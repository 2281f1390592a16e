"""What a busy machine changes: placements, verdicts and speed-ups with and without other processes on the processors.

    python -m benchmarks.busy                       # the sample models
    python -m benchmarks.busy KIT... [--only mbv1_075,kwt1] [--effort medium] [--processes 4] [--limit 180]

KIT is as in `benchmarks.models`. Each model is quantized twice without cached costs: on the machine as it is, and while
processes that compute all the time run beside it. They run for `--limit` seconds at most; models for which no time is
left have no row. At last both INT8 models run in turn on the machine as it is.

A row is fine if the speed-up, and the time of the INT8 model, change by at most 5 %, and the verdict does not, or if
the busy run says how unsure it is. The exit code is 1 if a row is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.models import REQUANT, jobs
from benchmarks.options import chosen
from benchmarks.tables import plain_table, print_table
from requant.quantize.runtime.clock import SURE, race
from requant.quantize.runtime.inputs import open_data
from requant.quantize.runtime.session import Runner

SAMPLES = Path(__file__).parents[1] / "sample_models"
SAMPLE_MODELS = ("digits", "digits_mobile", "digits_transformer")
CHANGE = 0.05
"""The greatest change that needs no remark."""
COLUMNS = ("model", "quiet", "busy", "change", "told", "same time", "seconds", "")


@dataclass(frozen=True, slots=True)
class Task:
    """A model and its data, as the command line names them."""

    name: str
    model: Path
    data: str


@dataclass(frozen=True, slots=True)
class Run:
    """What `requant quantize` said.

    Attributes:
        speedup: The speed-up of the INT8 model, also of one that was rejected.
        uncertainty: The greatest uncertainty that it told, of the speed-up or of the choice of the plan.
        int8: Whether the INT8 model was written.
        told: Whether it told that it is unsure.
        seconds: How long it took.
        output: The model.
    """

    speedup: float
    uncertainty: float
    int8: bool
    told: bool
    seconds: float
    output: Path


@dataclass(frozen=True, slots=True)
class Row:
    """A model, quantized on the quiet and on the busy machine.

    Attributes:
        task: The model.
        quiet: The run on the machine as it is.
        busy: The run beside other processes.
        slower: The time of the second INT8 model over the time of the first, both on the machine as it is.
    """

    task: Task
    quiet: Run
    busy: Run
    slower: float

    @property
    def change(self) -> float:
        """The change of the speed-up, as a share of it."""
        return self.busy.speedup / self.quiet.speedup - 1

    @property
    def missed(self) -> str:
        """What changed without a remark of the busy run; empty if nothing did."""
        found = ["speed-up"] if abs(self.change) > CHANGE else []
        found += ["placement"] if self.slower > 1 + CHANGE else []
        found += ["verdict"] if self.quiet.int8 is not self.busy.int8 else []
        return "" if self.busy.told else ", ".join(found)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Let processes compute while the block runs."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def quantized(task: Task, output: Path, options: Sequence[str], limit: float) -> Run | None:
    """Quantize without cached costs; None if it takes longer than a limit in seconds."""
    command = [sys.executable, "-c", REQUANT, "quantize", str(task.model), "--data", task.data, "-o", str(output)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="requant-busy-cache-") as cache:
        try:
            done = subprocess.run(
                [*command, "--json", *options],
                capture_output=True,
                text=True,
                check=False,
                timeout=limit,
                env={**os.environ, "REQUANT_CACHE": cache},
            )
        except subprocess.TimeoutExpired:
            return None
    if done.returncode not in (0, 1):
        raise click.ClickException(f"{task.name}: {done.stderr.strip()[-400:]}")
    return said(json.loads(done.stdout), time.monotonic() - began, output)


def said(found: dict[str, Any], seconds: float, output: Path) -> Run:
    """Return a run from the JSON of `requant quantize`."""
    latency, placement = (found["rejected"] or found)["latency"], found["placement"]
    unsure = max(latency["uncertainty"], placement["uncertainty"])
    told = unsure > SURE or not placement["costs_sure"]
    return Run(latency["speedup"], unsure, not found["why_not"], told, seconds, output)


def slower(task: Task, first: Path, second: Path, seconds: float) -> float:
    """Return the CPU time of a run of the second model over that of the first, on the first sample, on one thread."""
    feed = next(iter(open_data(first, task.data))).feed
    one, two = race([partial(Runner(path, threads=1), feed) for path in (first, second)], seconds=seconds, threads=1)
    return two.least / one.least


def tasks(kits: Sequence[Path], only: str, folder: Path) -> list[Task]:
    """Return the tasks of kits, or the sample models without any; those that `only` names."""
    if kits:
        return [Task(job.task, job.model, job.data) for job in jobs(kits, only, folder, "", 0.0)]
    names = chosen(only, SAMPLE_MODELS, "model") or SAMPLE_MODELS
    return [Task(name, SAMPLES / f"{name}.onnx", f"{SAMPLES / 'digits.npz'}:calib") for name in names]


def measured(work: Sequence[Task], folder: Path, options: Sequence[str], count: int, limit: float) -> list[Row]:
    """Quantize each model on the quiet and on the busy machine; return a row for each that was finished in time."""
    rows, left = [], limit
    for task in work:
        click.echo(f"{task.name}: {left:.0f} seconds of load are left", err=True)
        quiet = quantized(task, folder / f"{task.name}-quiet.onnx", options, 3600.0)
        began = time.monotonic()
        with busy(count):
            loaded = quantized(task, folder / f"{task.name}-busy.onnx", options, left)
        left -= time.monotonic() - began
        if quiet is not None and loaded is not None:
            rows.append(Row(task, quiet, loaded, slower(task, quiet.output, loaded.output, 2.0)))
            click.echo("  ".join(cells(rows[-1])), err=True)
        if left <= 0:
            break
    return rows


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row; see `COLUMNS`."""
    verdicts = [f"{run.speedup:.2f}x{'' if run.int8 else ' float'}" for run in (row.quiet, row.busy)]
    told = f"+-{row.busy.uncertainty:.1%}" + (" told" if row.busy.told else "")
    seconds = f"{row.quiet.seconds:.0f} -> {row.busy.seconds:.0f}"
    missed = f"MISSED: {row.missed}" if row.missed else ""
    return (row.task.name, *verdicts, f"{row.change:+.1%}", told, f"{row.slower:.3f}", seconds, missed)


def print_rows(rows: Sequence[Row]) -> None:
    """Print one table."""
    table = plain_table("", COLUMNS, left=("model", ""))
    for row in rows:
        table.add_row(*cells(row))
    print_table(table)


@click.command()
@click.argument("kits", nargs=-1, metavar="[KIT]...", type=click.Path(path_type=Path, exists=True))
@click.option("--only", default="", help="Tasks, separated by commas. [default: all]")
@click.option("--effort", default="low", show_default=True)
@click.option("--processes", default=4, show_default=True, help="How many processes compute beside the busy run.")
@click.option("--limit", default=180.0, show_default=True, help="Seconds for which they run, all models together.")
def main(kits: tuple[Path, ...], only: str, effort: str, processes: int, limit: float) -> None:
    """Quantize models on the quiet and on the busy machine."""
    with tempfile.TemporaryDirectory(prefix="requant-busy-") as folder:
        work = tasks(kits, only, Path(folder))
        rows = measured(work, Path(folder), ["--effort", effort], processes, limit)
    print_rows(rows)
    for task in work[len(rows) :]:
        click.echo(f"{task.name}: no time was left")
    sys.exit(any(row.missed for row in rows))


if __name__ == "__main__":
    main()

"""Every model of onnx's own backend test suite through `requant quantize`: what comes of each, as a table of counts.

    python -m benchmarks.backend_suite [--sample N] [--only TEXT] [--form FORM] [--jobs 2] [--json]

A model goes through as it is, with data; with all inputs but one made constant, which is how an operator gets weights;
between products, so that its operator has integer neighbours; and ``dynamic``, without data. The outputs of what is
written are held against those of the float model, within bounds that `benchmarks.error_bounds` derives from the scales
in the graph, and against those without the runtime's optimisations.

Processes of their own quantize, so that an abort of the runtime is a row of the table too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import click

from benchmarks.backend_cases import FORMS, Task, tasks
from benchmarks.backend_judge import FAILED, Outcome, carry_out, in_order, label

TIMEOUT = 300.0  # seconds for one task
DIED, ENDLESS = "the process died", "it does not end"


def work(pipe: Connection) -> None:
    """Carry out tasks until there are no more."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stderr = nowhere
        while (task := pipe.recv()) is not None:
            pipe.send(carry_out(task))


@dataclass
class Worker:
    """A process with what it is doing.

    Attributes:
        process: The process.
        pipe: The way to it.
        task: What it is doing.
        since: When it began, in seconds of the monotonic clock.
    """

    process: BaseProcess
    pipe: Connection
    task: Task
    since: float

    @staticmethod
    def start(task: Task) -> Worker:
        """Start a process with its first task."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there,), daemon=True)
        process.start()
        there.close()
        here.send(task)
        return Worker(process, here, task, time.monotonic())

    def give(self, task: Task) -> None:
        """Hand over the next task."""
        self.pipe.send(task)
        self.task, self.since = task, time.monotonic()

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def outcome(self) -> Outcome:
        """Return what it has to say, or what became of it."""
        try:
            if self.pipe.poll():
                found = self.pipe.recv()
                assert isinstance(found, Outcome)
                return found
            detail, message = ENDLESS, f"more than {TIMEOUT:.0f} s"
        except (EOFError, ConnectionError):
            self.process.join(10)
            detail, message = DIED, f"exit code {self.process.exitcode}"
        return Outcome(self.task.name, self.task.form, self.task.operator, FAILED, detail, message)


def outcomes(todo: Iterable[Task], jobs: int, tell: Callable[[Outcome], object] | None = None) -> list[Outcome]:
    """Carry out tasks in processes; one that dies or does not end costs its own task only."""
    coming = iter(todo)
    workers = [Worker.start(task) for _, task in zip(range(jobs), coming, strict=False)]
    found: list[Outcome] = []
    while workers:
        ready = wait([worker.pipe for worker in workers], timeout=1.0)
        for worker in list(workers):
            if worker.pipe not in ready and time.monotonic() - worker.since < TIMEOUT:
                continue
            found.append(worker.outcome())
            if tell is not None:
                tell(found[-1])
            task = next(coming, None)
            if task is not None and found[-1].detail not in (DIED, ENDLESS):
                worker.give(task)
                continue
            worker.end()
            workers.remove(worker)
            if task is not None:
                workers.append(Worker.start(task))
    return sorted(found, key=lambda outcome: (outcome.name, outcome.form))


def counts(found: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Count outcomes by what came out and by form."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in found:
        rows[label(outcome)][outcome.form] += 1
    return {row: {form: rows[row][form] for form in FORMS} for row in in_order(list(rows))}


def print_table(found: Sequence[Outcome]) -> None:
    """Print the table of counts, then the failures."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column in ("", *FORMS, "all"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    rows = counts(found)
    rows["all"] = {form: sum(row[form] for row in rows.values()) for form in FORMS}
    for name, row in rows.items():
        table.add_row(name, *map(str, row.values()), str(sum(row.values())))
    Console(width=120).print(table)
    for outcome in found:
        if outcome.result == FAILED:
            click.echo(f"{outcome.name}, {outcome.form}: {outcome.detail}: {outcome.message}")


@click.command()
@click.option("--sample", type=click.IntRange(1), help="So many models, of all operators. [default: all]")
@click.option("--only", default="", help="Models whose name contains this.")
@click.option("--form", default="", type=click.Choice(["", *FORMS]), help="One form only.")
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(1), help="Processes.")
@click.option("--json", "as_json", is_flag=True, help="The counts and every outcome as one JSON object on stdout.")
def main(sample: int | None, only: str, form: str, jobs: int, as_json: bool) -> None:
    """Quantize the models of the suite and print what came of them; exit code 1 if there is a failure."""
    found = outcomes(tasks(form, only, sample), jobs)
    if as_json:
        json.dump({"counts": counts(found), "outcomes": [asdict(outcome) for outcome in found]}, sys.stdout, indent=1)
    else:
        print_table(found)
    sys.exit(any(outcome.result == FAILED for outcome in found))


if __name__ == "__main__":
    main()

"""Run `requant quantize` on every model of onnx's backend test suite, and count the results in a table.

    python -m benchmarks.backend_suite [--sample N] [--only TEXT] [--form FORM] [--jobs 2] [--json]

Each model is quantized in four forms: unchanged; with all inputs but one made constant, so that the operator has
weights; between products, so that the operator has integer neighbours; and ``dynamic``, without data. The outputs of
the INT8 model are compared with the float outputs, within the bounds of `benchmarks.error_bounds`, and with the outputs
of the same INT8 model without the optimizations of the runtime.

Worker processes quantize, so that an abort of the runtime is also counted in the table.
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
DIED, ENDLESS = "the process died", "timeout"


def work(pipe: Connection) -> None:
    """Carry out tasks from the pipe until the pipe sends None."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stderr = nowhere
        while (task := pipe.recv()) is not None:
            pipe.send(carry_out(task))


@dataclass
class Worker:
    """A process and its current task.

    Attributes:
        process: The process.
        pipe: The connection to the process.
        task: The current task.
        since: The start of the task, in seconds of the monotonic clock.
    """

    process: BaseProcess
    pipe: Connection
    task: Task
    since: float

    @staticmethod
    def start(task: Task) -> Worker:
        """Start a process and send it its first task."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there,), daemon=True)
        process.start()
        there.close()
        here.send(task)
        return Worker(process, here, task, time.monotonic())

    def give(self, task: Task) -> None:
        """Send the next task."""
        self.pipe.send(task)
        self.task, self.since = task, time.monotonic()

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def outcome(self) -> Outcome:
        """Return the outcome of the task; a failure if the process died or the time is over."""
        try:
            if self.pipe.poll():
                outcome = self.pipe.recv()
                assert isinstance(outcome, Outcome)
                return outcome
            detail, message = ENDLESS, f"more than {TIMEOUT:.0f} s"
        except (EOFError, ConnectionError):
            self.process.join(10)
            detail, message = DIED, f"exit code {self.process.exitcode}"
        return Outcome(self.task.name, self.task.form, self.task.operator, FAILED, detail, message)


def outcomes(todo: Iterable[Task], jobs: int, tell: Callable[[Outcome], object] | None = None) -> list[Outcome]:
    """Carry out tasks in processes. A process that dies or does not end fails only its own task.

    Args:
        todo: The tasks.
        jobs: The number of processes.
        tell: Called with each outcome.
    """
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
    """Count the outcomes by row label and by form."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in found:
        rows[label(outcome)][outcome.form] += 1
    return {row: {form: rows[row][form] for form in FORMS} for row in in_order(list(rows))}


def print_counts(found: Sequence[Outcome]) -> None:
    """Print the table of counts, then the failures."""
    from benchmarks.tables import plain_table, print_table

    columns = ("", *FORMS, "all")
    table = plain_table("", columns, no_wrap=columns)
    rows = counts(found)
    rows["all"] = {form: sum(row[form] for row in rows.values()) for form in FORMS}
    for name, row in rows.items():
        table.add_row(name, *map(str, row.values()), str(sum(row.values())))
    print_table(table, width=120)
    for outcome in found:
        if outcome.result == FAILED:
            click.echo(f"{outcome.name}, {outcome.form}: {outcome.detail}: {outcome.message}")


@click.command()
@click.option("--sample", type=click.IntRange(1), help="Number of models, spread over all operators. [default: all]")
@click.option("--only", default="", help="Only models whose name contains this text.")
@click.option("--form", default="", type=click.Choice(["", *FORMS]), help="Only this form.")
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(1), help="Number of processes.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts and all outcomes as one JSON object.")
def main(sample: int | None, only: str, form: str, jobs: int, as_json: bool) -> None:
    """Quantize the models of the suite and print the outcomes. The exit code is 1 if one of them is a failure."""
    found = outcomes(tasks(form, only, sample), jobs)
    if as_json:
        json.dump({"counts": counts(found), "outcomes": [asdict(outcome) for outcome in found]}, sys.stdout, indent=1)
    else:
        print_counts(found)
    sys.exit(any(outcome.result == FAILED for outcome in found))


if __name__ == "__main__":
    main()

"""A progress bar on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ...system.printable import one_line
from .terminal import Terminal

STAGE = 60  # the most characters of the name of a stage


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar while the block runs; the function takes the stage, what is done, and the total."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Terminal(err=True), transient=True) as bar:
        tasks = {"load": bar.add_task("load", total=None)}

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:  # a new task, because rich cannot unset a total
                bar.remove_task(tasks.popitem()[1])
                tasks[stage] = bar.add_task(one_line(stage, STAGE), total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show

"""A progress bar on stderr."""

from __future__ import annotations

from collections.abc import Iterator
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
from ..runtime.progress import Forecast, announcement
from .terminal import Terminal

STAGE = 60  # the most characters of the name of a stage


class Bar:
    """A `Progress` as a bar: the stage, what is done of it, and its time."""

    def __init__(self, bar: Progress) -> None:
        """Show that the model is loaded."""
        self._bar = bar
        self._tasks = {"load": bar.add_task("load", total=None)}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Take the progress."""
        if stage not in self._tasks:  # a new task, because rich cannot unset a total
            self._bar.remove_task(self._tasks.popitem()[1])
            self._tasks[stage] = self._bar.add_task(one_line(stage, STAGE), total=total)
        self._bar.update(self._tasks[stage], completed=done, total=total)

    def expect(self, forecast: Forecast) -> None:
        """Print above the bar how long the work will take, if that is long."""
        text = announcement(forecast)
        if text:
            self._bar.console.print(text, soft_wrap=True)


@contextmanager
def progress_bar() -> Iterator[Bar]:
    """Show a progress bar while the block runs."""
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
        yield Bar(bar)

"""The progress of a command on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import click

from ...system.notes import note
from ..runtime.progress import Forecast, Lines, Progress, expect, silent, ticking
from .app import QUIET, VERBOSE
from .printing import print_line


class NotedProgress:
    """A `Progress` that notes each stage for the process that waits for this one, and passes the calls on."""

    def __init__(self, progress: Progress) -> None:
        """Note nothing yet."""
        self._progress, self._stage = progress, ""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Note a new stage, and pass the call on."""
        if stage != self._stage:
            self._stage = stage
            note(stage=stage)
        self._progress(stage, done, total)

    def expect(self, forecast: Forecast) -> None:
        """Pass on how long the work will take, about."""
        expect(self._progress, forecast)


@contextmanager
def shown_progress() -> Iterator[NotedProgress]:
    """Show a progress bar on stderr if that is a terminal; else lines, one for each stage and one every ten seconds.

    With --verbose each single step is a stage, from the first second on. With --quiet nothing is shown.
    """
    with _shown() as show:
        yield NotedProgress(show)


@contextmanager
def _shown() -> Iterator[Progress]:
    """Show what `shown_progress` describes."""
    meta = click.get_current_context().meta
    if meta.get(QUIET):
        yield silent
    elif not sys.stderr.isatty():
        verbose = bool(meta.get(VERBOSE))
        with ticking(Lines(partial(print_line, err=True), grace=0.0 if verbose else None, detailed=verbose)) as lines:
            yield lines
    else:
        from ..console.progress import progress_bar

        with progress_bar() as show:
            yield show

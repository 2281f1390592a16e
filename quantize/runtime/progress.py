"""Report the progress of long work, and measure the time of its stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with a stage, how much of it is done, and how much there is (None: unknown)."""


def silent(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""


class Stopwatch:
    """A `Progress` that measures the time of each stage and passes the calls on."""

    def __init__(self, progress: Progress = silent) -> None:
        self._progress = progress
        self._seconds: dict[str, float] = {}
        self._stage, self._began = "prepare", time.monotonic()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Start the clock of a new stage, and pass the call on."""
        if stage != self._stage:
            self._lap()
            self._stage = stage
        self._progress(stage, done, total)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage so far, in the order in which the stages began."""
        self._lap()
        return {stage: round(spent, 3) for stage, spent in self._seconds.items()}

    def _lap(self) -> None:
        now = time.monotonic()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._began
        self._began = now

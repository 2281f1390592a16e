"""How long work tells how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with a stage, how much of it is done, and how much there is (None: unknown)."""


def silent(stage: str, done: int, total: int | None) -> None:
    """Tell nobody."""


class Stopwatch:
    """A `Progress` that adds up how long each stage takes, and passes on what it is told."""

    def __init__(self, progress: Progress = silent) -> None:
        self._progress = progress
        self._seconds: dict[str, float] = {}
        self._stage, self._began = "prepare", time.monotonic()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Take notice of a stage."""
        if stage != self._stage:
            self._lap()
            self._stage = stage
        self._progress(stage, done, total)

    def seconds(self) -> dict[str, float]:
        """Return what each stage has taken so far, in seconds, in the order in which they began."""
        self._lap()
        return {stage: round(spent, 3) for stage, spent in self._seconds.items()}

    def _lap(self) -> None:
        now = time.monotonic()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._began
        self._began = now

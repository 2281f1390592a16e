"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with a stage, how much of it is done, and how much there is (None: unknown)."""


def silent(stage: str, done: int, total: int | None) -> None:
    """Tell nobody."""

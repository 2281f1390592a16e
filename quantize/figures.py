"""Numbers as JSON and people want them."""

from __future__ import annotations

import math


def finite(value: float) -> float | None:
    """Return `value`, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def size_text(count: int) -> str:
    """Write a number of bytes: ``1.82 MB``."""
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= least:
            return f"{count / least:.2f} {unit}"
    return f"{count} B"

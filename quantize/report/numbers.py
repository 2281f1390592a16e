"""Numbers as a report writes them."""

from __future__ import annotations

from ..accuracy.verdict import points as rounded

NONE = "\u2013"
CROSS = "\u00d7"


def decibels(value: float | None) -> str:
    """Return ``41.3 dB``."""
    return NONE if value is None else f"{_minus(f'{value:.1f}')} dB"


def percent(value: float | None, places: int = 2) -> str:
    """Return a share as ``98.75 %``."""
    return NONE if value is None else f"{_minus(f'{100 * value:.{places}f}')} %"


def points(value: float) -> str:
    """Return a difference of shares as ``-0.50 points``, with a true minus sign."""
    text = rounded(value)
    return f"{_minus(text if value <= 0 or float(text) == 0 else f'+{text}')} points"


def times(value: float | None) -> str:
    """Return ``2.41`` and a multiplication cross."""
    return NONE if value is None else f"{value:.2f}{CROSS}" if value < 100 else f"{value:.0f}{CROSS}"


def microseconds(value: float | None) -> str:
    """Return ``12.4 µs`` or ``3.21 ms``."""
    if value is None:
        return NONE
    return milliseconds(value / 1000) if value >= 1000 else f"{value:.3g} µs"


def milliseconds(value: float | None) -> str:
    """Return ``3.21 ms``, ``0.0452 ms`` or ``1204 ms``."""
    return NONE if value is None else f"{value:.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def _minus(text: str) -> str:
    return text.replace("-", "\u2212")

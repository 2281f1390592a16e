"""A verdict and its table as plain text, and as HTML for a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ...system.printable import CELL, one_line
from ..runtime.timing import Latency
from .verdict import Row

BAR, HEIGHT, TITLE = 320, 18, 150  # pixels of the longest bar, of a bar with its gap, and of the names
GREY, GREEN = "#8a8f98", "#2f7d5d"


def as_text(verdict: str, rows: Sequence[Row]) -> str:
    """Return the verdict and the table, without trailing spaces."""
    width = max((len(name) for name, _ in rows), default=0)
    lines = (f"{one_line(name):{width}}  {one_line(value, CELL)}".rstrip() for name, value in rows)
    return "\n".join((one_line(verdict, CELL), *lines))


def as_html(verdict: str, rows: Sequence[Row], latencies: Sequence[Latency], second: str = "INT8") -> str:
    """Return the verdict, the table and bars of the latencies; the text of models is escaped.

    Args:
        verdict: The sentence.
        rows: The table.
        latencies: The latencies.
        second: What the second model of the latencies is.
    """
    cells = "".join(
        f'<tr><th style="text-align:left;white-space:nowrap">{_safe(name)}</th>'
        f'<td style="text-align:left">{_safe(value)}</td></tr>'
        for name, value in rows
    )
    return f"<p><strong>{_safe(verdict)}</strong></p>{_bars(latencies, second)}<table>{cells}</table>"


def _safe(text: str) -> str:
    """Return a printable text for HTML."""
    return html.escape(one_line(text, CELL))


def _bars(latencies: Sequence[Latency], second: str) -> str:
    """Return an SVG with a bar for each model at each batch size; empty without latencies."""
    rows = [
        (f"{model}, {timed.name}", colour, milliseconds)
        for timed in latencies
        for model, colour, milliseconds in (("float", GREY, timed.float_ms), (second, GREEN, timed.int8_ms))
    ]
    longest = max((milliseconds for *_, milliseconds in rows), default=0.0)
    if not longest:
        return ""
    parts = []
    for place, (name, colour, milliseconds) in enumerate(rows):
        top, width = place * HEIGHT, BAR * milliseconds / longest
        parts.append(
            f'<text x="0" y="{top + 13}">{_safe(name)}</text>'
            f'<rect x="{TITLE}" y="{top + 2}" width="{width:.1f}" height="{HEIGHT - 4}" fill="{colour}"/>'
            f'<text x="{TITLE + width + 6:.1f}" y="{top + 13}">{milliseconds:.3g} ms</text>'
        )
    width, height = TITLE + BAR + 90, len(rows) * HEIGHT
    size = f'width="{width}" viewBox="0 0 {width} {height}" style="max-width:100%"'  # a phone is narrower
    return (
        f'<svg {size} role="img" aria-label="milliseconds of one run" font-family="sans-serif" font-size="12" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )

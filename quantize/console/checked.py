"""The table of `requant check`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..gate.judge import Status
from ..gate.outputs import COLUMNS, MARKS, verdict
from ..gate.run import Check
from .quantized import print_state

STYLES: Mapping[Status, str] = {Status.OK: "green", Status.FAIL: "bold red", Status.SKIP: "dim"}


def print_check(check: Check) -> None:
    """Print a table of the lines of a check on stderr, then the reasons."""
    console = Console(stderr=True, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, overflow="fold", justify="right" if column in COLUMNS[2:] else "left")
    for line in check.lines:
        mark = f"[{STYLES[line.status]}]{MARKS[line.status]}[/]"
        cells = (line.name, line.baseline, line.measured, line.tolerance)
        table.add_row(mark, *map(escape, cells))
    console.print(table)
    for line in check.lines:
        if line.reason:
            style = STYLES[line.status] if line.status is Status.FAIL else "bold"
            console.print(f"[{style}]{escape(line.name)}:[/] {escape(line.reason)}")
            for layer in line.layers:
                console.print(f"  {escape(layer)}")
    print_state(check.state)
    console.print(f"[bold]{escape(verdict(check))}[/]")

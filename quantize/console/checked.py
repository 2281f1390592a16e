"""The table of `requant check`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from ..gate.judge import Status
from ..gate.outputs import COLUMNS, MARKS, verdict
from ..gate.run import Check
from .quantized import print_state
from .terminal import Terminal, styled

STYLES: Mapping[Status, str] = {Status.OK: "green", Status.FAIL: "bold red", Status.SKIP: "dim"}


def print_check(check: Check, *, err: bool = False) -> None:
    """Print a table of the lines of a check, then the reasons.

    Args:
        check: The result of a check.
        err: Whether to print on stderr instead of stdout.
    """
    console = Terminal(err=err)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in COLUMNS[2:] else "left")
    for line in check.lines:
        mark = styled((MARKS[line.status], STYLES[line.status]))
        table.add_row(mark, line.name, line.baseline, line.measured, line.tolerance)
    console.print(table)
    for line in check.lines:
        if line.reason:
            style = STYLES[line.status] if line.status is Status.FAIL else "bold"
            console.print(styled((f"{line.name}:", style), f" {line.reason}"))
            for layer in line.layers:
                console.print(f"  {layer}")
    print_state(check.state)
    console.print(styled((verdict(check), "bold")))

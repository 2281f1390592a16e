"""Tables that the benchmarks print."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rich.console import Console
from rich.table import Table


def plain_table(
    title: str, columns: Iterable[str], *, left: Collection[str] = ("",), no_wrap: Collection[str] = ()
) -> Table:
    """Return an empty table without borders.

    Args:
        title: The title.
        columns: The titles of the columns.
        left: Columns that are aligned to the left; other columns are aligned to the right.
        no_wrap: Columns whose cells stay on one line.
    """
    table = Table(title=title or None, box=None, pad_edge=False, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column in no_wrap)
    return table


def print_table(table: Table, notes: Iterable[str] = (), *, width: int = 200) -> None:
    """Print a table and the notes below it."""
    console = Console(width=width)
    console.print(table)
    for note in notes:
        console.print(note, style="dim", highlight=False, soft_wrap=True)

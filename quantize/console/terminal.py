"""The console of all tables and progress bars: a text is never markup, always printable, and broken only at spaces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from ...system.printable import CELL, LINE, number_of, one_line, printable, printable_lines

UNBROKEN = 100_000
"""The columns of a stream that is no terminal: no line is folded there."""
LEAST = 30  # the least width of the last column of a table
GAP = 2  # spaces between two columns
WORDS = re.compile(r"\s*(\S+)")


class Terminal(Console):
    """A console that prints each `str` as one plain line; `styled` gives a line with styles.

    A terminal folds lines between words. Elsewhere, in a file or a pipe, lines are not folded. No line of a table ends
    with spaces.

    Args:
        err: Whether to print on stderr instead of stdout.
    """

    def __init__(self, *, err: bool = False) -> None:
        """Take the stream that is the standard one now."""
        super().__init__(stderr=err, markup=False, emoji=False, highlight=False)
        if not self.file.isatty():
            self.width = UNBROKEN

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print texts and tables; the arguments are those of `Console.print`."""
        whole = objects if settings.get("soft_wrap") else map(_whole, objects)
        super().print(*whole, **{"crop": False, **settings})

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a `str`, also a cell of a table, as a printable line."""
        return super().render_str(one_line(text, CELL), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is written: control codes of rich itself, and printable text, also that of `Text` objects."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)

    def print_lines(self, lines: Iterable[str]) -> None:
        """Print lines of any width without folding them."""
        for line in lines:
            self.print(one_line(line), soft_wrap=True)

    def print_code(self, code: str) -> None:
        """Print code so that it can be copied: no line is folded or shortened."""
        for line in code.split("\n"):
            self.print(Text(printable(line)), soft_wrap=True)


def _whole(renderable: Any) -> Any:
    """Return what prints a text or a table with whole words; other renderables as they are."""
    if isinstance(renderable, str | Text):
        table = Table.grid()
        table.add_row(renderable)
        return _Table(table)
    return _Table(renderable) if isinstance(renderable, Table) else renderable


class _Table:
    """A table without lines that is folded between words, and whose lines do not end with spaces."""

    def __init__(self, table: Table) -> None:
        """Take a table without lines."""
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the table.

        They are laid out here: a table within a table of rich costs 1 ms a row, a minute for 50,000 rows.
        """
        columns = self._table.columns
        cells = [[_text(console, cell) for cell in column.cells] for column in columns]
        widths = _widths(columns, cells, options.max_width - GAP * (len(columns) - 1))
        if self._table.show_header:
            titles = [Text(str(column.header), "bold") for column in columns]
            yield from _row(console, columns, widths, titles)
        for row in zip(*cells, strict=True):
            yield from _row(console, columns, widths, row)


def _row(console: Console, columns: Sequence[Column], widths: Sequence[int], cells: Sequence[Text]) -> RenderResult:
    """Yield the lines of one row, without spaces at their ends."""
    folded = [_folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for lines in zip_longest(*folded):
        whole = Text(end="")
        for at, (line, column, width) in enumerate(zip(lines, columns, widths, strict=True)):
            part = Text(style=column.style).append_text(line or Text())
            whole.append(" " * GAP if at else "")
            space = " " * (width - part.cell_len)
            whole.append_text(Text.assemble(space, part) if column.justify == "right" else part.append(space))
        whole.rstrip()
        yield from whole.render(console)
        yield Segment.line()


def _text(console: Console, cell: Any) -> Text:
    """Return a cell as printable text."""
    return cell if isinstance(cell, Text) else console.render_str(cell)


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[Text]], width: int) -> list[int]:
    """Return the widths of the columns: the widest ones are narrowed, but not below their longest word.

    A long word of the last column, such as a path, may exceed the width of the terminal.

    Args:
        columns: The columns.
        cells: The texts of each column.
        width: The sum of the widths.
    """
    wanted, least = [], []
    for column, texts in zip(columns, cells, strict=True):
        lines = [str(column.header), *(line for text in texts for line in text.plain.split("\n"))]
        wanted.append(max(map(cell_len, lines), default=0))
        words = lines if column.no_wrap else [word for line in lines for word in line.split()]
        least.append(max(map(cell_len, words), default=0))
    least[-1] = min(least[-1], LEAST)
    for most in range(max(wanted, default=0), 0, -1):
        widths = [max(low, min(high, most)) for low, high in zip(least, wanted, strict=True)]
        if sum(widths) <= width:
            return widths
    return least


def _folded(text: Text, width: int) -> list[Text]:
    """Return the lines of a text, folded between words; a word that is wider has a line of its own."""
    if "\n" not in text.plain and text.cell_len <= width:
        return [text]
    folded: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        starts, column = [], 0
        for match in WORDS.finditer(line.plain):
            column += cell_len(match[0])
            if column > width and column > cell_len(match[0]):
                starts.append(match.start(1))
                column = cell_len(match[1])
        folded += line.divide(starts)
    for line in folded:
        line.rstrip()
    return folded


def styled(*parts: str | tuple[str, str]) -> Text:
    """Return one line made of texts, and of pairs of a text and its style."""
    return Text.assemble(*_short(parts))


def _short(parts: Iterable[str | tuple[str, str]]) -> Iterator[str | tuple[str, str]]:
    """Yield printable parts that have together about as many characters as a line."""
    left = LINE
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        text = one_line(text, max(left, 20))
        left -= len(text)
        yield text, style


def headless(rows: Iterable[tuple[str, str]] = ()) -> Table:
    """Return a table of two columns without lines and titles: names in bold, and values.

    Args:
        rows: The first rows.
    """
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def threads_text(threads: int) -> str:
    """Return a number of threads in words; 0 is the runtime's choice."""
    return f"{number_of(threads, 'thread')}" if threads else "the runtime's threads"

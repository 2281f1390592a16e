"""The console of all tables and progress bars: a text is never markup, and always printable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ...system.printable import CELL, LINE, one_line, printable, printable_lines


class Terminal(Console):
    """A console that prints each `str` as one plain line; `styled` gives a line with styles.

    Args:
        err: Whether to print on stderr instead of stdout.
    """

    def __init__(self, *, err: bool = False) -> None:
        """Take the stream that is the standard one now."""
        super().__init__(stderr=err, markup=False, emoji=False, highlight=False)

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


def stacked(lines: Iterable[str]) -> Text:
    """Return a cell of several lines."""
    return Text("\n".join(map(one_line, lines)))


def headless() -> Table:
    """Return a table of two columns without lines and titles: names in bold, and values."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table

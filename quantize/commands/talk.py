"""What commands print: lines of text, JSON, warnings and tracebacks. Nothing else calls `click.echo`."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO

import click

from ...system.printable import LINE, json_text, one_line, sentence


def say(line: str, *, err: bool = False) -> None:
    """Print a printable line; on stderr it has at most `LINE` characters."""
    click.echo(one_line(line, LINE if err else sys.maxsize), err=err)


def say_lines(text: str, *, err: bool = False) -> None:
    """Print a text of several lines."""
    for line in text.removesuffix("\n").split("\n"):
        say(line, err=err)


def emit(text: str, *, err: bool = False) -> None:
    """Print a text that is printable and exact: a script, or a command of a CI system."""
    click.echo(text, err=err)


def print_json(value: object) -> None:
    """Print one JSON object on stdout."""
    emit(json_text(value))


def print_error(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None = None
) -> None:
    """Print the traceback of an error on stderr."""
    say_lines("".join(traceback.format_exception(kind, error, trace)), err=True)


@contextmanager
def printable_streams() -> Iterator[None]:
    """Make what libraries print printable: warnings, log records without a handler, and uncaught errors.

    Characters that the encoding of stdout lacks are printed as escapes, as on stderr.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_error  # it stays: the interpreter calls it after this block
    saved = warnings.showwarning, logging.lastResort
    warnings.showwarning, logging.lastResort = _warn, _LastResort(logging.WARNING)
    try:
        yield
    finally:
        warnings.showwarning, logging.lastResort = saved


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line; the arguments are those of `warnings.showwarning`."""
    say(sentence(f"warning: {message} ({category.__name__})"), err=True)


class _LastResort(logging.Handler):
    """Print log records as `logging` does where a program has set up nothing."""

    def emit(self, record: logging.LogRecord) -> Any:
        """Print a record."""
        say_lines(self.format(record), err=True)

"""What commands print: lines of text, JSON, warnings and tracebacks. Nothing else calls `click.echo`."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TextIO

import click

from ...system.printable import LINE, json_text, one_line, sentence


def print_line(line: str, *, err: bool = False) -> None:
    """Print a printable line; on stderr it has at most `LINE` characters."""
    click.echo(one_line(line, LINE if err else sys.maxsize), err=err)


def print_lines(text: str, *, err: bool = False) -> None:
    """Print a text of several lines."""
    for line in text.removesuffix("\n").split("\n"):
        print_line(line, err=err)


def print_exact(text: str, *, err: bool = False) -> None:
    """Print a text that is printable and exact: a script, or a command of a CI system."""
    click.echo(text, err=err)


_FOR_JSON: ContextVar[TextIO | None] = ContextVar("stdout for JSON", default=None)


def print_json(value: object) -> None:
    """Print one JSON object on stdout, also within `stdout_reserved_for_json`."""
    click.echo(json_text(value), file=_FOR_JSON.get())


@contextmanager
def stdout_reserved_for_json() -> Iterator[None]:
    """Send what others print on stdout to stderr: readers, metrics and libraries. So stdout has the JSON alone."""
    stdout = sys.stdout
    with ExitStack() as stack:
        try:
            descriptor = stdout.fileno()
        except (OSError, ValueError):  # no file of the system, as in a notebook
            own = stdout
        except AttributeError:  # None: it is closed, and nobody reads the JSON
            own = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        else:
            saved = os.dup(descriptor)
            own = stack.enter_context(open(saved, "w", encoding=stdout.encoding, errors=stdout.errors))
            stdout.flush()
            os.dup2(sys.__stderr__.fileno() if sys.__stderr__ else descriptor, descriptor)
            stack.callback(os.dup2, saved, descriptor)
        stack.enter_context(redirect_stdout(sys.stderr))
        token = _FOR_JSON.set(own)
        try:
            yield
        finally:
            _FOR_JSON.reset(token)


def print_error(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None = None
) -> None:
    """Print the traceback of an error on stderr."""
    print_lines("".join(traceback.format_exception(kind, error, trace)), err=True)


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
    print_line(sentence(f"warning: {message} ({category.__name__})"), err=True)


class _LastResort(logging.Handler):
    """Print log records as `logging` does where a program has set up nothing."""

    def emit(self, record: logging.LogRecord) -> Any:
        """Print a record."""
        print_lines(self.format(record), err=True)

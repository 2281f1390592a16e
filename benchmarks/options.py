"""Command-line options that several benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.contenders import ContenderError, call

KIT = click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), envvar="REALKIT")
"""The folder of a kit of real models."""
PEERS_PYTHON = click.option("--peers-python", metavar="PATH", help="An interpreter that has NNCF. [default: this one]")


def with_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return a decorator that adds click options and arguments to a command."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def chosen(text: str, known: Iterable[str], kind: str) -> list[str]:
    """Return the names in a comma-separated text.

    Args:
        text: The names; may be empty.
        known: The valid names.
        kind: The kind of name, for the error message.

    Raises:
        click.BadParameter: A name is unknown.
    """
    names, valid = [name.strip() for name in text.split(",") if name.strip()], list(known)
    unknown = [name for name in names if name not in valid]
    if unknown:
        raise click.BadParameter(f"no {kind} {unknown[0]!r}; there are: {', '.join(valid)}")
    return names


def chosen_tasks(kit: Path, text: str) -> list[str]:
    """Return the tasks of a kit of real models that `text` names; all tasks if `text` is empty.

    Raises:
        click.ClickException: The folder is not a kit.
        click.BadParameter: A task is unknown.
    """
    try:
        tasks: list[str] = call("tasks", kit=str(kit))["tasks"]
    except ContenderError as error:
        raise click.ClickException(f"{kit}: {error}") from error
    return chosen(text, tasks, "task") or tasks

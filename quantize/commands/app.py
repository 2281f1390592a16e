"""The frame of all commands: groups, refusals, progress, JSON on stdout."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import click

from ... import RequantError

PATH = click.Path(path_type=Path)


TYPED = "requant.typed"  # under which a context keeps the command line


class Refusal(click.ClickException):
    """One clear line on stderr and exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the message."""
        click.echo(f"requant: {self.format_message()}", err=True, file=file)


QUIET, VERBOSE = "requant.quiet", "requant.verbose"  # under which a context keeps what was asked for


def _remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Keep a switch for the whole of the command line; it may stand before a command or behind it."""
    key = f"requant.{param.name}"
    ctx.meta[key] = ctx.meta.get(key, False) or value


def talk_options() -> list[click.Parameter]:
    """Return the switches that every command has: how much is said on stderr."""
    say: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": _remember}
    return [
        click.Option(["-q", "--quiet"], help="Say nothing on stderr but what is wrong.", **say),
        click.Option(["-v", "--verbose"], help="Tell stages as they begin, and of an error where it arose.", **say),
    ]


class Talking(click.Command):
    """A command with `talk_options`."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, those of every command among them."""
        *own, helping = super().get_params(ctx)
        return [*own, *talk_options(), helping]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it refuses is said when stderr is there again."""
        if not ctx.meta.get(QUIET):
            return super().invoke(ctx)
        with open(os.devnull, "w", encoding="utf-8") as silence, redirect_stderr(silence):
            return super().invoke(ctx)


class Commands(click.Group):
    """A group whose commands turn a `RequantError` or a wrong command line into a `Refusal`."""

    command_class = Talking

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, those of every command among them."""
        *own, helping = super().get_params(ctx)
        return [*own, *talk_options(), helping]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and remember what was typed: a report tells it."""
        ctx.meta.setdefault(TYPED, shlex.join(["requant", *args]))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RequantError as error:
            if ctx.meta.get(VERBOSE):
                traceback.print_exception(error)
            raise Refusal(str(error)) from error
        except click.UsageError as error:  # click would print three lines
            command = error.ctx.command_path if error.ctx is not None else "requant"
            raise Refusal(f"{error.format_message()} (see '{command} --help')") from error
        except KeyboardInterrupt as interrupt:
            click.echo("; ".join(("requant: interrupted", *interrupt.args)), err=True)
            ctx.exit(130)  # as a shell says it; 1 would say that a goal was missed


@click.command(cls=Talking)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what completes commands and options in SHELL.

    \b
    eval "$(requant completion bash)"       # in ~/.bashrc
    eval "$(requant completion zsh)"        # in ~/.zshrc
    requant completion fish > ~/.config/fish/completions/requant.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(click.get_current_context().find_root().command, {}, "requant", "_REQUANT_COMPLETE").source())


def is_given(name: str) -> bool:
    """Whether an option of the running command stands on the command line."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def flag(name: str) -> str:
    """Return how an option is written."""
    return f"--{name.replace('_', '-')}"


def print_json(value: object) -> None:
    """Print one JSON object on stdout."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def _stages() -> Callable[[str, int, int | None], None]:
    """Return what says on stderr which stage begins, and after how long."""
    began, seen = time.monotonic(), set[str]()

    def tell(stage: str, done: int, total: int | None) -> None:
        if stage not in seen:
            seen.add(stage)
            click.echo(f"{time.monotonic() - began:8.2f} s  {stage}", err=True)

    return tell


@contextmanager
def shown_progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar on stderr where that is a terminal, the stages where they are asked for, or nothing."""
    if not sys.stderr.isatty():
        yield _stages() if click.get_current_context().meta.get(VERBOSE) else lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        shown = {"load": bar.add_task("load", total=None)}

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in shown:  # a task of its own: rich does not take a total back
                bar.remove_task(shown.popitem()[1])
                shown[stage] = bar.add_task(stage, total=total)
            bar.update(shown[stage], completed=done, total=total)

        yield show

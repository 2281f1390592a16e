"""The base of all commands: their switches, their help, and their errors."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import click

from ... import RequantError, UnknownNameError
from ...system.apart import check_apart
from ...system.ending import BROKEN_PIPE, interrupt_behind, interrupted_by, interruption
from ...system.notes import also_written, forget
from ...system.printable import sentence
from ...system.regular import check_file
from ..options.option import GROUPS
from .printing import print_error, print_exact, print_line, printable_streams, stdout_reserved_for_json

PATH = click.Path(path_type=Path)
OTHER = "other"
SECTIONS = ("quantize", "measure", "look at models", "rewrite models", "continuous integration", OTHER)
"""The sections of commands in the help of the program."""
MODELS = frozenset({"model", "float_model", "int8_model", "source", "first", "second"})
"""Parameters that name models to read."""
OUTPUTS = frozenset({"output", "target", "report", "log", "junit", "markdown", "baseline"})
"""Parameters that name files to write. A baseline is read too, but never the file of another parameter."""
FEW = 12  # options that the help shows without groups
SENTENCE = 200  # characters of the first sentence of a command's help
NAMES = 24  # columns of names in the help; a longer name has a line of its own
ALIKE = 2 / 3
"""The least share of common letters of an option that is suggested for a wrong one."""
TYPED, QUIET, VERBOSE = "requant.typed", "requant.quiet", "requant.verbose"
"""Keys of the context for the command line and for the two switches."""


class CommandError(click.ClickException):
    """An error: one line on stderr, of at most 400 printable characters, and exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the message."""
        print_line(sentence(f"requant: {self.format_message()}"), err=True)


def _one_line_error(error: click.UsageError) -> click.ClickException:
    """Return what a wrong command line ends with: one line, where click would print three, or the help."""
    if type(error).__name__ == "NoArgsIsHelpError":  # click 8.1 has no such class
        return error
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        alike = [name for name in error.possibilities if _resembles(name, error.option_name)]
        error = click.NoSuchOption(error.option_name, error.message, alike, error.ctx)
    command = error.ctx.command_path if error.ctx is not None else "requant"
    return CommandError(f"{error.format_message()} (see '{command} --help')")


def _resembles(option: str, typed: str) -> bool:
    """Whether an option is near enough to a typed one to be meant: the dashes do not count."""
    from difflib import SequenceMatcher

    one, other = (name.lstrip("-") for name in (option, typed))
    return one.startswith(other) or other.startswith(one) or SequenceMatcher(None, one, other).ratio() >= ALIKE


def _write_sections(formatter: click.HelpFormatter, rows: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Write tables of names and texts below their titles."""
    for title, records in rows.items():
        if records:
            with formatter.section(title.capitalize()):
                formatter.write_dl(records, col_max=NAMES)


def _remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Store a switch for the whole command line; it may stand before or after the command."""
    key = f"requant.{param.name}"
    ctx.meta[key] = ctx.meta.get(key, False) or value


Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


class Grouped(click.Option):
    """An option with a group in the help of its command, one of `GROUPS`."""

    def __init__(self, *names: Any, group: str = "output", **settings: Any) -> None:
        """Store the group; the other arguments are those of `click.Option`."""
        super().__init__(*names, **settings)
        self.group = group


def option(*names: str, group: str = "output", **settings: Any) -> Decorator:
    """Return `click.option` with the group of the option in the help."""
    decorator: Decorator = click.option(*names, cls=Grouped, group=group, **settings)
    return decorator


def verbosity_options() -> list[click.Parameter]:
    """Return the switches of every command: --quiet and --verbose."""
    settings: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": _remember}
    return [
        click.Option(["-q", "--quiet"], help="Print only errors, and the JSON of --json.", **settings),
        click.Option(["-v", "--verbose"], help="Print each stage, and the traceback of an error.", **settings),
    ]


class _InSection(click.Command):
    """A command or group with a section, and with the options of every command: `verbosity_options`, -h and --help.

    Attributes:
        section: Its section in the help of the program, one of `SECTIONS`.
    """

    def __init__(self, *arguments: Any, section: str = OTHER, **settings: Any) -> None:
        """Store the section; the other arguments are those of click."""
        super().__init__(*arguments, **settings)
        self.section = section

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Return the names of the option for help, in any context: click keeps what it was first asked for."""
        return ["-h", "--help"]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, those of every command among them."""
        *own, helping = super().get_params(ctx)
        return [*own, *verbosity_options(), helping]


class ToolCommand(_InSection):
    """A command that checks its files first, obeys --quiet and --json, and shows many options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options: in groups if there are many."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                rows[getattr(parameter, "group", "output")].append(record)
        if sum(map(len, rows.values())) <= FEW:
            rows = {"options": [record for group in rows.values() for record in group]}
        _write_sections(formatter, rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. With --quiet stderr is closed; with --json stdout has the JSON alone.

        Raises:
            RequantError: An output would overwrite an input, or a model is no file: before libraries are imported,
                which takes seconds.
        """
        _check_outputs(self, ctx.params)
        for name in MODELS & ctx.params.keys():
            if isinstance(ctx.params[name], Path):
                check_file(ctx.params[name])
        if ctx.params.get("as_json"):
            with stdout_reserved_for_json():
                return self._run(ctx)
        return self._run(ctx)

    def _run(self, ctx: click.Context) -> Any:
        """Run the command, with or without stderr."""
        if not ctx.meta.get(QUIET):
            return super().invoke(ctx)
        with open(os.devnull, "w", encoding="utf-8") as silence, redirect_stderr(silence):
            return super().invoke(ctx)


def _check_outputs(command: click.Command, values: Mapping[str, Any]) -> None:
    """Refuse outputs of a command line that are inputs of it, or each other."""
    flags = {
        str(each.name): each.human_readable_name if isinstance(each, click.Argument) else max(each.opts, key=len)
        for each in command.params
    }
    outputs: dict[str, Any] = {}
    inputs: list[Any] = []
    for name, value in values.items():
        given = [each for each in (value if isinstance(value, (tuple, list)) else [value]) if each is not None]
        if name in OUTPUTS and not isinstance(value, bool):
            shown = flags.get(name, name)
            outputs |= {f"{shown} {each}" if len(given) > 1 else shown: each for each in given}
        else:
            inputs += given
    check_apart(outputs, [each for each in inputs if isinstance(each, (str, os.PathLike))])


def shows_tables() -> bool:
    """Return whether the running command prints tables: not with --quiet."""
    return not click.get_current_context().meta.get(QUIET)


def _reason(error: RequantError | OSError | MemoryError) -> str:
    """Return what went wrong; an OSError without a file that no reader or writer has explained is mostly stdout's."""
    if isinstance(error, FileNotFoundError) and error.filename is None:  # of os.getcwd
        return "the current folder has been removed; change to another one"
    if isinstance(error, OSError):
        where = error.filename or ("standard output" if error.errno == errno.ENOSPC else type(error).__name__)
        return f"{where}: {error.strerror or error}"
    return str(error) if isinstance(error, RequantError) else "out of memory; choose fewer --workers or samples"


class Commands(_InSection, click.Group):
    """A group whose commands turn a `RequantError` or a wrong command line into a `CommandError`."""

    command_class = ToolCommand

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in sections, each with the whole first sentence of its help."""
        rows: dict[str, list[tuple[str, str]]] = {section: [] for section in SECTIONS}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None:
                rows[getattr(command, "section", OTHER)].append((name, command.get_short_help_str(SENTENCE)))
        if not any(rows[section] for section in SECTIONS[:-1]):
            rows = {"commands": rows[OTHER]}
        _write_sections(formatter, rows)

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the command line, and make printable what libraries print."""
        with printable_streams():
            return super().main(*args, **settings)

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        """Parse the options of the group."""
        try:
            return super().make_context(*args, **settings)
        except click.UsageError as error:
            raise _one_line_error(error) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name.

        Raises:
            UnknownNameError: There is none.
        """
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise UnknownNameError("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line, and keep its text for reports."""
        ctx.meta.setdefault(TYPED, shlex.join(["requant", *args]))
        try:
            return super().parse_args(ctx, args)
        except BrokenPipeError:  # of --help
            raise SystemExit(BROKEN_PIPE) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        forget()
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _one_line_error(error) from error
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if (interrupt := interrupt_behind(error)) is not None:
                asked = interrupted_by()
                print_line("; ".join((f"requant: {interruption(asked)}", *interrupt.args)), err=True)
                ctx.exit(128 + asked)  # the convention of shells; 1 means a missed goal
            if isinstance(error, BrokenPipeError):  # nobody reads the output
                raise SystemExit(BROKEN_PIPE) from None
            if not isinstance(error, (RequantError, OSError, MemoryError)):
                raise
            if ctx.meta.get(VERBOSE):
                print_error(type(error), error, error.__traceback__)
            raise CommandError(f"{_reason(error)}{also_written()}") from error


@click.command(cls=ToolCommand)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    eval "$(requant completion bash)"       # in ~/.bashrc
    eval "$(requant completion zsh)"        # in ~/.zshrc
    requant completion fish > ~/.config/fish/completions/requant.fish
    """
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    assert completion_class is not None
    print_exact(
        completion_class(click.get_current_context().find_root().command, {}, "requant", "_REQUANT_COMPLETE").source()
    )


@click.command("help", cls=ToolCommand)
@click.argument("names", metavar="[COMMAND]...", nargs=-1)
def help_(names: tuple[str, ...]) -> None:
    """Show the help of COMMAND, or of the program.

    \b
    requant help quantize
    """
    context = click.get_current_context().find_root()
    for name in names:
        group = context.command
        known = group.list_commands(context) if isinstance(group, click.Group) else []
        command = group.get_command(context, name) if isinstance(group, click.Group) else None
        if command is None:
            raise UnknownNameError("command", name, known)
        context = click.Context(command, info_name=name, parent=context)
    print_exact(context.get_help())


def is_given(name: str) -> bool:
    """Return whether an option of the running command is on the command line."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def flag(name: str) -> str:
    """Return an option as the command line has it: ``--max-drop``."""
    return f"--{name.replace('_', '-')}"

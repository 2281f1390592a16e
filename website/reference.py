"""Write the pages of the reference that are made of the program itself.

    python -m website.reference

docs/reference/commands.md comes from the commands of click, docs/reference/project-file.md from the declared options,
docs/reference/python.md from the docstrings, and docs/transforms.md from the registry of transforms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click

from requant.cli import main as requant
from requant.quantize.options.declared import CHECK, QUANTIZE
from requant.quantize.options.option import Option
from requant.transforms import REGISTRY
from requant.transforms.pipelines.describe import reference as transforms_page
from website.docstrings import package_page

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "<!-- Made by `make reference`. Edit the {source}. -->"
SHARED = ("--help", "--quiet", "--verbose")

COMMANDS = f"""\
# Commands

{NOTE.format(source="commands in quantize/commands and the options in quantize/options")}

`requant COMMAND --help` prints these texts. Every command has three more options:

| option | meaning |
|---|---|
| `-q`, `--quiet` | Print only errors on stderr. |
| `-v`, `--verbose` | Print each stage, and the traceback of an error. |
| `-h`, `--help` | Show the help of the command. |

| exit code | meaning |
|---|---|
| 0 | Done. |
| 1 | The answer is no: INT8 is not worth having here, the check failed, the models or the bytes differ. |
| 2 | The request was wrong, or the runtime crashed on it. One line says why. |
| 130, 143, 129 | Ctrl-C, SIGTERM or SIGHUP ended the command. |
"""

PROJECT = f"""\
# requant.toml

{NOTE.format(source="options in quantize/options/declared.py")}

`requant init MODEL` writes a `requant.toml` with a comment for each key, and `requant check requant.toml` reads it
([The check](../ci.md)). `model` and `output` stand at the top of the file. The keys of `[quantize]` and of `[check]`
are the options of the two commands, with underscores. Unknown keys are refused. Paths are relative to the file.
"""


def commands_page() -> str:
    """Return the page of all commands."""
    context = click.Context(requant, info_name="requant")
    names = requant.list_commands(context)
    lines = [COMMANDS, "| command | what it does |", "|---|---|"]
    chapters: list[str] = []
    for name in names:
        command = requant.get_command(context, name)
        assert command is not None
        lines.append(f"| [`{name}`](#requant-{name}) | {_text(_summary(command))} |")
        chapters += _chapter(command, click.Context(command, info_name=name, parent=context))
    return "\n".join([*lines, "", *chapters]).rstrip() + "\n"


def _chapter(command: click.Command, context: click.Context, level: int = 2) -> Iterator[str]:
    """Yield the lines about a command, and about the commands of a group."""
    usage = f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}"
    yield from (f"{'#' * level} {context.command_path}", "", f"    {usage}", "")
    for paragraph in cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            yield from (f"    {line.strip()}" for line in paragraph.splitlines()[1:])
        else:
            yield _text(" ".join(paragraph.split()))
        yield ""
    options = [option for option in command.params if isinstance(option, click.Option) and _own(option)]
    if options:
        yield from ("| option | meaning |", "|---|---|")
        yield from (_row(option, context) for option in options)
        yield ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _chapter(child, click.Context(child, info_name=name, parent=context), level + 1)


def _own(option: click.Option) -> bool:
    """Return whether an option is shown, and not one that every command has."""
    return not option.hidden and not set(option.opts) & set(SHARED)


def _row(option: click.Option, context: click.Context) -> str:
    """Return the table row of an option."""
    record = option.get_help_record(context)
    assert record is not None
    names, text = record
    return f"| `{names.replace('|', ' or ')}` | {_text(' '.join(text.split()))} |"


def _summary(command: click.Command) -> str:
    """Return the first paragraph of the help of a command."""
    return " ".join(cleandoc(command.help or "").split("\n\n")[0].split())


def project_page() -> str:
    """Return the page of the keys of a project file."""
    lines = [PROJECT]
    for table, options in (("quantize", QUANTIZE), ("check", CHECK)):
        lines += [f"## [{table}]", "", "| key | value | meaning | default |", "|---|---|---|---|"]
        lines += [*map(_key, options), ""]
    return "\n".join(lines).rstrip() + "\n"


def _key(option: Option) -> str:
    """Return the table row of a key."""
    value = ", ".join(f"`{choice}`" for choice in option.choices) or option.kind.description
    default = option.project if option.project is not None else option.default
    shown = (
        f"`{str(default).lower() if isinstance(default, bool) else default}`" if default is not None else option.unset
    )
    help_text = option.comment.partition(f" ({', '.join(option.choices)})")[0] if option.choices else option.comment
    meaning = help_text.partition(" Default: ")[0].removesuffix(".")
    return f"| `{option.name}` | {value} | {_text(meaning)} | {_text(shown)} |"


def _text(text: str) -> str:
    """Return a text for a cell of a table: no column and no tag begins in it, and names of pages are links."""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](../\1)", text)


def pages() -> dict[str, str]:
    """Return the text of each page by its place in docs/."""
    return {
        "reference/commands.md": commands_page(),
        "reference/project-file.md": project_page(),
        "reference/python.md": package_page(NOTE.format(source="docstrings")),
        "transforms.md": transforms_page(REGISTRY.values()),
    }


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""`--help` and `requant help`: groups, short sections, one example, whole sentences."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from requant.cli import main
from requant.quantize.commands.app import OTHER, SECTIONS
from requant.quantize.options.option import GROUPS

LONG = ("quantize", "calibrate", "compare", "check", "bench", "sensitivity")
MOST_LINES = 24


def shown(*arguments: str) -> str:
    done = CliRunner().invoke(main, list(arguments), prog_name="requant")
    assert done.exit_code == 0, done.output
    return done.output


def sections(text: str) -> dict[str, list[str]]:
    """Return the lines below each title."""
    parts = re.split(r"^(\S.*):$", text, flags=re.MULTILINE)
    return {title: body.strip("\n").split("\n") for title, body in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("name", LONG)
def test_a_long_help_has_short_groups_and_one_example(name: str) -> None:
    text = shown(name, "--help")
    found = sections(text)
    assert set(found) <= {group.capitalize() for group in GROUPS}
    assert len(found) >= 3
    assert {title: len(lines) for title, lines in found.items() if len(lines) > MOST_LINES} == {}
    assert len(re.findall(rf"^  requant {name} ", text, flags=re.MULTILINE)) == 1


def test_every_option_is_in_the_help() -> None:
    command = main.get_command(click.Context(main), "quantize")
    assert command is not None
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    text = shown("help", "quantize")
    assert {name for name in options if not re.search(rf"{name}\b", text)} == set()


def test_commands_are_in_sections_with_whole_sentences() -> None:
    text = shown("--help")
    found = sections(text)
    assert [line for lines in found.values() for line in lines if line.endswith("...")] == []
    assert [title for title in found if title != "Options"] == [section.capitalize() for section in SECTIONS]
    listed = [line.split()[0] for title, lines in found.items() if title != "Options" for line in lines]
    assert sorted(listed) == main.list_commands(click.Context(main))
    assert [line.split()[0] for line in found[OTHER.capitalize()]] == ["completion", "help"]


@pytest.mark.parametrize("names", [(), ("quantize",), ("costs",), ("costs", "show")], ids=lambda names: " ".join(names))
def test_help_is_the_help_of_the_command(names: tuple[str, ...]) -> None:
    assert shown("help", *names) == shown(*names, "--help")


def test_an_unknown_command_names_similar_ones() -> None:
    done = CliRunner().invoke(main, ["quantise", "model.onnx"])
    assert done.exit_code == 2
    assert done.stderr == "requant: no command named 'quantise'; did you mean 'quantize'?\n"


def test_help_of_an_unknown_command_names_similar_ones() -> None:
    for words in (["quantise"], ["costs", "shaw"], ["ops", "more"]):
        done = CliRunner().invoke(main, ["help", *words])
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith(f"requant: no command named {words[-1]!r}; ")

"""Click options, made of the `declared` ones, and the few that only the command line has."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import click

from ... import RequantError
from ...system.numbers import decimal, whole_number
from ..options.declared import (
    CALIBRATION,
    DATA,
    EXTERNAL_DATA,
    FORCE,
    JSON,
    LOWER,
    OVERRIDES,
    PRECISION,
    READING,
    RUNTIME,
    SAMPLES,
    THREADS,
)
from ..options.option import Kind, Option
from ..options.tables import check_value
from .app import Command, Decorator, is_given, option


class WholeNumber(click.IntRange):
    """A whole number of ASCII digits, from a least one on; Python reads other digits and ``1_0`` too."""

    name = "whole number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        if isinstance(value, str) and not re.fullmatch(r"[+-]?[0-9]+", value.strip()):
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return super().convert(value, param, ctx)


class Decimal(click.FloatRange):
    """A number of ASCII digits."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        if isinstance(value, str) and decimal(value.strip()) is None:
            self.fail(f"{value!r} is not a number.", param, ctx)
        return super().convert(value, param, ctx)


def _type(option: Option) -> click.ParamType[Any] | None:
    """Return the click type of an option."""
    if option.choices:
        return click.Choice(option.choices)
    if option.kind is Kind.INTS:
        return click.STRING
    if option.kind is Kind.INT:
        return WholeNumber(None if option.least is None else int(option.least))
    if option.kind is Kind.NUMBER:
        return Decimal(option.least, min_open=option.above)
    return click.Path() if option.metavar == "FILE" else None


def _read(option: Option) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return the callback that converts the text of an option."""

    def read(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            if value is None:
                return None
            if option.kind in (Kind.INT, Kind.NUMBER):
                check_value(option, value)  # click's ranges accept NaN
            return option.read(value)
        except RequantError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return read


def pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Return pairs of a name and a value by name, from texts such as ``top1=0.5%``."""
    values_by_name = {}
    for item in values:
        name, equals, text = item.rpartition("=")
        if not (name and equals and text):
            raise click.BadParameter(f"{item!r} is no pair; write for instance top1=0.5%", ctx, param)
        values_by_name[name] = text
    return values_by_name


def click_option(declared: Option, **settings: Any) -> Decorator:
    """Return the click decorator of a declared option.

    Args:
        declared: The option.
        settings: Arguments of `click.option` that replace those of the declaration.
    """
    text = declared.help if declared.help.endswith(".") else f"{declared.help}."
    unset = f"[default: {declared.unset}]" if declared.unset else ""
    plain: dict[str, Any] = {"help": " ".join(filter(None, (text, declared.more, unset)))}
    if declared.kind is Kind.FLAG:
        plain["is_flag"] = True
    else:
        plain |= {
            "type": _type(declared),
            "metavar": declared.metavar,
            "default": declared.default,
            "show_default": declared.default is not None,
            "multiple": declared.kind in (Kind.EACH, Kind.TABLE),
            "callback": pairs if declared.kind is Kind.TABLE else _read(declared),
        }
    return option(declared.flag, declared.name, **{"group": declared.group, **plain, **settings})


def given_options(options: Iterable[Option], into: str) -> Decorator:
    """Return a decorator that declares options, and passes those on the command line as one mapping by name.

    Args:
        options: The options.
        into: The parameter of the command that gets the mapping.
    """
    rows = tuple(options)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def collecting(**others: Any) -> Any:
            values = {row.name: others.pop(row.name) for row in rows}
            return command(**{into: {name: value for name, value in values.items() if is_given(name)}}, **others)

        wrapped: Command = collecting
        for row in reversed(rows):
            wrapped = click_option(row)(wrapped)
        return wrapped

    return decorate


def source_options(help_text: str = DATA.help, *, required: bool = False) -> Decorator:
    """Return a decorator that declares ``--data`` and how data are read; the command gets its data source as `data`."""

    def decorate(command: Command) -> Command:
        @click_option(DATA, required=required, help=help_text)
        @given_options(READING, into="reading")
        @functools.wraps(command)
        def reading(*, data: str | None, reading: dict[str, Any], **others: Any) -> Any:
            if not reading:
                return command(data=data, **others)
            from ..options.build import build_data

            return command(data=build_data({"data": data, **reading}), **others)

        return reading

    return decorate


def parse_shard(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    """Return the part and the number of parts of a text such as ``2/3``."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", value)
    part, parts = (None, None) if match is None else map(whole_number, match.groups())
    if part is None or parts is None or not 1 <= part <= parts:
        raise click.BadParameter(f"{value!r} is not a part; write i/n, for instance 2/3", ctx, param)
    return part, parts


def lengths_options(command: Command) -> Command:
    """Declare the lengths of the free axes of inputs; the command gets `Lengths` as `lengths`."""

    @option(
        "--shape",
        "shapes",
        group="data",
        multiple=True,
        metavar="NAME=1,3,224,224",
        help="Shape of an input. Repeatable.",
    )
    @option("--dim", "dims", group="data", multiple=True, metavar="AXIS=1", help="Length of a named axis. Repeatable.")
    @functools.wraps(command)
    def measured(*, shapes: tuple[str, ...], dims: tuple[str, ...], **others: Any) -> Any:
        from ..model.shapes import parse_lengths

        return command(lengths=parse_lengths(shapes, dims), **others)

    return measured


threads_option = click_option(THREADS)


def setting_options(command: Command) -> Command:
    """Declare the threads, the runtime and its precision; the command gets a `Setting` as `setting`."""

    @threads_option
    @click_option(RUNTIME)
    @click_option(PRECISION)
    @functools.wraps(command)
    def running(*, threads: int, runtime: str, precision: str, **others: Any) -> Any:
        from ..runtime.runtimes import Setting

        return command(setting=Setting(threads, runtime, precision), **others)

    return running


json_option = option(JSON.flag, "as_json", group=JSON.group, is_flag=True, help=JSON.help)
force_option = click_option(FORCE)
external_option = click_option(EXTERNAL_DATA)
rule_option = click_option(CALIBRATION, help=f"{CALIBRATION.help} [default: auto]")
overrides_option = click_option(OVERRIDES)
samples_option = click_option(SAMPLES)
lower_option = click_option(LOWER)

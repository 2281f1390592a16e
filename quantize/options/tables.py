"""Check values of files and of the command line by the `declared` options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from reprlib import repr as brief
from typing import Any

from ... import RequantError, UnknownNameError
from .option import Kind, Option


def check_values(table: str, values: Mapping[str, Any], keys: Iterable[Option]) -> Mapping[str, Any]:
    """Return values from a file; refuse an unknown key, and a value of a wrong type or out of range.

    Args:
        table: The name of the table, for errors.
        values: By key.
        keys: The options that there are.

    Raises:
        RequantError: A key or a value is refused.
    """
    known = {key.name: key for key in keys}
    where = f"[{table}] " if table else ""
    for name, value in values.items():
        if name not in known:
            raise UnknownNameError(f"key{f' in [{table}]' if table else ''}", name, known)
        if not known[name].kind.accepts(value):
            raise RequantError(f"{where}{name}: must be {known[name].kind.description}, not {brief(value)}")
        try:
            check_value(known[name], value)
        except RequantError as error:
            raise RequantError(f"{where}{name}: {error}") from error
    return values


def check_value(option: Option, value: Any) -> None:
    """Refuse a value that is none of the choices of an option, or is a number out of range.

    Raises:
        RequantError: The value is refused.
    """
    if option.choices and value not in option.choices:
        raise RequantError(f"must be one of {', '.join(option.choices)}, not {brief(value)}")
    if option.kind not in (Kind.INT, Kind.INTS, Kind.NUMBER):
        return
    least = -option.most if option.least is None else option.least
    for number in value if isinstance(value, list | tuple) else [value]:
        if not least <= number <= option.most or (option.above and number == least):
            bound = f"more than {least:g}" if option.above else f"at least {least:g}"
            raise RequantError(f"must be {bound} and at most {option.most:.10g}, not {number}")

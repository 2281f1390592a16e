"""Check the values of a table in a file by the `declared` options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from reprlib import repr as brief
from typing import Any

from ... import RequantError, UnknownNameError
from .declared import Option


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
            known[name].check(value)
        except RequantError as error:
            raise RequantError(f"{where}{name}: {error}") from error
    return values

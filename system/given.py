"""Arguments of the Python API that are of another kind than they must be: one clear line."""

from __future__ import annotations

import os
from collections.abc import Iterable

from .. import RequantError


def names_of(value: object, what: str) -> tuple[str, ...]:
    """Return names as a tuple; a text is refused, which would be split into letters.

    Args:
        value: The names.
        what: What they are, for the error.

    Raises:
        RequantError: It is no collection of names.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise RequantError(f"{what} must be a sequence of names, not {value!r}")
    return tuple(map(str, value))


def check_path(value: object, what: str) -> None:
    """Refuse what is no path.

    Raises:
        RequantError: It is no text or path.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise RequantError(f"{what} must be the path of a file, not {kind_of(value)}")


def check_kind(value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Refuse an argument of another type.

    Args:
        value: The argument.
        kind: Its type, or several.
        wanted: What it must be, for the error: ``"the metric must be a name or a Metric"``.

    Raises:
        RequantError: It is of another type.
    """
    if not isinstance(value, kind):
        raise RequantError(f"{wanted}, not {kind_of(value)}")


def kind_of(value: object) -> str:
    """Return the type of a value with its article."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"

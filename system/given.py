"""Arguments of the Python API that are of another kind than they must be: one clear line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .. import RequantError

Kind = TypeVar("Kind")

MOST_ITEMS = 2**16
"""The largest batch size."""


def names_of(value: object, what: str) -> tuple[str, ...]:
    """Return names as a tuple; a text is refused, which would be split into letters.

    Args:
        value: The names.
        what: What they are, for the error.

    Raises:
        RequantError: It is no collection of names.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        shown = repr(value) if isinstance(value, (str, bytes, Real)) else kind_of(value)
        raise RequantError(f"{what} must be a sequence of names, not {shown}")
    names = tuple(value)
    for name in names:
        check_kind(name, str, f"{what} must be a sequence of names, which are texts")
    return names


def check_path(value: object, what: str) -> None:
    """Refuse what is no path.

    Raises:
        RequantError: It is no text or path, or contains a NUL.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise RequantError(f"{what} must be the path of a file, not {kind_of(value)}")
    if "\0" in str(value):
        raise RequantError(f"{str(value)!r} is no path: it contains a NUL")


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


def or_default(given: Kind | None, kind: type[Kind], what: str = "options") -> Kind:
    """Return an argument, or the default instance of its type if it is None.

    Args:
        given: The argument.
        kind: A dataclass whose fields all have defaults.
        what: The name of the argument, for the error.

    Raises:
        RequantError: It is of another type.
    """
    if given is None:
        return kind()
    check_kind(given, kind, f"{what} must be {_with_article(kind.__name__)}")
    return given


def check_function(value: object, what: str) -> None:
    """Refuse what cannot be called, before it is called after long work.

    Raises:
        RequantError: It cannot.
    """
    if not callable(value):
        raise RequantError(f"{what} must be a function, not {kind_of(value)}")


def checked_integer(value: object, what: str, least: int, most: int | None = None) -> int:
    """Return an integer as Python's own.

    Args:
        value: An integer, perhaps of numpy.
        what: Its name, for the error.
        least: The least one.
        most: The greatest one; None without a limit.

    Raises:
        RequantError: It is no integer, below the least one, or above the greatest one.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise RequantError(f"{what} must be an integer, not {kind_of(value)}")
    number = int(value)
    if number < least:
        raise RequantError(f"{what} must be at least {least}, not {number}")
    if most is not None and number > most:
        raise RequantError(f"{what} must be at most {most}, not {number}")
    return number


def normalise_fields(given: Any) -> None:
    """Refuse a value of another type than its field in a dataclass has, and make numbers of numpy Python's own.

    JSON holds no others.

    Args:
        given: An instance of the dataclass. An integer may be any integral number, a float any real one, and a tuple
            may be a list.

    Raises:
        RequantError: A value is of another type.
    """
    for name, kinds in _kinds(given.__class__).items():
        value = getattr(given, name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = [WORDS.get(kind) or _with_article(kind.__name__) for kind in kinds if kind is not list]
            raise RequantError(f"{name} must be {' or '.join(wanted)}, not {kind_of(value)}")
        object.__setattr__(given, name, _plain(value))


def _plain(value: Any) -> Any:
    """Return a number, or numbers in a list or a tuple, as Python's own; anything else as it is."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


WORDS: dict[Any, str] = {
    NoneType: "None",
    str: "a text",
    os.PathLike: "a path",
    Integral: "an integer",
    Real: "a number",
    bool: "True or False",
    tuple: "a tuple",
    Mapping: "a mapping",
    Callable: "a function",
}
"""What types of fields are called in an error; others by their names."""


@cache
def _kinds(kind: type) -> dict[str, tuple[type, ...]]:
    """Return the types that the fields of a dataclass may have, by the name of a field."""
    hints = get_type_hints(kind)
    return {field.name: tuple(_types(hints[field.name])) for field in fields(kind) if field.init}


def _types(hint: Any) -> Iterable[type]:
    """Yield the types of an annotation."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        for each in get_args(hint):
            yield from _types(each)
        return
    plain = origin or hint
    yield {int: Integral, float: Real}.get(plain, plain)
    if plain is tuple:
        yield list


def kind_of(value: object) -> str:
    """Return the type of a value with its article."""
    return "None" if value is None else _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    """Return a name with its article."""
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"

"""Settings in one text, ``"resize=256 crop=224"``: words ``key=value`` that a table of keys defines."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ... import UnknownNameError, near
from ...system.numbers import whole_number
from .samples import DataError


@dataclass(frozen=True, slots=True)
class Key:
    """A key that can be set.

    Attributes:
        read: Converts the text of a value; raises ValueError for an invalid text.
        wants: A description of valid values: ``"a number"``.
    """

    read: Callable[[str], Any]
    wants: str


def parse_settings(text: str | None, keys: Mapping[str, Key]) -> dict[str, Any]:
    """Read ``key=value`` words. A value with blanks is quoted.

    Raises:
        DataError: A word has no ``=``, a key occurs twice, or a value is invalid.
        UnknownNameError: There is no such key.
    """
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise DataError(f"preprocess: {error}: {text}") from error
    settings: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in keys:
            raise UnknownNameError("key of preprocess", name, keys)
        if not equals:
            raise DataError(f"preprocess: {name!r} has no value; write {name}= and {keys[name].wants}")
        if name in settings:
            raise DataError(f"preprocess: {name!r} is given twice")
        try:
            settings[name] = keys[name].read(value)
        except ValueError as error:
            raise DataError(f"preprocess: {name}={value}: expected {keys[name].wants}{error}") from error
    return settings


def one_of(names: Collection[str]) -> Key:
    """Return a key whose value is one of some names."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError(near(text, names))
        return text

    return Key(read, " or ".join(names))


def text_of(wants: str) -> Key:
    """Return a key whose value is any text that is not empty."""

    def read(text: str) -> str:
        if not text:
            raise ValueError
        return text

    return Key(read, wants)


def number(text: str) -> float:
    """Read a finite number."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError from None
    if not math.isfinite(value):
        raise ValueError
    return value


def positive(text: str) -> float:
    """Read a finite number above 0."""
    value = number(text)
    if value <= 0:
        raise ValueError
    return value


def positive_integer(text: str) -> int:
    """Read a whole number above 0."""
    value = whole_number(text)
    if not value:
        raise ValueError
    return value


def numbers(text: str) -> tuple[float, ...]:
    """Read finite numbers separated by commas."""
    return tuple(number(part) for part in text.split(","))


def truth(text: str) -> bool:
    """Read ``true`` or ``false``."""
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"

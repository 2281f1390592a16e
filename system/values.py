"""JSON from anywhere: each text becomes values that later steps can handle, or one line."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, Never

MOST_LEVELS = 64
"""The most levels of lists and objects in a JSON or TOML document."""


def decode_json(text: str | bytes) -> Any:
    """Return the values of a JSON text.

    Raises:
        ValueError: The text is not JSON, an object has a key twice, or `check_values` refuses a value; the message is
            one line.
    """
    try:
        text = decode_text(text, json.detect_encoding(text)) if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("the values are nested too deeply") from None
    except ValueError as error:
        if "integer string conversion" in str(error):  # Python's advice is for programmers
            raise ValueError("a number has thousands of digits") from None
        raise
    check_values(value)
    return value


def decode_text(data: bytes, encoding: str = "utf-8-sig") -> str:
    """Return the text of some bytes.

    Raises:
        ValueError: They are no text in this encoding; the message is one line.
    """
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no text in {encoding.removesuffix('-sig').upper()}") from None


def check_values(value: object) -> None:
    """Refuse values that a later step could not handle: nested deeply, integers beyond 64 bits, infinite numbers, NaN.

    Args:
        value: The values of a JSON or TOML document.

    Raises:
        ValueError: A value is refused.
    """
    level: list[Collection[Any]] = [[value]]
    levels, unfit = 0, False
    while level:
        levels += 1
        if levels > MOST_LEVELS:
            raise ValueError("the values are nested too deeply")
        unfit = unfit or any(map(_has_unfit, level))
        level = [inner for values in level for inner in _inner(values)]
    if unfit:
        place, reason = next(_unfit(value, ""))
        raise ValueError(f"{place!r}: {reason}" if place else reason)


def _has_unfit(values: Collection[Any]) -> bool:
    """Return whether one of some values is a number that `check_values` refuses."""
    kinds = set(map(type, values))
    if int in kinds:
        whole = values if len(kinds) == 1 else [each for each in values if type(each) is int]
        if not -(2**63) <= min(whole) <= max(whole) < 2**63:
            return True
    return float in kinds and not all(abs(each) < float("inf") for each in values if type(each) is float)


def _unfit(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Yield the places of refused numbers with the reasons; the place of a value is ``tensors.conv1.range[0]``."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _unfit(inner, f"{place}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unfit(inner, f"{place}[{index}]")
    elif type(value) is int and not -(2**63) <= value < 2**63:
        yield place, "the integer has more than 64 bits"
    elif type(value) is float and not abs(value) < float("inf"):
        yield place, "the number is not finite"


def _inner(values: Collection[Any]) -> list[Collection[Any]]:
    """Return the lists and the values of objects among some values."""
    if not {dict, list} & set(map(type, values)):
        return []
    return [each.values() if type(each) is dict else each for each in values if type(each) in (dict, list)]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse repeated keys."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} occurs twice")
    return entries


def _no_constant(name: str) -> Never:
    """Refuse a constant that Python's parser accepts and JSON lacks."""
    raise ValueError(f"{name} is not a number in JSON")

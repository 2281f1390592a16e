"""Whole numbers in text from outside: options, metadata, names of files."""

from __future__ import annotations

DIGITS = 18
"""The most digits of a number: it fits into int64. Python refuses to read more than 4300 digits."""


def whole_number(text: str) -> int | None:
    """Return the number that a text of 1 to `DIGITS` ASCII digits writes; None for any other text.

    >>> whole_number("0224"), whole_number("-1"), whole_number("1e3"), whole_number(19 * "9")
    (224, None, None, None)
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS else None

"""Numbers in text from outside: options, metadata, names of files. Python reads other digits and `1_0` too."""

from __future__ import annotations

import re

DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
FLOAT_MAX = (2 - 2**-23) * 2.0**127
"""The largest finite number of float32."""
DIGITS = 18
"""The most digits of a number: it fits into int64. Python refuses to read more than 4300 digits."""


def whole_number(text: str) -> int | None:
    """Return the number that a text of 1 to `DIGITS` ASCII digits writes; None for any other text.

    >>> whole_number("0224"), whole_number("-1"), whole_number("1e3"), whole_number(19 * "9")
    (224, None, None, None)
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS else None


def decimal(text: str) -> float | None:
    """Return the number that a text of ASCII digits writes, with a sign, a point or an exponent; None for other text.

    >>> decimal("1e-3"), decimal("-.5"), decimal("1_0"), decimal("nan")
    (0.001, -0.5, None, None)
    """
    return float(text) if DECIMAL.fullmatch(text) else None

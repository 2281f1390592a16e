"""Read the records in text logs of minima and maxima, in the format of TensorFlow's Print nodes.

A record is ``;NAME__print__;__requant_min_max:[lo][hi]``, or two separate records with ``__min:[lo]`` and
``__max:[hi]``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from .numbers import FLOAT_MAX
from .regular import read_file

MARK = "__print__"
"""What stands behind the name in a record, and in the name of an output whose values are records."""
MIN_MAX, MIN, MAX = "__requant_min_max:", "__min:", "__max:"
KINDS = {MIN_MAX: 2, MIN: 1, MAX: 1}
"""The kinds of records, with the number of values of each."""
MOST = 2**30
"""The most bytes of a log that are read: ten million records."""
# Two threads can write on one line: a record starts at each ``;<name>__print__;``.
RECORD = re.compile(rf";(?P<name>[^;\n]+?){MARK};(?P<kind>__\w+:)(?P<values>(?:\[[^\]\[;\n]*\])*)")
BEGUN = "|".join(re.escape(kind[:end]) for kind in KINDS for end in range(len(kind)))
TORN = re.compile(
    rf";[^;\n]+{MARK}(?:;(?:{BEGUN}))?[ \t\r]*$|__(?:requant_min_max|min|max):[^\n]*|^;[^;\n\[]+\Z", re.MULTILINE
)
"""A record that was cut in its kind, lost its beginning, or was cut in its name at the end of the log."""


class Record(NamedTuple):
    """A record of a log.

    Attributes:
        name: The tensor or node.
        kind: A key of `KINDS`.
        values: Its numbers, with 0.0 for -0.0; empty if their number is another one, one is not finite in float32, or
            the minimum is above the maximum.
    """

    name: str
    kind: str
    values: tuple[float, ...]


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a log.

    Raises:
        RequantError: The file cannot be read.
    """
    return read_file(path, most=MOST).decode(errors="replace")


def records(text: str) -> Iterator[Record]:
    """Yield the records in the text of a log. Other lines are ignored, and what stands before a record on its line."""
    for name, kind, values in (match.groups() for match in RECORD.finditer(text)):
        if kind in KINDS:
            yield Record(name, kind, _numbers(values, KINDS[kind]))


def count_torn(text: str) -> int:
    """Return how many records lack a part."""
    return len(TORN.findall(RECORD.sub("\n", text)))


def _numbers(text: str, count: int) -> tuple[float, ...]:
    """Return the numbers in ``[a][b]``; empty if a record cannot have them."""
    try:
        found = tuple(float(part) + 0.0 for part in text[1:-1].split("]["))
    except ValueError:
        return ()
    fit = len(found) == count and found[0] <= found[-1] and all(abs(number) <= FLOAT_MAX for number in found)
    return found if fit else ()

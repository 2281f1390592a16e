"""Read and write the text log of minima and maxima, as ranges of a float model's tensors.

A record is ``;TENSOR__print__;__requant_min_max:[lo][hi]``, or two separate records with ``__min:[lo]`` and
``__max:[hi]``; see docs/flow.md. All records of a tensor give one range: the smallest minimum and the largest maximum.
"""

from __future__ import annotations

import math
import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .. import RequantError
from ..system.regular import read_file
from .histogram import Statistic
from .overrides import check_tensors
from .precision import FLOAT_MAX
from .ranges import Range

KINDS = {"__requant_min_max:": 2, "__min:": 1, "__max:": 1}
"""The kinds of records, with the number of values of each."""
# Two threads can write on one line: a record starts at each ``;<name>__print__;``.
RECORD = re.compile(r";(?P<name>[^;\n]+?)__print__;(?P<kind>__\w+:)(?P<values>(?:\[[^\]\[;\n]*\])*)")
BEGUN = "|".join(re.escape(kind[:end]) for kind in KINDS for end in range(len(kind)))
TORN = re.compile(
    rf";[^;\n]+__print__(?:;(?:{BEGUN}))?[ \t\r]*$|__(?:requant_min_max|min|max):[^\n]*|^;[^;\n\[]+\Z", re.MULTILINE
)
"""A record that was cut in its kind, lost its beginning, or was cut in its name at the end of the log."""
MOST = 2**30
"""The most bytes of a log that are read: ten million records."""
UNFIT = re.compile(r"[;\n\r]|__print__")
"""Characters and text that a name in a log cannot contain."""


@dataclass(frozen=True, slots=True)
class Log:
    """The content of a log.

    Attributes:
        source: The file.
        ranges: The range of each tensor.
        rejected: The number of unreadable records: truncated, garbled, not finite in float32, or with minimum above
            maximum.
    """

    source: str
    ranges: Mapping[str, Range]
    rejected: int = 0

    def check(self, known: Iterable[str]) -> None:
        """Refuse names of tensors that the model does not have.

        Raises:
            RequantError: The model lacks a tensor; the message lists similar names.
        """
        check_tensors(self.ranges, known, self.source)


def load_log(path: str | os.PathLike[str]) -> Log:
    """Read the ranges in a log; other lines are ignored.

    Raises:
        RequantError: The file cannot be read, contains no range, or has only minima or only maxima of a tensor.
    """
    source = os.fspath(path)
    text = read_file(path, most=MOST).decode(errors="replace")
    lows: dict[str, float] = {}
    highs: dict[str, float] = {}
    rejected = len(TORN.findall(RECORD.sub("\n", text)))
    for match in RECORD.finditer(text):
        name, kind = match["name"], match["kind"]
        if kind not in KINDS:
            continue
        values = _floats(match["values"])
        if len(values) != KINDS[kind] or values != sorted(values):
            rejected += 1
            continue
        if kind != "__max:":
            lows[name] = min(lows.get(name, math.inf), values[0])
        if kind != "__min:":
            highs[name] = max(highs.get(name, -math.inf), values[-1])
    for name in sorted(lows.keys() ^ highs.keys()):
        raise RequantError(f"{source}: tensor {name!r} has only {'minima' if name in lows else 'maxima'}")
    for name, lo in lows.items():
        if lo > highs[name]:
            raise RequantError(f"{source}: tensor {name!r} has minima above its maxima")
    if not lows:
        unreadable = f" (unreadable records: {rejected})" if rejected else ""
        raise RequantError(
            f"{source}: no range in this log: no line ;TENSOR__print__;__requant_min_max:[lo][hi]{unreadable}"
        )
    return Log(source, {name: (lo, highs[name]) for name, lo in lows.items()}, rejected)


def log_text(statistics: Mapping[str, Statistic]) -> str:
    """Return a log with the extremes of each tensor on one line. Each number reads back as the same float64.

    The lines are sorted by tensor, because a resumed run holds the statistics in another order.

    Raises:
        RequantError: A log cannot contain the name of a tensor.
    """
    check_names(statistics)
    return "".join(
        f";{name}__print__;__requant_min_max:[{float(seen.lo)!r}][{float(seen.hi)!r}]\n"
        for name, seen in sorted(statistics.items())
    )


def check_names(names: Iterable[str]) -> None:
    """Refuse names that a log cannot contain: a log is text to read, without control characters.

    Raises:
        RequantError: A log cannot contain a name.
    """
    for name in names:
        if not name or UNFIT.search(name) or not name.isprintable():
            raise RequantError(f"a log cannot contain the name of tensor {name!r}; write a range file instead")


def is_log(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a log and not a range file, which is a JSON object.

    Raises:
        RequantError: The file cannot be read.
    """
    return read_file(path, most=64, whole=False).removeprefix(BOM_UTF8).lstrip()[:1] != b"{"


def _floats(text: str) -> list[float]:
    """Return the numbers in ``[a][b]``, with 0.0 for -0.0; an empty list if one is not a finite float32."""
    try:
        values = [float(part) + 0.0 for part in text[1:-1].split("][")]
    except ValueError:
        return []
    return values if all(abs(value) <= FLOAT_MAX for value in values) else []

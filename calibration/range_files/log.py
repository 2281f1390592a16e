"""Read and write the text log of minima and maxima, as ranges of a float model's tensors.

All records of a tensor give one range: the smallest minimum and the largest maximum. See docs/flow.md.
"""

from __future__ import annotations

import math
import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ... import RequantError
from ...system.log_records import MARK, MAX, MIN, MIN_MAX, count_torn, read_text, records
from ...system.regular import read_file
from ..rules.ranges import Range
from ..statistics.histogram import Statistic
from .overrides import check_tensors

UNFIT = re.compile(rf"[;\n\r]|{MARK}")
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
    text = read_text(path)
    lows: dict[str, float] = {}
    highs: dict[str, float] = {}
    rejected = count_torn(text)
    for name, kind, values in records(text):
        rejected += not values
        if values and kind != MAX:
            lows[name] = min(lows.get(name, math.inf), values[0])
        if values and kind != MIN:
            highs[name] = max(highs.get(name, -math.inf), values[-1])
    for name in sorted(lows.keys() ^ highs.keys()):
        raise RequantError(f"{source}: tensor {name!r} has only {'minima' if name in lows else 'maxima'}")
    for name, lo in lows.items():
        if lo > highs[name]:
            raise RequantError(f"{source}: tensor {name!r} has minima above its maxima")
    if not lows:
        unreadable = f" (unreadable records: {rejected})" if rejected else ""
        file = ", and not a range file, a JSON object, either" if source.lower().endswith(".json") else ""
        raise RequantError(f"{source}: no range in this log: no line ;TENSOR{MARK};{MIN_MAX}[lo][hi]{unreadable}{file}")
    return Log(source, {name: (lo, highs[name]) for name, lo in lows.items()}, rejected)


def log_text(statistics: Mapping[str, Statistic]) -> str:
    """Return a log with the extremes of each tensor on one line. Each number reads back as the same float64.

    The lines are sorted by tensor, because a resumed run holds the statistics in another order.

    Raises:
        RequantError: A log cannot contain the name of a tensor.
    """
    check_names(statistics)
    return "".join(
        f";{name}{MARK};{MIN_MAX}[{float(seen.lo)!r}][{float(seen.hi)!r}]\n"
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

"""Read text logs of minima and maxima in the format of TensorFlow's Print nodes."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..system.regular import read_file
from .int8.qparams import FLOAT_MAX
from .registry import TransformError

REQUANT_MIN_MAX, MIN, MAX = "__requant_min_max:", "__min:", "__max:"
VALUES = {REQUANT_MIN_MAX: 2, MIN: 1, MAX: 1}
MOST = 2**30
"""The most bytes of a log that are read: ten million records."""
# A record starts at ``;<name>__print__;``, also inside a line: two threads may write on one line.
RECORD = re.compile(r";(?P<name>[^;\n]+?)__print__;(?P<kind>__\w+:)(?P<values>(?:\[[^\]\[;\n]*\])*)")
BEGUN = "|".join(re.escape(kind[:end]) for kind in VALUES for end in range(len(kind)))
TORN = re.compile(
    rf";[^;\n]+__print__(?:;(?:{BEGUN}))?[ \t\r]*$|__(?:requant_min_max|min|max):[^\n]*|^;[^;\n\[]+\Z", re.MULTILINE
)
"""A record that was cut in its kind, lost its beginning, or was cut in its name at the end of the log."""


@dataclass(frozen=True, slots=True)
class Log:
    """The records of one kind.

    Attributes:
        values: The records of each node, by node name, in the order of the log. A record is one or two floats.
        rejected: The number of invalid records: of this kind with too few values, with one that is not finite in
            float32, or with a minimum above the maximum; and of any kind where marks are missing.
    """

    values: Mapping[str, tuple[tuple[float, ...], ...]]
    rejected: int


def read_log(path: str | Path, kind: str) -> Log:
    """Read the records of `kind` from a log; other lines are ignored.

    Text before a record, such as a time stamp or a thread number, is ignored. A line may hold several records.

    Args:
        path: A text file.
        kind: `REQUANT_MIN_MAX`, `MIN` or `MAX`.

    Raises:
        RequantError: The file cannot be read, or has no valid record of this kind.
    """
    text = read_file(os.path.expanduser(path), most=MOST).decode(errors="replace")
    records: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    rejected = len(TORN.findall(RECORD.sub("\n", text)))
    for match in RECORD.finditer(text):
        if match["kind"] != kind:
            continue
        values = _floats(match["values"])
        if len(values) == VALUES[kind] and list(values) == sorted(values):
            records[match["name"]].append(values)
        else:
            rejected += 1
    if not records:
        raise TransformError(f"{path}: no line with __print__;{kind} and {VALUES[kind]} value(s) in this log")
    return Log({name: tuple(rows) for name, rows in records.items()}, rejected)


def _floats(text: str) -> tuple[float, ...]:
    """Return the numbers in ``[a][b]``; empty if one is not a finite float32 number."""
    try:
        values = tuple(float(part) for part in text[1:-1].split("]["))
    except ValueError:
        return ()
    return values if all(abs(value) <= FLOAT_MAX for value in values) else ()


def low_percentile(values: list[float], percent: float) -> float:
    """Return the lowest minimum after dropping the lowest `percent` of the minima: index round(N * p / 100)."""
    return sorted(values)[min(len(values) - 1, _round(len(values) * percent / 100))]


def high_percentile(values: list[float], percent: float) -> float:
    """Return the highest maximum after dropping the highest `percent` of the maxima: index round(N * (1 - p / 100)).

    TensorFlow's rule is the same: it drops one record fewer here than `low_percentile` drops.
    """
    return sorted(values)[min(len(values) - 1, _round(len(values) * (100 - percent) / 100))]


def _round(value: float) -> int:
    """Round half away from zero, as C++ does."""
    return math.floor(value + 0.5)

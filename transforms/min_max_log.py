"""The text log of minima and maxima, in the lines of TensorFlow's Print nodes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .qparams import FLOAT_MAX
from .registry import TransformError

REQUANT_MIN_MAX, MIN, MAX = "__requant_min_max:", "__min:", "__max:"
VALUES = {REQUANT_MIN_MAX: 2, MIN: 1, MAX: 1}
# Two threads may have written on one line: a record starts wherever ``;<name>__print__;`` does.
RECORD = re.compile(r";(?P<name>[^;\n]+?)__print__;(?P<kind>__\w+:)(?P<values>(?:\[[^\]\[;\n]*\])*)")


@dataclass(frozen=True, slots=True)
class Log:
    """The records of one kind.

    Attributes:
        values: Per node name the records, each of one or two floats, in the order of the log.
        rejected: How many records of this kind could not be read: cut short, not finite in float32, or a
            minimum above its maximum.
    """

    values: Mapping[str, tuple[tuple[float, ...], ...]]
    rejected: int


def read_log(path: str | Path, kind: str) -> Log:
    """Read the records of `kind` from a log; every other line is passed over.

    Whatever stands before a record (a time stamp, a thread's number) does not matter, and several records may share
    a line.

    Args:
        path: A text file.
        kind: `REQUANT_MIN_MAX`, `MIN` or `MAX`.

    Raises:
        TransformError: The file cannot be read, or has no record of this kind.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TransformError(f"{path}: cannot read the log: {error.strerror}") from error
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    rejected = 0
    for match in RECORD.finditer(text):
        if match["kind"] != kind:
            continue
        values = _floats(match["values"])
        if len(values) == VALUES[kind] and list(values) == sorted(values):
            found[match["name"]].append(values)
        else:
            rejected += 1
    if not found:
        raise TransformError(f"{path}: no line with __print__;{kind} and {VALUES[kind]} value(s) in this log")
    return Log({name: tuple(records) for name, records in found.items()}, rejected)


def _floats(text: str) -> tuple[float, ...]:
    """Return the numbers in ``[a][b]``; empty when one is none that float32 can hold."""
    try:
        values = tuple(float(part) for part in text[1:-1].split("]["))
    except ValueError:
        return ()
    return values if all(abs(value) <= FLOAT_MAX for value in values) else ()


def low_percentile(values: list[float], percent: float) -> float:
    """Return the minimum left when the lowest `percent` of the minima are dropped: index round(N * p / 100)."""
    return sorted(values)[min(len(values) - 1, _round(len(values) * percent / 100))]


def high_percentile(values: list[float], percent: float) -> float:
    """Return the maximum left when the highest `percent` of the maxima are dropped: index round(N * (1 - p / 100)).

    One record fewer is dropped than at the low end: this is the original's rule.
    """
    return sorted(values)[min(len(values) - 1, _round(len(values) * (100 - percent) / 100))]


def _round(value: float) -> int:
    """Round half away from zero, as C++ does."""
    return math.floor(value + 0.5)

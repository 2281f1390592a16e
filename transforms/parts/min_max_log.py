"""The records of one kind in a text log of minima and maxima, and percentiles of them."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...system.log_records import KINDS, MARK, count_torn, read_text, records
from ..registry import TransformError


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

    Args:
        path: A text file.
        kind: `MIN_MAX`, `MIN` or `MAX`.

    Raises:
        RequantError: The file cannot be read, or has no valid record of this kind.
    """
    text = read_text(os.path.expanduser(path))
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    rejected = count_torn(text)
    for record in records(text):
        if record.kind == kind and record.values:
            found[record.name].append(record.values)
        rejected += record.kind == kind and not record.values
    if not found:
        raise TransformError(f"{path}: no line with {MARK};{kind} and {KINDS[kind]} value(s) in this log")
    return Log({name: tuple(rows) for name, rows in found.items()}, rejected)


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

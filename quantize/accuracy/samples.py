"""What single samples say: how sure the SQNR of all of them is, and which one a model loses most of.

The scores of an INT8 text reader had 22.7 dB over all its samples, and 10.1 dB on one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .classes import Z
from .sqnr import Powers, decibels, finite, worst_powers

FEWEST_ROWS = 4
"""The least number of samples whose spread is known."""
APART_DB = 3.0
"""A sample is named that is so much worse than all samples together: it has at least twice their noise."""


@dataclass(frozen=True, slots=True)
class WorstSample:
    """The sample with the lowest SQNR of an output.

    Attributes:
        where: The sample, as in ``"data.npz, sample 7"``.
        output: The name of the output.
        sqnr_db: Its SQNR in dB; see `EachSample.worst`.
    """

    where: str
    output: str
    sqnr_db: float

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; the SQNR is null if there is no number for it."""
        return {"where": self.where, "output": self.output, "sqnr_db": finite(self.sqnr_db)}


@dataclass(frozen=True, slots=True)
class _Row:
    """An output of a sample: the number of its values, and the sums of squares of its signal and of its noise."""

    where: str
    values: int
    signal: float
    noise: float


@dataclass
class EachSample:
    """The signal and the noise of each output of each sample, by output: a list for each pair of `output_powers`."""

    rows: dict[str, list[list[_Row]]] = field(default_factory=dict)

    def add(self, where: str, output: str, values: int, *powers: Powers) -> None:
        """Add an output of a sample.

        Args:
            where: The sample.
            output: The name of the output.
            values: The number of values.
            powers: The sums of squares of the float model's values, and of the differences; several pairs where
                several judge the output.
        """
        for rows, pair in zip(self.rows.setdefault(output, [[] for _ in powers]), powers, strict=True):
            rows.append(_Row(where, values, *pair))

    def sqnr_db(self) -> dict[str, float]:
        """Return the SQNR of each output over all samples, in dB."""
        return {name: decibels(*worst_powers(map(_together, pairs))) for name, pairs in self.rows.items()}

    def low_db(self) -> dict[str, float]:
        """Return the lower end of the 95 % confidence interval of each output's SQNR, for other data of the same kind.

        With fewer than `FEWEST_ROWS` samples it is the SQNR itself.
        """
        return {name: min(map(_lowest_db, pairs)) for name, pairs in self.rows.items()}

    def worst(self, outputs: Iterable[str]) -> WorstSample | None:
        """Return the sample with the lowest SQNR; None if no sample is worse than all together by `APART_DB`.

        A sample that has more than the SQNR of the worst output says nothing about what the model loses. The signal of
        a sample that is quieter than the mean of all samples counts as this mean: noise in silence, or in the empty
        mask of a segmentation, is compared with what the output usually holds.

        Args:
            outputs: The names of the outputs that count.
        """
        every, sqnr_db = list(outputs), self.sqnr_db()
        found = filter(None, (_worst_of(name, rows) for name in every for rows in self.rows[name]))
        worst = min(found, key=lambda each: each.sqnr_db, default=None)
        return worst if worst is not None and worst.sqnr_db <= min(sqnr_db[name] for name in every) else None


def _together(rows: Sequence[_Row]) -> Powers:
    """Return the signal and the noise of all samples."""
    return sum(row.signal for row in rows), sum(row.noise for row in rows)


def _lowest_db(rows: Sequence[_Row]) -> float:
    """Return the lower end of the 95 % confidence interval of an SQNR; of few samples exactly the SQNR."""
    return decibels(*_together(rows)) if len(rows) < FEWEST_ROWS else decibels(1.0, _highest_ratio(rows))


def _highest_ratio(rows: Sequence[_Row]) -> float:
    """Return the upper end of the 95 % confidence interval of the noise over the signal; NaN without a signal.

    Cochran, "Sampling Techniques" (3rd edition, 1977), section 6.4: the variance of a ratio ``R = sum(noise) /
    sum(signal)`` of n samples is about ``n / (n - 1) * sum((noise - R * signal)^2) / sum(signal)^2``.
    """
    (signal, noise), count = _together(rows), len(rows)
    if noise == 0.0:
        return 0.0
    if signal == 0.0 or not math.isfinite(noise):
        return math.nan
    ratio = noise / signal
    squares = sum((row.noise - ratio * row.signal) ** 2 for row in rows)
    return ratio + Z * math.sqrt(count / (count - 1) * squares) / signal


def _worst_of(output: str, rows: Sequence[_Row]) -> WorstSample | None:
    """Return the worst sample of an output; None if it is not worse than all together by `APART_DB`."""
    signal, noise = _together(rows)
    mean = signal / max(sum(row.values for row in rows), 1)
    each = [decibels(max(row.signal, mean * row.values), row.noise) for row in rows]
    worst = min(each)
    apart = worst < max(each) and worst <= decibels(signal, noise) - APART_DB
    return WorstSample(rows[each.index(worst)].where, output, worst) if apart else None

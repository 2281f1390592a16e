"""Statistics that are sums over runs of the model: `Runs`, `Channels` and `Moments`.

A sum within one run is rounded to float64. A sum over runs is exact (`ExactSum`), so ``|`` is associative and
commutative, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from ...system.given import check_kind
from ..model.session import Array
from .exact import ExactSum
from .extremes import check_array

SUMMED = 1 << 14
"""Values per step of a float64 sum. The C library serves a buffer of 128 KiB from memory that the process already
has.
"""


@dataclass(frozen=True, slots=True)
class Runs:
    """The extremes of a tensor in single runs of the model: their means, and how the range grows with the data.

    Attributes:
        count: The number of runs in which the tensor has values, at least 1.
        ends: The sum of each run's smallest value and the sum of each run's largest value, shape (2,).
        blocks: Block b -> the extremes of the runs whose samples have the positions ``2**b - 1`` to ``2**(b + 1) - 2``.
            Each block doubles the amount of data.
    """

    count: int
    ends: ExactSum
    blocks: Mapping[int, tuple[float, float]]

    @classmethod
    def of(cls, positions: Sequence[int], ends: Array) -> Runs:
        """Return the statistic of some runs.

        Args:
            positions: The position of the first sample of each run in the whole data, from 0.
            ends: The smallest and the largest value of each run, (runs, 2) float64.

        Raises:
            ValueError: There are no runs, or a value is not finite.
        """
        return cls.of_many(positions, ends[:, None])[0]

    @classmethod
    def of_many(cls, positions: Sequence[int], ends: Array) -> list[Runs]:
        """Return the statistics of several tensors over the same runs. `ends` is (runs, tensors, 2) float64.

        Raises:
            ValueError: There are no runs, or a value is not finite.
        """
        if not len(ends):
            raise ValueError("has no values")
        blocks = np.array([(position + 1).bit_length() - 1 for position in positions])
        extremes = {}
        for block in np.unique(blocks).tolist():
            in_block = ends[blocks == block]
            extremes[block] = np.stack([in_block[..., 0].min(axis=0), in_block[..., 1].max(axis=0)], axis=1).tolist()
        return [
            cls(len(ends), total, {block: (rows[index][0], rows[index][1]) for block, rows in extremes.items()})
            for index, total in enumerate(ExactSum.of(ends).parts())
        ]

    def __or__(self, other: Runs) -> Runs:
        """Return the statistic of both sets of runs."""
        if not isinstance(other, Runs):
            return NotImplemented
        blocks = dict(self.blocks)
        for block, ends in other.blocks.items():
            _widen(blocks, block, ends)
        return Runs(self.count + other.count, self.ends | other.ends, blocks)

    def __hash__(self) -> int:
        """Return a hash that agrees with ``==``."""
        return hash((self.count, self.ends, tuple(sorted(self.blocks.items()))))

    @property
    def mean_lo(self) -> float:
        """The mean of the smallest values of the runs."""
        return float(self.ends.value[0] / self.count)

    @property
    def mean_hi(self) -> float:
        """The mean of the largest values of the runs."""
        return float(self.ends.value[1] / self.count)

    @property
    def growth(self) -> dict[int, tuple[float, float]]:
        """The extremes of the first n samples, by n, ascending.

        There is an entry ``n = 2**(b + 1) - 1`` for each block b that has values.
        """
        grown: dict[int, tuple[float, float]] = {}
        lo, hi = math.inf, -math.inf
        for block, (low, high) in sorted(self.blocks.items()):
            lo, hi = min(lo, low), max(hi, high)
            grown[2 ** (block + 1) - 1] = (lo, hi)
        return grown


def _widen(blocks: dict[int, tuple[float, float]], block: int, ends: tuple[float, float]) -> None:
    """Widen the extremes of a block."""
    lo, hi = blocks.get(block, ends)
    blocks[block] = (min(lo, ends[0]), max(hi, ends[1]))


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """The extremes and the mean of each channel.

    Attributes:
        lo: The smallest value of each channel, (C,) float64, read-only.
        hi: The largest value of each channel, (C,) float64, read-only.
        total: The sum of each channel, shape (C,).
        count: The number of values per channel, at least 1.
    """

    lo: Array
    hi: Array
    total: ExactSum
    count: int

    def __post_init__(self) -> None:
        """Make the extremes read-only."""
        self.lo.flags.writeable = self.hi.flags.writeable = False

    @classmethod
    def of(cls, values: Array, axis: int) -> Channels:
        """Reduce a float array over all axes except `axis`. Sums are float64.

        Raises:
            ValueError: The array is empty, a value is not finite, or the array has no such axis.
        """
        check_array(values)
        check_kind(axis, Integral, "axis must be an integer")
        if not -values.ndim <= axis < values.ndim:
            raise ValueError(f"has no axis {axis}")
        if values.size == 0:
            raise ValueError("has no values")
        others = tuple(index for index in range(values.ndim) if index != axis % values.ndim)
        with np.errstate(invalid="ignore"):  # infinity minus infinity; of_runs() reports it
            total = np.sum(values, axis=others, dtype=np.float64)
        lo, hi, sums = (np.atleast_1d(part)[None] for part in (values.min(axis=others), values.max(axis=others), total))
        return cls.of_runs(lo, hi, sums, values.size // values.shape[axis])

    @classmethod
    def of_runs(cls, lo: Array, hi: Array, total: Array, count: int) -> Channels:
        """Return the statistic of several runs.

        Args:
            lo: The smallest value of each channel in each run, (runs, C).
            hi: The largest values, (runs, C).
            total: The sums, (runs, C) float64.
            count: The number of values per channel in all runs.

        Raises:
            ValueError: A sum is not finite.
        """
        ends = (np.min(lo, axis=0), np.max(hi, axis=0))
        low, high = (np.asarray(end, np.float64) + 0.0 for end in ends)  # + 0.0: no -0.0
        return cls(low, high, ExactSum.of(total), count)

    def __or__(self, other: Channels) -> Channels:
        """Return the statistic of both sets of values.

        Raises:
            ValueError: The numbers of channels differ.
        """
        if not isinstance(other, Channels):
            return NotImplemented
        if self.lo.shape != other.lo.shape:
            few, many = sorted((self.lo.size, other.lo.size))
            raise ValueError(f"has {few} channels in one run and {many} in another")
        lo, hi = np.minimum(self.lo, other.lo), np.maximum(self.hi, other.hi)
        return Channels(lo, hi, self.total | other.total, self.count + other.count)

    def __eq__(self, other: object) -> bool:
        """Return whether all attributes are equal."""
        if not isinstance(other, Channels):
            return NotImplemented
        same = np.array_equal(self.lo, other.lo) and np.array_equal(self.hi, other.hi)
        return same and (self.count, self.total) == (other.count, other.total)

    def __hash__(self) -> int:
        """Return a hash that agrees with ``==``."""
        return hash((self.count, self.total, tuple(self.lo), tuple(self.hi)))

    @property
    def mean(self) -> Array:
        """The mean of each channel, (C,) float64."""
        return np.asarray(self.total.value / self.count)


@dataclass(frozen=True, slots=True)
class Moments:
    """The mean and the variance of a set of values.

    Attributes:
        count: The number of values, at least 1.
        powers: The sum of the values and the sum of their squares, shape (2,).
    """

    count: int
    powers: ExactSum

    @classmethod
    def of(cls, values: Array) -> Moments:
        """Sum the values of a float array of any shape and their squares, both in float64.

        Raises:
            ValueError: The array is empty, a value is not finite, or the sum of squares overflows.
        """
        check_array(values)
        if values.size == 0:
            raise ValueError("has no values")
        flat = values.ravel()  # always in C order, because a float sum depends on the order
        total = square = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, flat.size, SUMMED):
                chunk = flat[start : start + SUMMED].astype(np.float64)
                total += float(chunk.sum())
                square += float(np.sum(np.square(chunk, out=chunk)))
        return cls(values.size, ExactSum.of(np.array([[total, square]])))

    def __or__(self, other: Moments) -> Moments:
        """Return the sums over both sets of values."""
        if not isinstance(other, Moments):
            return NotImplemented
        return Moments(self.count + other.count, self.powers | other.powers)

    @property
    def mean(self) -> float:
        """The mean."""
        return float(self.powers.value[0] / self.count)

    @property
    def variance(self) -> float:
        """The population variance (divided by n, not n - 1), at least 0."""
        return max(float(self.powers.value[1] / self.count) - self.mean**2, 0.0)

"""Statistics that are sums over runs of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .exact import ExactSum
from .session import Array

SUMMED = 1 << 14
"""Values per step of a sum in float64: a buffer of 128 KiB still comes from memory that the process has."""


@dataclass(frozen=True, slots=True)
class Runs:
    """What single runs of the model saw of a tensor: for averages of extremes, and for how the range has grown.

    Attributes:
        count: How many runs gave the tensor values, at least 1.
        ends: The sums of the smallest and of the largest value of each run, shape (2,).
        blocks: The extremes of the runs whose samples have the positions ``2**b - 1`` to ``2**(b + 1) - 2``, by b: each
            block doubles how much of the data was seen.
    """

    count: int
    ends: ExactSum
    blocks: Mapping[int, tuple[float, float]]

    @classmethod
    def of(cls, positions: Sequence[int], ends: Array) -> Runs:
        """Gather runs.

        Args:
            positions: The position of the first sample of each run in the whole of the data, from 0.
            ends: The smallest and the largest value of each run, (runs, 2) float64.

        Raises:
            ValueError: There are no runs, or a value is not finite.
        """
        return cls.of_many(positions, ends[:, None])[0]

    @classmethod
    def of_many(cls, positions: Sequence[int], ends: Array) -> list[Runs]:
        """Gather the same runs of several tensors, whose `ends` are (runs, tensors, 2) float64.

        Raises:
            ValueError: There are no runs, or a value is not finite.
        """
        if not len(ends):
            raise ValueError("has no values")
        blocks = np.array([(position + 1).bit_length() - 1 for position in positions])
        held = {}
        for block in np.unique(blocks).tolist():
            these = ends[blocks == block]
            held[block] = np.stack([these[..., 0].min(axis=0), these[..., 1].max(axis=0)], axis=1).tolist()
        return [
            cls(len(ends), total, {block: (rows[index][0], rows[index][1]) for block, rows in held.items()})
            for index, total in enumerate(ExactSum.of(ends).parts())
        ]

    def __or__(self, other: Runs) -> Runs:
        """Return what both sets of runs saw."""
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
        """The mean of the runs' smallest values."""
        return float(self.ends.value[0] / self.count)

    @property
    def mean_hi(self) -> float:
        """The mean of the runs' largest values."""
        return float(self.ends.value[1] / self.count)

    @property
    def growth(self) -> dict[int, tuple[float, float]]:
        """The extremes of the first n samples, by n = 2**b - 1 for each block that was seen, ascending."""
        grown: dict[int, tuple[float, float]] = {}
        lo, hi = math.inf, -math.inf
        for block, (low, high) in sorted(self.blocks.items()):
            lo, hi = min(lo, low), max(hi, high)
            grown[2 ** (block + 1) - 1] = (lo, hi)
        return grown


def _widen(blocks: dict[int, tuple[float, float]], block: int, ends: tuple[float, float]) -> None:
    """Let a block hold these extremes too."""
    lo, hi = blocks.get(block, ends)
    blocks[block] = (min(lo, ends[0]), max(hi, ends[1]))


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """The extremes and the mean of each channel.

    Attributes:
        lo: The smallest value of each channel, (C,) float64, read-only.
        hi: The largest value of each channel, (C,) float64, read-only.
        total: The sums over runs of each channel's sum, shape (C,).
        count: How many values each channel has seen, at least 1.
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
        """Reduce a float array over every axis but `axis`; sums are float64.

        Raises:
            ValueError: There are no values, one is not finite, or the array has no such axis.
        """
        if not -values.ndim <= axis < values.ndim:
            raise ValueError(f"has no axis {axis}")
        if values.size == 0:
            raise ValueError("has no values")
        others = tuple(index for index in range(values.ndim) if index != axis % values.ndim)
        with np.errstate(invalid="ignore"):  # infinity minus infinity; told apart below
            total = np.sum(values, axis=others, dtype=np.float64)
        lo, hi, sums = (np.atleast_1d(part)[None] for part in (values.min(axis=others), values.max(axis=others), total))
        return cls.of_runs(lo, hi, sums, values.size // values.shape[axis])

    @classmethod
    def of_runs(cls, lo: Array, hi: Array, total: Array, count: int) -> Channels:
        """Gather the channels' extremes and sums of several runs, each of shape (runs, C).

        Raises:
            ValueError: A sum is not finite.
        """
        ends = (np.min(lo, axis=0), np.max(hi, axis=0))
        low, high = (np.asarray(end, np.float64) + 0.0 for end in ends)  # + 0.0: no -0.0
        return cls(low, high, ExactSum.of(total), count)

    def __or__(self, other: Channels) -> Channels:
        """Return the extremes and sums over both sets of values.

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
        """Tell whether both saw values that cannot be told apart."""
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
    """The mean and the variance of what was seen.

    Attributes:
        count: How many values were seen, at least 1.
        powers: The sums over runs of the values' sum and of their squares' sum, shape (2,).
    """

    count: int
    powers: ExactSum

    @classmethod
    def of(cls, values: Array) -> Moments:
        """Sum a float array of any shape and its squares, both in float64.

        Raises:
            ValueError: There are no values, one is not finite, or the sum of squares overflows.
        """
        if values.size == 0:
            raise ValueError("has no values")
        flat = values.ravel()  # in one order, whatever the layout: a sum depends on it
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
        """The variance, of the values as a whole (not of a sample of more); at least 0."""
        return max(float(self.powers.value[1] / self.count) - self.mean**2, 0.0)

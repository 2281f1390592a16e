"""Histograms that merge exactly: the extremes alone define the grid of bins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..model.session import Array
from .extremes import MinMax, check_array, check_extremes, extremes_of

MAX_BINS = 2048
"""The largest number of bins of a histogram."""
MANTISSA_BITS = 24
"""A bin is at least as wide as the largest magnitude times 2**-24. float32 has no finer resolution at that
magnitude.
"""
MIN_EXPONENT = -126
"""A bin is at least as wide as the smallest normal float32, so that the reciprocal of a width is finite in float32."""
CHUNK = 1 << 15
"""Values per step when a histogram is built. One step's values and its two buffers fit in the cache (384 KiB)."""
TAIL = 256
"""Each tail, in which all values are counted, holds at most 1 in 256 of the sampled values."""


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Counts per bin, on the grid of bins ``[i * 2**k, (i + 1) * 2**k)``.

    The grid is anchored at zero and the extremes alone define k. Two histograms with different grids are therefore
    brought onto one grid by ``i >> d``, without resampling, and ``|`` is exact:
    ``of(a) | of(b) == of(concatenate(a, b))``.

    The runner counts only some of the values of a large tensor (see `Counter`). Such a histogram is exact in the tails
    and an estimate between them.

    Attributes:
        lo: The exact smallest value.
        hi: The exact largest value.
        exponent: k, the binary logarithm of the bin width.
        first: The index i of the first bin, which holds `lo`.
        counts: Values per bin, from `first` to the bin that holds `hi`, (bins,) int64, read-only.
    """

    lo: float
    hi: float
    exponent: int
    first: int
    counts: Array

    def __post_init__(self) -> None:
        """Check the invariants and make the counts read-only.

        Raises:
            ValueError: The extremes, the grid and the counts do not fit each other.
        """
        check_extremes(self.lo, self.hi)
        if self.exponent != _exponent(self.lo, self.hi) or self.first != _index(self.lo, self.exponent):
            raise ValueError("the grid does not follow from the extremes")
        if self.counts.dtype != np.int64 or self.counts.shape != (_bins(self.lo, self.hi, self.exponent),):
            raise ValueError("the counts do not fit the grid")
        if self.counts.min() < 0 or self.counts[0] < 1 or self.counts[-1] < 1:
            raise ValueError("the counts do not fit the extremes")
        self.counts.flags.writeable = False

    @classmethod
    def of(cls, values: Array) -> Histogram:
        """Count the values of a float array of any shape.

        Raises:
            ValueError: The array is empty, or a value is not finite.
        """
        counter = Counter()
        counter.add(values)
        return counter.histogram()

    def __or__(self, other: Histogram) -> Histogram:
        """Return the histogram of both sets of values."""
        if not isinstance(other, Histogram):
            return NotImplemented
        lo, hi = min(self.lo, other.lo), max(self.hi, other.hi)
        exponent = _exponent(lo, hi)
        first = _index(lo, exponent)
        counts = np.zeros(_bins(lo, hi, exponent), np.int64)
        for part in (self, other):
            _add_counts(part.counts, part.first, exponent - part.exponent, into=counts, first=first)
        return Histogram(lo, hi, exponent, first, counts)

    def __eq__(self, other: object) -> bool:
        """Return whether the extremes and the counts are equal."""
        if not isinstance(other, Histogram):
            return NotImplemented
        return (self.lo, self.hi) == (other.lo, other.hi) and np.array_equal(self.counts, other.counts)

    def __hash__(self) -> int:
        """Return a hash that agrees with ``==``."""
        return hash((self.lo, self.hi, self.counts.tobytes()))

    @property
    def count(self) -> int:
        """The number of values."""
        return int(self.counts.sum())

    @property
    def width(self) -> float:
        """The width of a bin."""
        return math.ldexp(1.0, self.exponent)

    @property
    def edges(self) -> Array:
        """The edges of the bins, (bins + 1,) float64. The outer edges are `lo` and `hi`."""
        inner = np.arange(self.first + 1, self.first + self.counts.size, dtype=np.float64)  # outer edges may overflow
        return np.concatenate([[self.lo], np.ldexp(inner, self.exponent), [self.hi]])


Statistic: TypeAlias = MinMax | Histogram
"""The extremes or the histogram of a tensor."""


def _exponent(lo: float, hi: float) -> int:
    """Return the smallest k that is permitted and gives at most `MAX_BINS` bins.

    The result is monotone: a wider range never has a smaller k. Exact merging depends on this property.
    """
    largest, span = max(-lo, hi), hi - lo
    exponent = max(math.frexp(largest)[1] - MANTISSA_BITS, MIN_EXPONENT) if largest > 0 else MIN_EXPONENT
    if span > 0:  # MAX_BINS bins that are narrower than 2**(e - 1) / MAX_BINS cannot cover span >= 2**(e - 1)
        exponent = max(exponent, math.frexp(span)[1] - MAX_BINS.bit_length())
    while _bins(lo, hi, exponent) > MAX_BINS:
        exponent += 1
    return exponent


def _index(value: float, exponent: int) -> int:
    """Return the index of the bin that holds `value`."""
    scaled = math.ldexp(value, -exponent)
    return -1 if scaled == 0 > value else math.floor(scaled)  # a tiny negative value underflows to -0.0


def _bins(lo: float, hi: float, exponent: int) -> int:
    """Return the number of bins from `lo` to `hi`."""
    return _index(hi, exponent) - _index(lo, exponent) + 1


def _add_counts(counts: Array, start: int, shift: int, *, into: Array, first: int) -> None:
    """Add counts to the counts of a coarser or equal grid.

    Args:
        counts: The counts to add, (bins,) int64.
        start: The index of their first bin.
        shift: The binary logarithm of the ratio of the bin widths, at least 0.
        into: The counts of the other grid, changed in place.
        first: The index of the first bin of `into`.
    """
    if shift == 0:
        into[start - first : start - first + counts.size] += counts
        return
    coarse = np.arange(start, start + counts.size) >> shift
    starts = np.flatnonzero(np.diff(coarse, prepend=coarse[0] - 1))
    into[coarse[0] - first : coarse[-1] - first + 1] += np.add.reduceat(counts, starts)


def stride_of(shape: tuple[int, ...], limit: int) -> int:
    """Return the stride between the sampled values of an array of more than `limit` values, at least 2.

    The stride has no common factor with the product of the last two axes, which are rows and columns of an image, or
    steps and channels of a sequence. The samples therefore cover all columns evenly, at different positions in every
    row.
    """
    size, inner = math.prod(shape), math.prod(shape[-2:])
    stride = -(-size // limit)
    while math.gcd(stride, inner) > 1:
        stride += 1
    return stride


@dataclass(frozen=True, slots=True)
class _Grid:
    """The bins between two extremes.

    Attributes:
        lo: The smallest value.
        exponent: The binary logarithm of the bin width.
        first: The index of the first bin.
        bins: The number of bins.
    """

    lo: float
    exponent: int
    first: int
    bins: int

    @classmethod
    def of(cls, lo: float, hi: float) -> _Grid:
        """Return the bins of a histogram with these extremes."""
        exponent = _exponent(lo, hi)
        return cls(lo, exponent, _index(lo, exponent), _bins(lo, hi, exponent))

    def bins_of(self, flat: Array) -> Iterator[Array]:
        """Yield the bin of each value of `flat`, (n,), as chunks (m,) int32 that count from the first bin.

        The next chunk overwrites the previous one. Scaling by a power of two, floor and subtraction are exact here
        because an index has at most 24 bits.
        """
        size = min(CHUNK, flat.size)
        buffers = np.empty(size, flat.dtype), np.empty(size, np.int32)
        for start in range(0, flat.size, CHUNK):
            chunk = flat[start : start + CHUNK]
            scaled, index = (buffer[: chunk.size] for buffer in buffers)
            np.multiply(chunk, chunk.dtype.type(math.ldexp(1.0, -self.exponent)), out=scaled)
            if self.lo < 0:  # for positive values the conversion to int32 truncates, which is the same
                np.floor(scaled, out=scaled)
            if self.exponent > 0 > self.lo:  # only a scale below 1 makes a tiny negative value underflow to bin 0
                scaled[(chunk < 0) & (scaled == 0)] = -1
            np.copyto(index, scaled, casting="unsafe")
            if self.first:
                np.subtract(index, self.first, out=index)
            yield index

    def count(self, flat: Array) -> Array:
        """Return the number of values in each bin, (bins,) int64."""
        counts = np.zeros(self.bins, np.int64)
        for indices in self.bins_of(flat):
            counts += np.bincount(indices, minlength=self.bins)
        return counts


class Counter:
    """A histogram that grows with each array. It reads an array in chunks that fit in the cache.

    If an array has more values than a limit, the counter samples the values at an even stride. The samples show where
    the tails begin and estimate the distribution between the tails. All values in the tails are counted. The histogram
    therefore has the true number of values, exact extremes and exact tails, and the counts of an array depend on that
    array alone.
    """

    def __init__(self, limit: int | None = None) -> None:
        """Create an empty histogram.

        Args:
            limit: How many values of an array are counted between its tails, at least 1; None for all.
        """
        self._limit = limit
        self._lo, self._hi = math.inf, -math.inf
        self._grid = _Grid(0.0, 0, 0, 0)
        self._counts = np.zeros(0, np.int64)

    def add(self, values: Array, samples: int = 1) -> tuple[float, float]:
        """Count the values of a float array of any shape. Return the smallest and the largest value.

        Args:
            values: The array.
            samples: The number of samples that are stacked along the first axis. If it does not divide the axis, the
                array counts as one sample.

        Raises:
            ValueError: The array is empty, or a value is not finite. The counter is invalid after this error.
        """
        check_array(values)
        if values.size == 0:
            raise ValueError("has no values")
        floats = values if values.dtype in (np.float32, np.float64) else values.astype(np.float32)
        parts = samples if values.ndim and values.shape[0] % samples == 0 else 1
        size = values.size // parts
        if self._limit is None or size <= self._limit:
            return self._add_all(floats.ravel(order="K"))  # any order will do; "K" copies no transposed array
        stride = stride_of((values.shape[0] // parts, *values.shape[1:]) if values.ndim else (), self._limit)
        ends = [self._add_strided(part, stride) for part in floats.reshape(parts, size)]
        return min(lo for lo, _ in ends), max(hi for _, hi in ends)

    def _add_all(self, flat: Array) -> tuple[float, float]:
        """Count every value of `flat`, (n,), and return the extremes."""
        low, high = math.inf, -math.inf
        for start in range(0, flat.size, CHUNK):
            chunk = flat[start : start + CHUNK]
            lo, hi = extremes_of(chunk)
            low, high = min(low, lo), max(high, hi)
            self._cover(lo, hi)
            self._counts += self._grid.count(chunk)
        return low, high

    def _add_strided(self, flat: Array, stride: int) -> tuple[float, float]:
        """Count the tails of `flat`, (n,), and one of every `stride` values between them. Return the extremes."""
        low, high = math.inf, -math.inf
        sampled = np.empty(len(range(stride // 2, flat.size, stride)), flat.dtype)
        step = -(-CHUNK // stride)
        for at, start in enumerate(range(0, flat.size, step * stride)):
            chunk = flat[start : start + step * stride]
            lo, hi = extremes_of(chunk)
            low, high = min(low, lo), max(high, hi)
            sampled[at * step : (at + 1) * step] = chunk[stride // 2 :: stride]
        grid = _Grid.of(low, high)
        counts = _counts_of_part(flat, sampled, grid)
        self._cover(low, high)
        _add_counts(counts, grid.first, self._grid.exponent - grid.exponent, into=self._counts, first=self._grid.first)
        return low, high

    def histogram(self) -> Histogram:
        """Return the histogram of all counted values.

        Raises:
            ValueError: There are no values.
        """
        if not self._counts.size:
            raise ValueError("has no values")
        return Histogram(self._lo, self._hi, self._grid.exponent, self._grid.first, self._counts.copy())

    def _cover(self, lo: float, hi: float) -> None:
        """Widen the grid, if necessary, so that it holds these extremes."""
        if self._lo <= lo and hi <= self._hi:
            return
        self._lo, self._hi = min(self._lo, lo), max(self._hi, hi)
        grid = _Grid.of(self._lo, self._hi)
        counts = np.zeros(grid.bins, np.int64)
        if self._counts.size:  # a wider range never has narrower bins, so the shift is at least 0
            shift = grid.exponent - self._grid.exponent
            _add_counts(self._counts, self._grid.first, shift, into=counts, first=grid.first)
        self._grid, self._counts = grid, counts


def _counts_of_part(flat: Array, sampled: Array, grid: _Grid) -> Array:
    """Return the counts of values, (n,), from some sampled values, (m,): exact in the tails, estimated between them.

    A tail consists of the outermost bins that together hold at most 1 in `TAIL` of the sampled values. Each bin between
    the tails gets its share of the values there, as whole numbers whose sum is exact.
    """
    counts = grid.count(sampled)
    upto, few = np.cumsum(counts), sampled.size // TAIL
    left, last = int(np.searchsorted(upto, few, side="right")), int(np.searchsorted(upto, sampled.size - few))
    tails = grid.count(_outside(flat, grid, left, grid.bins - 1 - last))
    upto = np.cumsum(counts[left : last + 1])
    tails[left : last + 1] = np.diff(upto * (flat.size - int(tails.sum())) // upto[-1], prepend=0)
    return tails


def _outside(flat: Array, grid: _Grid, left: int, right: int) -> Array:
    """Return those of the values, (n,), that lie in the `left` leftmost or the `right` rightmost bins."""
    lower = flat.dtype.type(math.ldexp(grid.first + left, grid.exponent)) if left else None
    upper = flat.dtype.type(math.ldexp(grid.first + grid.bins - right, grid.exponent)) if right else None
    parts = [flat[:0]]
    for start in range(0, flat.size if left or right else 0, CHUNK):
        chunk = flat[start : start + CHUNK]
        if lower is None:
            parts.append(chunk[chunk >= upper])
        else:
            parts.append(chunk[chunk < lower if upper is None else (chunk < lower) | (chunk >= upper)])
    return np.concatenate(parts)

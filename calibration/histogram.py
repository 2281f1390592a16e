"""Histograms on a grid that follows from the extremes alone, so that they merge exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .extremes import MinMax, check_extremes, extremes_of
from .session import Array

MAX_BINS = 2048
MANTISSA_BITS = 24
"""No bin is narrower than the largest magnitude times 2**-24: float32 tells nothing finer apart up there."""
MIN_EXPONENT = -126
"""No bin is narrower than the smallest normal float32, so that the reciprocal of a width is finite in float32."""
CHUNK = 1 << 15
"""Values per step when a histogram is built: a step's values and both its buffers stay in the cache (384 KiB)."""
TAIL = 256
"""One in so many of the values that are counted may lie in either tail, where all values are."""


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Counts on the grid of bins ``[i * 2**k, (i + 1) * 2**k)``.

    The grid is anchored at zero and k follows from the extremes alone, so two histograms whose grids differ
    are brought onto one grid by ``i >> d``, without resampling.

    Of large tensors the runner counts a part of the values, see `Counter`: between the tails, which are exact, the
    histogram is an estimate then.

    Attributes:
        lo: The smallest value, exactly.
        hi: The largest value, exactly.
        exponent: k, the binary logarithm of a bin's width.
        first: The index i of the first bin, the one that holds `lo`.
        counts: Values per bin from `first` to the bin that holds `hi`, (bins,) int64, read-only.
    """

    lo: float
    hi: float
    exponent: int
    first: int
    counts: Array

    def __post_init__(self) -> None:
        """Check the invariants and make the counts read-only.

        Raises:
            ValueError: The values cannot come from data.
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
            ValueError: There are no values, or one is not finite.
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
            _pour(part.counts, part.first, exponent - part.exponent, into=counts, first=first)
        return Histogram(lo, hi, exponent, first, counts)

    def __eq__(self, other: object) -> bool:
        """Tell whether both saw values that cannot be told apart."""
        if not isinstance(other, Histogram):
            return NotImplemented
        return (self.lo, self.hi) == (other.lo, other.hi) and np.array_equal(self.counts, other.counts)

    def __hash__(self) -> int:
        """Return a hash that agrees with ``==``."""
        return hash((self.lo, self.hi, self.counts.tobytes()))

    @property
    def count(self) -> int:
        """How many values were seen."""
        return int(self.counts.sum())

    @property
    def width(self) -> float:
        """The width of a bin."""
        return math.ldexp(1.0, self.exponent)

    @property
    def edges(self) -> Array:
        """The edges of the bins, (bins + 1,) float64, the outer ones drawn in to `lo` and `hi`."""
        inner = np.arange(self.first + 1, self.first + self.counts.size, dtype=np.float64)  # the outermost may overflow
        return np.concatenate([[self.lo], np.ldexp(inner, self.exponent), [self.hi]])


Statistic: TypeAlias = MinMax | Histogram


def _exponent(lo: float, hi: float) -> int:
    """Return the smallest permitted k that leaves at most `MAX_BINS` bins.

    Monotone: a range that contains another never has the smaller k. Everything else rests on this.
    """
    largest, span = max(-lo, hi), hi - lo
    exponent = max(math.frexp(largest)[1] - MANTISSA_BITS, MIN_EXPONENT) if largest > 0 else MIN_EXPONENT
    if span > 0:  # MAX_BINS bins of a width below 2**(e - 1) / MAX_BINS do not reach across 2**(e - 1) <= span
        exponent = max(exponent, math.frexp(span)[1] - MAX_BINS.bit_length())
    while _bins(lo, hi, exponent) > MAX_BINS:
        exponent += 1
    return exponent


def _index(value: float, exponent: int) -> int:
    """Return the index of the bin that holds `value`."""
    scaled = math.ldexp(value, -exponent)
    return -1 if scaled == 0 > value else math.floor(scaled)  # a tiny negative value underflows to -0.0


def _bins(lo: float, hi: float, exponent: int) -> int:
    """Return how many bins reach from `lo` to `hi`."""
    return _index(hi, exponent) - _index(lo, exponent) + 1


def _pour(counts: Array, start: int, shift: int, *, into: Array, first: int) -> None:
    """Add counts to those of a grid whose bins are ``2**shift`` times as wide; `start` and `first` are first bins."""
    if shift == 0:
        into[start - first : start - first + counts.size] += counts
        return
    coarse = np.arange(start, start + counts.size) >> shift
    starts = np.flatnonzero(np.diff(coarse, prepend=coarse[0] - 1))
    into[coarse[0] - first : coarse[-1] - first + 1] += np.add.reduceat(counts, starts)


def stride_of(shape: tuple[int, ...], limit: int) -> int:
    """Return how far apart the values are that are counted of an array of more than `limit` values, at least 2.

    It has no factor in common with the lengths of the last two axes, which are rows and columns of an image, or steps
    and channels of a sequence: the values come from all columns alike, and from other places in every row.
    """
    size, inner = math.prod(shape), math.prod(shape[-2:])
    stride = -(-size // limit)
    while math.gcd(stride, inner) > 1:
        stride += 1
    return stride


@dataclass(frozen=True, slots=True)
class _Grid:
    """The bins that hold values between two extremes.

    Attributes:
        lo: The smallest value.
        exponent: The binary logarithm of a bin's width.
        first: The index of the first bin.
        bins: How many there are.
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

    def places(self, flat: Array) -> Iterator[Array]:
        """Yield the bin of each value, (n,), counted from the first, in chunks, (m,) int32; the next overwrites it.

        Scaling by a power of two, flooring and subtracting are exact here: an index has at most 24 bits.
        """
        size = min(CHUNK, flat.size)
        buffers = np.empty(size, flat.dtype), np.empty(size, np.int32)
        for start in range(0, flat.size, CHUNK):
            chunk = flat[start : start + CHUNK]
            scaled, index = (buffer[: chunk.size] for buffer in buffers)
            np.multiply(chunk, chunk.dtype.type(math.ldexp(1.0, -self.exponent)), out=scaled)
            if self.lo < 0:  # elsewhere the conversion does it
                np.floor(scaled, out=scaled)
            if self.exponent > 0 > self.lo:  # only a scale below 1 lets a tiny negative value underflow to bin 0
                scaled[(chunk < 0) & (scaled == 0)] = -1
            np.copyto(index, scaled, casting="unsafe")
            if self.first:
                np.subtract(index, self.first, out=index)
            yield index

    def count(self, flat: Array) -> Array:
        """Return how many of some values are in each bin, (bins,) int64."""
        counts = np.zeros(self.bins, np.int64)
        for places in self.places(flat):
            counts += np.bincount(places, minlength=self.bins)
        return counts


class Counter:
    """A histogram that grows with each array, read in chunks that stay in the cache.

    Of an array of more values than a limit an evenly strided part is counted: it tells where the tails begin, of which
    all values are counted, and how those between are distributed. So the histogram holds as many values as there were,
    its extremes and its tails are exact, and what it holds of an array depends on that array alone.
    """

    def __init__(self, limit: int | None = None) -> None:
        """Begin with nothing.

        Args:
            limit: How many values of an array are counted besides its tails, at least 1; None for all.
        """
        self._limit = limit
        self._lo, self._hi = math.inf, -math.inf
        self._grid = _Grid(0.0, 0, 0, 0)
        self._counts = np.zeros(0, np.int64)

    def add(self, values: Array, samples: int = 1) -> tuple[float, float]:
        """Count the values of a float array of any shape, and return the smallest and the largest of them.

        Args:
            values: The array.
            samples: How many arrays it is the stack of, along its first axis; taken for one where that cannot be.

        Raises:
            ValueError: There are no values, or one is not finite; what was counted is of no use then.
        """
        if values.size == 0:
            raise ValueError("has no values")
        floats = values if values.dtype in (np.float32, np.float64) else values.astype(np.float32)
        parts = samples if values.ndim and values.shape[0] % samples == 0 else 1
        size = values.size // parts
        if self._limit is None or size <= self._limit:
            return self._add_all(floats.ravel(order="K"))  # in any order: "K" copies no transposed array
        stride = stride_of((values.shape[0] // parts, *values.shape[1:]) if values.ndim else (), self._limit)
        ends = [self._add_strided(part, stride) for part in floats.reshape(parts, size)]
        return min(lo for lo, _ in ends), max(hi for _, hi in ends)

    def _add_all(self, flat: Array) -> tuple[float, float]:
        """Count every value, (n,), and return the extremes."""
        low, high = math.inf, -math.inf
        for start in range(0, flat.size, CHUNK):
            chunk = flat[start : start + CHUNK]
            lo, hi = extremes_of(chunk)
            low, high = min(low, lo), max(high, hi)
            self._cover(lo, hi)
            self._counts += self._grid.count(chunk)
        return low, high

    def _add_strided(self, flat: Array, stride: int) -> tuple[float, float]:
        """Count the tails, and between them the middle one of every `stride` values, (n,); return the extremes."""
        low, high = math.inf, -math.inf
        picked = np.empty(len(range(stride // 2, flat.size, stride)), flat.dtype)
        step = -(-CHUNK // stride)
        for at, start in enumerate(range(0, flat.size, step * stride)):
            chunk = flat[start : start + step * stride]
            lo, hi = extremes_of(chunk)
            low, high = min(low, lo), max(high, hi)
            picked[at * step : (at + 1) * step] = chunk[stride // 2 :: stride]
        grid = _Grid.of(low, high)
        counts = _counts_of_part(flat, picked, grid)
        self._cover(low, high)
        _pour(counts, grid.first, self._grid.exponent - grid.exponent, into=self._counts, first=self._grid.first)
        return low, high

    def histogram(self) -> Histogram:
        """Return what was counted.

        Raises:
            ValueError: There were no values.
        """
        if not self._counts.size:
            raise ValueError("has no values")
        return Histogram(self._lo, self._hi, self._grid.exponent, self._grid.first, self._counts.copy())

    def _cover(self, lo: float, hi: float) -> None:
        """Widen the grid, as far as needed, to one that holds these values."""
        if self._lo <= lo and hi <= self._hi:
            return
        self._lo, self._hi = min(self._lo, lo), max(self._hi, hi)
        grid = _Grid.of(self._lo, self._hi)
        counts = np.zeros(grid.bins, np.int64)
        if self._counts.size:  # the wider range never has the narrower bins, so the shift is never negative
            shift = grid.exponent - self._grid.exponent
            _pour(self._counts, self._grid.first, shift, into=counts, first=grid.first)
        self._grid, self._counts = grid, counts


def _counts_of_part(flat: Array, picked: Array, grid: _Grid) -> Array:
    """Return the counts of values, (n,), of which some were picked, (m,): exact in the tails, estimated between them.

    A tail is as many of the outermost bins as hold at most one of `TAIL` picked values. Between the tails each bin gets
    its share of the values there, in whole numbers that add up.
    """
    counts = grid.count(picked)
    upto, few = np.cumsum(counts), picked.size // TAIL
    left, last = int(np.searchsorted(upto, few, side="right")), int(np.searchsorted(upto, picked.size - few))
    tails = grid.count(_outside(flat, grid, left, grid.bins - 1 - last))
    upto = np.cumsum(counts[left : last + 1])
    tails[left : last + 1] = np.diff(upto * (flat.size - int(tails.sum())) // upto[-1], prepend=0)
    return tails


def _outside(flat: Array, grid: _Grid, left: int, right: int) -> Array:
    """Return the values, of (n,), that lie in so many of the outermost bins at either side."""
    lower = flat.dtype.type(math.ldexp(grid.first + left, grid.exponent)) if left else None
    upper = flat.dtype.type(math.ldexp(grid.first + grid.bins - right, grid.exponent)) if right else None
    found = [flat[:0]]
    for start in range(0, flat.size if left or right else 0, CHUNK):
        chunk = flat[start : start + CHUNK]
        if lower is None:
            found.append(chunk[chunk >= upper])
        else:
            found.append(chunk[chunk < lower if upper is None else (chunk < lower) | (chunk >= upper)])
    return np.concatenate(found)

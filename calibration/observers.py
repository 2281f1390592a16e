"""Statistics of a tensor's values that merge: the order of the data and its split over machines change nothing.

`MinMax` and `Histogram` merge exactly: ``of(a) | of(b) == of(concatenate(a, b))``, bit for bit, so ``|`` is
associative and commutative. `ChannelMean` adds float64 sums, which is exact up to their rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from .. import RequantError
from .session import Array

MAX_BINS = 2048
MANTISSA_BITS = 24
"""No bin is narrower than the largest magnitude times 2**-24: float32 tells nothing finer apart up there."""
MIN_EXPONENT = -126
"""No bin is narrower than the smallest normal float32, so that the reciprocal of a width is finite in float32."""
CHUNK = 1 << 16
"""Values per step when a histogram is built: the two buffers of a step stay in the cache (768 KiB for float32)."""


@dataclass(frozen=True, slots=True)
class MinMax:
    """The extremes of what was seen.

    Attributes:
        lo: The smallest value.
        hi: The largest value.
        count: How many values were seen, at least 1.
    """

    lo: float
    hi: float
    count: int

    def __post_init__(self) -> None:
        """Check the invariants.

        Raises:
            ValueError: The values cannot come from data.
        """
        _check_extremes(self.lo, self.hi)
        if self.count < 1:
            raise ValueError("nothing was counted")

    @classmethod
    def of(cls, values: Array) -> MinMax:
        """Return the extremes of a float array of any shape.

        Raises:
            ValueError: There are no values, or one is not finite.
        """
        lo, hi = _extremes(values)
        return cls(lo, hi, values.size)

    def __or__(self, other: MinMax) -> MinMax:
        """Return the extremes of both sets of values."""
        if not isinstance(other, MinMax):
            return NotImplemented
        return MinMax(min(self.lo, other.lo), max(self.hi, other.hi), self.count + other.count)


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Counts on the grid of bins ``[i * 2**k, (i + 1) * 2**k)``.

    The grid is anchored at zero and k follows from the extremes alone, so two histograms whose grids differ
    are brought onto one grid by ``i >> d``, without resampling.

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
        _check_extremes(self.lo, self.hi)
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
        lo, hi = _extremes(values)
        exponent = _exponent(lo, hi)
        first, bins = _index(lo, exponent), _bins(lo, hi, exponent)
        counts = np.zeros(bins, np.int64)
        for indices in _indices(values, exponent, first):
            counts += np.bincount(indices, minlength=bins)
        return cls(lo, hi, exponent, first, counts)

    def __or__(self, other: Histogram) -> Histogram:
        """Return the histogram of both sets of values."""
        if not isinstance(other, Histogram):
            return NotImplemented
        lo, hi = min(self.lo, other.lo), max(self.hi, other.hi)
        exponent = _exponent(lo, hi)
        first = _index(lo, exponent)
        counts = np.zeros(_bins(lo, hi, exponent), np.int64)
        for part in (self, other):
            # The wider range never has the narrower bins, so the shift is never negative.
            fine = np.arange(part.first, part.first + part.counts.size)
            np.add.at(counts, (fine >> (exponent - part.exponent)) - first, part.counts)
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
        edges = np.ldexp(np.arange(self.first, self.first + self.counts.size + 1, dtype=np.float64), self.exponent)
        edges[0], edges[-1] = self.lo, self.hi
        return edges


Statistic: TypeAlias = MinMax | Histogram


@dataclass(frozen=True, slots=True, eq=False)
class ChannelMean:
    """The mean of each channel, kept as a sum and a count.

    Attributes:
        total: The sum of each channel's values, (C,) float64, read-only.
        count: How many values each channel has seen, at least 1.
    """

    total: Array
    count: int

    def __post_init__(self) -> None:
        """Make the sums read-only."""
        self.total.flags.writeable = False

    @classmethod
    def of(cls, values: Array, axis: int) -> ChannelMean:
        """Sum a float array over every axis but `axis`.

        Raises:
            ValueError: There are no values, a sum is not finite, or the array has no such axis.
        """
        if not -values.ndim <= axis < values.ndim:
            raise ValueError(f"has no axis {axis}")
        if values.size == 0:
            raise ValueError("has no values")
        others = tuple(index for index in range(values.ndim) if index != axis % values.ndim)
        with np.errstate(invalid="ignore"):  # infinity minus infinity; told apart below
            total = np.sum(values, axis=others, dtype=np.float64)
        if not np.isfinite(total).all():
            raise ValueError("holds NaN or infinity")
        return cls(np.atleast_1d(total), values.size // values.shape[axis])

    def __or__(self, other: ChannelMean) -> ChannelMean:
        """Return the sums over both sets of values.

        Raises:
            ValueError: The numbers of channels differ.
        """
        if not isinstance(other, ChannelMean):
            return NotImplemented
        if self.total.shape != other.total.shape:
            raise ValueError(f"has {other.total.size} channels, and had {self.total.size}")
        return ChannelMean(self.total + other.total, self.count + other.count)

    def __eq__(self, other: object) -> bool:
        """Tell whether sums and counts are the same."""
        if not isinstance(other, ChannelMean):
            return NotImplemented
        return self.count == other.count and np.array_equal(self.total, other.total)

    def __hash__(self) -> int:
        """Return a hash that agrees with ``==``."""
        return hash((self.count, tuple(self.total)))

    @property
    def mean(self) -> Array:
        """The mean of each channel, (C,) float64."""
        return np.asarray(self.total / self.count)


T = TypeVar("T", MinMax | Histogram, ChannelMean)


def merge(left: Mapping[str, T], right: Mapping[str, T]) -> dict[str, T]:
    """Merge the statistics of each tensor; one that only one side has seen is kept as it is.

    Raises:
        RequantError: The two statistics of a tensor are not of one kind, or not of as many channels.
    """
    merged = dict(left)
    for name, statistic in right.items():
        try:
            merged[name] = merged[name] | statistic if name in merged else statistic  # type: ignore[operator]
        except TypeError:
            raise RequantError(f"tensor {name!r}: a histogram cannot be merged with min and max alone") from None
        except ValueError as error:
            raise RequantError(f"tensor {name!r} {error}") from None
    return merged


def _extremes(values: Array) -> tuple[float, float]:
    """Return the smallest and the largest value; NaN and infinity show in them."""
    if values.size == 0:
        raise ValueError("has no values")
    # + 0.0 turns -0.0 into 0.0: which of the two `min` returns depends on the order of the data.
    lo, hi = float(values.min()) + 0.0, float(values.max()) + 0.0
    _check_extremes(lo, hi)
    return lo, hi


def _check_extremes(lo: float, hi: float) -> None:
    """Refuse what cannot be the extremes of finite values."""
    if not (math.isfinite(lo) and math.isfinite(hi)):
        raise ValueError("holds NaN or infinity")
    if lo > hi:
        raise ValueError("the smallest value is above the largest")


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


def _indices(values: Array, exponent: int, first: int) -> Iterator[Array]:
    """Yield the bin of each value, counted from `first`, in chunks of (n,) intp.

    Scaling by a power of two, flooring and subtracting are exact here: an index has at most 24 bits.
    """
    flat = values.ravel(order="K")  # the order is of no matter, and "K" does not copy transposed arrays
    if flat.dtype not in (np.float32, np.float64):
        flat = flat.astype(np.float32)
    scale = flat.dtype.type(math.ldexp(1.0, -exponent))
    scaled = np.empty(min(CHUNK, flat.size), flat.dtype)
    indices = np.empty(scaled.size, np.intp)
    for start in range(0, flat.size, CHUNK):
        chunk = flat[start : start + CHUNK]
        work, index = scaled[: chunk.size], indices[: chunk.size]
        np.floor(np.multiply(chunk, scale, out=work), out=work)
        if exponent > 0:  # only a scale below 1 lets a tiny negative value underflow to bin 0
            work[(chunk < 0) & (work == 0)] = -1
        np.subtract(work, first, out=work)
        np.copyto(index, work, casting="unsafe")
        yield index

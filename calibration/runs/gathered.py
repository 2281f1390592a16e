"""The statistics of runs of a model: of each tensor, each channel and each feed, gathered run by run."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from ... import RequantError
from ..data.samples import DataError, Sample
from ..model.session import Array, Feed
from ..statistics.extremes import MinMax
from ..statistics.histogram import Counter
from ..statistics.observations import Observations, Place
from ..statistics.sums import Channels, Moments, Runs
from .reductions import Reduced
from .taps import Targets

COMPARED = 4096
"""The number of first samples that are compared with each other, and the number of compared values per array."""


@dataclass(frozen=True, slots=True)
class ChannelEnds:
    """The channels of a tensor in one run, (C,) float64 each.

    Attributes:
        lo: The smallest values.
        hi: The largest values.
        total: The sums.
        size: The number of values of all channels.
    """

    lo: Array
    hi: Array
    total: Array
    size: int

    @classmethod
    def of(cls, row: Reduced, results: dict[str, Array]) -> ChannelEnds:
        """Read the outputs of a run."""
        assert row.lo is not None
        lo, hi, total = (results[end].astype(np.float64) for end in (row.lo, row.hi, row.total))
        return cls(lo, hi, total, int(results[row.size].item()) if isinstance(row.size, str) else row.size or 0)

    @classmethod
    def summed(cls, array: Array, axis: int) -> ChannelEnds:
        """Reduce an array per channel."""
        array = np.ascontiguousarray(array)  # a float sum depends on the memory layout
        others = tuple(index for index in range(array.ndim) if index != axis % array.ndim)
        with np.errstate(over="ignore", invalid="ignore"):  # take_channels() checks the sums
            total = np.sum(array, axis=others, dtype=np.float64)
        lo, hi = np.atleast_1d(array.min(others)), np.atleast_1d(array.max(others))
        return cls(lo, hi, np.atleast_1d(total), array.size)

    @property
    def row(self) -> Array:
        """The min, max, sum and size over all channels: a row of a table, (1, 4)."""
        if not self.size:
            return np.zeros((1, 4))
        with np.errstate(invalid="ignore"):  # infinities of both signs
            return np.array([[self.lo.min(), self.hi.max(), self.total.sum(), self.size]])


@dataclass(slots=True)
class Gathered:
    """The statistics of the runs of one piece of work.

    Attributes:
        targets: The tensors and statistics to observe.
        ranged: The tensors of which ranges are observed.
        counters: The statistic of each tensor that is taken whole; at the end, of every tensor.
        ends: Position, smallest and largest value of each run, by tensor.
        channels: The channels of each run, by tensor.
        moments: The moments of the inputs.
        broken: Tensors that are not finite -> the first place.
        repeated: Digest of each feed -> its first place and its number of occurrences.
        tables: The order of reduced tensors -> position and reductions (tensors, 4) of each run.
        samples: The number of samples.
    """

    targets: Targets
    ranged: frozenset[str] = field(init=False)
    counters: dict[str, Counter | MinMax] = field(default_factory=dict)
    ends: dict[str, list[tuple[int, float, float]]] = field(default_factory=lambda: defaultdict(list))
    channels: dict[str, list[ChannelEnds]] = field(default_factory=lambda: defaultdict(list))
    moments: dict[str, Moments] = field(default_factory=dict)
    broken: dict[str, Place] = field(default_factory=dict)
    repeated: dict[str, tuple[Place, int]] = field(default_factory=dict)
    tables: dict[tuple[str, ...], list[tuple[int, Array]]] = field(default_factory=dict)
    samples: int = 0

    def __post_init__(self) -> None:
        """Make a set of the tensors of which ranges are observed."""
        self.ranged = frozenset(self.targets.tensors)

    def take_feed(self, position: int, sample: Sample) -> None:
        """Add a feed: its moments and its digest."""
        self.samples += 1
        moments = moments_of(sample.feed)
        for name, statistic in moments.items():
            self.moments[name] = self.moments[name] | statistic if name in self.moments else statistic
        if position < COMPARED:
            digest, place = digest_of(sample.feed, moments), Place(position, sample.where)
            first, times = self.repeated.get(digest, (place, 0))
            self.repeated[digest] = (min(first, place), times + 1)

    def take_whole(self, name: str, array: Array, place: Place, count: int) -> bool:
        """Add a whole tensor of a run of `count` samples; return whether it is finite."""
        axis = self.targets.channel_axis.get(name)
        if axis is not None and not -array.ndim <= axis < array.ndim:
            raise DataError(f"{place.where}: tensor {name!r} has no axis {axis}")
        if name not in self.ranged:
            finite = bool(np.isfinite(array).all())
        else:
            try:
                lo, hi = self._count(name, array, count)
                finite = True
            except ValueError:
                finite = False
            else:
                self.ends[name].append((place.position, lo, hi))
        if finite and axis is not None:
            self.take_channels(name, ChannelEnds.summed(array, axis))
        return finite

    def _count(self, name: str, array: Array, samples: int) -> tuple[float, float]:
        """Add the values of a tensor to its statistic and return their extremes.

        Raises:
            ValueError: A value is not finite.
        """
        if not self.targets.histogram:
            statistic = MinMax.of(array)
            before = self.counters.get(name)
            self.counters[name] = before | statistic if isinstance(before, MinMax) else statistic
            return statistic.lo, statistic.hi
        counter = self.counters.setdefault(name, Counter(self.targets.values))
        assert isinstance(counter, Counter)
        return counter.add(array, samples)

    def mark(self, name: str, place: Place) -> None:
        """Record that a tensor is not finite."""
        self.broken[name] = min(self.broken.get(name, place), place)

    def take_channels(self, name: str, end: ChannelEnds) -> None:
        """Add the channels of a tensor in one run.

        Raises:
            RequantError: A sum overflows, or the number of channels differs from an earlier run.
        """
        if not np.isfinite(end.total).all():
            raise RequantError(f"tensor {name!r}: the sum of a channel exceeds float64")
        before = self.channels[name]
        if before and before[0].lo.shape != end.lo.shape:
            few, many = sorted((end.lo.size, before[0].lo.size))
            raise RequantError(f"tensor {name!r} has {few} channels in one run and {many} in another")
        before.append(end)

    def observations(self) -> Observations:
        """Return all statistics."""
        for order, tables in self.tables.items():
            self._take_tables(order, tables)
        ranges = {
            name: counter.histogram() if isinstance(counter, Counter) else counter
            for name, counter in self.counters.items()
            if name not in self.broken
        }
        together: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, ends in self.ends.items():
            if name not in self.broken:
                together[tuple(position for position, _, _ in ends)].append(name)
        runs: dict[str, Runs] = {}
        for positions, names in together.items():
            pairs = np.array([[(lo, hi) for _, lo, hi in self.ends[name]] for name in names]).swapaxes(0, 1)
            runs |= dict(zip(names, Runs.of_many(positions, pairs), strict=True))
        channels = {
            name: Channels.of_runs(
                np.stack([end.lo for end in ends]),
                np.stack([end.hi for end in ends]),
                np.stack([end.total for end in ends]),
                sum(end.size // end.lo.size for end in ends),
            )
            for name, ends in self.channels.items()
            if name not in self.broken
        }
        return Observations(ranges, runs, channels, self.moments, self.broken, self.repeated, self.samples)

    def _take_tables(self, order: tuple[str, ...], runs: Sequence[tuple[int, Array]]) -> None:
        """Add the extremes of tensors that are reduced in the graph."""
        stack = np.stack([table for _, table in runs]) + 0.0  # + 0.0: no -0.0
        lows, highs, _, sizes = stack.transpose(2, 0, 1)
        has_values = np.array(sizes > 0, np.bool_)
        ends = stack[:, :, :2].swapaxes(0, 1).tolist()
        lo, hi = (
            np.where(has_values, lows, np.inf).min(axis=0).tolist(),
            np.where(has_values, highs, -np.inf).max(axis=0).tolist(),
        )
        for index, size in enumerate(sizes.sum(axis=0).tolist()):
            name = order[index]
            if not size or name not in self.ranged or name in self.broken:
                continue
            self.counters[name] = MinMax(lo[index], hi[index], int(size))
            rows = zip(runs, ends[index], has_values[:, index].tolist(), strict=True)
            self.ends[name] = [(position, *pair) for (position, _), pair, values in rows if values]


def moments_of(feed: Feed) -> dict[str, Moments]:
    """Return the moments of the float arrays of a feed, except arrays whose sum of squares exceeds float64."""
    moments = {}
    for name, array in feed.items():
        if array.dtype.kind == "f" and array.size:
            with suppress(ValueError):
                moments[name] = Moments.of(array)
    return moments


def digest_of(feed: Feed, moments: Mapping[str, Moments] | None = None) -> str:
    """Return a digest of a feed: shapes, moments, and at most `COMPARED` evenly spaced values of each array."""
    moments = moments_of(feed) if moments is None else moments
    digest = hashlib.blake2b(digest_size=12)
    for name, array in sorted(feed.items()):
        flat = array.reshape(-1)
        powers = moments[name].powers.value.tolist() if name in moments else ()
        digest.update(f"{name} {array.dtype} {array.shape} {powers}".encode())
        if array.dtype.kind == "U":
            digest.update(repr(flat[:COMPARED].tolist()).encode())
        else:
            digest.update(flat[:: -(-flat.size // COMPARED) or 1].tobytes())
    return digest.hexdigest()

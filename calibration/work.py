"""The work on pieces of a run over data: what a worker does, in this process or in another process."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .. import RequantError
from .broken import first_broken
from .extremes import MinMax
from .histogram import Counter
from .observations import Observations, Place
from .reductions import Reduced
from .samples import DataError, Sample, feed_layout, stacked
from .session import Array, Feed, ModelSource, Serialized, input_specs, release_memory
from .sources import Source, open_source
from .sums import Channels, Moments, Runs
from .taps import Tap, Targets, open_tap

if TYPE_CHECKING:
    from .sources import DataSpec

OPENING, READING, REDUCING = Lock(), Lock(), Lock()
LARGE = 2**20
"""Threads reduce whole tensors at the same time if these have this mean size in bytes. Smaller arrays cost more in the
interpreter lock than threads gain: 24 images of MobileNet took 1.63 s, and 1.16 s with threads that reduce in turn.
"""
CLOSE_SESSIONS = 4
"""The number of cached sessions that output a single tensor whole."""
COMPARED = 4096
"""The number of first samples that are compared with each other, and the number of compared values per array."""

Unit: TypeAlias = "tuple[tuple[int, Sample], ...]"
"""The samples of one batch with their positions in the whole data."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that all pieces of one run share.

    Attributes:
        model: The model.
        targets: The tensors and statistics to observe.
        groups: The tensors that are taken whole, by runs of the model.
        stacks: Whether samples of one shape may be stacked.
        first: An offset for the position of each sample.
        strict: Whether an output that is not finite is an error.
        run: A unique id of this run. Workers drop the sessions of other runs.
    """

    model: ModelSource | Stored
    targets: Targets
    groups: tuple[tuple[str, ...], ...] = ((),)
    stacks: bool = False
    first: int = 0
    strict: bool = True
    run: str = ""


class Taps:
    """The sessions of a setup. Threads share them."""

    def __init__(self, setup: Setup) -> None:
        """Open the sessions.

        Raises:
            RequantError: The model cannot be loaded, or a tensor cannot be observed.
        """
        assert not isinstance(setup.model, Stored)
        self.model = setup.model
        self.setup = setup
        release_memory()
        *before, last = setup.groups
        earlier = frozenset(name for group in before for name in group)
        self.taps = [open_tap(self.model, group, setup.targets, reductions=False) for group in before]
        self.taps.append(open_tap(self.model, last, setup.targets, skipped=earlier))
        release_memory()  # free copies of the weights before activations need memory
        self.ranged = frozenset(setup.targets.tensors)
        self._closer: dict[str, Tap] = {}
        self._lock = Lock()

    def whole(self, names: Iterable[str], sample: Sample) -> dict[str, Array]:
        """Return whole tensors that are usually reduced.

        They come from separate sessions, because further outputs could change how the runtime computes the others.
        """
        arrays: dict[str, Array] = {}
        for name in sorted(names):
            with self._lock:
                if name not in self._closer:
                    if len(self._closer) == CLOSE_SESSIONS:
                        del self._closer[next(iter(self._closer))]
                    self._closer[name] = open_tap(self.model, [name], self.setup.targets, reductions=False)
                tap = self._closer[name]
            arrays |= tap.run(sample)
        return arrays


@dataclass(frozen=True, slots=True)
class Stored:
    """A model in a file whose external data are in another folder.

    Attributes:
        path: The file.
        folder: The folder of its external data; None if there are none.
        name: The model's name in messages.
    """

    path: Path
    folder: Path | None
    name: str

    def load(self) -> Serialized:
        """Read the file."""
        return Serialized(self.path.read_bytes(), self.folder, self.name)


@dataclass(frozen=True, slots=True)
class Task:
    """Batches for another process.

    Attributes:
        setup: The settings of the run.
        data: The data; None if the task contains the samples.
        batches: For each batch, pairs of each sample's position in the whole data and in the source.
        units: The samples themselves, if `data` is None.
    """

    setup: Setup
    data: DataSpec | None
    batches: tuple[tuple[tuple[int, int], ...], ...] = ()
    units: tuple[Unit, ...] = ()


def run_task(task: Task) -> Observations:
    """Open model and data, unless this process has them open, and run the batches.

    Raises:
        RequantError: As `run_units`.
    """
    try:
        opened = _opened(task)
        units = task.units if opened.source is None else _read(task, opened.source)
        return run_units(opened.taps, units)
    except RequantError as error:
        # subclasses have more arguments than a message and cannot be pickled
        plain = DataError if isinstance(error, DataError) else RequantError
        raise plain(str(error)) from None


def _read(task: Task, source: Source) -> Iterator[Unit]:
    """Read the batches of a task."""
    samples = source.read([at for batch in task.batches for _, at in batch])
    for batch in task.batches:
        with READING if source.rows.foreign else nullcontext():
            batch_samples = take_samples(samples, len(batch), source)
        yield tuple((position, sample) for (position, _), sample in zip(batch, batch_samples, strict=True))


def take_samples(samples: Iterator[Sample], count: int, source: Source) -> tuple[Sample, ...]:
    """Return the next samples of a source of known length.

    Raises:
        DataError: There are fewer samples.
    """
    result = tuple(islice(samples, count))
    if len(result) < count:
        raise DataError(f"{source.description}: has fewer samples than its length, {source.length}")
    return result


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a worker keeps between the tasks of one run: the sessions, and the data unless tasks contain them."""

    taps: Taps
    source: Source | None


OPENED: dict[str, _Opened] = {}
"""At most one entry, by run."""


def _opened(task: Task) -> _Opened:
    """Open the sessions and the data of a run once."""
    with OPENING:  # a worker may have several threads
        if task.setup.run not in OPENED:
            OPENED.clear()
            model = task.setup.model
            taps = Taps(replace(task.setup, model=model.load()) if isinstance(model, Stored) else task.setup)
            inputs = input_specs(taps.taps[-1].session)
            OPENED[task.setup.run] = _Opened(taps, None if task.data is None else open_source(task.data, inputs))
        return OPENED[task.setup.run]


def forget(run: str) -> None:
    """Close the sessions and data that threads of this process opened as workers of a run."""
    with OPENING:
        OPENED.pop(run, None)


def run_units(taps: Taps, units: Iterable[Unit]) -> Observations:
    """Run batches and return their statistics.

    Raises:
        DataError: An output of the model is not finite, or a tensor has no such channel axis.
        RequantError: The model fails.
    """
    gathered = Gathered()
    first = taps.setup.first
    for unit in units:
        for position, sample in unit:
            gathered.take_feed(first + position, sample)
        for position, sample, count in _stacks(unit, stacks=taps.setup.stacks):
            for tap in taps.taps:
                _observe(gathered, taps, tap, Place(first + position, sample.where), sample, count)
    with REDUCING:
        return gathered.observations(taps.setup.targets)


def _stacks(unit: Unit, *, stacks: bool) -> Iterator[tuple[int, Sample, int]]:
    """Stack neighbours of a batch with equal shapes.

    Yield the position of the first sample, the stack, and its number of samples.
    """

    def layout(entry: tuple[int, Sample]) -> object:
        position, sample = entry
        return feed_layout(sample) if stacks else position

    for _, group in groupby(unit, layout):
        (position, first), *others = group
        group_of = [replace(sample, label=None) for sample in (first, *(other for _, other in others))]
        yield position, stacked(group_of), len(group_of)


def _observe(gathered: Gathered, taps: Taps, tap: Tap, place: Place, sample: Sample, count: int) -> None:
    """Run a stack of `count` samples and gather its statistics."""
    results = tap.run(sample)
    large = sum(results[name].nbytes for name in tap.whole) >= LARGE * max(len(tap.whole), 1)
    with nullcontext() if large else REDUCING:
        _reduce(gathered, taps, tap, place, sample, count, results)


def _reduce(
    gathered: Gathered, taps: Taps, tap: Tap, place: Place, sample: Sample, count: int, results: dict[str, Array]
) -> None:
    """Gather the statistics of a run from its results.

    Raises:
        DataError: An output of the model is not finite, or a tensor has no such channel axis.
    """
    for name in tap.whole:
        array = results[name]
        if array.size and not gathered.take_whole(name, array, taps, place, count):
            gathered.mark(name, place)
    channels = {name: _ChannelEnds.of(row, results) for name, row in tap.reduced.items() if row.axis is not None}
    table = np.concatenate([tap.extremes(results), *(end.row for end in channels.values())])
    lo, hi, total, size = table.T
    finite = np.isfinite(lo) & np.isfinite(hi) & ~(np.isnan(total) & tap.inside)
    # The runtime's min and max skip NaN, but a NaN makes the sum NaN. Huge values of both signs do so too. An infinite
    # sum of finite extremes is an overflow, which matters only for sums per channel.
    doubtful = frozenset(
        tap.order[index]
        for index in np.flatnonzero(finite & (size > 0) & ~np.isfinite(total)).tolist()
        if (np.isnan(total[index]) or tap.order[index] in channels) and tap.order[index] not in gathered.broken
    )
    closer = taps.whole(doubtful, sample) if doubtful else {}
    for index in np.flatnonzero((size > 0) & ~finite).tolist():
        gathered.mark(tap.order[index], place)
    for name, array in closer.items():
        if not np.isfinite(array).all():
            gathered.mark(name, place)
        elif name in channels:
            channels[name] = _ChannelEnds.summed(array, tap.reduced[name].axis or 0)
    broken = tap.outputs.intersection(gathered.broken)
    if broken and taps.setup.strict:
        raise _not_finite(min(broken), taps, sample)
    gathered.tables.setdefault(tap.order, []).append((place.position, table))
    for name, end in channels.items():
        if end.size and name not in gathered.broken:
            gathered.take_channels(name, end)


def _not_finite(name: str, taps: Taps, sample: Sample) -> DataError:
    """Return the error for an output that is not finite."""
    return DataError(f"{sample.where}: output {name!r} holds NaN or infinity; {first_broken(taps.model, sample)}")


@dataclass(frozen=True, slots=True)
class _ChannelEnds:
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
    def of(cls, row: Reduced, results: dict[str, Array]) -> _ChannelEnds:
        """Read the outputs of a run."""
        assert row.lo is not None
        lo, hi, total = (results[end].astype(np.float64) for end in (row.lo, row.hi, row.total))
        return cls(lo, hi, total, int(results[row.size].item()) if isinstance(row.size, str) else row.size or 0)

    @classmethod
    def summed(cls, array: Array, axis: int) -> _ChannelEnds:
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
        counters: The statistic of each tensor that is taken whole; at the end, of every tensor.
        ends: Position, smallest and largest value of each run, by tensor.
        channels: The channels of each run, by tensor.
        moments: The moments of the inputs.
        broken: Tensors that are not finite -> the first place.
        repeated: Digest of each feed -> its first place and its number of occurrences.
        tables: The order of reduced tensors -> position and reductions (tensors, 4) of each run.
        samples: The number of samples.
    """

    counters: dict[str, Counter | MinMax] = field(default_factory=dict)
    ends: dict[str, list[tuple[int, float, float]]] = field(default_factory=lambda: defaultdict(list))
    channels: dict[str, list[_ChannelEnds]] = field(default_factory=lambda: defaultdict(list))
    moments: dict[str, Moments] = field(default_factory=dict)
    broken: dict[str, Place] = field(default_factory=dict)
    repeated: dict[str, tuple[Place, int]] = field(default_factory=dict)
    tables: dict[tuple[str, ...], list[tuple[int, Array]]] = field(default_factory=dict)
    samples: int = 0

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

    def take_whole(self, name: str, array: Array, taps: Taps, place: Place, count: int) -> bool:
        """Add a whole tensor of a run of `count` samples; return whether it is finite."""
        targets = taps.setup.targets
        axis = targets.channel_axis.get(name)
        if axis is not None and not -array.ndim <= axis < array.ndim:
            raise DataError(f"{place.where}: tensor {name!r} has no axis {axis}")
        if name not in taps.ranged:
            finite = bool(np.isfinite(array).all())
        else:
            try:
                lo, hi = self._count(name, array, targets, count)
                finite = True
            except ValueError:
                finite = False
            else:
                self.ends[name].append((place.position, lo, hi))
        if finite and axis is not None:
            self.take_channels(name, _ChannelEnds.summed(array, axis))
        return finite

    def _count(self, name: str, array: Array, targets: Targets, samples: int) -> tuple[float, float]:
        """Add the values of a tensor to its statistic and return their extremes.

        Raises:
            ValueError: A value is not finite.
        """
        if not targets.histogram:
            statistic = MinMax.of(array)
            before = self.counters.get(name)
            self.counters[name] = before | statistic if isinstance(before, MinMax) else statistic
            return statistic.lo, statistic.hi
        counter = self.counters.setdefault(name, Counter(targets.values))
        assert isinstance(counter, Counter)
        return counter.add(array, samples)

    def mark(self, name: str, place: Place) -> None:
        """Record that a tensor is not finite."""
        self.broken[name] = min(self.broken.get(name, place), place)

    def take_channels(self, name: str, end: _ChannelEnds) -> None:
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

    def observations(self, targets: Targets) -> Observations:
        """Return all statistics."""
        for order, tables in self.tables.items():
            self._take_tables(order, tables, targets)
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

    def _take_tables(self, order: tuple[str, ...], runs: Sequence[tuple[int, Array]], targets: Targets) -> None:
        """Add the extremes of tensors that are reduced in the graph."""
        ranged = frozenset(targets.tensors)
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
            if not size or name not in ranged or name in self.broken:
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

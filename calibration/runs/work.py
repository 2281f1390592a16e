"""The work on pieces of a run over data: what a worker does, in this process or in another process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ... import RequantError
from ..data.samples import DataError, Sample, feed_layout, stacked
from ..data.sources import Source, open_source
from ..model.session import Array, ModelSource, Serialized, input_specs, release_memory
from ..statistics.observations import Observations, Place
from .broken import first_broken
from .gathered import ChannelEnds, Gathered
from .taps import Tap, Targets, open_tap

if TYPE_CHECKING:
    from ..data.sources import DataSpec

OPENING, READING, REDUCING = Lock(), Lock(), Lock()
LARGE = 2**20
"""Threads reduce whole tensors at the same time if these have this mean size in bytes. Smaller arrays cost more in the
interpreter lock than threads gain: 24 images of MobileNet took 1.63 s, and 1.16 s with threads that reduce in turn.
"""
CLOSE_SESSIONS = 4
"""The number of cached sessions that output a single tensor whole."""

Batch: TypeAlias = "tuple[tuple[int, Sample], ...]"
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
        places: For each batch, pairs of each sample's position in the whole data and in the source.
        batches: The samples themselves, if `data` is None.
    """

    setup: Setup
    data: DataSpec | None
    places: tuple[tuple[tuple[int, int], ...], ...] = ()
    batches: tuple[Batch, ...] = ()


def run_task(task: Task) -> Observations:
    """Open model and data, unless this process has them open, and run the batches.

    Raises:
        RequantError: As `run_batches`.
    """
    try:
        opened = _opened(task)
        batches = task.batches if opened.source is None else _read(task, opened.source)
        return run_batches(opened.taps, batches)
    except RequantError as error:
        # subclasses have more arguments than a message and cannot be pickled
        plain = DataError if isinstance(error, DataError) else RequantError
        raise plain(str(error)) from None


def _read(task: Task, source: Source) -> Iterator[Batch]:
    """Read the batches of a task."""
    samples = source.read([at for places in task.places for _, at in places])
    for places in task.places:
        with READING if source.rows.foreign else nullcontext():
            batch = take_samples(samples, len(places), source)
        yield tuple((position, sample) for (position, _), sample in zip(places, batch, strict=True))


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


def run_batches(taps: Taps, batches: Iterable[Batch]) -> Observations:
    """Run batches and return their statistics.

    Raises:
        DataError: An output of the model is not finite, or a tensor has no such channel axis.
        RequantError: The model fails.
    """
    gathered = Gathered(taps.setup.targets)
    first = taps.setup.first
    for batch in batches:
        for position, sample in batch:
            gathered.take_feed(first + position, sample)
        for position, sample, count in _stacks(batch, stacks=taps.setup.stacks):
            for tap in taps.taps:
                _observe(gathered, taps, tap, Place(first + position, sample.where), sample, count)
    with REDUCING:
        return gathered.observations()


def _stacks(batch: Batch, *, stacks: bool) -> Iterator[tuple[int, Sample, int]]:
    """Stack neighbours of a batch with equal shapes.

    Yield the position of the first sample, the stack, and its number of samples.
    """

    def layout(entry: tuple[int, Sample]) -> object:
        position, sample = entry
        return feed_layout(sample) if stacks else position

    for _, group in groupby(batch, layout):
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
        if array.size and not gathered.take_whole(name, array, place, count):
            gathered.mark(name, place)
    channels = {name: ChannelEnds.of(row, results) for name, row in tap.reduced.items() if row.axis is not None}
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
            channels[name] = ChannelEnds.summed(array, tap.reduced[name].axis or 0)
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

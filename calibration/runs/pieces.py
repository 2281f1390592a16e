"""The work of one run over data in pieces, with samples for threads and with references for other processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from typing import Generic, TypeVar

from ...system.scratch import scratch_folder
from ..data.samples import Sample
from ..data.sources import Source
from ..model.session import Serialized
from ..statistics.observations import Observations
from .work import Batch, Setup, Stored, Taps, Task, run_batches, run_task, take_samples

T = TypeVar("T")

PIECE = 16
"""The largest number of batches in a piece of work. Their statistics are merged with all others at once."""
PIECE_BYTES = 2**24
"""The largest number of bytes of feeds in a piece of work, unless the piece is a single batch."""
REMOTE_PIECE = 64
"""The largest number of batches in a piece of work for another process, where each transfer is slow."""


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """A part of the work.

    Attributes:
        numbers: The numbers of its batches.
        work: A function that does the work in any thread or process.
    """

    numbers: tuple[int, ...]
    work: Callable[[], T]


@dataclass(frozen=True, slots=True)
class Shares:
    """The batches of the data that this run processes.

    Attributes:
        source: The samples.
        length: The number of samples; None if it is unknown before reading.
        stride: Samples per batch.
        shard: ``(i, n)``: every n-th batch, beginning with the i-th.
        done: The numbers of the batches that an interrupted run has processed.
    """

    source: Iterable[Sample]
    length: int | None
    stride: int
    shard: tuple[int, int]
    done: frozenset[int]

    def due(self, number: int) -> bool:
        """Return whether this run processes the batch of this number."""
        part, parts = self.shard
        return number % parts == part - 1 and number not in self.done

    @property
    def samples(self) -> int | None:
        """The number of samples in the shard, finished batches included; None if it is unknown before reading."""
        if self.length is None:
            return None
        part, parts = self.shard
        starts = range((part - 1) * self.stride, self.length, parts * self.stride)
        return sum(min(self.stride, self.length - start) for start in starts)

    @property
    def batches(self) -> int | None:
        """The number of batches to process; None if it is unknown before reading."""
        if self.length is None:
            return None
        numbers = self._numbers(self.length)
        return len(numbers) - sum(number in numbers for number in self.done)

    def positions(self) -> Iterator[tuple[int, range]]:
        """Yield the number and the sample positions of each batch to process. The number of samples must be known."""
        length = self.length or 0
        for number in self._numbers(length):
            if number not in self.done:
                yield number, range(number * self.stride, min((number + 1) * self.stride, length))

    def _numbers(self, length: int) -> range:
        """Return the numbers of the batches of the shard, finished ones included, of `length` samples."""
        part, parts = self.shard
        return range(part - 1, -(-length // self.stride), parts)

    def read(self) -> Iterator[tuple[int, Batch]]:
        """Yield the number and the samples of each batch to process."""
        if isinstance(self.source, Source) and self.length is not None:
            everything = self.shard == (1, 1) and not self.done
            picked = range(self.length) if everything else [at for _, positions in self.positions() for at in positions]
            samples = self.source.read(picked)
            for number, positions in self.positions():
                yield number, tuple(zip(positions, take_samples(samples, len(positions), self.source), strict=True))
            return
        coming = enumerate(self.source)
        for number in count():
            batch = tuple(islice(coming, self.stride))
            if not batch:
                return
            if self.due(number):
                yield number, batch
            del batch  # free the memory before the next batch is read


def local_pieces(taps: Taps, shares: Shares, workers: int) -> Iterator[Piece[Observations]]:
    """Yield pieces of work for threads of this process.

    The threads read the samples themselves if the source has random access and runs no user code. Otherwise this
    function reads the samples in order.
    """
    source = shares.source
    if isinstance(source, Source) and source.rows.random and not source.rows.foreign and shares.length is not None:
        due = shares.positions()
        for size in _sizes(shares.batches or 0, workers, PIECE):
            some = list(islice(due, size))
            positions = [batch_positions for _, batch_positions in some]
            yield Piece(tuple(number for number, _ in some), partial(_read_and_run, taps, source, positions))
        return
    for batches in _filled(shares.read(), shares.batches, workers):
        yield Piece(tuple(batches), partial(run_batches, taps, tuple(batches.values())))


def _read_and_run(taps: Taps, source: Source, positions: Sequence[range]) -> Observations:
    """Read the samples at the positions of each batch, and run the batches."""
    samples = source.read([position for batch in positions for position in batch])
    batches = (tuple(zip(batch, take_samples(samples, len(batch), source), strict=True)) for batch in positions)
    return run_batches(taps, batches)


def remote_pieces(setup: Setup, shares: Shares, workers: int) -> Iterator[Piece[Observations]]:
    """Yield pieces of work for other processes: with references, unless the data exist in this process alone."""
    source = shares.source
    if isinstance(source, Source) and source.reference is not None and shares.length is not None:
        due = shares.positions()
        picked = range(shares.length) if source.picked is None else source.picked
        for size in _sizes(shares.batches or 0, workers, REMOTE_PIECE):
            some = list(islice(due, size))
            places = tuple(tuple((position, picked[position]) for position in positions) for _, positions in some)
            yield Piece(tuple(number for number, _ in some), partial(run_task, Task(setup, source.reference, places)))
        return
    for batches in _filled(shares.read(), shares.batches, workers):
        yield Piece(tuple(batches), partial(run_task, Task(setup, None, batches=tuple(batches.values()))))


@contextmanager
def stored_model(setup: Setup, folder: Path | None) -> Iterator[Setup]:
    """Store a model that is in memory in a temporary file, so that other processes can open it.

    Args:
        setup: The setup.
        folder: The folder of the file; None for the system's temporary folder.
    """
    model = setup.model
    if not isinstance(model, (bytes, Serialized)):
        yield replace(setup, model=Path(os.path.abspath(os.fspath(model))) if not isinstance(model, Stored) else model)
        return
    serialized = Serialized(model) if isinstance(model, bytes) else model
    with scratch_folder(folder) as scratch:
        path = scratch.resolve() / "model.onnx"
        path.write_bytes(serialized.data)
        outside = None if serialized.folder is None else serialized.folder.resolve()
        yield replace(setup, model=Stored(path, outside, serialized.name))


def _sizes(batches: int, workers: int, most: int) -> Iterator[int]:
    """Yield the number of batches of each piece. The last pieces are smaller, so that all workers end together."""
    while batches > 0:
        size = min(most, max(1, batches // (3 * workers)))
        yield size
        batches -= size


def _filled(coming: Iterator[tuple[int, Batch]], total: int | None, workers: int) -> Iterator[dict[int, Batch]]:
    """Yield groups of batches that are read in order. Each group maps the numbers of the batches to their samples."""
    sizes = repeat(PIECE // 2) if total is None else _sizes(total, workers, PIECE)
    for size in sizes:
        batches: dict[int, Batch] = {}
        size_in_bytes = 0
        while len(batches) < size and size_in_bytes < PIECE_BYTES:
            entry = next(coming, None)
            if entry is None:
                break
            batches[entry[0]] = entry[1]
            size_in_bytes += sum(array.nbytes for _, sample in entry[1] for array in sample.feed.values())
            del entry
        if batches:
            yield batches
        elif total is None:
            return
    for number, batch in coming:  # PIECE_BYTES made the pieces smaller than planned
        yield {number: batch}

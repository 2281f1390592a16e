"""Samples stay in memory after they are read once, up to a limit.

`quantize_model` reads its data several times. Each time, pictures are decoded and the user's code runs: for a small
network this takes longer than the network does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice, takewhile

import numpy as np

from .samples import Picked, Rows, Sample

LIMIT = 2**27
"""Bytes that are kept at most: 222 pictures of 3 x 224 x 224 in float32."""


def kept(rows: Rows, limit: int = LIMIT) -> Rows:
    """Return rows that keep what they read.

    Data beyond the limit are not kept at all, so that memory holds either all that is read again or one sample.

    Args:
        rows: The rows.
        limit: Bytes that are kept at most.
    """
    memory = _Memory(limit)

    def read(picked: Picked) -> Iterator[Sample]:
        known = memory.samples(picked)
        if known is not None:
            yield from known
            return
        begun = 0
        for first in memory.first() if picked is None else ():
            yield first  # the data are opened only if somebody wants more than the first samples
            begun += 1
        samples = islice(rows.read(picked), begun, None)
        for position in count(begun) if picked is None else picked:
            sample = next(samples, None)
            if sample is None:
                memory.end = position
                return
            memory.keep(position, sample)
            yield sample
            del sample  # keep only the sample in use

    return replace(rows, read=read)


def counted(rows: Rows, told: Callable[[int], object]) -> tuple[Rows, int]:
    """Return rows with their number, and the bytes of all samples; 0 bytes if the number was known.

    Rows of unknown number are read once.

    Args:
        rows: The rows; those of `kept` keep what is read here.
        told: Called with the number of samples so far.
    """
    number, size = 0, 0
    if rows.length is not None or rows.starts is not None:
        return rows, size
    for sample in rows.read(None):
        number, size = number + 1, size + _bytes(sample)
        told(number)
    return replace(rows, length=number), size


@dataclass
class _Memory:
    """Samples by position.

    Attributes:
        room: Bytes that may be kept still; below 0, nothing is kept any more.
        found: The samples.
        end: There are no samples from this position on; None if it is unknown.
    """

    room: int
    found: dict[int, Sample] = field(default_factory=dict)
    end: int | None = None

    def keep(self, position: int, sample: Sample) -> None:
        """Keep a sample if there is room; if there is none, forget all."""
        if self.room < 0 or position in self.found:
            return
        self.room -= _bytes(sample)
        if self.room < 0:
            self.found.clear()
        else:
            self.found[position] = sample

    def first(self) -> list[Sample]:
        """Return the samples in front of the first unknown one."""
        return [self.found[position] for position in takewhile(self.found.__contains__, count())]

    def samples(self, picked: Picked) -> list[Sample] | None:
        """Return the samples at some positions (None: all); None if one of them is unknown."""
        if picked is None and self.end is None:
            return None
        positions = range(self.end or 0) if picked is None else picked
        there = [position for position in positions if self.end is None or position < self.end]
        return [self.found[p] for p in there] if all(p in self.found for p in there) else None


def _bytes(sample: Sample) -> int:
    """Return the bytes of the arrays of a sample."""
    label = 0 if sample.label is None else np.asarray(sample.label).nbytes
    return label + sum(array.nbytes for array in sample.feed.values())

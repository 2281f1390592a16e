"""A file with the results of an interrupted run, from which the next run continues."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from ... import RequantError
from ...system.writing import write_atomically
from ..data.samples import Sample
from ..execution import Execution
from ..range_files.decoding import LARGE_FILE, Count, load_document
from ..range_files.records import observations_from_json, observations_to_json
from ..statistics.observations import Observations
from .gathered import digest_of
from .stamps import data_stamp, model_stamp
from .work import Setup, Stored

SCHEMA = 1
SECONDS = 5.0
"""The least time between two checkpoints."""
SHARE = 0.05
"""The largest share of the time that writing checkpoints takes."""
MOST_BATCHES = 10**7
"""The most finished batches that a checkpoint may list."""


class _Document(msgspec.Struct, frozen=True):
    """A checkpoint file. `observations_from_json` checks the statistics in ``seen``."""

    identity: str
    done: list[tuple[Count, Count]]
    complete: bool
    seen: dict[str, Any]

    def __post_init__(self) -> None:
        """Check the intervals of finished batches."""
        if any(first > last for first, last in self.done):
            raise ValueError("an interval of batches ends before it begins")
        if sum(last - first + 1 for first, last in self.done) > MOST_BATCHES:
            raise ValueError("there are too many batches")


@dataclass(slots=True)
class Checkpoint:
    """The statistics of the finished batches, in memory and, from time to time, in a file.

    Attributes:
        path: The file; None for no file.
        identity: A digest of everything that can change the result.
        seen: The statistics so far.
        done: The numbers of the finished batches when the run started.
        complete: Whether all batches are finished.
        kept: Called with the path at the end, see `Execution`; with None the file is removed.
    """

    path: Path | None
    identity: str
    seen: Observations = field(default_factory=Observations)
    done: frozenset[int] = frozenset()
    complete: bool = False
    kept: Callable[[Path], object] | None = None
    _added: set[int] = field(default_factory=set)
    _due: float = 0.0

    @classmethod
    def open(
        cls, execution: Execution, setup: Setup, first: Sample, source: Iterable[Sample], length: int | None
    ) -> Checkpoint:
        """Read the checkpoint of an interrupted run with the same identity, or start an empty one.

        The file's name ends with the first digits of the identity, so different runs use different files. A file that
        cannot be used is noted on the logger ``requant``, and the run starts anew; a folder in its place is left alone.

        Args:
            execution: How the model is run.
            setup: The model and the tensors to observe.
            first: The first sample.
            source: The samples.
            length: The number of samples; None if it is unknown before reading.
        """
        if execution.checkpoint is None:
            return cls(None, "")
        identity = _identity(execution, setup, first, data_stamp(source, length))
        path = execution.checkpoint.with_name(f"{execution.checkpoint.name}-{identity[:8]}")
        empty = cls(path, identity, kept=execution.kept, _due=time.monotonic() + SECONDS)
        if not os.path.lexists(path):
            return empty
        if path.is_symlink():  # writing would replace the file that it names
            logging.getLogger("requant").warning("requant: %s: a link; the run has no checkpoint", path)
            return cls(None, identity)
        try:
            document = load_document(path, _Document, "checkpoint", SCHEMA, most=LARGE_FILE)
            if document.identity != identity:
                raise RequantError(f"{path}: checkpoint of another run")
            seen = _statistics(document, path)
        except RequantError as error:
            logging.getLogger("requant").warning("requant: %s; the run starts anew", error)
            return cls(None, identity) if path.is_dir() else empty
        done = frozenset(number for first, last in document.done for number in range(first, last + 1))
        with suppress(OSError):
            os.utime(path)  # the run is active again
        return cls(path, identity, seen, done, document.complete, execution.kept, _due=time.monotonic() + SECONDS)

    def add(self, numbers: Iterable[int], seen: Observations) -> None:
        """Add the statistics of some batches.

        Raises:
            RequantError: The statistics cannot be merged, or the file cannot be written.
        """
        self.seen |= seen
        self._added.update(numbers)
        if self.path is not None and time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        """Write the file atomically.

        Raises:
            RequantError: The file cannot be written.
        """
        if self.path is None or not (self._added or self.complete):
            return
        began = time.monotonic()
        document = {
            "schema": SCHEMA,
            "identity": self.identity,
            "done": list(_intervals(sorted(self.done | self._added))),
            "complete": self.complete,
            "seen": observations_to_json(self.seen),
        }
        write_atomically(self.path, json.dumps(document, allow_nan=False).encode(), output=False)
        now = time.monotonic()
        self._due = now + max(SECONDS, (now - began) / SHARE)

    def __enter__(self) -> Self:
        """Enter the run."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the file after the last batch or pass it to `kept`; after an interruption, write it.

        After a RequantError the file stays as it is: the last batches may contain the wrong data.
        """
        if kind is not None:
            if not issubclass(kind, RequantError):
                self.write()
        elif self.path is not None and self.kept is None:
            self.path.unlink(missing_ok=True)
        elif self.path is not None and self.kept is not None:
            if not self.complete:
                self.complete = True
                self.write()
            self.kept(self.path)


def _identity(execution: Execution, setup: Setup, first: Sample, data: object) -> str:
    """Return a digest of everything that the statistics depend on: runtime, model, data, batches, tensors."""
    import onnxruntime as ort

    targets = setup.targets
    parts = (
        ort.__version__,
        model_stamp(setup.model.load() if isinstance(setup.model, Stored) else setup.model),
        (targets.tensors, targets.histogram, sorted(targets.channel_axis.items()), targets.few, targets.values),
        (setup.groups, setup.stacks, setup.first, execution.batch, execution.shard),
        (data, first.where, digest_of(first.feed)),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _statistics(document: _Document, path: Path) -> Observations:
    """Read the statistics of a checkpoint."""
    try:
        return observations_from_json(document.seen)
    except (KeyError, TypeError, ValueError, RequantError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise RequantError(f"{path}: malformed checkpoint: {reason}") from error


def _intervals(numbers: list[int]) -> Iterator[list[int]]:
    """Yield ascending numbers as intervals of consecutive numbers: ``[first, last]``."""
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield [numbers[start], numbers[index - 1]]
            start = index

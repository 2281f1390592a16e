"""A run that was interrupted goes on where its checkpoint stands."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from .. import RequantError
from .execution import Execution
from .observations import Observations
from .records import observations_from_json, observations_to_json
from .samples import Sample
from .stamps import data_stamp, model_stamp
from .work import Setup, Stored, digest_of

SCHEMA = 1
SECONDS = 5.0
"""At least so long lies between two checkpoints."""
SHARE = 0.05
"""Writing them takes at most this share of the time."""


@dataclass(slots=True)
class Checkpoint:
    """What is done so far, in memory and now and then in a file.

    Attributes:
        path: The file; None for none.
        identity: A digest of all that a bit of the result depends on.
        seen: What was seen so far.
        done: The batches that this is of, by number.
        complete: Whether these are all.
        kept: Takes the file in the end, see `Execution`; None removes it.
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
        """Find what an interrupted run of the same kind has left behind, or begin anew.

        The file's name ends in the run's identity, so that runs of different kinds do not meet.

        Args:
            execution: How the model is run.
            setup: The model, and what is to be observed.
            first: The first sample.
            source: The samples.
            length: How many there are; None when only reading will tell.

        Raises:
            RequantError: The file cannot be read.
        """
        if execution.checkpoint is None:
            return cls(None, "")
        identity = _identity(execution, setup, first, data_stamp(source, length))
        path = execution.checkpoint.with_name(f"{execution.checkpoint.name}-{identity[:8]}")
        if not path.exists():
            return cls(path, identity, kept=execution.kept, _due=time.monotonic() + SECONDS)
        try:
            document = json.loads(path.read_bytes())
            if document["schema"] != SCHEMA or document["identity"] != identity:
                raise ValueError("it is of another run")
            done = frozenset(_expanded(document["done"]))
            complete = document["complete"] is True
            seen = observations_from_json(document["seen"])
        except (OSError, ValueError, TypeError, KeyError, RequantError) as error:
            reason = " ".join(str(error).split())
            raise RequantError(f"{path}: not a usable checkpoint ({reason}); remove it to begin anew") from error
        with suppress(OSError):
            os.utime(path)  # it is of a run that is under way again
        return cls(path, identity, seen, done, complete, execution.kept, _due=time.monotonic() + SECONDS)

    def add(self, units: Iterable[int], seen: Observations) -> None:
        """Take what was seen of some batches.

        Raises:
            RequantError: It does not go with what was seen before, or the file cannot be written.
        """
        self.seen |= seen
        self._added.update(units)
        if self.path is not None and time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        """Write the file, whole or not at all.

        Raises:
            RequantError: It cannot be written.
        """
        from .files import write_atomically

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
        write_atomically(self.path, json.dumps(document, allow_nan=False).encode())
        now = time.monotonic()
        self._due = now + max(SECONDS, (now - began) / SHARE)

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the file when all is done, or give it away; write it when someone interrupts.

        A request that cannot be met leaves what was written now and then: the rest of the data may be as wrong.
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
    """Return a digest of what the statistics depend on: runtime, model, data, batches, tensors."""
    import onnxruntime as ort

    wanted = setup.wanted
    told = (
        ort.__version__,
        model_stamp(setup.model.load() if isinstance(setup.model, Stored) else setup.model),
        (wanted.tensors, wanted.histogram, sorted(wanted.channel_axis.items()), wanted.few, wanted.values),
        (setup.groups, setup.stacks, setup.first, execution.batch, execution.shard),
        (data, first.where, digest_of(first.feed)),
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _intervals(numbers: list[int]) -> Iterator[list[int]]:
    """Yield ascending numbers as pairs of the first and the last of those that follow each other."""
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield [numbers[start], numbers[index - 1]]
            start = index


def _expanded(intervals: Iterable[list[int]]) -> Iterator[int]:
    """Yield the numbers of intervals."""
    for first, last in intervals:
        yield from range(first, last + 1)

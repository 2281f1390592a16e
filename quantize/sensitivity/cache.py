"""The cache of finished trials: an interrupted run continues where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ... import RequantError
from ...calibration.data.samples import Sample
from ...calibration.range_files.decoding import Number, convert, plain_number
from ...system.regular import read_file
from ...system.values import decode_json
from ..runtime.machine import Machine, folder, forgotten
from .switch_graph import Switch
from .switch_model import Powers, Switchboard

SCHEMA = 3
PREFIX = "sensitivity-"
MOST = 2**28
"""The most bytes of a file that are read: a million trials."""
KEPT = 30 * 24 * 3600  # seconds; files that were not read for so long are removed


@dataclass(slots=True)
class Trials:
    """The finished trials of one switchable model on one set of samples.

    Attributes:
        path: The file: one JSON array per line, with the digest of a trial and its powers by output.
        known: The finished trials by digest.
        write: Appends a line to the file.
    """

    path: Path
    known: dict[str, Powers] = field(default_factory=dict)
    write: Callable[[str], object] = lambda line: None

    def add(self, key: str, found: Powers) -> None:
        """Add a finished trial, also to the file."""
        self.known[key] = found
        with suppress(OSError):  # without the file, only the next run takes longer
            rows = {name: [*map(plain_number, row)] for name, row in found.items()}
            self.write(json.dumps([key, rows]) + "\n")


@contextmanager
def trials_of(board: Switchboard, samples: Sequence[Sample], *, fresh: bool) -> Iterator[Trials]:
    """Open the cached trials for the same weights, scales, samples, runtime and processor.

    Args:
        board: The switchable model.
        samples: The samples.
        fresh: Whether to remove the cached trials first.
    """
    path = folder() / f"{PREFIX}{_key(board, samples)}.jsonl"
    found = Trials(path)
    if fresh:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    found.known.update(_read(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # opening a pipe would wait for a reader, and writing through a link would change another file
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            yield found
            return
        torn = path.is_file() and not read_file(path).endswith(b"\n")
        file = path.open("a", encoding="utf-8", buffering=1)  # writes each line at once: the run may end at any time
        if torn:
            file.write("\n")
    except (OSError, RequantError):
        yield found
        return
    with file:
        found.write = file.write
        yield found


def digest(on: Collection[Switch]) -> str:
    """Return a short digest of a set of switches."""
    text = repr(sorted((switch.unit, switch.tensor) for switch in on))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def forget_old(now: float | None = None) -> int:
    """Remove files that were not read for `KEPT` seconds; return their number."""
    removed = 0
    for path in folder().glob(f"{PREFIX}*"):
        with suppress(OSError):
            if (now or time.time()) - path.stat().st_mtime > KEPT:
                path.unlink()
                removed += 1
    return removed


def _key(board: Switchboard, samples: Sequence[Sample]) -> str:
    """Return a digest of all that determines the result of a trial."""
    machine = Machine.here(1)
    told = (SCHEMA, machine.runtime, machine.cpu, board.identity, [_digest(sample) for sample in samples])
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]


def _digest(sample: Sample) -> str:
    """Return a digest of the inputs of a sample."""
    found = hashlib.blake2b(digest_size=16)
    for name, array in sorted(sample.feed.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def _read(path: Path) -> Iterator[tuple[str, Powers]]:
    """Yield the trials of a file; the last line may be incomplete. Other lines that are no trials get one note."""
    if not os.path.lexists(path):
        return
    try:
        lines = read_file(path, most=MOST).split(b"\n")
    except RequantError as error:
        forgotten(error)
        return
    with suppress(OSError):
        os.utime(path)
    damaged = 0
    for number, line in enumerate(lines, 1):
        try:
            key, rows = convert(decode_json(line), tuple[str, dict[str, tuple[Number, Number]]], "trial")
        except (ValueError, RequantError):
            damaged += number < len(lines) and bool(line)
            continue
        yield key, {name: (float(signal), float(noise)) for name, (signal, noise) in rows.items()}
    if damaged:
        forgotten(f"{path}: {damaged} damaged lines are left out")

"""What libraries write to stderr themselves, past Python: kept aside while they may crash.

A failed assertion prints a line and ends the process. The process that waits puts this line into its message.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

from .printable import sentence

STDERR = 2


class _Lenient(io.TextIOWrapper):
    """A text stream that drops what cannot be written: a full disk must not end the work that a line tells of."""

    def write(self, text: str) -> int:
        """Write a text, or drop it; return its length."""
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write what waits, or drop it."""
        with suppress(OSError):
            super().flush()


@dataclass(frozen=True, slots=True)
class _Streams:
    """The real stderr, and the file for what is kept aside, as file descriptors."""

    real: int
    aside: int


_streams: _Streams | None = None


def prepare_streams() -> None:
    """Let stderr drop what it cannot write, and open closed standard streams, as empty ones.

    The next file that is opened would take the number of a closed stream, and libraries would write into it.
    """
    for descriptor in range(STDERR + 1):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    sys.stderr = _lenient(STDERR)


def _lenient(descriptor: int) -> _Lenient:
    """Return a stream to a file descriptor, with the encoding of stderr."""
    old = sys.stderr
    encoding, errors = ("utf-8", "backslashreplace") if old is None else (old.encoding, old.errors)
    raw = io.FileIO(descriptor, "w", closefd=False)
    return _Lenient(raw, encoding, errors, line_buffering=True, write_through=True)


def keep_in(file: BinaryIO) -> None:
    """Let Python write to stderr by another file descriptor, so that `aside` moves only what libraries write."""
    global _streams
    _streams = _Streams(os.dup(STDERR), file.fileno())
    sys.stderr = _lenient(_streams.real)


def is_moved() -> bool:
    """Return whether Python writes to stderr by a descriptor of its own, as in the process of a command."""
    return _streams is not None


@contextmanager
def aside() -> Iterator[None]:
    """Keep what libraries write to stderr within the block, and print it afterwards; a crash leaves it in the file.

    It is printed as notes: printable lines of bounded length.
    """
    streams = _streams
    if streams is None:
        yield
        return
    os.dup2(streams.aside, STDERR)
    try:
        yield
    finally:
        os.dup2(streams.real, STDERR)
        size = os.lseek(streams.aside, 0, os.SEEK_CUR)
        if size:
            written = os.pread(streams.aside, size, 0).decode(errors="replace")
            notes = "".join(f"{sentence(f'note: {line}')}\n" for line in written.splitlines() if line.strip())
            with suppress(OSError):
                os.write(STDERR, notes.encode())
            os.lseek(streams.aside, 0, os.SEEK_SET)
            os.ftruncate(streams.aside, 0)


def last_line(file: BinaryIO, most: int = 100) -> str:
    """Return the end of the last line in the file, without the place in the source that it begins with."""
    file.seek(0)
    line = "".join(file.read().decode(errors="replace").strip().splitlines()[-1:])
    return line.rpartition(": ")[2][-most:]

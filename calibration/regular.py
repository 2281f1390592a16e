"""Opening files of data: only regular files, which never make the reader wait."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import IO

from .samples import DataError

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
"""What else a path can name. To open some of these waits for another process, or has effects on a device."""
WAITLESS = getattr(os, "O_NONBLOCK", 0)
"""The flag to open a file that became a FIFO after it was checked; it has no effect on regular files."""

Stamp = tuple[int, int, int]
"""The file number, the size in bytes and the time of the last change in ns."""


def check_regular(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Check that paths name files, or links to files.

    Raises:
        DataError: A path names something else, or nothing.
    """
    for path in paths:
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise _unreadable(path, error) from error
        _check_mode(path, mode)


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        DataError: The path names something else, or the file cannot be read.
    """
    check_regular([path])
    try:
        stream = open(path, "rb", opener=_open_waitless)  # noqa: SIM115 - the caller closes it
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    _check_mode(path, os.fstat(stream.fileno()).st_mode)
    return stream


def stamp_of(stream: IO[bytes]) -> Stamp:
    """Return what tells whether a file is still the same."""
    found = os.fstat(stream.fileno())
    return found.st_ino, found.st_size, found.st_mtime_ns


def size_of(stream: IO[bytes]) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(stream.fileno()).st_size


def _open_waitless(path: str, flags: int) -> int:
    """Open a file descriptor."""
    return os.open(path, flags | WAITLESS)


def _check_mode(path: str | os.PathLike[str], mode: int) -> None:
    """Check that a mode is the mode of a regular file."""
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise DataError(f"{os.fspath(path)}: is {kind}; data are read from regular files")


def _unreadable(path: str | os.PathLike[str], error: OSError | ValueError) -> DataError:
    """Return the error for a path that cannot be opened."""
    if isinstance(error, FileNotFoundError):
        gone = "a link to a file that is not there" if os.path.islink(path) else "no such file"
        return DataError(f"{os.fspath(path)}: {gone}")
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return DataError(f"{os.fspath(path)}: cannot be read: {reason}")

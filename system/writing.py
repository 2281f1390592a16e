"""Write files whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .. import RequantError
from .given import check_kind
from .notes import note_written
from .regular import check_replaceable, reason_of
from .scratch import scratch_file


def write_atomically(path: str | os.PathLike[str], data: bytes, *, output: bool = True) -> None:
    """Write a file atomically: write a temporary file in the same folder, then rename it.

    Args:
        path: The file; a symbolic link stays one.
        data: Its content.
        output: Whether the user asked for this file; messages about a later error name it.

    Raises:
        RequantError: The file cannot be written, or the content is no bytes; an existing file is unchanged.
    """
    with written_after(path, data, output=output):
        pass


@contextmanager
def written_after(path: str | os.PathLike[str], data: bytes, *, output: bool = True) -> Iterator[None]:
    """Write a file as `write_atomically`, but rename it after the block, and not at all if the block fails.

    Raises:
        RequantError: As `write_atomically`.
    """
    check_replaceable(path)
    check_kind(data, (bytes, bytearray, memoryview), "the content of a file must be bytes")
    try:
        target = Path(os.path.realpath(path))
        with scratch_file(target.parent) as temporary:
            with open(temporary, "wb") as file:
                file.write(data)
                _store(file)  # a full disk is noticed before the block
            yield
            os.replace(temporary, target)
    except OSError as error:
        raise RequantError(f"{os.fspath(path)}: cannot be written: {reason_of(error)}") from error
    if output:
        note_written(path)


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `target` when the block ends; after an error `target` is unchanged.

    Raises:
        OSError: The file cannot be written.
        RequantError: The target is something else than a file.
    """
    check_replaceable(target)
    with scratch_file(target.parent) as temporary:
        with open(temporary, "wb") as file:
            yield file
            _store(file)
        os.replace(temporary, target)


def _store(file: BinaryIO) -> None:
    """Write the buffered data to the disk."""
    file.flush()
    os.fsync(file.fileno())

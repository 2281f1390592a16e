"""Reading files that may be anything: only regular files, which never make the reader wait."""

from __future__ import annotations

import os
import re
import stat
from typing import IO, Any

from .. import RequantError
from .given import check_path

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
SMALL_FILE = 64 * 2**20
"""The most bytes of a file that `read_file` returns if the caller sets no other limit."""

PARTIAL = re.compile(r"[0-9]+ requested and [0-9]+ written")
"""What NumPy says of a file that it could not write whole."""
BLOCK = 2**20
"""The bytes that are read at once from a file that may be larger than its size says."""

AnyPath = str | os.PathLike[str]
Stamp = tuple[int, int, int]
"""The file number, the size in bytes and the time of the last change in ns."""


def check_regular(path: AnyPath, noun: str = "file") -> os.stat_result:
    """Check that a path names a file, or a link to a file, and return its status.

    Args:
        path: The path.
        noun: What it should be, for errors: ``"model"``.

    Raises:
        RequantError: The path names something else, or nothing.
    """
    check_path(path, f"a {noun}")
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise unreadable(path, error) from error
    return _checked(path, status, noun)


def check_file(path: AnyPath) -> None:
    """Refuse a model whose path is no regular file, or an empty one: to open a pipe would wait for ever.

    Raises:
        RequantError: The message has the path and what is there.
    """
    if check_regular(path, "model").st_size == 0:
        raise RequantError(f"{path}: not an ONNX model: the file is empty")


def check_replaceable(path: AnyPath) -> None:
    """Refuse a path to write to that names something else than a file: a new file would take the place of a device.

    Raises:
        RequantError: The path names a folder, a device, a FIFO or a socket.
    """
    check_path(path, "an output")
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # nothing is there, or the writer says what is wrong with the name
        return
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise RequantError(f"{os.fspath(path)}: is {kind}; give the path of a file")


def check_stored(tensor: Any) -> None:
    """Check that a tensor in a file can be read: onnx-ir maps the file, and reports a bad one in many ways.

    Args:
        tensor: An ``onnx_ir.ExternalTensor``.

    Raises:
        RequantError: The path is no regular file inside the model's folder, or the file ends inside the tensor.
    """
    where = f"external data of {tensor.name!r}"
    try:
        tensor._check_path_containment()
    except ValueError as error:
        raise RequantError(f"{where}: {error}") from error
    try:
        size = check_regular(tensor.path).st_size
    except RequantError as error:
        raise RequantError(f"{where}: {error}") from error
    end = (tensor.offset or 0) + tensor.nbytes
    if size < end:
        raise RequantError(f"{where}: {tensor.path}: has {size} bytes, and {end} are needed")


def open_regular(path: AnyPath) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        RequantError: The path names something else, or the file cannot be read.
    """
    check_regular(path)
    try:
        stream = open(path, "rb", opener=open_waitless)  # noqa: SIM115 - the caller closes it
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    _checked(path, os.fstat(stream.fileno()), "file")
    return stream


def read_file(path: AnyPath, *, most: int = SMALL_FILE, whole: bool = True) -> bytes:
    """Return the bytes of a file that requant or a user writes beside models and data.

    Args:
        path: The file.
        most: The most bytes that are read.
        whole: Whether a larger file is refused. If not, its first bytes are returned.

    Raises:
        RequantError: The path is no regular file, the file is larger, or it cannot be read.
    """
    with open_regular(path) as file:
        try:
            refused = whole and size_of(file) > most
            data = b"" if refused else _read_most(file, most + 1 if whole else most)
        except OSError as error:
            raise unreadable(path, error) from error
    if refused or (whole and len(data) > most):
        raise RequantError(f"{os.fspath(path)}: cannot be read: has more than {most >> 20} MiB")
    return data


def _read_most(file: IO[bytes], most: int) -> bytes:
    """Return all bytes of a file, or its first `most`. Files of the system have more bytes than their size says."""
    at_once = max(size_of(file) + 1, BLOCK)
    blocks = []
    while most > 0 and (block := file.read(min(at_once, most))):
        blocks.append(block)
        most -= len(block)
    return b"".join(blocks)  # a single block is not copied


def stamp_of(stream: IO[bytes]) -> Stamp:
    """Return what tells whether a file is still the same."""
    found = os.fstat(stream.fileno())
    return found.st_ino, found.st_size, found.st_mtime_ns


def size_of(stream: IO[bytes]) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(stream.fileno()).st_size


def unreadable(path: AnyPath, error: OSError | ValueError) -> RequantError:
    """Return the error for a path that cannot be opened or read."""
    if isinstance(error, FileNotFoundError):
        gone = "a link to a file that is not there" if os.path.islink(path) else "no such file"
        return RequantError(f"{os.fspath(path)}: {gone}")
    return RequantError(f"{os.fspath(path)}: cannot be read: {reason_of(error)}")


def reason_of(error: OSError | ValueError) -> str:
    """Return why a file cannot be read or written, as the system or the library says it."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return "the disk may be full: not all bytes were written" if PARTIAL.fullmatch(text) else text


def open_waitless(path: str, flags: int) -> int:
    """Open a file descriptor, without waiting for the other end of a FIFO: an ``opener`` of `open`."""
    return os.open(path, flags | WAITLESS, mode=0o666)  # less the umask, as `open` makes files


def _checked(path: AnyPath, status: os.stat_result, noun: str) -> os.stat_result:
    """Return a status if it is the one of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise RequantError(f"{os.fspath(path)}: is {kind}, not a {noun}")
    return status

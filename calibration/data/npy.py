"""Arrays of the ``.npy`` format, alone or in a ``.npz`` file. A header is compared with the bytes before they are read.

Pickles are never read.
"""

from __future__ import annotations

import io
import math
import struct
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from ...system.regular import open_regular, size_of
from ..model.session import Array
from .samples import DataError

HEADER = 10_000
"""The longest header in bytes; the limit of NumPy."""
LENGTHS = {(1, 0): "<H", (2, 0): "<I"}
"""The form of the header's length, by version. Version 3 is for structured types, which are no input of a model."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""The compressions of ``numpy.savez`` and ``numpy.savez_compressed``. `zipfile` can limit what these give at once."""
DEFLATE = 1032
"""The most bytes that DEFLATE makes of one byte: 258 for a match of two bits, https://zlib.net/zlib_tech.html."""
RATIO, FREE = 100, 2**26
"""The most bytes for each compressed byte, and the bytes that are always allowed: of all arrays, and of one sample."""
PARSER = threading.Lock()
"""One thread at a time parses a header: Python 3.11 raises SystemError where two threads evaluate literals
(https://github.com/python/cpython/issues/106905)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An array in a file.

    Attributes:
        shape: The shape.
        dtype: The element type; not of Python objects.
        fortran: Whether the array is stored in Fortran order; then it must be read whole.
        start: The offset of the first value in the stream of the array, in bytes.
        compressed: The number of bytes in the file if they are compressed; else None.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int
    compressed: int | None = None

    @property
    def size(self) -> int:
        """The size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check_room(self, size: int, limit: int) -> None:
        """Check that `size` bytes of this array can be held at once.

        Args:
            size: The number of bytes.
            limit: The most bytes.

        Raises:
            ValueError: They are more than the limit, or so many more than the file has that it looks like a trap.
        """
        if size > limit:
            raise ValueError(f"needs {size} bytes at once; the limit is {limit} bytes")
        if self.compressed is not None:
            check_ratio(size, self.compressed)


def check_ratio(size: int, compressed: int) -> None:
    """Check that bytes do not come from so few compressed bytes that it looks like a trap.

    Args:
        size: The number of bytes.
        compressed: The number of bytes in the file.

    Raises:
        ValueError: It does.
    """
    if size > max(FREE, RATIO * compressed):
        raise ValueError(
            f"{size} bytes come from {compressed} compressed bytes, more than {RATIO} to 1; "
            "store them with numpy.savez if they are right"
        )


def stored_array(stream: IO[bytes], held: int, compressed: int | None = None) -> Stored:
    """Read the header of an array, up to the first value.

    Args:
        stream: The array, at its beginning.
        held: The size of the stream in bytes.
        compressed: The number of bytes in the file if they are compressed; else None.

    Raises:
        ValueError: This is no such header, or the file has fewer bytes than the header says.
    """
    magic = stream.read(np.lib.format.MAGIC_LEN)
    if len(magic) < np.lib.format.MAGIC_LEN or magic[:-2] != np.lib.format.MAGIC_PREFIX:
        raise ValueError("it is no array of the .npy format")
    version = (magic[-2], magic[-1])
    if version not in LENGTHS:
        raise ValueError(f"version {version} of the .npy format is not supported")
    field = stream.read(struct.calcsize(LENGTHS[version]))  # struct.error if the file ends here
    length = int(struct.unpack(LENGTHS[version], field)[0])
    if length > HEADER:
        raise ValueError(f"its header has {length} bytes; at most {HEADER} are read")
    text = stream.read(length)
    start = np.lib.format.MAGIC_LEN + len(field) + length
    shape, fortran, dtype = _parsed(field + text, version)
    if dtype.hasobject:
        raise ValueError("contains pickled objects, which are never read")
    if any(axis < 0 for axis in shape) or not dtype.itemsize:
        raise ValueError(f"its header is wrong: shape {shape} of {dtype}")
    found = Stored(shape, dtype, fortran, start, compressed)
    if found.size > held - start:
        raise ValueError(
            f"the array ends early: its header says {dtype} {shape}, {found.size} bytes, but there are {held - start}"
        )
    return found


def _parsed(header: bytes, version: tuple[int, int]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, the order and the type of a header, which begins with its length."""
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        with PARSER:
            return read(io.BytesIO(header))
    except Exception as error:  # NumPy evaluates a Python literal: any error of the parser, also RecursionError
        raise ValueError(f"its header cannot be parsed: {type(error).__name__}") from error


def read_whole(stream: IO[bytes], stored: Stored, limit: int) -> Array:
    """Read the values of an array.

    Args:
        stream: The array, at its first value.
        stored: Its header.
        limit: The most bytes of an array.

    Raises:
        ValueError: The array is larger than the limit.
        EOFError: The file has become shorter.
    """
    stored.check_room(stored.size, limit)
    data = stream.read(stored.size)
    if len(data) < stored.size:
        raise EOFError("the array ends early")
    return np.ndarray(stored.shape, stored.dtype, data, order="F" if stored.fortran else "C")


@contextmanager
def open_archive(path: str) -> Iterator[zipfile.ZipFile]:
    """Open a ``.npz`` file.

    Raises:
        DataError: The file cannot be read, or is no ``.npz`` file.
    """
    with open_regular(path) as stream:
        try:
            archive = zipfile.ZipFile(stream)
        except Exception as error:  # zipfile raises errors of many types for damaged directories
            raise DataError(f"{path}: not a readable .npz file: {error}") from error
        with archive:
            yield archive


def member_of(archive: zipfile.ZipFile, file: str) -> Stored:
    """Read the header of an array in a ``.npz`` file, and compare its sizes with those of the file.

    Raises:
        ValueError: The array is encrypted or compressed by another method, or a size is wrong.
        OSError, EOFError, zipfile.BadZipFile, zlib.error: The file is damaged.
    """
    info = archive.getinfo(file)
    if info.flag_bits & 1:
        raise ValueError("is encrypted")
    if info.compress_type not in METHODS:
        raise ValueError(f"is compressed by method {info.compress_type}; write it with numpy.savez_compressed")
    assert archive.fp is not None
    plain = info.compress_type == zipfile.ZIP_STORED
    most = info.compress_size if plain else DEFLATE * (info.compress_size + 1)
    if info.header_offset + info.compress_size > size_of(archive.fp) or info.file_size > most:
        raise ValueError(f"the archive is damaged: {info.file_size} bytes cannot come from the bytes that are there")
    with archive.open(file) as stream:
        return stored_array(stream, info.file_size, None if plain else info.compress_size)


def plain_start(archive: zipfile.ZipFile, file: str, stored: Stored) -> int | None:
    """Return the offset of the first value of an array in its archive, in bytes; None if it is compressed.

    https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, section 4.3.7: a local header has 30 bytes. The last
    four bytes are the lengths of the name and of the extra field, which follow the header.
    """
    if stored.compressed is not None or archive.fp is None:
        return None
    begin = archive.getinfo(file).header_offset
    archive.fp.seek(begin)
    name, extra = struct.unpack("<26x2H", archive.fp.read(30))
    return begin + 30 + int(name) + int(extra) + stored.start

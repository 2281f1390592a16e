"""Stored arrays as data: one ``.npz`` file, or a folder of ``.npz`` or ``.npy`` files. Pickles are never read."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from .. import near
from .samples import DataError, Picked, Rows, Sample, as_label, check_names
from .session import Array, InputSpec, required

LABELS = "labels"
"""The name of the array with the labels, which is not an input."""
UNREADABLE = (ValueError, OSError, EOFError, KeyError, struct.error, zipfile.BadZipFile, zlib.error)
"""The errors of NumPy and zipfile for files that are damaged, have another format, or contain pickles."""


@dataclass(frozen=True, slots=True)
class _Member:
    """An array inside a ``.npz`` file, and how it is split into samples.

    Attributes:
        file: The name in the archive.
        shape: The shape.
        dtype: The element type.
        fortran: Whether the array is stored in Fortran order; then it must be read whole.
        size: The size of the values in the archive, in bytes.
        start: The offset of the first value in the archive, in bytes; None for a compressed array.
        chunk: How many entries of the first axis form one sample; 0 if each entry is a sample without a batch axis of
            its own.
    """

    file: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    size: int
    start: int | None = None
    chunk: int = 0

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.shape[0] // (self.chunk or 1)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return (self.chunk, *self.shape[1:]) if self.chunk else self.shape[1:]


def npz_file(path: str, split: str | None, inputs: Sequence[InputSpec]) -> Rows:
    """Read the arrays of a ``.npz`` file, split along their first axis.

    An array of the input's rank is split into batches of the input's fixed batch length, or of 1. In an array with one
    more axis each entry is one whole sample. With `split`, the arrays are named ``split/input``.

    Raises:
        DataError: The file is not a ``.npz`` file, or its arrays do not fit the model.
    """
    description = path if split is None else f"{path}:{split}"
    with _open_zip(path) as archive:
        names = _npz_names(archive, path, split, inputs)
        members = {name: _npz_member(archive, path, file) for name, file in names.items()}
        labels = _load_whole(archive, path, members.pop(LABELS)) if LABELS in set(members) - _names(inputs) else None
    cut = {spec.name: _cut(members[spec.name], spec, description) for spec in inputs if spec.name in members}
    lengths = {name: member.samples for name, member in cut.items()}
    length = min(lengths.values(), default=0)
    if len(set(lengths.values())) > 1:
        raise DataError(f"{description}: the inputs have different numbers of samples: {lengths}")
    if length == 0:
        raise DataError(f"{description}: holds no samples")
    rows = None if labels is None else _label_rows(labels, length, cut, description)

    def read(picked: Picked) -> Iterator[Sample]:
        with ExitStack() as stack:
            archive = stack.enter_context(_open_zip(path))
            arrays = [_npz_rows(archive, path, member, picked) for member in cut.values()]
            for index in range(length) if picked is None else picked:
                feed = {name: next(rows) for name, rows in zip(cut, arrays, strict=True)}
                yield Sample(feed, None if rows is None else rows[index], f"{description}, sample {index}")

    random = all(member.start is not None and not member.fortran for member in cut.values())
    return Rows(description, length, read, random)


def _names(inputs: Sequence[InputSpec]) -> set[str]:
    """Return the inputs' names."""
    return {spec.name for spec in inputs}


def _open_zip(path: str) -> zipfile.ZipFile:
    """Open a ``.npz`` file."""
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a readable .npz file: {error}") from error


def _npz_names(archive: zipfile.ZipFile, path: str, split: str | None, inputs: Sequence[InputSpec]) -> dict[str, str]:
    """Return the archive's file for each input, and for the labels if there are any."""
    files = {file.removesuffix(".npy"): file for file in archive.namelist()}
    known = _names(inputs) | {LABELS}
    for name in files:
        if not any(name == want or name.endswith(f"/{want}") for want in known):
            raise DataError(f"{path}: array {name!r} is not an input of the model{near(name, known)}")
    prefix = "" if split is None else f"{split}/"
    names = {name: files[prefix + name] for name in known if prefix + name in files}
    if not names and split is not None:
        splits = {name.rsplit(f"/{want}", 1)[0] for name in files for want in known if name.endswith(f"/{want}")}
        raise DataError(f"{path}: no split named {split!r}{near(split, splits)}")
    for spec in required(inputs):
        if spec.name not in names:
            raise DataError(f"{path}: no array named {prefix + spec.name!r} for the input{near(spec.name, files)}")
    return names


def _npz_member(archive: zipfile.ZipFile, path: str, file: str) -> _Member:
    """Read the header of an array."""
    try:
        with archive.open(file) as stream:
            shape, fortran, dtype = _read_header(stream)
            begin = _stored_at(archive, file)
            start = None if begin is None else begin + stream.tell()
            size = archive.getinfo(file).file_size - stream.tell()
    except UNREADABLE as error:
        raise DataError(f"{path}, array {file.removesuffix('.npy')!r}: cannot be read: {error}") from error
    if dtype.hasobject:
        raise DataError(f"{path}, array {file.removesuffix('.npy')!r}: contains pickled objects, which are never read")
    return _Member(file, shape, dtype, fortran, size, start)


def _stored_at(archive: zipfile.ZipFile, file: str) -> int | None:
    """Return a file's offset in its archive, in bytes; None if it is compressed or encrypted.

    https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, section 4.3.7: a local header has 30 bytes. The last
    four bytes are the lengths of the name and of the extra field, which follow the header.
    """
    info = archive.getinfo(file)
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or archive.filename is None:
        return None
    with open(archive.filename, "rb") as stream:
        stream.seek(info.header_offset)
        name, extra = struct.unpack("<26x2H", stream.read(30))
    return info.header_offset + 30 + int(name) + int(extra)


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of the ``.npy`` format, up to the first value."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"version {version} of the .npy format is not supported")


def _cut(member: _Member, spec: InputSpec, where: str) -> _Member:
    """Return how an array is split into samples of an input."""
    rank = len(spec.shape)
    if len(member.shape) == rank + 1:
        return member
    if len(member.shape) != rank or rank == 0:
        raise DataError(
            f"{where}, input {spec.name!r}: expected {spec}, got an array of shape {member.shape}; "
            f"give rank {rank}, which is split into batches, or rank {rank + 1} with one sample per entry"
        )
    batch = spec.shape[0]
    chunk = batch if isinstance(batch, int) else 1
    left = member.shape[0] % max(chunk, 1)
    if left:
        raise DataError(
            f"{where}, input {spec.name!r}: {member.shape[0]} entries do not divide into the model's fixed batch of "
            f"{chunk}; remove {left} or add {chunk - left}"
        )
    return replace(member, chunk=chunk)


def _label_rows(labels: Array, length: int, cut: Mapping[str, _Member], where: str) -> list[Array | int | None]:
    """Return the label of each sample: one per sample, or one per entry of a batch."""
    chunk = max((member.chunk for member in cut.values()), default=0) or 1
    if labels.ndim == 0 or len(labels) not in (length, length * chunk):
        raise DataError(f"{where}, array {LABELS!r}: expected {length * chunk} labels, got shape {labels.shape}")
    if len(labels) != length:
        labels = labels.reshape(length, chunk, *labels.shape[1:])
    return [as_label(label, where) for label in labels]


def _load_whole(archive: zipfile.ZipFile, path: str, member: _Member) -> Array:
    """Read a whole array."""
    try:
        with archive.open(member.file) as stream:
            return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))
    except UNREADABLE as error:
        raise DataError(f"{path}, array {member.file.removesuffix('.npy')!r}: cannot be read: {error}") from error


def _npz_rows(archive: zipfile.ZipFile, path: str, member: _Member, picked: Picked) -> Iterator[Array]:
    """Yield the picked samples of an array, and read only one at a time.

    NumPy cannot memory-map an array in an archive, and ``numpy.load`` reads it whole. The stream of an array is in the
    order of its first axis.
    """
    positions = range(member.samples) if picked is None else picked
    if member.fortran:
        whole = _load_whole(archive, path, member).reshape(member.samples, *member.sample_shape)
        yield from (whole[index] for index in positions)
        return
    size = int(np.prod(member.sample_shape, dtype=np.int64)) * member.dtype.itemsize
    at = index = 0
    try:
        # the stream of a whole array checks the CRC; for some samples, seek in the file and skip the others
        with _values_of(archive, path, member, whole=picked is None) as stream:
            for index in positions:
                stream.seek((index - at) * size, os.SEEK_CUR)
                data = stream.read(size)
                if len(data) < size or (index + 1) * size > member.size:
                    raise EOFError("the array ends early")
                yield np.ndarray(member.sample_shape, member.dtype, data)
                at = index + 1
    except UNREADABLE as error:
        name = member.file.removesuffix(".npy")
        raise DataError(f"{path}, sample {index}, array {name!r}: cannot be read: {error}") from error


@contextmanager
def _values_of(archive: zipfile.ZipFile, path: str, member: _Member, *, whole: bool) -> Iterator[IO[bytes]]:
    """Open the values of an array as a stream, at the first value."""
    if whole or member.start is None:
        with archive.open(member.file) as stream:
            _read_header(stream)
            yield stream
    else:
        with open(path, "rb") as values:
            values.seek(member.start)
            yield values


def array_folder(path: str, inputs: Sequence[InputSpec]) -> Rows:
    """Read a folder of ``.npz`` files or, for a model with one input, of ``.npy`` files: one sample each, by name.

    Raises:
        DataError: The folder contains both kinds, or arrays for another model.
    """
    kinds = {suffix: sorted(Path(path).glob(f"*{suffix}")) for suffix in (".npz", ".npy")}
    present = {suffix: files for suffix, files in kinds.items() if files}
    if len(present) != 1:
        raise DataError(f"{path}: contains both .npz and .npy files; keep one kind, with one sample per file")
    suffix, files = present.popitem()
    needed = required(inputs)
    if suffix == ".npy" and len(needed) != 1:
        names = ", ".join(sorted(_names(needed)))
        raise DataError(f"{path}: a .npy file has one array, but the model has inputs {names}; use .npz files")

    def read(picked: Picked) -> Iterator[Sample]:
        for index in range(len(files)) if picked is None else picked:
            yield _read_feed(files[index], f"{files[index]}, sample {index}", inputs)

    return Rows(path, len(files), read, random=True)


def _read_feed(file: Path, where: str, inputs: Sequence[InputSpec]) -> Sample:
    """Read a file with one sample."""
    try:
        loaded = np.load(file, allow_pickle=False)
        if file.suffix == ".npy":
            return Sample({required(inputs)[0].name: loaded}, None, where)
        with loaded:
            feed = {name: loaded[name] for name in loaded.files}
    except UNREADABLE as error:
        raise DataError(f"{where}: cannot be read (pickled objects are never read): {error}") from error
    label = feed.pop(LABELS, None) if LABELS not in _names(inputs) else None
    check_names(feed, inputs, where)
    if label is not None and label.shape == (1,):
        label = label[0]
    return Sample(feed, as_label(label, where), where)

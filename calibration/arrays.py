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
from .session import Array, InputSpec

LABELS = "labels"
"""The array that is not fed."""
UNREADABLE = (ValueError, OSError, EOFError, KeyError, struct.error, zipfile.BadZipFile, zlib.error)
"""What NumPy and zipfile raise for files that are damaged, of another kind, or hold pickles."""


@dataclass(frozen=True, slots=True)
class _Member:
    """An array inside a ``.npz`` file, and how it is cut into samples.

    Attributes:
        file: Its name in the archive.
        shape: Its shape.
        dtype: Its element type.
        fortran: Whether it is stored column by column, which cannot be cut as it is read.
        size: How many bytes its values have in the archive.
        start: Where its first value is in the archive; None when it is compressed.
        chunk: How many entries of the first axis are one sample; 0 when an entry is a whole feed.
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
        """How many samples it holds."""
        return self.shape[0] // (self.chunk or 1)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return (self.chunk, *self.shape[1:]) if self.chunk else self.shape[1:]


def npz_file(path: str, split: str | None, inputs: Sequence[InputSpec]) -> Rows:
    """Read the arrays of a ``.npz`` file, cut along their first axis.

    An array of the input's rank is cut into batches of the input's fixed batch length, or of 1. An array of
    one rank more holds one whole feed per entry. With `split`, the arrays are named ``split/input``.

    Raises:
        DataError: The file is no ``.npz`` file, or its arrays are not what the model wants.
    """
    description = path if split is None else f"{path}:{split}"
    with _open_zip(path) as archive:
        names = _npz_names(archive, path, split, inputs)
        members = {name: _npz_member(archive, path, file) for name, file in names.items()}
        labels = _load_whole(archive, path, members.pop(LABELS)) if LABELS in set(members) - _names(inputs) else None
    cut = {spec.name: _cut(members[spec.name], spec, description) for spec in inputs}
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
    """Return the file in the archive of each input, and of the labels when there are any."""
    files = {file.removesuffix(".npy"): file for file in archive.namelist()}
    known = _names(inputs) | {LABELS}
    for name in files:
        if not any(name == want or name.endswith(f"/{want}") for want in known):
            raise DataError(f"{path}: array {name!r} is for no input of the model{near(name, known)}")
    prefix = "" if split is None else f"{split}/"
    names = {name: files[prefix + name] for name in known if prefix + name in files}
    if not names and split is not None:
        splits = {name.rsplit(f"/{want}", 1)[0] for name in files for want in known if name.endswith(f"/{want}")}
        raise DataError(f"{path}: no arrays of a split named {split!r}{near(split, splits)}")
    for spec in inputs:
        if spec.name not in names:
            raise DataError(f"{path}: no array {prefix + spec.name!r} for the model's input{near(spec.name, files)}")
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
        raise DataError(f"{path}, array {file.removesuffix('.npy')!r}: holds pickled objects, which are never read")
    return _Member(file, shape, dtype, fortran, size, start)


def _stored_at(archive: zipfile.ZipFile, file: str) -> int | None:
    """Return where a file begins in its archive; None when it is compressed or encrypted.

    https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, section 4.3.7: a local header has 30 bytes, of which
    the last four are the lengths of the name and of the extra field that follow.
    """
    info = archive.getinfo(file)
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or archive.filename is None:
        return None
    with open(archive.filename, "rb") as stream:
        stream.seek(info.header_offset)
        name, extra = struct.unpack("<26x2H", stream.read(30))
    return info.header_offset + 30 + int(name) + int(extra)


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of the ``.npy`` format; the stream is at the first value then."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"version {version} of the .npy format")


def _cut(member: _Member, spec: InputSpec, where: str) -> _Member:
    """Say how an array is cut into samples of an input."""
    rank = len(spec.shape)
    if len(member.shape) == rank + 1:
        return member
    if len(member.shape) != rank or rank == 0:
        raise DataError(
            f"{where}, input {spec.name!r}: expected {spec}, got an array of shape {member.shape}; "
            f"give rank {rank} to be cut into batches, or rank {rank + 1} with one feed per entry"
        )
    batch = spec.shape[0]
    chunk = batch if isinstance(batch, int) else 1
    left = member.shape[0] % max(chunk, 1)
    if left:
        raise DataError(
            f"{where}, input {spec.name!r}: the model wants batches of {chunk}, and of {member.shape[0]} entries "
            f"{left} are left over; drop them or add {chunk - left}"
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
    """Read an array at once."""
    try:
        with archive.open(member.file) as stream:
            return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))
    except UNREADABLE as error:
        raise DataError(f"{path}, array {member.file.removesuffix('.npy')!r}: cannot be read: {error}") from error


def _npz_rows(archive: zipfile.ZipFile, path: str, member: _Member, picked: Picked) -> Iterator[Array]:
    """Yield the picked samples of an array, reading no more than one at a time.

    An archive's arrays cannot be memory-mapped, and ``numpy.load`` reads them whole; the stream of each is in
    the order of its first axis, which is all that is needed here.
    """
    positions = range(member.samples) if picked is None else picked
    if member.fortran:
        whole = _load_whole(archive, path, member).reshape(member.samples, *member.sample_shape)
        yield from (whole[index] for index in positions)
        return
    size = int(np.prod(member.sample_shape, dtype=np.int64)) * member.dtype.itemsize
    at = index = 0
    try:
        # all of it as a stream, which checks its sum; a part where it lies, without those before it
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
    """Open the values of an array as a stream that begins with the first."""
    if whole or member.start is None:
        with archive.open(member.file) as stream:
            _read_header(stream)
            yield stream
    else:
        with open(path, "rb") as values:
            values.seek(member.start)
            yield values


def array_folder(path: str, inputs: Sequence[InputSpec]) -> Rows:
    """Read a folder of ``.npz`` files, or for a model with one input of ``.npy`` files: one feed each, by name.

    Raises:
        DataError: The folder holds both kinds, or arrays for another model.
    """
    kinds = {suffix: sorted(Path(path).glob(f"*{suffix}")) for suffix in (".npz", ".npy")}
    found = {suffix: files for suffix, files in kinds.items() if files}
    if len(found) != 1:
        raise DataError(f"{path}: the folder holds both .npz and .npy files; it must hold one kind, one feed per file")
    suffix, files = found.popitem()
    if suffix == ".npy" and len(inputs) != 1:
        names = ", ".join(sorted(_names(inputs)))
        raise DataError(f"{path}: .npy files hold one array, and the model has inputs {names}; use .npz files")

    def read(picked: Picked) -> Iterator[Sample]:
        for index in range(len(files)) if picked is None else picked:
            yield _read_feed(files[index], f"{files[index]}, sample {index}", inputs)

    return Rows(path, len(files), read, random=True)


def _read_feed(file: Path, where: str, inputs: Sequence[InputSpec]) -> Sample:
    """Read a file that is one feed."""
    try:
        loaded = np.load(file, allow_pickle=False)
        if file.suffix == ".npy":
            return Sample({inputs[0].name: loaded}, None, where)
        with loaded:
            feed = {name: loaded[name] for name in loaded.files}
    except UNREADABLE as error:
        raise DataError(f"{where}: cannot be read (pickled objects never are): {error}") from error
    label = feed.pop(LABELS, None) if LABELS not in _names(inputs) else None
    check_names(feed, inputs, where)
    if label is not None and label.shape == (1,):
        label = label[0]
    return Sample(feed, as_label(label, where), where)

"""Stored arrays as data: one ``.npz`` file, or a folder of ``.npz`` or ``.npy`` files. Pickles are never read."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np

from ... import RequantError, near
from ...system.regular import open_regular, size_of, stamp_of
from ..model.session import Array, InputSpec, required
from .npy import Stored, check_ratio, member_of, open_archive, plain_start, read_whole, stored_array
from .objects import REASON, reason_of
from .samples import DataError, Picked, Rows, Sample, as_label, check_names, missing, nearest

SUFFIXES = frozenset((".npz", ".npy"))
LABELS = "labels"
"""The name of the array with the labels, which is not an input."""
PLAIN = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)
"""The errors of NumPy and zipfile whose messages need no name of the error."""


@dataclass(frozen=True, slots=True)
class _Member:
    """An array inside a ``.npz`` file, and how it is split into samples.

    Attributes:
        file: The name in the archive.
        stored: Its shape, type and sizes.
        start: The offset of the first value in the archive, in bytes; None for a compressed array.
        chunk: How many entries of the first axis form one sample; 0 if each entry is a sample without a batch axis of
            its own.
    """

    file: str
    stored: Stored
    start: int | None = None
    chunk: int = 0

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.stored.shape[0] // (self.chunk or 1)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return (self.chunk, *self.stored.shape[1:]) if self.chunk else self.stored.shape[1:]

    @property
    def sample_size(self) -> int:
        """The size of one sample in bytes."""
        return math.prod(self.sample_shape) * self.stored.dtype.itemsize

    @property
    def name(self) -> str:
        """The name of the array."""
        return self.file.removesuffix(".npy")

    def check_room(self, limit: int) -> None:
        """Check that what is read at once can be held; see `Stored.check_room`."""
        self.stored.check_room(self.stored.size if self.stored.fortran else self.sample_size, limit)


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Turn any error of reading an array into one line."""
    try:
        yield
    except RequantError:
        raise
    except Exception as error:  # zipfile, zlib and NumPy raise errors of any type for damaged files
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception) -> DataError:
    """Return the error for an array that cannot be read."""
    reason = str(error) if isinstance(error, PLAIN) and str(error) else reason_of(error)
    return DataError(f"{where}: cannot be read: {reason[:REASON]}")


def npz_file(path: str, split: str | None, inputs: Sequence[InputSpec], limit: int) -> Rows:
    """Read the arrays of a ``.npz`` file, split along their first axis.

    An array of the input's rank is split into batches of the input's fixed batch length, or of 1. In an array with one
    more axis each entry is one whole sample. With `split`, the arrays are named ``split/input``. One sample and the
    labels may each have `limit` bytes.

    Raises:
        DataError: The file is not a ``.npz`` file, or its arrays do not fit the model or the limit.
    """
    description = path if split is None else f"{path}:{split}"
    with open_archive(path) as archive:
        stamp = _stamp(archive)
        names = _npz_names(archive, path, split, inputs)
        members = {name: _npz_member(archive, path, file) for name, file in names.items()}
        labels = members.pop(LABELS) if LABELS in set(members) - _names(inputs) else None
        answers = None if labels is None else _load_whole(archive, path, labels, limit)
    cut = {spec.name: _cut(members[spec.name], spec, description) for spec in inputs if spec.name in members}
    length = _length(cut, description)
    _check_sizes(cut.values(), path, limit)
    if answers is not None:
        answers = _label_rows(answers, length, cut, description)

    def read(picked: Picked) -> Iterator[Sample]:
        with ExitStack() as stack:
            archive = stack.enter_context(open_archive(path))
            if _stamp(archive) != stamp:
                raise DataError(f"{path}: has changed since it was opened")
            arrays = [_npz_rows(archive, path, member, picked, limit) for member in cut.values()]
            for index in range(length) if picked is None else picked:
                where = f"{description}, sample {index}"
                feed = {name: next(rows) for name, rows in zip(cut, arrays, strict=True)}
                yield Sample(feed, None if answers is None else as_label(answers[index], where), where)

    random = all(member.start is not None and not member.stored.fortran for member in cut.values())
    return Rows(description, length, read, random)


def _check_sizes(members: Collection[_Member], path: str, limit: int) -> None:
    """Check that a sample of each array can be held, and that all arrays together are no trap.

    Together, because an array alone may be right: a mask of ones is 1000 times smaller in the file.
    """
    for member in members:
        with _reading(f"{path}, array {member.name!r}"):
            member.check_room(limit)
    stored = [member.stored for member in members]
    with _reading(path):
        check_ratio(
            sum(each.size for each in stored),
            sum(each.size if each.compressed is None else each.compressed for each in stored),
        )


def _stamp(archive: zipfile.ZipFile) -> object:
    """Return what tells whether an open archive is still the same."""
    assert archive.fp is not None
    return stamp_of(archive.fp)


def _length(cut: Mapping[str, _Member], where: str) -> int:
    """Return the number of samples.

    Raises:
        DataError: The arrays differ in it, or there are none.
    """
    lengths = {name: member.samples for name, member in cut.items()}
    length = min(lengths.values(), default=0)
    if len(set(lengths.values())) > 1:
        hint = "a folder of .npz files is read with one sample in each file"
        raise DataError(f"{where}: the inputs have different numbers of samples: {lengths}; {hint}")
    if length == 0:
        raise DataError(f"{where}: holds no samples")
    return length


def _names(inputs: Sequence[InputSpec]) -> set[str]:
    """Return the inputs' names."""
    return {spec.name for spec in inputs}


def _npz_names(archive: zipfile.ZipFile, path: str, split: str | None, inputs: Sequence[InputSpec]) -> dict[str, str]:
    """Return the archive's file for each input, and for the labels if there are any."""
    files = _array_files(archive, path)
    known = _names(inputs) | {LABELS}
    for name in files:
        if not any(name == want or name.endswith(f"/{want}") for want in known):
            raise DataError(f"{path}: array {name!r} is not an input of the model{nearest(name, inputs)}")
    prefix = "" if split is None else f"{split}/"
    names = {name: files[prefix + name] for name in known if prefix + name in files}
    if not names and split is not None:
        splits = {name.rsplit(f"/{want}", 1)[0] for name in files for want in known if name.endswith(f"/{want}")}
        raise DataError(f"{path}: no split named {split!r}{near(split, splits)}")
    for spec in required(inputs):
        if spec.name not in names:
            given = [name for name in files if name.startswith(prefix)]
            hint = missing(spec, given, [prefix + each for each in names], inputs, prefix)
            raise DataError(f"{path}: no array named {prefix + spec.name!r} for the input{hint}")
    return names


def _array_files(archive: zipfile.ZipFile, path: str) -> dict[str, str]:
    """Return the files of an archive by the names of their arrays.

    Raises:
        DataError: Two files have one name.
    """
    files: dict[str, str] = {}
    for file in archive.namelist():
        name = file.removesuffix(".npy")
        if name in files:
            raise DataError(f"{path}: two arrays are named {name!r}")
        files[name] = file
    return files


def _npz_member(archive: zipfile.ZipFile, path: str, file: str) -> _Member:
    """Read the header of an array."""
    with _reading(f"{path}, array {file.removesuffix('.npy')!r}"):
        stored = member_of(archive, file)
        return _Member(file, stored, plain_start(archive, file, stored))


def _cut(member: _Member, spec: InputSpec, where: str) -> _Member:
    """Return how an array is split into samples of an input."""
    rank, shape = len(spec.shape), member.stored.shape
    if len(shape) == rank + 1:
        return member
    if rank == 0:  # the runtime tells no difference between the two
        raise DataError(
            f"{where}, input {spec.name!r}: the model takes one number, or does not say the shape of this input; got "
            f"an array of shape {shape}; give {spec.name!r} a shape in the model, or rank 1 with one number per sample"
        )
    if len(shape) != rank:
        raise DataError(
            f"{where}, input {spec.name!r}: expected {spec}, got an array of shape {shape}; "
            f"give rank {rank}, which is split into batches, or rank {rank + 1} with one sample per entry"
        )
    batch = spec.shape[0]
    chunk = batch if isinstance(batch, int) else 1
    left = shape[0] % max(chunk, 1)
    if left:
        raise DataError(
            f"{where}, input {spec.name!r}: {shape[0]} entries do not divide into the model's fixed batch of "
            f"{chunk}; remove {left} or add {chunk - left}"
        )
    return replace(member, chunk=chunk)


def _label_rows(labels: Array, length: int, cut: Mapping[str, _Member], where: str) -> Array:
    """Return the labels with one row per sample: they are one per sample, or one per entry of a batch."""
    chunk = max((member.chunk for member in cut.values()), default=0) or 1
    if labels.ndim == 0 or len(labels) not in (length, length * chunk):
        raise DataError(f"{where}, array {LABELS!r}: expected {length * chunk} labels, got shape {labels.shape}")
    as_label(labels, where)  # the type is wrong now, not when the first sample is read
    return labels if len(labels) == length else labels.reshape(length, chunk, *labels.shape[1:])


def _load_whole(archive: zipfile.ZipFile, path: str, member: _Member, limit: int) -> Array:
    """Read a whole array."""
    with _reading(f"{path}, array {member.name!r}"), _values_of(archive, path, member, whole=True) as stream:
        return read_whole(stream, member.stored, limit)


def _npz_rows(archive: zipfile.ZipFile, path: str, member: _Member, picked: Picked, limit: int) -> Iterator[Array]:
    """Yield the picked samples of an array, and read only one at a time.

    NumPy cannot memory-map an array in an archive, and ``numpy.load`` reads it whole. The stream of an array is in the
    order of its first axis.
    """
    positions = range(member.samples) if picked is None else picked
    if member.stored.fortran:
        whole = _load_whole(archive, path, member, limit).reshape(member.samples, *member.sample_shape)
        yield from (whole[index] for index in positions)
        return
    size, shape, dtype = member.sample_size, member.sample_shape, member.stored.dtype
    at = index = 0
    try:
        # the stream of a whole array checks the CRC; for some samples, seek in the file and skip the others
        with _values_of(archive, path, member, whole=picked is None) as stream:
            for index in positions:
                stream.seek((index - at) * size, os.SEEK_CUR)
                data = stream.read(size)
                if len(data) < size:
                    raise EOFError("the array ends early")
                yield np.ndarray(shape, dtype, data)
                at = index + 1
    except RequantError:
        raise
    except Exception as error:  # as in _reading, which would cost more for each sample
        raise _unreadable(f"{path}, sample {index}, array {member.name!r}", error) from error


@contextmanager
def _values_of(archive: zipfile.ZipFile, path: str, member: _Member, *, whole: bool) -> Iterator[IO[bytes]]:
    """Open the values of an array as a stream, at the first value."""
    if whole or member.start is None:
        with archive.open(member.file) as stream:
            stream.read(member.stored.start)
            yield stream
    else:
        with open_regular(path) as values:
            values.seek(member.start)
            yield values


def array_folder(path: str, files: Sequence[str], inputs: Sequence[InputSpec], limit: int) -> Rows:
    """Read a folder of ``.npz`` files or, for a model with one input, of ``.npy`` files: one sample each, by name.

    Args:
        path: The folder.
        files: Its files with one of `SUFFIXES`; at least one.
        inputs: The inputs of the model.
        limit: The bytes that an array may have.

    Raises:
        DataError: The folder contains both kinds, or arrays for another model.
    """
    suffix, *others = {Path(file).suffix.lower() for file in files}
    if others:
        raise DataError(f"{path}: contains both .npz and .npy files; keep one kind, with one sample per file")
    needed = required(inputs)
    if suffix == ".npy" and len(needed) != 1:
        names = ", ".join(sorted(_names(needed)))
        raise DataError(f"{path}: a .npy file has one array, but the model has inputs {names}; use .npz files")

    def read(picked: Picked) -> Iterator[Sample]:
        for index in range(len(files)) if picked is None else picked:
            file, where = files[index], f"{files[index]}, sample {index}"
            if suffix == ".npy":
                yield Sample({needed[0].name: _read_npy(file, where, limit)}, None, where)
            else:
                yield _read_feed(file, where, inputs, limit)

    return Rows(path, len(files), read, random=True)


def _read_npy(file: str, where: str, limit: int) -> Array:
    """Read a file with one array."""
    with _reading(where), open_regular(file) as stream:
        return read_whole(stream, stored_array(stream, size_of(stream)), limit)


def _read_feed(file: str, where: str, inputs: Sequence[InputSpec], limit: int) -> Sample:
    """Read a file with the arrays of one sample."""
    with _reading(where), open_archive(file) as archive:
        files = _array_files(archive, file)
        check_names({name: None for name in files if name != LABELS or LABELS in _names(inputs)}, inputs, where)
        members = {name: _npz_member(archive, file, each) for name, each in files.items()}
        feed = {name: _load_whole(archive, file, member, limit) for name, member in members.items()}
    label = feed.pop(LABELS, None) if LABELS not in _names(inputs) else None
    if label is not None and label.shape == (1,):
        label = label[0]
    return Sample(feed, as_label(label, where), where)

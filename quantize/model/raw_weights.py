"""Read and write the large weights of an ONNX file without a copy in memory.

An ONNX file is one protobuf message: https://protobuf.dev/programming-guides/encoding. Its weights are the field
``raw_data`` of the tensors in ``graph.initializer``. The rest is small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, overload

GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9  # numbers of fields of ModelProto, GraphProto, TensorProto
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # how a field is encoded


WINDOW = 2**16  # bytes that `FileBytes` reads at once for single bytes


class Buffer(Protocol):
    """Bytes, in memory or in a file."""

    def __len__(self) -> int:
        """Return their number."""
        ...

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> bytes: ...


class FileBytes:
    """The bytes of a file as a buffer that reads what it is asked for. A mapped file that shrinks would kill us."""

    def __init__(self, path: Path) -> None:
        """Open a file; raises OSError."""
        self._file = path.open("rb", buffering=0)
        self._length = path.stat().st_size
        self._window, self._start = b"", 0

    def __enter__(self) -> Self:
        """Return the buffer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the file."""
        self._file.close()

    def __len__(self) -> int:
        """Return the length of the file when it was opened."""
        return self._length

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> bytes: ...
    def __getitem__(self, place: int | slice) -> int | bytes:
        """Return a byte, or the bytes of a slice.

        Raises:
            MalformedError: The file became shorter.
        """
        if isinstance(place, slice):
            start, stop, _ = place.indices(self._length)
            return self._read(start, max(0, stop - start))
        if not 0 <= place - self._start < len(self._window):
            self._start = place
            self._window = self._read(place, min(WINDOW, self._length - place))
        return self._window[place - self._start]

    def _read(self, start: int, count: int) -> bytes:
        self._file.seek(start)
        parts: list[bytes] = []
        while count and (part := self._file.read(count)):
            parts.append(part)
            count -= len(part)
        if count:
            raise MalformedError(f"the file ends {count} bytes too early")
        return b"".join(parts)


class MalformedError(ValueError):
    """Bytes that are no message, or a message with an unusual encoding."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message.

    Attributes:
        number: Its number.
        kind: Its encoding.
        start: Offset of its tag.
        body: Offset of its value.
        end: Offset after its last byte.
    """

    number: int
    kind: int
    start: int
    body: int
    end: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Weights that were cut out of a message.

    Attributes:
        index: The index of their initializer in the graph.
        offset: Their offset in the file.
        length: Their length in bytes.
    """

    index: int
    offset: int
    length: int


def fields(data: Buffer, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message between two offsets; values of strings and messages are not read.

    Raises:
        MalformedError: The bytes are no message.
    """
    at = start
    while at < end:
        tag, body = _varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        if kind == BYTES:
            length, body = _varint(data, body, end)
            after = body + length
        elif kind == VARINT:
            _, after = _varint(data, body, end)
        elif kind in (FIXED64, FIXED32):
            after = body + (8 if kind == FIXED64 else 4)
        else:
            raise MalformedError(f"field {number} at {at} has an encoding that ONNX does not use")
        if after > end or number == 0:
            raise MalformedError(f"field {number} at {at} is longer than its message")
        yield Field(number, kind, at, body, after)
        at = after


def _varint(data: Buffer, at: int, end: int) -> tuple[int, int]:
    """Read an integer with seven bits per byte, the lowest first; return it and the offset after it."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise MalformedError(f"an integer at {at} does not end")


def _written(value: int) -> bytes:
    """Return an integer as bytes, with seven bits per byte."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def without_weights(data: Buffer, least: int) -> tuple[bytes, list[Cut]]:
    """Return a model without the weights of at least `least` bytes, and the positions of these weights.

    Raises:
        MalformedError: The bytes are no model, or a model with several graphs, which readers merge.
    """
    graphs = [field for field in fields(data, 0, len(data)) if field.number == GRAPH]
    if len(graphs) != 1 or graphs[0].kind != BYTES:
        raise MalformedError(f"{len(graphs)} graphs")
    (graph,) = graphs
    parts: list[bytes] = []
    cuts: list[Cut] = []
    count = itertools.count()
    at = graph.body
    for field in fields(data, graph.body, graph.end):
        if field.number != INITIALIZER or field.kind != BYTES:
            continue
        index = next(count)
        if field.end - field.body < least:
            continue
        raw = [part for part in fields(data, field.body, field.end) if part.number == RAW_DATA]
        if len(raw) == 1 and raw[0].end - raw[0].body >= least:
            rest = data[field.body : raw[0].start] + data[raw[0].end : field.end]
            parts += [data[at : field.start], _message(INITIALIZER, len(rest)), rest]
            cuts.append(Cut(index, raw[0].body, raw[0].end - raw[0].body))
            at = field.end
    parts.append(data[at : graph.end])
    inner = b"".join(parts)
    whole = data[: graph.start] + _message(GRAPH, len(inner)) + inner + data[graph.end : len(data)]
    return whole, cuts


def _message(number: int, length: int) -> bytes:
    """Return the tag and the length before the bytes of a string or a message."""
    return _written(number << 3 | BYTES) + _written(length)


def with_weights(data: bytes, lengths: Sequence[int | None]) -> Iterator[bytes | int]:
    """Yield the parts of a model, with places for weights that its bytes lack.

    Args:
        data: The model; an initializer without weights has no data at all.
        lengths: The bytes of weights that each initializer lacks; None if it lacks none.

    Yields:
        Bytes to write, and between them the index of the initializer whose weights to write there.
    """
    (graph,) = (field for field in fields(data, 0, len(data)) if field.number == GRAPH)
    initializers = [field for field in fields(data, graph.body, graph.end) if field.number == INITIALIZER]
    heads: list[bytes | None] = []
    grown = graph.end - graph.body
    for field, length in zip(initializers, lengths, strict=True):
        if length is None:
            heads.append(None)
            continue
        raw = _message(RAW_DATA, length)
        size = field.end - field.body + len(raw) + length
        heads.append(raw)
        grown += len(_message(INITIALIZER, size)) + size - (field.end - field.start)
    yield data[: graph.start] + _message(GRAPH, grown)
    at = graph.body
    for index, (field, length, head) in enumerate(zip(initializers, lengths, heads, strict=True)):
        if length is None or head is None:
            continue
        place = next((p.start for p in fields(data, field.body, field.end) if p.number > RAW_DATA), field.end)
        size = field.end - field.body + len(head) + length
        yield data[at : field.start] + _message(INITIALIZER, size) + data[field.body : place] + head
        yield index
        yield data[place : field.end]
        at = field.end
    yield data[at:]

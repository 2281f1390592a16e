"""Text files as data: ``.csv``, ``.tsv`` and ``.jsonl``. A tokenizer converts each record."""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from ... import RequantError, near
from ...system.regular import Stamp, check_regular, open_regular, stamp_of
from ..model.session import Array, InputSpec
from .media import numbered
from .objects import LABELS, Named, failing_at, load_named, on_path
from .samples import DataError, Picked, Rows, Sample, as_array, as_label, with_batch_axis
from .settings import Key, parse_settings, text_of

SUFFIXES = frozenset((".csv", ".tsv", ".jsonl"))
"""The suffixes of text files."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""The separator of the cells of a record; ``.jsonl`` files have none."""
ROW = "*"
"""The column name that stands for the whole record."""
BLANK = object()
"""The value of an empty line in a ``.jsonl`` file."""
LONGEST = 2**23
"""The most bytes of a record. JSON values take up to 30 times the memory of their text."""

KEYS: Mapping[str, Key] = {
    "column": text_of("a column, several separated by commas, or * for the whole record as a dict"),
    "label": text_of("a column"),
}
"""The settings of `text_file`."""

Record = Mapping[str, Any]
"""Values by column: texts in a ``.csv`` file, JSON values in a ``.jsonl`` file."""


@dataclass(frozen=True, slots=True)
class _Index:
    """The positions of the records of a file.

    Attributes:
        path: The file.
        columns: The columns of a ``.csv`` file; empty for a ``.jsonl`` file, where each record has its own.
        offsets: The first byte of each record.
        lines: The line of each record, counted from 1.
        stamp: What tells whether the file is still the same.
    """

    path: str
    columns: tuple[str, ...]
    offsets: array[int]
    lines: array[int]
    stamp: Stamp

    def where(self, index: int) -> str:
        """Return the place of a record, for messages."""
        return f"{self.path}, line {self.lines[index]}, sample {index}"


def text_file(
    path: str, preprocess: str | None, tokenizer: str | Callable[..., Any] | None, inputs: Sequence[InputSpec]
) -> Rows:
    """Read a text file, one sample per record.

    Args:
        path: A ``.csv`` or ``.tsv`` file whose first line names the columns, or a ``.jsonl`` file with one object per
            line; UTF-8.
        preprocess: Settings of `KEYS`.
        tokenizer: A callable that converts the text of a column to a dict of arrays, or the name of one.
        inputs: The model's inputs.

    Raises:
        RequantError: The file, a setting or the tokenizer is invalid.
    """
    check_regular(path)
    if tokenizer is None:
        raise DataError(
            f"{path}: a text file needs a tokenizer, which converts a text to a dict of arrays: "
            "--tokenizer FILE.py:NAME or PACKAGE.MODULE:NAME (in Python: DataSpec(tokenizer=...))"
        )
    converter = load_named(tokenizer, "tokenizer") if isinstance(tokenizer, str) else Named(tokenizer, _name(tokenizer))
    if not callable(converter.value):
        raise DataError(
            f"{converter.name}: a {type(converter.value).__name__} is no tokenizer; it must be callable with a text"
        )
    try:
        settings = parse_settings(preprocess, KEYS)
    except RequantError as error:
        raise DataError(f"{path}: {error}") from error
    index, first = _indexed(path)
    columns = _text_columns(settings.get("column"), first, settings.get("label"), index.where(0))
    label = _label_column(settings.get("label"), first, columns, index.where(0))
    labels = None if label is None else _labels(index, label)

    def read(picked: Picked) -> Iterator[Sample]:
        positions = range(len(index.offsets)) if picked is None else picked
        for position, record in zip(positions, _records(index, positions), strict=True):
            where = index.where(position)
            feed = _tokenized(converter, _arguments(record, columns, where), where)
            answer = None if labels is None else labels[position]
            yield with_batch_axis(Sample(feed, answer, where), inputs)

    return Rows(path, len(index.offsets), read, random=True, foreign=True)


def _name(tokenizer: object) -> str:
    """Return a tokenizer's name in messages."""
    return str(getattr(tokenizer, "__qualname__", None) or f"a {type(tokenizer).__name__}")


# ---------------------------------------------------------------------------------------------------- records


def _indexed(path: str) -> tuple[_Index, Record]:
    """Read a file once. Return the positions of its records and the first record.

    Raises:
        DataError: The file cannot be read, or has no records.
    """
    offsets, lines = array("Q"), array("Q")
    columns: tuple[str, ...] = ()
    first: Record | None = None
    try:
        with open_regular(path) as stream:
            stamp = stamp_of(stream)
            for offset, line, values in _scan(stream, path):
                where = f"{path}, line {line}"
                if _delimiter(path) is not None and not columns:
                    columns = _header(values, where)
                    continue
                record = _record(values, columns, where)
                first = record if first is None else first
                offsets.append(offset)
                lines.append(line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if first is None:
        raise DataError(f"{path}: holds no samples")
    return _Index(path, columns, offsets, lines, stamp), first


def _delimiter(path: str) -> str | None:
    """Return the separator of the cells of a record; None for a ``.jsonl`` file."""
    return DELIMITERS.get(Path(path).suffix.lower())


def _scan(stream: IO[bytes], path: str, line: int = 0) -> Iterator[tuple[int, int, Any]]:
    """Yield the first byte, the line, and the cells or JSON value of each record from the stream's position.

    Args:
        stream: The file.
        path: Its path.
        line: The number of lines before the position.
    """
    offset, after = stream.tell(), line
    start, place = offset, after + 1

    def texts() -> Iterator[str]:
        nonlocal offset, after
        for raw in iter(partial(stream.readline, LONGEST + 1), b""):
            offset += len(raw)
            after += 1
            if offset - start > LONGEST:
                raise DataError(f"{path}, line {place}: the record has more than {LONGEST} bytes")
            try:
                yield raw.decode("utf-8-sig" if after == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {after}: not UTF-8: {error.reason}") from error

    delimiter = _delimiter(path)
    read = map(_json, texts()) if delimiter is None else csv.reader(texts(), delimiter=delimiter, strict=True)
    while True:
        start, place = offset, after + 1
        try:
            values = next(read)
        except StopIteration:
            return
        except (ValueError, RecursionError, csv.Error) as error:
            raise DataError(f"{path}, line {place}: cannot be read: {error}") from error
        if values is not BLANK and (delimiter is None or values):
            yield start, place, values


def _json(line: str) -> Any:
    """Parse a line of JSON."""
    return json.loads(line) if line.strip() else BLANK


def _header(cells: Sequence[str], where: str) -> tuple[str, ...]:
    """Read the names of columns."""
    names = tuple(cell.strip() for cell in cells)
    if "" in names or len(set(names)) < len(names):
        raise DataError(f"{where}: the first line must be the names of the columns, each once; got {','.join(names)!r}")
    return names


def _record(values: Any, columns: tuple[str, ...], where: str) -> Record:
    """Return a record as values by column."""
    if isinstance(values, dict):
        return values
    if not columns:
        raise DataError(f"{where}: expected a JSON object, got {type(values).__name__}")
    if len(values) != len(columns):
        raise DataError(
            f"{where}: has {len(values)} cells, but the file has {len(columns)} columns: {', '.join(columns)}"
        )
    return dict(zip(columns, values, strict=True))


def _records(index: _Index, positions: Sequence[int]) -> Iterator[Record]:
    """Yield the records at some positions."""
    try:
        with open_regular(index.path) as stream:
            if stamp_of(stream) != index.stamp:
                raise DataError(f"{index.path}: has changed since it was opened")
            for position in positions:
                stream.seek(index.offsets[position])
                line = index.lines[position]
                entry = next(_scan(stream, index.path, line - 1), None)
                if entry is None:
                    raise DataError(f"{index.where(position)}: the file has changed since it was opened")
                yield _record(entry[2], index.columns, index.where(position))
    except OSError as error:
        raise DataError(f"{index.path}: cannot be read: {error}") from error


# ---------------------------------------------------------------------------------------------------- columns


def _text_columns(setting: str | None, first: Record, label: str | None, where: str) -> tuple[str, ...] | None:
    """Return the columns whose texts are tokenized; None for the whole record."""
    if setting == ROW:
        return None
    if setting is not None:
        names = (setting,) if setting in first else tuple(name.strip() for name in setting.split(","))
        for name in names:
            _value(first, name, where)
        return names
    for name, value in first.items():
        if isinstance(value, str) and not _is_number(value) and name != label and name.lower() not in LABELS:
            return (name,)
    raise DataError(f"{where}: no column holds a text; set column=NAME in preprocess, one of {', '.join(first)}")


def _is_number(text: str) -> bool:
    """Return whether a cell holds a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _label_column(setting: str | None, first: Record, columns: tuple[str, ...] | None, where: str) -> str | None:
    """Return the column of the labels: the setting, or ``label`` or ``labels`` if there is such a column."""
    if setting is not None:
        _value(first, setting, where)
        return setting
    return next((name for name in first if name.lower() in LABELS and name not in (columns or ())), None)


def _value(record: Record, name: str, where: str) -> Any:
    """Return the value of a column."""
    if name not in record:
        raise DataError(f"{where}: no column {name!r}{near(name, record)}")
    return record[name]


def _labels(index: _Index, column: str) -> list[Array | int | None]:
    """Return the label of every record. Texts become class numbers; other JSON values stay as they are."""
    values = []
    for position, record in enumerate(_records(index, range(len(index.offsets)))):
        values.append(_value(record, column, index.where(position)))
        if values[-1] == "" or isinstance(values[-1], str) != isinstance(values[0], str):
            raise DataError(f"{index.where(position)}: column {column!r} is {values[-1]!r}; expected a label")
    if isinstance(values[0], str):
        return list(numbered([value.strip() for value in values]))
    return [as_label(value, index.where(position)) for position, value in enumerate(values)]


# ---------------------------------------------------------------------------------------------------- tokens


def _arguments(record: Record, columns: tuple[str, ...] | None, where: str) -> tuple[Any, ...]:
    """Return the arguments of the tokenizer."""
    if columns is None:
        return (dict(record),)
    values = tuple(_value(record, name, where) for name in columns)
    for name, value in zip(columns, values, strict=True):
        if not isinstance(value, str):
            raise DataError(f"{where}: column {name!r} must hold a text, not {type(value).__name__}")
    return values


def _tokenized(tokenizer: Named, arguments: tuple[Any, ...], where: str) -> dict[str, Array]:
    """Call the tokenizer for one record."""
    with failing_at(f"{where}: tokenizer {tokenizer.name}"), on_path(tokenizer.folder):
        arrays = tokenizer.value(*arguments)
    if not isinstance(arrays, Mapping):
        raise DataError(
            f"{where}: tokenizer {tokenizer.name} must return a dict of arrays, not {type(arrays).__name__}"
        )
    return {str(name): as_array(value, f"{where}, input {name!r}") for name, value in arrays.items()}

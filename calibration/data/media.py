"""Folders of media files, one sample per file: the files, their order and their labels."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path, PurePosixPath

from ... import near
from ...system.numbers import whole_number
from ...system.regular import check_regular, open_regular, size_of
from ..model.session import Array, InputSpec, required
from .samples import DataError, Picked, Rows, Sample, in_batches

HEADS = ("file", "label")
"""The names of the columns in a table of labels; the line with the names may be left out."""
DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": " "}
LARGEST = 2**27
"""The most bytes of a table of labels, which is held in memory."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the user says about a folder of media.

    Attributes:
        preprocess: The settings of the kind of media; None for none.
        labels: The path of a table of files and labels; None for the names of the sub-folders.
        limit: The most bytes that one sample may need.
    """

    preprocess: str | None
    labels: str | None
    limit: int


def files_below(folder: str, suffixes: Collection[str], *, deep: bool = True) -> list[str]:
    """Return the sorted paths of the files with these suffixes in a folder and, if `deep`, below it.

    Hidden files and folders are ignored.

    Raises:
        DataError: Something with such a name is no file.
    """
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if deep and not name.startswith(".")]
        for name in names:
            if os.path.splitext(name)[1].lower() in suffixes and not name.startswith("."):
                paths.append(os.path.join(parent, name))
    for path in paths:
        check_regular(path)
    return sorted(paths, key=lambda path: Path(path).parts)


def only_input(folder: str, inputs: Sequence[InputSpec], noun: str) -> InputSpec:
    """Return the only input that data must give.

    Raises:
        DataError: The model has another number of inputs.
    """
    needed = required(inputs)
    if len(needed) != 1:
        names = ", ".join(repr(spec.name) for spec in needed)
        raise DataError(
            f"{folder}: each file is {noun}, but the model has {len(needed)} inputs: {names}; "
            "give FILE.py:NAME, a function that yields a dict of arrays for each sample"
        )
    return needed[0]


def media_rows(
    description: str,
    files: Sequence[str],
    labels: Sequence[int | None],
    spec: InputSpec,
    decode: Callable[[str, str], Array],
    *,
    batched: bool,
) -> Rows:
    """Return a folder's files as samples.

    Args:
        description: The data, in words.
        files: The paths of the files.
        labels: The label of each file.
        spec: The model's input.
        decode: Returns the array of a file, from its path and its place for messages.
        batched: Whether the input has a batch axis.

    Raises:
        DataError: The number of files is not a multiple of the input's fixed batch.
    """

    def read(picked: Picked) -> Iterator[Sample]:
        for index in range(len(files)) if picked is None else picked:
            where = f"{files[index]}, sample {index}"
            yield Sample({spec.name: decode(files[index], where)}, labels[index], where)

    rows = Rows(description, len(files), read, random=True)
    return in_batches(rows, spec) if batched else rows


def media_labels(folder: str, files: Sequence[str], table: str | None) -> list[int | None]:
    """Return the class of each file.

    A table, if given, holds the classes. Otherwise the sub-folders are the classes: if all names are numbers, these
    numbers; else the sub-folders are numbered in the order of their names. Files have no labels if there are no
    sub-folders, or only one and its name is not a number.

    Args:
        folder: The folder of the files.
        files: The paths of the files.
        table: The path of a table of files and labels, or None.

    Raises:
        DataError: A file has no label, or a sub-folder has no files.
    """
    relative = [Path(file).relative_to(folder).as_posix() for file in files]
    if table is not None:
        return _table_labels(relative, Path(folder), table)
    above = [name.split("/")[0] if "/" in name else None for name in relative]
    names = sorted({name for name in above if name is not None})
    if not names or (len(names) == 1 and None not in above and whole_number(names[0]) is None):
        return [None] * len(files)
    if None in above:
        loose = files[above.index(None)]
        raise DataError(
            f"{loose}: not in a sub-folder, but sub-folders are the classes; move the file into a sub-folder, "
            "or give labels, a table of files and labels"
        )
    for entry in sorted(Path(folder).iterdir()):
        if entry.is_dir() and not entry.name.startswith(".") and entry.name not in names:
            raise DataError(f"{entry}: sub-folders are the classes, but this one has no such files; remove it")
    classes = dict(zip(names, numbered(names), strict=True))
    return [classes[str(name)] for name in above]


def numbered(names: Collection[str]) -> list[int]:
    """Return the class of each name: the number in the name if all names are numbers, else its sorted position."""
    classes = [number for number in map(whole_number, names) if number is not None]
    if len(classes) == len(names):
        return classes
    places = {name: place for place, name in enumerate(sorted(set(names)))}
    return [places[name] for name in names]


def _table_labels(relative: Sequence[str], folder: Path, table: str) -> list[int | None]:
    """Return the class of each file from a table."""
    known = _read_table(table)
    count: dict[str, int] = {}
    for name in relative:
        count[PurePosixPath(name).name] = count.get(PurePosixPath(name).name, 0) + 1
    names = []
    for file in relative:
        base = PurePosixPath(file).name
        keys = [key for key in (file, f"{folder.resolve().name}/{file}", base) if key in known]
        if not keys:
            raise DataError(f"{table}: no label for {file}{near(file, known)}")
        if keys[0] == base != file and count[base] > 1:
            raise DataError(f"{table}: {base!r} is the name of {count[base]} files; write the path below {folder}")
        names.append(known[keys[0]])
    # the whole table defines the numbers of classes, so they do not depend on which files are present
    classes = dict(zip(known.values(), numbered(list(known.values())), strict=True))
    return [classes[name] for name in names]


def _read_table(table: str) -> dict[str, str]:
    """Read a table of labels: the columns ``file`` and ``label``, or the first two if no line names the columns."""
    path = Path(table)
    if path.suffix.lower() not in DELIMITERS:
        raise DataError(f"{table}: labels must be a {', '.join(DELIMITERS)} table of files and labels")
    known: dict[str, str] = {}
    columns = (0, 1)
    try:
        with open_regular(path) as raw, TextIOWrapper(raw, encoding="utf-8-sig", newline="") as stream:
            if size_of(raw) > LARGEST:
                raise DataError(f"{table}: a table of labels has at most {LARGEST} bytes, not {size_of(raw)}")
            reader = csv.reader(stream, delimiter=DELIMITERS[path.suffix.lower()], skipinitialspace=True, strict=True)
            for row in reader:
                cells = [cell.strip() for cell in row]
                heads = [cell.lower() for cell in cells]
                where = f"{table}, line {reader.line_num}"
                if not known and set(HEADS) <= set(heads):
                    columns = (heads.index("file"), heads.index("label"))
                elif any(cells):
                    _enter(known, cells, columns, where)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table}: cannot be read as a table of files and labels: {error}") from error
    if not known:
        raise DataError(f"{table}: holds no labels")
    return known


def _enter(known: dict[str, str], cells: Sequence[str], columns: tuple[int, int], where: str) -> None:
    """Add one line of a table."""
    if len(cells) <= max(columns) or not all(cells[column] for column in columns):
        raise DataError(f"{where}: expected a file and its label, got {','.join(cells)!r}")
    file, label = (cells[column] for column in columns)
    file = PurePosixPath(file.replace("\\", "/")).as_posix()
    if known.setdefault(file, label) != label:
        raise DataError(f"{where}: {file} has label {known[file]!r} above and {label!r} here")

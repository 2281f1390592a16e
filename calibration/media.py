"""Folders of media files, one sample per file: which files, in which order, with which labels."""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from .. import near
from .samples import DataError
from .session import InputSpec

HEADS = ("file", "label")
"""The columns of a file of labels, where its first line names columns."""
DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": " "}


def files_below(folder: str, suffixes: Collection[str], *, deep: bool = True) -> list[str]:
    """Return the sorted paths of the files with these suffixes in a folder, and below it; hidden ones are left out."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if deep and not name.startswith(".")]
        for name in names:
            if os.path.splitext(name)[1].lower() in suffixes and not name.startswith("."):
                found.append(os.path.join(parent, name))
    return sorted(found, key=lambda file: Path(file).parts)


def the_input(folder: str, inputs: Sequence[InputSpec], what: str) -> InputSpec:
    """Return the only input of a model.

    Raises:
        DataError: There are more.
    """
    if len(inputs) != 1:
        names = ", ".join(repr(spec.name) for spec in inputs)
        raise DataError(
            f"{folder}: a file is {what}, and the model has {len(inputs)} inputs: {names}; "
            "give FILE.py:NAME, a function that yields a dict of arrays for each sample"
        )
    return inputs[0]


def media_labels(folder: str, files: Sequence[str], table: str | None) -> list[int | None]:
    """Return the class of each file.

    With a table, it is the table's. Otherwise the sub-folders are the classes: numbered in the order of their names, or
    by their names where all of these are numbers. Files that are in no sub-folder, or all in one that is not named by
    a number, have no labels.

    Args:
        folder: The folder of the files.
        files: Their paths.
        table: Path of a table of files and labels, or None.

    Raises:
        DataError: A file has no label, or a sub-folder no files.
    """
    relative = [Path(file).relative_to(folder).as_posix() for file in files]
    if table is not None:
        return _table_labels(relative, Path(folder), table)
    above = [name.split("/")[0] if "/" in name else None for name in relative]
    names = sorted({name for name in above if name is not None})
    if not names or (len(names) == 1 and None not in above and not _is_class(names[0])):
        return [None] * len(files)
    if None in above:
        loose = files[above.index(None)]
        raise DataError(
            f"{loose}: stands beside sub-folders whose names are the classes of their files; move it into one, "
            "or give labels, a table of files and labels"
        )
    for entry in sorted(Path(folder).iterdir()):
        if entry.is_dir() and not entry.name.startswith(".") and entry.name not in names:
            raise DataError(f"{entry}: holds no such files as its neighbours, whose names are classes; remove it")
    classes = dict(zip(names, numbered(names), strict=True))
    return [classes[str(name)] for name in above]


def numbered(names: Collection[str]) -> list[int]:
    """Return the class of each name: its number where all are numbers, or its place among the sorted names."""
    if all(map(_is_class, names)):
        return [int(name) for name in names]
    places = {name: place for place, name in enumerate(sorted(set(names)))}
    return [places[name] for name in names]


def _is_class(name: str) -> bool:
    """Tell whether a name is the number of a class."""
    return name.isascii() and name.isdigit()


def _table_labels(relative: Sequence[str], folder: Path, table: str) -> list[int | None]:
    """Return the class of each file by a table."""
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
            raise DataError(f"{table}: {base!r} may be any of {count[base]} files; write its path below {folder}")
        names.append(known[keys[0]])
    # what a class is numbered depends on the whole table, not on the files that happen to be there
    classes = dict(zip(known.values(), numbered(list(known.values())), strict=True))
    return [classes[name] for name in names]


def _read_table(table: str) -> dict[str, str]:
    """Read the labels of a table: columns ``file`` and ``label``, or the first two where it names no columns."""
    path = Path(table)
    if path.suffix.lower() not in DELIMITERS:
        raise DataError(f"{table}: labels are read from a {', '.join(DELIMITERS)} file of files and labels")
    known: dict[str, str] = {}
    columns = (0, 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
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
    """Take one line of a table."""
    if len(cells) <= max(columns) or not all(cells[column] for column in columns):
        raise DataError(f"{where}: expected a file and its label, got {','.join(cells)!r}")
    file, label = (cells[column] for column in columns)
    file = PurePosixPath(file.replace("\\", "/")).as_posix()
    if known.setdefault(file, label) != label:
        raise DataError(f"{where}: {file} is {known[file]!r} above and {label!r} here")

"""Read JSON into typed values. An error is one line with the file and the entry.

`json` parses the text: its errors give line and column, and it keeps file names that are not UTF-8. `msgspec` checks
the types.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Never, TypeAlias, TypeVar

import msgspec

from .. import RequantError

T = TypeVar("T")

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A number that is neither NaN nor infinite. An integer is accepted, and becomes a float."""


def load_json(path: str | os.PathLike[str], noun: str) -> Any:
    """Return the content of a JSON file as plain values.

    Args:
        path: The file.
        noun: The kind of file, for errors: ``"range file"``.

    Raises:
        RequantError: The file cannot be read, or is not JSON.
    """
    try:
        return parse_json(Path(path).read_bytes())
    except OSError as error:
        raise RequantError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RequantError(f"{os.fspath(path)}: not a {noun}: {error}") from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; NaN and Infinity are not JSON.

    Raises:
        ValueError: The text is not JSON; the message is one line.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("the values are nested too deeply") from None


def load_document(path: str | os.PathLike[str], kind: type[T], noun: str, schema: int, *, hint: str = "") -> T:
    """Read a JSON file, an object with a number of its format in ``"schema"``.

    Args:
        path: The file.
        kind: The type of the document, see `convert`.
        noun: The kind of file, for errors: ``"range file"``.
        schema: The only accepted value of ``"schema"``.
        hint: What the user can do about a file of another schema: ``"calibrate again"``.

    Raises:
        RequantError: The file cannot be read, is of another schema, or an entry does not fit `kind`.
    """
    name = os.fspath(path)
    document = load_json(path, noun)
    if not isinstance(document, dict) or "schema" not in document:
        raise RequantError(f"{name}: not a {noun}: no 'schema'")
    if document["schema"] != schema:
        advice = f": {hint}" if hint else ""
        raise RequantError(f"{name}: {noun} of schema {document['schema']!r}; this program reads {schema}{advice}")
    return convert(document, kind, f"{name}: malformed {noun}")


def convert(value: object, kind: type[T], place: str) -> T:
    """Return JSON values as an instance of a type.

    Args:
        value: The values that `parse_json` returned, or a part of them.
        kind: An annotated class (a dataclass or a `msgspec.Struct`) or a type such as ``dict[str, Positive]``. A
            ValueError of the class's ``__post_init__`` refuses the values.
        place: What errors begin with: the file and, for a part, the name of the part.

    Raises:
        RequantError: An entry is missing or does not fit; the message names it, except where it is inside a mapping,
            see `convert_rows`.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RequantError(f"{place}: {_line(str(error))}") from error
    except RequantError as error:
        raise RequantError(f"{place}: {error}") from error


def convert_rows(rows: Mapping[str, object], kind: type[T], place: str) -> dict[str, T]:
    """Return the rows of a mapping as instances of a type. Errors name the row, which those of `convert` do not.

    Args:
        rows: JSON values by name.
        kind: The type of a row, see `convert`.
        place: The beginning of errors, before the row's name: ``"r.json: tensor"``.

    Raises:
        RequantError: A row does not fit.
    """
    return {name: convert(row, kind, f"{place} {name!r}") for name, row in rows.items()}


def _line(text: str) -> str:
    """Return a message of msgspec with the entry in front: ``"'data.batch': expected int >= 1"``."""
    reason, _, path = text.partition(" - at `$")
    reason = re.sub(r"field `(.*)`", r"field '\1'", reason).replace("`", "")
    entry = path.strip("`.")
    reason = reason[:1].lower() + reason[1:]
    return f"{entry!r}: {reason}" if entry else reason


def _no_constant(name: str) -> Never:
    """Refuse a constant that Python's parser accepts and JSON lacks."""
    raise ValueError(f"{name} is not a number in JSON")

"""Read JSON and TOML files into typed values. An error is one line with the file and the entry.

`read_file` (`system/regular.py`) reads the bytes of every such file. `decode_json` (`system/values.py`) parses JSON
with Python's `json`: its errors give line and column, and it keeps file names that are not UTF-8. `msgspec` checks
the types.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from reprlib import repr as brief
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from ... import RequantError
from ...system.regular import SMALL_FILE, read_file
from ...system.values import check_values, decode_json, decode_text

T = TypeVar("T")

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A number that is neither NaN nor infinite. An integer is accepted, and becomes a float."""
Number: TypeAlias = float | Literal["inf", "-inf", "nan"]
"""A number, or the text of one that JSON lacks; `float` converts both."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A number of values, samples or bytes; sums of some of them fit in 64 bits."""
LARGE_FILE = 512 * 2**20
"""The most bytes of a file with statistics of all tensors; 10,000 histograms are a fifth of it."""
MOST_TOML, MOST_DOTS = 4 * 2**20, 10_000
"""The most bytes of a TOML file, and of dots in a line: `tomllib` takes quadratic time for a dotted key."""


def load_json(path: str | os.PathLike[str], noun: str, *, most: int = SMALL_FILE) -> Any:
    """Return the content of a JSON file as plain values, see `decode_json`.

    Args:
        path: The file.
        noun: The kind of file, for errors: ``"range file"``.
        most: The most bytes that are read.

    Raises:
        RequantError: The file cannot be read, or is not JSON.
    """
    data = read_file(path, most=most)
    try:
        return decode_json(data)
    except ValueError as error:
        raise RequantError(f"{os.fspath(path)}: not a {noun}: {error}") from error


def load_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a TOML file as plain values.

    Raises:
        RequantError: The file cannot be read, or is not TOML, or has a text with a NUL, which no path can have.
    """
    data = read_file(path, most=MOST_TOML)
    try:
        if b"\0" in data or re.search(rb"\\(u0000|U00000000)", data):
            raise ValueError("a NUL in the text")
        if max(line.count(b".") for line in data.split(b"\n")) > MOST_DOTS:
            raise ValueError(f"a line with more than {MOST_DOTS} dots")
        document = tomllib.loads(decode_text(data))
        check_values(document)
    except RecursionError:
        raise RequantError(f"{os.fspath(path)}: cannot be read: the values are nested too deeply") from None
    except ValueError as error:  # not UTF-8 or not TOML; the message has the line
        raise RequantError(f"{os.fspath(path)}: cannot be read: {' '.join(str(error).split())}") from error
    return document


def load_document(
    path: str | os.PathLike[str], kind: type[T], noun: str, schema: int, *, hint: str = "", most: int = SMALL_FILE
) -> T:
    """Read a JSON file, an object with a number of its format in ``"schema"``.

    Args:
        path: The file.
        kind: The type of the document, see `convert`.
        noun: The kind of file, for errors: ``"range file"``.
        schema: The only accepted value of ``"schema"``.
        hint: What the user can do about a file of another schema: ``"calibrate again"``.
        most: The most bytes that are read.

    Raises:
        RequantError: The file cannot be read, is of another schema, or an entry does not fit `kind`.
    """
    name = os.fspath(path)
    document = load_json(path, noun, most=most)
    if not isinstance(document, dict) or "schema" not in document:
        raise RequantError(f"{name}: not a {noun}: no 'schema'")
    names = [each.name for each in fields(kind)] if is_dataclass(kind) else getattr(kind, "__struct_fields__", ())
    keys = {*names} - {"schema"}
    if keys and len(document) > 1 and not keys & document.keys():
        raise RequantError(f"{name}: not a {noun}: it has {', '.join(map(brief, sorted(document)[:4]))}")
    found = document["schema"]
    if type(found) is not int or found != schema:
        advice = f": {hint}" if hint else ""
        raise RequantError(f"{name}: {noun} of schema {brief(found)}; this program reads {schema}{advice}")
    return convert(document, kind, f"{name}: malformed {noun}")


def plain_number(value: float) -> float | str:
    """Return a number, or its text if JSON lacks it; see `Number`."""
    return value if math.isfinite(value) else str(value)


def convert(value: object, kind: type[T], place: str) -> T:
    """Return JSON values as an instance of a type.

    Args:
        value: The values that `decode_json` returned, or a part of them.
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
    except UnicodeEncodeError as error:  # a lone surrogate where only some texts are allowed
        raise RequantError(f"{place}: a text is not Unicode: {ascii(error.object)[:80]}") from error
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

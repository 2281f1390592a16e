"""Decoding JSON into typed values: accepted values, and one-line errors with the file and the entry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from requant import RequantError
from requant.calibration.range_files.decoding import (
    Finite,
    Natural,
    Positive,
    convert,
    convert_rows,
    load_document,
    load_json,
)
from requant.system.values import decode_json


@dataclass(frozen=True, slots=True)
class Row:
    lo: Finite
    hi: Finite = 1.0
    count: Positive = 1

    def __post_init__(self) -> None:
        if self.lo > self.hi:
            raise ValueError("'lo' is above 'hi'")


@dataclass(frozen=True, slots=True)
class Document:
    name: str
    rows: list[Row]
    skipped: Natural = 0


def test_values_become_an_instance() -> None:
    value = {"name": "\udc80", "rows": [{"lo": -1}, {"lo": 0.1, "hi": 3e38, "count": 2**70}], "other": None}
    assert convert(value, Document, "f") == Document("\udc80", [Row(-1.0), Row(0.1, 3e38, 2**70)])
    assert convert_rows({"a": {"lo": 0}}, Row, "f: tensor") == {"a": Row(0.0)}
    assert convert([1, 2], list[Positive], "f") == [1, 2]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "f: expected object, got array"),
        ({"rows": []}, "f: object missing required field 'name'"),
        ({"name": 3, "rows": []}, "f: 'name': expected str, got int"),
        ({"name": "", "rows": [], "skipped": -1}, "f: 'skipped': expected int >= 0"),
        ({"name": "", "rows": [], "skipped": True}, "f: 'skipped': expected int, got bool"),
        ({"name": "", "rows": [], "skipped": 1.0}, "f: 'skipped': expected int, got float"),
        ({"name": "", "rows": [{"lo": 0}, {}]}, "f: 'rows[1]': object missing required field 'lo'"),
        ({"name": "", "rows": [{"lo": 0, "count": 0}]}, "f: 'rows[0].count': expected int >= 1"),
        ({"name": "", "rows": [{"lo": 2}]}, "f: 'rows[0]': 'lo' is above 'hi'"),
        ({"name": "", "rows": [{"lo": math.inf}]}, "f: 'rows[0].lo': expected float <= 1.79"),
        ({"name": "", "rows": [{"lo": math.nan}]}, "f: 'rows[0].lo': expected float >= -1.79"),
        ({"name": "", "rows": [{"lo": 10**400}]}, "f: 'rows[0].lo': number out of range"),
    ],
)
def test_errors_name_the_place_and_the_entry(value: object, problem: str) -> None:
    with pytest.raises(RequantError) as caught:
        convert(value, Document, "f")
    assert str(caught.value).startswith(problem)


def test_errors_of_rows_name_the_row() -> None:
    with pytest.raises(RequantError, match=r"^f: tensor 'b\\n': 'count': expected int >= 1$"):
        convert_rows({"a": {"lo": 0}, "b\n": {"lo": 0, "count": 0}}, Row, "f: tensor")


def test_refusals_of_a_class_get_the_place() -> None:
    @dataclass
    class Refusing:
        def __post_init__(self) -> None:
            raise RequantError("no")

    with pytest.raises(RequantError, match=r"^f: no$"):
        convert({}, Refusing, "f")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not a range file: Expecting value: line 1 column 1"),
        ("{\n 3", "not a range file: Expecting property name enclosed in double quotes: line 2 column 2"),
        ("NaN", "not a range file: NaN is not a number in JSON"),
        ("[-Infinity]", "not a range file: -Infinity is not a number in JSON"),
        ("\xff", "not a range file: byte 0 is no text in UTF-8"),
        ("[" * 100_000, "not a range file: the values are nested too deeply"),
        ("[]", "not a range file: no 'schema'"),
        ("{}", "not a range file: no 'schema'"),
        ('{"schema": "2"}', "range file of schema '2'; this program reads 2: calibrate again"),
        ('{"schema": 2}', "malformed range file: object missing required field 'name'"),
    ],
    ids=range(10),
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RequantError) as caught:
        load_document(path, Document, "range file", 2, hint="calibrate again")
    assert str(caught.value).startswith(f"{path}: {problem}")
    assert "\n" not in str(caught.value)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"schema": 2, "name": "n", "rows": []}')
    assert load_document(path, Document, "range file", 2) == Document("n", [])
    assert load_json(path, "range file") == decode_json(path.read_text())
    with pytest.raises(RequantError, match=r"none\.json: no such file"):
        load_json(tmp_path / "none.json", "range file")


def test_dictionaries_are_a_kind() -> None:
    kind: Any = dict[str, Positive]
    with pytest.raises(RequantError, match=r"^f: '\[\.\.\.\]': expected int >= 1$"):
        convert({"a": 0}, kind, "f")

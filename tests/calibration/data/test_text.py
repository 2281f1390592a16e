"""Files of texts with a tokenizer: records, columns, labels, refusals."""

from __future__ import annotations

import json
import pickle
from collections import UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from requant import RequantError
from requant.calibration import DataError, DataSpec, InputSpec, open_source

I8 = np.dtype(np.int64)
IDS = InputSpec("ids", I8, ("N", "T"))


def letters(*texts: str) -> dict[str, list[int]]:
    """Give the code points of some texts, with 0 between them and no batch axis."""
    return {"ids": [ord(letter) for letter in "\0".join(texts)]}


def whole(record: Mapping[str, Any]) -> dict[str, list[int]]:
    return letters(record["a"] + record["b"])


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def texts(path: str, preprocess: str | None = None, tokenizer: Any = letters) -> list[tuple[str, Any]]:
    source = open_source(DataSpec(path, preprocess, tokenizer), [IDS])
    return [("".join(map(chr, sample.feed["ids"][0])), sample.label) for sample in source]


# ---------------------------------------------------------------------------------------------------- records


def test_csv(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", "id,text,label", '1,"one, two",0', '2,"a ""b""\nc",1', "", "3,\u00fc,1")
    assert texts(path) == [("one, two", 0), ('a "b"\nc', 1), ("\u00fc", 1)]
    source = open_source(DataSpec(path, None, letters), [IDS])
    assert (source.length, source.rows.random, source.description) == (3, True, path)
    assert [sample.where for sample in source] == [f"{path}, line {line}, sample {index}" for index, line in enumerate((2, 3, 6))]  # fmt: skip
    assert [sample.feed["ids"].shape for sample in source] == [(1, 8), (1, 7), (1, 1)]


def test_tsv_with_a_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    (tmp_path / "d.tsv").write_bytes("\ufefftext\tlabel\r\none, two\tneg\r\nthree\tpos\r\n".encode())
    assert texts(str(tmp_path / "d.tsv")) == [("one, two", 0), ("three", 1)]


def test_jsonl(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.jsonl", '{"n": 1, "text": "one\\ntwo", "label": 3}', "", '{"text": "\u00fc", "label": 4}'
    )
    assert texts(path) == [("one\ntwo", 3), ("\u00fc", 4)]
    assert [sample.where for sample in open_source(DataSpec(path, None, letters), [IDS])] == [
        f"{path}, line 1, sample 0", f"{path}, line 3, sample 1",
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_records_are_picked_without_those_before(tmp_path: Path, suffix: str) -> None:
    names = [f"line\n{index}" for index in range(10)]
    if suffix == "csv":
        path = write(tmp_path / "d.csv", "text", *(f'"{name}"' for name in names))
    else:
        path = write(tmp_path / "d.jsonl", *(json.dumps({"text": name}) for name in names))
    called = []

    def tokenizer(text: str) -> dict[str, list[int]]:
        called.append(text)
        return letters(text)

    source = open_source(DataSpec(path, None, tokenizer), [IDS])
    assert called == []
    picked = source.samples(3)
    assert [sample.where.rsplit(" ", 1)[1] for sample in picked] == ["0", "3", "6"]
    assert called == [names[index] for index in (0, 3, 6)]
    assert len(list(picked.read([1, 2]))) == 2
    assert called[3:] == [names[3], names[6]]


def test_a_reference_opens_the_same_samples_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", "text", "a", "b", "c")
    here = open_source(DataSpec(path, "column=text", letters), [IDS])
    there = open_source(pickle.loads(pickle.dumps(here.reference)), [IDS])
    assert [s.feed["ids"].tolist() for s in here.samples(2)] == [s.feed["ids"].tolist() for s in there.samples(2)]


# ---------------------------------------------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("preprocess", "tokenizer", "expected"),
    [
        (None, letters, [("x", 1), ("y", 0)]),
        ("column=b", letters, [("p", 1), ("q", 0)]),
        ("column=b,a", letters, [("p\0x", 1), ("q\0y", 0)]),
        ("column=*", whole, [("xp", 1), ("yq", 0)]),
        ("label=a", letters, [("p", 0), ("q", 1)]),
        ("column='c d' label=n", letters, [("5", 7), ("6", 8)]),
    ],
    ids=["first-text", "named", "two", "record", "label", "blank"],
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_columns(tmp_path: Path, suffix: str, preprocess: str | None, tokenizer: Any, expected: list[Any]) -> None:
    rows = [
        {"n": "7", "a": "x", "b": "p", "c d": "5", "Label": "yes"},
        {"n": "8", "a": "y", "b": "q", "c d": "6", "Label": "no"},
    ]
    if suffix == "csv":
        path = write(tmp_path / "d.csv", ",".join(rows[0]), *(",".join(row.values()) for row in rows))
    else:
        path = write(tmp_path / "d.jsonl", *map(json.dumps, rows))
    assert texts(path, preprocess, tokenizer) == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [([0, 5], [0, 5]), (["b", "a"], [1, 0]), (["3", "1"], [3, 1]), ([None, 1], [None, 1]), ([True, False], [1, 0])],
    ids=["numbers", "names", "number-names", "none", "truth"],
)
def test_labels_in_json(tmp_path: Path, labels: list[Any], expected: list[Any]) -> None:
    path = write(tmp_path / "d.jsonl", *(json.dumps({"text": "x", "label": label}) for label in labels))
    assert [label for _, label in texts(path)] == expected


def test_a_label_for_each_token(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"text": "ab", "labels": [0, 1]}')
    (sample,) = open_source(DataSpec(path, None, letters), [IDS])
    assert np.asarray(sample.label).tolist() == [[0, 1]]


def test_files_without_labels(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "d.csv", "text", "a")) == [("a", None)]


# ---------------------------------------------------------------------------------------------------- tokenizers

TOKENIZER = """
import numpy as np

CALLS = 0

class Tokenizer:
    def __call__(self, text):
        import later_{stem}
        return {{"ids": np.array([[len(text)]])}}

tokenizer = Tokenizer()
nothing = 3

def broken(text):
    raise KeyError(text)
"""


@pytest.fixture
def python_file(tmp_path: Path) -> Path:
    stem = tmp_path.name.replace("-", "_")
    (tmp_path / f"later_{stem}.py").write_text("")
    path = tmp_path / f"tok_{stem}.py"
    path.write_text(TOKENIZER.format(stem=stem))
    return path


def test_tokenizers_by_name(tmp_path: Path, python_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "d.csv", "text", "abc", "ab")
    monkeypatch.syspath_prepend(python_file.parent)
    for name in (f"{python_file}:tokenizer", f"{python_file.stem}:tokenizer"):
        (first, second) = open_source(DataSpec(path, None, name), [IDS])
        assert (first.feed["ids"].tolist(), second.feed["ids"].tolist()) == ([[3]], [[2]])


def test_what_tokenizers_give(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", "text", "ab")
    for found in (UserDict(letters("ab")), {"ids": np.array([[97, 98]])}, {"ids": np.array([97, 98], np.int32)}):
        assert texts(path, None, lambda text, found=found: found) == [("ab", None)]


@pytest.mark.parametrize(
    ("tokenizer", "problem"),
    [
        (None, r"d.csv: a text file needs a tokenizer, .*--tokenizer FILE.py:NAME"),
        ("tokenizer", r"tokenizer: a tokenizer is named by FILE.py:NAME or PACKAGE.MODULE:NAME"),
        ("gone.py:f", r"gone.py: no such file"),
        ("{file}:tokenize", r"no object in .* named 'tokenize'; did you mean 'tokenizer'"),
        ("{file}:nothing", r"tok_.*.py:nothing: a int is no tokenizer"),
        ("{file}:broken", r"d.csv, line 2, sample 0: tokenizer .*:broken: KeyError: 'abc'"),
        (lambda text: [1], r"d.csv, line 2, sample 0: tokenizer .*lambda.* must return a dict of arrays, not list"),
        (lambda text: {"idz": [1]}, r"d.csv, line 2, sample 0: the model has no input named 'idz'; did you mean 'ids'"),
        (lambda text: {"ids": [[1], [2, 3]]}, r"d.csv, line 2, sample 0, input 'ids': not an array"),
        (lambda text: {"ids": 1}, r"d.csv, line 2, sample 0, input 'ids': expected int64 \(N, T\), got int64 \(\)"),
    ],
    ids=["none", "name", "file", "near", "object", "raises", "list", "input", "ragged", "rank"],
)
def test_tokenizers_that_are_refused(tmp_path: Path, python_file: Path, tokenizer: Any, problem: str) -> None:
    path = write(tmp_path / "d.csv", "text", "abc")
    if isinstance(tokenizer, str):
        tokenizer = tokenizer.format(file=python_file)
    with pytest.raises(RequantError, match=problem) as caught:
        list(open_source(DataSpec(path, None, tokenizer), [IDS]))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "content", "preprocess", "problem"),
    [
        ("d.csv", b"", None, r"d.csv: holds no samples"),
        ("d.csv", b"text\n", None, r"d.csv: holds no samples"),
        ("d.jsonl", b"\n", None, r"d.jsonl: holds no samples"),
        ("d.csv", b"text,text\na,b\n", None, r"d.csv, line 1: the first line must be the names of the columns, each once"),
        ("d.csv", b"text,b\na,b\nc\n", None, r"d.csv, line 3: has 1 cells, but the file has 2 columns: text, b"),
        ("d.csv", b'text\n"a\n', None, r"d.csv, line 2: cannot be read: unexpected end of data"),
        ("d.csv", b"text\na\n\xff\n", None, r"d.csv, line 3: not UTF-8"),
        ("d.csv", b"n\n1\n", None, r"d.csv, line 2, sample 0: no column holds a text; set column=NAME"),
        ("d.csv", b"text\na\n", "column=txt", r"line 2, sample 0: no column 'txt'; did you mean 'text'"),
        ("d.csv", b"text\na\n", "label=x", r"no column 'x'"),
        ("d.csv", b"text\na\n", "colum=text", r"d.csv: no key of preprocess named 'colum'; did you mean 'column'"),
        ("d.csv", b"text,label\na,1\nb,\n", None, r"d.csv, line 3, sample 1: column 'label' is ''; expected a label"),
        ("d.jsonl", b'{"text": "a"}\n{"text": \n', None, r"d.jsonl, line 2: cannot be read: Expecting value"),
        ("d.jsonl", b'{"text": "a"}\n[]\n', None, r"d.jsonl, line 2: expected a JSON object, got list"),
        ("d.jsonl", b'{"text": "a"}\n\nnull\n', None, r"d.jsonl, line 3: expected a JSON object, got NoneType"),
        ("d.jsonl", b'{"text": "a"}\n{"txt": "a"}\n', None, r"d.jsonl, line 2, sample 1: no column 'text'; did you mean"),
        ("d.jsonl", b'{"text": "a"}\n{"text": 3}\n', None, r"line 2, sample 1: column 'text' must hold a text, not int"),
        ("d.jsonl", b'{"text": "a", "label": 1}\n{"text": "b", "label": "c"}\n', None, r"line 2, sample 1: column 'label' is 'c'"),
        ("d.jsonl", b"[" * 100000 + b"\n", None, r"d.jsonl, line 1: cannot be read"),
    ],
    ids=[
        "empty", "header-only", "blank", "columns", "cells", "quote", "utf-8", "numbers", "column", "label", "key", "no-label",
        "json", "array", "null", "missing", "number", "mixed", "deep",
    ],
)  # fmt: skip
def test_bad_files_name_file_and_line(
    tmp_path: Path, name: str, content: bytes, preprocess: str | None, problem: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem) as caught:
        texts(str(tmp_path / name), preprocess)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequantError, match=r"gone.csv: no such file"):
        texts(str(tmp_path / "gone.csv"))


def test_labels_come_from_a_column(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", "text", "a")
    with pytest.raises(DataError, match=r"d.csv: a text file takes no labels; it is for folders of images"):
        open_source(DataSpec(path, None, letters, "l.csv"), [IDS])


def test_a_file_that_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", "text", "abc", "def")
    source = open_source(DataSpec(path, None, letters), [IDS])
    write(tmp_path / "d.csv", "text", "abc")
    with pytest.raises(DataError, match=r"d.csv: has changed since it was opened"):
        list(source)

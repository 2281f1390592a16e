"""Range files: exact round trips and merges, refusals, atomic writing, fingerprints."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from requant import RequantError
from requant.calibration import (
    Histogram,
    MinMax,
    RangeFile,
    fingerprint,
    load_ranges,
    parse_rule,
    save_ranges,
    write_atomically,
)
from requant.calibration.observers import Statistic
from requant.calibration.session import Array

arrays = hnp.arrays(np.float32, st.integers(1, 9), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


def file(
    rule: str = "minmax", values: Mapping[str, Array] = {}, *, model: str = "ab" * 32, source: str = "data.npz"
) -> RangeFile:
    parsed = parse_rule(rule)
    kind: type[Statistic] = Histogram if parsed.needs_histogram else MinMax
    statistics = {name: kind.of(array) for name, array in values.items()}
    return RangeFile.choose(statistics, parsed, model=model, source=source, samples=1)


A = np.array([-1.5, 0.1, 3e38], np.float32)


@given(array=arrays, rule=st.sampled_from(["minmax", "percentile(99.9)"]))
def test_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, array: Array, rule: str) -> None:
    path = tmp_path_factory.getbasetemp() / "ranges.json"
    written = file(rule, {"a": array, 'b"\n/é': -array})
    save_ranges(path, written)
    assert load_ranges(path) == written
    assert load_ranges(path, model=written.model) == written
    before = path.read_bytes()
    save_ranges(path, load_ranges(path))
    assert path.read_bytes() == before


def test_no_tensors(tmp_path: Path) -> None:
    save_ranges(tmp_path / "r.json", file())
    assert load_ranges(tmp_path / "r.json") == file()


@given(left=arrays, right=arrays, rule=st.sampled_from(["minmax", "percentile(99.9)"]))
def test_merging_files_equals_one_run(left: Array, right: Array, rule: str) -> None:
    merged = file(rule, {"x": left, "y": left}, source="a") | file(rule, {"x": right}, source="b")
    whole = file(rule, {"x": np.concatenate([left, right]), "y": left}, source="a + b")
    assert merged == replace(whole, samples=2)
    assert merged == file(rule, {"x": right}, source="b") | file(rule, {"x": left, "y": left}, source="a")


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (
            file(values={"a": A}, model="cd" * 32),
            "ranges of two models cannot be merged: abababababab and cdcdcdcdcdcd",
        ),
        (file("percentile", {"a": A}), r"different rules cannot be merged: minmax and percentile\(99.99\)"),
        (replace(file(), statistics={"a": Histogram.of(A)}), "tensor 'a': a histogram cannot be merged"),
    ],
    ids=["model", "rule", "kind"],
)
def test_files_that_cannot_be_merged(other: RangeFile, problem: str) -> None:
    with pytest.raises(RequantError, match=problem):
        file(values={"a": A}) | other


def test_another_models_file_is_refused(tmp_path: Path) -> None:
    save_ranges(tmp_path / "r.json", file(values={"a": A}))
    with pytest.raises(
        RequantError, match=r"r.json: ranges of another model \(fingerprint abababababab, .*cdcdcdcdcdcd"
    ):
        load_ranges(tmp_path / "r.json", model="cd" * 32)


HISTOGRAM = {"kind": "histogram", "lo": 0.0, "hi": 0.0, "exponent": -126, "first": 0, "counts": [1]}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": 2}, "range file of schema 2; this program reads 1"),
        ({"schema": None}, "range file of schema None"),
        ({"model": 3}, "malformed range file: 'model' must be of type str, not int"),
        ({"samples": "3"}, "'samples' must be of type int, not str"),
        ({"rule": "nonsense"}, "no range rule named 'nonsense'"),
        ({"tensors": []}, "'tensors' must be of type dict"),
        ({"tensors": {"a": 3}}, "tensor 'a': an object with 'statistic' is wanted, not int"),
        ({"tensors": {"a": {"statistic": HISTOGRAM, "lo": 0.0}}}, "tensor 'a': 'hi' is missing"),
        ({"tensors": {"a": {"statistic": HISTOGRAM, "lo": 1, "hi": 0}}}, "tensor 'a': 'lo' is above 'hi'"),
        ({"tensors": {"a": {"statistic": HISTOGRAM, "lo": True, "hi": 1}}}, "tensor 'a': 'lo' must be a finite number"),
        (
            {"tensors": {"a": {"statistic": HISTOGRAM | {"kind": "x"}, "lo": 0, "hi": 1}}},
            "unknown kind of statistic 'x'",
        ),
        (
            {"tensors": {"a": {"statistic": HISTOGRAM | {"counts": [1.5]}, "lo": 0, "hi": 1}}},
            "'counts' must be integers",
        ),
        ({"tensors": {"a": {"statistic": HISTOGRAM | {"counts": []}, "lo": 0, "hi": 1}}}, "counts do not fit the grid"),
        ({"tensors": {"a": {"statistic": HISTOGRAM | {"counts": [2**70]}, "lo": 0, "hi": 1}}}, "tensor 'a': .*too"),
        ({"tensors": {"a": {"statistic": HISTOGRAM | {"first": 1}, "lo": 0, "hi": 1}}}, "grid does not follow"),
        ({"tensors": {"a": {"statistic": HISTOGRAM | {"hi": 10**400}, "lo": 0, "hi": 1}}}, "tensor 'a': "),
    ],
)
def test_malformed_files_are_refused_by_name(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    path = tmp_path / "r.json"
    save_ranges(path, file(values={"a": A}))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RequantError, match=problem) as caught:
        load_ranges(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["schema", "model", "source", "samples", "rule", "tensors"])
def test_missing_entries_are_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "r.json"
    save_ranges(path, file(values={"a": A}))
    document = json.loads(path.read_text())
    del document[key]
    path.write_text(json.dumps(document))
    with pytest.raises(RequantError, match=f"'{key}'"):
        load_ranges(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "NaN", "\xff"])
def test_what_is_no_range_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RequantError, match=r"r\.json: not a range file"):
        load_ranges(path)
    with pytest.raises(RequantError, match=r"none\.json: cannot be read: No such file"):
        load_ranges(tmp_path / "none.json")


# ---------------------------------------------------------------------------------------------------- atomic writing


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for data in (b"one", b"two"):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_writing_follows_links_and_keeps_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "target")
    write_atomically(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "target").read_bytes() == b"x"
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "folder" / "target").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_failed_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RequantError, match=r"f: cannot be written: No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_writing_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequantError, match=r"none/f: cannot be written: No such file"):
        write_atomically(tmp_path / "none" / "f", b"")


# ---------------------------------------------------------------------------------------------------- fingerprints

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 2] x, bool c) => (float[N, 2] y)
<float[2] w = {1, 2}, float[1] v = {3}> {
    a = Add(x, w)
    b = LeakyRelu <alpha = 0.5> (a)
    y = If (c) <
        then_branch = t () => (float[N, 2] ty) { ty = Mul(b, v) },
        else_branch = e () => (float[N, 2] ey) { ey = Sub(b, v) }
    >
}"""


def test_fingerprint_ignores_what_does_not_compute() -> None:
    plain = fingerprint(ir.from_onnx_text(TEXT))
    noted = ir.from_onnx_text(TEXT)
    noted.doc_string, noted.producer_name, noted.graph.doc_string, noted.graph.name = "d", "p", "g", "h"
    noted.metadata_props["k"] = "v"
    for node in noted.graph:
        node.name, node.doc_string = f"n{id(node)}", "doc"
        node.metadata_props["k"] = "v"
        node.outputs[0].shape = ir.Shape(["N", 2])
    assert fingerprint(noted) == plain


def test_fingerprint_ignores_where_constants_are(tmp_path: Path) -> None:
    model = ir.from_onnx_text(TEXT)
    plain = fingerprint(model)
    ir.save(model, tmp_path / "in.onnx")
    ir.save(model, tmp_path / "ex.onnx", external_data="ex.data", size_threshold_bytes=0)
    assert fingerprint(ir.load(tmp_path / "in.onnx")) == plain
    assert fingerprint(ir.load(tmp_path / "ex.onnx")) == plain


CHANGES = [
    ("{1, 2}", "{1, 3}"),
    ("float[1] v = {3}", "float[1] v = {4}"),
    ("0.5", "0.25"),
    ("LeakyRelu", "Elu"),
    ("Add(x, w)", "Add(w, x)"),
    ("Sub(b, v)", "Sub(v, b)"),
    ("ey = Sub", "ey = Div"),
    (": 17", ": 16"),
    ("float[N, 2] x", "float[M, 2] x"),
    ("(float[N, 2] y)", "(float[N, 2] y, float[N, 2] b)"),
]


@pytest.mark.parametrize(("old", "new"), CHANGES, ids=[new for _, new in CHANGES])
def test_fingerprint_sees_what_computes(old: str, new: str) -> None:
    assert old in TEXT
    assert fingerprint(ir.from_onnx_text(TEXT.replace(old, new))) != fingerprint(ir.from_onnx_text(TEXT))


def test_fingerprint_of_functions_and_texts() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "f" : 1]>
    g (float[N] x) => (float[N] y, string[1] s) {
        y = f.double(x)
        s = Constant <value = string[1] {"a"}> ()
    }
    <domain: "f", opset_import: ["" : 17]>
    double (x) => (y) { y = Add(x, x) }"""
    seen = {
        fingerprint(ir.from_onnx_text(text.replace(*change))) for change in (("", ""), ("Add", "Mul"), ('"a"', '"b"'))
    }
    assert len(seen) == 3

"""The user's own word on tensors: TOML and JSON, and refusals that name file and tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from requant import RequantError
from requant.calibration import parse_rule
from requant.calibration.range_files.overrides import Override, Overrides, load_overrides, overrides_from_json

TOML = """
[tensors."conv1_out"]
range = [0.0, 6]
[tensors."/block/add:0"]
rule = "percentile(99.9)"
[tensors.plain]
float = true
"""
READ = {
    "conv1_out": Override(range=(0.0, 6.0)),
    "/block/add:0": Override(rule=parse_rule("percentile(99.9)")),
    "plain": Override(keep_float=True),
}
ROWS = {"conv1_out": {"range": [0.0, 6]}, "/block/add:0": {"rule": "percentile(99.9)"}, "plain": {"float": True}}


@pytest.mark.parametrize(("name", "text"), [("o.toml", TOML), ("o.json", json.dumps({"tensors": ROWS})), ("o", TOML)])
def test_both_forms_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    found = load_overrides(tmp_path / name)
    assert found == Overrides(READ)
    assert found.source == str(tmp_path / name)


def test_what_is_written_reads_back() -> None:
    rows = Overrides(READ).to_json()
    assert list(rows) == sorted(READ)
    assert overrides_from_json(json.loads(json.dumps(rows))) == READ


def test_what_they_say_by_kind() -> None:
    found = Overrides(READ)
    assert found.ranges == {"conv1_out": (0.0, 6.0)}
    assert found.floats == {"plain"}
    assert found.needs_histogram
    assert not Overrides({"a": Override(rule=parse_rule("minmax"))}).needs_histogram


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "o.toml").write_text("")
    assert load_overrides(tmp_path / "o.toml") == Overrides()


WRONG = {
    "unknown table": ("[tensor.a]\nfloat = true", "unknown entry 'tensor'; write a tensor as"),
    "no table": ("tensors = 3", "'tensors' must be a table with tensor names as keys, not int"),
    "no table of a tensor": ("tensors.a = 3", "tensor 'a': expected a table with one of range, rule, float, not int"),
    "unknown key": ("[tensors.a]\nrang = [0, 1]", "tensor 'a': unknown entry 'rang'; did you mean 'range'?"),
    "name without quotes": (
        "[tensors.a.b]\nfloat = true",
        "tensor 'a': unknown entry 'b'; write quotes around a name with dots",
    ),
    "nothing": ("[tensors.a]", "tensor 'a': expected one of range, rule, float, not nothing"),
    "two": (
        "[tensors.a]\nrange = [0, 1]\nfloat = true",
        "tensor 'a': expected one of range, rule, float, not range and",
    ),
    "not float": ("[tensors.a]\nfloat = false", "tensor 'a': 'float' can only be true"),
    "float of 1": ("[tensors.a]\nfloat = 1", "tensor 'a': 'float' can only be true"),
    "one end": ("[tensors.a]\nrange = [1]", "tensor 'a': 'range' must be two numbers, [lo, hi]"),
    "a number": ("[tensors.a]\nrange = 6.0", "tensor 'a': 'range' must be two numbers, [lo, hi]"),
    "texts": ('[tensors.a]\nrange = ["0", "1"]', "tensor 'a': 'range' must be two numbers, [lo, hi]"),
    "booleans": ("[tensors.a]\nrange = [false, true]", "tensor 'a': 'range' must be two numbers, [lo, hi]"),
    "turned round": ("[tensors.a]\nrange = [1.0, 0.5]", "tensor 'a': the lower end of 'range' is above the upper"),
    "NaN": ("[tensors.a]\nrange = [nan, 1.0]", "'tensors.a.range[0]': the number is not finite"),
    "infinity": ("[tensors.a]\nrange = [0.0, inf]", "'tensors.a.range[1]': the number is not finite"),
    "unknown rule": (
        '[tensors.a]\nrule = "minmaks"',
        "tensor 'a': no range rule named 'minmaks'; did you mean 'minmax'",
    ),
    "rule of a number": ("[tensors.a]\nrule = 3", "tensor 'a': 'rule' must be a text"),
    "no TOML": ("[tensors", "cannot be read: "),
    "a tensor twice": ("[tensors.a]\nfloat = true\n[tensors.a]\nfloat = true", "cannot be read: "),
}


@pytest.mark.parametrize(("text", "problem"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told_with_file_and_tensor(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "o.toml"
    path.write_text(text)
    with pytest.raises(RequantError) as caught:
        load_overrides(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


WRONG_JSON = {
    "NaN": ('{"tensors": {"a": {"range": [NaN, 1]}}}', "NaN is not a number in JSON"),
    "huge": (
        '{"tensors": {"a": {"range": [0, 1' + "0" * 400 + "]}}}",
        "'tensors.a.range[1]': the integer has more than 64 bits",
    ),
    "a tensor twice": ('{"tensors": {"a": {"float": true}, "a": {"float": true}}}', "'a' occurs twice"),
    "no entry tensors": (
        '{"a": {"float": true}}',
        """'a'; write a tensor as {"tensors": {"name": {"range": [0, 6]}}}""",
    ),
    "a list": ("[]", "expected an object with the entry 'tensors'"),
    "no JSON": ("{", "not a file of overrides: "),
}


@pytest.mark.parametrize(("text", "problem"), WRONG_JSON.values(), ids=WRONG_JSON)
def test_what_is_wrong_with_json_is_told_too(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "o.json"
    path.write_text(text)
    with pytest.raises(RequantError) as caught:
        load_overrides(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RequantError, match=r"gone.toml: no such file"):
        load_overrides(tmp_path / "gone.toml")
    (tmp_path / "o.toml").write_bytes(b"\xff")
    with pytest.raises(RequantError, match=r"o.toml: cannot be read: "):
        load_overrides(tmp_path / "o.toml")


def test_unknown_tensors_are_refused_with_near_names() -> None:
    with pytest.raises(RequantError, match=r"mine.toml: no tensor named 'plan'; did you mean 'plain'"):
        Overrides({"plan": Override(keep_float=True)}, "mine.toml").check(["plain", "conv1_out"])

"""Foreign text as printable text, as one line, and as literals."""

from __future__ import annotations

import ast
import json
import time
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.system.printable import LINE, json_text, one_line, printable, quoted, sentence

from ..texts import HOSTILE, READABLE, SURROGATE, assert_printable

TEXTS = st.text(st.characters(codec=None, categories=("L", "M", "N", "P", "S", "Z", "C")))


@pytest.mark.parametrize("text", READABLE)
def test_legitimate_text_stays_as_it_is(text: str) -> None:
    assert one_line(text) == text


@given(TEXTS)
def test_any_text_becomes_printable_and_stays_so(text: str) -> None:
    shown = printable(text)
    assert_printable(shown)
    assert printable(shown) == shown
    shown.encode()  # no lone surrogate is left


@given(TEXTS.map(lambda text: 90 * text + text), st.integers(30, 500))
def test_a_line_has_at_most_the_characters_asked_for(text: str, most: int) -> None:
    assert_printable(one_line(text, most), most)
    assert_printable(sentence(text, most), most)


@given(TEXTS)
def test_literals_are_read_back(text: str) -> None:
    assert ast.literal_eval(quoted(text)) == text
    assert_printable(quoted(text).replace("##", ""))
    assert json.loads(json_text({text: text})) == {text: text}
    assert json_text(text).isascii()
    assert_printable(json_text(text))


@given(st.text())
def test_toml_reads_literals_back(text: str) -> None:
    assert tomllib.loads(f"key = {quoted(text)}") == {"key": text}


def test_a_repr_is_not_escaped_twice() -> None:
    assert printable(repr(HOSTILE["escape"] + SURROGATE)) == repr(HOSTILE["escape"] + SURROGATE)


def test_what_is_wrong_and_what_to_do_survive_long_names() -> None:
    name = 10**6 * "n"
    text = one_line(f"model.onnx: node {name!r} reads {name!r}, which nothing computes; give --inputs")
    assert text.startswith("model.onnx: node 'nnn")
    assert "' reads 'nnn" in text.replace("nnn,", "")
    assert text.endswith("n', which nothing computes; give --inputs")
    words = one_line(f"model.onnx: node '{10**5 * 'two words '}' is not there; give --inputs")
    assert (words[:18], words[-15:]) == ("model.onnx: node '", "; give --inputs")
    assert len(words) == LINE


def test_hostile_text_takes_linear_time() -> None:
    began = time.process_time()
    for part in ("::", "##", ":: ", "\x1b", "\n \n", "##a", "'", " "):
        sentence(f"a{part * (300_000 // len(part))}a")
    assert time.process_time() - began < 5  # it takes 0.6 s; a quadratic rule takes minutes


def test_a_job_of_github_reads_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_line("std::vector ::error::x") == "std::vector ::error::x"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert "::" not in one_line("std::vector ::error::x :::")

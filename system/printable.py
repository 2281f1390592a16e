"""Foreign text made printable: names of models, fields of data files, messages of the runtime, paths.

A name in a model is any sequence of characters, also escape sequences of terminals, newlines and directions of writing.
Everything that writes text for people or for logs passes foreign text through this module. JSON keeps exact names, in
ASCII.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

LINE = 400
"""The most characters of a line on stderr."""
CELL = 2000
"""The most characters of a cell of a table, which is folded into several lines."""
WORD = 80
"""The most characters of a word in a line that is too long."""

_LONG_WORD = re.compile(rf"\S{{{WORD + 1},}}")
_HASHES = re.compile(r"##(?=\w*\[)")


def printable(text: str) -> str:
    r"""Return a text with an escape for each character that is not printable, as `repr` writes it.

    Not printable are control and format characters (C0, C1, directions of writing, zero-width ones), line separators,
    spaces other than the usual one, private and unassigned code points, and lone surrogates. Backslashes and quotes
    stay as they are: a name that a message quotes with ``!r`` is not escaped twice. ``##[`` and ``##vso[`` are escaped
    too: CI systems read ``##[COMMAND]`` in the middle of a line of a log as a command.

    >>> print(printable("a\x1b[31m\n\u202e\ud800 é 日本語 ##[group]"))
    a\x1b[31m\n\u202e\ud800 é 日本語 #\x23[group]
    """
    if not text.isprintable():
        text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return _HASHES.sub(r"#\\x23", text)


def printable_lines(text: str) -> str:
    """Return a text whose line feeds stay, and whose lines are `printable`."""
    return "\n".join(map(printable, text.split("\n")))


def one_line(text: str, most: int = LINE) -> str:
    r"""Return a text as one printable line of at most `most` characters.

    Too long words lose their middle first, then the line does: what is wrong stands at the beginning, and what to do at
    the end. In a job of GitHub ``::`` is escaped, which begins a command where it begins a line, also a folded one.

    >>> one_line("node " + 1000 * "n" + ": give --data", 40)
    'node nnnnnnnnn...nnnnnnnnnn: give --data'
    """
    text = printable(text)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        text = text.replace("::", ":\\x3a")
    if len(text) <= most:
        return text
    return _cut(_LONG_WORD.sub(lambda word: _cut(word[0], WORD), text), most)


def sentence(text: str, most: int = LINE) -> str:
    """Return `one_line` of a message that may be composed of several lines."""
    return one_line(" ".join(filter(None, map(str.strip, text.splitlines()))), most)


def _cut(text: str, most: int) -> str:
    """Return a text without its middle, if it has more than `most` characters."""
    if len(text) <= most:
        return text
    tail = (most - 3) * 3 // 5
    return f"{text[: most - 3 - tail]}...{text[-tail:]}"


def quoted(text: str) -> str:
    r"""Return a string literal in double quotes for Python, and for TOML if there are no lone surrogates.

    >>> print(quoted('a "b"\n\u202e é'))
    "a \"b\"\u000a\u202e é"
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char.isprintable() else _literal(ord(char)) for char in escaped) + '"'


def _literal(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def number_of(count: int, noun: str) -> str:
    """Return a count with its noun, which has an s unless the count is 1.

    >>> number_of(0, "sample"), number_of(1, "sample"), number_of(9, "tensor")
    ('0 samples', '1 sample', '9 tensors')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can hold a text. A path or a name of other bytes has lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def json_text(value: object) -> str:
    r"""Return JSON for stdout: exact texts in ASCII, and no ``##[`` that a CI system would read as a command.

    >>> json_text("\x9b31m\u202e##[group]")
    '"\\u009b31m\\u202e#\\u0023[group]"'
    """
    return _HASHES.sub(r"#\\u0023", json.dumps(value, indent=2, allow_nan=False))


def printable_values(value: Any) -> Any:
    """Return JSON values, or texts in mappings, lists and tuples, with every text and key printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_values(key): printable_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable_values(each) for each in value]
    return value

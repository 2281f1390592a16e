r"""The grammar of pipelines: text to steps with parameters, and values to text. It knows no transforms.

    fold_constants remove_nodes(op=Identity, op=Dropout) strip_unused_nodes(outputs="a,b")

It is the grammar of TensorFlow's transform_graph: ``name(key=value, key="value") name``. Steps are separated by white
space, the parameters of a step by commas or white space. A value is quoted, with ``\"`` and ``\\`` for a quote and a
backslash, or made of letters, digits and ``_ . / : + -``. The original grammar skips wrong text; this one refuses it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..registry import Option, PipelineError

Value = int | float | bool | str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """``key=value`` as the text has it, with the offsets of both."""

    key: str
    value: str
    quoted: bool
    key_at: int
    value_at: int


@dataclass(frozen=True, slots=True)
class Scanned:
    """One step as the text has it."""

    name: str
    at: int
    parameters: tuple[Parameter, ...]


_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z0-9_]+")
_PLAIN = re.compile(r"[A-Za-z0-9_./:+-]+")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(r'\\(["\\])')


def scan(text: str) -> list[Scanned]:
    """Split a pipeline into steps and parameters.

    Raises:
        PipelineError: Bad syntax; the message shows the place.
    """
    steps: list[Scanned] = []
    at = _skip(text, 0)
    while at < len(text):
        name = _NAME.match(text, at)
        if name is None:
            if text[at] == "(" and steps:
                raise PipelineError("'(' must directly follow the name of a transform", text, at)
            raise PipelineError(f"expected the name of a transform, not {text[at]!r}", text, at)
        parameters: tuple[Parameter, ...] = ()
        end = name.end()
        if text.startswith("(", end):
            parameters, end = _scan_parameters(text, end)
        if end < len(text) and not text[end].isspace():
            raise PipelineError(f"expected white space after a step, not {text[end]!r}", text, end)
        steps.append(Scanned(name[0], at, parameters))
        at = _skip(text, end)
    return steps


def _scan_parameters(text: str, opened: int) -> tuple[tuple[Parameter, ...], int]:
    """Read ``(key=value, ...)`` from the parenthesis at `opened`; return the parameters and the offset after them."""
    parameters: list[Parameter] = []
    at = _skip(text, opened + 1)
    while not text.startswith(")", at):
        key = _expect(_NAME, "a parameter name", text, at, opened)
        at = _skip(text, key.end())
        equals = _expect(re.compile("="), f"'=' after parameter {key[0]!r}", text, at, opened)
        at = _skip(text, equals.end())
        if text.startswith('"', at):
            value = _QUOTED.match(text, at)
            if value is None:
                raise PipelineError("'\"' is never closed", text, at)
            parameters.append(Parameter(key[0], _ESCAPE.sub(r"\1", value[1]), True, key.start(), at))
        else:
            value = _expect(_PLAIN, f"a value for {key[0]!r}", text, at, opened)
            parameters.append(Parameter(key[0], value[0], False, key.start(), at))
        at = _skip(text, value.end())
        if text.startswith(",", at):
            at = _skip(text, at + 1)
            if text.startswith(")", at):
                raise PipelineError("expected a parameter name, not ')'", text, at)
        elif at < len(text) and at == value.end() and text[at] != ")":
            raise PipelineError(f"expected ',' or ')' after the value of {key[0]!r}, not {text[at]!r}", text, at)
    return tuple(parameters), at + 1


def _expect(pattern: re.Pattern[str], what: str, text: str, at: int, opened: int) -> re.Match[str]:
    """Match `pattern` at `at`, or raise; at the end of the text the error points to the parenthesis at `opened`."""
    match = pattern.match(text, at)
    if match is not None:
        return match
    if at >= len(text):
        raise PipelineError("'(' is never closed", text, opened)
    raise PipelineError(f"expected {what}, not {text[at]!r}", text, at)


def _skip(text: str, at: int) -> int:
    """Return the offset of the first character at or after `at` that is not white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


_INT = re.compile(r"[+-]?[0-9]{1,4300}")  # Python reads and writes no more digits
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?|inf)")
_BOOL = {"true": True, "1": True, "false": False, "0": False}


def converted(parameter: Parameter, option: Option) -> Value:
    """Return the value of a parameter in the type of its option.

    Raises:
        ValueError: The value has another type; the message continues a sentence that begins with the option's name.
    """
    text = parameter.value
    if option.type is tuple:
        names = tuple(text.split(",")) if parameter.quoted else (text,)
        if not all(names):
            raise ValueError(f"holds an empty name: {text!r}")
        return names
    if option.type is bool:
        if text not in _BOOL:
            raise ValueError(f"must be true, 1, false or 0, not {text!r}")
        return _BOOL[text]
    if option.type is int:
        if not _INT.fullmatch(text):
            raise ValueError(f"must be a whole number, not {text!r}")
        return int(text)
    if option.type is float:
        if not _FLOAT.fullmatch(text):
            raise ValueError(f"must be a number, not {text!r}")
        return float(text)
    return text


def written(value: Value) -> tuple[str, ...]:
    """Return a value as text: one text, or one per name."""
    if isinstance(value, tuple):
        return value
    return (str(value).lower() if isinstance(value, bool) else str(value),)


def quoted(text: str) -> str:
    """Quote `text` when the grammar requires quotes."""
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

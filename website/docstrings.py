"""The public names of the packages as Markdown, from signatures and docstrings in Google style."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

ERRORS = ("RequantError", "UnknownNameError")
PACKAGES = ("requant.quantize", "requant.calibration", "requant.transforms")
SECTIONS = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example|Examples):$")
ENTRY = re.compile(r"^(\*{0,2}[\w., ]+?)(?: \([^)]*\))?: (.*)$")

PAGE = """\
# Python

{note}

These are the public names, with their docstrings. `import requant` loads nothing heavy: each package loads its parts
when they are used. `requant.RequantError` is the base of all errors that say what to do.
"""


def package_page(note: str) -> str:
    """Return the page of the public names of all packages."""
    lines = [PAGE.format(note=note)]
    packages = [import_module(name) for name in PACKAGES]
    root = import_module("requant")
    names = set(getattr(root, "__all__", ERRORS))
    own = names.difference(*(package.__all__ for package in packages))
    lines += _package(root, own, set())
    for package in packages:
        lines += _package(package, package.__all__, names)
    return "\n".join(lines).rstrip() + "\n"


def _package(package: ModuleType, names: Iterable[str], root: set[str]) -> Iterator[str]:
    """Yield the lines about names of a package; those in `root` can be imported from the root too."""
    yield from (f"## {package.__name__}", "", *_paragraphs(inspect.cleandoc(package.__doc__ or "")), "")
    objects = {name: getattr(package, name) for name in sorted(names, key=str.lower)}
    shown = {name: found for name, found in objects.items() if inspect.isclass(found) or inspect.isfunction(found)}
    for name, found in shown.items():
        yield from (f"### {name}", "", "```text", signature(name, found), "```", "")
        yield from _paragraphs(inspect.getdoc(found) or "")
        if inspect.isclass(found):
            yield from _members(found)
        if name in root:
            yield from (f"Also `from requant import {name}`.", "")
    if others := sorted(name for name in set(objects) - set(shown) if not inspect.ismodule(objects[name])):
        yield from ("Constants and types: " + ", ".join(f"`{name}`" for name in others) + ".", "")


def signature(name: str, found: Any) -> str:
    """Return a function or class with its parameters, one a line if there are many."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return name
    parts: list[str] = []
    keyword_only = False
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        parts.append(_parameter(parameter))
    short = f"{name}({', '.join(parts)})"
    return short if len(short) <= 100 else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def _parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter with its type and its default."""
    stars = ((parameter.VAR_POSITIONAL, "*"), (parameter.VAR_KEYWORD, "**"))
    star = next((star for kind, star in stars if parameter.kind is kind), "")
    text = star + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {parameter.annotation if isinstance(parameter.annotation, str) else _name(parameter.annotation)}"
    return text if parameter.default is parameter.empty else f"{text} = {_default(parameter.default)}"


def _name(found: Any) -> str:
    """Return a type as source text."""
    return found.__name__ if inspect.isclass(found) else str(found)


def _default(value: Any) -> str:
    """Return a default value as source text that is the same in every run."""
    text = value.__name__ if inspect.isfunction(value) else repr(value)
    return "..." if text.startswith("<") else text


def _members(found: type) -> Iterator[str]:
    """Yield the public methods and properties of a class."""
    rows = [
        f"- `{signature(name, member) if inspect.isfunction(member) else name}`: {_first(doc)}"
        for name, member in _public(found)
        if (doc := inspect.getdoc(member))
    ]
    if rows:
        yield from ("Members:", "", *(" ".join(row.split()) for row in rows), "")


def _public(found: type) -> Iterator[tuple[str, Any]]:
    """Yield the public functions and properties that a class defines itself."""
    for name, member in vars(found).items():
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if not name.startswith("_") and (inspect.isfunction(plain) or isinstance(plain, property)):
            yield name, plain


def _first(doc: str) -> str:
    """Return the first paragraph of a docstring."""
    return _prose(" ".join(doc.split("\n\n")[0].split()))


def _paragraphs(doc: str) -> Iterator[str]:
    """Yield a docstring as Markdown: sections become lists, examples become code."""
    for block in doc.split("\n\n"):
        head, _, rest = block.partition("\n")
        match = SECTIONS.match(head)
        if match is not None and match[1] not in ("Example", "Examples"):
            yield from (
                f"{'Parameters' if match[1] == 'Args' else match[1]}:",
                "",
                *_entries(inspect.cleandoc(rest)),
                "",
            )
        elif block.lstrip().startswith(">>>") or match is not None:
            yield from ("```pycon", *inspect.cleandoc(rest if match else block).splitlines(), "```", "")
        elif block.startswith("    "):
            yield from (*block.splitlines(), "")
        elif block:
            yield from (_prose(" ".join(block.split())), "")


def _entries(text: str) -> Iterator[str]:
    """Yield the entries of a section as a list; a text without names stays a paragraph."""
    items: list[str] = []
    for line in text.splitlines():
        match = ENTRY.match(line)
        if match is not None and not line.startswith(" "):
            items.append(f"- `{match[1]}`: {match[2]}")
        elif items:
            items[-1] += " " + line.strip()
        else:
            items.append(line.strip())
    yield from map(_prose, items)


def _prose(text: str) -> str:
    """Return prose of a docstring: two backticks become one, and angle brackets outside of code stay visible."""
    parts = text.replace("``", "`").split("`")
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))

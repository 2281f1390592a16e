"""User-defined ranges and rules for single tensors. They take precedence over observed ranges."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import RequantError, near
from ..rules.ranges import Range, Rule, parse_rule
from .decoding import load_json, load_toml

ENTRIES = ("range", "rule", "float")
TOML_FORM, JSON_FORM = '[tensors."name"]', '{"tensors": {"name": {"range": [0, 6]}}}'


@dataclass(frozen=True, slots=True)
class Override:
    """The setting of one tensor. Exactly one attribute is set.

    Attributes:
        range: The range.
        rule: The rule that chooses the range.
        keep_float: Whether the tensor stays float.
    """

    range: Range | None = None
    rule: Rule | None = None
    keep_float: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the entry in the form of the file."""
        if self.range is not None:
            return {"range": list(self.range)}
        return {"float": True} if self.rule is None else {"rule": str(self.rule)}


@dataclass(frozen=True, slots=True)
class Overrides:
    """The settings of some tensors.

    Attributes:
        tensors: The settings by tensor name.
        source: The name of the file, for messages.
    """

    tensors: Mapping[str, Override] = field(default_factory=dict)
    source: str = field(default="overrides", compare=False)

    @property
    def ranges(self) -> dict[str, Range]:
        """The given ranges by tensor name."""
        return {name: override.range for name, override in self.tensors.items() if override.range is not None}

    @property
    def floats(self) -> frozenset[str]:
        """The tensors that stay float."""
        return frozenset(name for name, override in self.tensors.items() if override.keep_float)

    @property
    def needs_histogram(self) -> bool:
        """Whether one of the rules needs histograms."""
        return any(override.rule is not None and override.rule.needs_histogram for override in self.tensors.values())

    def check(self, known: Iterable[str]) -> None:
        """Check that the model has all named tensors.

        Raises:
            RequantError: The model has no such tensor; the message lists similar names.
        """
        check_tensors(self.tensors, known, self.source)

    def to_json(self) -> dict[str, Any]:
        """Return the entries in the form of the file, sorted by tensor name."""
        return {name: override.to_json() for name, override in sorted(self.tensors.items())}


def check_tensors(names: Iterable[str], known: Iterable[str], source: str) -> None:
    """Check that a model has all named tensors.

    Args:
        names: The names to check.
        known: The tensors of the model.
        source: The file with the names, for the message.

    Raises:
        RequantError: The model lacks a tensor; the message lists similar names.
    """
    tensors = set(known)
    for name in names:
        if name not in tensors:
            raise RequantError(f"{source}: no tensor named {name!r}{near(name, tensors)}")


def load_overrides(path: str | os.PathLike[str]) -> Overrides:
    """Read a TOML file, or a JSON file of the same structure if its name ends in ``.json``.

    A table ``[tensors."conv1_out"]`` has one entry: ``range = [0.0, 6.0]``, ``rule = "percentile(99.9)"``, or
    ``float = true``, which keeps the tensor float.

    Raises:
        RequantError: The file is missing or malformed; the message names the tensor.
    """
    name = os.fspath(path)
    is_json = Path(path).suffix.lower() == ".json"
    document = load_json(path, "file of overrides") if is_json else load_toml(path)
    try:
        return Overrides(_tensors(document, JSON_FORM if is_json else TOML_FORM), name)
    except RequantError as error:
        raise RequantError(f"{name}: {error}") from error


def overrides_from_json(rows: Mapping[str, Any]) -> dict[str, Override]:
    """Read the entries of tensors.

    Raises:
        RequantError: An entry is malformed; the message names the tensor.
    """
    overrides = {}
    for name, row in rows.items():
        try:
            overrides[name] = _override(row)
        except RequantError as error:
            raise RequantError(f"tensor {name!r}: {error}") from error
    return overrides


def _tensors(document: object, form: str) -> dict[str, Override]:
    """Read a whole document; `form` shows in a message how an entry is written."""
    if not isinstance(document, dict):
        raise RequantError("expected an object with the entry 'tensors'")
    for key in document:
        if key != "tensors":
            raise RequantError(f"unknown entry {key!r}; write a tensor as {form}")
    rows = document.get("tensors", {})
    if not isinstance(rows, dict):
        raise RequantError(f"'tensors' must be a table with tensor names as keys, not {type(rows).__name__}")
    return overrides_from_json(rows)


def _override(row: object) -> Override:
    """Read the entry of one tensor."""
    if not isinstance(row, dict):
        raise RequantError(f"expected a table with one of {', '.join(ENTRIES)}, not {type(row).__name__}")
    for key, value in row.items():
        if key not in ENTRIES:
            hint = "; write quotes around a name with dots" if isinstance(value, dict) else near(key, ENTRIES)
            raise RequantError(f"unknown entry {key!r}{hint}")
    if len(row) != 1:
        raise RequantError(f"expected one of {', '.join(ENTRIES)}, not {' and '.join(row) or 'nothing'}")
    ((key, value),) = row.items()
    if key == "range":
        return Override(range=_range(value))
    if key == "rule":
        if not isinstance(value, str):
            raise RequantError("'rule' must be a text, for example \"percentile(99.9)\"")
        return Override(rule=parse_rule(value))
    if value is not True:
        raise RequantError("'float' can only be true; remove the tensor to use its observed range")
    return Override(keep_float=True)


def _range(value: object) -> Range:
    """Read a range."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(end) in (int, float) for end in value):
        raise RequantError("'range' must be two numbers, [lo, hi]")
    lo, hi = float(value[0]) + 0.0, float(value[1]) + 0.0  # + 0.0: no -0.0
    if lo > hi:
        raise RequantError(f"the lower end of 'range' is above the upper end: {value}")
    return lo, hi

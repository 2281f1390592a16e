"""The user's own word on single tensors, which wins over whatever was observed."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import RequantError, near
from .ranges import Range, Rule, parse_rule

ENTRIES = ("range", "rule", "float")


@dataclass(frozen=True, slots=True)
class Override:
    """What becomes of one tensor; just one of these is given.

    Attributes:
        range: Its range.
        rule: The rule that chooses its range.
        keep_float: Whether it stays float.
    """

    range: Range | None = None
    rule: Rule | None = None
    keep_float: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the entry as it is written in a file."""
        if self.range is not None:
            return {"range": list(self.range)}
        return {"float": True} if self.rule is None else {"rule": str(self.rule)}


@dataclass(frozen=True, slots=True)
class Overrides:
    """What becomes of some tensors.

    Attributes:
        tensors: By name.
        source: Where it is written, for messages.
    """

    tensors: Mapping[str, Override] = field(default_factory=dict)
    source: str = field(default="overrides", compare=False)

    @property
    def ranges(self) -> dict[str, Range]:
        """The ranges that are given, by tensor."""
        return {name: override.range for name, override in self.tensors.items() if override.range is not None}

    @property
    def floats(self) -> frozenset[str]:
        """The tensors that stay float."""
        return frozenset(name for name, override in self.tensors.items() if override.keep_float)

    @property
    def needs_histogram(self) -> bool:
        """Whether a rule among them needs histograms."""
        return any(override.rule is not None and override.rule.needs_histogram for override in self.tensors.values())

    def check(self, known: Iterable[str]) -> None:
        """Refuse names of tensors that the model does not have.

        Raises:
            RequantError: There is one; the message lists near names.
        """
        names = set(known)
        for name in self.tensors:
            if name not in names:
                raise RequantError(f"{self.source}: no tensor named {name!r}{near(name, names)}")

    def to_json(self) -> dict[str, Any]:
        """Return the tensors as they are written in a file, sorted."""
        return {name: override.to_json() for name, override in sorted(self.tensors.items())}


def load_overrides(path: str | os.PathLike[str]) -> Overrides:
    """Read a TOML file or, where its name ends in ``.json``, a JSON file of the same structure.

    A table ``[tensors."conv1_out"]`` has one entry: ``range = [0.0, 6.0]``, ``rule = "percentile(99.9)"``, or
    ``float = true``, with which the tensor stays float.

    Raises:
        RequantError: The file is missing or malformed; the message names the tensor.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        is_json = Path(path).suffix.lower() == ".json"
        document = json.loads(text, object_pairs_hook=_unique) if is_json else tomllib.loads(text)
    except OSError as error:
        raise RequantError(f"{name}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, TOML or JSON
        raise RequantError(f"{name}: cannot be read: {' '.join(str(error).split())}") from error
    try:
        return Overrides(_tensors(document), name)
    except RequantError as error:
        raise RequantError(f"{name}: {error}") from error


def overrides_from_json(rows: Mapping[str, Any]) -> dict[str, Override]:
    """Read the entries of tensors.

    Raises:
        RequantError: One is malformed; the message names the tensor.
    """
    found = {}
    for name, row in rows.items():
        try:
            found[name] = _override(row)
        except RequantError as error:
            raise RequantError(f"tensor {name!r}: {error}") from error
    return found


def _tensors(document: object) -> dict[str, Override]:
    """Read a whole document."""
    if not isinstance(document, dict):
        raise RequantError("an object with the entry 'tensors' is wanted")
    for key in document:
        if key != "tensors":
            raise RequantError(f'no entry named {key!r}; tensors are written as [tensors."name"]')
    rows = document.get("tensors", {})
    if not isinstance(rows, dict):
        raise RequantError(f"'tensors' must be a table by name of tensor, not {type(rows).__name__}")
    return overrides_from_json(rows)


def _override(row: object) -> Override:
    """Read the entry of one tensor."""
    if not isinstance(row, dict):
        raise RequantError(f"a table with one of {', '.join(ENTRIES)} is wanted, not {type(row).__name__}")
    for key, value in row.items():
        if key not in ENTRIES:
            hint = "; quote names with dots" if isinstance(value, dict) else near(key, ENTRIES)
            raise RequantError(f"no entry named {key!r}{hint}")
    if len(row) != 1:
        raise RequantError(f"one of {', '.join(ENTRIES)} is wanted, not {' and '.join(row) or 'nothing'}")
    ((key, value),) = row.items()
    if key == "range":
        return Override(range=_range(value))
    if key == "rule":
        if not isinstance(value, str):
            raise RequantError("'rule' must be a text, for instance \"percentile(99.9)\"")
        return Override(rule=parse_rule(value))
    if value is not True:
        raise RequantError("'float' can only be true; leave the tensor out for the range that was observed")
    return Override(keep_float=True)


def _range(value: object) -> Range:
    """Read a range."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(end) in (int, float) for end in value):
        raise RequantError("'range' must be two numbers, [lo, hi]")
    try:
        lo, hi = float(value[0]) + 0.0, float(value[1]) + 0.0  # + 0.0: no -0.0
    except OverflowError:
        lo = hi = math.inf
    if not (math.isfinite(lo) and math.isfinite(hi)):
        raise RequantError(f"'range' must be of finite numbers, not {value}")
    if lo > hi:
        raise RequantError(f"the lower end of 'range' is above the upper: {value}")
    return lo, hi


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, which must not have an entry twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found

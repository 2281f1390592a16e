"""Plan files: what every unit becomes, to be read, edited and used again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import RequantError, UnknownNameError
from ...calibration.files import write_atomically
from ...transforms.plan import Choice, Impl, Plan
from ...transforms.reasons import NONE, other
from .rules import Facts, able

SCHEMA = 1


def plan_path(output: str | os.PathLike[str]) -> Path:
    """Return where the plan of a model goes that is written to `output`."""
    return Path(output).with_suffix(".plan.json")


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the implementation of every unit of a plan, with the reasons, as JSON.

    Raises:
        RequantError: The file cannot be written.
    """
    units = {
        unit.name: {"operator": unit.op, "implementation": choice.impl.value}
        | ({"reason": choice.reason.text} if choice.reason else {})
        for unit in plan.units
        for choice in [plan.choices[unit.name]]
    }
    write_atomically(path, (json.dumps({"schema": SCHEMA, "units": units}, indent=1) + "\n").encode())


def read_plan(path: str | os.PathLike[str], facts: Facts, rules: Plan, *, strict: bool = True) -> Plan:
    """Return a plan in which the units of a file become what it says, and all others what the rules say.

    Args:
        path: The file.
        facts: What the rules look at.
        rules: The plan by rules.
        strict: Whether a unit that cannot be what the file says is refused; else the rules decide of it, as where
            ranges that are known by now have taken a form away.

    Raises:
        RequantError: The file cannot be read, or asks for what a unit cannot be.
        UnknownNameError: The model has no such unit.
    """
    options = able(facts, rules)
    changed = {}
    for name, row in _units(Path(path)).items():
        if name not in options:
            raise UnknownNameError(f"unit of {os.fspath(path)} in the model", name, options)
        asked = row.get("implementation") if isinstance(row, Mapping) else row
        if not isinstance(asked, str):
            raise RequantError(f"{os.fspath(path)}: unit {name!r}: the name of an implementation is expected")
        possible = {impl.value for impl in (*options[name], Impl.FLOAT, rules.choices[name].impl)}
        if asked not in possible and not strict:
            continue
        if asked not in possible:
            raise RequantError(
                f"{os.fspath(path)}: unit {name!r} cannot be {asked!r}; it can be: {', '.join(sorted(possible))}"
            )
        if asked != rules.choices[name].impl.value:
            reason = other(f"{os.fspath(path)} says so") if asked == Impl.FLOAT.value else NONE
            changed[name] = Choice(Impl(asked), reason)
    return rules.with_choices(changed)


def _units(path: Path) -> Mapping[str, Any]:
    """Read what a file says of units.

    Raises:
        RequantError: It cannot be read, or is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequantError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RequantError(f"{path}: no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or not isinstance(found.get("units"), dict):
        raise RequantError(f'{path}: no plan: {{"schema": {SCHEMA}, "units": {{name: ...}}}} is expected')
    units: Mapping[str, Any] = found["units"]
    return units

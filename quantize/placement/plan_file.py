"""Plan files: the implementation of every unit, as JSON that users can read, edit and use again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from ... import RequantError, near
from ...calibration.model.identity import listed
from ...calibration.range_files.decoding import convert_rows, load_document
from ...system.writing import written_after
from ...transforms.int8.plan import Choice, Impl, Plan
from ...transforms.int8.reasons import NONE, other
from ...transforms.parts.concat_scales import scales_part
from .facts import Facts
from .forms import possible_forms
from .reasons import PLAN_FILE

SCHEMA = 1


class PlanFileError(RequantError):
    """A plan file that cannot be read, or that does not fit the model."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decoded content of a plan file; a unit is a row, or only the name of its implementation."""

    schema: int
    units: dict[str, Any]


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A unit in a plan file; its operator is for the reader of the file."""

    implementation: str
    reason: str = ""
    operator: str = ""
    body: str = Impl.U8


def plan_path(output: str | os.PathLike[str]) -> Path:
    """Return the path of the plan file for a model at `output`."""
    path = Path(output)
    return path.parent / f"{path.stem}.plan.json"  # with_suffix() raises on a path without a name, such as ""


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Write the implementation of every unit of a plan, with the reasons, as JSON, after the block.

    Raises:
        RequantError: The file cannot be written.
    """
    units = {
        unit.name: {"operator": unit.op, "implementation": choice.impl.value}
        | ({"reason": choice.reason.text} if choice.reason else {})
        | ({"body": choice.body.value} if choice.body is not Impl.U8 else {})
        for unit in plan.units
        for choice in [plan.choices[unit.name]]
    }
    return written_after(path, (json.dumps({"schema": SCHEMA, "units": units}, indent=1) + "\n").encode())


def read_plan(path: str | os.PathLike[str], facts: Facts, rules: Plan, *, strict: bool = True) -> Plan:
    """Return a plan with the implementations of a plan file; the rules decide units that the file does not name.

    Args:
        path: The file.
        facts: The input of the rules.
        rules: The plan by rules.
        strict: Whether an impossible implementation is refused. If not, the rules decide the unit: observed ranges may
            have made an implementation impossible.

    Raises:
        PlanFileError: The file cannot be read, the model has no unit of a name, or a unit cannot have its
            implementation or body.
    """
    options, name_of_file = possible_forms(facts, rules), os.fspath(path)
    changed, rows = {}, _rows(path)
    if len(rows) > 1 and not rows.keys() & options.keys():
        raise PlanFileError(
            f"{name_of_file}: the plan of another model: this one has no unit named {next(iter(rows))!r}"
        )
    for name, row in rows.items():
        wanted = row.implementation
        if name not in options:
            if scales_part(name, options):  # another model, of other data, may need no factor
                continue
            raise PlanFileError(f"no unit of {name_of_file} in the model named {name!r}{near(name, options)}")
        possible = {impl.value for impl in (*options[name], Impl.FLOAT, rules.choices[name].impl)}
        if wanted not in possible and strict:
            known, reason = ", ".join(sorted(possible)), rules.choices[name].reason
            why = f" ({reason})" if reason else ""
            raise PlanFileError(f"{name_of_file}: unit {name!r} cannot be {wanted!r}{why}; it can be: {known}")
        if row.body not in (bodies := _bodies(wanted, options[name])) and strict:
            known = ", ".join(bodies)
            raise PlanFileError(
                f"{name_of_file}: unit {name!r} cannot have the body {row.body!r}; it can have: {known}"
            )
        if wanted in possible - {rules.choices[name].impl.value}:
            stays = other(row.reason) or PLAN_FILE.about(name_of_file)  # so that the plan, written again, is the same
            body = row.body if row.body in _bodies(wanted, options[name]) else Impl.U8
            changed[name] = Choice(Impl(wanted), stays if wanted == Impl.FLOAT.value else NONE, Impl(body))
    return rules.with_choices(changed)


def _bodies(wanted: str, forms: Sequence[Impl]) -> list[str]:
    """Return the forms that the body of a unit can have; ``u8->u8`` stands for a unit without a body too."""
    return [form for form in (Impl.U8, Impl.U8_GEMM) if form is Impl.U8 or (wanted == Impl.U8_NATIVE and form in forms)]


def unnamed(path: str | os.PathLike[str], plan: Plan) -> list[str]:
    """Return a note if a plan file does not name all units of a plan.

    Raises:
        PlanFileError: The file cannot be read, or is not a plan file.
    """
    rows = _rows(path)
    missing = [unit.name for unit in plan.units if unit.name not in rows]
    if not missing:
        return []
    named = f"{len(plan.units) - len(missing)} of {len(plan.units)}"
    return [f"{os.fspath(path)}: names {named} units; the rules decide the others: {listed(missing)}"]


def implementations(path: str | os.PathLike[str]) -> Mapping[str, str]:
    """Return the implementations in a plan file by unit.

    Raises:
        PlanFileError: The file cannot be read, or is not a plan file.
    """
    return {name: row.implementation for name, row in _rows(path).items()}


def operators_in(path: str | os.PathLike[str]) -> frozenset[str]:
    """Return the operators of the units in a plan file, as far as it says them.

    Raises:
        PlanFileError: The file cannot be read, or is not a plan file.
    """
    return frozenset(row.operator for row in _rows(path).values())


def _rows(path: str | os.PathLike[str]) -> Mapping[str, _Row]:
    """Return the rows of a plan file by unit; see `implementations`."""
    try:
        units = load_document(path, _File, "plan file", SCHEMA).units
        rows = {name: row if isinstance(row, Mapping) else {"implementation": row} for name, row in units.items()}
        return convert_rows(rows, _Row, f"{os.fspath(path)}: unit")
    except RequantError as error:
        raise PlanFileError(str(error)) from error

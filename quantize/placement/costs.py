"""Measured costs of units, kept from run to run: by runtime, CPU, threads, and what a unit computes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ... import RequantError
from ...calibration.files import write_atomically
from ...transforms.plan import Impl, Unit
from ..runtime.machine import Machine, folder

SCHEMA = 1


@dataclass(slots=True)
class Costs:
    """Microseconds by unit signature and implementation.

    Attributes:
        machine: What they are of.
        rows: By `signature` and implementation.
    """

    machine: Machine
    rows: dict[str, dict[str, float]] = field(default_factory=dict)

    def of(self, key: str, impl: Impl) -> float | None:
        """Return what a unit of this signature takes, None where that was not measured."""
        return self.rows.get(key, {}).get(impl.value)

    def put(self, key: str, impl: Impl, microseconds: float) -> None:
        """Remember what a unit takes: the least, as of any time that something else may lengthen."""
        row = self.rows.setdefault(key, {})
        row[impl.value] = min(round(microseconds, 3), row.get(impl.value, float("inf")))

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain JSON values."""
        machine = {"runtime": self.machine.runtime, "cpu": self.machine.cpu, "threads": self.machine.threads}
        return {"schema": SCHEMA, **machine, "costs": self.rows}

    @classmethod
    def from_json(cls, found: Any, where: str) -> Costs:
        """Read what `to_json` made.

        Raises:
            RequantError: It is none.
        """
        try:
            if found["schema"] != SCHEMA:
                raise RequantError(f"{where}: costs of schema {found['schema']!r}; this version reads {SCHEMA}")
            machine = Machine(str(found["runtime"]), str(found["cpu"]), int(found["threads"]))
            rows = {
                str(key): {Impl(impl).value: float(value) for impl, value in row.items()}
                for key, row in found["costs"].items()
            }
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise RequantError(f"{where}: no file of costs: {type(error).__name__}: {error}") from error
        if any(not 0 <= value < float("inf") for row in rows.values() for value in row.values()):
            raise RequantError(f"{where}: costs must be finite and not negative")
        return cls(machine, rows)


def path_of(machine: Machine) -> Path:
    """Return the file of a machine's costs."""
    return folder() / f"costs-{machine.key}.json"


def load(machine: Machine) -> Costs:
    """Return the costs that are kept of a machine; none where there is no file, or one that cannot be read."""
    path = path_of(machine)
    try:
        return Costs.from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, RequantError):
        return Costs(machine)


def read(path: str | os.PathLike[str]) -> Costs:
    """Read costs that were measured elsewhere.

    Raises:
        RequantError: The file cannot be read, or holds no costs.
    """
    try:
        return Costs.from_json(json.loads(Path(path).read_text(encoding="utf-8")), os.fspath(path))
    except OSError as error:
        raise RequantError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RequantError(f"{os.fspath(path)}: no JSON: {error}") from error


def save(costs: Costs, path: str | os.PathLike[str]) -> None:
    """Write costs, whole or not at all.

    Raises:
        RequantError: The file cannot be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequantError(f"{target}: cannot be written: {error.strerror}") from error
    write_atomically(target, json.dumps(costs.to_json(), indent=1, sort_keys=True).encode())


def keep(costs: Costs) -> None:
    """Add costs to those that are kept of the machine; where they cannot be kept, they are not.

    Of two that do so at once, one may lose; it is measured again.
    """
    merged = load(costs.machine)
    for key, row in costs.rows.items():
        for impl, microseconds in row.items():
            merged.put(key, Impl(impl), microseconds)
    try:
        save(merged, path_of(costs.machine))
    except RequantError:
        return


def kept() -> list[Costs]:
    """Return the costs that are kept of any machine."""
    found = []
    for path in sorted(folder().glob("costs-*.json")):
        try:
            found.append(read(path))
        except RequantError:
            continue
    return found


def clear() -> int:
    """Forget all costs; return how many files there were."""
    files = list(folder().glob("costs-*.json"))
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def signature(unit: Unit, nodes: Mapping[str, ir.Node], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return a digest of what a unit computes: operators, attributes, shapes; no names and no values.

    Args:
        unit: The unit.
        nodes: The nodes of the model by name.
        shapes: The shape of each tensor in the run that is timed, as far as it is known.
    """
    parts = [_node_text(nodes[name], shapes) for name in unit.nodes]
    return f"{unit.op}-{hashlib.blake2b(' '.join(parts).encode(), digest_size=8).hexdigest()}"


def _node_text(node: ir.Node, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return what distinguishes a node's kernel."""
    attributes = sorted(f"{name}={attribute.value}" for name, attribute in node.attributes.items())
    return f"{node.domain}:{node.op_type}({', '.join(_operand(node.inputs, shapes))}){attributes}"


def _operand(values: Iterable[ir.Value | None], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the shapes of operands, with how constants differ from activations."""
    found = []
    for value in values:
        if value is None:
            found.append("-")
        elif value.const_value is not None:
            found.append(f"constant{tuple(value.const_value.shape)}")
        else:
            found.append(f"{shapes.get(str(value.name), '?')}")
    return found

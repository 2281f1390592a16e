"""Measured costs of units. A cache keeps them by runtime, CPU, number of threads, and signature of the unit."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import onnx_ir as ir

from ... import RequantError
from ...calibration.model.session import OPERATORS
from ...calibration.range_files.decoding import Natural, convert_rows, load_document
from ...system.regular import reason_of
from ...system.writing import write_atomically
from ...transforms.int8.plan import Impl, Unit
from ..runtime.machine import Machine, folder, forgotten

SCHEMA = 1
Microseconds = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Rows = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds by unit signature and implementation.

    Attributes:
        machine: The machine on which they were measured.
        rows: By `signature` and implementation.
    """

    machine: Machine
    rows: Rows = field(default_factory=dict)

    def of(self, key: str, impl: Impl) -> float | None:
        """Return the cost of a unit with this signature; None if it was not measured."""
        return self.rows.get(key, {}).get(impl.value)

    def with_times(self, times: Iterable[tuple[str, str, float]]) -> Costs:
        """Return costs with more measurements; the least time of a signature and implementation counts.

        Args:
            times: Signatures, implementations and microseconds.
        """
        rows = {key: dict(row) for key, row in self.rows.items()}
        for key, impl, microseconds in times:
            row = rows.setdefault(key, {})
            row[str(impl)] = min(round(microseconds, 3), row.get(impl, math.inf))
        return Costs(self.machine, rows)

    def with_rows(self, rows: Rows) -> Costs:
        """Return these costs with the costs of other rows; the least time of a signature and implementation counts."""
        return self.with_times((key, impl, cost) for key, row in rows.items() for impl, cost in row.items())

    def to_json(self) -> dict[str, Any]:
        """Return the content of a costs file as plain JSON values."""
        return {"schema": SCHEMA, **asdict(self.machine), "costs": self.rows}


@dataclass(frozen=True, slots=True)
class _File:
    """The decoded content of a costs file."""

    runtime: str
    cpu: str
    threads: Natural
    costs: dict[str, Any]


def path_of(machine: Machine) -> Path:
    """Return the cache file of a machine's costs. Another library of native operators has another file."""
    return folder() / f"costs-{machine.key}{_suffix_of(OPERATORS)}.json"


@cache
def _suffix_of(library: Path) -> str:
    """Return a suffix for the names of files that identifies a library by its content; empty if there is none."""
    try:
        return f"-{hashlib.sha256(library.read_bytes()).hexdigest()[:8]}"
    except OSError:
        return ""


def load(machine: Machine) -> Costs:
    """Return the cached costs of a machine; none if there is no file. If it cannot be read, a note says so."""
    path = path_of(machine)
    if not os.path.lexists(path):
        return Costs(machine)
    try:
        return Costs(machine, read(path).rows)
    except RequantError as error:
        forgotten(error)
        return Costs(machine)


def read(path: str | os.PathLike[str]) -> Costs:
    """Read a costs file.

    Raises:
        RequantError: The file cannot be read, or is not a costs file.
    """
    file = load_document(path, _File, "costs file", SCHEMA)
    rows = convert_rows(file.costs, dict[Impl, Microseconds], f"{os.fspath(path)}: costs of")
    known = {key: {impl.value: cost for impl, cost in row.items()} for key, row in rows.items()}
    return Costs(Machine(file.runtime, file.cpu, file.threads), known)


def save(costs: Costs, path: str | os.PathLike[str], *, output: bool = True) -> None:
    """Write a costs file, whole or not at all; `output` as in `write_atomically`.

    Raises:
        RequantError: The file cannot be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequantError(f"{target}: cannot be written: {reason_of(error)}") from error
    write_atomically(target, json.dumps(costs.to_json(), indent=1, sort_keys=True).encode(), output=output)


def keep(costs: Costs) -> None:
    """Add costs to the cache of their machine; a cache that cannot be written is ignored.

    If two processes write at once, the costs of one may be lost, and are measured again.
    """
    if path_of(costs.machine).is_symlink():  # writing would replace the file that it names
        return
    with suppress(RequantError):
        save(load(costs.machine).with_rows(costs.rows), path_of(costs.machine), output=False)


def kept() -> list[Costs]:
    """Return the cached costs of every machine."""
    found = []
    for path in sorted(folder().glob("costs-*.json")):
        with suppress(RequantError):
            found.append(read(path))
    return found


def clear() -> int:
    """Remove all cached costs; return the number of files.

    Raises:
        RequantError: A file cannot be removed.
    """
    files = list(folder().glob("costs-*.json"))
    for path in files:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RequantError(f"{path}: cannot be removed: {reason_of(error)}") from error
    return len(files)


def signature(
    unit: Unit, nodes: Mapping[str, ir.Node], shapes: Mapping[str, tuple[int, ...]], followers: Iterable[str] = ()
) -> str:
    """Return a digest of a unit's operators, attributes and shapes, without names and values.

    Args:
        unit: The unit.
        nodes: The nodes of the model by name.
        shapes: Shapes by tensor in the run that is timed, as far as they are known.
        followers: The nodes of other units whose time is a part of the unit's time.
    """
    parts = [_node_text(nodes[name], shapes) for name in (*unit.nodes, *followers)]
    return f"{unit.op}-{hashlib.blake2b(' '.join(parts).encode(), digest_size=8).hexdigest()}"


def _node_text(node: ir.Node, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the operator of a node with the shapes of its operands and its attributes."""
    attributes = sorted(f"{name}={attribute.value}" for name, attribute in node.attributes.items())
    return f"{node.domain}:{node.op_type}({', '.join(_operand(node.inputs, shapes))}){attributes}"


def _operand(values: Iterable[ir.Value | None], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the shapes of operands; a constant is marked, because its kernel may differ."""
    found = []
    for value in values:
        if value is None:
            found.append("-")
        elif value.const_value is not None:
            found.append(f"constant{tuple(value.const_value.shape)}")
        else:
            found.append(f"{shapes.get(str(value.name), '?')}")
    return found

"""What each operator becomes on the installed runtime: the table of operators, checked against its kernels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .... import UnknownNameError
from ....transforms.int8.ops import OPS, Kernel, Op
from ...runtime.kernels import uint8_kernels

KINDS = {
    "compute": "int8 products",
    "arith": "uint8, own scale",
    "same": "uint8 as it is",
    "float": "float",
}


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """One operator on this machine.

    Attributes:
        name: The operator; ``domain.name`` outside the standard domain.
        does: What it becomes, as text.
        kernels: The runtime's kernel for each form: ``u8->u8``, ``u8->float``, ``dynamic``, ``block``.
        missing: Kernels of the table that the installed runtime lacks.
        stores: Whether its constants may be int8 in the file while it computes in float.
        absorbs: Operators after it that run inside its kernel.
        why: Why it stays float, or a remark.
    """

    name: str
    does: str
    kernels: dict[str, str]
    missing: tuple[str, ...]
    stores: bool
    absorbs: tuple[str, ...]
    why: str

    @property
    def operator(self) -> str:
        """The name without the domain."""
        return self.name.rpartition(".")[2]

    @property
    def domain(self) -> str:
        """The domain; empty for the standard domain."""
        return self.name.rpartition(".")[0]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def operators(name: str | None = None) -> list[OperatorFacts]:
    """Return the facts about all operators, in alphabetic order without their domains, or about the operator `name`.

    Raises:
        UnknownNameError: No row has this name.
    """
    if name is not None and name not in OPS:
        raise UnknownNameError("operator in the table", name, OPS)
    rows = [_facts(key, OPS[key]) for key in ([name] if name else OPS)]
    return sorted(rows, key=lambda row: (row.operator.lower(), row.domain))


def _facts(name: str, row: Op) -> OperatorFacts:
    """Describe one row of the table."""
    forms = {"u8->u8": row.u8, "u8->float": row.u8_float, "dynamic": row.dynamic, "block": row.blocks}
    claimed = {form: kernel for form, kernel in forms.items() if kernel is not None}
    there = {form: _spelled(kernel) for form, kernel in claimed.items() if kernel in uint8_kernels()}
    missing = tuple(_spelled(kernel) for kernel in claimed.values() if kernel not in uint8_kernels())
    does = KINDS[row.kind]
    if row.kind == "float":
        does = "dynamic int8" if there else "int8 weights" if row.stores else does
    return OperatorFacts(name, does, there, missing, bool(row.stores), tuple(sorted(row.absorbs)), row.why.text)


def _spelled(kernel: Kernel) -> str:
    """Return a kernel as ``domain.Operator``."""
    return ".".join(part for part in kernel if part)

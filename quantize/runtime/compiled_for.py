"""A compiled model says what it was compiled for, and is refused elsewhere."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ... import RequantError
from .machine import flags

KEY = "requant.compiled"
"""The key in ``metadata_props`` of what a model was compiled for: the JSON of a `Target`."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a model is compiled for.

    Attributes:
        runtime: Version of ONNX Runtime.
        machine: Architecture, as the system names it: ``x86_64``, ``aarch64``.
        cpu: Which of `requant.quantize.runtime.machine.FLAGS` the CPU has; empty where the system does not say.
    """

    runtime: str
    machine: str
    cpu: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "cpu": list(self.cpu)}

    def unlike(self, other: Target) -> str:
        """Say in what `other` differs; empty where it does not."""
        parts = []
        if self.runtime != other.runtime:
            parts.append(f"ONNX Runtime {self.runtime}, here {other.runtime}")
        if self.machine != other.machine:
            parts.append(f"{self.machine}, here {other.machine}")
        missing, further = sorted({*self.cpu} - {*other.cpu}), sorted({*other.cpu} - {*self.cpu})
        if missing or further:
            without = f"a CPU without {', '.join(further)}" if further and not missing else ""
            parts.append(
                without or f"a CPU with {', '.join(missing)}" + (f", without {', '.join(further)}" * bool(further))
            )
        return "; ".join(parts)


def this_machine() -> Target:
    """Return what a model that is compiled now is compiled for."""
    import onnxruntime as ort

    return Target(ort.__version__, platform.machine(), flags())


def compiled_for(path: str | os.PathLike[str], props: Mapping[str, str]) -> Target | None:
    """Return what a model with this metadata was compiled for; None where it was not compiled.

    Raises:
        RequantError: The entry is not what `compile_model` writes.
    """
    text = props.get(KEY)
    if text is None:
        return None
    try:
        found = json.loads(text)
        return Target(str(found["runtime"]), str(found["machine"]), tuple(map(str, found["cpu"])))
    except (ValueError, KeyError, TypeError) as error:
        raise RequantError(f"{path}: {KEY!r} in its metadata is damaged: {text[:80]!r}; compile it again") from error


def refuse_foreign(path: str | os.PathLike[str], props: Mapping[str, str]) -> None:
    """Refuse a model that was compiled for another CPU or runtime.

    Args:
        path: How the message calls the model.
        props: Its ``metadata_props``; a model without `KEY` was not compiled, and passes.

    Raises:
        RequantError: This machine or its runtime differs; the message says in what.
    """
    target = compiled_for(path, props)
    difference = "" if target is None else target.unlike(this_machine())
    if difference:
        raise RequantError(f"{path}: compiled for {difference}; compile the original here")

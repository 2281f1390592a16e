"""The target of a compiled model, in its metadata, and the refusal on another machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ... import RequantError
from ...calibration.range_files.decoding import convert
from ...system.values import decode_json
from .machine import flags

KEY = "requant.compiled"
"""The key of the target in ``metadata_props``; the value is the JSON of a `Target`."""


@dataclass(frozen=True, slots=True)
class Target:
    """The machine and runtime that a model is compiled for.

    Attributes:
        runtime: Version of ONNX Runtime.
        machine: Architecture, as the system names it: ``x86_64``, ``aarch64``.
        cpu: Which of `requant.quantize.runtime.machine.FLAGS` the CPU has; empty if the system does not tell.
    """

    runtime: str
    machine: str
    cpu: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "cpu": list(self.cpu)}

    def unlike(self, other: Target) -> str:
        """Return the differences from `other` as text; empty if there are none."""
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
    """Return the target of a model that is compiled here."""
    import onnxruntime as ort

    return Target(ort.__version__, platform.machine(), flags())


def compiled_for(path: str | os.PathLike[str], props: Mapping[str, str]) -> Target | None:
    """Return the target of a model with this metadata; None if the model is not compiled.

    Raises:
        RequantError: The entry is not what `compile_model` writes.
    """
    text = props.get(KEY)
    if text is None:
        return None
    try:
        found = decode_json(text)
        return convert(found, Target, KEY)
    except (ValueError, RequantError) as error:
        raise RequantError(f"{path}: {KEY!r} in its metadata is damaged: {text[:80]!r}; compile it again") from error


def refuse_foreign(path: str | os.PathLike[str], props: Mapping[str, str]) -> None:
    """Refuse a model that was compiled for another CPU or runtime.

    Args:
        path: The model, for the message.
        props: Its ``metadata_props``; a model without `KEY` is not compiled, and passes.

    Raises:
        RequantError: This machine or its runtime differs; the message lists the differences.
    """
    target = compiled_for(path, props)
    difference = "" if target is None else target.unlike(this_machine())
    if difference:
        raise RequantError(f"{path}: compiled for {difference}; compile the original here")

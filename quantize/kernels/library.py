"""The library of native operators: where it is, what it can do, and how a program loads it."""

from __future__ import annotations

import ctypes
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ... import NATIVE_DOMAIN
from ...calibration.model.session import OPERATORS

VERSION = 2
"""The version of the operators' domain; ``kVersion`` in the sources. Models with another one run by their bodies."""
NAMES: Mapping[str, int] = {"Convolution": 12, "MatMul": 8, "Table": 6}
"""Under how many names the library has an operator; ``count_of_names`` in the sources."""
FEW = 4
"""Under how many names it has all others."""
LANGUAGES = {
    "Python": 'options.register_custom_ops_library("{path}")',
    "C++": 'options.RegisterCustomOpsLibrary("{path}");',
    "C#": 'options.RegisterCustomOpLibrary("{path}");',
}
"""The line that loads the library, by language; ``options`` are the options of a session."""


def names_of(operator: str) -> list[str]:
    """Return the names of an operator: ``Table``, ``Table_2``, ... Each function of a model needs a name of its own."""
    return [operator, *(f"{operator}_{number}" for number in range(2, NAMES.get(operator, FEW) + 1))]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The native operators of this machine.

    Attributes:
        library: The path of the library.
        operators: The names of its operators in the domain ``ai.requant``.
        available: The instruction sets that both the library and the CPU have, the fastest first.
        isa: The instruction set that it uses; ``REQUANT_KERNELS_ISA`` chooses another one.
    """

    library: Path
    operators: tuple[str, ...]
    available: tuple[str, ...]
    isa: str

    @property
    def lines(self) -> Mapping[str, str]:
        """The line that loads the library, by language."""
        return {language: line.format(path=self.library) for language, line in LANGUAGES.items()}

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "library": str(self.library),
            "domain": NATIVE_DOMAIN,
            "operators": list(self.operators),
            "available": list(self.available),
            "isa": self.isa,
            "lines": dict(self.lines),
        }


@cache
def kernels() -> Kernels | str:
    """Return the native operators of this machine, or why there are none."""
    if os.name != "posix" or not OPERATORS.is_file():
        build = "pip install 'requant[native]', then python -m requant.quantize.kernels.build"
        return f"no native operators here ({platform.system()}, {platform.machine()}); to build them: {build}"
    try:
        library = ctypes.CDLL(os.fspath(OPERATORS))
    except OSError as error:
        return f"{OPERATORS}: the library cannot be loaded: {error}"
    library.RequantKernels.restype = ctypes.c_char_p
    found = json.loads(library.RequantKernels())
    if found["isa"] is None:
        asked = os.environ.get("REQUANT_KERNELS_ISA", "")
        return f"REQUANT_KERNELS_ISA is {asked!r}; this CPU has {', '.join(found['available'])}"
    return Kernels(OPERATORS, tuple(found["operators"]), tuple(found["available"]), found["isa"])

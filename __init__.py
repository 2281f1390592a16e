"""requant: a float ONNX model and a sample of its data in, a measured INT8 model out.

    from requant import Options, quantize_model

    result = quantize_model("model.onnx", "calib.npz", "model_int8.onnx", Options(effort="high"))
    print(result)

Errors live here. The names of `HOMES` are imported from their packages when they are used first, so that
`import requant` costs nothing; `requant.transforms`, `requant.calibration` and `requant.quantize` have all names.
"""

import os
import sys
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from requant.calibration import Calibrator
    from requant.quantize import (
        Comparison,
        Options,
        Result,
        Setting,
        TransformOptions,
        compare_models,
        quantize_model,
        transform_model,
    )

    __version__: str

__all__ = [
    "NATIVE_DOMAIN",
    "Calibrator",
    "Comparison",
    "Options",
    "RequantError",
    "Result",
    "Setting",
    "TransformOptions",
    "UnknownNameError",
    "__version__",
    "compare_models",
    "near",
    "quantize_model",
    "transform_model",
]

# ONNX Runtime reads this when it is imported, which is later. A user who sets it to 0 keeps it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# `python -m requant` looks for modules in the current folder first. argv begins with -m only while Python looks for
# the module that it will run, which is then the argument in front of the program's own.
_RUN = sys.orig_argv[-len(sys.argv)].removeprefix("-m") if sys.argv[:1] == ["-m"] else ""
try:
    _HERE = os.getcwd()
except FileNotFoundError:  # removed
    _HERE = ""
if _RUN.partition(".")[0] == __name__ and not sys.flags.safe_path and sys.path[0] == _HERE:
    del sys.path[0]  # the first alone: PYTHONPATH may name the folder too

NATIVE_DOMAIN = "ai.requant"
"""The domain of the native operators."""

MOST_OF_NAMES = 180
"""The characters of a list of names in a message: the metrics fit in, the tensors of a model do not."""

HOMES = {
    "calibration": ("Calibrator",),
    "quantize": (
        "Comparison",
        "Options",
        "Result",
        "Setting",
        "TransformOptions",
        "compare_models",
        "quantize_model",
        "transform_model",
    ),
}
"""The package of each name that is imported when it is used first."""


def __getattr__(name: str) -> Any:
    """Import a name of `HOMES`, or read the version of the installed package."""
    home = next((package for package, names in HOMES.items() if name in names), None)
    if home is not None:
        from importlib import import_module

        return globals().setdefault(name, getattr(import_module(f"{__name__}.{home}"), name))
    if name == "__version__":
        from importlib.metadata import version

        return globals().setdefault(name, version("requant"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names, imported or not."""
    return sorted({*globals(), *__all__})


class RequantError(Exception):
    """A request that cannot be met. The message says what is wrong, where, and what to do."""


class UnknownNameError(RequantError):
    """A name that nobody knows; the message lists near ones.

    Args:
        kind: What was looked for, in words: ``"transform"``, ``"node"``.
        name: The name that was given.
        known: Every name that would have been accepted.
    """

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        """Compose the message from the nearest of `known`."""
        super().__init__(f"no {kind} named {name!r}{near(name, known)}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle makes the error of: processes of a pool send errors to each other."""
        return _again, (type(self), self.args)


def _again(kind: type[RequantError], arguments: tuple[Any, ...]) -> RequantError:
    """Return an error with its message; `kind` composes none."""
    return kind.__new__(kind, *arguments)


def near(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'a' or 'b'?"`` for the names nearest to `name`, or a list of what there is."""
    from difflib import get_close_matches

    names = sorted(set(known))
    folded = {candidate.lower(): candidate for candidate in names}
    found = [folded[match] for match in get_close_matches(str(name).lower(), folded, n=3, cutoff=0.6)]
    if found:
        return "; did you mean " + " or ".join(map(repr, found)) + "?"
    ends = accumulate(len(name) + 2 for name in names)
    fit = max(sum(end <= MOST_OF_NAMES for end in ends), 1)
    shown = ", ".join(names[:fit]) + (f", ... ({len(names)} in all)" if len(names) > fit else "")
    return f"; there are: {shown}" if names else "; there are none"

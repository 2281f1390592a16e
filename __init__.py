"""requant: a float ONNX model and a sample of its data in, a measured INT8 model out.

Only errors, one name, two settings of the process and the reading of small files live here; everything else is imported
from its own package (`requant.transforms`, `requant.calibration`, `requant.quantize`), so that `import requant` costs
nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Never

# ONNX Runtime reads this when it is imported, which is later. A user who sets it to 0 keeps it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# `python -m requant` looks for modules in the current folder first. argv begins with -m only while Python looks for
# the module that it will run, which is then the argument in front of the program's own.
_RUN = sys.orig_argv[-len(sys.argv)].removeprefix("-m") if sys.argv[:1] == ["-m"] else ""
if _RUN.partition(".")[0] == __name__ and not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]  # the first alone: PYTHONPATH may name the folder too

NATIVE_DOMAIN = "ai.requant"
"""The domain of the native operators."""
SMALL_FILE = 64 * 2**20
"""The most bytes of a file that `read_file` returns if the caller sets no other limit."""
MOST_LEVELS = 64
"""The most levels of lists and objects in a JSON or TOML document."""


class RequantError(Exception):
    """A request that cannot be met. The message says what is wrong, where, and what to do."""


class UnknownNameError(RequantError):
    """A name that nobody knows; the message lists near ones.

    Args:
        kind: What was looked for, in words: ``"transform"``, ``"node"``.
        name: The name that was given.
        known: Every name that would have been accepted.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        """Compose the message from the nearest of `known`."""
        super().__init__(f"no {kind} named {name!r}{near(name, known)}")


def near(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'a' or 'b'?"`` for the names nearest to `name`, or a list of what there is."""
    from difflib import get_close_matches

    names = sorted(set(known))
    folded = {candidate.lower(): candidate for candidate in names}
    found = [folded[match] for match in get_close_matches(name.lower(), folded, n=3, cutoff=0.6)]
    if found:
        return "; did you mean " + " or ".join(map(repr, found)) + "?"
    shown = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
    return f"; there are: {shown}" if names else "; there are none"


def read_file(path: str | os.PathLike[str], *, most: int = SMALL_FILE, whole: bool = True) -> bytes:
    """Return the bytes of a file. All files are read with it that requant or a user writes beside models and data.

    A pipe or a device is refused without waiting for its content.

    Args:
        path: The file.
        most: The most bytes that are read.
        whole: Whether a larger file is refused. If not, its first bytes are returned.

    Raises:
        RequantError: The path is no regular file, the file is larger, or it cannot be read.
    """
    import stat

    name = os.fspath(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
                raise RequantError(f"{name}: cannot be read: is {kind}, not a file")
            if whole and status.st_size > most:
                raise RequantError(f"{name}: cannot be read: has more than {most >> 20} MiB")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(min(status.st_size, most) + 1)
                while len(data) <= most and (more := file.read(2**20)):  # files of the system tell no size
                    data += more
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequantError(f"{name}: cannot be read: {reason}") from error
    if len(data) > most and whole:
        raise RequantError(f"{name}: cannot be read: has more than {most >> 20} MiB")
    return data[:most]


def decode_json(text: str | bytes) -> Any:
    """Return the values of a JSON text.

    Raises:
        ValueError: The text is not JSON, an object has a key twice, or `check_values` refuses a value; the message is
            one line.
    """
    import json

    try:
        text = text.decode(json.detect_encoding(text)) if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("the values are nested too deeply") from None
    except ValueError as error:
        if "integer string conversion" in str(error):  # Python's advice is for programmers
            raise ValueError("a number has thousands of digits") from None
        raise
    check_values(value)
    return value


def check_values(value: object) -> None:
    """Refuse values that a later step could not handle: nested deeply, integers beyond 64 bits, infinite numbers, NaN.

    Args:
        value: The values of a JSON or TOML document.

    Raises:
        ValueError: A value is refused.
    """
    level: list[Collection[Any]] = [[value]]
    levels, unfit = 0, False
    while level:
        levels += 1
        if levels > MOST_LEVELS:
            raise ValueError("the values are nested too deeply")
        unfit = unfit or any(map(_has_unfit, level))
        level = [inner for values in level for inner in _inner(values)]
    if unfit:
        place, reason = next(_unfit(value, ""))
        raise ValueError(f"{place!r}: {reason}" if place else reason)


def _has_unfit(values: Collection[Any]) -> bool:
    """Return whether one of some values is a number that `check_values` refuses."""
    kinds = set(map(type, values))
    if int in kinds:
        whole = values if len(kinds) == 1 else [each for each in values if type(each) is int]
        if not -(2**63) <= min(whole) <= max(whole) < 2**63:
            return True
    return float in kinds and not all(abs(each) < float("inf") for each in values if type(each) is float)


def _unfit(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Yield the places of refused numbers with the reasons; the place of a value is ``tensors.conv1.range[0]``."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _unfit(inner, f"{place}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unfit(inner, f"{place}[{index}]")
    elif type(value) is int and not -(2**63) <= value < 2**63:
        yield place, "the integer has more than 64 bits"
    elif type(value) is float and not abs(value) < float("inf"):
        yield place, "the number is not finite"


def _inner(values: Collection[Any]) -> list[Collection[Any]]:
    """Return the lists and the values of objects among some values."""
    if not {dict, list} & set(map(type, values)):
        return []
    return [each.values() if type(each) is dict else each for each in values if type(each) in (dict, list)]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse repeated keys."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} occurs twice")
    return entries


def _no_constant(name: str) -> Never:
    """Refuse a constant that Python's parser accepts and JSON lacks."""
    raise ValueError(f"{name} is not a number in JSON")

"""Outputs that would overwrite an input, or each other, are refused before any long work."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from .. import RequantError

PathLike: TypeAlias = str | os.PathLike[str]


def check_apart(outputs: Mapping[str, PathLike], inputs: Iterable[PathLike]) -> None:
    """Refuse an output that is the file of an input or of another output.

    Args:
        outputs: The paths of the files to write, by the name of their option.
        inputs: Paths, and texts that name data, such as ``digits.npz:calib`` or ``reader.py:samples``; those that name
            no existing file do not count.

    Raises:
        RequantError: Two of them are one file.
    """
    texts = [os.fspath(each) for each in inputs]
    read = [(text, file) for text in texts if (file := _file_of(text)) is not None]
    written: list[tuple[str, Path]] = []
    for option, path in outputs.items():
        target = Path(path)
        for text, file in read:
            if _is_same(target, file):
                raise RequantError(f"{path}: {option} would overwrite the input {text!r}; choose another path")
        for other, file in written:
            if _is_same(target, file):
                raise RequantError(f"{path}: {option} and {other} are one file; choose another path")
        written.append((option, target))


def _file_of(text: str) -> Path | None:
    """Return the existing file that a path or a data source names; None without one."""
    for name in (text, text.rpartition(":")[0]):
        try:
            if name and os.path.isfile(name):  # False for a name that is too long, where a Path raises
                return Path(name)
        except (OSError, ValueError):  # no name of a file
            continue
    return None


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths are one file, which need not exist."""
    try:
        if os.path.exists(one) and os.path.exists(other):
            return one.samefile(other)
        return os.path.realpath(one) == os.path.realpath(other)
    except (OSError, ValueError):  # the check of the output says what is wrong with it
        return False

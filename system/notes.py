"""What the process of a command tells the process that waits for it: two pages of memory that both map.

The waiting process reads them when the command has died. Without a waiting process the notes stay in this process.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass, field, fields

SLOT = 2**16
"""Bytes of one version of the notes. There are two, so that a crash while one is written leaves the other."""
SCRATCH = ".requant-"
"""The beginning of the names of temporary files and folders."""
MOST = 64
"""How many paths of each kind are kept."""


@dataclass(slots=True)
class Notes:
    """What a command has done so far.

    Attributes:
        stage: The stage of the work.
        model: The model file that was loaded last.
        folders: The folders in which temporary files were made.
        written: The outputs that are complete.
        code: The exit code of the finished command; None while it runs.
    """

    stage: str = ""
    model: str = ""
    folders: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    code: int | None = None


NOTES = Notes()
_page: mmap.mmap | None = None


def share() -> None:
    """Map the notes, so that processes that are forked from here on share them."""
    global _page
    _page = mmap.mmap(-1, 1 + 2 * SLOT)


def note(*, stage: str | None = None, model: str | None = None, code: int | None = None) -> None:
    """Note the stage of the work, the model if it is no temporary one, or the exit code; None leaves what is there."""
    given = {"stage": stage, "model": None if model is not None and _is_temporary(model) else model, "code": code}
    for name, value in given.items():
        if value is not None:
            setattr(NOTES, name, value)
    _store()


def note_folder(folder: str | os.PathLike[str]) -> None:
    """Note a folder in which temporary files are made."""
    _add(NOTES.folders, os.path.abspath(folder))


def note_written(path: str | os.PathLike[str]) -> None:
    """Note a complete output; files in temporary folders are none."""
    if not _is_temporary(path):
        _add(NOTES.written, os.fspath(path))


def forget() -> None:
    """Forget all notes: a command begins."""
    fresh = Notes()
    for row in fields(Notes):
        setattr(NOTES, row.name, getattr(fresh, row.name))
    _store()


def read() -> Notes:
    """Return the notes of the process that shares them; empty notes if it wrote none."""
    if _page is None:
        return NOTES
    slot = 1 + _page[0] * SLOT
    try:
        return Notes(**json.loads(_page[slot : slot + SLOT].partition(b"\0")[0]))
    except (ValueError, TypeError):
        return Notes()


def also_written(notes: Notes = NOTES) -> str:
    """Return the end of an error message, ``"; written: q.onnx, q.plan.json"``; empty if nothing was written."""
    return f"; written: {', '.join(notes.written)}" if notes.written else ""


def _is_temporary(path: str | os.PathLike[str]) -> bool:
    return f"{os.sep}{SCRATCH}" in os.path.abspath(path)


def _add(paths: list[str], path: str) -> None:
    if path not in paths:
        paths.append(path)
        del paths[:-MOST]
        _store()


def _store() -> None:
    """Write the notes to the slot that is not the newest, then make it the newest."""
    if _page is None:
        return
    text = json.dumps({row.name: getattr(NOTES, row.name) for row in fields(Notes)}).encode()
    if len(text) < SLOT:
        other = 1 - _page[0]
        slot = 1 + other * SLOT
        _page[slot : slot + len(text) + 1] = text + b"\0"
        _page[0] = other

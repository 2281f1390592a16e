"""Temporary files and folders that nobody needs after the death of their process.

Each is locked (flock) while its process lives; the kernel releases the lock of a dead process. So the next process that
makes a temporary file in the same folder finds and removes those of dead processes. The names hold a mark of this
machine, because a lock need not be visible on other machines that share the folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from .. import RequantError
from .notes import SCRATCH, note_folder

try:
    import fcntl
except ImportError:  # Windows: no locks, and nothing is swept
    fcntl = None  # type: ignore[assignment]

OLD = "old"
"""The folder, in a temporary folder, of files that are put back if their process dies while it replaces them."""
LEAST_ROOM = 2**20
"""The least bytes that a disk for temporary files must have."""
_swept: set[str] = set()
_exclusive = threading.local()


@cache
def prefix() -> str:
    """Return the beginning of all names: ``.requant-``, eight digits of this machine's mark, and a dash."""
    try:
        machine = Path("/etc/machine-id").read_bytes()
    except OSError:
        machine = b""
    return f"{SCRATCH}{hashlib.sha256(platform.node().encode() + machine).hexdigest()[:8]}-"


@contextmanager
def scratch_folder(beside: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """Make a temporary folder, and remove it afterwards.

    Args:
        beside: The folder to make it in; None for the system's temporary folder.

    Raises:
        OSError: It cannot be made.
    """
    place = tempfile.gettempdir() if beside is None else os.fspath(beside)
    _begin(place)
    made, held = list[str](), None
    try:
        path, held = _locked(lambda: _new_folder(place, made))
        yield Path(path)
    finally:
        for each in made:
            shutil.rmtree(each, ignore_errors=True)
        _release(held)


@contextmanager
def scratch_file(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Make an empty temporary file, and remove it afterwards if it is still there.

    Raises:
        OSError: It cannot be made.
    """
    _begin(folder)
    made, held = list[str](), None
    try:
        path, held = _locked(lambda: _new_file(folder, made))
        yield Path(path)
    finally:
        for each in made:
            with suppress(FileNotFoundError):
                os.unlink(each)
        _release(held)


def check_room() -> None:
    """Check that the system's folder for temporary files has room for some.

    Raises:
        RequantError: Its disk is full.
    """
    place = tempfile.gettempdir()
    with suppress(OSError):  # making a file in it tells
        if shutil.disk_usage(place).free < LEAST_ROOM:
            raise RequantError(f"{place}: no space is left for temporary files; set TMPDIR to another folder")


def _new_folder(folder: str, made: list[str]) -> str:
    """Make a folder with a new name, and add the name to `made` first: a signal may come right behind it."""
    made.append(os.path.join(folder, f"{prefix()}{secrets.token_hex(8)}"))
    os.mkdir(made[-1], 0o700)
    return made[-1]


def _new_file(folder: str | os.PathLike[str], made: list[str]) -> str:
    """Make a file with a new name, and add the name to `made` first: a signal may come right behind it."""
    made.append(os.path.join(folder, f"{prefix()}{secrets.token_hex(8)}.tmp"))
    with open(made[-1], "xb"):  # with the permissions of the user, which tempfile does not give
        return made[-1]


def _begin(folder: str | os.PathLike[str]) -> None:
    """Sweep a folder before the first temporary file is made in it."""
    place = os.path.abspath(folder)
    if place not in _swept:
        _swept.add(place)
        note_folder(place)
        sweep(place)


def _locked(make: Callable[[], str]) -> tuple[str, int | None]:
    """Make a temporary file or folder and lock it; make another if it was swept in between."""
    while True:
        path = make()
        if fcntl is None:
            return path, None
        try:
            held = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held), os.stat(path)):
                return path, held
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:  # a file system without locks: nobody can lock it, so nobody sweeps it
            return path, held
        os.close(held)


def _release(held: int | None) -> None:
    if held is not None:
        os.close(held)


def sweep(folder: str | os.PathLike[str]) -> None:
    """Remove the temporary files and folders of dead processes of this user and machine from a folder."""
    if fcntl is None:
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in [entry for entry in entries if entry.name.startswith(prefix())]:
            with suppress(OSError):
                _remove_if_dead(entry.path)


def _remove_if_dead(path: str) -> None:
    """Remove a temporary file or folder if its process is dead.

    Raises:
        OSError: It is alive, of another user, or cannot be locked.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(status, os.lstat(path)):
            return
        if stat.S_ISREG(status.st_mode):
            os.unlink(path)
        else:
            _put_back(path)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)


def _put_back(path: str) -> None:
    """Move files that were being replaced back beside a temporary folder, if one of them is missing there."""
    old, home = os.path.join(path, OLD), os.path.dirname(path)
    names = os.listdir(old) if os.path.isdir(old) else []
    if any(not os.path.lexists(os.path.join(home, name)) for name in names):
        for name in names:
            os.replace(os.path.join(old, name), os.path.join(home, name))


@contextmanager
def exclusive(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Let other processes wait that want to replace several files in the same folder; a thread may nest this.

    Without it, two runs with the same output could leave files of both.
    """
    held: set[str] = _exclusive.__dict__.setdefault("held", set())
    place = os.path.realpath(folder)
    if fcntl is None or place in held:
        yield
        return
    fd = None
    try:
        with suppress(OSError):  # a folder that cannot be read, or a file system without locks
            fd = os.open(place, os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_EX)
        held.add(place)
        yield
    finally:
        held.discard(place)
        _release(fd)

"""What Python imports: nothing of the current folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SAFE, PATHS = "PYTHONSAFEPATH", "PYTHONPATH"


def forget_empty_paths() -> None:
    """Take the current folder out of ``sys.path`` where only an empty entry of PYTHONPATH has put it there.

    ``PYTHONPATH=$PYTHONPATH:/somewhere`` has an empty entry if the variable was not set. Child processes get the
    variable without empty entries.
    """
    given = os.environ.get(PATHS)
    if not given:  # Python does not look for entries in an empty text
        return
    named = given.split(os.pathsep)
    kept = [entry for entry in named if entry]
    if len(kept) == len(named):
        return
    with suppress(FileNotFoundError):  # the folder has been removed
        here = os.getcwd()
        if here not in map(os.path.abspath, kept):
            sys.path[:] = [entry for entry in sys.path if entry not in ("", here)]
    os.environ[PATHS] = os.pathsep.join(kept)


@contextmanager
def safe_children() -> Iterator[None]:
    """Let Python processes that are started in the block not import from the current folder.

    ``python -c``, with which multiprocessing starts a process, does so otherwise.
    """
    before = os.environ.get(SAFE)
    os.environ[SAFE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE]
        else:
            os.environ[SAFE] = before

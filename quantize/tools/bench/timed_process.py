"""A session in a process of its own, timed there: for settings that a process takes from its first session alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from .... import RequantError
from ....calibration.session import Array

MODULE = __name__


class TimedProcess:
    """A context in which a model is loaded in another Python process."""

    def __init__(
        self, model: str | os.PathLike[str], values: Mapping[str, int | bool | str], feed: Mapping[str, Array]
    ) -> None:
        """Start the process; it loads the model while this one goes on.

        Args:
            model: Path of the model.
            values: Settings, as `requant.quantize.runtime.configured.open_configured` takes them.
            feed: What the model is run on; strings must be of NumPy's type, not Python objects.
        """
        self._name = os.fspath(model)
        self._folder = tempfile.TemporaryDirectory(prefix="requant-")
        arrays = Path(self._folder.name) / "feed.npz"
        # by position: a name may be no name of a file
        np.savez(arrays, *[array.astype(str) if array.dtype == object else array for array in feed.values()])
        job = json.dumps([os.fspath(model), dict(values), list(feed), os.fspath(arrays)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Self:
        """Return the process."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process and wait until it has gone."""
        self._process.communicate()  # closes its input, which ends it
        self._folder.cleanup()

    def block(self, count: int) -> list[float]:
        """Run the session `count` times and return the seconds of each run.

        Raises:
            RequantError: The process has failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{count}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RequantError(f"{self._name}: the model fails in a process of its own")
        times: list[float] = json.loads(line)
        return times


def _serve(job: str) -> None:
    """Load a model and, for each number read, print the seconds of as many runs."""
    from ...runtime.configured import open_configured, timed_runs

    model, values, names, arrays = json.loads(job)
    session = open_configured(model, values)
    with np.load(arrays, allow_pickle=False) as file:
        feed: dict[str, Any] = {name: file[f"arr_{place}"] for place, name in enumerate(names)}
    for line in sys.stdin:
        print(json.dumps(timed_runs(session, feed, int(line))), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])

"""A session as a function from a feed to named outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...calibration.session import Array, ModelSource, describe, open_session, run_session


class Runner:
    """A loaded model that is called with a feed and returns its outputs by name."""

    def __init__(self, model: ModelSource, *, threads: int = 0, lean: bool = False) -> None:
        """Load `model`; a lean session is for a handful of runs of a large one (`open_session`).

        Raises:
            RequantError: The runtime cannot load it.
        """
        self._name = describe(model)
        self._session = open_session(model, threads=threads, lean=lean)
        self.outputs = tuple(output.name for output in self._session.get_outputs())

    def __call__(self, feed: Mapping[str, Array]) -> dict[str, Any]:
        """Run one feed.

        Raises:
            RequantError: The runtime refuses the feed.
        """
        return run_session(self._session, self.outputs, feed, self._name)

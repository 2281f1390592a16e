"""A session as a function from a feed to named outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...calibration.session import Array, ModelSource, describe, open_session, run_session

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


class Runner:
    """A loaded model that is called with a feed and returns its outputs by name."""

    def __init__(self, model: ModelSource, *, threads: int = 0, lean: bool = False) -> None:
        """Load `model`; a lean session is for a handful of runs of a large one (`open_session`).

        Raises:
            RequantError: The runtime cannot load it.
        """
        self._use(open_session(model, threads=threads, lean=lean), describe(model))

    @classmethod
    def over(cls, session: InferenceSession, name: str) -> Runner:
        """Return a runner over an open session; messages begin with `name`."""
        runner = cls.__new__(cls)
        runner._use(session, name)
        return runner

    def _use(self, session: InferenceSession, name: str) -> None:
        self._session, self._name = session, name
        self.outputs = tuple(output.name for output in session.get_outputs())

    def __call__(self, feed: Mapping[str, Array]) -> dict[str, Any]:
        """Run one feed.

        Raises:
            RequantError: The runtime refuses the feed.
        """
        return run_session(self._session, self.outputs, feed, self._name)

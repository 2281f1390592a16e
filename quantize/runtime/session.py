"""A session as a function from a feed to named outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...calibration.model.session import Array, InputSpec, ModelSource, describe, input_specs, open_session, run_session

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


class Runner:
    """A loaded model that is called with a feed and returns its outputs by name."""

    def __init__(self, model: ModelSource, *, threads: int = 0, lean: bool = False, arena: bool = True) -> None:
        """Load `model`; the arguments are those of `open_session`.

        Raises:
            RequantError: The runtime cannot load it.
        """
        self._use(open_session(model, threads=threads, lean=lean, arena=arena), describe(model))

    @classmethod
    def over(cls, session: InferenceSession, name: str) -> Runner:
        """Return a runner over an open session; messages begin with `name`."""
        runner = cls.__new__(cls)
        runner._use(session, name)
        return runner

    def _use(self, session: InferenceSession, name: str) -> None:
        self._session, self._name = session, name
        self.outputs = tuple(output.name for output in session.get_outputs())

    @property
    def session(self) -> InferenceSession:
        """The session."""
        return self._session

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """The required inputs.

        Raises:
            RequantError: An input is no tensor, or NumPy lacks its type.
        """
        return input_specs(self._session)

    def __call__(self, feed: Mapping[str, Array]) -> dict[str, Any]:
        """Run one feed.

        Raises:
            RequantError: The runtime refuses the feed.
        """
        return run_session(self._session, self.outputs, feed, self._name)

"""Run a model over the steps of sequences with its own state, so that its errors accumulate as in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ... import RequantError
from ...calibration.data.samples import Sample, Step
from ...calibration.data.sequences import next_state
from ...calibration.model.session import Array


class OwnState:
    """The state that a model has computed itself.

    The samples hold the state of the float model. It is replaced by the own state where the sample before was the step
    before. At the beginning of a sequence, and where steps are left out, the state of the sample stays.
    """

    def __init__(self) -> None:
        self._step: Step | None = None
        self._state: dict[str, Array] = {}

    def run(self, model: Callable[[Mapping[str, Array]], Mapping[str, Any]], sample: Sample) -> Mapping[str, Any]:
        """Run a model on a sample and return its outputs. Samples of a sequence must come in order.

        Raises:
            RequantError: The runtime refuses the feed; the message names the sample.
        """
        try:
            return self._outputs(model, sample)
        except RequantError as error:
            raise RequantError(f"{sample.where}: {error}") from error

    def _outputs(self, model: Callable[[Mapping[str, Array]], Mapping[str, Any]], sample: Sample) -> Mapping[str, Any]:
        """Run a model on a sample, as `run` does."""
        step = sample.step
        if step is None:
            return model(sample.feed)
        before = self._step
        follows = before is not None and (before.sequence, before.index + 1) == (step.sequence, step.index)
        feed = sample.feed | self._state if follows else sample.feed
        outputs = model(feed)
        self._step, self._state = step, next_state(step.links, feed, outputs)
        return outputs

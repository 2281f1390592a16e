"""What is timed: feeds of several batch sizes, and of decoders the prefill of a prompt and the step of one token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from ...calibration.data.samples import Sample
from ...calibration.data.sequences import COMPUTED, Carrier, Lengths, next_state
from ...calibration.data.sources import Source
from ...calibration.model.session import Array, Feed, InputSpec
from .inputs import first_sample, items_in, repeated
from .timing import Regime

LOOKED = 64
"""The most steps of the first sequence that a prompt and a cache are taken from."""
COMPARED = 16
"""Samples among which the timed one has the middle size."""


@dataclass(frozen=True, slots=True)
class Load:
    """One run that is timed.

    Attributes:
        batch: Items per run; None where inputs have different numbers of rows. See `inputs.items_in`.
        feed: The inputs.
        regime: The regime of a decoder; None for other models.
        shapes: The shapes of the inputs whose sizes the model leaves open: ``"ids 1x32"``. Empty if there are none,
            or if only the batch axis is open and has `batch` rows.
        sample: The sample and why it is timed, if that is not the usual one; see `agreement.agreeing`.
        asked: The batch size that was asked for; with 1, the feed is a sample as it is, of any number of items.
    """

    batch: int | None
    feed: Feed
    regime: Regime | None = None
    shapes: str = ""
    sample: str = ""
    asked: int = 1


def loads_of(source: Source, batches: Sequence[int]) -> tuple[Load, ...]:
    """Return the runs to time: a sample at each batch size, or both regimes of a decoder at each batch size.

    The sample is the first one. If the model leaves sizes open, it is that of the middle size among the first samples.

    Raises:
        RequantError: There is no sample, or the model's inputs have no free batch axis.
    """
    regimes = None if source.carrier is None else _regimes(source, source.carrier)
    if regimes is not None:
        return tuple(
            load_of(source, feed if batch == 1 else repeated(source, feed, batch), batch, regime)
            for batch in batches
            for regime, feed in regimes
        )
    found = _of_middle_size(source)
    if found is None:
        feeds: list[Feed] = [first_sample(source, batch).feed for batch in batches]
    else:
        feeds = [found if batch == 1 else repeated(source, found, batch) for batch in batches]
    loads = (load_of(source, feed, batch) for batch, feed in zip(batches, feeds, strict=True))
    return tuple(replace(load, shapes=shapes_text(source, load.feed, load.batch)) for load in loads)


def load_of(source: Source, feed: Feed, asked: int, regime: Regime | None = None) -> Load:
    """Return a feed as a load with its number of items.

    Args:
        source: The data, with the inputs of the model.
        feed: The inputs; with `asked` above 1, each has as many rows.
        asked: The batch size that was asked for.
        regime: The regime of a decoder; None for other models.
    """
    states = {link.input for link in source.links}
    return Load(asked if asked > 1 else items_in(source.inputs, feed, states), feed, regime, asked=asked)


def _of_middle_size(source: Source) -> Feed | None:
    """Return the sample of the middle size among the first ones; None if the sizes are fixed or a state is carried."""
    if source.links or not any(map(_is_open, source.inputs)):
        return None
    samples = by_size(source)
    return samples[(len(samples) - 1) // 2].feed if samples else None


def by_size(source: Source) -> list[Sample]:
    """Return the first samples of a source, at most `COMPARED`, the smallest one first."""
    return sorted(islice(source, COMPARED), key=lambda each: sum(array.size for array in each.feed.values()))


def _is_open(spec: InputSpec) -> bool:
    """Whether a model leaves the length of an axis behind the first one open."""
    return not all(isinstance(axis, int) for axis in spec.shape[1:])


def shapes_text(source: Source, feed: Feed, batch: int | None) -> str:
    """Return the names and shapes of the inputs whose sizes the model leaves open.

    An input of which only the first axis is open is left out if that axis has the length of the batch.
    """
    found = [
        spec.name
        for spec in source.inputs
        if spec.name in feed and (_is_open(spec) or _has_other_rows(spec, feed[spec.name], batch))
    ]
    return ", ".join(f"{name} {'x'.join(map(str, feed[name].shape))}" for name in found)


def _has_other_rows(spec: InputSpec, array: Array, batch: int | None) -> bool:
    """Whether the first axis of an input is open, and has another length than the batch."""
    return bool(spec.shape) and not isinstance(spec.shape[0], int) and len(array) != batch


def _regimes(source: Source, carrier: Carrier) -> list[tuple[Regime, Feed]] | None:
    """Return the feeds of a prompt with an empty cache, and of one token with a cache; None if there are no tokens.

    The prompt is the first sample, or the tokens of the first sequence if its samples have one token each. The step is
    the last sample of one token in the first sequence; without one, the last token of the prompt comes again behind
    the prompt.
    """
    if not carrier.grows:
        return None
    known = ((step.feed, carrier.lengths(step.feed)) for step in _first_sequence(source))
    steps: list[tuple[Feed, Lengths]] = [(feed, at) for feed, at in known if at is not None]
    if not steps:
        return None
    prompt, before = steps[0]
    if before.new == 1:
        single = [feed for feed, at in steps if at.new == 1]
        prompt, before = _joined(carrier, single), replace(before, new=len(single))
    if before.new < 2:
        return None
    behind = [feed for feed, at in steps if at.new == 1 and at.past > 0]
    step = behind[-1] if behind else _behind(carrier, prompt, before)
    return [(Regime("prefill", before.new, before.past), prompt), (Regime("step", 1, carrier.past(step)), step)]


def _first_sequence(source: Source) -> Iterator[Sample]:
    """Yield the first steps of the first sequence."""
    first = None
    for sample in islice(source, LOOKED):
        first = first or sample.step
        if first is None or sample.step is None or sample.step.sequence != first.sequence:
            return
        yield sample


def _tokens(carrier: Carrier, feed: Feed, new: int) -> dict[str, Array]:
    """Return the inputs with one entry for each new token on their second axis."""
    state = {link.input for link in carrier.links}
    return {
        name: array
        for name, array in feed.items()
        if name not in state | COMPUTED.keys() and array.ndim > 1 and array.shape[1] == new
    }


def _joined(carrier: Carrier, feeds: Sequence[Feed]) -> Feed:
    """Return one feed with the tokens of several steps, and the state of the first."""
    parts = [_tokens(carrier, feed, 1) for feed in feeds]
    joined = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    return _computed(carrier, {**feeds[0], **joined})


def _behind(carrier: Carrier, prompt: Feed, before: Lengths) -> Feed:
    """Return the feed of the last token of a prompt once more, with the state after the prompt."""
    outputs = carrier.run([link.output for link in carrier.links], prompt, "the prompt")
    last = {name: array[:, -1:] for name, array in _tokens(carrier, prompt, before.new).items()}
    return _computed(carrier, {**prompt, **last, **next_state(carrier.links, prompt, outputs)})


def _computed(carrier: Carrier, feed: Feed) -> Feed:
    """Return a feed whose computed inputs fit its other inputs."""
    return carrier.completed({name: array for name, array in feed.items() if name not in COMPUTED}, "the prompt")

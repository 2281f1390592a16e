"""Sequences of samples: the inputs that hold a state get it from the run of the model on the sample before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from ..model.session import Array, Feed, InputSpec
from ..model.state import Link
from .samples import SEQUENCE, DataError, Picked, Rows, Sample, Step, checked

ROOM = 2**28
"""Bytes of states to keep. Other states are computed again when the samples are read again."""
STRETCH = 32
"""The fewest steps of a sequence to pick, if there are as many."""
AHEAD, LEAST_AHEAD = 4, 1024
"""If the number of samples is unknown, n of them are picked among the first `AHEAD` * n, at least `LEAST_AHEAD`."""

Run = Callable[[Sequence[str], Feed, str], Mapping[str, Array]]
"""Runs the float model: the names of the outputs, the inputs, and the beginning of an error message."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The axes of a decoder at one step.

    Attributes:
        batch: The number of items.
        past: The number of tokens before this step.
        new: The number of tokens of this step.
    """

    batch: int
    past: int
    new: int


def _places(lengths: Lengths, shape: Sequence[object]) -> Array:
    """Return the positions of the new tokens, one row per item, or one row for an input of rank 1."""
    places = np.arange(lengths.past, lengths.past + lengths.new)
    return places if len(shape) == 1 else np.tile(places, (lengths.batch, 1))


COMPUTED: Mapping[str, Callable[[Lengths, Sequence[object]], Array]] = {
    "attention_mask": lambda at, _: np.ones((at.batch, at.past + at.new)),
    "position_ids": _places,
    "cache_position": _places,
    "use_cache_branch": lambda at, _: np.array([at.past > 0]),
}
"""Inputs of decoders that follow from the lengths, as exporters name them; data may lack them."""
MASK, TOKENS = "attention_mask", ("input_ids", "inputs_embeds", "tokens")
"""The mask over all tokens, and the inputs whose second axis holds the new tokens."""


def reader_inputs(inputs: Sequence[InputSpec], links: Sequence[Link], outputs: Sequence[InputSpec]) -> list[InputSpec]:
    """Return the inputs that data may give: those that are carried or computed are optional, and there is a marker.

    Args:
        inputs: The model's inputs.
        links: Its state.
        outputs: Its outputs.
    """
    carried = {link.input for link in links}
    if growing_axes(links, inputs, outputs):
        carried |= COMPUTED.keys()
    found = [replace(spec, optional=spec.name in carried) for spec in inputs]
    if all(spec.name != SEQUENCE for spec in inputs):
        found.append(InputSpec(SEQUENCE, np.dtype(np.int64), (), optional=True))
    return found


def growing_axes(links: Sequence[Link], inputs: Sequence[InputSpec], outputs: Sequence[InputSpec]) -> Mapping[str, int]:
    """Return, by input, the axis along which a state grows, such as the tokens of a KV cache.

    A state that keeps its shape has no entry.
    """
    before, after = ({spec.name: spec.shape for spec in specs} for specs in (inputs, outputs))
    axes = {link.input: _growing_axis(before[link.input], after[link.output]) for link in links}
    return {name: axis for name, axis in axes.items() if axis is not None}


def _growing_axis(before: Sequence[int | str | None], after: Sequence[int | str | None]) -> int | None:
    """Return the axis along which a state grows; None if it keeps its shape.

    It is the only free axis behind the first one whose symbol differs between output and input. Without symbols, it is
    the third of four axes, the order of exporters: (batch, heads, tokens, width).
    """
    free = [axis for axis, length in enumerate(before) if axis and not isinstance(length, int)]
    known = len(after) == len(before)
    grown = [axis for axis in free if before[axis] is not None and (not known or after[axis] != before[axis])]
    if len(grown) == 1:
        return grown[0]
    return 2 if len(before) == 4 and 2 in free and before[2] is None else None


def gives_state(rows: Rows, links: Sequence[Link]) -> bool:
    """Return whether the first two samples give every state."""
    names = {link.input for link in links}
    return all(names <= sample.feed.keys() for sample in islice(rows.read(None), 2))


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a position: its place in a sequence, the number that marks the sequence, and its state."""

    step: Step
    marker: int | None
    state: Mapping[str, Array]


@dataclass(slots=True)
class Carrier:
    """Reads samples in order, and fills the inputs of the state from the run on the sample before.

    A sequence begins at the first sample, at a sample that gives a state itself, where the number ``sequence`` changes,
    and at a sample whose attention mask covers its own tokens alone. Its first state is what the sample gives, and
    else zeros, with length 0 along an axis that grows.

    Attributes:
        rows: The samples as the data have them.
        inputs: The model's inputs.
        outputs: The model's outputs.
        links: The state.
        run: Runs the float model.
        room: Bytes of states that may still be kept.
    """

    rows: Rows
    inputs: tuple[InputSpec, ...]
    outputs: tuple[InputSpec, ...]
    links: tuple[Link, ...]
    run: Run
    room: int = field(default_factory=lambda: ROOM)
    _accepted: Sequence[InputSpec] = field(init=False)
    _grown: Mapping[str, int] = field(init=False)
    _known: dict[int, _Known] = field(default_factory=dict, init=False)
    _starts: list[int] = field(default_factory=list, init=False)
    _count: int = field(default=0, init=False)
    _read: float = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._accepted = reader_inputs(self.inputs, self.links, self.outputs)
        self._grown = growing_axes(self.links, self.inputs, self.outputs)

    def carried(self) -> Rows:
        """Return the samples with their state."""
        return replace(self.rows, read=self.read, starts=self.starts, random=False)

    def starts(self, limit: int | None) -> tuple[list[int], int]:
        """Return the positions where sequences begin, and the number of samples that were read; the model is not run.

        Args:
            limit: The number of samples to read at most; None for all.
        """
        if self._read < (math.inf if limit is None else limit):
            found, count, last = list[int](), 0, None
            for position, raw in enumerate(islice(self._raw(None), limit)):
                marker, count = _marker(raw), position + 1
                if position == 0 or marker != last or self._begins(raw):
                    found.append(position)
                last = marker
            self._starts, self._read = found, math.inf if limit is None or count < limit else count
            self._count = count
        count = self._count if limit is None else min(limit, self._count)
        return [position for position in self._starts if position < count], count

    def read(self, picked: Picked) -> Iterator[Sample]:
        """Yield the samples at the picked positions; those before them in a sequence are run too."""
        positions = None if picked is None else self._needed(picked)
        wanted = None if picked is None else frozenset(picked)
        before: tuple[int, Sample, int | None] | None = None
        held: Sample | None = None
        for index, raw in enumerate(self._raw(positions)):
            position = index if positions is None else positions[index]
            known = self._known.get(position) or self._follow(raw, position, before)
            sample = self._filled(raw, known)
            before = (position, sample, known.marker)
            if held is not None:
                yield _followed(held, sample)
            held = sample if wanted is None or position in wanted else None
        if held is not None:
            yield held

    def _raw(self, positions: Picked) -> Iterator[Sample]:
        """Yield samples as the data have them, checked."""
        return (checked(sample, self._accepted) for sample in self.rows.read(positions))

    def _needed(self, picked: Sequence[int]) -> list[int]:
        """Return the positions to read: the picked ones, and those since the last one whose state is kept."""
        needed, begins = set[int](), frozenset(self._starts)
        for position in picked:
            first = position
            while first > 0 and first not in self._known and first not in begins and first not in needed:
                first -= 1
            needed.update(range(first, position + 1))
        return sorted(needed)

    def _follow(self, raw: Sample, position: int, before: tuple[int, Sample, int | None] | None) -> _Known:
        """Return the place and the state of a sample, and keep them while there is room."""
        marker = _marker(raw)
        given = self._given(raw)
        state: Mapping[str, Array]
        if before is None or position != before[0] + 1 or marker != before[2] or self._begins(raw):
            state = {name: self._zeros(name, raw) for name in self._names if name not in given}
            known = _Known(Step(position, 0, self.links), marker, state)
        else:
            _, sample, _ = before
            assert sample.step is not None
            step = replace(sample.step, index=sample.step.index + 1)
            known = _Known(step, marker, next_state(self.links, sample.feed, self._outputs(sample)))
        size = sum(array.nbytes for array in known.state.values())
        if size <= self.room:
            self.room -= size
            self._known[position] = known
        return known

    def _outputs(self, sample: Sample) -> Mapping[str, Array]:
        """Run the model on a sample and return the state after it."""
        return self.run([link.output for link in self.links], sample.feed, sample.where)

    def _filled(self, raw: Sample, known: _Known) -> Sample:
        """Return a sample with its state, and with the inputs that follow from its lengths."""
        feed = {name: array for name, array in raw.feed.items() if name != SEQUENCE or self._has(SEQUENCE)}
        return replace(raw, feed=self.completed({**feed, **known.state}, raw.where), step=known.step)

    def completed(self, feed: Feed, where: str) -> dict[str, Array]:
        """Return a feed that has its state with the inputs that it lacks and that follow from its lengths.

        Args:
            feed: The inputs.
            where: The origin, for messages.

        Raises:
            DataError: Inputs are missing, and the number of new tokens is unknown.
        """
        missing = [spec for spec in self.inputs if spec.name in COMPUTED and spec.name not in feed]
        if not missing:
            return dict(feed)
        lengths = self.lengths(feed)
        if lengths is None:
            names = ", ".join(spec.name for spec in self.inputs if spec.name in COMPUTED)
            raise DataError(f"{where}: give {names}: they follow only from one of {', '.join(TOKENS)}")
        return {**feed, **{spec.name: COMPUTED[spec.name](lengths, spec.shape).astype(spec.dtype) for spec in missing}}

    @property
    def _names(self) -> list[str]:
        """The inputs of the state."""
        return [link.input for link in self.links]

    def _has(self, name: str) -> bool:
        """Return whether the model has an input of this name."""
        return any(spec.name == name for spec in self.inputs)

    def _given(self, raw: Sample) -> list[str]:
        """Return the inputs of the state that a sample gives."""
        return [name for name in self._names if name in raw.feed]

    def _begins(self, raw: Sample) -> bool:
        """Return whether a sample by itself begins a sequence: it gives a state, or its mask covers its own tokens."""
        mask, new = raw.feed.get(MASK), _new_tokens(raw.feed)
        return bool(self._given(raw)) or (mask is not None and new is not None and mask.shape[-1] == new)

    @property
    def grows(self) -> bool:
        """Whether a state grows from step to step."""
        return bool(self._grown)

    def lengths(self, feed: Feed) -> Lengths | None:
        """Return the lengths of a complete step of a decoder; None if the number of new tokens is unknown."""
        new = _new_tokens(feed)
        return None if new is None else Lengths(_batch(feed), self.past(feed), new)

    def past(self, feed: Feed) -> int:
        """Return the number of tokens in the cache of a complete step; 0 for a state that keeps its shape."""
        return max((feed[name].shape[axis] for name, axis in self._grown.items()), default=0)

    def _zeros(self, name: str, raw: Sample) -> Array:
        """Return the first state: zeros, with length 0 along an axis that grows."""
        spec = next(spec for spec in self.inputs if spec.name == name)
        bound: dict[str | None, int] = {
            symbol: length
            for other in self.inputs
            if other.name in raw.feed
            for symbol, length in zip(other.shape, raw.feed[other.name].shape, strict=True)
            if isinstance(symbol, str)
        }
        batch = _batch(raw.feed)
        shape = [axis if isinstance(axis, int) else bound.get(axis, batch) for axis in spec.shape]
        if name in self._grown:
            shape[self._grown[name]] = 0
        return np.zeros(shape, np.dtype("U1") if spec.dtype.kind == "U" else spec.dtype)


def next_state(links: Sequence[Link], feed: Feed, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs of the next step that hold the state.

    An output without values leaves the state as it is: merged decoders return the keys of the encoder only once.
    """
    after = {link.input: outputs[link.output] for link in links}
    return {name: array if array.size or not feed[name].size else feed[name] for name, array in after.items()}


def _marker(raw: Sample) -> int | None:
    """Return the number that marks the sequence of a sample; None without one."""
    array = raw.feed.get(SEQUENCE)
    return None if array is None or array.ndim else int(array)


def _batch(feed: Feed) -> int:
    """Return the number of items of a feed."""
    return next((len(array) for array in feed.values() if array.ndim), 1)


def _followed(sample: Sample, after: Sample) -> Sample:
    """Return a sample with the first tokens of the sample after it, if that is the next step."""
    one, two = sample.step, after.step
    assert one is not None
    assert two is not None
    tokens = _tokens(after.feed)
    if tokens is None or tokens.ndim != 2 or (one.sequence, one.index + 1) != (two.sequence, two.index):
        return sample
    return replace(sample, step=replace(one, following=tokens[:, :1]))


def _new_tokens(feed: Feed) -> int | None:
    """Return the number of tokens of a feed of a decoder; None if it has none."""
    tokens = _tokens(feed)
    return None if tokens is None else tokens.shape[1]


def _tokens(feed: Feed) -> Array | None:
    """Return the tokens or embeddings of a feed of a decoder (N, tokens, ...); None if it has none."""
    return next((feed[name] for name in TOKENS if name in feed and feed[name].ndim > 1), None)


def read_ahead(count: int) -> int:
    """Return among how many first samples `count` samples are picked if the number of all samples is unknown."""
    return max(AHEAD * count, LEAST_AHEAD)


def stretches(starts: Sequence[int], positions: Sequence[int], count: int) -> list[int]:
    """Pick positions so that most are behind each other in sequences: the first steps of evenly picked sequences.

    As few sequences are picked as have `count` steps together, but as many as give `STRETCH` steps each.

    >>> picked = stretches([0, 100, 200, 300], range(400), 68)
    >>> picked[0], picked[33], picked[34], picked[67]
    (0, 33, 200, 233)

    Args:
        starts: Where sequences begin, ascending.
        positions: The positions to pick from, ascending.
        count: The number of positions, at least 1.
    """
    if count >= len(positions):
        return list(positions)
    begins, parts = frozenset(starts), list[list[int]]()
    for position in positions:
        if not parts or position in begins or position != parts[-1][-1] + 1:
            parts.append([])
        parts[-1].append(position)
    for number in range(max(1, min(len(parts), count // STRETCH)), len(parts) + 1):
        chosen = [parts[index * len(parts) // number] for index in range(number)]
        if sum(map(len, chosen)) >= count:
            break
    length = next(n for n in range(1, count + 1) if sum(min(n, len(part)) for part in chosen) >= count)
    return [position for part in chosen for position in part[:length]][:count]

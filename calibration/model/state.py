"""State: outputs of a model that are inputs of its next run, such as KV caches or the hidden state of a GRU."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ... import RequantError, UnknownNameError
from .session import InputSpec, type_name

NONE = "none"
"""The value of ``--state`` for a model whose runs do not depend on each other."""

AFTER = r"present_key_values|present|new|next|updated|output|out|current|cur"
BEFORE = r"past_key_values|past|previous|prev|last|old|input|in|initial|init"
MARKS: Mapping[str, tuple[re.Pattern[str], ...]] = {
    "output": (
        re.compile(rf"(?:{AFTER})[._/-]+(?P<stem>.+)"),
        re.compile(rf"(?P<stem>.+?)[._/-]+(?:{AFTER}|n|o)"),
        re.compile(r"(?P<stem>[a-z]\d*|states?|hidden|cell|memory|cache)[no]"),
        re.compile(rf"(?P<stem>.+?)[._/-]+(?:{AFTER})(?P<number>[._/-]+\d.*)"),
        re.compile(r"present(?P<stem>)"),
    ),
    "input": (
        re.compile(rf"(?:{BEFORE})[._/-]+(?P<stem>.+)"),
        re.compile(rf"(?P<stem>.+?)[._/-]+(?:{BEFORE}|0|i)"),
        re.compile(r"(?P<stem>[a-z]\d*|states?|hidden|cell|memory|cache)[0i]"),
        re.compile(rf"(?P<stem>.+?)[._/-]+(?:{BEFORE})(?P<number>[._/-]+\d.*)"),
        re.compile(r"past(?P<stem>)"),
    ),
}
"""How names say that a tensor is the state after a run, or before it. What is left of the name is the stem."""

STATE_WORD = re.compile(r"(?:^|.*[._/-])(?:h|c|hx|cx)\d*(?:[._/-].*|$)|.*(?:state|hidden|cell|cache|memory|key|value)")
"""Stems that name a state. Other stems, such as ``x`` in ``x_in`` and ``x_out``, may name the main input."""


@dataclass(frozen=True, slots=True)
class Link:
    """An output that feeds an input of the next run.

    Attributes:
        output: The name of the output.
        input: The name of the input.
    """

    output: str
    input: str

    def __str__(self) -> str:
        """Return ``"hn feeds h0"``."""
        return f"{self.output} feeds {self.input}"


def find_links(
    asked: Collection[str] | None, inputs: Sequence[InputSpec], outputs: Sequence[InputSpec]
) -> tuple[Link, ...]:
    """Return the links that the user asks for, or else those that names, types and shapes show.

    Args:
        asked: Texts ``OUT=IN``, also several in one text with commas; ``none`` for a model without state; None to
            recognise the links.
        inputs: The model's inputs.
        outputs: The model's outputs.

    Raises:
        UnknownNameError: The model has no such output or input.
        RequantError: A text has another form, an input has two sources, or types or shapes do not fit.
    """
    if asked is None:
        return recognised(inputs, outputs)
    texts = [part.strip() for text in asked for part in text.split(",") if part.strip()]
    if not texts:
        raise RequantError(f"the state is an empty text; write OUT=IN, or {NONE}")
    if texts == [NONE]:
        return ()
    links = tuple(_parsed(text, inputs, outputs) for text in texts)
    known = ({spec.name: spec for spec in outputs}, {spec.name: spec for spec in inputs})
    for link in links:
        _check(link, *known)
    repeated = next((link.input for link in links if sum(other.input == link.input for other in links) > 1), None)
    if repeated is not None:
        raise RequantError(f"state: input {repeated!r} is fed by more than one output")
    return links


def summary(links: Sequence[Link]) -> list[str]:
    """Return the links as text; links that differ in a number alone are one.

    >>> summary([Link("hn", "h0"), *(Link(f"present.{i}.key", f"past_key_values.{i}.key") for i in range(8))])
    ['hn feeds h0', 'present.*.key feeds past_key_values.*.key (8 of them)']
    """
    groups: dict[str, list[Link]] = {}
    for link in links:
        groups.setdefault(re.sub(r"[0-9]+", "*", str(link)), []).append(link)
    return [str(group[0]) if len(group) == 1 else f"{text} ({len(group)} of them)" for text, group in groups.items()]


def with_feeders(inputs: Sequence[InputSpec], outputs: Sequence[InputSpec]) -> list[InputSpec]:
    """Return inputs with the outputs that may feed them, by type and shape."""
    return [replace(spec, fed_by=tuple(each.name for each in outputs if fits(each, spec))) for spec in inputs]


def _parsed(text: str, inputs: Sequence[InputSpec], outputs: Sequence[InputSpec]) -> Link:
    """Return the link of a text ``OUT=IN``; the error for another text has the only possible pair with a name in it."""
    output, equals, name = (part.strip() for part in text.rpartition("="))
    if output and name:
        return Link(output, name)
    given = text.replace(equals, "").strip()
    pairs = [(feeder, spec.name) for spec in with_feeders(inputs, outputs) for feeder in spec.fed_by or ()]
    fitting = ["=".join(pair) for pair in pairs if given in pair]
    form = fitting[0] if len(fitting) == 1 else "OUT=IN, for instance hn=h0"
    raise RequantError(f"state: {text!r} is no pair; write {form}, or {NONE}")


def _check(link: Link, outputs: Mapping[str, InputSpec], inputs: Mapping[str, InputSpec]) -> None:
    """Refuse a link whose names are unknown, or whose types or shapes do not fit.

    Raises:
        UnknownNameError: The model has no such output or input.
        RequantError: Types or shapes do not fit.
    """
    for noun, name, known in (("output", link.output, outputs), ("input", link.input, inputs)):
        if name not in known:
            raise UnknownNameError(noun, name, known)
    before, after = inputs[link.input], outputs[link.output]
    if not fits(after, before):
        wrong = f"state: output {link.output!r} is {after}, but input {link.input!r} is {before}"
        fitting = [name for name, spec in outputs.items() if fits(spec, before)]
        raise RequantError(wrong + (f"; only {fitting[0]}={link.input} fits" if len(fitting) == 1 else ""))


def fits(after: InputSpec, before: InputSpec) -> bool:
    """Return whether an output can be an input of the next run: same type and rank, and fixed axes are equal.

    The runtime reports an output without a known shape as a scalar; it fits any input.
    """
    if type_name(after.dtype) != type_name(before.dtype):
        return False
    if not after.shape:
        return True
    return len(after.shape) == len(before.shape) and all(
        not (isinstance(one, int) and isinstance(two, int)) or one == two
        for one, two in zip(after.shape, before.shape, strict=True)
    )


def recognised(inputs: Sequence[InputSpec], outputs: Sequence[InputSpec]) -> tuple[Link, ...]:
    """Return the links that follow from names, types and shapes, in the order of the inputs.

    The names of an output and of an input have the same stem: ``present.0.key`` and ``past_key_values.0.key``, ``hn``
    and ``h0`` or ``h``, ``stateN`` and ``state``, ``new_x`` and ``x``, ``x_out_0`` and ``x_in_0``. A pair counts only
    if neither of the two fits another tensor. At least one input and one output must be left for the data: if there are
    none, only pairs whose stem names a state count, and if there are still none, no pair.

    >>> import numpy as np
    >>> def spec(name, *shape): return InputSpec(name, np.dtype(np.float32), shape)
    >>> [str(link) for link in recognised([spec("x", 1, 8), spec("h0", 1, 1, 4)], [spec("y", 1), spec("hn", 1, 1, 4)])]
    ['hn feeds h0']
    """
    pairs = [(Link(after.name, before.name), stem) for before in inputs for after, stem in _fitting(before, outputs)]
    alone = [
        (link, stem)
        for link, stem in pairs
        if sum(other.input == link.input or other.output == link.output for other, _ in pairs) == 1
    ]
    named = [(link, stem) for link, stem in alone if STATE_WORD.fullmatch(stem) or not stem or stem[0].isdigit()]
    for chosen in (alone, named):
        if len(chosen) < min(len(inputs), len(outputs)):
            return tuple(link for link, _ in chosen)
    return ()


def possible(inputs: Sequence[InputSpec], outputs: Sequence[InputSpec]) -> tuple[Link, ...]:
    """Return the links that shapes and types alone suggest; they are for a hint, and never carried.

    All axes of the input are fixed, and only the first one of the output, the batch, may be open. Neither of the two
    fits another tensor. The first input and the first output are left to the data: an image-to-image model has a pair
    of one shape there. A single number, such as a rate, is no state.

    >>> import numpy as np
    >>> def spec(name, *shape): return InputSpec(name, np.dtype(np.float32), shape)
    >>> frames = spec("x", 1, 1, 257), spec("input_3", 1, 2, 128, 2)
    >>> [str(link) for link in possible(frames, [spec("y", 1, 1, 257), spec("stack", "N", 2, 128, 2)])]
    ['stack feeds input_3']
    """
    pairs = [
        Link(after.name, before.name)
        for before in inputs
        if len(fixed := [axis for axis in before.shape if isinstance(axis, int)]) == len(before.shape)
        if math.prod(fixed) > 1
        for after in outputs
        if after.shape and all(isinstance(axis, int) for axis in after.shape[1:]) and fits(after, before)
    ]
    first = {each.name for each in inputs[:1]}, {each.name for each in outputs[:1]}
    return tuple(
        link
        for link in pairs
        if link.input not in first[0] and link.output not in first[1]
        if sum(other.input == link.input or other.output == link.output for other in pairs) == 1
    )


def hint(links: Sequence[Link]) -> str:
    """Return the line that proposes `possible` links.

    >>> hint([Link("stack", "input_3")])
    "output 'stack' has the shape of input 'input_3': if it feeds the next run, say --state stack=input_3"
    >>> hint([Link("a", "b"), Link("c", "d")])
    "outputs 'a', 'c' have the shapes of inputs 'b', 'd': if they feed the next run, say --state a=b,c=d"
    """
    outputs, inputs = (", ".join(repr(getattr(link, side)) for link in links) for side in ("output", "input"))
    asked = ",".join(f"{link.output}={link.input}" for link in links)
    if len(links) == 1:
        return f"output {outputs} has the shape of input {inputs}: if it feeds the next run, say --state {asked}"
    return f"outputs {outputs} have the shapes of inputs {inputs}: if they feed the next run, say --state {asked}"


def _fitting(before: InputSpec, outputs: Sequence[InputSpec]) -> Iterator[tuple[InputSpec, str]]:
    """Yield the outputs that may feed an input, with the stem of both names."""
    own, marked = before.name.lower(), _stems(before.name, "input")
    for after in outputs:
        name, stems = after.name.lower(), _stems(after.name, "output")
        common = (stems & marked) | (stems & {own}) | (marked & {name})
        if common and fits(after, before):
            yield after, min(common, key=len)


def _stems(name: str, side: str) -> set[str]:
    """Return what is left of a name without a mark of its side."""
    matches = (pattern.fullmatch(name.lower()) for pattern in MARKS[side])
    return {match["stem"] + match.groupdict().get("number", "") for match in matches if match}
